"""Campaigns that kill processes: workers, or servers that keep their state."""

from __future__ import annotations

import shutil
import tempfile
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from aiops.lab.torture.plan import TrialPlan, draw_servers, draw_workers
from aiops.lab.torture.spawner import Spawner, run_server
from aiops.lab.torture.trial import RunServer, Trial, TrialResult
from aiops.lab.torture.trial_series import TrialSeries

DRAW: dict[str, Callable[[int, tuple[str, ...]], TrialPlan]] = {
    "workers": draw_workers,
    "servers": draw_servers,
}
"""What is killed, and the function that draws a plan."""

_KEPT = 20  # failed trials whose folders are kept


@dataclass(slots=True)
class Campaign(TrialSeries[TrialResult, Spawner]):
    """Trials until enough processes have been killed, or the time is over.

    ``what``: ``workers`` or ``servers``, the processes that are killed and counted.

    Attributes
    ----------
    folder
        Where trials are kept that failed; None: a temporary folder.
    run_server
        Runs a server.
    """

    folder: Path | None = None
    run_server: RunServer = run_server

    @property
    def kills(self) -> int:
        """The processes killed so far."""
        return sum(result.kills for result in self.results)

    @property
    def counted(self) -> int:
        """The processes killed so far."""
        return self.kills

    @property
    def progress(self) -> str:
        """A few words about what is done so far."""
        return f"{self.kills:,} {self.what} killed, {len(self.failures)} failures"

    def run(self) -> None:
        """Run the trials."""
        if self.folder is not None:
            self.folder.mkdir(parents=True, exist_ok=True)
        TrialSeries.run(self)

    def helper(self) -> Spawner:
        """Return the process that forks those of a job."""
        return Spawner()

    def try_seed(self, seed: int, helper: Spawner) -> TrialResult:
        """Carry out the trial of a seed; keep its files if it failed."""
        plan = DRAW[self.what](seed, self.names)
        folder = Path(tempfile.mkdtemp(prefix=f"torture-{seed}-", dir=self.folder))
        trial = Trial(plan, folder, helper, self.run_server)
        result = trial.kill_servers() if self.what == "servers" else trial.kill_workers()
        if result.wrong and len(self.failures) < _KEPT:
            result.wrong.append(f"its files are in {folder}")
        else:
            shutil.rmtree(folder, ignore_errors=True)
        return result

    def findings(self, results: list[TrialResult]) -> dict[str, Any]:
        """Return what the report says of results."""
        return {
            "kills": self.kills,
            "before_ready": sum(result.early for result in results),
            "acknowledged": sum(result.acknowledged for result in results),
            "uncertain": sum(result.uncertain for result in results),
            "uncertain_applied": sum(result.applied for result in results),
            "kills_by_policy": _by(results, lambda plan: plan.variant),
            "kills_by_transport": _by(results, lambda p: "shared memory" if p.near else "TCP"),
            "kills_by_acks": _by(results, lambda plan: plan.acks or "no state"),
        }


def _by(results: list[TrialResult], key: Callable[[TrialPlan], str]) -> dict[str, int]:
    """Return the kills by a property of the plan."""
    counts: Counter[str] = Counter()
    for result in results:
        counts[key(result.plan)] += result.kills
    return dict(sorted(counts.items()))
