"""Files that a server begins: each run writes its own, and none is written over."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import BinaryIO

from aiops.errors import UsageError


def begin(flag: str, path: Path) -> BinaryIO:
    """Open a file that no run has written yet.

    It is ``path``, or, if there is such a file, ``path.2``, ``path.3`` and so on: the number after
    the highest that is there. A device or a pipe (``/dev/null``) is written as it is.

    Parameters
    ----------
    flag
        Who asks for it, for the error: ``record``.
    path
        Where it should be.

    Returns
    -------
    BinaryIO
        Open for writing; its ``name`` says where it is.

    Raises
    ------
    UsageError
        When it cannot be written.
    """
    try:
        if path.exists() and not path.is_file():
            return path.open("wb")
        while True:
            with contextlib.suppress(FileExistsError):  # another server was quicker
                return _unused(path).open("xb")
    except OSError as error:
        raise UsageError(f"--{flag} {path}: {error.strerror}") from None


def discard(file: BinaryIO) -> None:
    """Close a file of `begin` and remove it: there was nothing to write."""
    path = Path(file.name)
    with contextlib.suppress(OSError):
        file.close()
    with contextlib.suppress(OSError):
        if path.is_file():
            path.unlink()


def _unused(path: Path) -> Path:
    """Return the name for the next run's file."""
    if not os.path.lexists(path):
        return path
    prefix = f"{path.name}."
    ends = (p.name.removeprefix(prefix) for p in path.parent.iterdir() if p.name.startswith(prefix))
    numbers = [int(end) for end in ends if end.isascii() and end.isdigit()]
    return path.with_name(f"{prefix}{max(numbers, default=1) + 1}")
