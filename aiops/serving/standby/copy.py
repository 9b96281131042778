"""A standby's copy of its primary: the files of its state, and the engine that they bring along."""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import numpy as np

from aiops.common.generations import before_term
from aiops.durable.recorder import AppendRow
from aiops.durable.recovery import Recovered
from aiops.durable.rows import JournalRow
from aiops.durable.standby import StandbyPosition, generations_of, rows_in
from aiops.engine.events import Committed, Event, JournalEnded
from aiops.errors import RemoteProtocolError, UsageError
from aiops.net.disk import Disk
from aiops.serving.config import Config
from aiops.serving.server import Server
from aiops.serving.standby.followed_run import FollowedRun
from aiops.serving.state.state_files import StateFiles
from aiops.shards.follower import Follower
from aiops.state.directory import (
    IDENTITY_FILE,
    PART,
    StateListing,
    TakenPlace,
    foreign,
    snapshot_name,
)
from aiops.state.snapshot_file import SnapshotFile, SnapshotHeader
from aiops.wire.server_messages import ShardState
from aiops.wire.standby_messages import JournalRows, SnapshotPart, StandbyWelcome

_log = logging.getLogger("aiops.server")

_SLICE = 0.005
"""Seconds for which rows are applied before the event loop has its turn."""

_INCOMING = f"snapshot-incoming{PART}"


class _Incoming:
    """A snapshot on its way, in a file that has another name until it is complete."""

    def __init__(self, disk: Disk, path: Path, length: int) -> None:
        disk.remove(path)
        self.file, self.at, self.length = disk.create(path, length), 0, length

    def take(self, data: memoryview) -> None:
        """Write the next bytes."""
        self.file.write([data], self.at)
        self.file.sync()
        self.at += len(data)

    def complete(self) -> SnapshotHeader:
        """Return the header of the snapshot, of which every byte was compared.

        Raises
        ------
        UsageError
            When it is not whole.
        """
        read = lambda at, into: self.file.read(into, at)  # noqa: E731
        snapshot = SnapshotFile(read, self.length, "the primary's snapshot")
        snapshot.verify()
        return snapshot.header


class StandbyCopy:
    """The state of a standby.

    Parameters
    ----------
    config
        The settings of the server that it may become.
    folder, disk
        Where its state is.
    salt
        Draws numbers of 32 bits.
    kept
        Called when rows have been synced.
    saved
        As of `FollowedRun`.

    Attributes
    ----------
    row, applied
        The newest row that is written, applied.
    newest
        The primary's newest row, as far as it has said.
    """

    def __init__(
        self,
        config: Config,
        folder: Path,
        disk: Disk,
        salt: Callable[[], int],
        kept: Callable[[], None],
        saved: Callable[[int], None],
    ) -> None:
        self._config, self._folder, self._disk = config, folder, disk
        self._salt, self._kept, self._saved = salt, kept, saved
        self._run: FollowedRun | None = None
        self._loop = asyncio.get_running_loop()
        self.row = self.applied = self.newest = 0
        self._incoming: _Incoming | None = None
        self._restore_at = 0  # the row of a snapshot that is restored when the journal has it
        self._restoring = False  # the engine, on another thread

    async def open(self) -> None:
        """Bring the engine to the state of the folder, if it has one; clients are answered."""
        began, names = time.perf_counter(), self._names()
        if IDENTITY_FILE not in names:
            return
        self._run = run = self._at(was_fetching=_INCOMING in names)
        self._restoring = True
        try:
            recovered = await run.recover_beside()
        finally:
            self._restoring = False
        self.row = self.applied = self.newest = 0 if recovered is None else recovered.row
        if run.replayer.lost:
            _log.warning(
                "%s lacks rows that its snapshot needs, as the system ended before it had written"
                " them to the disk: all of it is fetched again when the primary is reached",
                self._folder,
            )
        if self.row:
            took = time.perf_counter() - began
            named = self._folder, self.row, run.files.run
            _log.info("%s: row %d of run %s, in %.2f s", *named, took)

    @property
    def position(self) -> StandbyPosition:
        """The state that there is, as far as it can be gone on with."""
        run = self._run
        if run is None:
            return StandbyPosition()
        # Rows behind a snapshot that has not come, or that lacks queued pushes, are none.
        row = 0 if self.pending or run.replayer.lost else self.row
        files = run.files
        return StandbyPosition(
            files.run, files.generation, row, files.claims.proof, files.generations.secret
        )

    @property
    def fed_by(self) -> int:
        """A generation of the last term in which a primary has fed it.

        It may have begun a term itself, in a promotion that was not completed.
        """
        run = self._run
        if run is None or not run.files.generations.predecessors:
            return self.position.generation
        return before_term(run.files.generation)

    def lead_proof(self, generation: int) -> bytes:
        """Return the proof of a lead of this generation; empty: the run is not known yet."""
        return b"" if self._run is None else self._run.files.claims.lead_proof(generation)

    def place_of(self, shard: int) -> int:
        """Return the number of the place of a shard that a standby has taken; 0: none has.

        The standby of a lead knows those that its primary has given, that of a follower its own.
        """
        places = () if self._run is None else self._run.files.generations.places
        return next((place.number for place in places if place.shard == shard), 0)

    @property
    def led_by(self) -> int:
        """The newest generation of a lead of which a follower's standby knows; 0: of none."""
        run = self._run
        follower = None if run is None else run.server.coordinator
        if run is None or not isinstance(follower, Follower):
            return 0
        known = (generation for generation, _row in follower.history)
        return max(run.files.generations.led_by, *known, 0)

    def state(self) -> tuple[ShardState, int, bytes]:
        """Return what a follower's standby holds, the highest generation, and the run's secret.

        Raises
        ------
        UsageError
            When it has nothing yet.
        """
        run = self._run
        follower = None if run is None else run.server.coordinator
        if run is None or not isinstance(follower, Follower):
            raise UsageError("this standby has nothing of a follower yet")
        generations = run.files.generations
        return follower.state(), generations.newest, generations.secret

    def note_place(self, shard: int, number: int) -> None:
        """Note that the lead has given this standby its follower's place.

        Raises
        ------
        OSError
            When the disk refuses.
        """
        assert self._run is not None, "it has told the lead what it has"
        self._run.files.note_place(TakenPlace(shard, number))

    @property
    def server(self) -> Server | None:
        """The server that is brought along; None while there is none to look at."""
        return None if self._run is None or self._restoring else self._run.server

    def follower_moved(self, shard: int, port: int) -> None:
        """Reach a follower on this machine at another port, as a server and ever after."""
        followers = [*self._config.followers]
        followers[shard - 1] = f":{port}"
        self._config = dataclasses.replace(self._config, followers=followers)
        if self._run is not None:
            self._run.server.follower_moved(shard, port)

    @property
    def cuts(self) -> tuple[int, ...]:
        """The rows of the lead's journal of which it has snapshots, rising."""
        return () if self._run is None else tuple(sorted(self._run.cuts))

    def keep(self, cuts: Sequence[int]) -> None:
        """Remove what neither these snapshots need nor later ones."""
        if self._run is not None and not (self.pending or self._restoring):
            self._run.keep(cuts)

    @property
    def synced(self) -> int:
        """The newest row that is synced."""
        return 0 if self._run is None else self._run.synced

    @property
    def whole(self) -> bool:
        """True if the engine is the primary's at row `applied`."""
        return self._run is not None and self.applied > 0 and not self.pending

    @property
    def pending(self) -> bool:
        """True while a snapshot is on its way."""
        return self._incoming is not None or self._restore_at > 0

    def _names(self) -> list[str]:
        try:
            self._disk.make_folder(self._folder)
            return self._disk.names(self._folder)
        except OSError as error:
            raise UsageError(
                f"--state {self._folder}: {error.strerror}", output=str(self._folder)
            ) from None

    def _at(self, *, was_fetching: bool) -> FollowedRun:
        """Return the run of the folder, whose engine is not at its state yet.

        ``was_fetching``: a snapshot had not come whole, and the rows there are those behind it.
        """
        run = FollowedRun(self._config, self._saved)
        listing = StateListing(self._disk.names(self._folder))
        if not listing.snapshots and min(listing.segments, default=1) > 1:
            if was_fetching:
                run.files.clear()
            else:
                aside = run.files.set_aside()
                _log.warning(
                    "%s has no snapshot, and its journal begins with row %d, so it is no state: the"
                    " journal is moved to %s, and all is fetched from the primary",
                    *(self._folder, listing.segments[0], aside),
                )
        return run

    def _new(self) -> FollowedRun:
        """Return the run of a folder without rows."""
        run = self._at(was_fetching=False)
        run.recover()
        self.row = self.applied = self.newest = 0
        return run

    def close(self) -> None:
        """Close the files; the copy stays as it is."""
        self._close_incoming()
        if self._run is not None:
            self._run.discard()
            self._run = None

    def _close_incoming(self) -> None:
        if self._incoming is not None:
            self._incoming.file.close()
            self._incoming = None

    # ------------------------------------------------------------ what a primary sends

    def begin(self, welcome: StandbyWelcome, *, again: bool) -> None:
        """Go on behind the row of a welcome; ``again``: drop all that there is before."""
        generations = generations_of(welcome)
        run = self._run or self._made(welcome)
        if again:
            run = self._begun_again(run)
        self._run = run
        run.files.adopt(generations)
        self.row = run.synced = welcome.row
        if welcome.snapshot:  # before there are rows: they lead to no state without it
            part = self._folder / _INCOMING
            self._incoming = _Incoming(self._disk, part, welcome.snapshot)
        if run.writer is None:
            run.writer = run.files.follow(welcome.row, partial(self._post, run))

    def _made(self, welcome: StandbyWelcome) -> FollowedRun:
        """Begin a folder that holds nothing of a run."""
        place = welcome.shard, welcome.shards
        StateFiles(self._folder, self._disk, "a standby", welcome.run, self._salt, place).close()
        return self._new()

    def _begun_again(self, run: FollowedRun) -> FollowedRun:
        """Drop all rows and snapshots, and the engine with them."""
        if self.row:
            _log.warning("%s: all of it is dropped, and fetched again", self._folder)
        run.end_writers()
        self._close_incoming()
        run.files.clear()
        run.server.discard()
        self._run, self._restore_at = None, 0
        return self._new()

    async def take_snapshot(self, message: SnapshotPart, data: memoryview) -> None:
        """Take the next bytes of a snapshot.

        The disk's work is done on a thread: heartbeats and clients are answered meanwhile.

        Raises
        ------
        RemoteProtocolError
            When they are not the next ones, or the snapshot is not whole.
        """
        run, incoming = self._run, self._incoming
        if run is None or incoming is None:
            raise RemoteProtocolError("snapshot_part: none was announced")
        if message.parts[:1] == () or message.parts[0].start != incoming.at:
            raise RemoteProtocolError(f"snapshot_part: byte {incoming.at:,} comes next")
        if incoming.at + len(data) > incoming.length:
            raise RemoteProtocolError(f"snapshot_part: {incoming.length:,} bytes were announced")
        await asyncio.to_thread(incoming.take, data)
        if incoming.at < incoming.length:
            return
        try:
            header = await asyncio.to_thread(incoming.complete)
        except UsageError as error:
            raise RemoteProtocolError(str(error)) from None
        row = header.row
        why = foreign("the primary's snapshot", header.origin, run.files.origin)
        if why or row < self.row:
            raise RemoteProtocolError(
                why or f"the primary's snapshot is of row {row:,}, and row {self.row:,} came before"
            )
        self._restore_at = row
        self._close_incoming()
        if row <= self.row:
            await self._restore(run)

    async def _restore(self, run: FollowedRun) -> None:
        """Bring the engine to the snapshot: the journal has the rows that it refers to."""
        name = snapshot_name(self._restore_at)
        self._disk.rename(self._folder / _INCOMING, self._folder / name)
        self._restoring = True
        try:
            recovered = await run.recover_beside()
        finally:
            self._restoring = False
        if recovered is None or recovered.row != self.row:
            raise RemoteProtocolError(f"the snapshot does not lead to row {self.row:,}")
        self._restore_at, self.applied = 0, self.row
        run.note_snapshots()

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
        run = self._run
        if run is None or run.writer is None:
            raise RemoteProtocolError("journal_rows: the feed has not begun")
        if run.writer.why:  # its thread could not sync
            raise UsageError(run.writer.why)
        frames = rows_in(message, data, run.files.origin, self.row)
        self.newest = message.newest
        for frame in frames:
            payload = np.frombuffer(frame.payload, np.uint8)
            row = JournalRow(frame.kind, frame.time, frame.flags, frame.row, payload)
            ended = run.writer.append(AppendRow(frame.number, row))
            if ended is not None:
                raise UsageError(ended.why)
            self.row = frame.number
            if self._restore_at == self.row:
                await self._restore(run)
        written()
        until = self._loop.time() + _SLICE
        for frame in frames:
            if self.pending or frame.number <= self.applied:
                continue
            run.apply(frame)
            self.applied = frame.number
            if self._loop.time() >= until:
                await asyncio.sleep(0)
                until = self._loop.time() + _SLICE

    def _post(self, run: FollowedRun, event: Event) -> None:
        """Take an event of the journal's thread."""
        self._loop.call_soon_threadsafe(self._journalled, run, event)

    def _journalled(self, run: FollowedRun, event: Event) -> None:
        if run is not self._run:  # of rows that were dropped since
            return
        if isinstance(event, Committed):
            run.note_synced(max(run.synced, min(event.row, self.row)))
            self._kept()
        elif isinstance(event, JournalEnded):
            _log.error("%s", event.why)  # the next row that is written raises

    # ------------------------------------------------------------ promotion

    def promoted(
        self, predecessors: Sequence[str], *, placed: bool = False, above: int = 0
    ) -> tuple[Server, Recovered]:
        """Return the server that has the engine, and where its journal ends; all is synced.

        ``predecessors``: the URLs of those that it is to tell. ``placed``: whether it has the place
        of a follower, alone, that it has noted. ``above``: as of `GenerationFile.started`.

        Raises
        ------
        UsageError
            When there is no run, or rows are missing: what followed would follow nothing.
        """
        run = self._run
        if run is None:
            raise UsageError("this standby has nothing of a run yet")
        was_fed, why = run.writer is not None, run.end_writers()
        if why:
            raise UsageError(why, unwritten=True)
        if was_fed:
            run.files.followed(self.row)
        self._run, run.files.predecessors = None, tuple(predecessors)
        run.files.above = above
        run.files.places = tuple(run.files.generations.places) if placed else ()
        return run.server, run.replayer.finish()


def serving_config(config: Config, port: int) -> Config:
    """Return the settings of the server that a standby may become."""
    return dataclasses.replace(config, standby=None, shard=None, port=port)
