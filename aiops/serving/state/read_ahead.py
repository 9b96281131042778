"""Have the system read a state's files while Python imports the modules that will ask for them.

It imports next to nothing itself. A snapshot is written past the system's cache, so a start has to
wait for the disk. This early, the newest one is in the cache when it is needed.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Sequence
from pathlib import Path

__all__ = ["files_of_a_start", "read_ahead"]

_MOST = 1 << 30
"""Bytes of a file: the disk is not further ahead when the state is recovered."""

_DIGITS = 20  # of the number of a row, in the names of snapshots and segments


def read_ahead(folder: Path) -> threading.Thread | None:
    """Begin to read the files of a state, if there is one; return the thread that does.

    None: this system cannot be asked to. Errors are left to those who need the files.
    """
    if not hasattr(os, "posix_fadvise"):
        return None
    thread = threading.Thread(target=_read, args=(folder,), name="aiops-read-ahead", daemon=True)
    thread.start()
    return thread


def _read(folder: Path) -> None:
    with contextlib.suppress(OSError):
        for name in files_of_a_start(os.listdir(folder)):
            file = os.open(folder / name, os.O_RDONLY | os.O_CLOEXEC)
            try:
                os.posix_fadvise(file, 0, _MOST, os.POSIX_FADV_WILLNEED)
            finally:
                os.close(file)


def files_of_a_start(names: Sequence[str]) -> list[str]:
    """Return the names of those that a start reads, in that order (`aiops.state.directory`)."""
    snapshots, segments = _numbered("snapshot-", names), _numbered("journal-", names)
    newest = max(snapshots, default=0)
    before = [first for first in segments if first <= newest + 1]
    rest = [segments[first] for first in sorted(segments) if first >= max(before, default=0)]
    return [*([snapshots[newest]] if snapshots else []), *rest]


def _numbered(kind: str, names: Sequence[str]) -> dict[int, str]:
    """Return the names that a kind of file has, by the number in them."""
    found = {name.removeprefix(kind): name for name in names if name.startswith(kind)}
    return {int(rest): found[rest] for rest in found if rest.isdecimal() and len(rest) == _DIGITS}
