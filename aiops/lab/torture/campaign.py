"""Campaigns that kill workers, or kill or end servers that keep their state."""

from __future__ import annotations

import shutil
import tempfile
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from aiops.lab.torture.plan import (
    PROCESS_VARIANTS,
    TrialPlan,
    draw_endings,
    draw_servers,
    draw_workers,
)
from aiops.lab.torture.server_group import RunServer
from aiops.lab.torture.spawner import Spawner, run_server
from aiops.lab.torture.trial import Trial, TrialResult
from aiops.lab.torture.trial_series import TrialSeries

DRAW: dict[str, Callable[[int, tuple[str, ...]], TrialPlan]] = {
    "workers": draw_workers,
    "servers": draw_servers,
    "endings": draw_endings,
}
"""What is killed, or how it ends, and the function that draws a plan."""

_KEPT = 20  # failed trials whose folders are kept


@dataclass(slots=True)
class Campaign(TrialSeries[TrialResult, Spawner]):
    """Trials until enough processes have been killed, or the time is over.

    ``what``: ``workers`` or ``servers``, the processes that are killed and counted; ``endings``:
    servers that are asked to end.

    Attributes
    ----------
    folder
        Where trials are kept that failed; None: a temporary folder.
    run_server
        Runs a server.
    """

    names: tuple[str, ...] = tuple(PROCESS_VARIANTS)
    folder: Path | None = None
    run_server: RunServer = run_server

    @property
    def kills(self) -> int:
        """The processes killed so far."""
        return sum(result.kills for result in self.results)

    @property
    def counted(self) -> int:
        """The processes killed so far, in the earlier runs too."""
        return self.kills + int(self.earlier.get("kills", 0))

    @property
    def variants(self) -> tuple[str, ...]:
        """All variants that there are to choose from."""
        return tuple(PROCESS_VARIANTS)

    @property
    def progress(self) -> str:
        """A few words about what is done so far."""
        done = "servers ended" if self.what == "endings" else f"{self.what} killed"
        return f"{self.counted:,} {done}, {len(self.failures)} failures"

    def run(self) -> None:
        """Run the trials."""
        if self.folder is not None:
            self.folder.mkdir(parents=True, exist_ok=True)
        TrialSeries.run(self)

    def helper(self) -> Spawner:
        """Return the process that forks those of a job."""
        spawner = Spawner()
        try:
            spawner.rehearse()
        except BaseException:
            spawner.close()
            raise
        return spawner

    def try_seed(self, seed: int, helper: Spawner) -> TrialResult:
        """Carry out the trial of a seed; keep its files if it failed."""
        plan = DRAW[self.what](seed, self.names)
        folder = Path(tempfile.mkdtemp(prefix=f"torture-{seed}-", dir=self.folder))
        trial = Trial(plan, folder, helper, self.run_server)
        result = trial.kill_workers() if self.what == "workers" else trial.kill_servers()
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
            "second_kills": sum(_second(result.plan) for result in results),
            "cuts": sum(result.cuts for result in results),
            "acknowledged": sum(result.acknowledged for result in results),
            "told_lost": sum(result.lost for result in results),
            "uncertain": sum(result.uncertain for result in results),
            "uncertain_applied": sum(result.applied for result in results),
            "slowest_ending": round(max((r.slowest for r in results), default=0.0), 3),
            "kills_by_policy": _by(results, lambda plan: plan.variant),
            "kills_by_transport": _by(results, lambda p: "shared memory" if p.near else "TCP"),
            "kills_by_acks": _by(results, lambda plan: plan.acks or "no state"),
            "kills_by_layout": _by(results, lambda plan: plan.layout),
            "ended_at": dict(sorted(sum((r.points for r in results), Counter[str]()).items())),
        }


def _second(plan: TrialPlan) -> int:
    """Return the number of kills amid a promotion, or amid the return of the old servers."""
    return sum(moment.second is not None for moment in plan.moments)


def _by(results: list[TrialResult], key: Callable[[TrialPlan], str]) -> dict[str, int]:
    """Return the kills by a property of the plan."""
    counts: Counter[str] = Counter()
    for result in results:
        counts[key(result.plan)] += result.kills
    return dict(sorted(counts.items()))
