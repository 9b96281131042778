"""The rows of a sharded model: of its lead's engine, and of a follower.

A lead's rows are those of any engine (`aiops.durable.rows`), with three differences. The payload of
a push is the lead's portion, and the row has the number by which followers know theirs. The row of
an update has all sums, since most were computed by followers. The norm of a gradient that is
clipped has a row of its own, as the factor follows from what all shards have measured.

A follower's rows are the lead's orders that change something, and the portions that came.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from aiops.durable.rows import (
    LEASED,
    AppliedMark,
    JournalRow,
    check_of,
    events_of,
    fault_of,
    row_of,
)
from aiops.engine.events import Applied, Event, Received
from aiops.engine.receive import PushSink
from aiops.errors import refusal
from aiops.model.layout import Bytes, Ints
from aiops.shards.follower import REPLAYED
from aiops.shards.gathering import SpreadPush
from aiops.shards.lead import Lead
from aiops.shards.shard import LoadSink
from aiops.state.frames import JournalFrame
from aiops.state.plain import pack
from aiops.state.row_kinds import RowKind, row_fields
from aiops.wire.decoding import decode
from aiops.wire.encoding import encode
from aiops.wire.messages import Message, Push
from aiops.wire.server_messages import (
    FinishPush,
    HoldVersion,
    LoadShard,
    NoteHistory,
    RunUpdate,
    ShardParts,
)

DATED_ORDERS = (LoadShard, RunUpdate, HoldVersion, FinishPush)
"""The orders that have the lead's newest row."""

KEPT_ORDERS = (*DATED_ORDERS, NoteHistory)
"""The orders that a follower journals. The others are about connections, which a restart ends."""


# ---------------------------------------------------------------- of a lead


def lead_row(event: Event, leased: bool) -> JournalRow:
    """Return the row of an event that a lead's engine is about to handle."""
    flags = LEASED * leased
    if isinstance(event, Applied):
        done = [event.ticket, check_of(event.ticket, event.sums)]
        return JournalRow(RowKind.APPLIED, event.time, flags, pack(done), _bytes(event.sums))
    if isinstance(event, Received) and isinstance(event.sink, SpreadPush):
        sink = event.sink
        payload = sink.buffer if sink.fault is None else None
        fields = [event.peer, encode(sink.header), *fault_of(sink), sink.number]
        return JournalRow(RowKind.SPREAD, event.time, flags, pack(fields), payload)
    return row_of(event, leased)


def measured_row(time: float, ticket: int, squares: Sequence[float]) -> JournalRow:
    """Return the row of norms, before the step that is clipped to them is ordered."""
    return JournalRow(RowKind.MEASURED, time, 0, pack([ticket, list(squares)]))


def lead_events(lead: Lead, frame: JournalFrame) -> list[Event | AppliedMark]:
    """Return the events of a row, as `aiops.durable.rows.events_of`."""
    if frame.kind != RowKind.SPREAD:
        return events_of(lead.engine, frame)
    found = row_fields(frame.kind, frame.row, f"row {frame.number:,}")
    header = decode(found["message"])
    assert isinstance(header, Push), "only pushes have portions"
    assert lead.model is not None, "a model comes before its pushes"
    sink = lead.model.gathering.again(found["number"], found["peer"], header, frame.time)
    if found["fault"] is not None:
        sink.fault = refusal(*found["fault"])
    else:
        fill(sink, frame.payload)
    message = sink.message
    return [Received(frame.time, found["peer"], message, sink, frame.number)]


def sums_of(frame: JournalFrame) -> Ints:
    """Return the sums in the row of an update."""
    return np.frombuffer(frame.payload, "<i8").astype(np.int64)


# ---------------------------------------------------------------- of a follower


def order_row(event: Received) -> JournalRow:
    """Return the row of an order."""
    payload = event.sink.data if isinstance(event.sink, LoadSink) else None
    return JournalRow(RowKind.ORDER, event.time, 0, pack([encode(event.message)]), payload)


def portion_row(time: float, number: int, message: ShardParts, sink: PushSink) -> JournalRow:
    """Return the row of a portion that is complete."""
    return JournalRow(RowKind.PORTION, time, 0, pack([number, encode(message)]), sink.buffer)


def done_row(event: Applied) -> JournalRow:
    """Return the row of an update that was done."""
    fields = [event.ticket, check_of(event.ticket, event.sums)]
    return JournalRow(RowKind.APPLIED, event.time, 0, pack(fields))


def order_of(frame: JournalFrame, fields: dict[str, Any]) -> Received:
    """Return an order that was journalled, as an event."""
    message = decode(fields["order"])
    sink = None
    if isinstance(message, LoadShard):
        sink = LoadSink([part.nbytes for part in message.parts])
        sink.data[:] = np.frombuffer(frame.payload, np.uint8)
    return Received(frame.time, REPLAYED, message, sink, frame.number)


def portion_of(fields: dict[str, Any]) -> tuple[int, Message]:
    """Return the number of a portion that was journalled, and its header."""
    return fields["number"], decode(fields["message"])


def fill(sink: PushSink, payload: memoryview) -> None:
    """Fill a sink, and survey what is in it, as on the server."""
    if len(payload):
        sink.view(0, 0)[:] = payload
        sink.filled(0, 0, len(payload))


def _bytes(sums: Ints) -> Bytes:
    return np.ascontiguousarray(sums, "<i8").view(np.uint8)
