"""Processor time of this process by thread, as Linux counts it: a file is read for each."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping

OTHERS = "others"
"""The threads that Python does not know, such as those of libraries."""


class ThreadShares:
    """The shares of a processor that threads use, from one call to the next.

    Parameters
    ----------
    names
        What the threads of a name are for, by the beginning of that name.
    main
        What the thread that makes this is for.
    """

    def __init__(
        self,
        names: Mapping[str, str],
        main: str,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._names, self._clock = names, clock
        self._here, self._main = threading.get_ident(), main
        self._since = clock()
        self._before = dict[int, float]()
        self._process = time.process_time()
        self.take()

    def take(self) -> dict[str, float]:
        """Return the shares since the last call, by what the threads are for; the rest: `OTHERS`.

        On other systems than Linux all of it is `OTHERS`.
        """
        now, process = self._clock(), time.process_time()
        passed, self._since = now - self._since, now
        used, self._process = process - self._process, process
        found, times = {self._main: 0.0}, dict[int, float]()
        for thread in threading.enumerate():
            what, number = self._purpose(thread), thread.native_id
            spent = _seconds(number) if what and number is not None else None
            if spent is None or number is None:
                continue
            times[number] = spent
            found[what] = found.get(what, 0.0) + max(0.0, spent - self._before.get(number, spent))
        self._before = times
        if passed <= 0:
            return {}
        rest = max(0.0, used - sum(found.values()))
        return {name: each / passed for name, each in {**found, OTHERS: rest}.items()}

    def _purpose(self, thread: threading.Thread) -> str:
        if thread.ident == self._here:
            return self._main
        name = thread.name
        return next((what for begin, what in self._names.items() if name.startswith(begin)), "")


def _seconds(number: int) -> float | None:
    """Return the processor time of a thread; None: it is over, or the system does not tell.

    It is read from a file: the clock of a thread that has just ended must not be asked for
    (`time.pthread_getcpuclockid`).
    """
    try:
        with open(f"/proc/self/task/{number}/schedstat", "rb") as file:
            return int(file.read().split()[0]) / 1e9
    except (OSError, ValueError, IndexError):
        return None
