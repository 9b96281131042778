"""The headers of messages about rows, as `aiops.wire.encoding` writes them: read by one comparison.

Two such messages with the same number of payloads differ in integers alone, which are written in
their longest form. So their headers have one length and one `Template` each, known beforehand, and
both sides need neither decode nor encode them (`aiops.engine.steady_rows`,
`aiops.client.steady_rows`). A header in another form, as other programs may write it, matches none
and is decoded.
"""

from __future__ import annotations

from collections.abc import Sequence
from struct import Struct
from typing import Final, NamedTuple

from aiops.model.parts import Part
from aiops.model.placement import RAW
from aiops.wire.encoding import encode
from aiops.wire.messages import FetchRows, Message, PushRows, TableRows
from aiops.wire.template import Path, Template, framed, slots

PAYLOAD: Final = Struct(">BI")
"""The prefix of a payload, and of a header: `BYTES` or `MAP`, and the number of bytes."""

BYTES: Final = 0xC6
MAP: Final = 0xCE


class RowHeader(NamedTuple):
    """The form of one kind of header, with its prefix.

    ``parts``: the number of payloads. The template's values are, of a fetch, id and table; of a
    push, id, seq, table and version; of an answer, id, version and staleness; and then of each
    part its rows and bytes, and, of an answer's, its version.
    """

    kind: str
    parts: int
    template: Template

    @property
    def prefix(self) -> bytes:
        """The prefix of such a header."""
        return PAYLOAD.pack(MAP, self.template.size - PAYLOAD.size)


def _header(message: Message, names: Sequence[str], fields: Sequence[int]) -> RowHeader:
    """Return the form of headers like a message's; ``fields``: those of a part that vary."""
    parts: Sequence[Part] = message.parts  # type: ignore[attr-defined]
    header = encode(message)
    paths: list[Path] = [(name,) for name in names]
    paths += [("parts", number, field) for number in range(len(parts)) for field in fields]
    found = slots(header)
    data = framed(header, 0)[: -PAYLOAD.size]
    return RowHeader(message.kind, len(parts), Template(data, [found[path] for path in paths]))


_PART = Part(0, 1, RAW, 1, 0)

FETCHES: Final = [
    _header(FetchRows(0, 0, (_PART,) * count), ("id", "table"), (1, 3)) for count in range(2)
]
"""Headers of `FetchRows`, by the number of payloads."""

PUSHES: Final = [
    _header(PushRows(0, 0, 0, 0, (_PART,) * count), ("id", "seq", "table", "version"), (1, 3))
    for count in range(4)
]
"""Headers of `PushRows`, by the number of payloads."""

ANSWERS: Final = [
    _header(TableRows(0, 0, 0, (_PART,) * count), ("id", "version", "staleness"), (1, 3, 4))
    for count in range(2)
]
"""Headers of `TableRows`, by the number of payloads."""

REQUESTS: Final = {header.template.size: header for header in (*FETCHES, *PUSHES)}
"""All headers of requests, by their length with the prefix."""


def packed(header: RowHeader, values: Sequence[int]) -> bytes:
    """Return a header with these values, in the order in which they lie in it.

    They are those of `RowHeader`, in the order of the message's fields on the wire.
    """
    return header.template.filled(values)
