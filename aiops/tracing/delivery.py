"""Hand spans to an exporter on a thread of its own: what makes them never waits for it.

All servers of a process share one queue, and all its workers another (`shared`): one thread each,
and one wait at the end, however many they are.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence

from aiops.common import forks
from aiops.tracing.spans import Exporter, Span

WAITING = 8192
"""Spans that wait for a slow exporter at most; later ones are lost."""

AT_ONCE = 512
"""Spans that are exported together at most, and that wake the thread before its time."""

_EVERY = 1.0
"""Seconds between two looks at what waits."""

_AT_EXIT = 1.5
"""Seconds that a process which ends waits for its last spans to be sent."""

_MINUTE = 60.0
"""Seconds between warnings."""

_log = logging.getLogger("aiops.tracing")


class SpanQueue:
    """Hands an exporter what it is offered; may be used by several threads.

    An exporter that raises, or cannot reach its collector, is no reason for a run to end: the spans
    that it was to take are lost, and that is logged, once a minute.

    Parameters
    ----------
    opens
        Opens the exporter, on the thread; if that raises it is tried again with the next spans.
    clock
        Seconds; default: a monotonic clock.
    """

    def __init__(
        self, opens: Callable[[], Exporter], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._opens, self._clock = opens, clock
        self._exporter: Exporter | None = None
        self._waiting: deque[Span] = deque()
        self._guard = threading.Lock()
        self._wake = threading.Event()
        self._users = 0
        self._ending = self._broken_off = False
        self._lost = self._told = 0
        self._why = ""
        self._warned = -_MINUTE
        self._thread: threading.Thread | None = None  # from the first span on
        self._over = threading.Event()
        self._when_over: list[Callable[[], object]] = []
        forks.note(self)

    def join(self) -> bool:
        """Count one that offers spans, who is to `leave`; return False if the queue has ended."""
        with self._guard:
            self._users += not self._ending
            return not self._ending

    def offer(self, spans: Sequence[Span]) -> None:
        """Have spans exported, if there is room for them, and a thread."""
        with self._guard:
            if self._ending:
                self._lose(len(spans), "they came after the end")
            elif self._thread is None and not self._start():
                self._lose(len(spans), "there can be no thread that would send them")
            else:
                if len(self._waiting) + len(spans) > WAITING:
                    self._lose(len(spans), "they come faster than the collector takes them")
                else:
                    self._waiting.extend(spans)
                if len(self._waiting) >= AT_ONCE:
                    self._wake.set()
                return
        self._tell()  # nothing else does

    def leave(self) -> bool:
        """Take back a `join`; return whether it was the last, after which the queue ends."""
        with self._guard:
            self._users -= 1
            self._ending = self._ending or self._users < 1
        if self._ending:
            self._wake.set()
        return self._ending

    def close(self, deadline: float) -> None:
        """Export what waits, and end; after ``deadline`` seconds break off, and leave the rest."""
        with self._guard:
            self._ending = True
        self._wake.set()
        if self._thread is not None:
            self._over.wait(deadline)
            self._waited(deadline)
        self._tell(last=True)

    async def wait_closed(self, deadline: float) -> None:
        """Do as `close`, and let the event loop go on meanwhile; cancelled, it breaks off."""
        with self._guard:
            self._ending = True
        if self._thread is not None:
            loop, over = asyncio.get_running_loop(), asyncio.Event()
            self._when_over.append(lambda: loop.call_soon_threadsafe(over.set))
            self._wake.set()
            with contextlib.suppress(TimeoutError):
                try:
                    async with asyncio.timeout(deadline):
                        while not self._over.is_set():  # it may have been before it was asked for
                            await over.wait()
                finally:
                    self._waited(deadline)
        self._tell(last=True)

    def forked(self) -> None:
        """Take no more in a fork, which has no such thread."""
        atexit.unregister(self.close)
        self._guard, self._ending, self._thread = threading.Lock(), True, None
        self._waiting.clear()

    # ------------------------------------------------------------ inside

    def _start(self) -> bool:
        thread = threading.Thread(target=self._deliver, name="aiops-tracing", daemon=True)
        try:
            thread.start()
        except RuntimeError:  # the process may have no more, or is ending
            return False
        atexit.register(self.close, _AT_EXIT)
        self._thread = thread
        return True

    def _lose(self, count: int, why: str) -> None:
        self._lost += count
        self._why = why

    def _tell(self, *, last: bool = False) -> None:
        """Log that spans were lost, if more were and it is time; ``last``: it is in any case."""
        now = self._clock()
        with self._guard:
            if self._lost == self._told or not (last or now >= self._warned + _MINUTE):
                return
            self._warned, self._told, why = now, self._lost, self._why
        _log.warning("traces are lost, %d spans so far, and the run goes on: %s", self._told, why)

    def _waited(self, deadline: float) -> None:
        """Let go of the thread, which is over, or is to break off."""
        atexit.unregister(self.close)
        if not self._over.is_set():
            self._break_off(deadline)
        elif self._thread is not None:
            self._thread.join(1.0)  # it is at its last lines

    def _break_off(self, deadline: float) -> None:
        """End although spans wait, and have the exporter break off what it does."""
        with self._guard:
            self._broken_off = True
            exporter, self._exporter = self._exporter, None
            left = len(self._waiting)
            self._lost += left
            self._told = self._lost
            self._waiting.clear()
        _log.warning(
            "traces could not all be sent within %.3g s of the end: %d spans are lost, and"
            " those under way",
            *(deadline, left),
        )
        _end(exporter)

    # ------------------------------------------------------------ its thread

    def _deliver(self) -> None:
        ending = False
        while not ending:
            self._wake.wait(_EVERY)
            self._wake.clear()
            ending = self._ending
            while self._waiting:
                with self._guard:
                    count = min(AT_ONCE, len(self._waiting))
                    spans = [self._waiting.popleft() for _ in range(count)]
                if spans:  # else the end has taken them
                    self._export(spans)
                self._tell()
            self._tell()
        with self._guard:
            exporter, self._exporter = self._exporter, None
        _end(exporter)
        self._over.set()
        for told in [*self._when_over]:
            with contextlib.suppress(RuntimeError):  # that event loop has been closed
                told()

    def _export(self, spans: Sequence[Span]) -> None:
        try:
            exporter = self._exporter
            if exporter is None:
                exporter = self._opens()
                with self._guard:
                    over = self._broken_off
                    self._exporter = None if over else exporter
                if over:
                    _end(exporter)
                    return  # these were told as under way
            why = exporter.export(spans)
        except BaseException as error:  # of another's code: whatever it is, the run goes on
            why = repr(error)
        if why:
            with self._guard:
                self._lose(len(spans), why)


def _end(exporter: Exporter | None) -> None:
    try:
        if exporter is not None:
            exporter.close()
    except BaseException as error:
        _log.warning("the exporter of traces could not end: %r", error)


_QUEUES: dict[tuple[str, str], SpanQueue] = {}


def shared(role: str, endpoint: str, opens: Callable[[], Exporter]) -> SpanQueue:
    """Return this process's queue of a role and an endpoint; the caller has joined it."""
    queue = _QUEUES.get((role, endpoint))
    while queue is None or not queue.join():
        queue = _QUEUES[role, endpoint] = SpanQueue(opens)
    return queue
