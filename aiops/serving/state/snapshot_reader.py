"""Open a snapshot file to read it, on its own: of a server's state, or of a simulation."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from aiops.state.blocks import SNAPSHOT
from aiops.state.snapshot_file import SnapshotFile


def is_snapshot(path: Path) -> bool:
    """Return whether a file begins as a snapshot file does.

    Raises
    ------
    OSError
        When it cannot be read.
    """
    with path.open("rb") as file:
        return file.read(len(SNAPSHOT)) == SNAPSHOT


@contextmanager
def opened_snapshot(path: Path) -> Iterator[SnapshotFile]:
    """Open a snapshot file; its arrays can be read until it is closed.

    Raises
    ------
    OSError
        When the file cannot be opened or read.
    DamagedState
        When its header or its footer are not what was written, or it is not whole.
    UsageError
        When a newer release wrote it.
    """
    file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)

    def read(offset: int, into: memoryview) -> int:
        done = 0
        while done < len(into):  # one call reads 2 GiB at most
            count = os.preadv(file, [into[done:]], offset + done)
            if not count:
                break
            done += count
        return done

    try:
        yield SnapshotFile(read, os.fstat(file).st_size, path.name)
    finally:
        os.close(file)
