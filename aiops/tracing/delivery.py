"""Hand spans to an exporter on a thread of its own: what makes them never waits for it."""

from __future__ import annotations

import atexit
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence

from aiops.tracing.spans import Exporter, Span

WAITING = 8192
"""Spans that wait for a slow exporter at most; later ones are lost."""

AT_ONCE = 512
"""Spans that are exported together at most."""

_EVERY = 1.0
"""Seconds between two looks at what waits."""

_AT_EXIT = 1.5
"""Seconds that a process which ends waits for its last spans to be sent."""

_MINUTE = 60.0
"""Seconds between warnings."""

_log = logging.getLogger("aiops.tracing")


class SpanQueue:
    """Hands an exporter what it is offered.

    An exporter that raises, or cannot reach its collector, is no reason for a run to end: that is
    logged, once a minute, and the spans that it was to take are lost.

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
        self._ending = threading.Event()
        self._lost = 0
        self._warned = -_MINUTE
        self._thread: threading.Thread | None = None  # from the first span on

    def offer(self, spans: Sequence[Span]) -> None:
        """Have spans exported, if there is room for them and it has not been closed."""
        if self._ending.is_set():
            return
        if len(self._waiting) + len(spans) > WAITING:
            self._lost += len(spans)
        else:
            self._waiting.extend(spans)
        if self._thread is None:
            thread = threading.Thread(target=self._deliver, name="aiops-tracing", daemon=True)
            self._thread = thread
            thread.start()
            atexit.register(self.close, _AT_EXIT)

    def close(self, deadline: float) -> None:
        """Export what waits, and end; after ``deadline`` seconds leave what is left."""
        self._ending.set()
        thread = self._thread
        if thread is None:
            return
        atexit.unregister(self.close)
        thread.join(deadline)
        if thread.is_alive():
            _log.warning(
                "traces could not all be sent within %.3g s of the end: %d spans are lost, and"
                " those under way",
                *(deadline, len(self._waiting)),
            )
            self._waiting.clear()
            self._close()

    # ------------------------------------------------------------ its thread

    def _deliver(self) -> None:
        ending = False
        while not ending:
            ending = self._ending.wait(_EVERY)
            while self._waiting:
                spans = [self._waiting.popleft() for _ in range(min(AT_ONCE, len(self._waiting)))]
                self._export(spans)
        self._close()

    def _close(self) -> None:
        """End the exporter, once."""
        exporter, self._exporter = self._exporter, None
        if exporter is not None:
            try:
                exporter.close()
            except BaseException as error:
                _log.warning("the exporter of traces could not end: %r", error)

    def _export(self, spans: Sequence[Span]) -> None:
        try:
            exporter = self._exporter
            if exporter is None:
                exporter = self._exporter = self._opens()
            why = exporter.export(spans)
        except BaseException as error:  # of another's code: whatever it is, the run goes on
            why = repr(error)
        if not why:
            return
        self._lost += len(spans)
        now = self._clock()
        if now >= self._warned + _MINUTE:
            self._warned = now
            _log.warning(
                "traces are lost, %d spans so far, and the run goes on: %s", self._lost, why
            )
