"""FRED's model: an order of clients, no clock. Each turn a client computes, pushes, and fetches.

The engine, the algorithms, gates and codecs are those of the server, and the clients those of real
runs; only who comes next is decided here (`aiops.sim.turns.selection`). Nothing depends on time or
on threads, so equal seeds give equal results, to the last bit.

Source: Odena, "Faster Asynchronous SGD", 2016, section 3.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from aiops.client.params import Params
from aiops.common.closing import Closing
from aiops.engine.engine import Engine
from aiops.errors import UsageError
from aiops.model.layout import Array, Ints
from aiops.sim.turns.memory import MemoryServer, Seat
from aiops.sim.turns.selection import Selection
from aiops.sim.turns.task import Batches, Task

_PASSED = 64  # turns per client, all passed over, after which nobody's will come any more


@dataclass(slots=True)
class _Computed:
    """A client's gradient, computed before its turn."""

    iteration: int
    done: Future[None]
    room: Params


class Dispatcher(Closing):
    """A server and its clients, who take turns.

    Parameters
    ----------
    engine
        The server's; its model is defined here.
    task
        What is trained.
    batches
        Which examples come when.
    selection
        Who is next.
    clients
        How many there are.
    seed
        Of the initial parameters.
    waits
        Whether a client waits for the answer to its push (`aiops.sim.turns.ahead`).
    jobs
        How many gradients are computed at the same time; the results are the same.
    handed
        Whether messages are handed over, or cross as bytes; the results are the same.
    pieces
        Of bytes: says how many arrive at a time; the results are the same.

    Attributes
    ----------
    iteration
        Turns so far: gradients of one mini-batch each.
    """

    def __init__(
        self,
        engine: Engine,
        task: Task,
        batches: Batches,
        selection: Selection,
        *,
        clients: int,
        seed: int,
        waits: bool = True,
        jobs: int = 1,
        handed: bool = True,
        pieces: Callable[[], int] | None = None,
    ) -> None:
        self.engine, self.task, self.batches, self.selection = engine, task, batches, selection
        self.server = MemoryServer(engine, handed=handed, pieces=pieces)
        initial = task.initial(seed)
        self.seats = [
            Seat(self.server, f"client-{i}", initial, ahead=not waits) for i in range(clients)
        ]
        self.iteration = 0
        self._drawn: deque[int] = deque()  # turns that have been looked at ahead
        self._ended: UsageError | None = None  # what the rule had to say after these
        self._again: dict[int, Ints] = {}  # mini-batches whose gradients were refused, by client
        self._rooms = [self.seats[0].params.like()]
        self._ahead: dict[int, _Computed] = {}  # by client
        self._pool: ThreadPoolExecutor | None = None
        self.hire(jobs)

    def hire(self, jobs: int) -> None:
        """Have so many gradients computed at the same time from here on."""
        self.close()
        recompute = self.engine.plan.get("recompute")  # then nobody knows the next mini-batch
        self._pool = ThreadPoolExecutor(jobs) if jobs > 1 and not recompute else None
        self._window = 3 * jobs

    def __getstate__(self) -> dict[str, Any]:
        """Return what a checkpoint has: no threads, nor what they are at, which can be had again.

        See `aiops.sim.turns.graph`.
        """
        return {**self.__dict__, "_pool": None, "_ahead": {}}

    def run(self, iterations: int, stopping: Callable[[], bool] = lambda: False) -> None:
        """Take so many turns; none after ``stopping`` has said so.

        Raises
        ------
        UsageError
            When all clients wait for each other.
        Refused
            When the server takes a gradient for no good: its values are not finite, say.
        """
        for _ in range(iterations):
            if stopping():
                break
            self.turn()

    def turn(self) -> int:
        """Have the next client compute a gradient, and all that follows; return its number."""
        client = self._next()
        seat = self.seats[client]
        if self._pool is not None:
            self._look_ahead(self._pool, client)
        room, rows = self._gradient(client, seat)
        seat.give(room)
        self._rooms.append(room)
        if seat.refused:
            self._again[client] = rows
        self.iteration += 1
        return client

    def _next(self) -> int:
        """Return whose turn it is, who waits being passed over."""
        passed = 0
        while True:
            client = self._draw()
            if not self.seats[client].waits:
                return client
            passed += 1
            if passed == _PASSED * len(self.seats):
                raise UsageError(self._stuck(passed))

    def _draw(self) -> int:
        if self._drawn:
            return self._drawn.popleft()
        if self._ended is not None:
            raise self._ended
        return next(self.selection)

    def _stuck(self, passed: int) -> str:
        """Say why nobody can be found whose turn it is."""
        waiting = sum(seat.waits for seat in self.seats)
        name = self.engine.algorithm.name
        if waiting == len(self.seats):
            return (
                f"all {waiting} clients wait, and {name} answers none of them: it waits for more"
                " of them than there are"
            )
        return (
            f"{passed} times in a row the rule selected nobody but clients that wait for {name}'s"
            f" answer ({waiting} of {len(self.seats)} do): choose a rule by which everyone's turn"
            " comes"
        )

    def _gradient(self, client: int, seat: Seat) -> tuple[Params, Ints]:
        """Return a client's gradient, and of which examples."""
        rows = self._again.pop(client, None)
        if rows is None:
            rows = self.batches.rows(self.iteration)
        computed = self._ahead.pop(client, None)
        if computed is not None:
            computed.done.result()
            if computed.iteration == self.iteration:
                return computed.room, rows
            self._rooms.append(computed.room)
        room = self._room()
        self.task.gradient(seat.params, rows, room)
        return room, rows

    def _room(self) -> Params:
        return self._rooms.pop() if self._rooms else self.seats[0].params.like()

    def _look_ahead(self, pool: ThreadPoolExecutor, now: int) -> None:
        """Have the gradients of the next turns computed meanwhile.

        Until its turn nobody changes the parameters of a client of which nothing is under way; but
        at its turn its client does, and ``now`` is the one whose turn it is. Who will have to wait,
        and be passed over, is not known yet: that is found out when it comes to it.
        """
        while len(self._drawn) < self._window and self._ended is None:
            try:
                self._drawn.append(next(self.selection))
            except UsageError as error:  # it may be that so many turns are not taken at all
                self._ended = error
        taken = {now}
        for distance, client in enumerate(self._drawn):
            seat = self.seats[client]
            if client in taken or client in self._ahead or seat.strategy.under_way is not None:
                continue
            taken.add(client)
            iteration = self.iteration + 1 + distance
            room, rows = self._room(), self.batches.rows(iteration)
            done = pool.submit(self.task.gradient, seat.params, rows, room)
            self._ahead[client] = _Computed(iteration, done, room)

    def finish(self) -> None:
        """Have every client push what it has held back, and nobody computes any more."""
        for seat in self.seats:
            seat.finish()

    @property
    def model(self) -> Mapping[str, Array]:
        """The server's parameters, read-only."""
        store = self.engine.store
        assert store is not None
        return store.current.arena.shown

    def close(self) -> None:
        """End the threads."""
        pool, self._pool = self._pool, None
        if pool is not None:
            pool.shutdown(cancel_futures=True)
            self._ahead.clear()
