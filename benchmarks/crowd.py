"""Clients that come and go, and do a little of everything to a server, at a stated pace.

Every client is new: a name, a kind, a number of calls. It pushes all tensors or some of them
(so that payloads differ in length and, by the server's choice of codecs, in kind), exchanges,
fetches, has rows of a table; some are behind a slow line, and hold a version for as long as its
reply takes; some read the server's own arrays, and hold theirs until the next call. They leave with
a goodbye, or in the middle of a message.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field

import numpy as np

import aiops
from aiops.client.params import Params
from aiops.common.closing import Closing
from aiops.errors import ConnectionLost
from aiops.lab.slow_link import SlowLink
from aiops.model.layout import Array
from benchmarks.processor_time import processor_time

TABLE = "rows"
PATIENCE = 600.0
"""Seconds that a client or a server waits for the other."""
_ROWS, _WIDTH, _MOST_ROWS = 20_000, 16, 512
_CALLS = 25  # of a client, on average
_RUDE = 0.3  # of the clients leave in the middle of a message
_AWHILE = 0.05  # seconds after which these do, at most
_SLOW = "50Mbit/s"  # of the line that some are behind, all of them together
_BEHIND = 2.0  # seconds that are made up for: a client stopped for longer does not hurry
_NAP = 1.0  # seconds between looks at whether time is up, at most


def model(nbytes: int) -> dict[str, Array]:
    """Return parameters of about ``nbytes`` bytes: matrices and vectors, large and small.

    Their names begin with the letters a to e, by which a server may choose codecs.
    """
    rng, found, left = np.random.default_rng(0), dict[str, Array](), nbytes // 4
    for number in range(20):
        size = left // 4
        across = int(size**0.5)
        shape = (size // across, across) if number % 4 else (size,)
        array = rng.standard_normal(shape).astype(np.float32)
        found[f"{'abcde'[number % 5]}{number}"] = array
        left -= array.size
    return found


class Governor:
    """Keeps the processor time of this process and of others at a share of one core.

    Parameters
    ----------
    share
        1: one core's.
    pids
        The others.
    over
        Set when all is over.
    """

    def __init__(self, share: float, pids: Sequence[int], over: threading.Event) -> None:
        self._share, self._pids, self._over = share, pids, over
        self._began, self._before = time.monotonic(), self._spent()
        self._late = 0.0  # seconds that were left unused, and are not made up for

    def _spent(self) -> float:
        used = map(processor_time, self._pids)  # None: it has ended, which its clients report
        return time.process_time() + sum(each.total for each in used if each is not None)

    @property
    def used(self) -> float:
        """The share of a core so far."""
        return (self._spent() - self._before) / max(time.monotonic() - self._began, 1e-9)

    def rest(self) -> bool:
        """Wait until there is time for one more call; return whether all is over."""
        while True:
            due = self._began + self._late + (self._spent() - self._before) / self._share
            ahead = due - time.monotonic()
            self._late += max(-ahead - _BEHIND, 0.0)
            if self._over.wait(min(max(ahead, 0.0), _NAP)) or ahead <= _NAP:
                return self._over.is_set()


@dataclass
class ClientTally:
    """Counts: ``pushed`` have been answered, ``attempted`` may have been applied, and so on."""

    clients: int = 0
    rude: int = 0
    calls: int = 0
    pushed: int = 0
    attempted: int = 0
    rows: int = 0
    lock: threading.Lock = field(default_factory=threading.Lock)

    def add(self, **counts: int) -> None:
        """Count."""
        with self.lock:
            for name, count in counts.items():
                setattr(self, name, getattr(self, name) + count)


class Crowd(Closing):
    """Keeps a fixed number of clients at a server from `begin` on, each replaced when it leaves.

    Parameters
    ----------
    url
        The server's.
    seats
        Clients at a time.
    params
        The model; the first client defines it.
    near
        Whether the server shares memory: some then read its own arrays, and none is behind a line.
    table
        Whether the model has a table, too.
    known
        Clients that come and go before: a server remembers that number of those that left.
    seed
        Of all that is drawn.

    Attributes
    ----------
    tally
        What was done.
    """

    def __init__(
        self,
        url: str,
        seats: int,
        params: Mapping[str, Array],
        *,
        near: bool = False,
        table: bool = False,
        known: int = 0,
        seed: int = 0,
    ) -> None:
        self.tally = ClientTally()
        self._url, self._seats, self._params = url, seats, params
        self._near, self._seed = near, seed
        self._tables = {TABLE: aiops.Table(_ROWS, _WIDTH)} if table else None
        self._stack = ExitStack()
        self._slow = url
        if not near:
            self._slow = self._stack.enter_context(SlowLink(url, rate=_SLOW)).url
        self._pool = ThreadPoolExecutor(seats, thread_name_prefix="seat")
        with aiops.Client(url, role="worker", timeout=PATIENCE) as first:
            self._at = first.define(params, self._tables)
            self._fill(first)
            for _ in range(known):
                self._acquaint(params)
        self._running: list[Future[None]] = []

    def begin(self, governor: Governor) -> None:
        """Have all seats taken, until the governor ends it."""
        self._governor = governor
        self._running = [self._pool.submit(self._sit, number) for number in range(self._seats)]

    def _fill(self, client: aiops.Client) -> None:
        """Have every row of the table written once: after that it does not grow."""
        if self._tables:
            client.push_rows(TABLE, np.arange(_ROWS), np.zeros((_ROWS, _WIDTH), np.float32))

    def _acquaint(self, params: Mapping[str, Array]) -> None:
        """Have a client connect, push a small tensor, and leave."""
        smallest = min(params, key=lambda name: params[name].size)
        with aiops.Client(self._url, role="worker", timeout=PATIENCE) as client:
            client.push(self._at, {smallest: np.float32(1e-3) * params[smallest]})
        self.tally.add(pushed=1, attempted=1)

    def close(self) -> None:
        """Wait until all have left, at the governor's end."""
        self._pool.shutdown()
        self._stack.close()

    def check(self) -> None:
        """Raise what a client met with that it should not have; waits until all have left."""
        for one in self._running:
            one.result()

    def failed(self) -> bool:
        """True if a client met with what it should not have: the rest go on."""
        return any(one.done() and one.exception() is not None for one in self._running)

    def _sit(self, number: int) -> None:
        rng = np.random.default_rng([self._seed, number])
        while not self._governor.rest():
            self.tally.add(clients=1)
            calls = 1 + int(rng.geometric(1 / _CALLS))
            trainer = rng.random() < 0.4
            (self._train if trainer else self._call)(rng, calls)

    def _train(self, rng: np.random.Generator, calls: int) -> None:
        """Be an `aiops.Worker`, perhaps one that reads the server's own arrays."""
        views = self._near and rng.random() < 0.5
        url = self._slow if rng.random() < 0.3 else self._url
        with aiops.Worker(
            url, self._params, tables=self._tables, views=views, timeout=PATIENCE
        ) as worker:
            for _ in range(calls):
                if self._governor.rest():
                    return
                room = worker.room()
                for name, array in room.items():
                    array[...] = 1e-3 * self._params[name]
                self.tally.add(calls=1, attempted=1)
                worker.step(room)
                self.tally.add(pushed=1)

    def _call(self, rng: np.random.Generator, calls: int) -> None:
        """Be an `aiops.Client` that does this and that, and may leave in the middle of it."""
        rude = rng.random() < _RUDE
        url = self._slow if rng.random() < 0.3 else self._url
        with aiops.Client(url, role="worker", timeout=PATIENCE) as client:
            params = client.define(self._params, self._tables)
            does = self._deeds(client, params, rng)
            for _ in range(calls):
                if self._governor.rest():
                    return
                does[rng.integers(len(does))]()
            if rude:
                self._leave(client, params, rng)

    def _leave(self, client: aiops.Client, params: Params, rng: np.random.Generator) -> None:
        """Have the connection cut while a call is under way, if it takes so long."""
        cut = threading.Timer(_AWHILE * rng.random(), client.interrupt)
        cut.start()
        try:
            while True:
                self.tally.add(calls=1, attempted=1)
                client.exchange(params, self._gradient(rng, 1.0))
                self.tally.add(pushed=1)
        except ConnectionLost:
            self.tally.add(rude=1)
        finally:
            cut.cancel()

    def _deeds(
        self, client: aiops.Client, params: Params, rng: np.random.Generator
    ) -> list[Callable[[], object]]:
        """Return what a client may do."""

        def exchange() -> None:
            self.tally.add(calls=1, attempted=1)
            client.exchange(params, self._gradient(rng, 1.0))
            self.tally.add(pushed=1)

        def push() -> None:
            gradient = self._gradient(rng, rng.random())
            self.tally.add(calls=1, attempted=1)
            client.push(params, gradient)
            self.tally.add(pushed=1)

        def fetch() -> None:
            self.tally.add(calls=1)
            client.fetch(params)

        def anew() -> None:  # into arrays of its own, and from version 0 on
            self.tally.add(calls=1)
            client.fetch()

        def rows() -> None:
            ids = rng.integers(0, _ROWS, 1 + int(rng.integers(_MOST_ROWS)))
            grads = np.full((len(ids), _WIDTH), 1e-3, np.float32)
            self.tally.add(calls=1, rows=len(ids))
            client.push_rows(TABLE, ids, grads)
            client.fetch_rows(TABLE, ids)

        return [exchange, push, push, fetch, anew, *([rows] if self._tables else [])]

    def _gradient(self, rng: np.random.Generator, share: float) -> dict[str, Array]:
        """Return gradients of about that share of the tensors, and of one at least."""
        names = list(self._params)
        chosen = [name for name in names if rng.random() < share] or [str(rng.choice(names))]
        return {name: np.float32(1e-3) * self._params[name] for name in chosen}
