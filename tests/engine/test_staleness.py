"""The staleness of the gradients that were used."""

from __future__ import annotations

import pytest

from aiops.engine.staleness import RecentStaleness, StalenessHistogram


def test_at_first_it_is_the_plain_mean() -> None:
    found = RecentStaleness()
    assert found.mean == 0
    for staleness in (4, 0, 2):
        found.note(staleness)
    assert found.mean == pytest.approx(2)


@pytest.mark.parametrize(("before", "now"), [(100, 3), (3, 5000)])
def test_it_follows_a_staleness_that_stays(before: int, now: int) -> None:
    found = RecentStaleness()
    for staleness in [before] * 200 + [now] * 640:
        found.note(staleness)
    assert found.mean == pytest.approx(now, rel=0.01)


def test_it_goes_on_from_its_state() -> None:
    found, other = RecentStaleness(), RecentStaleness()
    for staleness in (3, 1, 7):
        found.note(staleness)
    other.restore(found.state())
    found.note(2)
    other.note(2)
    assert other.mean == found.mean


def test_one_gradient_moves_it_little() -> None:
    found = RecentStaleness()
    for _ in range(200):
        found.note(3)
    found.note(5000)
    assert 4 < found.mean < 5
    for _ in range(64):
        found.note(3)
    assert found.mean < 3.5


class TestHistogram:
    def test_small_ones_have_a_bin_each_and_large_ones_share(self) -> None:
        found = StalenessHistogram()
        for staleness in (0, 0, 1023, 1024, 2047, 2048):
            found.note(staleness)
        assert found.bins == {0: 2, 1023: 1, 1024: 2, 2048: 1}
        assert found.total == 1023 + 1024 + 2047 + 2048

    def test_a_gradient_that_was_not_used_after_all_is_taken_out(self) -> None:
        found = StalenessHistogram()
        for staleness in (3, 5000):
            found.note(staleness)
            found.note(staleness, -1)
        assert found.bins.total() == found.total == 0
