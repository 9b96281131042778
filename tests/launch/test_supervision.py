"""The decisions of a job, without any process."""

from __future__ import annotations

from collections.abc import Iterable
from math import inf

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aiops.launch.supervision import (
    END,
    INTERRUPT,
    KILL,
    LIMIT,
    SERVER,
    Finish,
    JobEvent,
    JobInterrupted,
    JobOrder,
    JobTick,
    ProcessEnded,
    Say,
    ServerReady,
    Start,
    Stop,
    Supervision,
    WorkersSeen,
)

URL = "aiops://127.0.0.1:7171"


def job(
    workers: int = 2, *, restarts: int = 3, state: bool = False, writes: bool = False
) -> Supervision:
    """A job whose workers have been started, at time 0."""
    made = Supervision(workers, max_restarts=restarts, keeps_state=state, writes=writes)
    assert made.begin() == [Start(SERVER, 0)]
    assert made.wake_at == inf
    assert made.handle(ServerReady(0.0, URL)) == [Start(rank, 0) for rank in range(workers)]
    return made


def deeds(orders: Iterable[JobOrder]) -> list[JobOrder]:
    """The orders that are not sentences."""
    return [order for order in orders if not isinstance(order, Say)]


def texts(orders: Iterable[JobOrder]) -> str:
    return " | ".join(order.text for order in orders if isinstance(order, Say))


class TestToTheEnd:
    def test_workers_start_when_the_server_has_told_its_url(self) -> None:
        job()

    def test_the_server_is_asked_to_end_after_the_last_worker_and_may_take_its_time(self) -> None:
        made = job()
        assert made.handle(ProcessEnded(1.0, 0, 0)) == []
        assert made.handle(ProcessEnded(2.0, 1, 0)) == [Stop(SERVER, END)]
        assert made.wake_at == inf
        assert made.handle(ProcessEnded(99.0, SERVER, 0)) == [Finish(0)]

    def test_a_server_that_fails_to_save_is_a_failure(self) -> None:
        made = job(1)
        made.handle(ProcessEnded(1.0, 0, 0))
        orders = made.handle(ProcessEnded(2.0, SERVER, 1))
        assert orders == [Say("the server ended with status 1"), Finish(1)]


class TestWorkers:
    def test_one_that_is_ended_by_a_signal_is_started_again(self) -> None:
        made = job()
        orders = made.handle(ProcessEnded(1.0, 1, -9))
        assert not deeds(orders)
        assert "worker 1 was ended by signal 9; it is started again in 0.2 s (1 of 3" in texts(
            orders
        )
        assert made.wake_at == 1.2
        assert made.handle(JobTick(1.2)) == [Start(1, 1)]
        assert made.wake_at == inf

    def test_pauses_become_longer_and_there_is_an_end(self) -> None:
        made, now, pauses = job(restarts=6), 0.0, []
        for _ in range(6):
            made.handle(ProcessEnded(now, 1, -9))
            pauses.append(made.wake_at - now)
            now = made.wake_at
            made.handle(JobTick(now))
        assert pauses == pytest.approx([0.2, 1.0, 3.0, 10.0, 10.0, 10.0])
        orders = made.handle(ProcessEnded(now, 1, -9))
        assert not deeds(orders)
        assert "started again 6 times, and is not now" in texts(orders)
        assert "1 of 2 workers go on without worker 1" in texts(orders)
        assert deeds(made.handle(ProcessEnded(now, 0, 0))) == [Stop(SERVER, END)]
        assert made.handle(ProcessEnded(now, SERVER, 0)) == [Finish(128 + 9)]

    def test_one_that_fails_after_it_has_joined_is_started_again(self) -> None:
        made = job()
        made.handle(ProcessEnded(1.0, 0, 1, joined=True))
        assert made.handle(JobTick(1.2)) == [Start(0, 1)]
        made.handle(ProcessEnded(2.0, 0, 1))  # it had joined, the time before
        assert made.wake_at == 3.0

    def test_one_that_fails_before_ends_the_job(self) -> None:
        made = job(3)
        orders = made.handle(ProcessEnded(1.0, 0, 7))
        assert deeds(orders) == [Stop(1, INTERRUPT), Stop(2, INTERRUPT)]
        assert "before it had joined the server: the program would fail again" in texts(orders)
        made.handle(ProcessEnded(1.1, 1, -2))
        assert made.handle(ProcessEnded(1.2, 2, -2)) == [Stop(SERVER, END)]
        assert made.handle(ProcessEnded(1.3, SERVER, 0)) == [Finish(7)]

    def test_without_restarts_the_others_go_on(self) -> None:
        made = job(restarts=0)
        orders = made.handle(ProcessEnded(1.0, 0, -9))
        assert not deeds(orders)
        assert made.wake_at == inf
        made.handle(ProcessEnded(5.0, 1, 0))
        assert made.handle(ProcessEnded(5.1, SERVER, 0)) == [Finish(137)]

    def test_when_all_are_given_up_the_job_ends(self) -> None:
        made = job(1, restarts=0)
        orders = made.handle(ProcessEnded(1.0, 0, -11))
        assert deeds(orders) == [Stop(SERVER, END)]
        assert "go on" not in texts(orders)


class TestServer:
    def test_one_that_keeps_its_state_is_started_again(self) -> None:
        made = job(state=True)
        orders = made.handle(ProcessEnded(1.0, SERVER, -9))
        assert "the server was ended by signal 9; it is started again" in texts(orders)
        assert made.handle(JobTick(1.2)) == [Start(SERVER, 1)]
        assert made.handle(ServerReady(1.5, URL)) == []  # the workers are there

    def test_of_one_that_does_not_the_model_is_lost(self) -> None:
        made = job()
        orders = made.handle(ProcessEnded(1.0, SERVER, -9))
        assert "the model is lost with it: with --state DIR it would be started again" in texts(
            orders
        )
        assert deeds(orders) == [Stop(0, INTERRUPT), Stop(1, INTERRUPT)]
        made.handle(ProcessEnded(1.1, 0, 1))
        assert made.handle(ProcessEnded(1.1, 1, 1)) == [Finish(137)]

    def test_one_that_has_been_superseded_is_not_started_again(self) -> None:
        made = job(state=True)
        assert Stop(0, INTERRUPT) in made.handle(ProcessEnded(1.0, SERVER, 3))

    def test_one_whose_settings_or_own_code_cannot_work_is_not_started_again(self) -> None:
        made = job(state=True)
        orders = made.handle(ProcessEnded(1.0, SERVER, 64))
        assert "status 64, as it would again: mend what it says" in texts(orders)
        assert deeds(orders) == [Stop(0, INTERRUPT), Stop(1, INTERRUPT)]

    @pytest.mark.parametrize("state", [False, True])
    def test_one_that_never_was_there_ends_the_job(self, state: bool) -> None:
        made = Supervision(2, max_restarts=3, keeps_state=state)
        made.begin()
        orders = made.handle(ProcessEnded(1.0, SERVER, 2))
        assert orders == [Say("the server ended with status 2"), Finish(2)]

    def test_one_that_ends_by_itself_without_a_word_is_a_failure(self) -> None:
        made = Supervision(1, max_restarts=3, keeps_state=False)
        made.begin()
        assert Finish(1) in made.handle(ProcessEnded(1.0, SERVER, 0))

    def test_it_dies_as_the_last_worker_ends(self) -> None:
        made = job(1, state=True)
        made.handle(ProcessEnded(1.0, SERVER, -9))
        assert made.handle(ProcessEnded(1.1, 0, 0)) == [Finish(0)]
        assert made.wake_at == inf


class TestInterrupts:
    def test_workers_are_interrupted_then_killed_then_the_server_ends(self) -> None:
        made = job()
        assert made.handle(JobInterrupted(10.0, 2)) == [Stop(0, INTERRUPT), Stop(1, INTERRUPT)]
        assert made.handle(ProcessEnded(10.1, 0, 1)) == []
        assert made.wake_at == 11.0
        assert made.handle(JobTick(11.0)) == [Stop(1, KILL)]
        assert made.handle(ProcessEnded(11.1, 1, -9)) == [Stop(SERVER, END)]
        assert made.wake_at == 10.0 + LIMIT
        assert made.handle(JobTick(10.0 + LIMIT)) == [Stop(SERVER, KILL)]
        assert Finish(130) in made.handle(ProcessEnded(12.0, SERVER, -9))

    @pytest.mark.parametrize("kind", [{"state": True}, {"writes": True}])
    def test_a_server_that_has_something_to_write_is_waited_for(
        self, kind: dict[str, bool]
    ) -> None:
        made = job(1, **kind)
        made.handle(JobInterrupted(10.0, 15))
        assert made.handle(ProcessEnded(10.1, 0, 1)) == [Stop(SERVER, END)]
        made.handle(JobTick(11.0))
        orders = made.handle(JobTick(10.0 + LIMIT))
        assert texts(orders) == "the server is writing what it has to keep; another Ctrl-C kills it"
        assert not deeds(orders)
        assert made.handle(JobInterrupted(20.0, 2)) == [Stop(SERVER, KILL)]
        assert Finish(143) in made.handle(ProcessEnded(20.1, SERVER, -9))

    def test_it_takes_less_than_two_seconds(self) -> None:
        assert LIMIT < 2

    def test_a_second_one_kills_all(self) -> None:
        made = job()
        made.handle(JobInterrupted(10.0, 2))
        assert made.handle(JobInterrupted(10.1, 2)) == [
            *(Stop(0, KILL), Stop(1, KILL), Stop(SERVER, KILL))
        ]

    def test_before_the_server_was_ready(self) -> None:
        made = Supervision(2, max_restarts=3, keeps_state=False)
        made.begin()
        assert made.handle(JobInterrupted(1.0, 2)) == [Stop(SERVER, END)]
        assert made.handle(ServerReady(1.1, URL)) == []
        assert made.handle(ProcessEnded(1.2, SERVER, 0)) == [Finish(130)]

    def test_what_was_to_be_started_again_is_not(self) -> None:
        made = job(1, state=True)
        made.handle(ProcessEnded(1.0, SERVER, -9))
        made.handle(ProcessEnded(1.1, 0, -9))
        assert made.handle(JobInterrupted(1.15, 2)) == [Finish(130)]
        assert made.wake_at == inf


class TestUnderAnotherLauncher:
    """The server and the worker of rank 0 are here, those of ranks 1 and 2 are not."""

    def job(self, *, state: bool = False) -> Supervision:
        made = Supervision(1, max_restarts=3, keeps_state=state, others=2, linger=60.0, grace=20.0)
        made.begin()
        assert made.handle(ServerReady(0.0, URL)) == [Start(0, 0)]
        return made

    def seen(self, made: Supervision, time: float, joined: str, present: str) -> list[JobOrder]:
        def ranks(text: str) -> frozenset[int]:
            return frozenset(map(int, text))

        return made.handle(WorkersSeen(time, ranks(joined), ranks(present)))

    def test_the_server_stays_until_all_have_been_there_and_gone(self) -> None:
        made = self.job()
        self.seen(made, 1.0, "01", "01")
        assert made.handle(ProcessEnded(2.0, 0, 0)) == []
        assert made.wake_at == inf  # one is there
        assert self.seen(made, 3.0, "012", "2") == []
        assert self.seen(made, 4.0, "012", "") == []
        assert made.wake_at == 7.0
        assert made.handle(JobTick(7.0)) == [Stop(SERVER, END)]
        assert made.handle(ProcessEnded(7.5, SERVER, 0)) == [Finish(0)]

    def test_one_that_was_cut_off_comes_back(self) -> None:
        made = self.job()
        self.seen(made, 1.0, "012", "12")
        made.handle(ProcessEnded(2.0, 0, 0))
        self.seen(made, 3.0, "012", "")
        self.seen(made, 5.0, "012", "1")
        assert made.wake_at == inf
        self.seen(made, 6.0, "012", "")
        self.seen(made, 8.0, "012", "")
        assert made.wake_at == 9.0

    def test_those_that_never_come_are_waited_for_longer(self) -> None:
        made = self.job()
        self.seen(made, 1.0, "01", "0")
        made.handle(ProcessEnded(2.0, 0, 0))
        assert made.wake_at == 61.0
        orders = made.handle(JobTick(61.0))
        assert deeds(orders) == [Stop(SERVER, END)]
        assert "the workers of 1 ranks (2) have not joined, and none has been there for 60 s" in (
            texts(orders)
        )

    def test_a_server_that_is_started_again_waits_for_them_again(self) -> None:
        made = self.job(state=True)
        self.seen(made, 1.0, "012", "")
        made.handle(ProcessEnded(2.0, SERVER, -9))
        made.handle(ProcessEnded(2.1, 0, 0))
        assert made.handle(JobTick(2.2)) == [Start(SERVER, 1)]
        assert made.wake_at == inf
        made.handle(ServerReady(3.0, URL))
        assert made.wake_at == inf  # until the first look
        self.seen(made, 3.5, "012", "")
        assert made.wake_at == 6.5

    def test_its_worker_is_the_launchers_to_start_again(self) -> None:
        made = self.job()
        self.seen(made, 1.0, "012", "12")
        orders = made.handle(ProcessEnded(2.0, 0, -9, joined=True))
        assert orders == [Say("worker 0 was ended by signal 9")]
        self.seen(made, 3.0, "012", "")
        made.handle(JobTick(6.0))
        assert made.handle(ProcessEnded(6.5, SERVER, 0)) == [Finish(137)]

    def test_a_signal_is_passed_on_as_it_is_and_the_worker_has_time(self) -> None:
        made = self.job()
        self.seen(made, 1.0, "012", "12")
        assert made.handle(JobInterrupted(10.0, 15)) == [Stop(0, INTERRUPT, 15)]
        assert made.wake_at == 30.0
        assert made.handle(ProcessEnded(12.0, 0, 0)) == [Stop(SERVER, END)]  # though others are
        assert made.handle(ProcessEnded(12.1, SERVER, 0)) == [Finish(143)]

    def test_a_worker_does_not_wait_for_a_server_that_has_gone_first(self) -> None:
        made = self.job()
        made.handle(JobInterrupted(10.0, 15))
        made.handle(ProcessEnded(11.0, SERVER, 0))
        assert made.wake_at == 12.0
        assert made.handle(JobTick(12.0)) == [Stop(0, KILL)]


class Machine:
    """Runs a job's processes in no time at all, and ends them as they are drawn."""

    def __init__(self, supervision: Supervision) -> None:
        self.supervision = supervision
        self.now, self.status = 0.0, None
        self.running: set[int] = set()
        self.starts = dict[int, int]()
        self.obey(supervision.begin())

    def obey(self, orders: list[JobOrder]) -> None:
        for order in orders:
            assert self.status is None, "an order after the end"
            if isinstance(order, Start):
                assert order.rank not in self.running
                assert order.restarts == self.starts.get(order.rank, 0)
                self.starts[order.rank] = order.restarts + 1
                self.running.add(order.rank)
            elif isinstance(order, Stop):
                assert order.rank in self.running
            elif isinstance(order, Finish):
                assert not self.running, "processes are left"
                self.status = order.status

    def handle(self, event: JobEvent) -> None:
        if isinstance(event, ProcessEnded):
            self.running.discard(event.rank)
        self.obey(self.supervision.handle(event))


@given(
    *(st.data(), st.integers(1, 4), st.integers(0, 2), st.booleans(), st.booleans()),
    st.sampled_from([None, 0, 2]),
)
def test_whatever_happens_the_job_ends_with_nothing_left(
    data: st.DataObject, workers: int, restarts: int, state: bool, writes: bool, others: int | None
) -> None:
    made = Supervision(
        workers, max_restarts=restarts, keeps_state=state, writes=writes, others=others
    )
    machine = Machine(made)
    for _ in range(data.draw(st.integers(0, 20))):
        if machine.status is not None:
            return
        machine.now += data.draw(st.sampled_from([0.0, 0.1, 1.0]))
        kinds = ["ended"] * bool(machine.running) + ["tick"] * (made.wake_at < inf)
        kinds += ["ready", "seen"] * (SERVER in machine.running) + ["interrupted"]
        kind = data.draw(st.sampled_from(kinds))
        if kind == "ended":
            rank = data.draw(st.sampled_from(sorted(machine.running)))
            status = data.draw(st.sampled_from([0, 1, -9]))
            machine.handle(ProcessEnded(machine.now, rank, status, data.draw(st.booleans())))
        elif kind == "tick":
            assert made.wake_at > -inf
            machine.now = max(machine.now, made.wake_at)
            machine.handle(JobTick(machine.now))
        elif kind == "ready":
            machine.handle(ServerReady(machine.now, URL))
        elif kind == "seen":
            ranks = st.frozensets(st.integers(0, 5))
            machine.handle(WorkersSeen(machine.now, data.draw(ranks), data.draw(ranks)))
        else:
            machine.handle(JobInterrupted(machine.now, 2))
    for _ in range(2):
        if machine.status is None:
            machine.handle(JobInterrupted(machine.now, 2))
    for rank in sorted(machine.running, reverse=True):
        assert machine.status is None
        machine.handle(ProcessEnded(machine.now, rank, -9))
    assert machine.status is not None
    assert all(count <= 1 + restarts for count in machine.starts.values())
