"""Hand numbers to a tracker on a thread of its own: those who offer them never wait for it."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable

from aiops.trackers import RunMetrics, Tracker

_log = logging.getLogger("aiops.server")

WAITING = 256
"""Moments that wait for a slow tracker at most; the oldest go first."""

_AGAIN = 30.0
"""Seconds until a tracker that could not be opened is tried again."""

_MINUTE = 60.0
"""Seconds between warnings of one tracker."""


class Delivery:
    """Hands a tracker what it is offered, in order.

    A tracker that raises is no reason for a run to end: the error is logged, once a minute, and the
    numbers that it was to take are lost. One that is slow is behind by `WAITING` moments at most.

    Parameters
    ----------
    name
        The tracker's, for messages.
    opens
        Opens it, on the thread; if that raises it is tried again after half a minute.
    clock
        Seconds; default: a monotonic clock.
    """

    def __init__(
        self,
        name: str,
        opens: Callable[[], Tracker],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._name, self._opens, self._clock = name, opens, clock
        self._tracker: Tracker | None = None
        self._waiting: deque[RunMetrics] = deque()
        self._changed = threading.Condition()
        self._ending = False
        self._lost = self._failed = 0  # moments whose numbers it has not taken
        self._warned = -_MINUTE
        self._thread = threading.Thread(target=self._deliver, name="aiops-tracker", daemon=True)
        self._thread.start()

    def offer(self, metrics: RunMetrics) -> None:
        """Have the tracker take some numbers when it comes to them."""
        with self._changed:
            if self._ending:
                return
            if len(self._waiting) == WAITING:
                self._waiting.popleft()
                self._lost += 1
            self._waiting.append(metrics)
            self._changed.notify()

    def end(self) -> None:
        """Have the thread end once the tracker has taken what waits; `join` waits for that."""
        with self._changed:
            self._ending = True
            self._changed.notify()

    def join(self, deadline: float) -> None:
        """Wait until the tracker has taken all, or for ``deadline`` seconds: say what is left."""
        self._thread.join(deadline)
        if self._thread.is_alive():
            _log.warning(
                "the tracker %s has not taken all within %.3g s of the end, and is left: what it"
                " has not sent yet is lost, and the numbers of %d moments more",
                *(self._name, deadline, len(self._waiting)),
            )

    # ------------------------------------------------------------ its thread

    def _deliver(self) -> None:
        while (metrics := self._next()) is not None:
            try:
                if self._tracker is None:
                    self._tracker = self._opens()
                self._tracker.on_metrics(metrics)
            except BaseException as error:  # of another's code: whatever it is, the run goes on
                self._note(error)
                if self._tracker is None:
                    self._rest()
        if self._tracker is not None:
            try:
                self._tracker.close()
            except BaseException as error:
                _log.warning("the tracker %s could not end: %r", self._name, error)

    def _next(self) -> RunMetrics | None:
        """Wait for the next numbers; None: there will be none."""
        with self._changed:
            while not self._waiting:
                if self._ending:
                    return None
                self._changed.wait()
            return self._waiting.popleft()

    def _rest(self) -> None:
        """Wait before it is tried again, or until the run ends."""
        with self._changed:
            self._changed.wait_for(lambda: self._ending, _AGAIN)

    def _note(self, error: BaseException) -> None:
        self._failed += 1
        now = self._clock()
        if now < self._warned + _MINUTE:
            return
        self._warned = now
        _log.warning(
            "the tracker %s has failed, %d times so far, and lost the numbers of as many moments"
            " (and %d as it was slow). The run goes on, and the next numbers are sent: %r",
            *(self._name, self._failed, self._lost, error),
        )
