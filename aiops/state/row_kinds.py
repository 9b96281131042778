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
}
"""The items of each kind's list, in order; of `STEADY` the fields of its struct, and its parts."""

STEADY_ROW = Struct("<IQQqQI")
"""The row of a steady exchange, a struct: peer, id, seq, have, base, check.

If the gradient is coded the list of its parts follows, in MessagePack: start, stop, codec and bytes
of each payload. The row's payload has them as they travelled, each but the first behind its prefix
of 5 bytes.
"""


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
    if known is RowKind.STEADY:
        values = _steady_fields(row, name) if len(row) >= STEADY_ROW.size else None
    else:
        values = unpack(row, name)
    names = FIELDS[known]
    if type(values) not in (list, tuple) or len(values) != len(names):
        raise DamagedState(f"{name} is damaged: it is no row of kind {known.name.lower()!r}")
    return dict(zip(names, values, strict=True))


def _steady_fields(row: bytes, name: str) -> tuple[Any, ...]:
    rest = row[STEADY_ROW.size :]
    return *STEADY_ROW.unpack_from(row), unpack(rest, name) if rest else []
