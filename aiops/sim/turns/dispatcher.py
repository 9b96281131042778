"""FRED's dispatcher: clients in turn, no clock. Each turn a client computes, pushes, and fetches.

The engine, the algorithms, gates and codecs are the server's, and the clients those of real runs. A
selection rule (`aiops.sim.turns.client_selection`) decides which client is next. Nothing depends on
time or on threads, so equal seeds give equal results, to the last bit.

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
from aiops.sim.turns.client_selection import Selection, restore_rule, rule_state
from aiops.sim.turns.memory_server import MemoryServer
from aiops.sim.turns.memory_wire import MemoryLine
from aiops.sim.turns.simulated_client import SimulatedClient
from aiops.sim.turns.task import Batches, Task, compute, initial_parameters
from aiops.store.parameters import Store
from aiops.wire.connection import SinkFor

_PASSED = 64  # turns per client, all passed over, after which the run is taken to be stuck


@dataclass(slots=True)
class _Computed:
    """A client's gradient, computed before its turn."""

    iteration: int
    done: Future[None]
    room: Params


class Dispatcher(Closing):
    """A server and its clients, which take turns.

    Parameters
    ----------
    engine
        The server's; its model is defined here.
    task
        The task that is trained.
    batches
        The examples of each iteration's mini-batch.
    selection
        The rule that selects the next client.
    clients
        The number of clients.
    seed
        Of the initial parameters.
    waits
        Whether a client waits for the answer to its push (`aiops.client.strategies.overlapped`).
    jobs
        Gradients that are computed at the same time; the results are the same.
    line
        Makes a connection (`MemoryServer`); the results are the same.

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
        line: Callable[[SinkFor], MemoryLine] = MemoryLine,
    ) -> None:
        self.engine, self.task, self.batches, self.selection = engine, task, batches, selection
        self.server = MemoryServer(engine, line=line)
        initial = initial_parameters(task, seed)
        self.workers = [
            SimulatedClient(self.server, f"client-{i}", initial, ahead=not waits)
            for i in range(clients)
        ]
        self.iteration = 0
        self._drawn: deque[int] = deque()  # clients selected for the next turns
        self._ended: UsageError | None = None  # the rule's error after these
        self._again: dict[int, Ints] = {}  # mini-batches whose gradients were refused, by client
        self._rooms = [self.workers[0].params.like()]
        self._ahead: dict[int, _Computed] = {}  # by client
        self._pool: ThreadPoolExecutor | None = None
        self.set_jobs(jobs)

    def set_jobs(self, jobs: int) -> None:
        """Compute ``jobs`` gradients at the same time from here on."""
        self.close()
        recompute = self.engine.plan.get("recompute")  # the next mini-batch depends on it
        self._pool = ThreadPoolExecutor(jobs) if jobs > 1 and not recompute else None
        self._window = 3 * jobs

    def run(self, iterations: int, stopping: Callable[[], bool] = lambda: False) -> None:
        """Take ``iterations`` turns, or those until ``stopping`` returns True.

        Raises
        ------
        UsageError
            When all clients wait for each other.
        Refused
            When the server refuses a gradient, for example because it is not finite.
        """
        for _ in range(iterations):
            if stopping():
                break
            self.turn()

    def turn(self) -> int:
        """Compute and push the gradient of the next client; return the client's number."""
        client = self._next()
        worker = self.workers[client]
        if self._pool is not None:
            self._look_ahead(self._pool, client)
        room, rows = self._gradient(client, worker)
        worker.give(room)
        self._rooms.append(room)
        if worker.refused:
            self._again[client] = rows
        self.iteration += 1
        return client

    def _next(self) -> int:
        """Return the next client that does not wait."""
        passed = 0
        while True:
            if self._drawn:
                client = self._drawn.popleft()
            elif self._ended is not None:
                raise self._ended
            else:
                client = next(self.selection)
            if not self.workers[client].waits:
                return client
            passed += 1
            if passed == _PASSED * len(self.workers):
                raise UsageError(self._stuck(passed))

    def _stuck(self, passed: int) -> str:
        """Return the error text for a run in which no client may compute."""
        waiting = sum(worker.waits for worker in self.workers)
        name = self.engine.algorithm.name
        if waiting == len(self.workers):
            return (
                f"all {waiting} clients wait, and {name} answers none of them: it waits for more"
                " of them than there are"
            )
        return (
            f"{passed} times in a row the rule selected only clients that wait for {name}'s answer"
            f" ({waiting} of {len(self.workers)} do): choose a rule that selects every client"
        )

    def _gradient(self, client: int, worker: SimulatedClient) -> tuple[Params, Ints]:
        """Return a client's gradient, and the examples that it is of."""
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
        compute(self.task, worker.params, rows, room)
        return room, rows

    def _room(self) -> Params:
        return self._rooms.pop() if self._rooms else self.workers[0].params.like()

    def _look_ahead(self, pool: ThreadPoolExecutor, now: int) -> None:
        """Start to compute the gradients of the next turns in other threads.

        The parameters of a client do not change before its turn, unless an exchange of it is under
        way; ``now`` is the client that takes its turn. A client may have to wait, and be passed
        over, when its turn comes: its gradient is then dropped.
        """
        while len(self._drawn) < self._window and self._ended is None:
            try:
                self._drawn.append(next(self.selection))
            except UsageError as error:  # these turns may never be taken
                self._ended = error
        taken = {now}
        for distance, client in enumerate(self._drawn):
            worker = self.workers[client]
            if client in taken or client in self._ahead or worker.strategy.under_way is not None:
                continue
            taken.add(client)
            iteration = self.iteration + 1 + distance
            room, rows = self._room(), self.batches.rows(iteration)
            done = pool.submit(compute, self.task, worker.params, rows, room)
            self._ahead[client] = _Computed(iteration, done, room)

    def state(self) -> dict[str, Any]:
        """Return what later turns depend on as plain values, for `restore`.

        The clients and the engine have the rest. Gradients that are ahead are computed again.

        Raises
        ------
        UsageError
            When the selection rule cannot be kept.
        """
        return {
            "iteration": self.iteration,
            "drawn": list(self._drawn),
            "ended": None if self._ended is None else str(self._ended),
            "again": {client: rows.copy() for client, rows in self._again.items()},
            "selection": rule_state(self.selection),
        }

    def restore(self, state: Mapping[str, Any], engine: Engine) -> None:
        """Continue from what `state` returned, before the first turn.

        ``engine``: restored, with the same clients on the same connections.
        """
        restore_rule(self.selection, state["selection"])
        self.iteration, clients = state["iteration"], range(len(self.workers))
        self._drawn.extend(clients[number] for number in state["drawn"])
        self._ended = None if state["ended"] is None else UsageError(state["ended"])
        self._again = {clients[number]: rows for number, rows in state["again"].items()}
        self.engine = engine
        self.server.resume(engine)

    def finish(self) -> None:
        """Let every client push what it has held back; no more gradients are computed."""
        for worker in self.workers:
            worker.finish()

    @property
    def store(self) -> Store:
        """The server's parameters, and their versions."""
        return self.engine.defined_store

    @property
    def model(self) -> Mapping[str, Array]:
        """The server's parameters by name, read-only."""
        return self.store.current.arena.shown

    @property
    def evaluated(self) -> Mapping[str, Array]:
        """The parameters by name where the model is evaluated, read-only."""
        training = self.engine.training
        assert training is not None, "there is a model from the start"
        return training.evaluated().shown

    def close(self) -> None:
        """End the threads."""
        pool, self._pool = self._pool, None
        if pool is not None:
            pool.shutdown(cancel_futures=True)
            self._ahead.clear()
