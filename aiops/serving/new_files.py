"""Open files and folders for a run: each has new ones, and none is overwritten."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import os
import shutil
from pathlib import Path
from typing import BinaryIO

from aiops.errors import UsageError
from aiops.serving.config import Config, shard_folder

_log = logging.getLogger("aiops.server")


def begin(flag: str, path: Path) -> BinaryIO:
    """Open a file that no run has written yet.

    It is ``path``, or, if that exists, ``path.2``, ``path.3`` and so on: the number after the
    highest in use. A device or a pipe (``/dev/null``) is opened itself.

    Parameters
    ----------
    flag
        The flag that an error names: ``record``.
    path
        The path wanted.

    Returns
    -------
    BinaryIO
        Open for writing; its ``name`` is its path.

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
        raise UsageError(f"--{flag} {path}: {error.strerror}", output=str(path)) from None


def begin_folder(flag: str, path: Path) -> Path:
    """Make a folder that no run has written to yet, and return its path.

    It is ``path``, or a path with a number, as of `begin`.

    Raises
    ------
    UsageError
        When it cannot be made, or ``path`` is a file.
    """
    if path.exists() and not path.is_dir():
        raise UsageError(
            f"--{flag} {path} is a file: name a folder, which is made for the run",
            output=str(path),
        )
    try:
        while True:
            with contextlib.suppress(FileExistsError):  # another server was quicker
                folder = _unused(path)
                folder.mkdir(mode=0o700)  # a model is its owner's
                return folder
    except OSError as error:
        raise UsageError(f"--{flag} {path}: {error.strerror}", output=str(path)) from None


def with_record(config: Config) -> Config:
    """Return the settings of a server whose shards are to be started, with ``--record`` begun.

    No server sees all of a push, so the record of shards is the journals of all of them, which are
    those of a state that is new.

    Raises
    ------
    UsageError
        When the folder cannot be made.
    """
    if config.record is None:
        return config
    folder = begin_folder("record", config.record)
    _log.info("recording this run in %s, by the journals of all shards", folder)
    return dataclasses.replace(config, record=None, state=folder, keep_journal=True)


def discard_unbegun(folder: Path) -> None:
    """Remove the folder of `with_record` if its lead has begun no journal: the start has failed."""
    if not any((folder / shard_folder(0)).glob("journal-*")):
        shutil.rmtree(folder, ignore_errors=True)


def discard(file: BinaryIO) -> None:
    """Close a file of `begin` and remove it."""
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
