"""A run as a client knows it: versions that are left, and acknowledged pushes that are lost."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aiops.client.known_run import AcknowledgedPushes, KnownRun
from aiops.errors import RemoteProtocolError, Superseded
from aiops.wire.messages import PROTOCOL, Welcome
from tests.strategies import DETERMINISTIC


def welcomed(run: KnownRun, epoch: int, generation: int, *intact: int, name: str = "8c2f") -> None:
    fields = (0, PROTOCOL, name, b"", "asgd", {}, {}, 0, (), 0, (), (), generation, intact)
    run.welcomed(Welcome(*fields), epoch, "aiops://a")


class TestVersions:
    def test_without_a_restart_nothing_is_lost(self) -> None:
        run = KnownRun()
        welcomed(run, 1, 3, 100)
        welcomed(run, 5, 3, 100)
        assert not run.lost(1, 1 << 40)
        assert run.last_change == 1

    def test_the_lowest_since_they_came_counts(self) -> None:
        run = KnownRun()
        for epoch, generation, left in ((1, 1, 0), (3, 2, 40), (5, 3, 90), (7, 4, 60)):
            welcomed(run, epoch, generation, left)
        for epoch, left in ((1, 40), (2, 40), (3, 60), (6, 60)):
            assert not run.lost(epoch, left)
            assert run.lost(epoch, left + 1)
        assert not run.lost(7, 1000)
        assert run.last_change == 7

    def test_tables_have_their_own(self) -> None:
        run = KnownRun()
        welcomed(run, 1, 1)
        welcomed(run, 2, 2, 9, 5)
        assert [run.lost(1, 6, table) for table in (None, 0, 1)] == [False, True, True]

    def test_nothing_is_left_of_another_run(self) -> None:
        run = KnownRun()
        welcomed(run, 1, 7)
        welcomed(run, 4, 1, 1000, name="another")
        assert run.lost(3, 0)
        assert run.of_another(3)
        assert not run.of_another(4)

    def test_of_too_many_restarts_the_first_count_as_losses(self) -> None:
        run = KnownRun()
        for generation in range(1, 101):
            welcomed(run, generation, generation, 1000)
        assert run.lost(1, 0)
        assert run.lost(35, 0)
        assert not run.lost(36, 1000)

    def test_a_lower_generation_was_superseded(self) -> None:
        run = KnownRun()
        welcomed(run, 1, 5)
        with pytest.raises(Superseded, match=r"generation 4 of its run, .* has generation 5"):
            welcomed(run, 2, 4)
        welcomed(run, 3, 4, name="another")

    def test_a_name_that_is_no_name(self) -> None:
        with pytest.raises(RemoteProtocolError, match="by 257 characters"):
            welcomed(KnownRun(), 1, 1, name="x" * 257)


class TestPushes:
    def test_in_order_they_are_one_run(self) -> None:
        pushes = AcknowledgedPushes()
        for seq in range(1, 1000):
            pushes.add(seq, seq)
        assert pushes.runs == [[1, 999]]
        assert pushes.last == 999
        assert pushes.roll_back(990) == 9
        assert pushes.roll_back(990) == 0
        assert pushes.runs == [[1, 990]]

    @DETERMINISTIC
    @given(
        st.lists(st.tuples(st.integers(1, 60), st.integers(0, 9)), max_size=40),
        st.integers(0, 70),
    )
    def test_they_are_a_set(self, added: list[tuple[int, int]], last: int) -> None:
        pushes, expected = AcknowledgedPushes(), set[int]()
        for first, more in added:
            pushes.add(first, first + more)
            expected.update(range(first, first + more + 1))
        assert pushes.last == max(expected, default=0)
        kept = [seq for first, end in pushes.runs for seq in range(first, end + 1)]
        assert kept == sorted(expected)
        assert all(a[1] + 1 < b[0] for a, b in zip(pushes.runs, pushes.runs[1:], strict=False))
        assert pushes.roll_back(last) == sum(seq > last for seq in expected)
        assert pushes.last <= last
