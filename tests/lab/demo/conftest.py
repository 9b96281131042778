"""A record of a demo, as if it had run."""

from __future__ import annotations

from typing import Any

import pytest

from aiops.bandwidth.byte_accounting import Ledger
from aiops.lab.demo.record import DemoRecord
from aiops.lab.demo.settings import DemoSettings
from aiops.lab.demo.worker import Progress
from aiops.model.layout import Layout
from aiops.model.parts import Part
from aiops.wire.messages import Ack, Push


def report(version: int, staleness: dict[str, int], pushed: int) -> dict[str, Any]:
    """The part of a server's statistics that a demo reads."""
    row = {"role": "worker", "bytes_pushed": pushed, "bytes_fetched": 2 * pushed, "refused": 1}
    names = ("worker-1", "worker-2")
    watcher = {**row, "role": "observer", "name": "demo", "staleness": 0}
    total = sum(staleness.values())
    return {
        "version": version,
        "settings": {"lr": 0.01, "gamma": 0.9},
        "staleness": staleness,
        "mean_staleness": sum(int(t) * n for t, n in staleness.items()) / total if total else 0.0,
        "vbar": 0.25,
        "refused": {"stale": 3},
        "wasted": 3,
        "kernels": "numpy",
        "ledger": ledger(),
        "workers": [*({**row, "name": name, "staleness": 1} for name in names), watcher],
    }


def ledger() -> dict[str, Any]:
    """A server's account of a model of one tensor, whose gradients were half held back."""
    tally = Ledger(Layout([("w", "float32", (1,))]))
    tally.asked(Push(1, 1, True, 0, (Part(0, 4, "int8", 1, 0),)))
    tally.answered(Ack(1, 1, 1, True, 0, 0.0, None, b"", (Part(0, 4, "int8", 3, 0),)))
    tally.asked(Push(2, 2, True, 0, (Part(0, 4, "raw", 4, 0),)))
    tally.answered(Ack(2, 1, 1, True, 0, 0.0, None, b""))
    return tally.report()


@pytest.fixture
def record() -> DemoRecord:
    """A run of two workers that was looked at three times, and came to its end."""
    made = DemoRecord(DemoSettings.make(workers=2, steps=200))
    made.url, made.phase = "aiops://127.0.0.1:1", "training"
    for worker in made.workers:
        worker.ready = worker.ended = True
        worker.progress = Progress(steps=100, loss=0.5, idle=0.25, recomputed=0)
    looks = [
        (0.0, 0, {}, 0, 2.5, 0.1),
        (1.0, 80, {"0": 20, "1": 60}, 1000, 0.5, 0.9),
        (2.0, 200, {"0": 50, "1": 100, "3": 50}, 4000, 0.25, 0.95),
    ]
    for seconds, version, staleness, pushed, loss, accuracy in looks:
        made.seconds = seconds
        made.note(report(version, staleness, pushed), version, loss, accuracy)
    return made
