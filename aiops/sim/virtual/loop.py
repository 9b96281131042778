"""An asyncio event loop in virtual time: no wait takes real time, and every run is the same.

Time stands still while a callback is ready to run, and then jumps to the next timer. Callbacks that
are due at the same moment run in the order in which they were scheduled. There are no files, no
sockets and no other threads: connections cross an `aiops.sim.virtual.network.Network`.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections import deque
from collections.abc import Callable, Coroutine
from contextvars import Context, copy_context
from functools import partial
from heapq import heapify, heappop, heappush
from math import inf
from typing import Any, NoReturn, Protocol, TypeVar

from aiops.errors import AiopsError, DeadlineExceeded, UsageError
from aiops.sim.virtual.blocked_tasks import blocked_tasks
from aiops.sim.virtual.fair_sharing import FlowScheduler

T = TypeVar("T")

_TIDY = 256  # cancelled timers that stay in the heap before it is rebuilt
_ENDING = 600.0  # virtual seconds that tasks may take to end when they are cancelled


class Deadlock(AiopsError):
    """Every task waits and no timer runs; the text lists the tasks and where each waits."""


class LoopNetwork(Protocol):
    """The network of a loop, as the loop needs it."""

    async def connect(self, factory: Any, *where: Any, **options: Any) -> Any:
        """Connect, as ``create_connection``."""

    def listen(self, factory: Any, *where: Any, **options: Any) -> Any:
        """Listen, as ``create_server``."""


class LoopThread(Protocol):
    """A simulated thread, as the loop and its disks need it; ``context`` is the one it runs in."""

    context: Context

    def wait(self) -> None:
        """Let the loop go on until the thread is resumed; called by the thread itself."""

    def pause(self, seconds: float) -> None:
        """Wait for virtual time; called by the thread itself."""

    def resume(self) -> None:
        """Let it run until it waits or ends."""

    def end(self) -> None:
        """End it where it waits."""


class VirtualTimer(partial[Any]):
    """A scheduled call: asyncio's handle, made and called without a Python call of its own.

    Attributes
    ----------
    time
        When it is due, in virtual seconds, if it was set for a time.
    loop
        The loop that it was set on then, or None.
    called
        The function and arguments that were its own, once it is cancelled.
    """

    time = -inf
    loop: VirtualLoop | None = None
    called: tuple[Any, ...] = ()

    def cancel(self) -> None:
        """Drop the callback."""
        if self.loop is not None and self.time > self.loop.now:
            self.loop.note_cancelled()
        self.loop = None
        if self.func is not _nothing:
            self.called = self.func, self.args  # perhaps they run now, and must not be lost
        self.__setstate__((_nothing, (), {}, self.__dict__))  # type: ignore[attr-defined]

    def cancelled(self) -> bool:
        """Return whether it has been cancelled."""
        return self.func is _nothing

    def when(self) -> float:
        """Return the virtual time, in seconds."""
        return self.time

    def __repr__(self) -> str:
        """Return the callback and its time."""
        return f"<VirtualTimer {self.args[:1]!r} at {self.time:g} s>"


def _nothing() -> None:
    """Take the place of a cancelled callback."""


class VirtualLoop(asyncio.BaseEventLoop):
    """The event loop.

    An exception in a callback ends the run; other loops log it and go on.

    Parameters
    ----------
    limit
        Virtual seconds that it may run; default: endless.

    Attributes
    ----------
    limit
        As given; may be changed.
    network
        The network that connections cross; None: there is none.
    flow_scheduler
        What crosses its links; None: there is no network.
    now
        The virtual time, in seconds.
    observers
        Called whenever time is about to go on; `until` is built on it.
    threads
        Simulated threads, which run only while the loop waits for them.
    inline
        The one whose function the loop is calling, if any.
    """

    _stopping: bool  # asyncio's: `stop` was called

    def __init__(self, limit: float = inf) -> None:
        super().__init__()
        self.network: LoopNetwork | None = None
        self.flow_scheduler: FlowScheduler | None = None
        self.observers: dict[Callable[[], None], None] = {}
        self.limit = limit
        self.now = 0.0
        self._line: deque[partial[Any]] = deque()  # ready, in order
        self._timers: list[tuple[float, int, partial[Any]]] = []
        self._count = 0  # timers so far: of equal times the first that was set comes first
        self._cancelled = 0  # cancelled timers that are still in the heap, at most
        self._owner = threading.get_ident()
        self.threads: dict[threading.Thread, LoopThread] = {}
        self.inline: LoopThread | None = None

    # ------------------------------------------------------------ the clock

    def time(self) -> float:
        """Return the virtual time: seconds since the beginning."""
        return self.now

    def call_soon(  # type: ignore[override]
        self, callback: Callable[..., Any], *args: Any, context: Context | None = None
    ) -> VirtualTimer:
        """Call it at this moment, after the callbacks that are ready."""
        due = VirtualTimer((context or copy_context()).run, callback, *args)
        self._line.append(due)
        return due

    def call_later(  # type: ignore[override]
        self, delay: float, callback: Callable[..., Any], *args: Any, context: Context | None = None
    ) -> VirtualTimer:
        """Call it ``delay`` seconds from now."""
        return self.call_at(self.now + delay, callback, *args, context=context)

    def call_at(  # type: ignore[override]
        self, when: float, callback: Callable[..., Any], *args: Any, context: Context | None = None
    ) -> VirtualTimer:
        """Call it at the time ``when``; at once if that has passed."""
        due = VirtualTimer((context or copy_context()).run, callback, *args)
        due.time, due.loop = when, self
        self._count += 1
        heappush(self._timers, (when, self._count, due))
        return due

    def post(self, when: float, callback: Callable[..., Any], *args: Any) -> None:
        """Call it at the time ``when``, in no context of its own; it cannot be cancelled."""
        self._count += 1
        heappush(self._timers, (when, self._count, partial(callback, *args)))

    def call_soon_threadsafe(  # type: ignore[override]
        self, callback: Callable[..., Any], *args: Any, context: Context | None = None
    ) -> VirtualTimer:
        """Call it at this moment. There are no threads but simulated ones."""
        if threading.get_ident() != self._owner and threading.current_thread() not in self.threads:
            raise UsageError(
                "a thread called into a virtual event loop: threads have no place in virtual time,"
                " so make it a coroutine"
            )
        return self.call_soon(callback, *args, context=context)

    async def until(self, check: Callable[[], bool], what: str, limit: float) -> None:
        """Wait until ``check`` returns True; it is called whenever time is about to go on.

        Parameters and errors are those of `aiops.testing.until`.
        """
        became: asyncio.Future[None] = self.create_future()

        def look() -> None:
            if became.done():
                return
            try:
                if check():
                    became.set_result(None)
            except Exception as error:
                became.set_exception(error)

        self.observers[look] = None
        try:
            async with asyncio.timeout(limit):
                await became
        except TimeoutError:
            if not became.cancelled():
                raise  # the check raised it
            raise DeadlineExceeded(
                f"not within {limit:g} virtual seconds: {what}; {blocked_tasks(self)}. Find the"
                " task that should have done it, or give it longer with limit=..."
            ) from None
        finally:
            del self.observers[look]

    def note_cancelled(self) -> None:
        """Count a timer that was cancelled, and rebuild the heap once most of it is such."""
        self._cancelled += 1
        if self._cancelled > _TIDY and 2 * self._cancelled > len(self._timers):
            self._timers[:] = [entry for entry in self._timers if entry[2].func is not _nothing]
            heapify(self._timers)
            self._cancelled = 0

    def drop(self, owned: Callable[[Context], bool]) -> None:
        """Cancel the timers of some contexts, and end their threads; their tasks go on."""
        for due in [entry[2] for entry in self._timers]:
            context = getattr(due.func, "__self__", None)
            if isinstance(due, VirtualTimer) and isinstance(context, Context) and owned(context):
                due.cancel()
        for system, thread in list(self.threads.items()):
            if owned(thread.context) and system is not threading.current_thread():
                thread.end()

    # ------------------------------------------------------------ running

    def _run_once(self) -> None:
        """Run what is ready, and go on from moment to moment, until the loop is stopped."""
        line, timers = self._line, self._timers
        while True:
            while line and not self._stopping:
                line.popleft()()
            if self._stopping:
                return
            flows, crosses = self.flow_scheduler, inf
            if flows is not None:
                crosses = flows.settle(self.now) if flows.unsettled else flows.next_due
            if self.observers and not line:
                for look in list(self.observers):
                    look()
            if line:
                continue
            while timers and timers[0][2].func is _nothing:  # it was cancelled
                heappop(timers)
                self._cancelled -= 1
            if not timers and crosses == inf:
                self._stuck()
            crossing = not timers or crosses < timers[0][0]
            when = crosses if crossing else timers[0][0]
            if when > self.limit:
                self._late()
            if when > self.now:
                self.now = when
            if crossing and flows is not None:
                flows.advance(self.now)
                continue
            while timers and timers[0][0] <= when:
                line.append(heappop(timers)[2])

    def _stuck(self) -> NoReturn:
        raise Deadlock(
            f"at {self.now:g} virtual seconds every task waits, and no timer runs:"
            f" {blocked_tasks(self)}. Wake them, or give each wait a deadline"
        )

    def _late(self) -> NoReturn:
        self.now = self.limit
        raise DeadlineExceeded(
            f"the run was not over after {self.limit:g} virtual seconds, its limit:"
            f" {blocked_tasks(self)}. Give it a longer limit, or find the task that takes long"
        )

    # ------------------------------------------------------------ threads, signals, connections

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
        """Return False: there was none."""
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

    def _wired(self) -> LoopNetwork:
        if self.network is None:
            raise UsageError("this event loop has no network: make a Network(loop) first")
        return self.network

    def close(self) -> None:
        """End simulated threads, and drop all callbacks."""
        for thread in list(self.threads.values()):
            thread.end()
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
    """Cancel every task, and run the loop until all have ended, for a limited time."""
    loop.limit = loop.time() + _ENDING
    with contextlib.suppress(Deadlock, DeadlineExceeded):  # there is a better error already
        left = sorted(asyncio.all_tasks(loop), key=lambda task: task.get_name())
        for task in left:
            task.cancel()
        if left:
            loop.run_until_complete(asyncio.gather(*left, return_exceptions=True))
        loop.run_until_complete(loop.shutdown_asyncgens())
