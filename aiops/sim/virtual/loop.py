"""An asyncio event loop in virtual time: nothing waits, and the same program does the same again.

Time stands still while anything is ready to run, and then jumps to the next timer. What is due at
the same moment happens in the order in which it was asked for. There are no files, no sockets and
no other threads: connections cross an `aiops.sim.virtual.network.Network`.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections import deque
from collections.abc import Callable, Coroutine
from contextvars import Context, copy_context
from heapq import heapify, heappop, heappush
from math import inf
from typing import TYPE_CHECKING, Any, NoReturn, TypeAlias, TypeVar

from aiops.errors import AiopsError, DeadlineExceeded, UsageError
from aiops.sim.virtual.waiting import waiting

if TYPE_CHECKING:
    from aiops.sim.virtual.network import Network

T = TypeVar("T")

_TIDY = 256  # cancelled timers that are borne before the heap is made anew
_ENDING = 600.0  # virtual seconds that tasks may take to end when they are cancelled


class Deadlock(AiopsError):
    """Everybody waits, and nothing will ever happen any more; the text says who waits where."""


class Due(asyncio.TimerHandle):
    """What is to be called, at once or at a time. Leaner than asyncio's, which it stands for."""

    __slots__ = ("args", "call", "context", "loop", "time")

    def __init__(
        self, time: float, call: Callable[..., Any], args: Any, context: Context | None, loop: Any
    ) -> None:
        self.time, self.call, self.args, self.loop = time, call, args, loop
        self.context = context

    def cancel(self) -> None:
        """Do not call it."""
        if self.loop is not None:
            self.loop.cancelled()
            self._forget()

    def _forget(self) -> None:
        self.loop = self.context = self.args = None
        self.call = _nothing

    def cancelled(self) -> bool:
        """Return whether it has been cancelled."""
        return self.call is _nothing

    def when(self) -> float:
        """Return the virtual time, in seconds."""
        return self.time

    def __repr__(self) -> str:
        """Say what it calls."""
        return f"<Due {self.call!r} at {self.time:g} s>"

    __hash__ = object.__hash__

    def __eq__(self, other: object) -> bool:
        """Be nobody but oneself."""
        return self is other


_Post: TypeAlias = tuple[Callable[..., Any], tuple[Any, ...]]
"""What was posted: a callback, and its arguments."""


def _nothing(*_args: object) -> None:
    """Stand for what was cancelled."""


def _cancelled(due: Due | _Post) -> bool:
    return isinstance(due, Due) and due.call is _nothing


class VirtualLoop(asyncio.BaseEventLoop):
    """The event loop.

    An exception in a callback is not logged, as by other loops, but ends the run: whoever runs a
    program here wants to know.

    Parameters
    ----------
    limit
        Virtual seconds that it may run; default: endless.

    Attributes
    ----------
    limit
        As given; may be changed.
    network
        What connections cross; None: there is none.
    now
        The virtual time.
    onlookers
        Called when nothing more happens at a moment: see `until`.
    """

    _stopping: bool  # asyncio's: `stop` was called

    def __init__(self, limit: float = inf) -> None:
        super().__init__()
        self.network: Network | None = None
        self.onlookers: dict[Callable[[], None], None] = {}
        self.limit = limit
        self.now = 0.0
        self._line: deque[Due | _Post] = deque()  # ready, in order
        self._timers: list[tuple[float, int, Due | _Post]] = []
        self._count = 0  # timers so far: who was set first comes first
        self._dead = 0  # timers that were cancelled and are still in the heap, at most
        self._owner = threading.get_ident()

    # ------------------------------------------------------------ the clock

    def time(self) -> float:
        """Return the virtual time: seconds since the beginning."""
        return self.now

    def call_soon(  # type: ignore[override]
        self, callback: Callable[..., Any], *args: Any, context: Context | None = None
    ) -> Due:
        """Call it at this moment, after what was asked for before."""
        due = Due(self.now, callback, args, context or copy_context(), self)
        self._line.append(due)
        return due

    def call_later(  # type: ignore[override]
        self, delay: float, callback: Callable[..., Any], *args: Any, context: Context | None = None
    ) -> Due:
        """Call it so many seconds later."""
        return self.call_at(self.now + delay, callback, *args, context=context)

    def call_at(  # type: ignore[override]
        self, when: float, callback: Callable[..., Any], *args: Any, context: Context | None = None
    ) -> Due:
        """Call it at that time, or now when that has passed."""
        due = Due(when, callback, args, context or copy_context(), self)
        self._count += 1
        heappush(self._timers, (when, self._count, due))
        return due

    def post(self, when: float, callback: Callable[..., Any], *args: Any) -> None:
        """Call it at that time: for who needs no context, and will not cancel it."""
        self._count += 1
        heappush(self._timers, (when, self._count, (callback, args)))

    def call_soon_threadsafe(  # type: ignore[override]
        self, callback: Callable[..., Any], *args: Any, context: Context | None = None
    ) -> Due:
        """Call it at this moment. There is only one thread."""
        if threading.get_ident() != self._owner:
            raise UsageError(
                "a thread called into a virtual event loop: threads have no place in virtual time,"
                " so make it a coroutine"
            )
        return self.call_soon(callback, *args, context=context)

    def cancelled(self) -> None:
        """Hear that something which was to be called was cancelled."""
        self._dead += 1
        if self._dead > _TIDY and 2 * self._dead > len(self._timers):
            self._timers = [entry for entry in self._timers if not _cancelled(entry[2])]
            heapify(self._timers)
            self._dead = 0

    # ------------------------------------------------------------ running

    def _run_once(self) -> None:
        """Run what is ready; when nothing is, go on to the next moment."""
        line = self._line
        if not line:
            self._go_on()
        while line and not self._stopping:
            due = line.popleft()
            if isinstance(due, tuple):
                due[0](*due[1])
                continue
            due.loop = None  # it cannot be cancelled any more
            context = due.context
            if context is not None:
                context.run(due.call, *due.args)

    def _go_on(self) -> None:
        """Have time move on to what is due next, and make that ready."""
        timers, line, network = self._timers, self._line, self.network
        crosses = inf
        if network is not None:
            crosses = network.settle()
            if line:
                return
        for look in list(self.onlookers):
            look()
        if line:
            return
        while timers and _cancelled(timers[0][2]):
            heappop(timers)
            self._dead -= 1
        when = timers[0][0] if timers else inf
        if crosses < when:
            self._move(crosses)
            assert network is not None
            network.advance()
            return
        if not timers:
            self._stuck()
        self._move(when)
        while timers and timers[0][0] <= when:
            line.append(heappop(timers)[2])

    def _move(self, when: float) -> None:
        if when > self.limit:
            self._late()
        if when > self.now:
            self.now = when

    def _stuck(self) -> NoReturn:
        raise Deadlock(
            f"at {self.now:g} virtual seconds everybody waits, and no timer runs:"
            f" {waiting(self)}. Wake them, or give each wait a deadline"
        )

    def _late(self) -> NoReturn:
        self.now = self.limit
        raise DeadlineExceeded(
            f"the run was not over after {self.limit:g} virtual seconds, its limit: {waiting(self)}"
        )

    # ------------------------------------------------------------ the rest of the world

    def run_in_executor(  # type: ignore[override]
        self, executor: Any, func: Callable[..., T], *args: Any
    ) -> asyncio.Future[T]:
        """Run a function here and at once, in no virtual time: there are no other threads."""
        if executor is not None:
            raise UsageError(
                "an executor runs threads or processes of its own, which have no place in virtual"
                " time: call run_in_executor(None, ...) or asyncio.to_thread, which run it at once"
            )
        future: asyncio.Future[T] = self.create_future()
        try:
            future.set_result(func(*args))
        except Exception as error:
            future.set_exception(error)
        return future

    async def shutdown_default_executor(self, *_timeout: Any) -> None:
        """Do nothing: there is none."""

    def add_signal_handler(  # type: ignore[override]
        self, sig: int, callback: Callable[..., Any], *args: Any
    ) -> None:
        """Do nothing: no signals are sent in virtual time."""

    def remove_signal_handler(self, sig: int) -> bool:
        """Say that there was none."""
        return False

    async def create_connection(self, protocol_factory: Any, *where: Any, **options: Any) -> Any:
        """Connect over the simulated network."""
        return await self._wired().connect(protocol_factory, *where, **options)

    async def create_server(self, protocol_factory: Any, *where: Any, **options: Any) -> Any:
        """Listen on the simulated network."""
        return self._wired().listen(protocol_factory, *where, **options)

    async def sock_accept(self, sock: Any) -> Any:
        """Accept a connection at a socket of the simulated network."""
        return await sock.accept()

    async def sock_connect(self, sock: Any, address: Any) -> None:
        """Connect one."""
        await sock.connect(address)

    async def sock_recv_into(self, sock: Any, buf: Any) -> int:
        """Receive bytes from one."""
        count: int = await sock.receive_into(memoryview(buf))
        return count

    async def sock_sendall(self, sock: Any, data: Any) -> None:
        """Send bytes by one."""
        await sock.send_all(data)

    def _wired(self) -> Network:
        if self.network is None:
            raise UsageError("this event loop has no network: make a Network(loop) first")
        return self.network

    def close(self) -> None:
        """Forget everything."""
        super().close()
        self._line.clear()
        self._timers.clear()


def run_on(loop: VirtualLoop, main: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine on a loop to its end, end what it leaves behind, and close the loop."""
    try:
        return loop.run_until_complete(loop.create_task(main, name="main"))
    finally:
        try:
            _end_all(loop)
        finally:
            loop.close()


def _end_all(loop: VirtualLoop) -> None:
    """Cancel every task, and let each end as it likes, within reason."""
    loop.limit = loop.time() + _ENDING
    with contextlib.suppress(Deadlock, DeadlineExceeded):  # there is a better error already
        left = sorted(asyncio.all_tasks(loop), key=lambda task: task.get_name())
        for task in left:
            task.cancel()
        if left:
            loop.run_until_complete(asyncio.gather(*left, return_exceptions=True))
        loop.run_until_complete(loop.shutdown_asyncgens())
