"""Decide which workers of a Ray job are asked for, begun, replaced and given up; no Ray here.

Ray places the workers; this says how many are wanted, and what follows from an end. The rules:

* The first ``least`` workers are asked for together. They begin when all of them have a place.
* Then the others are asked for, up to ``most``. Each begins when it has a place, however late: a
  request that waits is what makes Ray's autoscaler add machines.
* A worker whose machine is lost is asked for again at once, and as often as that happens.
* A worker whose process dies, or whose loop raises after it has joined the server, is replaced up
  to ``max_restarts`` times, each time after a longer pause. Then the others go on without it.
* A loop that raises before it has ever joined would raise again: the job ends at once.
* When a loop has returned, the work comes to its end: workers that have not begun are not wanted
  any more. Those that fail are still replaced.
* While the server is being started again no worker is asked for: it could only wait, and its start
  would delay the server's where both are on one machine.
* If no worker has a place for ``patience`` seconds, the job ends.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from math import inf
from typing import TypeAlias

from aiops.common.frozen import value
from aiops.errors import UsageError
from aiops.launch.supervision import pause_before_restart

RETURNED, RAISED, DIED, NODE_LOST = "returned", "raised", "died", "node lost"
"""The ways in which a worker ends."""


@value
class WorkerPlaced:
    """Ray has started a worker's actor, on this node."""

    time: float
    rank: int
    node: str


@value
class WorkerEnded:
    """A worker has ended, or its request has failed.

    Attributes
    ----------
    time
        In seconds.
    rank
        Its number.
    how
        `RETURNED`, `RAISED`, `DIED` or `NODE_LOST`.
    why
        The error, as a sentence; empty if it has returned.
    joined
        The server has known it.
    """

    time: float
    rank: int
    how: str
    why: str = ""
    joined: bool = False


@value
class ServerLost:
    """The server has ended, and Ray does not start it again."""

    time: float
    why: str


@value
class ServerDown:
    """The server's machine is lost, and Ray starts the server elsewhere."""

    time: float


@value
class ServerUp:
    """The server answers."""

    time: float


@value
class GroupTick:
    """A time has come that `WorkerGroup.wake_at` gave."""

    time: float


GroupEvent: TypeAlias = WorkerPlaced | WorkerEnded | ServerLost | ServerDown | ServerUp | GroupTick


@value
class RequestWorker:
    """Ask Ray for the place of a worker; ``together``: it is one of the first ``least``."""

    rank: int
    together: bool


@value
class BeginLoop:
    """Have a worker begin its loop.

    Attributes
    ----------
    rank
        Its number.
    restarts
        How often it has been begun before.
    local_rank, local_workers
        Its number among the workers on its node, and how many those are now.
    """

    rank: int
    restarts: int
    local_rank: int
    local_workers: int


@value
class ReleaseWorker:
    """End a worker's actor, or its request; ``forgo``: give up its place too."""

    rank: int
    forgo: bool


@value
class Notify:
    """Tell the user a sentence."""

    text: str


@value
class GroupFinished:
    """All workers have ended.

    Attributes
    ----------
    failures
        By rank, why a worker was given up.
    error
        Why the job as a whole has failed; empty: at least one loop has returned.
    """

    failures: dict[int, str]
    error: str


GroupOrder: TypeAlias = RequestWorker | BeginLoop | ReleaseWorker | Notify | GroupFinished

ABSENT, ASKED, PLACED, RUNS, PAUSES, OVER = "absent", "asked", "placed", "runs", "pauses", "over"
"""The states of a seat."""


class _Seat:
    """The facts about the worker of one rank."""

    def __init__(self, rank: int) -> None:
        self.rank, self.state = rank, ABSENT
        self.begun = self.restarts = 0  # how often in all, and after failures
        self.due = inf  # when it is asked for again
        self.joined = False
        self.node, self.local_rank = "", 0


class WorkerGroup:
    """The decisions about the workers of one job.

    Parameters
    ----------
    least, most
        Workers that the job begins with, at least 1, and that it has at most.
    max_restarts
        How often each is replaced after a failure that is not its machine's.
    patience
        Seconds that it goes on without any worker that runs.
    now
        The time.

    Raises
    ------
    UsageError
        When the numbers make no sense.
    """

    least: int
    most: int

    def __init__(
        self, least: int, most: int, *, max_restarts: int, patience: float, now: float
    ) -> None:
        if not 1 <= least <= most:
            raise UsageError(
                f"min_workers must be from 1 to max_workers, not {least} with max_workers={most}"
            )
        if max_restarts < 0:
            raise UsageError(f"max_restarts must be 0 or more, not {max_restarts}")
        if not patience > 0:
            raise UsageError(f"patience must be more than 0 seconds, not {patience}")
        self.least, self.most = least, most
        self._seats = [_Seat(rank) for rank in range(most)]
        self._max_restarts, self._patience = max_restarts, patience
        self._idle_since = now  # since then none has run; inf: one runs
        self._began = self._ending = self._finished = False
        self._server_down = False
        self._held: list[RequestWorker] = []  # until the server is up
        self._returned = 0
        self._failures: dict[int, str] = {}
        self._error = ""

    @property
    def wake_at(self) -> float:
        """The time at which a `GroupTick` is due; inf: there is none before another event."""
        return min(self._idle_since + self._patience, *(seat.due for seat in self._seats))

    @property
    def running(self) -> int:
        """The number of workers whose loops run."""
        return sum(seat.state == RUNS for seat in self._seats)

    def begin(self) -> list[GroupOrder]:
        """Return the first orders."""
        return [self._ask(seat) for seat in self._seats[: self.least]]

    def handle(self, event: GroupEvent) -> list[GroupOrder]:
        """Return what follows from an event."""
        if self._finished:
            return []
        orders: Iterable[GroupOrder] = ()
        if isinstance(event, WorkerPlaced):
            orders = self._placed(event)
        elif isinstance(event, WorkerEnded):
            orders = self._ended(event)
        elif isinstance(event, ServerLost):
            orders = self._fail(event.why)
        elif isinstance(event, ServerDown):
            self._server_down = True
        elif isinstance(event, ServerUp):
            self._server_down = False
        found = [*orders, *self._passed(event.time)]
        found += self._finish()
        return self._without_held(found)

    def _without_held(self, orders: list[GroupOrder]) -> list[GroupOrder]:
        """Hold back requests while the server is down; return them when it is up."""
        if self._server_down:
            self._held += [order for order in orders if isinstance(order, RequestWorker)]
            return [order for order in orders if not isinstance(order, RequestWorker)]
        held, self._held = self._held, []
        return [*orders, *(each for each in held if self._seats[each.rank].state == ASKED)]

    def _ask(self, seat: _Seat) -> RequestWorker:
        seat.state, seat.due = ASKED, inf
        return RequestWorker(seat.rank, seat.rank < self.least)

    def _placed(self, event: WorkerPlaced) -> Iterator[GroupOrder]:
        seat = self._seats[event.rank]
        if seat.state != ASKED:
            return
        here = {s.local_rank for s in self._seats if s.node == event.node and s is not seat}
        seat.state, seat.node = PLACED, event.node
        seat.local_rank = next(number for number in range(self.most) if number not in here)
        if self._began:
            yield self._start(seat, event.time)
            return
        first = self._seats[: self.least]
        if all(each.state == PLACED for each in first):
            self._began = True
            for each in first:
                yield self._start(each, event.time)
            if not self._ending:
                yield from [self._ask(each) for each in self._seats[self.least :]]

    def _start(self, seat: _Seat, now: float) -> BeginLoop:
        seat.state = RUNS
        self._idle_since = inf
        seat.begun += 1
        here = sum(each.node == seat.node for each in self._seats)
        return BeginLoop(seat.rank, seat.begun - 1, seat.local_rank, here)

    def _ended(self, event: WorkerEnded) -> Iterator[GroupOrder]:
        seat = self._seats[event.rank]
        if seat.state not in (ASKED, PLACED, RUNS):
            return
        ran = seat.state == RUNS
        seat.node, seat.joined = "", seat.joined or event.joined
        if event.how == RETURNED:
            seat.state = OVER
            self._returned += 1
            yield ReleaseWorker(seat.rank, True)
            yield from self._come_to_an_end()
        elif event.how == NODE_LOST:
            yield ReleaseWorker(seat.rank, False)
            yield Notify(f"worker {seat.rank} is lost with its machine, and is asked for again")
            yield self._ask(seat)
        elif event.how == RAISED and ran and not seat.joined:
            self._failures[seat.rank] = event.why
            yield from self._fail(
                f"the loop of worker {seat.rank} failed before it had joined the server, and would"
                f" fail again, so the job ends: {event.why}"
            )
        else:
            yield from self._replace(seat, event)
        if not self.running:
            self._idle_since = min(self._idle_since, event.time)

    def _replace(self, seat: _Seat, event: WorkerEnded) -> Iterator[GroupOrder]:
        """Have a worker that has failed be asked for again, if it may be."""
        if seat.restarts >= self._max_restarts:
            seat.state = OVER
            self._failures[seat.rank] = event.why
            left = sum(each.state != OVER for each in self._seats)
            yield ReleaseWorker(seat.rank, True)
            yield Notify(
                f"worker {seat.rank} failed, has been replaced {seat.restarts} times, and is not"
                f" now; {left} of {self.most} workers go on without it: {event.why}"
            )
            return
        pause = pause_before_restart(seat.restarts)
        seat.restarts += 1
        seat.state, seat.due = PAUSES, event.time + pause
        yield ReleaseWorker(seat.rank, False)
        yield Notify(
            f"worker {seat.rank} failed, and is replaced in {pause:g} s ({seat.restarts} of"
            f" {self._max_restarts} times): {event.why}"
        )

    def _come_to_an_end(self) -> Iterator[GroupOrder]:
        """Want no more workers than have begun."""
        self._ending = True
        for seat in self._seats:
            if not seat.begun and seat.state in (ABSENT, ASKED, PLACED):
                asked, seat.state, seat.node = seat.state != ABSENT, OVER, ""
                if asked:
                    yield ReleaseWorker(seat.rank, True)

    def _passed(self, now: float) -> Iterator[GroupOrder]:
        """Do what was to be done by now."""
        for seat in self._seats:
            if seat.due <= now:
                yield self._ask(seat)
        if now >= self._idle_since + self._patience:
            yield from self._fail(
                f"no worker has had a place for {self._patience:g} s: `ray status` shows what the"
                " cluster has and what waits; ask for less (resources, min_workers), add machines,"
                " or give it longer (patience)"
            )

    def _fail(self, why: str) -> Iterator[GroupOrder]:
        """End all workers."""
        self._error, self._idle_since = self._error or why, inf
        for seat in self._seats:
            if seat.state in (ASKED, PLACED, RUNS):
                yield ReleaseWorker(seat.rank, True)
            seat.state, seat.due, seat.node = OVER, inf, ""

    def _finish(self) -> Iterator[GroupOrder]:
        states = {seat.state for seat in self._seats}
        if states - {OVER, ABSENT} or OVER not in states:
            return
        if ABSENT in states and not self._returned:
            return  # the others are asked for when the first have begun
        self._finished, self._idle_since = True, inf
        if not self._returned and not self._error:
            self._error = "all workers have been given up"
        yield GroupFinished(self._failures, self._error)
