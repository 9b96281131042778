"""Shorten the interpreter's switch interval during long work beside an event loop."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from aiops.common import forks

__all__ = ["yielding"]

_MOMENT = 50e-6
"""Seconds that a thread waits before it asks another for the interpreter (Python's own: 5e-3).

While a module is imported beside it, an event loop loses the interpreter at every system call. At
5 ms for each, a server that imports Numba received its first 16 MiB and answered in 620 to 720 ms;
at 0.5 ms in 330 to 720, at 0.05 ms in 250 to 430, at 1 µs no sooner. The import takes a tenth to a
third longer while it is disturbed, and no longer if it is not.
"""


class _Holders:
    """Counts the uses of `yielding` in this process: the first shortens turns, the last resets."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._count = 0
        self._before = 0.0
        forks.note(self)

    def forked(self) -> None:
        """Make a new lock in a fork: a thread of the parent may have held this one."""
        self._lock = threading.Lock()

    def enter(self) -> None:
        with self._lock:
            if not self._count:
                self._before = sys.getswitchinterval()
                sys.setswitchinterval(min(self._before, _MOMENT))
            self._count += 1

    def leave(self) -> None:
        with self._lock:
            self._count -= 1
            if not self._count:
                sys.setswitchinterval(self._before)


_HOLDERS = _Holders()


@contextmanager
def yielding() -> Iterator[None]:
    """Have all threads take short turns while this lasts (`sys.setswitchinterval`).

    For long work in pure Python on a thread of its own, an import above all. Several may overlap,
    on any threads; when the last ends, turns are as long as before the first.
    """
    _HOLDERS.enter()
    try:
        yield
    finally:
        _HOLDERS.leave()
