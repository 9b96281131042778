"""A real server's numbers, as callbacks and trackers get them."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path

import numpy as np
import pytest

import aiops
from aiops.errors import UsageError
from aiops.serving import tracking
from aiops.trackers import RunMetrics
from tests.support import PATIENCE

MODEL = {"w": np.ones(8, np.float32)}


async def steps(url: str, seen: list[RunMetrics], until: int) -> None:
    """Train, and log, until so many moments were seen."""
    async with asyncio.timeout(PATIENCE):
        async with aiops.AsyncWorker(url, MODEL) as worker:
            while len(seen) < until:
                await worker.step({"w": worker.params["w"]})
                worker.log(loss=0.5)
                await asyncio.sleep(0)


async def test_a_callback_gets_what_workers_log_and_the_servers_own_numbers() -> None:
    seen: list[RunMetrics] = []
    threads = set[str]()

    def note(metrics: RunMetrics) -> None:
        seen.append(metrics)
        threads.add(threading.current_thread().name)

    async with aiops.serve(
        port=0, policy="asgd", kernels="numpy", track_every=0.01, on_metrics=note
    ) as server:
        await steps(server.url, seen, until=20)
        version = server.version
    assert seen[-1].step == version > 0
    assert [metrics.step for metrics in seen] == sorted(metrics.step for metrics in seen)
    logged = [metrics for metrics in seen if "loss" in metrics.values]
    assert logged[-1].values["loss"] == 0.5
    assert logged[0].values["server/workers"] == 1
    assert logged[-1].values["server/workers"] == 0, "what it has logged stays for a while"
    assert any(metrics.values.get("server/updates_per_second") for metrics in seen)
    assert threads == {"aiops-tracker"}


async def test_a_callback_that_fails_or_hangs_does_not_hold_the_run(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(tracking, "_END", 0.05)
    goes_on, seen = threading.Event(), list[RunMetrics]()

    def hang(metrics: RunMetrics) -> None:
        seen.append(metrics)
        if len(seen) == 1:
            raise RuntimeError("no")
        goes_on.wait(PATIENCE)

    async with aiops.serve(
        port=0, policy="asgd", kernels="numpy", track_every=0.01, on_metrics=hang
    ) as server:
        await steps(server.url, seen, until=2)
    assert "RuntimeError('no')" in caplog.text
    assert "hang has not taken all within" in caplog.text
    goes_on.set()


async def test_event_files_of_a_run(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    track = f"tensorboard:{tmp_path / 'run'}"
    async with (
        aiops.serve(port=0, policy="asgd", kernels="numpy", track=track) as server,
        aiops.AsyncWorker(server.url, MODEL) as worker,
    ):
        await worker.step({"w": worker.params["w"]})
    from tensorboard.backend.event_processing.event_file_loader import EventFileLoader

    (path,) = (tmp_path / "run").iterdir()
    events = [event for event in EventFileLoader(str(path)).Load() if event.HasField("summary")]
    assert events[0].summary.value[0].tag == "settings"
    assert events[-1].step == 1
    assert "server/gradients" in {value.tag for value in events[-1].summary.value}


async def test_a_tracker_that_is_unknown_is_told_before_the_server_starts() -> None:
    with pytest.raises(UsageError, match="no tracker 'wadb'"):
        async with aiops.serve(port=0, track=["wadb:x"]):
            raise AssertionError("it has started")


def test_what_cannot_be_called_is_told() -> None:
    with pytest.raises(UsageError, match="and list can not be called"):
        aiops.serve(port=0, on_metrics=[print])  # type: ignore[call-overload]
