"""Whatever the pattern: no second sees more than the budget, and what there is gets used."""

from __future__ import annotations

from collections.abc import Iterable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from aiops.bandwidth.token_bucket import IN, OUT, USABLE, Budget, TokenBucket, Way
from tests.rows import each_row
from tests.seeds import examples

STEP = 1 / 512
MARGIN = 1 / 64  # of a budget, kept for newcomers


class Played:
    """A budget whose grants cross at once or later, and what crossed when."""

    def __init__(self, total: int | None, each: int | None = None) -> None:
        self.budget = Budget(total, each, 0.0)
        self.now = 0.0
        self.crossed: list[tuple[float, int, int]] = []  # when, whose, how many bytes
        self.late: list[tuple[float, int, int]] = []  # granted: to cross then
        self.delay = 0.0

    def open(self, *flows: int) -> None:
        for flow in flows:
            self.budget.open(flow, self.now)

    def move(self, flow: int, nbytes: int) -> None:
        self.budget.crossed(flow, nbytes, self.now)
        self.crossed.append((self.now, flow, nbytes))

    def settle(self) -> None:
        """Let cross what is due, and grant what can be granted."""
        due = [item for item in self.late if item[0] <= self.now]
        self.late = [item for item in self.late if item[0] > self.now]
        for _when, flow, nbytes in due:
            self.move(flow, nbytes)
        for flow, _way, nbytes in self.budget.grants(self.now):
            if self.delay:
                due = (self.now // self.delay + 1) * self.delay  # many at the same moment
                self.late.append((due, flow, nbytes))
            else:
                self.move(flow, nbytes)

    def run(self, seconds: float, hungry: Iterable[int] = ()) -> None:
        """Let time pass, step by step; those who are hungry always want more."""
        hungry = list(hungry)
        until = self.now + seconds
        while self.now < until:
            for flow in hungry:
                self.budget.ask(flow, OUT, 1 << 30)
            self.settle()
            self.now += STEP

    def busiest(self, flows: Iterable[int] | None = None) -> int:
        """Return the most bytes in any window of one second, both of its ends included."""
        kept = None if flows is None else set(flows)
        items = [(t, n) for t, flow, n in self.crossed if kept is None or flow in kept]
        most = total = first = 0
        for time, nbytes in items:
            total += nbytes
            while items[first][0] < time - 1.0:
                total -= items[first][1]
                first += 1
            most = max(most, total)
        return most

    def moved(self, flow: int, since: float = 0.0) -> int:
        return sum(n for t, whose, n in self.crossed if whose == flow and t >= since)


ACTIONS = st.one_of(
    st.tuples(st.just("ask"), st.integers(0, 3), st.sampled_from([IN, OUT]), st.integers(0, 9000)),
    st.tuples(st.just("wait"), st.floats(0.0, 1.5)),
    st.tuples(st.just("at once"), st.integers(0, 3), st.integers(1, 9000)),
    st.tuples(st.just("delay"), st.sampled_from([0.0, 0.001, 0.3, 2.0])),
    st.tuples(st.just("return"), st.integers(0, 3)),
    st.tuples(st.just("again"), st.integers(0, 3)),
    st.tuples(st.just("weigh"), st.integers(0, 3), st.floats(1.0, 4.0)),
)


def play(played: Played, actions: list[tuple]) -> None:  # type: ignore[type-arg]
    budget = played.budget
    for what, *rest in actions:
        if what == "ask":
            budget.ask(*rest)
            played.settle()
        elif what == "wait":
            played.now += rest[0]
            played.settle()
        elif what == "at once":
            flow, nbytes = rest
            count = budget.at_once(flow, nbytes, played.now)
            if count:
                played.move(flow, count)
        elif what == "delay":
            played.delay = rest[0]
        elif what == "return":
            flow = rest[0]
            mine = [item for item in played.late if item[1] == flow]
            played.late = [item for item in played.late if item[1] != flow]
            budget.put_back(flow, sum(nbytes for _when, _flow, nbytes in mine))
        elif what == "again":
            flow = rest[0]
            played.late = [item for item in played.late if item[1] != flow]
            budget.close(flow, played.now)
            budget.open(flow, played.now)
            budget.join(flow, f"client {flow}", played.now)
        else:
            budget.weigh(*rest)


@settings(max_examples=examples(150), deadline=None)
@given(
    st.integers(1000, 20_000), st.none() | st.integers(1000, 20_000), st.lists(ACTIONS, max_size=80)
)
def test_no_second_sees_more_than_the_budget(
    total: int,
    each: int | None,
    actions: list[tuple],  # type: ignore[type-arg]
) -> None:
    played = Played(total, each)
    played.open(*range(4))
    for flow in range(4):
        played.budget.join(flow, f"client {flow}", 0.0)
    play(played, actions)
    played.now += 0.5
    played.settle()
    assert played.busiest() <= total
    if each is not None:
        for flow in range(4):  # under its name, over however many connections
            assert played.busiest([flow]) <= each


@settings(max_examples=examples(60), deadline=None)
@given(st.integers(1000, 10**9), st.lists(ACTIONS, max_size=40))
def test_nothing_is_wasted_while_somebody_wants_it(
    total: int,
    actions: list[tuple],  # type: ignore[type-arg]
) -> None:
    played = Played(total)
    played.open(*range(5))
    play(played, actions)
    played.delay = 0.0
    since = played.now
    played.run(3.0, [4])
    moved = sum(n for t, _flow, n in played.crossed if t >= since + 1.0)
    assert moved >= 0.9 * total * (played.now - since - 1.0)


def test_an_idle_connection_leaves_its_share_to_the_others() -> None:
    played = Played(100_000)
    played.open(*range(10))
    played.run(4.0, [3])
    assert played.moved(3, since=1.0) >= 0.9 * 3 * 100_000


@pytest.mark.parametrize("weights", [(1.0, 1.0, 1.0), (1.0, 2.0, 4.0)])
def test_shares_are_as_the_weights_when_all_want_more(weights: tuple[float, ...]) -> None:
    played = Played(100_000)
    played.open(*range(3))
    for flow, weight in enumerate(weights):
        played.budget.weigh(flow, weight)
    played.run(10.0, range(3))
    total = sum(played.moved(flow) for flow in range(3))
    for flow, weight in enumerate(weights):
        assert played.moved(flow) / total == pytest.approx(weight / sum(weights), rel=0.05)


@settings(max_examples=examples(30), deadline=None)
@given(st.integers(2, 40), st.data())
def test_nobody_starves(flows: int, data: st.DataObject) -> None:
    """A small message among many hungry ones crosses within a round."""
    played = Played(100_000)
    played.open(*range(flows))
    weights = [data.draw(st.floats(1.0, 4.0)) for _ in range(flows)]
    for flow, weight in enumerate(weights):
        played.budget.weigh(flow, weight)
    played.run(1.0, range(1, flows))
    since = played.now
    played.budget.ask(0, IN, 100)
    round_ = played.budget.quantum * sum(weights) / (USABLE * 100_000)
    played.run(2 * round_ + 0.2, range(1, flows))
    assert played.moved(0, since) == 100


def test_both_ways_of_a_connection_take_turns() -> None:
    played = Played(100_000)
    played.open(0)
    ways: list[Way] = []
    for _ in range(1000):
        for way in (IN, OUT):
            played.budget.ask(0, way, 10_000)
        for _flow, way, nbytes in played.budget.grants(played.now):
            ways.append(way)
            played.move(0, nbytes)
        played.now += 0.01
    assert abs(ways.count(IN) - ways.count(OUT)) <= 1


def test_who_is_at_its_own_ceiling_does_not_hold_up_the_others() -> None:
    played = Played(100_000, 10_000)
    played.open(0, 1)
    played.budget.ask(0, OUT, 1 << 20)
    played.run(2.0, [0])
    played.budget.ask(1, OUT, 500)
    played.settle()
    assert played.moved(1) == 500
    assert played.busiest([0]) <= 10_000


def test_bytes_granted_long_ago_and_moved_at_once_are_no_burst() -> None:
    played = Played(10_000)
    played.delay = 5.0
    played.open(0)
    played.run(4.9, [0])
    played.delay = 0.0
    played.run(1.5, [0])
    assert sum(nbytes for _when, _flow, nbytes in played.crossed) > 10_000
    assert played.busiest() <= 10_000


def test_a_client_has_one_budget_over_all_its_connections() -> None:
    played = Played(None, 10_000)
    for flow in range(20):
        played.open(flow)
        played.budget.join(flow, "the same", played.now)
        played.run(0.25, [flow])
        played.budget.close(flow, played.now)
    assert played.busiest() <= 10_000
    assert len(played.crossed) > 0


def test_what_a_connection_crossed_before_it_joined_counts() -> None:
    played = Played(None, 10_000)
    for flow in range(4):
        played.open(flow)
        played.run(0.1, [flow])
        played.budget.join(flow, "the same", played.now)
        played.budget.ask(flow, OUT, 0)
    before = len(played.crossed)
    played.run(0.3, range(4))
    after = sum(nbytes for _when, _flow, nbytes in played.crossed[before:])
    assert after <= 0.3 * 10_000  # there is nothing saved up left


def test_those_who_leave_leave_nothing_behind() -> None:
    played = Played(10_000, 10_000)
    played.delay = 10.0
    for flow in range(200):
        played.open(flow)
        played.budget.join(flow, f"client {flow}", played.now)
        played.budget.ask(flow, OUT, 5000)
        played.settle()
        played.budget.close(flow, played.now)
        played.now += 0.05
    budget = played.budget
    assert budget.wanted == 0
    assert budget.next(played.now) is None
    assert budget.total is not None
    assert budget.total.taken == 0
    assert len(budget._owners) < 50  # only those of the last seconds are remembered


def test_a_newcomer_is_let_in_though_the_budget_is_used_up() -> None:
    played = Played(10_000)
    played.open(0)
    played.run(2.0, [0])
    assert played.budget.at_once(0, 1, played.now) == 0
    let_in = 0
    for flow in range(1, 1000):
        played.open(flow)
        if not played.budget.borrow(flow, played.now):
            break
        let_in += 1
        played.move(flow, 1)
    assert let_in >= 10_000 * MARGIN - 1
    assert played.busiest() <= 10_000


@settings(max_examples=examples(100), deadline=None)
@given(st.integers(1000, 10**6), st.floats(0.0, 3.0), st.integers(1, 500), st.floats(0, 1e7))
def test_the_time_said_is_when_there_is_room(
    rate: int, spent: float, nbytes: int, start: float
) -> None:
    """Neither too early (a server would spin) nor much too late (it would waste)."""
    bucket, now = TokenBucket(rate, start), start
    until = start + spent
    while now < until:
        count = bucket.room(now)
        bucket.take(count)
        bucket.crossed(count, now)
        now += 0.05
    nbytes = min(nbytes, rate // 16)
    early, due = bucket.room(now), bucket.when(nbytes, now)
    assert due <= now + 0.5
    assert bucket.room(due + 1e-6 * (1 + start / 1e3)) >= nbytes - 1
    if due > now + 0.01:
        assert early < nbytes


def test_a_clock_that_goes_back_earns_nothing() -> None:
    bucket = TokenBucket(1000, 10.0)
    count = bucket.room(10.0)
    bucket.take(count)
    bucket.crossed(count, 10.0)
    assert bucket.room(9.0) == 0
    assert bucket.room(10.0) == 0
    assert bucket.room(10.1) > 0


class TestChange:
    def test_what_a_rate_gains_crosses_after_a_second(self) -> None:
        bucket = TokenBucket(1000, 0.0)
        bucket.change(5000, 0.0)
        moved = [0, 0]
        for now in (n / 100 for n in range(300)):
            count = bucket.room(now)
            bucket.take(count)
            bucket.crossed(count, now)
            moved[now >= 1.01] += count
        assert 900 <= moved[0] <= 1000, "the first second has the former rate"
        assert moved[1] >= 1.9 * 0.9 * 5000
        assert bucket.peak <= 5000

    def test_a_share_that_moves_is_in_no_second_there_twice(self) -> None:
        """One gives what the other gets, at a time at which both are busy."""
        giver, taker = TokenBucket(9000, 0.0), TokenBucket(1000, 0.0)
        moved: list[tuple[float, int]] = []
        for now in (n / 50 for n in range(250)):
            if now == 2.0:
                giver.change(4000, now)
                taker.change(6000, now)
            for bucket in (giver, taker):
                count = bucket.room(now)
                bucket.take(count)
                bucket.crossed(count, now)
                moved.append((now, count))
        for began, _count in moved:
            assert sum(n for when, n in moved if began <= when < began + 1.0) <= 10_000
        assert sum(n for when, n in moved if when >= 3.5) >= 1.5 * 0.9 * 10_000

    def test_the_time_of_the_next_grant_knows_what_is_withheld(self) -> None:
        bucket = TokenBucket(1000, 0.0)
        bucket.change(2000, 0.0)
        now = 0.0
        for _ in range(1000):
            count = min(bucket.room(now), 100)
            bucket.take(count)
            bucket.crossed(count, now)
            due = bucket.when(100, now)
            if not count:
                assert due > now, "it would be asked again at once"
            now = max(due, now)
        assert bucket.used(now) > 1500

    def test_a_rate_that_falls_counts_what_has_crossed(self) -> None:
        bucket = TokenBucket(1000, 0.0)
        bucket.take(120)
        bucket.crossed(120, 0.0)
        bucket.change(100, 0.5)
        assert bucket.room(0.5) == 0
        assert 0 < bucket.room(1.6) <= 13
        bucket.change(1000, 1.6)
        bucket.change(150, 1.7)
        assert bucket.room(1.7) <= 100, "of what it gained, what was taken away is not waited for"

    def test_a_budgets_limits_change_with_its_clients(self) -> None:
        budget = Budget(10_000, 5000, 0.0)
        for flow in (1, 2):
            budget.open(flow, 0.0)
            budget.join(flow, "a", 0.0)
        budget.change(1000, 500, 0.0)
        budget.open(3, 0.0)
        for flow in (1, 2, 3):
            budget.ask(flow, OUT, 9000)
        moved = {1: 0, 2: 0, 3: 0}
        now = 0.0
        while now < 5.0:
            for flow, _way, nbytes in budget.grants(now):
                moved[flow] += nbytes
                budget.crossed(flow, nbytes, now)
            due = budget.next(now)
            assert due is not None
            now = max(due, now + 0.001)
        assert moved[1] + moved[2] == pytest.approx(5 * 480, rel=0.15)
        assert moved[3] == pytest.approx(5 * 480, rel=0.15)


@each_row("each", [None, 60_000])
@each_row("spent", [0.0, 0.05, 0.5, 3.0])
def test_a_server_that_is_started_again_keeps_the_budget_of_both(
    each: int | None, spent: float
) -> None:
    """The second knows nothing of the first, which has saved up bytes for so long, or spent all."""
    first, second = Played(100_000, each), Played(100_000, each)
    for played in (first, second):
        if played is second:
            second.now = first.now
            second.budget = Budget(100_000, each, second.now)
            second.budget.owe(second.now)
        for flow in (1, 2):
            played.budget.open(flow, played.now)
            played.budget.join(flow, f"client-{flow}", played.now)
        if played is first:
            first.run(2.0)
        played.run(spent if played is first else 3.0, hungry=(1, 2))
    both = Played(None, 1)
    both.crossed = [*first.crossed, *second.crossed]
    assert both.busiest() <= 100_000
    for flow in (1, 2):
        assert both.busiest([flow]) <= (each or 100_000)
    assert second.moved(1) + second.moved(2) >= 0.96 * 100_000 * 3 - 40_000
