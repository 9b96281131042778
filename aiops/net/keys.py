"""Keys that are pressed at a terminal, one by one, without waiting for the end of a line."""

from __future__ import annotations

import contextlib
import os
import select
import sys
import time
from collections.abc import Iterator

try:
    import termios
    import tty
except ImportError:  # not on Windows
    termios = None  # type: ignore[assignment]


class Keys:
    """The keys of a terminal; without one there are none."""

    def __init__(self, file: int | None) -> None:
        self._file = file

    def wait(self, seconds: float) -> str:
        """Return the key that is pressed within this time; empty: there was none."""
        if self._file is None:
            time.sleep(seconds)
            return ""
        readable, _, _ = select.select([self._file], [], [], seconds)
        pressed = os.read(self._file, 64) if readable else b""
        if readable and not pressed:  # it was closed
            self._file = None
        return pressed[:1].decode("latin-1")


@contextlib.contextmanager
def keys() -> Iterator[Keys]:
    """Have the keys of standard input, if that is a terminal, until the block ends."""
    if termios is None or not sys.stdin.isatty():
        yield Keys(None)
        return
    file = sys.stdin.fileno()
    before = termios.tcgetattr(file)
    try:
        tty.setcbreak(file)  # Ctrl-C still interrupts
        yield Keys(file)
    finally:
        termios.tcsetattr(file, termios.TCSADRAIN, before)
