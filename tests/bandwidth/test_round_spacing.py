"""The budget of rounds of averaging: the next one begins when those before are paid for."""

from __future__ import annotations

import asyncio
from itertools import pairwise

import numpy as np
import pytest

import aiops
from aiops import testing
from aiops.bandwidth.round_spacing import RoundSpacing, worker_rate
from aiops.client import AsyncModelAverager
from aiops.errors import ConflictError
from tests.rows import each_row


def test_the_next_round_begins_when_all_bytes_are_paid_for() -> None:
    spacing = RoundSpacing(1000.0)
    assert spacing.wait(5.0) == 0.0
    spacing.note(5.0, 3000)
    assert spacing.wait(6.0) == 2.0
    spacing.note(6.0, 1000)  # it was asked for, and did not wait
    assert spacing.wait(6.5) == 2.5
    assert spacing.wait(20.0) == 0.0
    spacing.note(20.0, 500)  # what was not used is not saved up
    assert spacing.wait(20.0) == 0.5


def test_without_a_budget_nothing_waits() -> None:
    spacing = RoundSpacing(0.0)
    spacing.note(0.0, 1 << 40)
    assert spacing.wait(0.0) == 0.0


@each_row(
    ("total", "each", "workers", "rate"),
    [(None, None, None, 0), (None, 50, None, 50), (300, None, 3, 100), (300, 50, 3, 50)],
)
def test_the_rate_of_each(
    total: int | None, each: int | None, workers: int | None, rate: float
) -> None:
    assert worker_rate(total, each, workers) == rate


def test_a_total_is_divided_by_a_number_that_is_known() -> None:
    with pytest.raises(ConflictError, match="--workers N"):
        worker_rate(300, None, None)


@pytest.mark.parametrize("settings", [{"worker_budget": "40KB/s"}, {"bandwidth_budget": "80KB/s"}])
def test_the_interval_stretches_so_that_the_budget_holds(settings: dict[str, str]) -> None:
    """To the byte: never more than the budget and one round, and most of it is used."""
    rate, seconds = 40_000, 60.0

    async def main() -> None:
        params = [{"w": np.zeros(20_000, np.float32)} for _ in range(2)]
        loop = asyncio.get_running_loop()
        chosen = {"interval": 0.1, "grace": 0.5}
        async with aiops.serve(
            policy="average", kernels="numpy", workers=2, set=chosen, **settings
        ) as server:
            averagers = [AsyncModelAverager(server.url, given) for given in params]
            await asyncio.gather(*(one.connect() for one in averagers))
            began, seen = loop.time(), [(loop.time(), 0)]
            traffic = averagers[0].stats.traffic
            start, rounds = traffic.bytes_in + traffic.bytes_out, averagers[0].stats.rounds
            while loop.time() < began + seconds:
                await asyncio.sleep(0.05)
                crossed = traffic.bytes_in + traffic.bytes_out - start
                if crossed != seen[-1][1]:
                    seen.append((loop.time(), crossed))
            assert averagers[0].stats.failed == 0
            rounds = averagers[0].stats.rounds - rounds
            for one in averagers:
                await one.close()
        of_one = max(later - earlier for (_, earlier), (_, later) in pairwise(seen))
        assert rounds >= 5
        for when, crossed in seen:
            assert crossed <= rate * (when - began) + of_one
        assert seen[-1][1] > 0.75 * rate * seconds

    testing.run(main())
