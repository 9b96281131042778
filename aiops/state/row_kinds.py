"""The kinds of a journal's rows, and the fields of each."""

from __future__ import annotations

from collections.abc import Mapping
from enum import IntEnum
from struct import Struct
from typing import Any

from aiops.errors import DamagedState
from aiops.state.plain import Plain, unpack


class RowKind(IntEnum):
    """The kind of a row: an event of the engine, or a mark of the journal's own."""

    BEGIN = 1
    RESUMED = 2
    INITIALISED = 3
    JOINED = 4
    LEFT = 5
    RECEIVED = 6
    STEADY = 7
    APPLIED = 8
    TICK = 9
    PACED = 10
    STOPPING = 11
    SNAPSHOT = 12
    END = 13
    ORDER = 14
    PORTION = 15
    SPREAD = 16
    MEASURED = 17
    PAUSED = 18
    COPY = 19
    CODED = 20


FIELDS: Mapping[RowKind, tuple[str, ...]] = {
    RowKind.BEGIN: ("policy", "settings", "options", "run", "aiops", "rule"),
    RowKind.RESUMED: ("generation",),
    RowKind.INITIALISED: ("tensors", "tables"),
    RowKind.JOINED: ("peer", "hello"),
    RowKind.LEFT: ("peer", "traffic"),
    RowKind.RECEIVED: ("peer", "message", "fault", "faulted_sink"),
    RowKind.STEADY: ("peer", "id", "seq", "have", "base", "check", "parts"),
    RowKind.APPLIED: ("ticket", "check"),
    RowKind.TICK: (),
    RowKind.PACED: ("nbytes", "second", "peak", "backlog", "busy", "limited"),
    RowKind.STOPPING: (),
    RowKind.SNAPSHOT: ("number",),
    RowKind.END: ("digest",),
    RowKind.ORDER: ("order",),
    RowKind.PORTION: ("number", "message"),
    RowKind.SPREAD: ("peer", "message", "fault", "faulted_sink", "number"),
    RowKind.MEASURED: ("ticket", "squares"),
    RowKind.PAUSED: ("why",),
    RowKind.COPY: (),
    RowKind.CODED: ("peer", "id", "seq", "have", "base", "check", "followed", "parts"),
}
"""The items of each kind's list, in order.

Of `STEADY` and `CODED` they are the fields of a struct, and the parts.
"""

STEADY_ROW = Struct("<IQQqQI")
"""The row of a steady exchange, a struct: peer, id, seq, have, base, check.

If the gradient is coded the list of its parts follows, in MessagePack: start, stop, codec and bytes
of each payload. The row's payload has them as they travelled, each but the first behind its prefix
of 5 bytes.
"""

CODED_ROW = Struct("<IQQqQII")
"""The row of a steady exchange whose answer is coded: as `STEADY_ROW`, and the check of its step.

That is 0 if the delta replica took no step.
"""

STRUCTS = {RowKind.STEADY: STEADY_ROW, RowKind.CODED: CODED_ROW}
"""Of the kinds of rows that begin with a struct."""


def row_fields(kind: int, row: bytes, name: str) -> dict[str, Plain]:
    """Return the fields of a row by name, for a reader who has no engine.

    An unknown kind has one field, ``row``: its bytes.

    Raises
    ------
    DamagedState
        When the row is not of its kind.
    """
    try:
        known = RowKind(kind)
    except ValueError:
        return {"row": row}
    values: Any
    if known in STRUCTS:
        fields = STRUCTS[known]
        values = _steady_fields(fields, row, name) if len(row) >= fields.size else None
    else:
        values = unpack(row, name)
    names = FIELDS[known]
    if type(values) not in (list, tuple) or len(values) != len(names):
        raise DamagedState(f"{name} is damaged: it is no row of kind {known.name.lower()!r}")
    return dict(zip(names, values, strict=True))


def _steady_fields(fields: Struct, row: bytes, name: str) -> tuple[Any, ...]:
    rest = row[fields.size :]
    return *fields.unpack_from(row), unpack(rest, name) if rest else []
