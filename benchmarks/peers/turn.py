"""A peer's part in one cell of the benchmark (one size, one number of workers): its figures."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from benchmarks import report
from benchmarks.peers import base
from benchmarks.peers.process import Lap, PeerFailed, Team


class Turn:
    """One peer's part in a cell: its team, and its figures as they come."""

    def __init__(self, team: Team, say: Callable[[str], None]) -> None:
        self.name = team.job.peer
        self.failed: str | None = None
        self.rounds: list[dict[str, float]] = []
        self._team = team
        self._say = say
        self._cycles = 2
        self._latencies: list[npt.NDArray[np.float64]] = []
        self._reads: str | None = None

    def attempt(self, stage: Callable[..., None], *arguments: object) -> None:
        """Run a stage; a peer that fails is killed, reported, and left out from then on."""
        if self.failed:
            return
        try:
            stage(self, *arguments)
        except PeerFailed as error:
            self.failed = str(error)
            self._team.kill()
            self._say(f"{self.name} failed: {error}")

    def launch(self) -> None:
        """Start the processes."""
        self._team.launch()

    def connect(self) -> None:
        """Connect the workers."""
        self._team.connect()

    def calibrate(self, wanted: float, rounds: int) -> None:
        """Warm up, and find the number of cycles that takes as long as a round should."""
        self._team.run(self._cycles)  # what is done once, such as compiling, is not measured
        # So many rounds, and these few to find out, must stay within what the check can count.
        most = base.MAX_CYCLES // (self._team.job.workers * (rounds + 8))
        while True:
            taken = wall(self._team.run(self._cycles))
            factor = wanted / max(taken, 1e-6)
            if factor < 4 or self._cycles == most:
                break
            self._cycles = min(most, math.ceil(self._cycles * min(factor, 10)))
        self._cycles = max(2, min(most, round(self._cycles * factor)))

    def measure(self) -> None:
        """Run one round, and keep its figures."""
        job = self._team.job
        laps = self._team.run(self._cycles)
        seconds = wall(laps)
        latencies = np.concatenate([lap.seconds for lap in laps]) * 1e6
        rate = self._cycles * job.workers / seconds
        self._latencies.append(latencies)
        self.rounds.append(
            {
                "seconds": seconds,
                "cycles_per_second": rate,
                "gb_per_second": 2 * job.nbytes * rate / 1e9,
                "p50_us": float(np.percentile(latencies, 50)),
                "p99_us": float(np.percentile(latencies, 99)),
            }
        )

    def finish(self) -> None:
        """Check that the parameters are right, and end."""
        self._reads = self._team.finish()

    def figures(self) -> dict[str, Any]:
        """Return what the report says of this peer in this cell."""
        said: dict[str, Any] = {
            "failed": self.failed,
            "reads": self._reads,
            "cycles_per_worker": self._cycles,
            "rounds": self.rounds,
        }
        # Figures of a peer whose parameters proved wrong, or that hung, are no figures.
        if self.failed or not self.rounds:
            return said
        ratios = [ratio.key for ratio in base.RATIOS]
        for key in ("cycles_per_second", "gb_per_second", *ratios):
            if values := [figures[key] for figures in self.rounds if key in figures]:
                said[key] = report.spread(values)
        pooled = np.concatenate(self._latencies)
        said["p50_us"], said["p99_us"] = (float(np.percentile(pooled, p)) for p in (50, 99))
        return said


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
