"""Run a server's kernels on a thread, in the order in which they were issued."""

from __future__ import annotations

import asyncio
import queue
import threading
from collections.abc import Callable
from functools import partial
from typing import Any, Protocol, TypeAlias, TypeVar

T = TypeVar("T")


class KernelRunner(Protocol):
    """Runs updates for an event loop.

    Attributes
    ----------
    at_once
        Bytes: the event loop may run an update itself that touches no more than that.
    """

    at_once: float

    def submit(self, run: Callable[[], T], nbytes: int, done: Callable[[T], None]) -> None:
        """Run it after all that was submitted before; ``nbytes`` are touched.

        ``done`` is called on the loop with the result.
        """

    def close(self) -> None:
        """End when all that was submitted is finished."""


_Task: TypeAlias = tuple[Callable[[], Any], Callable[[Any], None]]


class UpdateThread:
    """A `KernelRunner` beside the event loop: one thread (kernels release the GIL).

    It is started when it is first needed.

    Parameters
    ----------
    loop
        Where results are reported.
    failed
        Called on the loop when a kernel raises; nothing more is run then.
    """

    at_once: float = 64 << 20  # bytes, about 2 ms: for less, a thread costs more than it saves

    def __init__(
        self, loop: asyncio.AbstractEventLoop, failed: Callable[[BaseException], None]
    ) -> None:
        self._loop, self._failed = loop, failed
        self._queue: queue.SimpleQueue[_Task | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def submit(self, run: Callable[[], T], nbytes: int, done: Callable[[T], None]) -> None:
        """Run it after all that was submitted before."""
        self._queue.put((run, done))
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="aiops-update", daemon=True)
            self._thread.start()

    def close(self) -> None:
        """End the thread when all that was submitted is finished."""
        if self._thread is not None:
            self._queue.put(None)
            self._thread.join()

    def _run(self) -> None:
        while (task := self._queue.get()) is not None:
            run, done = task
            try:
                sums = run()
            except BaseException as error:
                self._tell(partial(self._failed, error))
                return
            del run, task  # they refer to a received buffer
            if not self._tell(partial(done, sums)):
                return

    def _tell(self, call: Callable[[], None]) -> bool:
        """Have the loop call; return whether it will: a program may have closed it."""
        try:
            self._loop.call_soon_threadsafe(call)
        except RuntimeError:
            if not self._loop.is_closed():
                raise
            return False
        return True
