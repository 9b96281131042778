"""Runs what an experiment lacks, stage by stage: later runs may depend on earlier results."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from aiops.lab.experiments import execution, run_planning
from aiops.lab.experiments.experiment import Experiment, Scale
from aiops.lab.experiments.planned_run import PlannedRun, Result
from aiops.lab.experiments.run_pool import RunPool
from aiops.lab.experiments.runs import RunFolder, unique


class ProgressDisplay(Protocol):
    """The display of an experiment under way."""

    def progress(self, done: float, total: float) -> None:
        """Show that ``done`` of ``total`` units of work are done."""

    def failed(self, case: PlannedRun, why: str) -> None:
        """Show that a run has failed; the others go on."""


class ExperimentScheduler:
    """An experiment under way.

    Parameters
    ----------
    experiment, scale
        The experiment, and its size.
    folder
        The folder of the finished runs.
    screen
        The display of the progress.
    """

    def __init__(
        self, experiment: Experiment, scale: Scale, folder: RunFolder, screen: ProgressDisplay
    ) -> None:
        self.experiment, self.scale, self.folder = experiment, scale, folder
        self._screen = screen
        self._done: dict[str, float] = {}  # work done by now, by run
        self._total = 0.0

    def wanted(self) -> list[PlannedRun]:
        """Return the runs that the results so far call for."""
        return unique(self.experiment.cases(self.scale, self.folder.runs))

    def missing(self) -> list[PlannedRun]:
        """Return those of them that are neither finished nor failed."""
        runs = self.folder.runs
        return [case for case in self.wanted() if not runs.settled([case])]

    def unfinished(self) -> list[PlannedRun]:
        """Return all runs that there will be, and are not finished."""
        runs = self.folder.runs
        cases = run_planning.planned(self.experiment, self.scale, runs)
        return [case for case in cases if not runs.settled([case])]

    def run(self, jobs: int, pool: Callable[[int], RunPool] | None = None) -> None:
        """Run what is missing, in ``jobs`` processes at a time.

        Raises
        ------
        AiopsError
            When something cannot be run at all: then nothing has been.
        KeyboardInterrupt
            On Ctrl-C; finished runs are kept.
        """
        cases = self.unfinished()
        if not cases:
            return
        run_planning.check(cases)
        make = pool or (lambda size: RunPool(size, execution.carry_out))
        with make(min(jobs, len(cases))) as members:
            while missing := self.missing():
                self._total = sum(self._done.values()) + sum(
                    map(run_planning.weight, self.unfinished())
                )
                # The longest first, so that none of them is left alone at the end.
                missing.sort(key=run_planning.weight, reverse=True)
                members.run(missing, self, run_planning.memory)

    def at(self, case: PlannedRun, iterations: int) -> None:
        """Note how far a run is."""
        share = iterations / case.simulation.iterations
        self._done[case.key] = min(share, 1.0) * run_planning.weight(case)
        self._show_progress()

    def done(self, case: PlannedRun, result: Result) -> None:
        """Keep a result."""
        self.folder.put(case, result)
        self._done[case.key] = run_planning.weight(case)
        self._show_progress()

    def failed(self, case: PlannedRun, why: str) -> None:
        """Note a failure."""
        self.folder.runs.failed[case.key] = why
        self._done.pop(case.key, None)
        self._total -= run_planning.weight(case)
        self._screen.failed(case, why)

    def _show_progress(self) -> None:
        done = sum(self._done.values())
        self._screen.progress(done, max(self._total, done))
