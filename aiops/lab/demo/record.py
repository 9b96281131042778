"""The record of a demo: samples while it runs, and the summary at the end."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from aiops.common import ledger_sums
from aiops.lab import run_record
from aiops.lab.demo.settings import DemoSettings
from aiops.lab.demo.worker import Progress


@dataclass(frozen=True, kw_only=True)
class DemoSample:
    """One look at the run, by an observer that fetches the parameters and tests them.

    Attributes
    ----------
    seconds
        Since training began.
    updates
        The version of the parameters.
    loss, accuracy
        On the test set: mean negative log-likelihood in nats, and share of 1.
    mean_staleness
        Of all gradients so far, in updates.
    bytes_pushed, bytes_fetched
        What the workers sent to the server, and had from it, so far.
    rate
        Updates per second since the sample before.
    """

    seconds: float
    updates: int
    loss: float
    accuracy: float
    mean_staleness: float
    bytes_pushed: int
    bytes_fetched: int
    rate: float = 0.0


@dataclass
class DemoWorker:
    """One worker of a demo: its own progress, and its row in the server's statistics."""

    name: str
    share: int
    ready: bool = False
    ended: bool = False
    progress: Progress | None = None
    report: Mapping[str, Any] = field(default_factory=dict)

    @property
    def steps(self) -> int:
        """Mini-batches done."""
        return self.progress.steps if self.progress else 0

    @property
    def state(self) -> str:
        """Its state in a word: starting, ready, training or done."""
        if self.ended:
            return "done"
        return ("training" if self.progress else "ready") if self.ready else "starting"


class DemoRecord:
    """The whole run, as it unfolds; displays read it, `run` writes it."""

    def __init__(self, settings: DemoSettings) -> None:
        self.settings = settings
        self.phase = "starting"
        self.url = ""
        self.seconds = 0.0
        self.samples: list[DemoSample] = []
        self.report: Mapping[str, Any] = {}
        self.workers = [
            DemoWorker(f"worker-{index + 1}", settings.share(index))
            for index in range(settings.workers)
        ]

    @property
    def steps(self) -> int:
        """Mini-batches done by all workers."""
        return sum(worker.steps for worker in self.workers)

    @property
    def last(self) -> DemoSample | None:
        """The latest sample, or None when there is none yet."""
        return self.samples[-1] if self.samples else None

    def note(self, report: Mapping[str, Any], updates: int, loss: float, accuracy: float) -> None:
        """Add a sample: the server's statistics, and what a version did on the test set."""
        rows = {row["name"]: row for row in report["workers"] if row["role"] == "worker"}
        for worker in self.workers:
            worker.report = rows.get(worker.name, worker.report)
        sample = DemoSample(
            seconds=self.seconds,
            updates=updates,
            loss=loss,
            accuracy=accuracy,
            mean_staleness=report["mean_staleness"],
            bytes_pushed=sum(row["bytes_pushed"] for row in rows.values()),
            bytes_fetched=sum(row["bytes_fetched"] for row in rows.values()),
        )
        if self.last is not None and sample.seconds > self.last.seconds:
            rate = (updates - self.last.updates) / (sample.seconds - self.last.seconds)
            sample = dataclasses.replace(sample, rate=rate)
        self.report = report
        self.samples.append(sample)

    def staleness(self) -> dict[int, int]:
        """Return how many gradients had which staleness."""
        counts = self.report.get("staleness", {})
        return {int(tau): int(count) for tau, count in counts.items()}

    @property
    def ledger(self) -> Mapping[str, Any]:
        """The server's account of every byte, at the last look; empty before the first."""
        found: Mapping[str, Any] = self.report.get("ledger", {})
        return found

    def tensors(self) -> list[ledger_sums.TensorTraffic]:
        """Return each tensor's bytes, the busiest first."""
        return list(ledger_sums.by_tensor(self.ledger)) if self.ledger else []

    def summary(self, *, complete: bool, plot: str | None) -> dict[str, Any]:
        """Return the record that ``--json`` prints; what is not a number is None."""
        settings, last = self.settings, self.last
        results: dict[str, Any] = {
            "policy": settings.policy,
            "dataset": settings.dataset,
            "workers": settings.workers,
            "seed": settings.seed,
            "batch_size": settings.batch_size,
            "lr": self.report.get("settings", {}).get("lr", settings.lr),
            "complete": complete,
            "steps": self.steps,
            "seconds": round(self.seconds, 3),
            "test_accuracy": last.accuracy if last else None,
            "test_loss": last.loss if last and math.isfinite(last.loss) else None,
            "version": last.updates if last else 0,
            "updates": last.updates if last else 0,
            "updates_per_second": round(last.updates / self.seconds, 1)
            if last and self.seconds
            else 0.0,
            "mean_staleness": last.mean_staleness if last else 0.0,
            "bytes_pushed": last.bytes_pushed if last else 0,
            "bytes_fetched": last.bytes_fetched if last else 0,
            "bytes_saved": ledger_sums.saved(self.ledger) if self.ledger else 0,
            "bytes_by_tensor": {
                name: {"pushed": pushed, "fetched": fetched, "saved": saved}
                for name, pushed, fetched, saved in self.tensors()
            },
            "refused": dict(self.report.get("refused", {})),
            "kernels": self.report.get("kernels", ""),
            "plot": plot,
        }
        return run_record.record("demo", settings.policy, settings, results)
