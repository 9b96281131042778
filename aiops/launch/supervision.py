"""Decide which processes of a job are started, started again, and ended: events in, orders out.

A job is one server and a number of workers. The rules:

* The workers start when the server has told its URL.
* A worker that is ended by a signal, or fails after it has joined the server, is started again, up
  to ``max_restarts`` times, each time after a longer pause. After that the others go on without it.
* A worker that fails before it has ever joined would fail again: the job ends at once.
* A server that dies is started again as often, if it keeps its state; if not, the model is lost,
  and the job ends. So it does if the server says that it cannot work as it is (exit status 64).
* When all workers have ended, the server is asked to end, and may take its time to save the model.
* A signal ends the job: the workers get SIGINT, as from a terminal, and a second to close; then the
  server is asked to end; what is left after `LIMIT` seconds is killed, except a server that has a
  model to write. A second signal kills all.

Under another launcher (``aiops join``) the command of rank 0 starts the server and its own worker
only. Then a worker is not started again here, it gets the signal that the command has got, and the
server stays until the workers of all ranks have been seen at it, and have gone.

The exit status is 0 if every worker ended with 0; that of the first worker that was given up, or of
the server, 128 + n for one that signal n ended; 128 + n after signal n.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from math import inf
from typing import TypeAlias

from aiops.common.formatting import ending
from aiops.common.frozen import value

SERVER = -1
"""The server's rank."""

LIMIT = 1.7
"""Seconds from a signal to the last SIGKILL, with the usual grace."""

GRACE = 1.0
"""Seconds from a signal until workers that have not ended are killed."""

_SETTLED = 3.0
"""Seconds without a worker after which all have gone: one that was cut off would be back."""

_PAUSES = (0.2, 1.0, 3.0, 10.0)
"""Seconds before a process is started again: the first time, the second; the last for all others.

The memory that a process has filled, or the port that it held, is not free at once.
"""

_SUPERSEDED = 3
"""The exit status of a server whose run another server has taken over."""

_USAGE = 64
"""The exit status of a server whose settings, or whose algorithm's code, cannot work."""


def pause_before_restart(restarts: int) -> float:
    """Return the seconds to wait before a process is started again.

    Parameters
    ----------
    restarts
        How often it has been started again before.
    """
    return _PAUSES[min(restarts, len(_PAUSES) - 1)]


@value
class ServerReady:
    """The server has told its URL."""

    time: float
    url: str


@value
class ProcessEnded:
    """A process has ended.

    Attributes
    ----------
    time
        In seconds.
    rank
        The worker's, or `SERVER`.
    status
        Its exit status; -n: it was ended by signal n.
    joined
        Whether the server has known it.
    """

    time: float
    rank: int
    status: int
    joined: bool = False


@value
class WorkersSeen:
    """The workers that the server knows: ranks that have ever joined, and those that are there."""

    time: float
    joined: frozenset[int]
    present: frozenset[int]


@value
class JobInterrupted:
    """The job has got a signal."""

    time: float
    number: int


@value
class JobTick:
    """A time has come that `Supervision.wake_at` gave."""

    time: float


JobEvent: TypeAlias = ServerReady | ProcessEnded | WorkersSeen | JobInterrupted | JobTick


@value
class Start:
    """Start a process; ``restarts``: how often it has been started before."""

    rank: int
    restarts: int


INTERRUPT, END, KILL = "interrupt", "end", "kill"

_CTRL_C = 2  # the signal


@value
class Stop:
    """Have a process end.

    Attributes
    ----------
    rank
        The worker's, or `SERVER`.
    how
        `INTERRUPT`: by a signal, with all that it has started. `END`: it may take its time. `KILL`:
        at once, with all that it has started.
    number
        The signal of an interrupt.
    """

    rank: int
    how: str
    number: int = _CTRL_C


@value
class Say:
    """Tell the user a sentence."""

    text: str


@value
class Finish:
    """All processes have ended; so does the job, with this exit status."""

    status: int


JobOrder: TypeAlias = Start | Stop | Say | Finish


class _Process:
    """The facts of one process.

    Attributes
    ----------
    runs
        It has been started, and has not ended.
    restarts
        How often it has been started again.
    due
        When it is to be started again; inf: it is not.
    joined
        The server has known it; of the server: it has told its URL.
    """

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.name = "the server" if rank == SERVER else f"worker {rank}"
        self.runs = False
        self.restarts = 0
        self.due = inf
        self.joined = False

    def start(self) -> Start:
        self.runs, self.due = True, inf
        return Start(self.rank, self.restarts)


class Supervision:
    """The decisions of one job.

    Parameters
    ----------
    workers
        How many are started here, at least 1: ranks from 0.
    max_restarts
        How often each process is started again.
    keeps_state
        Whether a server that is started again has the model.
    writes
        Whether the server writes something when it ends.
    others
        How many further workers another launcher has started, elsewhere; None: there is none.
    linger
        Seconds without a worker after which the server ends, although some have never joined.
    grace
        Seconds that workers have to end after a signal.
    """

    def __init__(
        self,
        workers: int,
        *,
        max_restarts: int,
        keeps_state: bool,
        writes: bool = False,
        others: int | None = None,
        linger: float = 60.0,
        grace: float = GRACE,
    ) -> None:
        self._server = _Process(SERVER)
        self._workers = [_Process(rank) for rank in range(workers)]
        self._max_restarts, self._keeps_state = max_restarts, keeps_state
        self._writes = keeps_state or writes
        self._status = 0
        self._ending = self._stopping = False
        self._kill_workers = self._kill_all = inf  # times
        self._launched, self._linger, self._grace = others is not None, linger, grace
        self._elsewhere = frozenset(range(workers, workers + (others or 0)))
        self._missing = self._elsewhere  # ranks that have not joined yet
        self._alone_since = inf  # since then none of those has been there

    @property
    def wake_at(self) -> float:
        """The time at which a `JobTick` is due; inf: there is none before another event."""
        due = (process.due for process in self._all)
        waits = self._elsewhere and not self._ending and not self._any_worker
        leave = self._leave_at if waits else inf
        return min(self._kill_workers, self._kill_all, leave, *due)

    @property
    def _any_worker(self) -> bool:
        return any(worker.runs or worker.due < inf for worker in self._workers)

    @property
    def _leave_at(self) -> float:
        """The time at which the workers that are elsewhere need the server no more."""
        if not self._elsewhere:
            return -inf
        return self._alone_since + (self._linger if self._missing else _SETTLED)

    @property
    def _all(self) -> list[_Process]:
        return [self._server, *self._workers]

    def begin(self) -> list[JobOrder]:
        """Return the first orders."""
        return [self._server.start()]

    def handle(self, event: JobEvent) -> list[JobOrder]:
        """Return what follows from an event."""
        orders: Iterable[JobOrder] = ()
        if isinstance(event, ServerReady):
            orders = self._server_ready()
        elif isinstance(event, WorkersSeen):
            self._seen(event)
        elif isinstance(event, JobInterrupted):
            orders = self._interrupted(event)
        elif isinstance(event, JobTick):
            orders = self._passed(event.time)
        elif event.rank == SERVER:
            orders = self._server_ended(event)
        else:
            orders = self._worker_ended(event)
        return [*orders, *self._progress(event.time)]

    def _server_ready(self) -> Iterator[JobOrder]:
        first, self._server.joined = not self._server.joined, True
        self._alone_since = inf
        if first and not self._stopping:
            for worker in self._workers:
                yield worker.start()

    def _seen(self, event: WorkersSeen) -> None:
        self._missing -= event.joined
        alone = not event.present & self._elsewhere
        self._alone_since = min(self._alone_since, event.time) if alone else inf

    def _worker_ended(self, event: ProcessEnded) -> Iterator[JobOrder]:
        worker = self._workers[event.rank]
        worker.runs = False
        worker.joined |= event.joined
        if event.status == 0 or self._stopping:
            return
        if event.status > 0 and not worker.joined:
            yield Say(
                f"{worker.name} {ending(event.status)} before it had joined the server: the program"
                " would fail again, so the job ends"
            )
            self._fail(event.status)
            yield from self._stop(event.time)
            return
        if self._launched:
            yield Say(f"{worker.name} {ending(event.status)}")
        else:
            yield from self._again(worker, event)
        if worker.due == inf:
            self._fail(event.status)
            left = sum(other.runs or other.due < inf for other in self._workers)
            if left:
                yield Say(f"{left} of {len(self._workers)} workers go on without {worker.name}")

    def _server_ended(self, event: ProcessEnded) -> Iterator[JobOrder]:
        server = self._server
        server.runs, self._alone_since = False, inf
        if self._ending or self._stopping:
            self._kill_workers = min(self._kill_workers, event.time + GRACE)  # they wait for it
            if event.status:
                yield Say(f"{server.name} {ending(event.status)}")
                self._fail(event.status)
            return
        if event.status == _USAGE and server.joined and self._keeps_state:
            yield Say(
                f"{server.name} {ending(event.status)}, as it would again: mend what it says, and"
                " the same command goes on from its state"
            )
        elif server.joined and self._keeps_state and event.status != _SUPERSEDED:
            yield from self._again(server, event)
        elif server.joined and event.status not in (_SUPERSEDED, _USAGE):
            yield Say(
                f"{server.name} {ending(event.status)}, and the model is lost with it: with"
                " --state DIR it would be started again, and go on"
            )
        else:
            yield Say(f"{server.name} {ending(event.status)}")
        if server.due == inf:
            self._fail(event.status or 1)
            yield from self._stop(event.time)

    def _again(self, process: _Process, event: ProcessEnded) -> Iterator[JobOrder]:
        """Have a process be started again, if it may be."""
        what = f"{process.name} {ending(event.status)}"
        if process.restarts >= self._max_restarts:
            yield Say(f"{what}; it has been started again {process.restarts} times, and is not now")
            return
        pause = pause_before_restart(process.restarts)
        process.restarts += 1
        process.due = event.time + pause
        yield Say(
            f"{what}; it is started again in {pause:g} s"
            f" ({process.restarts} of {self._max_restarts} restarts)"
        )

    def _interrupted(self, event: JobInterrupted) -> Iterator[JobOrder]:
        if self._stopping:
            self._kill_all, self._writes = event.time, False
            yield from self._passed(event.time)
            return
        self._status = 128 + event.number
        yield from self._stop(event.time, event.number if self._launched else _CTRL_C)

    def _stop(self, now: float, number: int = _CTRL_C) -> Iterator[JobOrder]:
        """End all processes, workers by this signal."""
        self._stopping = True
        self._kill_workers = now + self._grace
        self._kill_all = self._kill_workers + (LIMIT - GRACE)
        for process in self._all:
            process.due = inf
        for worker in self._workers:
            if worker.runs:
                yield Stop(worker.rank, INTERRUPT, number)

    def _passed(self, now: float) -> Iterator[JobOrder]:
        """Do what was to be done by now."""
        for process in self._all:
            if process.due <= now:
                yield process.start()
        if min(self._kill_workers, self._kill_all) <= now:
            self._kill_workers = inf
            for worker in self._workers:
                if worker.runs:
                    yield Stop(worker.rank, KILL)
        if self._kill_all <= now:
            self._kill_all = inf
            if self._server.runs and self._writes:
                yield Say("the server is writing what it has to keep; another Ctrl-C kills it")
            elif self._server.runs:
                yield Stop(SERVER, KILL)

    def _progress(self, now: float) -> Iterator[JobOrder]:
        """Have the server end after the last worker, and the job after the server."""
        if not self._stopping and not self._server.joined:
            return
        if self._any_worker:
            return
        if not self._ending and not self._stopping:
            if now < self._leave_at:
                return
            if self._missing:
                ranks = ", ".join(map(str, sorted(self._missing)[:8]))
                yield Say(
                    f"the workers of {len(self._missing)} ranks ({ranks}) have not joined, and none"
                    f" has been there for {self._linger:g} s: the server ends"
                )
        if not self._ending:
            self._ending = True
            if self._server.runs:
                yield Stop(SERVER, END)
            self._server.due = inf
        if not self._server.runs:
            self._kill_workers = self._kill_all = inf
            yield Finish(self._status)

    def _fail(self, status: int) -> None:
        """Note the first failure's exit status."""
        self._status = self._status or (128 - status if status < 0 else status)
