"""How many cycles a round of the exchange benchmark has."""

from __future__ import annotations

from typing import cast

import numpy as np
import pytest

from benchmarks.peers import base
from benchmarks.peers.base import Job, Lap
from benchmarks.peers.team import Team
from benchmarks.peers.turn import PROCESSOR, Turn
from benchmarks.processor_time import ProcessorTime
from tests.rows import each_row


class _Team:
    """A team in which the first ``cold`` cycles take longer than the others."""

    name = "team"
    used: tuple[ProcessorTime, ProcessorTime] | None = None

    def __init__(self, cycle: float, cold: int, extra: float) -> None:
        self.job = Job("aiops", 1024, 32, {})
        self.lengths: list[int] = []
        self._cycle, self._cold, self._extra, self._done = cycle, cold, extra, 0

    def run(self, cycles: int) -> list[Lap]:
        slow = max(0, min(cycles, self._cold - self._done))
        self._done += cycles
        self.lengths.append(cycles)
        return [Lap(0.0, cycles * self._cycle + slow * self._extra, np.zeros(cycles))]

    def processor_time(self) -> tuple[ProcessorTime, ProcessorTime] | None:
        return self.used


@each_row("cold", [0, 1, 2, 3, 4])
@each_row("cycle", [1e-4, 1e-3, 0.03, 1.0])
def test_a_round_is_as_long_as_wanted_however_slow_the_first_cycles_are(
    cycle: float, cold: int
) -> None:
    team = _Team(cycle, cold, extra=0.1)
    turn = Turn(cast(Team, team), print)
    turn.calibrate(0.4, rounds=3)
    before = len(team.lengths)
    turn.measure()
    assert team.lengths[before] * cycle == pytest.approx(max(0.4, 2 * cycle), rel=0.5)


def test_all_cycles_stay_within_what_the_check_can_count() -> None:
    team = _Team(1e-9, 0, 0.0)
    turn = Turn(cast(Team, team), print)
    turn.calibrate(100.0, rounds=3)
    for _ in range(3):
        turn.measure()
    assert sum(team.lengths) * team.job.workers <= base.MAX_CYCLES


def test_processor_time_is_that_of_a_cycle() -> None:
    team = _Team(0.001, 0, 0.0)
    turn = Turn(cast(Team, team), print)
    turn.calibrate(0.1, rounds=1)
    cycles = 100 * team.job.workers
    team.used = ProcessorTime(3e-6 * cycles, 1e-6 * cycles), ProcessorTime(0.0, 8e-6 * cycles)
    turn.measure()
    found = {key: value for key, value in turn.rounds[0].items() if key in PROCESSOR}
    assert found == pytest.approx(dict(zip(PROCESSOR, (4.0, 1.0, 8.0, 8.0, 12.0), strict=True)))
    assert turn.figures()["cpu_us"]["median"] == pytest.approx(12.0)


def test_where_no_processor_time_is_told_there_is_none() -> None:
    turn = Turn(cast(Team, _Team(0.001, 0, 0.0)), print)
    turn.calibrate(0.1, rounds=1)
    turn.measure()
    assert not {*PROCESSOR} & {*turn.rounds[0], *turn.figures()}
