"""A lock that is granted in the order of the requests.

A training loop releases its lock only to acquire it again at once, and a `threading.Lock` permits
that: another thread would wait for ever. This one is passed to the thread that has waited longest.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections import deque
from collections.abc import AsyncIterator, Callable
from types import TracebackType


class FairLock:
    """A fair lock: a context manager for threads, `awaited` for tasks of an event loop."""

    def __init__(self) -> None:
        self._guard = threading.Lock()
        self._waiting: deque[Callable[[], None]] = deque()
        self._held = False
        self._owner: int | None = None
        self._lapsed = False  # in a fork: a task that held it may release it once more

    @property
    def held(self) -> bool:
        """True while a thread or a task holds it."""
        return self._held

    @property
    def mine(self) -> bool:
        """True while this thread holds it."""
        return self._owner == threading.get_ident()

    def acquire(self, timeout: float = -1) -> bool:
        """Wait for it, at most ``timeout`` seconds (-1: without limit); return whether it is held.

        Raises
        ------
        RuntimeError
            When this thread has it already, and would wait for itself.
        """
        if self.mine:
            raise RuntimeError("this thread has the lock already")
        gate = threading.Lock()
        gate.acquire()
        self.request(gate.release)
        try:
            had = gate.acquire(timeout=timeout)
        except BaseException:  # Ctrl-C: the lock must not be granted to a thread that has left
            self.cancel(gate.release)
            raise
        if not had and not self._forget(gate.release):
            had = True  # it came in the last moment
        if had:
            self._owner = threading.get_ident()
        return had

    def release(self) -> None:
        """Release it, or pass it to the request that has waited longest."""
        self._owner = None
        with self._guard:
            if self._lapsed and not self._held:
                return
            assert self._held, "release() without acquire()"
            following = self._waiting.popleft() if self._waiting else None
            self._held = following is not None
        if following is not None:
            following()

    def request(self, granted: Callable[[], None]) -> None:
        """Request it without waiting: ``granted`` is called, by any thread, when it is granted.

        `release` it then, or `cancel` before.
        """
        with self._guard:
            if self._held:
                self._waiting.append(granted)
                return
            self._held = True
        granted()

    def cancel(self, granted: Callable[[], None]) -> None:
        """Take a request back; if it was granted already, release the lock."""
        if not self._forget(granted):
            self.release()

    @contextlib.asynccontextmanager
    async def awaited(self) -> AsyncIterator[None]:
        """Hold it, without blocking this event loop during the wait."""
        loop = asyncio.get_running_loop()
        had: asyncio.Future[None] = loop.create_future()

        def settle() -> None:
            if not had.done():
                had.set_result(None)

        def granted() -> None:
            loop.call_soon_threadsafe(settle)

        self.request(granted)
        try:
            await had
        except BaseException:
            self.cancel(granted)
            raise
        try:
            yield
        finally:
            self.release()

    def forked(self) -> None:
        """Be free in a fork, unless the thread that forked has it: there are no others."""
        self._guard = threading.Lock()
        self._waiting.clear()
        self._held = self.mine
        self._lapsed = True

    def _forget(self, granted: Callable[[], None]) -> bool:
        """Take a request back; return whether it was still waiting."""
        with self._guard:
            try:
                self._waiting.remove(granted)
            except ValueError:
                return False
            return True

    def __enter__(self) -> None:
        self.acquire()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.release()
