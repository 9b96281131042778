"""A small experiment, and a pool that works in this process."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from aiops.errors import UsageError
from aiops.lab.experiments import execution
from aiops.lab.experiments.curves import curve
from aiops.lab.experiments.experiment import Experiment, Findings, Scale, Verdict
from aiops.lab.experiments.planned_run import OnProgress, PlannedRun, Result
from aiops.lab.experiments.run_pool import PoolWatcher, RunPool
from aiops.lab.experiments.runs import RunGroups, Runs
from aiops.lab.figures import Figure, Panel
from aiops.sim.turns.simulation import Simulation

TINY = Simulation(
    dataset="digits", hidden=4, clients=3, batch_size=2, iterations=20, samples=2, kernels="numpy"
)


@dataclass(frozen=True)
class Told:
    """Work of which the outcome is known: nothing is simulated."""

    error: float = 0.5
    fails: str = ""
    simulation: Simulation = TINY

    def __call__(self, on_progress: OnProgress) -> Result:
        on_progress(10)
        if self.fails == "sentence":
            raise UsageError("this run cannot work")
        if self.fails:
            raise ZeroDivisionError("this run is broken")
        return result(self.error)


def result(error: float, iterations: int = 20, **more: Any) -> dict[str, Any]:
    """Return what a run may come to."""
    curve = [
        {"iteration": n, "error": error, "cost": 2 * error, "pushes": n, "fetches": 3 + n // 2}
        for n in range(0, iterations + 1, max(iterations // 10, 1))
    ]
    made = {"digest": "d", "diverged": None, "seconds": 1.0, "staleness": {"1": iterations}}
    return {**made, "mean_staleness": 1.0, "curve": curve, **more}


def cases(scale: Scale, runs: Runs) -> Iterator[PlannedRun]:
    """Yield two runs, and a third once these are settled."""
    first = [
        PlannedRun("panel", name, seed, replace(scale.base, lr=lr, seed=seed))
        for name, lr in (("slow", 0.001), ("fast", 0.01))
        for seed in range(scale.seeds)
    ]
    yield from first
    if runs.settled(first):
        best = min(first, key=runs.tail)
        yield replace(best, curve="again", work=replace(scale.base, lr=0.1))


def findings(scale: Scale, groups: RunGroups) -> Findings:
    """Say what there is."""
    found = [run for group in groups.values() for run in group]
    table = [{"run": run.case.name, "error": round(run.tail(), 3)} for run in found]
    return Findings(table, [Verdict(len(found) == 3 or None, f"{len(found)} runs")])


def figure(scale: Scale, found: RunGroups) -> Figure:
    """Draw the errors."""
    lines = [curve(name, group, "error", 100) for (_panel, name), group in found.items()]
    return Figure("Small", [Panel("Learning", "iterations", "error (%)", lines, log="y")], 1)


SMALL = Experiment(
    name="small",
    title="A small experiment",
    source="The tests",
    claim="It runs.",
    quick=Scale(base=TINY, seeds=1),
    full=Scale(base=replace(TINY, iterations=40), seeds=2),
    cases=cases,
    findings=findings,
    figure=figure,
    knobs={"order": ("random", "sequential")},
)


class Here:
    """A pool without processes."""

    def __init__(self, before: Callable[[PlannedRun], None] = lambda case: None) -> None:
        self.ran: list[PlannedRun] = []
        self._before = before

    def run(self, cases: Sequence[PlannedRun], watcher: PoolWatcher, needs: Any = None) -> None:
        for case in cases:
            self._before(case)
            self.ran.append(case)
            try:
                found = execution.carry_out(case.work, lambda n, case=case: watcher.at(case, n))
            except Exception as error:
                watcher.failed(case, str(error))
            else:
                watcher.done(case, found)

    def __enter__(self) -> Here:
        return self

    def __exit__(self, *_: object) -> None:
        pass


def here(pool: Here) -> Callable[[int], RunPool]:
    """Return what makes a course use it."""
    return lambda size: pool  # type: ignore[return-value]


class Seen:
    """A screen that remembers."""

    def __init__(self) -> None:
        self.failures: list[tuple[str, str]] = []
        self.shares: list[float] = []

    def progress(self, done: float, total: float) -> None:
        self.shares.append(done / total)

    def failed(self, case: PlannedRun, why: str) -> None:
        self.failures.append((case.name, why))
