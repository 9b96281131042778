"""Replay the journals of a sharded model's servers, one after the other, up to a moment of it.

The moment is a row of the lead's journal, and the lead is replayed first. It tells the version that
was current then. Each follower has computed that version before the lead could publish it, so a
follower is replayed up to the update that made it, and no further: the next may be made in place.

Rows of tables that lie on a follower change without its lead. They are replayed up to the first
order of a later row of the lead's. A lead that ends has followers take no more of them before it
saves the model.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from aiops.durable.follower_recorder import FollowerReplayer
from aiops.engine.engine import Engine
from aiops.engine.restore import Captured, ReadArray
from aiops.errors import DamagedState, UsageError
from aiops.model.layout import Array, Bytes
from aiops.model.parts import LARGEST
from aiops.shards.common_moment import CommonMoment, History
from aiops.shards.follower import Follower
from aiops.state.frames import JournalFrame
from aiops.state.row_kinds import RowKind, row_fields
from aiops.store.sparse_table import SparseTable
from aiops.wire.decoding import decode
from aiops.wire.server_messages import NoteHistory


class PartReplay:
    """A fresh follower, which is brought to a version of its model.

    Parameters
    ----------
    lead
        The engine of its lead, at the moment that is wanted.
    run
        The run whose state it is.
    row
        The moment: the row of the lead's journal.
    version
        The version of the model at that moment; 0: no tensor lies here.
    """

    def __init__(self, lead: Engine, run: str, row: int, version: int) -> None:
        self._version, self._whole = version, False
        self._follower = Follower(lead.algorithm, lead.options, kept=True)
        self._replayer = FollowerReplayer(self._follower, run, back_to=row)

    @property
    def version(self) -> int:
        """The version that it is at; -1: it has no model yet."""
        shard = self._follower.shard
        return -1 if shard is None else shard.version

    @property
    def reached(self) -> int:
        """The row of the lead's journal that its last order is of."""
        return self._follower.reached

    @property
    def data(self) -> Bytes:
        """The bytes of its part at that version."""
        assert self._follower.shard is not None, "it has a version"
        return self._follower.shard.newest.arena.data

    def evaluated(self, left: Array) -> Bytes:
        """Return the bytes of its part where the model is evaluated.

        ``left``: what is left out of the offset of each tensor of the whole model.
        """
        shard = self._follower.shard
        assert shard is not None, "it has a version"
        return shard.evaluated(left).data

    @property
    def tables(self) -> Sequence[SparseTable]:
        """The tables with the rows that lie here; empty: none do."""
        rows = self._follower.rows
        return () if rows is None else rows.engine.tables

    def restore(
        self, row: int, found: Captured, read: ReadArray, queued: Mapping[int, JournalFrame]
    ) -> None:
        """Begin after a snapshot; parameters and errors as of `FollowerReplayer.restore`."""
        self._replayer.restore(row, found, read, queued)

    def go_on(self, frames: Iterable[JournalFrame], base: int = 0) -> None:
        """Replay rows after the row ``base`` up to the moment, or to the last.

        Raises
        ------
        DamagedState
            As `FollowerReplayer.feed`; when the first row is not the beginning of a state.
        """
        self._whole = self.version >= self._version
        for frame in frames:
            if self._whole and self._follower.rows is None:
                return
            if frame.number <= base:
                continue
            if frame.number == 1 and frame.kind != RowKind.BEGIN:
                raise DamagedState("its first row is not the beginning of a state", row=1)
            if frame.number == 1:
                self._replayer.begin(frame)
                continue
            if not self._replayer.goes_on_with(frame):
                return
            if self.version == self._version and frame.kind == RowKind.ORDER:  # the next one
                self._whole = True
            if self._whole and _of_tensors(frame):
                continue
            self._replayer.feed(frame)
            if self.version == self._version and frame.kind == RowKind.APPLIED:  # and is compared
                self._whole = True

    def check_history(self, history: History, name: str) -> None:
        """Check that its orders are those that its lead gave.

        Parameters
        ----------
        history
            The lead's generations.
        name
            The follower's, for errors.

        Raises
        ------
        UsageError
            When they are of rows that the lead does not have, or has others in their place.
        """
        theirs = self._follower.history
        if not theirs or not history or theirs[-1] < history[0]:  # it is not known so far back
            return
        moment = CommonMoment({1: self._follower.state()}, history)
        if moment.strange or moment.ahead(LARGEST):
            raise UsageError(
                f"{name} has orders of rows that its lead went back behind, or of another lead's:"
                " give folders that were copied at one time, or start the servers with theirs,"
                " which brings all to one moment"
            )


def _of_tensors(frame: JournalFrame) -> bool:
    """Return whether a row is about the part of the tensors that lies there."""
    if frame.kind != RowKind.ORDER:
        return frame.kind in (RowKind.PORTION, RowKind.APPLIED)
    fields = row_fields(frame.kind, frame.row, f"row {frame.number:,}")
    return not isinstance(decode(fields["order"]), NoteHistory)
