"""The common parts of commands that take long: processors, a progress bar, and signals."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from aiops.errors import UsageError
from aiops.net.cpu_count import usable

INTERRUPTED = 130
"""Exit status after Ctrl-C."""


def processors(jobs: int) -> int:
    """Return what ``--jobs`` means: 0 is one job for each processor."""
    if jobs < 0:
        raise UsageError(f"--jobs must be 0 or more, not {jobs}")
    return jobs or usable()


def progress_bar(text: str, console: Console | None = None) -> Progress:
    """Return a progress bar on stderr behind a text, which is formatted with its ``task``."""
    shown = TextColumn(text, markup=False)
    times = TimeElapsedColumn(), TextColumn("left"), TimeRemainingColumn()
    return Progress(shown, BarColumn(), *times, console=console or Console(stderr=True))


@contextmanager
def interrupts(stop: Callable[[], None]) -> Iterator[None]:
    """Let the first Ctrl-C or SIGTERM call ``stop``, and the second one end the command.

    Outside the main thread it does nothing.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}

    def restore() -> None:
        for number, handler in before.items():
            signal.signal(number, handler)

    def on_signal(_number: int, _frame: FrameType | None) -> None:
        restore()
        stop()

    for number in before:
        signal.signal(number, on_signal)
    try:
        yield
    finally:
        restore()
