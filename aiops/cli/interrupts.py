"""Ctrl-C for commands that can end in order: the first one asks for it, the second one kills."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

INTERRUPTED = 130
"""Exit status after Ctrl-C."""


@contextmanager
def interrupts(stop: Callable[[], None]) -> Iterator[None]:
    """Let the first Ctrl-C call ``stop``; outside the main thread do nothing."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.getsignal(signal.SIGINT)

    def heard(number: int, frame: FrameType | None) -> None:
        signal.signal(signal.SIGINT, before)
        stop()

    signal.signal(signal.SIGINT, heard)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
