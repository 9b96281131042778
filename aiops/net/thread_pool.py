"""Threads that lend a hand to whoever has a lot of memory to go through.

One core does not fill a machine's memory bus. What is large is cut into pieces, and the thread that
has to do it takes one piece after the other, as do those that help. Nobody waits for a helper that
did not come: on a busy machine whoever asked does all of it. So it costs next to nothing to ask.
There is one set of helpers per process, however many servers and workers it has (and one more for
each number that a server was told: ``--threads``).
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
"""Threads: with more the memory is no quicker."""


class _Task:
    """Pieces of work that several threads share."""

    __slots__ = ("_done", "_error", "_left", "_lock", "_next", "pieces")

    def __init__(self, pieces: Sequence[Callable[[], object]]) -> None:
        self.pieces = pieces
        self._next = itertools.count()  # the interpreter counts one at a time
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
        """Wait until others have finished theirs."""
        self._done.wait()
        if self._error is not None:
            raise self._error


class ThreadPool:
    """The threads of this process that help.

    Parameters
    ----------
    helpers
        How many; they are started when they are first needed.
    """

    def __init__(self, helpers: int) -> None:
        self._helpers = helpers
        self.forked()
        forks.note(self)

    def forked(self) -> None:
        """Begin anew: a fork has none of its parent's threads, and one may have had the lock."""
        self._tasks: queue.SimpleQueue[_Task] = queue.SimpleQueue()
        self._threads: list[threading.Thread] = []
        self._lock = threading.Lock()

    @property
    def count(self) -> int:
        """How many threads may work at the same time, the caller's included."""
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


HANDS = ThreadPool(min(MOST, usable()) - 1)
"""Those of this process, where nobody has said how many."""


@functools.cache
def hands_of(threads: int) -> ThreadPool:
    """Return those that are so many threads with the one that asks; always the same ones."""
    return ThreadPool(threads - 1)
