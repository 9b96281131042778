"""How many cycles a round of the exchange benchmark has."""

from __future__ import annotations

from typing import cast

import numpy as np
import pytest

from benchmarks.peers import base
from benchmarks.peers.base import Job, Lap
from benchmarks.peers.team import Team
from benchmarks.peers.turn import Turn
from tests.rows import each_row


class _Team:
    """A team in which the first ``cold`` cycles take longer than the others."""

    name = "team"

    def __init__(self, cycle: float, cold: int, extra: float) -> None:
        self.job = Job("aiops", 1024, 32, {})
        self.lengths: list[int] = []
        self._cycle, self._cold, self._extra, self._done = cycle, cold, extra, 0

    def run(self, cycles: int) -> list[Lap]:
        slow = max(0, min(cycles, self._cold - self._done))
        self._done += cycles
        self.lengths.append(cycles)
        return [Lap(0.0, cycles * self._cycle + slow * self._extra, np.zeros(cycles))]


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
