"""Share work on large memory among threads.

One core does not fill a machine's memory bus. Large work is cut into pieces. The calling thread
takes one piece after the other, and so do the helpers. The caller waits only for pieces that a
helper has begun: on a busy machine it does all of them itself, so that sharing costs next to
nothing. A process has one set of helpers for all its servers and workers, and one more for each
number given with ``--threads``.
"""

from __future__ import annotations

import functools
import itertools
import queue
import threading
from collections.abc import Callable, Sequence
from typing import Any

from aiops.common import forks
from aiops.net.cpu_count import usable

MOST = 4
"""Threads: more do not make memory faster."""


class _Task:
    """Pieces of work that several threads share."""

    __slots__ = ("_done", "_error", "_left", "_lock", "_next", "pieces")

    def __init__(self, pieces: Sequence[Callable[[], object]]) -> None:
        self.pieces = pieces
        self._next = itertools.count()  # `next` of a count is atomic under the GIL: no lock
        self._left = len(pieces)
        self._lock = threading.Lock()
        self._done = threading.Event()
        self._error: BaseException | None = None

    def work(self) -> None:
        """Take pieces until there are no more."""
        for number in self._next:
            if number >= len(self.pieces):
                return
            try:
                self.pieces[number]()
            except BaseException as error:
                self._error = error
            with self._lock:
                self._left -= 1
                left = self._left
            if not left:
                self._done.set()

    def wait(self) -> None:
        """Wait until the helpers have finished theirs."""
        self._done.wait()
        if self._error is not None:
            raise self._error


class ThreadPool:
    """The helper threads of one process.

    Parameters
    ----------
    helpers
        Their number; they are started when they are first needed.
    """

    def __init__(self, helpers: int) -> None:
        self._helpers = helpers
        self.forked()
        forks.note(self)

    def forked(self) -> None:
        """Start again: a fork has none of its parent's threads, and one may have had the lock."""
        self._tasks: queue.SimpleQueue[_Task] = queue.SimpleQueue()
        self._threads: list[threading.Thread] = []
        self._lock = threading.Lock()

    @property
    def count(self) -> int:
        """The number of threads that may work at the same time, the caller's included."""
        return 1 + self._helpers

    def all(self, pieces: Sequence[Callable[[], Any]]) -> None:
        """Do all pieces of a work, in any order; returns when they are done.

        Raises
        ------
        BaseException
            What a piece raised; the others have been done.
        """
        if len(pieces) < 2 or not self._helpers:
            for piece in pieces:
                piece()
            return
        if len(self._threads) < self._helpers:
            self._start()
        task = _Task(pieces)
        for _ in range(min(self._helpers, len(pieces) - 1)):
            self._tasks.put(task)
        task.work()
        task.wait()

    def _start(self) -> None:
        with self._lock:
            while len(self._threads) < self._helpers:
                thread = threading.Thread(target=self._help, name="aiops-helper", daemon=True)
                self._threads.append(thread)
                thread.start()

    def _help(self) -> None:
        tasks = self._tasks
        while True:
            task = tasks.get()
            task.work()
            del task


DEFAULT_POOL = ThreadPool(min(MOST, usable()) - 1)
"""The threads of this process, unless a number is given."""


@functools.cache
def pool_of(threads: int) -> ThreadPool:
    """Return the pool of this many threads, the caller's included; one per number."""
    return ThreadPool(threads - 1)
