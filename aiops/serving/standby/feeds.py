"""A primary's side of its standbys: sends them its journal, and counts what they have of it."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable
from functools import partial
from itertools import pairwise
from math import inf
from typing import Any, Protocol

from aiops.durable.commit_gate import Acks
from aiops.durable.standby import starts_of
from aiops.durable.standby_feed import (
    Replication,
    RowFeed,
    RowsGone,
    StandbyProgress,
    agree,
)
from aiops.engine.capture import needed_rows
from aiops.errors import AiopsError, DamagedState, RemoteProtocolError
from aiops.model.parts import LARGEST, Part, Parts
from aiops.net.disk import Disk, DiskFile
from aiops.net.environment import Environment
from aiops.net.transport import MessageTransport
from aiops.serving.state.running_journal import RunningJournal
from aiops.serving.state.state_files import StateFiles
from aiops.state.directory import StateListing, journal_name, snapshot_name
from aiops.state.snapshot_file import SnapshotFile
from aiops.wire.messages import PROTOCOL, Error, Message, Ping, Pong
from aiops.wire.sinks import Sink
from aiops.wire.standby_messages import (
    JournalRows,
    RowsKept,
    SnapshotPart,
    StandbyHello,
    StandbyWelcome,
)

_log = logging.getLogger("aiops.server")

_PIECE = 4 << 20
"""Bytes of a snapshot in one message."""

_LONGEST_PART = 1 << 30

_CATCHING_UP = 600.0
"""Seconds for which the journal keeps the rows that a new standby needs."""

_FEW = 64 << 10
"""Bytes: a feed that reads less at a time has caught up."""

_SOON, _TICK = 0.001, 0.25
"""Seconds until a row that is being written is looked for again; seconds between two ticks."""

_SYNCS, _LOST = 0.1, 10.0
"""Seconds between two syncs for standbys; those after which one is taken to have failed."""


class FolderReader:
    """Reads the journal in a state's folder.

    Parameters
    ----------
    disk, folder
        Where it is.
    """

    def __init__(self, disk: Disk, folder: Any) -> None:
        self._disk, self._folder = disk, folder
        self._first, self._file = -1, None

    _file: DiskFile | None

    def listing(self) -> StateListing:
        """Return the files that there are."""
        return StateListing(self._disk.names(self._folder))

    def read(self, first: int, at: int, into: memoryview) -> int:
        """Read from a segment, which stays open."""
        if self._first != first or self._file is None:
            self.close()
            self._file = self._disk.open(self._folder / journal_name(first))
            self._first = first
        return self._file.read(into, at)

    def close(self) -> None:
        """Close the segment."""
        if self._file is not None:
            self._file.close()
            self._file = None


class FedState(Protocol):
    """The state that is kept, as a feed sees it."""

    journal: RunningJournal

    @property
    def newest(self) -> int:
        """The newest row of the journal."""


class FedStandby:
    """The record of one standby, beside its connection."""

    def __init__(self, link: MessageTransport, hello: StandbyHello, proof: bytes) -> None:
        self.link, self.hello, self.proof = link, hello, proof
        self.progress: StandbyProgress | None = None  # once it has been welcomed
        self.kept = asyncio.Event()  # set when it has confirmed something
        self.at_end = False  # there are few rows to read
        self.needed = LARGEST  # the first row that it is still to be sent, until it has caught up
        self.until = 0.0  # the time until which the journal keeps that for it
        self.pause = _SOON  # before a row that is not in the file yet is looked for again
        self.task: asyncio.Task[None] | None = None


class StandbyFeeds:
    """Feeds all standbys of a server.

    Parameters
    ----------
    files, state
        The state that is kept.
    acks, deadline
        The promise of acknowledgements; the seconds that a row may wait for a standby.
    env
        The server's clock.
    committed
        Called with the newest row that is committed, when that may be another.
    gone
        Called when a standby's connection is lost.
    supersede
        Called with the generation of a later server of the run, if a standby has seen one.
    alone
        Whether this server was a standby itself: it has none, and does not wait for one.
    """

    def __init__(
        self,
        files: StateFiles,
        state: FedState,
        acks: Acks,
        deadline: float,
        env: Environment,
        committed: Callable[[int], None],
        gone: Callable[[MessageTransport, AiopsError], None],
        supersede: Callable[[int], None],
        *,
        alone: bool = False,
    ) -> None:
        self._files, self._state, self._env = files, state, env
        self._committed, self._gone, self._supersede = committed, gone, supersede
        given = deadline, env.now(), state.newest, state.journal.synced
        self.replication = Replication(acks, *given)
        self._syncs = acks < Acks.DURABLE  # else its own answers wait for that, too
        self._asked, self._syncing = -inf, False  # when it was asked to be synced; whether it is
        if alone and self.replication.fall():
            _log.warning("there is no standby yet: acknowledgements mean 'durable'")
        self._standbys: dict[int, FedStandby] = {}
        self._missing = 0  # the newest row that is known not to be in the journal
        self._woken, self._synced = asyncio.Event(), asyncio.Event()
        self._ticker: asyncio.TimerHandle | None = None
        self._ended = False

    def begin(self, loop: asyncio.AbstractEventLoop) -> None:
        """Tick, now and at intervals."""
        replication = self.replication
        self._ticker = loop.call_later(_TICK, self.begin, loop)
        fallen = replication.tick(self._env.now(), self._state.newest, self._state.journal.nbytes)
        if fallen:
            _log.warning("%s", fallen)
            self._committed(replication.committed)

    @property
    def any(self) -> bool:
        """True if a standby is connected."""
        return bool(self._standbys)

    @property
    def behind(self) -> bool:
        """True if a standby that is connected lacks rows."""
        newest = self._state.newest
        return any(standby.written < newest for standby in self.replication.standbys.values())

    def first_needed(self) -> int:
        """Return the first row that the journal keeps for standbys (on any thread).

        A new standby is sent a snapshot, which may take longer than the primary takes to write the
        next two. Its rows stay until it has caught up once, for ten minutes at most.
        """
        now = self._env.now()
        standbys = [*self._standbys.values()]
        return min((each.needed for each in standbys if now < each.until), default=LARGEST)

    def synced_here(self, row: int) -> int:
        """Note that the journal is synced up to a row; return the row that is committed."""
        self._synced.set()
        self._syncing = False
        return self.replication.synced_here(row)

    def admit(self, link: MessageTransport, hello: StandbyHello, proof: bytes) -> None:
        """Feed a standby that has passed the handshake."""
        if self._files.claims.supersedes(hello):
            self._supersede(hello.generation)
            return
        link.hand_over(self, self._no_payloads)
        standby = self._standbys[link.number] = FedStandby(link, hello, proof)
        standby.task = asyncio.get_running_loop().create_task(self._feed(standby))

    def report(self, acks: Acks) -> dict[str, Any]:
        """Return the standbys' part of the statistics; ``acks``: the promise of the journal."""
        replication, now = self.replication, self._env.now()
        replication.note(now, self._state.newest, self._state.journal.nbytes)
        rows = [
            {
                "name": progress.name,
                "row": progress.written,
                "synced": progress.synced,
                "applied": progress.applied,
                "behind_rows": max(0, replication.newest - progress.synced),
                "behind_bytes": replication.bytes_behind(progress.synced),
                "behind_seconds": replication.seconds_behind(progress.synced, now),
            }
            for progress in replication.standbys.values()
        ]
        return {"standbys": rows, "acks": min(acks, replication.level).name.lower()}

    def end(self) -> None:
        """Feed no more."""
        self._ended = True
        if self._ticker is not None:
            self._ticker.cancel()
        for standby in list(self._standbys.values()):
            standby.link.close()
            if standby.task is not None:
                standby.task.cancel()

    # ------------------------------------------------------------ calls of the transports

    def link_made(self, link: MessageTransport) -> None:
        """Never called: it was made before it was handed over."""

    def link_received(self, link: MessageTransport, message: Message, sink: Sink | None) -> None:
        """Handle a standby's message."""
        standby = self._standbys[link.number]
        if isinstance(message, Ping):
            if link.wire.state == "standby open":
                link.send(link.wire.send(Pong(message.id)))
        elif isinstance(message, RowsKept):
            replication, before = self.replication, self.replication.level
            if standby.progress is None:
                link.fault(RemoteProtocolError("rows_kept: it was sent none"))
                return
            try:
                row = replication.kept(link.number, message, self._env.now())
            except RemoteProtocolError as error:
                link.fault(error)
                return
            standby.kept.set()
            if replication.level > before:
                name = replication.level.name.lower()
                _log.info("%s has all rows: acknowledgements mean %r again", _named(standby), name)
            self._committed(row)

    def link_waits(self, link: MessageTransport) -> None:
        """Never called: no message of a standby has payloads."""

    def link_lost(self, link: MessageTransport, error: AiopsError) -> None:
        """Feed it no more."""
        standby = self._standbys.pop(link.number, None)
        self.replication.standbys.pop(link.number, None)
        if standby is not None and standby.task is not None:
            standby.task.cancel()
        self._gone(link, error)

    def _no_payloads(self, message: Message) -> Sink | None:
        raise RemoteProtocolError(f"a standby sends no {message.kind!r}")

    # ------------------------------------------------------------ the feed

    async def _feed(self, standby: FedStandby) -> None:
        """Send a standby what it lacks, as long as it is connected."""
        link, reader = standby.link, FolderReader(self._files.disk, self._files.folder)
        try:
            if not self._state.newest:  # a follower's, before its lead has a model
                await self._appended()
            row, snapshot = await asyncio.to_thread(self._start, standby.hello, reader)
            standby.needed, standby.until = row + 1, self._env.now() + _CATCHING_UP
            self._welcome(standby, row, snapshot)
            if snapshot:
                await self._send_snapshot(standby, snapshot)
            feed = RowFeed(reader, row)
            try:
                while True:
                    await self._send_rows(standby, feed)
            except RowsGone:  # it is sent a snapshot when it comes again
                self._missing = max(self._missing, feed.next)
                raise
        except (AiopsError, OSError, RowsGone) as error:
            if not self._ended:
                _log.warning("%s is not fed any more: %s", _named(standby), error)
            if link.wire.state != "closed":
                link.send(link.wire.send(Error(0, "unavailable", str(error), {}, True)))
            link.close()
        finally:
            reader.close()

    def _start(self, hello: StandbyHello, reader: FolderReader) -> tuple[int, int]:
        """Return the row behind which a standby is fed, and the row of a snapshot for it, or 0."""
        newest, starts = self._state.newest, self._files.generations.starts
        listing = reader.listing()
        held = hello.run == self._files.run and agree(starts, newest, hello.generation, hello.row)
        if held and hello.row >= self._missing and listing.segment_of(hello.row + 1) is not None:
            return hello.row, 0
        if not self._missing and listing.segment_of(1) is not None:
            return 0, 0
        for row in [row for row in listing.snapshots if row >= self._missing]:
            name = snapshot_name(row)
            file = self._files.disk.open(self._files.folder / name)
            try:
                snapshot = SnapshotFile(partial(_read_at, file), file.size(), name)
            except DamagedState:
                continue
            finally:
                file.close()
            first = min([row + 1, *needed_rows(snapshot.header.owners)])
            if listing.segment_of(first) is None or first <= self._missing:
                first = row + 1
            return first - 1, row
        raise RowsGone("there is neither a snapshot nor the whole journal to feed a standby from")

    def _welcome(self, standby: FedStandby, row: int, snapshot: int) -> None:
        link, files, hello = standby.link, self._files, standby.hello
        length = 0
        if snapshot:
            file = files.disk.open(files.folder / snapshot_name(snapshot))
            length = file.size()
            file.close()
        welcome = StandbyWelcome(
            *(hello.id, PROTOCOL, standby.proof, files.run, files.generation, row, length),
            *(starts_of(files.generations, files.place[0]), files.generations.secret, *files.place),
            files.claims.proof,
        )
        link.send(link.wire.send(welcome))
        progress = StandbyProgress(hello.name, row, row if row == hello.row else 0)
        standby.progress = self.replication.standbys[link.number] = progress
        what = f"from row {row + 1:,} on" + (f", after snapshot {snapshot:,}" if snapshot else "")
        _log.info("%s is fed %s", _named(standby), what)

    async def _send_snapshot(self, standby: FedStandby, row: int) -> None:
        """Send a snapshot's file; it may be removed meanwhile, but not while it is open."""
        file = self._files.disk.open(self._files.folder / snapshot_name(row))
        try:
            at, length = 0, file.size()
            while at < length:
                data = memoryview(bytearray(min(_PIECE, length - at)))
                if await asyncio.to_thread(file.read, data, at) < len(data):
                    raise DamagedState(f"{snapshot_name(row)} ends before byte {length:,}")
                message = SnapshotPart(0, (Part(at, at + len(data), "raw", len(data), 0),))
                standby.link.send(standby.link.wire.send(message, [[data]]))
                at += len(data)
                while standby.link.unsent > 2 * _PIECE:  # it confirms each piece
                    standby.kept.clear()
                    await standby.kept.wait()
        finally:
            file.close()

    async def _send_rows(self, standby: FedStandby, feed: RowFeed) -> None:
        """Send the next rows, once there are some and the standby has room."""
        link, progress = standby.link, standby.progress
        assert progress is not None, "it was welcomed"
        if self.replication.here < feed.next:
            standby.needed = LARGEST
            await self._until_synced(feed.next)
            standby.at_end = True
        # The newest rows are in the system's memory, and few: a thread would take longer.
        here = self.replication.here
        batch = feed.read(here) if standby.at_end else await asyncio.to_thread(feed.read, here)
        if batch is None:  # it is being written
            await asyncio.sleep(standby.pause)
            standby.pause = min(2 * standby.pause, _TICK)
            return
        standby.pause, standby.at_end = _SOON, len(batch.data) < _FEW
        while not progress.has_room(len(batch.data)):
            standby.kept.clear()
            await standby.kept.wait()
        parts = _parts(len(batch.data))
        message = JournalRows(0, batch.first, batch.last, self._state.newest, parts)
        payloads = [[batch.data[part.start : part.stop]] for part in parts]
        link.send(link.wire.send(message, payloads))
        progress.note_sent(batch)

    async def _until_synced(self, row: int) -> None:
        """Wait until a row has been appended, and is synced."""
        while self.replication.here < row:
            self._synced.clear()
            if self._state.newest < row:
                await self._appended()
            elif self._syncs:
                await self._sync()
            else:
                await self._synced.wait()

    async def _sync(self) -> None:
        """Have the journal synced, if that was not asked for just now, and wait a while for it."""
        now = self._env.now()
        if now >= self._asked + (_LOST if self._syncing else _SYNCS):
            self._asked, self._syncing = now, True
            loop = asyncio.get_running_loop()
            self._state.journal.sync(lambda row: loop.call_soon_threadsafe(self.synced_here, row))
        with contextlib.suppress(TimeoutError):  # the journal may have ended before
            async with asyncio.timeout(_SYNCS):
                await self._synced.wait()

    async def _appended(self) -> None:
        """Wait for the next row."""
        self._woken.clear()
        self._state.journal.appended = self._wake
        await self._woken.wait()

    def _wake(self) -> None:
        self._state.journal.appended = None
        self._woken.set()


def _read_at(file: DiskFile, at: int, into: memoryview) -> int:
    return file.read(into, at)


def _parts(nbytes: int) -> Parts:
    cuts = [*range(0, nbytes, _LONGEST_PART), nbytes]
    return tuple(Part(begin, end, "raw", end - begin, 0) for begin, end in pairwise(cuts))


def _named(standby: FedStandby) -> str:
    return f"standby {standby.hello.name!r} at {standby.link.peer_name}"
