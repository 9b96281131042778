"""Mini-batches that several processes share: each is drawn once, and all processes end together.

A ticket is drawn by appending a byte to a file: where it lands is the ticket's number. Were each
worker given a fixed number, the last would train alone, with gradients of no staleness at all.
"""

from __future__ import annotations

import os
from pathlib import Path

from aiops.common.closing import Closing


class Tickets(Closing):
    """One worker's way of drawing; each has its own, on the same file.

    Parameters
    ----------
    path
        The file; made if it is not there.
    total
        How many there are.
    """

    def __init__(self, path: Path, total: int) -> None:
        self._total = total
        self._file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)

    def draw(self) -> bool:
        """Say whether there was one left."""
        os.write(self._file, b".")
        return os.lseek(self._file, 0, os.SEEK_CUR) <= self._total

    def close(self) -> None:
        """Let go of the file."""
        os.close(self._file)
