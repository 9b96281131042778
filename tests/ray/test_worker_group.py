"""The decisions about a Ray job's workers, without Ray."""

from __future__ import annotations

from collections.abc import Iterable
from math import inf

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aiops.errors import UsageError
from aiops.ray.worker_group import (
    DIED,
    NODE_LOST,
    RAISED,
    RETURNED,
    BeginLoop,
    GroupFinished,
    GroupOrder,
    GroupTick,
    Notify,
    ReleaseWorker,
    RequestWorker,
    ServerDown,
    ServerLost,
    ServerUp,
    WorkerEnded,
    WorkerGroup,
    WorkerPlaced,
)


def group(least: int = 2, most: int = 2, *, restarts: int = 3) -> WorkerGroup:
    return WorkerGroup(least, most, max_restarts=restarts, patience=60.0, now=0.0)


def begun(least: int = 2, most: int = 2, *, restarts: int = 3) -> WorkerGroup:
    """A group whose first workers run, each on a node of its own."""
    made = group(least, most, restarts=restarts)
    assert made.begin() == [RequestWorker(rank, True) for rank in range(least)]
    for rank in range(least - 1):
        assert made.handle(WorkerPlaced(1.0, rank, f"n{rank}")) == []
    last = made.handle(WorkerPlaced(1.0, least - 1, f"n{least - 1}"))
    assert last == [
        *(BeginLoop(rank, 0, 0, 1) for rank in range(least)),
        *(RequestWorker(rank, False) for rank in range(least, most)),
    ]
    assert made.running == least
    return made


def deeds(orders: Iterable[GroupOrder]) -> list[GroupOrder]:
    """The orders that are not sentences."""
    return [order for order in orders if not isinstance(order, Notify)]


def texts(orders: Iterable[GroupOrder]) -> str:
    return " | ".join(order.text for order in orders if isinstance(order, Notify))


class TestElastic:
    def test_others_begin_when_they_have_a_place_however_late(self) -> None:
        made = begun(2, 4)
        assert made.wake_at == inf
        assert made.handle(WorkerPlaced(1000.0, 3, "n0")) == [BeginLoop(3, 0, 1, 2)]
        assert made.running == 3

    def test_when_a_loop_has_returned_no_more_are_wanted(self) -> None:
        made = begun(1, 3)
        made.handle(WorkerPlaced(2.0, 1, "n0"))
        orders = made.handle(WorkerEnded(3.0, 0, RETURNED))
        assert orders == [ReleaseWorker(0, True), ReleaseWorker(2, True)]
        assert made.handle(WorkerPlaced(3.1, 2, "n9")) == []
        orders = made.handle(WorkerEnded(4.0, 1, RETURNED))
        assert orders == [ReleaseWorker(1, True), GroupFinished({}, "")]

    def test_local_ranks_are_given_again(self) -> None:
        made = begun(1, 3)
        assert made.handle(WorkerPlaced(2.0, 1, "n0")) == [BeginLoop(1, 0, 1, 2)]
        made.handle(WorkerEnded(3.0, 0, NODE_LOST))
        assert made.handle(WorkerPlaced(4.0, 2, "n0")) == [BeginLoop(2, 0, 0, 2)]
        assert made.handle(WorkerPlaced(5.0, 0, "n0")) == [BeginLoop(0, 1, 2, 3)]


class TestFailures:
    def test_a_lost_machine_is_not_counted(self) -> None:
        made = begun(restarts=0)
        for time in range(10):
            orders = made.handle(WorkerEnded(2.0 + time, 1, NODE_LOST, "gone"))
            assert deeds(orders) == [ReleaseWorker(1, False), RequestWorker(1, True)]
            placed = made.handle(WorkerPlaced(2.5 + time, 1, "n7"))
            assert placed == [BeginLoop(1, time + 1, 0, 1)]

    @pytest.mark.parametrize(("how", "joined"), [(DIED, False), (RAISED, True)])
    def test_a_failure_is_replaced_after_longer_pauses_to_an_end(
        self, how: str, joined: bool
    ) -> None:
        made, now, pauses = begun(restarts=5), 2.0, []
        for number in range(5):
            orders = made.handle(WorkerEnded(now, 1, how, "ValueError: x", joined))
            assert deeds(orders) == [ReleaseWorker(1, False)]
            assert "is replaced in" in texts(orders)
            assert "ValueError: x" in texts(orders)
            pauses.append(made.wake_at - now)
            now = made.wake_at
            assert made.handle(GroupTick(now)) == [RequestWorker(1, True)]
            assert made.handle(WorkerPlaced(now, 1, "n1")) == [BeginLoop(1, number + 1, 0, 1)]
        assert pauses == pytest.approx([0.2, 1.0, 3.0, 10.0, 10.0])
        orders = made.handle(WorkerEnded(now, 1, how, "ValueError: x", joined))
        assert deeds(orders) == [ReleaseWorker(1, True)]
        assert "1 of 2 workers go on without it" in texts(orders)
        orders = made.handle(WorkerEnded(now, 0, RETURNED))
        assert orders[-1] == GroupFinished({1: "ValueError: x"}, "")

    def test_a_loop_that_raises_before_it_has_joined_ends_the_job(self) -> None:
        made = begun(2, 3)
        orders = made.handle(WorkerEnded(2.0, 0, RAISED, "NameError: y"))
        assert orders[:-1] == [ReleaseWorker(rank, True) for rank in range(3)]
        last = orders[-1]
        assert isinstance(last, GroupFinished)
        assert "before it had joined the server" in last.error
        assert last.failures == {0: "NameError: y"}

    def test_when_all_are_given_up_the_job_has_failed(self) -> None:
        made = begun(1, 1, restarts=0)
        orders = made.handle(WorkerEnded(2.0, 0, DIED, "killed"))
        assert orders[-1] == GroupFinished({0: "killed"}, "all workers have been given up")

    def test_without_a_place_the_job_ends_after_its_patience(self) -> None:
        made = group()
        made.begin()
        made.handle(WorkerPlaced(50.0, 0, "n0"))
        assert made.wake_at == 60.0
        last = made.handle(GroupTick(60.0))[-1]
        assert isinstance(last, GroupFinished)
        assert "no worker has had a place for 60 s" in last.error

    def test_when_all_machines_are_lost_it_waits_for_others_that_long(self) -> None:
        made = begun(1, 1)
        made.handle(WorkerEnded(100.0, 0, NODE_LOST))
        assert made.wake_at == 160.0
        assert made.handle(WorkerPlaced(159.0, 0, "n5")) == [BeginLoop(0, 1, 0, 1)]
        assert made.wake_at == inf

    def test_a_server_that_is_lost_for_good_ends_the_job(self) -> None:
        made = begun(1, 2)
        orders = made.handle(ServerLost(3.0, "the server is lost: x"))
        assert [each.rank for each in orders if isinstance(each, ReleaseWorker)] == [0, 1]
        assert orders[-1] == GroupFinished({}, "the server is lost: x")
        assert made.handle(WorkerEnded(3.1, 0, RAISED, "too late")) == []

    def test_while_the_server_is_started_again_no_worker_is_asked_for(self) -> None:
        made = begun(2, 3)
        assert made.handle(ServerDown(2.0)) == []
        assert deeds(made.handle(WorkerEnded(2.0, 1, NODE_LOST))) == [ReleaseWorker(1, False)]
        assert deeds(made.handle(WorkerEnded(2.1, 2, NODE_LOST))) == [ReleaseWorker(2, False)]
        assert made.handle(ServerUp(4.0)) == [RequestWorker(1, True), RequestWorker(2, False)]
        assert made.handle(ServerUp(5.0)) == []

    def test_a_request_that_is_held_is_dropped_when_no_more_are_wanted(self) -> None:
        made = begun(1, 2)
        made.handle(ServerDown(2.0))
        made.handle(WorkerEnded(2.0, 1, NODE_LOST))
        made.handle(WorkerEnded(3.0, 0, RETURNED))
        assert made.handle(ServerUp(4.0)) == []

    @pytest.mark.parametrize(("least", "most"), [(0, 1), (3, 2), (-1, -1)])
    def test_numbers_that_make_no_sense(self, least: int, most: int) -> None:
        with pytest.raises(UsageError, match="min_workers must be from 1 to max_workers"):
            group(least, most)


STEP = st.tuples(
    st.integers(0, 4), st.sampled_from(["place", RETURNED, RAISED, DIED, NODE_LOST, "tick"])
)


@given(st.integers(1, 5), st.lists(STEP, max_size=60))
def test_whatever_happens_each_worker_is_one_and_the_end_comes(
    least: int, steps: list[tuple[int, str]]
) -> None:
    """An actor is asked for once at a time and released before the next; then all return."""
    made, now = group(least, 5, restarts=1), 0.0
    present: dict[int, str] = {}  # asked, runs
    finished: list[GroupFinished] = []

    def carry_out(orders: list[GroupOrder]) -> None:
        for order in orders:
            if isinstance(order, RequestWorker):
                assert order.rank not in present
                present[order.rank] = "asked"
            elif isinstance(order, BeginLoop):
                assert present[order.rank] == "placed"
                present[order.rank] = "runs"
            elif isinstance(order, ReleaseWorker):
                present.pop(order.rank, None)
            elif isinstance(order, GroupFinished):
                finished.append(order)

    def happen(rank: int, what: str) -> None:
        state = present.get(rank)
        if what == "place" and state == "asked":
            present[rank] = "placed"
            carry_out(made.handle(WorkerPlaced(now, rank, f"n{rank % 2}")))
        elif what in (RAISED, RETURNED) and state == "runs":
            carry_out(made.handle(WorkerEnded(now, rank, what, "why", True)))
        elif what in (DIED, NODE_LOST) and state is not None:
            carry_out(made.handle(WorkerEnded(now, rank, what, "why")))
        elif what == "tick":
            carry_out(made.handle(GroupTick(now)))

    carry_out(made.begin())
    for rank, what in steps:
        now += 1.0
        happen(rank, what)
    for _ in range(20):
        now += 11.0
        carry_out(made.handle(GroupTick(now)))
        for rank in range(5):
            happen(rank, "place")
    for rank in range(5):
        happen(rank, RETURNED)
    assert len(finished) == 1
    assert not present
