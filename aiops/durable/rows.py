"""Events as rows of the journal, and back."""

from __future__ import annotations

import sys
import zlib
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from aiops.common.frozen import value
from aiops.engine.engine import Engine
from aiops.engine.events import (
    Applied,
    BudgetTick,
    CopyDue,
    Event,
    Initialised,
    Joined,
    Left,
    Paused,
    Received,
    Resumed,
    SnapshotDue,
    Stopping,
    Tick,
)
from aiops.engine.receive import PushSink
from aiops.engine.steady import Recorded
from aiops.errors import DamagedState, refusal
from aiops.model.arena import aligned
from aiops.model.layout import Bytes, Ints
from aiops.model.parts import Part
from aiops.state.file_bytes import OwnMemory
from aiops.state.frames import JournalFrame
from aiops.state.plain import pack
from aiops.state.row_kinds import FIELDS, STRUCTS, RowKind, row_fields
from aiops.wire.decoding import decode
from aiops.wire.encoding import encode
from aiops.wire.messages import Describe, Hello, Log, Message, Ping, Pong, Push, Stats
from aiops.wire.sinks import Discard, Sink
from aiops.wire.template import PREFIX

LEASED = 1
"""Flag of a row: the current version had readers (`Engine.freeze`)."""

_FINAL = 2
"""Flag of a row of `Stopping`: no server goes on with the state."""

FOLLOWED = 4
"""Flag of the row of an exchange with a coded answer: the delta replica took a step."""

_PASSING = (Stats, Ping, Pong, Describe, Log)
"""Requests that change nothing: they have no rows."""


@value
class JournalRow:
    """A row that is to be written: all of a `JournalFrame` but for its number."""

    kind: int
    time: float
    flags: int
    row: bytes
    payload: Bytes | None = None


@value
class AppliedMark:
    """A row that says that the outstanding update was done, and what to compare a replay with."""

    time: float
    ticket: int
    check: int


def check_of(ticket: int, sums: Ints) -> int:
    """Return the checksum that an update's row has of its result."""
    if sys.byteorder == "big":
        sums = sums.byteswap()
    return zlib.crc32(sums.tobytes(), ticket & 0xFFFFFFFF)


def exchange_fields(
    leased: bool,
    peer: int,
    numbers: tuple[int, ...],
    coded: bool,
    ticket: int,
    sums: Ints,
    followed: Ints | None,
) -> tuple[int, tuple[int, ...]]:
    """Return the flags of a steady exchange's row, and its fields.

    ``coded``: as of `aiops.engine.steady.Recorded`. The others are as of
    `aiops.engine.steady.ExchangeRecord.exchanged`.
    """
    flags, fields = LEASED if leased else 0, (peer, *numbers, check_of(ticket, sums))
    if not coded:
        return flags, fields
    if followed is None:
        return flags, (*fields, 0)
    return flags | FOLLOWED, (*fields, check_of(ticket + 1, followed))


class RowCounter:
    """Numbers the rows of a journal.

    Attributes
    ----------
    next
        The number of the next row.
    """

    # Those that compiled code reads: `aiops.compiled`.
    __slots__ = ("__dict__", "__weakref__", "next")

    def __init__(self, first: int) -> None:
        self.next = first

    def exchange_row(
        self, time: float, flags: int, fields: tuple[int, ...], gradient: Recorded
    ) -> JournalRow:
        """Return the row of a steady exchange, which takes the next number.

        Parameters
        ----------
        time, flags
            Of the row.
        fields
            Of its struct (`exchange_fields`).
        gradient
            Its payload, and the rest of the row.
        """
        self.next += 1
        kind = RowKind.CODED if gradient.coded else RowKind.STEADY
        row = STRUCTS[kind].pack(*fields) + gradient.parts
        return JournalRow(kind, time, flags, row, gradient.data)


def passes(event: Event) -> bool:
    """Return whether an event changes nothing, and has no row."""
    return isinstance(event, Received) and isinstance(event.message, _PASSING)


def row_of(event: Event, leased: bool) -> JournalRow:
    """Return an event's row.

    Parameters
    ----------
    event
        It is about to be handled; a payload is a view of its sink's buffer.
    leased
        As `Engine.freeze` returned it.
    """
    kind, fields, payload = _fields(event)
    flags = LEASED * leased
    if isinstance(event, Stopping) and not event.kept:
        flags |= _FINAL
    return JournalRow(kind, event.time, flags, pack(fields), payload)


def _fields(event: Event) -> tuple[RowKind, list[Any], Bytes | None]:
    match event:
        case Received():
            payload = None
            if isinstance(event.sink, PushSink) and event.sink.fault is None:
                payload = event.sink.buffer
            fields = [event.peer, encode(event.message), *fault_of(event.sink)]
            return RowKind.RECEIVED, fields, payload
        case Applied():
            return RowKind.APPLIED, [event.ticket, check_of(event.ticket, event.sums)], None
        case Joined():
            hello = event.hello
            if isinstance(hello, Hello):  # with it a reader of the row could end servers
                hello = replace(hello, generation_proof=b"")
            return RowKind.JOINED, [event.peer, encode(hello)], None
        case Left():
            return RowKind.LEFT, [event.peer, None], None
        case Tick():
            return RowKind.TICK, [], None
        case BudgetTick():
            counts = [event.nbytes, event.second, event.peak, event.backlog, event.busy]
            return RowKind.PACED, [*counts, event.limited], None
        case Initialised():
            return RowKind.INITIALISED, [event.rows, event.tables], event.data
        case Resumed():
            return RowKind.RESUMED, [event.generation], None
        case SnapshotDue():
            return RowKind.SNAPSHOT, [event.number], None
        case Stopping():
            return RowKind.STOPPING, [], None
        case Paused():
            return RowKind.PAUSED, [event.why], None
        case CopyDue():
            return RowKind.COPY, [], None
        case _:
            raise TypeError(f"no row has this event: {event!r:.200}")


def fault_of(sink: Sink | None) -> tuple[list[Any] | None, bool]:
    """Return a sink's fault (code, text, details), and whether it had taken payloads."""
    fault = getattr(sink, "fault", None)
    if fault is None:
        return None, isinstance(sink, PushSink)
    return [fault.code, str(fault), dict(fault.details)], isinstance(sink, PushSink)


def events_of(
    engine: Engine, frame: JournalFrame, room: OwnMemory | None = None
) -> list[Event | AppliedMark]:
    """Return the events that a row records; none for a mark of the journal's own.

    Parameters
    ----------
    engine
        The engine that is to handle them: its sinks take the payload.
    frame
        The row.
    room
        Where its payload was read: a sink may take that memory for its own. None: it is copied.

    Raises
    ------
    DamagedState
        When the row is not what this release writes.
    """
    name = f"row {frame.number:,}"
    try:
        return _events(engine, frame, name, room)
    except (ValueError, TypeError, AttributeError, LookupError, AssertionError) as error:
        what = f"{type(error).__name__}: {error}"
        raise DamagedState(f"{name} is damaged ({what:.300})", row=frame.number) from error


def _events(
    engine: Engine, frame: JournalFrame, name: str, room: OwnMemory | None
) -> list[Event | AppliedMark]:
    time, found = frame.time, row_fields(frame.kind, frame.row, name)
    match frame.kind:
        case RowKind.RECEIVED:
            message = decode(found["message"])
            fault = found["fault"]
            sink = _sink(engine, message, fault, found["faulted_sink"], frame.payload, room)
            return [Received(time, found["peer"], message, sink, frame.number)]
        case RowKind.STEADY | RowKind.CODED:
            coded = frame.kind == RowKind.CODED
            peer, id, seq, have, base = (found[name] for name in FIELDS[RowKind.STEADY][:5])
            parts: list[Any] = list(found["parts"])
            payload = frame.payload
            if parts:
                payload, room = _joined(payload, [part[3] for part in parts]), None
            parts = parts or [(0, len(payload), "raw", len(payload))]
            placed = tuple(Part._make((*part, base)) for part in parts)
            push = Push(id, seq, True, have, placed, coded=coded)
            sink = _sink(engine, push, None, True, payload, room)
            marks = [AppliedMark(time, -1, found["check"])]
            if frame.flags & FOLLOWED:
                marks.append(AppliedMark(time, -1, found["followed"]))
            return [Received(time, peer, push, sink), *marks]
        case RowKind.APPLIED:
            return [AppliedMark(time, found["ticket"], found["check"])]
        case RowKind.JOINED:
            hello = decode(found["hello"])
            assert isinstance(hello, Hello)
            return [Joined(time, found["peer"], hello)]
        case RowKind.LEFT:
            return [Left(time, found["peer"])]
        case RowKind.TICK:
            return [Tick(time)]
        case RowKind.PACED:
            return [BudgetTick(time, **found)]
        case RowKind.INITIALISED:
            data = aligned(len(frame.payload))
            data[:] = np.frombuffer(frame.payload, np.uint8)
            return [Initialised(time, _nested(found["tensors"]), data, _nested(found["tables"]))]
        case RowKind.RESUMED:
            return [Resumed(time, found["generation"])]
        case RowKind.SNAPSHOT:
            return [SnapshotDue(time, found["number"])]
        case RowKind.PAUSED:
            return [Paused(time, str(found["why"]))]
        case RowKind.COPY:
            return [CopyDue(time)]
        case RowKind.STOPPING:
            return [Stopping(time, kept=not frame.flags & _FINAL)]
    return []


def _joined(region: memoryview, lengths: Sequence[int]) -> memoryview:
    """Return the payloads of a coded gradient without the prefixes between them."""
    found, at = list[memoryview](), 0
    for length in lengths:
        found.append(region[at : at + length])
        at += length + PREFIX
    if at - PREFIX != len(region):
        raise ValueError("its payload has another length than its parts")
    return memoryview(b"".join(found))


def _nested(found: Any) -> Any:
    """Return lists as tuples, at every depth."""
    return tuple(map(_nested, found)) if isinstance(found, list | tuple) else found


def _sink(
    engine: Engine,
    message: Message,
    fault: Any,
    taken: bool,
    payload: memoryview,
    room: OwnMemory | None,
) -> Sink | None:
    """Return the sink of a recorded payload, filled and surveyed as on the server."""
    if fault is not None:
        error = refusal(*fault)
        if not taken:
            return Discard(error)
        faulty = _room(engine, message)
        faulty.fault = error
        return faulty
    if not getattr(message, "parts", ()):
        return None
    if not taken:
        return Discard()
    sink = _room(engine, message)
    if room is None or not sink.fill_with(partial(room.exchange, payload)):
        sink.view(0, 0)[:] = payload
        sink.filled(0, 0, len(payload))
        if room is not None:
            room.free(payload)
    return sink


def _room(engine: Engine, message: Message) -> PushSink:
    """Return the sink in which the server took a message's payloads."""
    sink = engine.admission.sink_for(message)
    assert isinstance(sink, PushSink), "the record holds a payload that the replay would not take"
    return sink
