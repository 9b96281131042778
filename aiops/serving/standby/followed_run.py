"""The run that a standby follows: the files of its state, and the server that they bring along."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from functools import partial

from aiops.durable.follower_recorder import FollowerReplayer
from aiops.durable.recovery import Recovered, Replayer
from aiops.engine.capture import Capture
from aiops.errors import UsageError
from aiops.serving.config import Config
from aiops.serving.server import Server
from aiops.serving.state.journal_writer import JournalWriter
from aiops.serving.state.kept_state import header_of
from aiops.serving.state.snapshot_writer import SnapshotWriter
from aiops.state.frames import JournalFrame


class FollowedRun:
    """One server's run: the files of its state, and the server that they bring along.

    Parameters
    ----------
    config
        The settings of the server that the standby may become.
    saved
        Called with the number of a snapshot that is on the disk: of a sharded model, the row of the
        lead's journal that it is of.

    Attributes
    ----------
    server
        Has the engine, or the follower; it listens when the standby is promoted.
    files
        The files.
    replayer
        Brings the engine along.
    writer
        Appends the primary's rows; None: it has not been fed yet.
    synced
        The newest row that is synced.
    cuts
        The rows of the snapshots of a sharded model, by the rows of the lead's journal.

    Raises
    ------
    UsageError
        When the settings cannot work, or the folder is no state's.
    """

    def __init__(self, config: Config, saved: Callable[[int], None]) -> None:
        self.server = server = Server(config)
        if server.run_state.files is None:
            raise UsageError("a standby keeps a state: name its folder with --state")
        self.files = files = server.run_state.files
        self._loop, self._saved = asyncio.get_running_loop(), saved
        self.replayer = server.replayer()
        self.writer: JournalWriter | None = None
        self.synced = 0
        alone = not (config.sharded or config.follower)
        self._snapshots = SnapshotWriter(files.disk, files.folder, files.segments, alone=alone)
        self._follows = config.follower
        self.cuts: dict[int, int] = {}
        self.note_snapshots()
        self._waiting: tuple[Capture, int] | None = None  # a capture whose rows are not synced

    def note_snapshots(self) -> None:
        """Note which snapshots there are."""
        files = self.files
        self.cuts = files.cuts() if self._follows else {row: row for row in files.snapshots}

    def recover(self) -> Recovered | None:
        """Bring the engine, which is fresh, to the state of the folder."""
        return self._recover(self.server.replayer())

    async def recover_beside(self) -> Recovered | None:
        """Do so on another thread: it may take long, and clients and the primary wait meanwhile."""
        replayer = self.server.replayer(self._loop.call_soon_threadsafe)
        return await asyncio.to_thread(self._recover, replayer)

    def _recover(self, replayer: Replayer | FollowerReplayer) -> Recovered | None:
        found = self.server.run_state.recover(replayer)
        self.replayer, replayer.taken = replayer, self._captured
        if isinstance(replayer, FollowerReplayer):
            replayer.go_on()
        return found

    def apply(self, frame: JournalFrame) -> None:
        """Bring the engine along by a row."""
        if frame.number == 1:
            self.server.run_state.check_begin(frame)
            self.replayer.begin(frame)
        else:
            self.replayer.feed(frame)

    def note_synced(self, row: int) -> None:
        """Note that rows are synced: the snapshot that waits for them can be written."""
        self.synced = row
        if self._waiting is not None and self._waiting[1] <= row:
            waiting, self._waiting = self._waiting, None
            self._write(*waiting)

    def end_writers(self) -> str:
        """Write nothing more; return the reason for which rows are missing, if any are."""
        if self._waiting is not None:
            self._waiting[0].release()
            self._waiting = None
        self._snapshots.wait()
        writer, self.writer = self.writer, None
        if writer is None:
            return ""
        writer.end()
        return writer.why

    def discard(self) -> None:
        """Close the files, and let go of the engine."""
        self.end_writers()
        self.server.discard()

    def keep(self, cuts: Sequence[int]) -> None:
        """Begin to remove what neither these snapshots need nor later ones.

        Without one of them nothing is removed.
        """
        rows = [self.cuts[cut] for cut in cuts if cut in self.cuts]
        if not rows or len(rows) < len(cuts):
            return
        self._snapshots.keep(rows)
        gone = [cut for cut, row in self.cuts.items() if row < rows[-1] and row not in rows]
        for cut in gone:
            del self.cuts[cut]

    def _captured(self, found: Capture, row: int) -> None:
        """Have a snapshot where the primary has one, unless the disk is behind with another.

        It may be ahead of the rows that are synced, and after a loss of power it would lack those
        that its queue refers to. So it waits for them.
        """
        if self._snapshots.busy or self._waiting is not None:
            found.release()
        elif row > self.synced:
            self._waiting = found, row
        else:
            self._write(found, row)

    def _write(self, found: Capture, row: int) -> None:
        def written() -> None:
            found.release()
            if not self._snapshots.why:
                cut = found.owners.get("cut", row)
                self.cuts[cut] = row
                self._saved(cut)

        header = header_of(self.files, found, row)
        done = partial(self._loop.call_soon_threadsafe, written)
        self._snapshots.begin(found, header, lambda nbytes: done())
