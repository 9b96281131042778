"""A peer's part in one cell of a benchmark (one size, one number of workers): its figures.

`contest` has several take turns, so that whatever the machine does meanwhile meets all of them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Annotated, Any

import numpy as np
import numpy.typing as npt

from aiops.errors import UsageError
from aiops.lab.processes import ProcessFailed
from benchmarks import report
from benchmarks.peers import base
from benchmarks.peers.base import Job, Lap
from benchmarks.peers.team import Team
from benchmarks.processor_time import ProcessorTime

_TRIALS = 24
"""Runs to find out how long a round is to be, at most."""

_CLOSE = 1.5
"""A run that takes the time wanted up to this factor is near enough to tell the length."""

_WARM = 0.8
"""A run that takes less of the time of the one before it, of as many cycles, was not the first."""

PROCESSOR = (
    *("server_cpu_us", "server_kernel_us", "worker_cpu_us", "worker_kernel_us"),
    "cpu_us",
)
"""Microseconds of a processor for one cycle: the server's and a worker's, of each the part in the
kernel, and both together."""


@dataclass(frozen=True)
class MeasuringTime:
    """The duration of a measurement."""

    rounds: Annotated[int, "rounds per cell"] = 5
    seconds: Annotated[float, "a team's time per round"] = 0.4
    deadline: Annotated[float, "seconds before a team is killed"] = 60.0

    def check(self) -> None:
        """Raise UsageError when a number makes no sense."""
        if min(self.rounds, self.seconds, self.deadline) <= 0:
            raise UsageError("rounds, seconds and deadline are positive")


class Turn:
    """One peer's part in a cell: its team, and its figures as they come."""

    def __init__(self, team: Team, log: Callable[[str], None]) -> None:
        self.name = team.name
        self.failed: str | None = None
        self.rounds: list[dict[str, float]] = []
        self._team = team
        self._log = log
        self._cycles = 2
        self._latencies: list[npt.NDArray[np.float64]] = []
        self._reads: str | None = None

    def attempt(self, stage: Callable[..., None], *arguments: object) -> None:
        """Run a stage; a peer that fails is killed, reported, and left out from then on."""
        if self.failed:
            return
        try:
            stage(self, *arguments)
        except ProcessFailed as error:
            self.failed = str(error)
            self._team.kill()
            self._log(f"{self.name} failed: {error}")

    def launch(self) -> None:
        """Start the processes."""
        self._team.launch()

    def connect(self) -> None:
        """Connect the workers."""
        self._team.connect()

    def calibrate(self, wanted: float, rounds: int) -> None:
        """Warm up, and find the number of cycles that takes as long as a round should."""
        # All rounds, and these few to find out, must stay within what the check can count.
        most = base.MAX_CYCLES // (self._team.job.workers * (rounds + _TRIALS))
        taken = math.inf
        for _ in range(_TRIALS):
            before, taken = taken, wall(self._team.run(self._cycles))
            # What is done once (compiling, growing buffers, reading code for the first time) can
            # take longer than all the cycles of a run. Rounds that were made short because of it
            # would measure nothing but waking up, so a length counts if it is no faster again.
            if taken < _WARM * before:
                continue
            factor = wanted / max(taken, 1e-6)
            if factor < _CLOSE or self._cycles == most:
                break
            self._cycles = min(most, math.ceil(self._cycles * min(factor, 10)))
            taken = math.inf
        self._cycles = max(2, min(most, round(self._cycles * wanted / max(taken, 1e-6))))

    def measure(self) -> None:
        """Run one round, and keep its figures."""
        job = self._team.job
        self._team.processor_time()  # from here on
        laps = self._team.run(self._cycles)
        used = self._team.processor_time()
        seconds = wall(laps)
        rate = self._cycles * job.workers / seconds
        points = report.percentiles(np.concatenate([lap.seconds for lap in laps]))
        self._latencies.extend(lap.seconds for lap in laps)
        self.rounds.append(
            {
                "seconds": seconds,
                "cycles_per_second": rate,
                "gb_per_second": 2 * job.nbytes * rate / 1e9,
                **points,
                **({} if used is None else per_cycle(*used, self._cycles * job.workers)),
            }
        )

    def finish(self) -> None:
        """Check that the parameters are right, and end."""
        self._reads = self._team.finish()

    def figures(self) -> dict[str, Any]:
        """Return the figures of this peer in this cell."""
        said: dict[str, Any] = {
            "failed": self.failed,
            "reads": self._reads,
            "cycles_per_worker": self._cycles,
            "rounds": self.rounds,
        }
        # Figures of a peer whose parameters proved wrong, or that hung, are no figures.
        if self.failed or not self.rounds:
            return said
        ratios = dict.fromkeys(key for one in self.rounds for key in one if key.startswith("x_"))
        for key in ("cycles_per_second", "gb_per_second", *PROCESSOR, *ratios):
            if values := [figures[key] for figures in self.rounds if key in figures]:
                said[key] = report.spread(values)
        return said | report.percentiles(np.concatenate(self._latencies))


def contest(
    jobs: Mapping[str, Job],
    pace: MeasuringTime,
    log: Callable[[str], None],
    compare: Callable[[Mapping[str, Turn]], None],
) -> dict[str, Any]:
    """Have the teams of some jobs take turns, in an order that rotates; return all figures.

    Parameters
    ----------
    jobs
        What each team is to do, by its name.
    pace
        How long.
    log
        Called with a line about each failure.
    compare
        Adds to the rounds of the turns what one has to another in the same round.
    """
    with ExitStack() as stack:
        turns = []
        for name, job in jobs.items():
            team = Team(job, pace.deadline, base.load(job.peer).ENVIRONMENT, name)
            stack.callback(team.kill)
            turns.append(Turn(team, log))
        # Every stage goes team by team: whatever one does, the others wait meanwhile.
        for turn in turns:
            turn.attempt(Turn.launch)
        for turn in turns:
            turn.attempt(Turn.connect)
        for turn in turns:
            turn.attempt(Turn.calibrate, pace.seconds, pace.rounds)
        for number in range(pace.rounds):
            first = number % max(len(turns), 1)
            for turn in turns[first:] + turns[:first]:
                turn.attempt(Turn.measure)
        for turn in turns:
            turn.attempt(Turn.finish)
    found = {turn.name: turn for turn in turns}
    compare(found)
    return {name: turn.figures() for name, turn in found.items()}


def beside(name: str) -> Callable[[Mapping[str, Turn]], None]:
    """Return what adds ``x_<name>`` to every round: cycles per second beside that team's."""

    def compare(turns: Mapping[str, Turn]) -> None:
        first = turns[name]
        for turn in turns.values():
            for one, other in zip(turn.rounds, first.rounds, strict=False):
                if not first.failed:
                    one[f"x_{name}"] = one["cycles_per_second"] / other["cycles_per_second"]

    return compare


def per_cycle(served: ProcessorTime, worked: ProcessorTime, cycles: int) -> dict[str, float]:
    """Return the figures `PROCESSOR` of a round, of what a server and its workers have used."""
    seconds = (served.total, served.kernel, worked.total, worked.kernel)
    figures = (*seconds, served.total + worked.total)
    return {key: each / cycles * 1e6 for key, each in zip(PROCESSOR, figures, strict=True)}


def wall(laps: Sequence[Lap]) -> float:
    """Seconds from the first worker's start to the last one's end (one clock for all processes)."""
    return max(lap.end for lap in laps) - min(lap.start for lap in laps)


def compare(turns: Mapping[str, Turn]) -> None:
    """Add every ratio that a peer's group has, beside the best of the same round.

    A peer that failed is no measure for the others.
    """
    turns = {name: turn for name, turn in turns.items() if not turn.failed}
    count = max((len(turn.rounds) for turn in turns.values()), default=0)
    for number in range(count):
        figures = {
            name: turn.rounds[number] for name, turn in turns.items() if len(turn.rounds) > number
        }
        rates = {name: figure["cycles_per_second"] for name, figure in figures.items()}
        for ratio in base.RATIOS:
            measures = [rates[name] for name in ratio.beside if name in rates]
            for name in figures if measures else ():
                if name in ratio.group or name not in base.MODULES:
                    figures[name][ratio.key] = rates[name] / max(measures)
