"""Write snapshots of a server's state beside training, and remove the files that they cover."""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable
from pathlib import Path

from aiops.engine.capture import Capture
from aiops.net.disk import Disk
from aiops.state.directory import PART, StateListing, journal_name, snapshot_name
from aiops.state.snapshot_file import SnapshotHeader, SnapshotPlan

_log = logging.getLogger("aiops.server")

KEPT = 2
"""Snapshots that stay: if the newest is damaged, the one before it and the journal are as good."""


class SnapshotWriter:
    """Writes one snapshot at a time, on a thread.

    Parameters
    ----------
    disk, folder
        Where they go.

    Attributes
    ----------
    why
        The reason for which the last one was not written; empty if it was.
    """

    def __init__(self, disk: Disk, folder: Path) -> None:
        self._disk, self._folder = disk, folder
        self._thread: threading.Thread | None = None
        self.why = ""

    @property
    def busy(self) -> bool:
        """True while a snapshot is being written."""
        return self._thread is not None and self._thread.is_alive()

    def begin(
        self, capture: Capture, header: SnapshotHeader, done: Callable[[Capture], object]
    ) -> None:
        """Begin to write a capture that is complete; ``done`` is called on the thread, at last."""
        self._thread = threading.Thread(
            target=self._run, args=(capture, header, done), name="aiops-snapshot", daemon=True
        )
        self._thread.start()

    def wait(self) -> None:
        """Return when nothing is being written."""
        if self._thread is not None:
            self._thread.join()

    def write(self, capture: Capture, header: SnapshotHeader) -> None:
        """Write a snapshot, and remove what it covers; errors are logged, and are in `why`."""
        name = snapshot_name(header.row)
        part = self._folder / f"{name}{PART}"
        try:
            plan = SnapshotPlan(header, capture.arrays)
            self._disk.remove(part)
            file = self._disk.create(part, plan.length)
            try:
                for at, buffers in plan.pieces():
                    file.write(buffers, at)
                    file.sync()  # in steps, so that the journal's rows do not wait for all of it
            finally:
                file.close()
            self._disk.rename(part, self._folder / name)
            removal = StateListing(self._disk.names(self._folder)).removable(KEPT)
            for row in removal.snapshots:
                self._disk.remove(self._folder / snapshot_name(row))
            for first in removal.segments:
                self._disk.remove(self._folder / journal_name(first))
            self.why = ""
        except OSError as error:
            self.why = f"{self._folder / name} was not written: {error.strerror or error}"
            _log.error("%s; the journal goes on, and the next one is tried as usual", self.why)
            with contextlib.suppress(OSError):
                self._disk.remove(part)

    def _run(
        self, capture: Capture, header: SnapshotHeader, done: Callable[[Capture], object]
    ) -> None:
        try:
            self.write(capture, header)
        finally:
            done(capture)
