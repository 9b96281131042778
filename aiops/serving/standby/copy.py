"""A standby's copy of its primary: the files of its state, and the engine that they bring along."""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np

from aiops.durable.recorder import AppendRow
from aiops.durable.recovery import Recovered, check_begin
from aiops.durable.rows import JournalRow
from aiops.durable.standby import StandbyPosition, generations_of, rows_in
from aiops.engine.capture import Capture
from aiops.engine.events import Committed, Event, JournalEnded
from aiops.errors import RemoteProtocolError, UsageError
from aiops.net.disk import Disk, DiskFile
from aiops.serving.config import Config
from aiops.serving.server import Server
from aiops.serving.state.journal_writer import JournalWriter
from aiops.serving.state.kept_state import header_of
from aiops.serving.state.snapshot_writer import SnapshotWriter
from aiops.serving.state.state_files import StateFiles
from aiops.state.directory import IDENTITY_FILE, PART, StateListing, snapshot_name
from aiops.state.snapshot_file import SnapshotFile
from aiops.wire.standby_messages import JournalRows, SnapshotPart, StandbyWelcome

_log = logging.getLogger("aiops.server")

_SLICE = 0.005
"""Seconds for which rows are applied before the event loop has its turn."""

_INCOMING = f"snapshot-incoming{PART}"


class StandbyCopy:
    """The state of a standby.

    Parameters
    ----------
    config
        The settings of the server that it may become.
    disk
        The file system.
    salt
        Draws numbers of 32 bits.
    kept
        Called when rows have been synced.

    Attributes
    ----------
    row, synced, applied
        The newest row that is written, synced, applied.
    newest
        The primary's newest row, as far as it has said.
    server
        Has the engine; it listens when this standby is promoted. None until there is a run.
    """

    def __init__(
        self, config: Config, disk: Disk, salt: Callable[[], int], kept: Callable[[], None]
    ) -> None:
        self._config, self._disk, self._salt, self._kept = config, disk, salt, kept
        assert config.state is not None, "a standby has a state"
        self._folder: Path = config.state
        self.server: Server | None = None
        self._writer: JournalWriter | None = None
        self._loop = asyncio.get_running_loop()
        self.row = self.synced = self.applied = self.newest = 0
        self._incoming: DiskFile | None = None  # a snapshot on its way
        self._at = self._length = 0  # of that
        self._restore_at = 0  # the row of a snapshot that is restored when the journal has it
        self._snapshots: SnapshotWriter | None = None
        if self._exists():
            self._open()

    @property
    def position(self) -> StandbyPosition:
        """The state that there is."""
        files = self._files
        if files is None:
            return StandbyPosition()
        row = 0 if self.pending else self.row  # rows behind a snapshot that has not come are none
        return StandbyPosition(files.run, files.generation, row)

    @property
    def whole(self) -> bool:
        """True if the engine is the primary's at row `applied`."""
        return self.server is not None and self.applied > 0 and not self.pending

    @property
    def pending(self) -> bool:
        """True while a snapshot is on its way."""
        return self._incoming is not None or self._restore_at > 0

    @property
    def _files(self) -> StateFiles | None:
        return None if self.server is None else self.server.state_files

    def _exists(self) -> bool:
        try:
            self._disk.make_folder(self._folder)
            return IDENTITY_FILE in self._disk.names(self._folder)
        except OSError as error:
            raise UsageError(f"--state {self._folder}: {error.strerror}") from None

    def _open(self) -> None:
        """Bring a fresh engine to the state of the folder."""
        self.server = server = Server(self._config)
        files = server.state_files
        assert files is not None, "it has a state"
        began = time.perf_counter()
        listing = StateListing(self._disk.names(self._folder))
        if not listing.snapshots and min(listing.segments, default=1) > 1:
            files.clear()  # it ended before it had the snapshot that belongs there
        recovered = server.recover()
        self.row = self.applied = self.newest = 0 if recovered is None else recovered.row
        self._take_snapshots(files)
        if self.row:
            took = time.perf_counter() - began
            _log.info("%s: row %d of run %s, in %.2f s", self._folder, self.row, files.run, took)

    def close(self) -> None:
        """Close the files; the copy stays as it is."""
        if self._incoming is not None:
            self._incoming.close()
            self._incoming = None
        self._end_writers()
        if self.server is not None:
            self.server.discard()
            self.server = None

    def _end_writers(self) -> None:
        if self._snapshots is not None:
            self._snapshots.wait()
        if self._writer is not None:
            self._writer.end()
            self._writer = None

    # ------------------------------------------------------------ what a primary sends

    def begin(self, welcome: StandbyWelcome, *, again: bool) -> None:
        """Go on behind the row of a welcome; ``again``: drop all that there is before."""
        generations = generations_of(welcome)
        if self.server is None:
            self._make(welcome.run)
        if again:
            self._drop()
        files = self._files
        assert files is not None, "there is a run"
        files.adopt(generations)
        self.row = self.synced = welcome.row
        if self._writer is None:
            self._writer = files.follow(welcome.row, partial(self._post, files))
        if welcome.snapshot:
            part = self._folder / _INCOMING
            self._disk.remove(part)
            self._incoming = self._disk.create(part, welcome.snapshot)
            self._at, self._length = 0, welcome.snapshot

    def _make(self, run: str) -> None:
        """Begin a folder that holds nothing of a run."""
        StateFiles(self._folder, self._disk, "a standby", run, self._salt).close()
        self._open()

    def _drop(self) -> None:
        """Drop all rows and snapshots, and the engine with them."""
        files = self._files
        assert files is not None, "there is a run"
        if self.row:
            _log.warning("%s: all of it is dropped, and fetched again", self._folder)
        self._end_writers()
        if self._incoming is not None:
            self._incoming.close()
            self._incoming = None
        files.clear()
        assert self.server is not None, "there is a run"
        self.server.discard()
        self._restore_at = 0
        self._open()

    def take_snapshot(self, message: SnapshotPart, data: memoryview) -> None:
        """Take the next bytes of a snapshot.

        Raises
        ------
        RemoteProtocolError
            When they are not the next ones, or the snapshot is not whole.
        """
        file, at = self._incoming, self._at
        end = at + len(data)
        if file is None or message.parts[:1] == () or message.parts[0].start != at:
            raise RemoteProtocolError(f"snapshot_part: byte {at:,} comes next")
        if end > self._length:
            raise RemoteProtocolError(f"snapshot_part: {self._length:,} bytes were announced")
        file.write([data], at)
        file.sync()
        self._at = end
        if end == self._length:
            self._snapshot_complete(file)

    def _snapshot_complete(self, file: DiskFile) -> None:
        files = self._files
        assert files is not None, "there is a run"
        try:
            read = lambda at, into: file.read(into, at)  # noqa: E731
            snapshot = SnapshotFile(read, self._length, "the primary's snapshot")
            snapshot.verify()
        except UsageError as error:
            raise RemoteProtocolError(str(error)) from None
        row, run = snapshot.header.row, snapshot.header.run
        if run != files.run or row < self.row:
            raise RemoteProtocolError(f"a snapshot of run {run}, row {row:,}, does not belong here")
        file.close()
        self._incoming = None
        self._restore_at = row
        if row <= self.row:
            self._restore()

    def _restore(self) -> None:
        """Bring the engine to the snapshot: the journal has the rows that it refers to."""
        server, files = self.server, self._files
        assert server is not None, "there is a run"
        assert files is not None, "there is a run"
        row, self._restore_at = self._restore_at, 0
        self._disk.rename(self._folder / _INCOMING, self._folder / snapshot_name(row))
        recovered = server.recover()
        if recovered is None or recovered.row != self.row:
            raise RemoteProtocolError(f"the snapshot does not lead to row {self.row:,}")
        self.applied = self.row
        self._take_snapshots(files)

    # ------------------------------------------------------------ its own snapshots

    def _take_snapshots(self, files: StateFiles) -> None:
        """Have a snapshot written where the primary has one: after the same row."""
        replayer = files.replayer
        assert replayer is not None, "the folder was read"
        self._snapshots = SnapshotWriter(files.disk, files.folder, files.segments)
        replayer.taken = partial(self._captured, files, self._snapshots)

    def _captured(
        self, files: StateFiles, writer: SnapshotWriter, found: Capture, row: int
    ) -> None:
        """Begin to write a capture, unless the disk is behind with the one before it."""
        if writer.busy:
            found.release()
            return
        release = partial(self._loop.call_soon_threadsafe, found.release)
        writer.begin(found, header_of(files, found, row), lambda nbytes: release())

    async def take_rows(
        self, message: JournalRows, data: memoryview, written: Callable[[], None]
    ) -> None:
        """Write rows into the journal, and bring the engine up to them.

        Parameters
        ----------
        message, data
            The message, and its payloads.
        written
            Called when all of them are written, and none is applied yet.

        Raises
        ------
        RemoteProtocolError
            When they are not the rows that come next.
        DamagedState
            When they give other results here.
        UsageError
            When they cannot be written.
        """
        server, files, writer = self.server, self._files, self._writer
        assert server is not None, "there is a run"
        assert files is not None, "there is a run"
        assert writer is not None, "it is fed"
        if writer.why:  # its thread could not sync
            raise UsageError(writer.why)
        frames = rows_in(message, data, files.run, self.row)
        self.newest = message.newest
        for frame in frames:
            payload = np.frombuffer(frame.payload, np.uint8)
            row = JournalRow(frame.kind, frame.time, frame.flags, frame.row, payload)
            ended = writer.append(AppendRow(frame.number, row))
            if ended is not None:
                raise UsageError(ended.why)
            self.row = frame.number
            if self._restore_at == self.row:
                self._restore()
        written()
        until = self._loop.time() + _SLICE
        for frame in frames:
            if self.pending or frame.number <= self.applied:
                continue
            replayer = files.replayer
            assert replayer is not None, "the folder was read"
            if frame.number == 1:
                check_begin(frame, self._config.policy, server.engine, str(self._folder))
                replayer.begin(frame)
            else:
                replayer.feed(frame)
            self.applied = frame.number
            if self._loop.time() >= until:
                await asyncio.sleep(0)
                until = self._loop.time() + _SLICE

    def _post(self, files: StateFiles, event: Event) -> None:
        """Take an event of the journal's thread."""
        self._loop.call_soon_threadsafe(self._journalled, files, event)

    def _journalled(self, files: StateFiles, event: Event) -> None:
        if files is not self._files:  # of rows that were dropped since
            return
        if isinstance(event, Committed):
            self.synced = max(self.synced, min(event.row, self.row))
            self._kept()
        elif isinstance(event, JournalEnded):
            _log.error("%s", event.why)  # the next row that is written raises

    # ------------------------------------------------------------ promotion

    def promoted(self) -> tuple[Server, Recovered]:
        """Return the server that has the engine, and where its journal ends; all is synced."""
        server, files = self.server, self._files
        assert server is not None, "there is a run"
        assert files is not None, "there is a run"
        assert files.replayer is not None, "the folder was read"
        writer = self._writer
        self._end_writers()
        if writer is not None and writer.why:  # rows that follow would follow nothing
            raise UsageError(writer.why)
        self.server = None
        return server, files.replayer.finish()


def serving_config(config: Config, port: int) -> Config:
    """Return the settings of the server that a standby may become."""
    return dataclasses.replace(config, standby=None, port=port)
