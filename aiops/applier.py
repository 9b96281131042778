"""The applier: one thread that runs the engine's kernels, in the order they were issued."""

from __future__ import annotations

import asyncio
import queue
import threading
from collections.abc import Callable

from aiops.events import Apply, Warm
from aiops.layout import Ints


class Applier:
    """Runs updates beside the event loop.

    Parameters
    ----------
    loop
        Where results are reported.
    done
        Called on the loop with a ticket and its numbers (ticket 0: the kernels are warm).
    failed
        Called on the loop when a kernel raises; nothing more is run then.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        done: Callable[[int, Ints | None], None],
        failed: Callable[[BaseException], None],
    ) -> None:
        self._loop, self._done, self._failed = loop, done, failed
        self._queue: queue.SimpleQueue[Apply | Warm | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="aiops-applier", daemon=True)
        self._thread.start()

    def submit(self, effect: Apply | Warm) -> None:
        """Run it after what was submitted before."""
        self._queue.put(effect)

    def close(self) -> None:
        """End the thread when it has finished what it is doing."""
        self._queue.put(None)
        self._thread.join()

    def _run(self) -> None:
        while (effect := self._queue.get()) is not None:
            try:
                sums = effect.run()
            except BaseException as error:
                self._loop.call_soon_threadsafe(self._failed, error)
                return
            ticket = effect.ticket if isinstance(effect, Apply) else 0
            del effect  # it refers to a received buffer
            self._loop.call_soon_threadsafe(self._done, ticket, sums)
