"""The files of ``--state DIR``: open them, begin a journal in them, fence and clear them."""

from __future__ import annotations

import contextlib
import itertools
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

from aiops._version import __version__
from aiops.common.generations import DRAWN, generation_text
from aiops.durable.commit_gate import Acks
from aiops.durable.follower_recorder import FollowerReplayer
from aiops.durable.generations import Generations
from aiops.durable.recorder import AppendRow
from aiops.durable.recovery import Recovered, Replayer, begin_row
from aiops.engine.engine import Engine
from aiops.engine.events import Event, Warm
from aiops.errors import DamagedState, Superseded, UsageError
from aiops.net import signals
from aiops.net.disk import Disk, DiskLock
from aiops.serving.state.journal_writer import JournalWriter
from aiops.serving.state.recovery_files import FoundFiles, RecoveryFiles, read_at, record_text
from aiops.serving.state.segment_files import SegmentFiles
from aiops.shards.follower import Follower
from aiops.state import directory
from aiops.state.directory import SHARD, GenerationFile, StateIdentity, StateListing, TakenPlace
from aiops.state.snapshot_file import SnapshotFile, SnapshotHeader

_log = logging.getLogger("aiops.server")

RECORD = "--record"


class StateFiles:
    """A server's state directory, locked by this process.

    Parameters
    ----------
    folder
        The directory; it is made if it is missing.
    disk
        The file system.
    holder
        What another server is told that finds it locked.
    new_run
        The name of the run, if there is no state yet.
    salt
        Draws a segment's salt, of 32 bits; eight of them are a run's secret.
    shard
        The number of the shard whose state it is to be, and of all shards. None: a follower's,
        which learns both from its lead (`identify`).
    keep
        Whether the journal keeps all rows, for `aiops replay`.
    flag
        The flag that errors name. With `RECORD` it is the record of a run, with which no server
        goes on.
    prepare
        Called when the directory is locked, before it is read.

    Attributes
    ----------
    folder, disk
        The directory, and the file system.
    segments
        The files of the journal.
    run
        The name of the run whose state it holds; empty if a follower has none yet.
    generations
        Where the run's generations began.
    generation
        That of the last start; 0 for a new state.
    predecessors
        The URLs of those whose standby this server was, when it is promoted; else empty.
    places
        The place that it has been given, if it is promoted alone; else empty.
    above
        A generation that a promotion of all servers has to be above.
    claim
        Called before a generation begins; raises if the server could not serve in it.

    Raises
    ------
    UsageError
        When another process has it, or it cannot be read or written, or is no state's.
    """

    def __init__(
        self,
        folder: Path,
        disk: Disk,
        holder: str,
        new_run: str,
        salt: Callable[[], int],
        shard: tuple[int, int] | None = (0, 1),
        *,
        keep: bool = False,
        flag: str = "--state",
        prepare: Callable[[], object] = lambda: None,
    ) -> None:
        self.folder, self._shard = folder, shard
        self.disk, self._salt, self._flag = disk, salt, flag
        self.segments = SegmentFiles(disk, folder, keep=keep)
        self._is_record = flag == RECORD
        self._found = FoundFiles()  # by the last recovery
        self._refuse_foreign()
        try:
            self.disk.make_folder(folder)
        except FileExistsError:
            raise UsageError(f"{flag} {folder} is a file: name a folder, or none yet") from None
        except OSError as error:
            raise UsageError(f"{flag} {folder}: {error.strerror}", output=str(folder)) from None
        try:
            lock = disk.lock(folder / directory.LOCK, holder)
        except OSError as error:
            raise UsageError(f"{flag} {folder}: {error.strerror}") from None
        if isinstance(lock, str):
            raise UsageError(
                f"{folder} is in use by {lock}: end that server first, or name another --state"
            )
        self._lock: DiskLock = lock
        try:
            prepare()
            self._open(new_run)
        except OSError as error:
            self.close()
            raise UsageError(f"{flag} {folder}: {error.strerror}") from None
        except BaseException:
            self.close()
            raise

    def _refuse_foreign(self) -> None:
        """Check that what is there already, if anything is, is a state of this kind of server."""
        try:
            names = self.disk.names(self.folder)
        except OSError:
            return
        shards = [name for name in names if name.startswith(SHARD)]
        if shards:
            raise UsageError(
                f"{self.folder} holds the states of a model on shards ({', '.join(shards)}), and"
                " this server is to be alone: start it with --shards, or name another --state"
            )
        foreign = StateListing(names).foreign
        if foreign:
            raise UsageError(
                f"{self.folder} holds {foreign[0]!r}, which no state has: name a folder of its own"
                " with --state"
            )

    def _open(self, new_run: str) -> None:
        listing = StateListing(self.disk.names(self.folder))
        for part in listing.parts:
            self.disk.remove(self.folder / part)
        names = self.disk.names(self.folder)
        if self._shard is not None and self._shard[1] > 1:
            above = self.folder.parent
            if directory.IDENTITY_FILE in self.disk.names(above):
                raise UsageError(
                    f"{above} holds a whole model, and this server is to have shards of one: start"
                    " it without --shards, or name another --state"
                )
        if directory.IDENTITY_FILE in names:
            name = str(self.folder / directory.IDENTITY_FILE)
            identity = StateIdentity.unpack(self._read(directory.IDENTITY_FILE), name)
            self._refuse_record(identity)
            found, self.run = (identity.shard, identity.shards), identity.run
            if self._shard not in (found, None) or (self._shard is None and not found[0]):
                raise UsageError(
                    f"{self.folder} holds {_named(*found)}, and this server is to be"
                    f" {_named(*self._shard) if self._shard else 'a follower'}: start it as it was,"
                    " or name another --state"
                )
            self._shard = found
        elif listing.segments or listing.snapshots:
            raise DamagedState(
                f"{self.folder} is damaged: it has a journal or a snapshot, and no file"
                f" {directory.IDENTITY_FILE!r}: put back any copy of it, as it never changes, or"
                " begin another state with what `aiops state export` writes"
            )
        else:
            self.run = ""
            if self._shard is not None:
                self.identify(new_run, *self._shard)
        self.predecessors: tuple[str, ...] = ()
        self.places: tuple[TakenPlace, ...] = ()
        self.above = 0
        self.claim: Callable[[], None] = lambda: None
        self.generations = GenerationFile(0)
        if directory.GENERATION_FILE in names:
            name = str(self.folder / directory.GENERATION_FILE)
            self.generations = GenerationFile.unpack(self._read(directory.GENERATION_FILE), name)
        self.generation = self.generations.generation

    def _refuse_record(self, identity: StateIdentity) -> None:
        """Check that the folder is no record: a server would write into what is to be kept."""
        if identity.record and not self._is_record:
            raise UsageError(record_text(self.folder))

    @property
    def place(self) -> tuple[int, int]:
        """The number of the shard, and of all shards."""
        return self._shard or (0, 1)

    @property
    def origin(self) -> tuple[str, int, int]:
        """The run, the number of the shard and that of all shards."""
        return self.run, *self.place

    @property
    def snapshots(self) -> tuple[int, ...]:
        """The rows of the snapshots, the newest first."""
        return StateListing(self.disk.names(self.folder)).snapshots

    @property
    def earlier_nbytes(self) -> int:
        """Bytes of the segments that the last recovery has read, of earlier starts."""
        return self._found.nbytes

    def cuts(self) -> dict[int, int]:
        """Return the rows of a follower's snapshots, by the row of its lead's that each is of."""
        cuts = ((row, header.owners.get("cut")) for row, header in self.headers())
        return {cut: row for row, cut in cuts if type(cut) is int}

    def headers(self) -> Iterator[tuple[int, SnapshotHeader]]:
        """Yield the rows of the snapshots, the newest first, with their headers."""
        for row in self.snapshots:
            try:
                with self._snapshot(row) as snapshot:
                    header = snapshot.header
            except DamagedState as error:
                _log.error("%s", error)
                continue
            yield row, header

    def check_snapshot(self, row: int) -> None:
        """Compare all of a snapshot with its checksums.

        Raises
        ------
        DamagedState, OSError
            When it is not whole, or cannot be read.
        """
        with self._snapshot(row) as snapshot:
            snapshot.verify()

    @contextlib.contextmanager
    def _snapshot(self, row: int) -> Iterator[SnapshotFile]:
        name = directory.snapshot_name(row)
        file = self.disk.open(self.folder / name)
        try:
            yield SnapshotFile(partial(read_at, file), file.size(), name)
        finally:
            file.close()

    @property
    def has_journal(self) -> bool:
        """True if there are rows beside the snapshots."""
        return bool(StateListing(self.disk.names(self.folder)).segments)

    def identify(self, run: str, shard: int, shards: int) -> None:
        """Write that the directory holds the state of this shard of this run.

        Raises
        ------
        UsageError
            When the directory cannot be written.
        """
        self.run, self._shard = run, (shard, shards)
        identity = StateIdentity(run, shard, shards, time.time(), record=self._is_record)
        try:
            self._replace(directory.IDENTITY_FILE, identity.pack())
        except OSError as error:
            raise UsageError(f"{self._flag} {self.folder}: {error.strerror}") from None

    def recover(
        self,
        engine: Engine,
        policy: str,
        warm: Callable[[Warm], object] | None = None,
        replayer: Replayer | None = None,
        kernels: Callable[[], object] | None = None,
        loading: Callable[[], bool] = lambda: False,
    ) -> Recovered | None:
        """Bring a fresh engine to the state of the directory.

        Parameters
        ----------
        engine, policy
            The engine, and the policy's name.
        warm
            Begins to compile kernels on another thread, so that they are ready for the rest of the
            rows, or soon after. None: the effect is among those that are returned.
        replayer
            Replays the rows; default: to the engine.
        kernels
            Waits for kernels that are being compiled (`Replayer`).
        loading
            Returns whether they still are.

        Returns
        -------
        Recovered or None
            Where the journal ended; None: this is a new state.

        Raises
        ------
        DamagedState
            When it is damaged.
        UsageError
            When the server was started with other settings.
        signals.Ended
            When a signal ends the process meanwhile; the state is as it was.
        """
        replayer = replayer or Replayer(engine, warm, self.generations.back_to)
        replayer.kernels = kernels
        with signals.heeded() as check:
            reading = RecoveryFiles(self.folder, self.disk, self.origin, check, loading)
            return self._read_with(reading, reading.recover(engine, policy, replayer))

    def recover_follower(
        self, follower: Follower, replayer: FollowerReplayer | None = None
    ) -> Recovered | None:
        """Bring a fresh follower to the state of the directory, as `recover`."""
        if not self.run:
            return None
        if replayer is None:
            replayer = FollowerReplayer(follower, self.run, None, self.generations.back_to)
        with signals.heeded() as check:
            reading = RecoveryFiles(self.folder, self.disk, self.origin, check)
            return self._read_with(reading, reading.recover_follower(follower, replayer))

    def _read_with(self, reading: RecoveryFiles, recovered: Recovered | None) -> Recovered | None:
        """Keep what a recovery has found."""
        self._found = reading.found
        self.segments.expect(reading.found.longest)
        return recovered

    def begin(
        self,
        engine: Engine,
        policy: str,
        recovered: Recovered | None,
        now: float,
        acks: Acks,
        post: Callable[[Event], object],
        *,
        promoted: bool = False,
    ) -> JournalWriter | None:
        """Begin this start's generation, and its journal, unless there is to be none.

        Snapshots that were found damaged are removed: they are not among those that are kept.

        Parameters
        ----------
        engine, policy
            As of `recover`.
        recovered
            What that returned.
        now
            The time, in seconds.
        acks
            The level of acknowledgements: with ``DURABLE`` all that is written is synced, and with
            ``APPLIED`` there is no journal.
        post
            Posts an event, on any thread.
        promoted
            Whether a standby begins to serve: with the next term.

        Raises
        ------
        UsageError
            When the directory cannot be written.
        """
        row = 0 if recovered is None else recovered.row
        writer = self.begin_rows(row, _versions(engine), acks, post, promoted=promoted)
        if recovered is None and writer is not None:
            begun = begin_row(now, policy, engine, self.run, f"aiops {__version__}")
            writer.append(AppendRow(1, begun))
        return writer

    def begin_rows(
        self,
        row: int,
        versions: Sequence[int],
        acks: Acks,
        post: Callable[[Event], object],
        *,
        promoted: bool = False,
    ) -> JournalWriter | None:
        """Begin this start's generation, and a journal that goes on after a row.

        Parameters
        ----------
        row, versions
            Where the journal ended, and the versions there.
        acks, post, promoted
            As of `begin`.

        Raises
        ------
        DamagedState
            When it has rows and no generation.
        UsageError
            When the directory cannot be written.
        """
        if row and not self.generations.generation:  # clients have seen the first ones
            raise DamagedState(
                f"{self.folder} is damaged: it has a journal or a snapshot, and no file of its"
                " generations: put back a copy, or begin with what `aiops state export` writes"
            )
        try:
            names = self.disk.names(self.folder)
            if row and self.segments.kept and 1 not in StateListing(names).segments:
                raise UsageError(
                    f"--keep-journal: the first rows of {self.folder} are gone, so no replay could"
                    " begin with them: name a new --state, or drop --keep-journal"
                )
            self.claim()
            drawn = self._salt() % DRAWN
            if not self.generations.secret:
                self.generations = replace(self.generations, secret=self._new_secret())
            back_to = self.generations.back_to
            self.generations = self.generations.started(
                row,
                versions,
                drawn,
                promoted=promoted,
                predecessors=self.predecessors,
                places=self.places,
                above=self.above,
            )
            # A start that ends before its journal begins leaves later rows, to be undone again.
            begun = replace(self.generations, back_to=back_to)
            self._replace(directory.GENERATION_FILE, begun.pack())
            self.generation = self.generations.generation
            self._clean()
            if acks is Acks.APPLIED:
                self._went_back(back_to)
                return None
            earlier, synced = self._found.earlier, self._found.base
            if promoted or acks >= Acks.DURABLE or self._found.void:
                earlier, synced = [], row
                self._sync_journal()
            writer = JournalWriter(
                *(self.disk, self.folder, self.run, self.generation, row + 1, acks),
                *(self._salt, post, self.segments, self._shard or (0, 1)),
                synced=synced,
                earlier=earlier,
            )
            self._went_back(back_to)
            return writer
        except OSError as error:
            raise UsageError(f"{self._flag} {self.folder}: {error.strerror}") from None

    def _went_back(self, back_to: int | None) -> None:
        """Write that the next start goes on, if this one was to go back to a row."""
        if back_to is not None:
            self._replace(directory.GENERATION_FILE, self.generations.pack())

    def _new_secret(self) -> bytes:
        """Return what the servers of a new run are to share."""
        return b"".join(self._salt().to_bytes(4, "little") for _ in range(directory.SECRET // 4))

    def begin_again(self, first: int, acks: Acks, post: Callable[[Event], object]) -> JournalWriter:
        """Return a journal that begins with a row, behind a snapshot that is not written yet.

        It is none before `SegmentFiles.reveal`.

        Raises
        ------
        OSError
            When there is no room.
        """
        self.segments.hide()
        return JournalWriter(
            *(self.disk, self.folder, self.run, self.generation, first, acks),
            *(self._salt, post, self.segments, self.place),
            synced=first - 1,
        )

    def _clean(self) -> None:
        """Remove what was found to be of no use."""
        for row in self._found.useless:
            path = self.folder / directory.snapshot_name(row)
            self.disk.remove(path)
            _log.warning("%s, which is of no use, is removed", path)
        for first in reversed(self._found.void):  # the last one first: what is left has no gap
            self.disk.remove(self.folder / directory.journal_name(first))

    @property
    def claims(self) -> Generations:
        """Compares the generations of which peers know with those of the run."""
        return Generations(self.run, self.generations)

    def share_secret(self, secret: bytes) -> None:
        """Have the secret of the run's lead when the first generation begins; empty: draw one."""
        self.generations = replace(self.generations, secret=secret)

    def note_back_to(self, row: int) -> None:
        """Write that the next start goes back to a row; of a follower, of its lead's journal.

        Raises
        ------
        OSError
            When the disk refuses.
        """
        found = replace(self.generations, back_to=row)
        self._replace(directory.GENERATION_FILE, found.pack())
        self.generations = found

    def note_led_by(self, generation: int) -> None:
        """Write which generation of the lead has led this follower last.

        Raises
        ------
        OSError
            When the disk refuses.
        """
        found = replace(self.generations, led_by=generation)
        self._replace(directory.GENERATION_FILE, found.pack())
        self.generations = found

    def note_place(self, place: TakenPlace) -> None:
        """Write that the standby of a follower has its place; of that standby, that it is its own.

        Raises
        ------
        OSError
            When the disk refuses.
        """
        found = self.generations.with_place(place)
        self._replace(directory.GENERATION_FILE, found.pack())
        self.generations = found

    def note_successor(self, generation: int, primary: str) -> None:
        """Write that another server has the run: a start on this folder is refused from here on.

        Raises
        ------
        OSError
            When the disk refuses.
        """
        found = replace(self.generations, superseded_by=(generation, primary))
        self._replace(directory.GENERATION_FILE, found.pack())
        self.generations = found

    def check_not_superseded(self) -> None:
        """Check that no other server is known to have the run.

        Raises
        ------
        Superseded
            When one has it; the text says what can be done.
        """
        if self.generations.superseded_by is None:
            return
        generation, primary = self.generations.superseded_by
        raise Superseded(
            f"{self.folder} is of a server that was superseded by {primary or 'another one'} of its"
            f" run (generation {generation_text(generation)}): start it with --standby"
            f" {primary or 'and the URL of that'}; if that one is lost for good, `aiops promote`"
            " then makes this one the server again, without what that one has acknowledged",
            generation=generation,
            primary=primary,
        )

    def adopt(self, generations: GenerationFile) -> None:
        """Have the generations of the primary whose rows are kept here.

        A successor stays noted until the primary is that one, or a later one.
        """
        known = self.generations.superseded_by
        if known is not None and generations.generation < known[0]:
            generations = replace(generations, superseded_by=known)
        self._replace(directory.GENERATION_FILE, generations.pack())
        self.generations, self.generation = generations, generations.generation

    def follow(self, row: int, post: Callable[[Event], object]) -> JournalWriter:
        """Return a journal for the rows of a primary behind ``row``.

        All rows are synced, those too that were read from here.

        Raises
        ------
        OSError
            When the folder cannot be written.
        """
        self._clean()
        self._sync_journal()
        return JournalWriter(
            *(self.disk, self.folder, self.run, self.generation, row + 1, Acks.DURABLE),
            *(self._salt, post, self.segments, self.place),
            synced=row,
        )

    def followed(self, row: int) -> None:
        """Note that all rows are synced, up to the last of a journal that `follow` has returned.

        What the last recovery has found was cleaned and synced before it, and some may be gone.
        """
        self._found = FoundFiles(row)

    def clear(self) -> None:
        """Remove all rows and snapshots, the newest first: what is left is a state at any time."""
        listing = StateListing(self.disk.names(self.folder))
        for first in reversed(listing.segments):
            self.disk.remove(self.folder / directory.journal_name(first))
        for row in listing.snapshots:
            self.disk.remove(self.folder / directory.snapshot_name(row))
        self.segments.remove_spares()  # their heads may have later rows than those that follow
        self.disk.sync_names(self.folder)

    def set_aside(self) -> Path:
        """Move all segments to a folder beside this one, and return it: they lead to no state.

        Raises
        ------
        UsageError
            When the disk refuses.
        """
        try:
            for number in itertools.count(1):
                aside = self.folder.with_name(f"{self.folder.name}.aside-{number}")
                self.disk.make_folder(aside)
                if not self.disk.names(aside):
                    break
            for first in reversed(StateListing(self.disk.names(self.folder)).segments):
                name = directory.journal_name(first)
                self.disk.rename(self.folder / name, aside / name)
            self.disk.sync_names(self.folder)
        except OSError as error:
            raise UsageError(f"--state {self.folder}: {error.strerror}") from None
        return aside

    def _sync_journal(self) -> None:
        """Sync the rows that were read: a killed server leaves them to the system."""
        for first, _last in self._found.earlier:
            file = self.disk.open(self.folder / directory.journal_name(first))
            try:
                file.sync()
            finally:
                file.close()
        self.disk.sync_names(self.folder)

    def close(self) -> None:
        """Unlock the directory."""
        self._lock.release()

    def _read(self, name: str) -> memoryview:
        file = self.disk.open(self.folder / name)
        try:
            data = memoryview(bytearray(file.size()))
            return data[: file.read(data, 0)]
        finally:
            file.close()

    def _replace(self, name: str, data: bytes) -> None:
        """Replace a small file: at any moment it is the old one or the new one."""
        part = self.folder / f"{name}{directory.PART}"
        self.disk.remove(part)
        file = self.disk.create(part)
        try:
            file.write([data], 0)
            file.sync()
        finally:
            file.close()
        self.disk.rename(part, self.folder / name)


def _named(shard: int, shards: int) -> str:
    return "a whole model" if shards == 1 else f"shard {shard} of {shards}"


def _versions(engine: Engine) -> list[int]:
    """Return the versions of the model and of its tables; without a model none is of use."""
    if engine.training is None:
        return []
    return [engine.version, *(table.version for table in engine.tables)]


class Clock:
    """A server's time.

    A machine's clock begins again when it boots, but deadlines and rates are kept as times of
    events, which must not go backwards. So the time of a start is never before that of the last.

    Parameters
    ----------
    now
        The system's time since it was booted, in seconds.
    """

    def __init__(self, now: Callable[[], float]) -> None:
        self._now, self._ahead = now, 0.0

    def __call__(self) -> float:
        """Return the time, in seconds."""
        return self._now() + self._ahead

    def go_on(self, time: float) -> None:
        """Be at this time at least; the clock never goes back."""
        self._ahead = max(self._ahead, time - self._now())
