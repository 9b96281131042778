"""The course of an experiment: what is missing is run, stage by stage, until nothing is."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Protocol

from aiops.lab.experiments import estimate, works
from aiops.lab.experiments.case import Case, Result
from aiops.lab.experiments.crew import Crew
from aiops.lab.experiments.experiment import Experiment, Scale
from aiops.lab.experiments.runs import Folder, unique


class Screen(Protocol):
    """What is seen of it meanwhile."""

    def progress(self, done: float, total: float) -> None:
        """So much of the work is done."""

    def failed(self, case: Case, why: str) -> None:
        """A run has failed; the others go on."""


class Course:
    """An experiment under way.

    Parameters
    ----------
    experiment, scale
        What is run.
    folder
        Where finished runs are kept, and found.
    screen
        Is told how far it is.
    """

    def __init__(
        self, experiment: Experiment, scale: Scale, folder: Folder, screen: Screen
    ) -> None:
        self.experiment, self.scale, self.folder = experiment, scale, folder
        self._screen = screen
        self._done: dict[str, float] = {}  # work done by now, by run
        self._total = 0.0

    def wanted(self) -> list[Case]:
        """Return the runs that are known to be wanted by now."""
        return unique(self.experiment.cases(self.scale, self.folder.runs))

    def missing(self) -> list[Case]:
        """Return those of them that are neither finished nor failed."""
        runs = self.folder.runs
        return [case for case in self.wanted() if not runs.settled([case])]

    def foreseen(self) -> list[Case]:
        """Return all runs that there will be, and are not finished."""
        runs = self.folder.runs
        cases = estimate.foreseen(self.experiment, self.scale, runs)
        return [case for case in cases if not runs.settled([case])]

    def run(self, jobs: int, crew: Callable[[int], Crew] | None = None) -> None:
        """Run what is missing, with so many processes.

        Raises
        ------
        AiopsError
            When something cannot be run at all: then nothing has been.
        KeyboardInterrupt
            On Ctrl-C; finished runs are kept.
        """
        cases = self.foreseen()
        if not cases:
            return
        estimate.check(cases)
        make = crew or (lambda size: Crew(size, works.carry_out))
        with make(min(jobs, len(cases))) as members:
            while missing := self.missing():
                self._total = sum(self._done.values()) + _weight(self.foreseen())
                # The longest first, so that none of them is left alone at the end.
                members.run(sorted(missing, key=estimate.weight, reverse=True), self, _needs)

    def at(self, case: Case, iterations: int) -> None:
        """Take note of how far a run is."""
        share = iterations / case.simulation.iterations
        self._done[case.key] = min(share, 1.0) * estimate.weight(case)
        self._tell()

    def done(self, case: Case, result: Result) -> None:
        """Keep a result."""
        self.folder.put(case, result)
        self._done[case.key] = estimate.weight(case)
        self._tell()

    def failed(self, case: Case, why: str) -> None:
        """Take note of a failure."""
        self.folder.runs.failed[case.key] = why
        self._done.pop(case.key, None)
        self._total -= estimate.weight(case)
        self._screen.failed(case, why)

    def _tell(self) -> None:
        done = sum(self._done.values())
        self._screen.progress(done, max(self._total, done))


def _weight(cases: Iterable[Case]) -> float:
    return sum(map(estimate.weight, cases))


def _needs(case: Case) -> int:
    return estimate.memory(case)
