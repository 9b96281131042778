"""The marked blocks of docs/state.md: tables and examples made from the code."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from aiops.state.blocks import IDENTITY, SNAPSHOT, read_block, reader, whole_block
from aiops.state.directory import journal_name, snapshot_name
from aiops.state.frames import FRAME, HEAD, SegmentScan
from aiops.state.row_kinds import FIELDS, STRUCTS, RowKind, row_fields
from docs._tools.state.examples import files
from docs._tools.wire.page import rewritten

MEANINGS: Mapping[RowKind, tuple[str, str]] = {
    RowKind.BEGIN: ("The first row of a run: what the engine is made of.", ""),
    RowKind.RESUMED: ("A server came back with this state; all its peers are gone.", ""),
    RowKind.INITIALISED: ("The model was defined.", "the parameters"),
    RowKind.JOINED: ("A client has joined. `hello`: as on the wire, without nonce and proof.", ""),
    RowKind.LEFT: (
        "A connection has ended. `traffic`: nil; a reader counts its bytes with the rows of its"
        " messages.",
        "",
    ),
    RowKind.RECEIVED: (
        "A message. `message`: its header as on the wire. `fault`: nil, or the refusal"
        " [code, text, details] that its payload gave; `faulted_sink`: whether it came from there.",
        "gradient, ids and rows, or model",
    ),
    RowKind.STEADY: (
        "A push of the whole model that was applied at once. A struct; see below.",
        "the gradient",
    ),
    RowKind.APPLIED: (
        "The update of that ticket is done. `check`: CRC-32 of its numbers; see below.",
        "at a lead: the sums of all shards, i64 each; of a push that filters look at, what all have"
        " read, as f64",
    ),
    RowKind.TICK: ("Time has passed.", ""),
    RowKind.PACED: ("A second of the bandwidth budget.", ""),
    RowKind.STOPPING: ("The server was asked to stop.", ""),
    RowKind.SNAPSHOT: (
        "A snapshot is due. It takes the place of the next update, and a ticket.",
        "",
    ),
    RowKind.END: ("The server has stopped. `digest`: SHA-256 of the parameters, or empty.", ""),
    RowKind.ORDER: (
        "At a follower: an order of the lead's, as on the wire.",
        "with the first order: the follower's part of the parameters",
    ),
    RowKind.PORTION: (
        "At a follower: the portion of a push, by its number at the lead. `message`: its header.",
        "its part of the gradient",
    ),
    RowKind.SPREAD: (
        "At a lead: a push of which followers have portions, as kind 6; `number`: at all shards.",
        "the lead's part of the gradient",
    ),
    RowKind.PAUSED: ("Pushes are paused, for this reason; empty: they are taken again.", ""),
    RowKind.COPY: ("A copy of the model is due: of one version, between two updates.", ""),
    RowKind.CODED: (
        "The same as kind 7, of a client that fetches coded parameters. `followed`: the check of"
        " the delta replica's step, if flag bit 2 says that it took one, else 0.",
        "the gradient",
    ),
    RowKind.MEASURED: (
        "At a lead: the squared norm of each group of tensors in an update's gradient, by which"
        " its step is clipped.",
        "",
    ),
}
"""Of each kind: its meaning, and its payload."""


def kinds_table() -> str:
    """Return the kinds of rows, their fields and their payloads."""
    rows = ["| kind | name | fields | meaning | payload |", "| --- | --- | --- | --- | --- |"]
    for kind in RowKind:
        names = ", ".join(f"`{name}`" for name in FIELDS[kind]) or "none"
        meaning, payload = MEANINGS[kind]
        cells = kind.value, kind.name.lower(), names, meaning, payload or "none"
        rows.append(f"| {' | '.join(map(str, cells))} |")
    return "\n".join(rows)


def steady_line() -> str:
    """Return the fields of rows that begin with a struct, with their types."""
    types, lines = {"I": "u32", "Q": "u64", "q": "i64"}, list[str]()
    for kind, struct in STRUCTS.items():
        pairs = zip(struct.format.removeprefix("<"), FIELDS[kind][:-1], strict=True)
        text = " | ".join(f"{types[code]} {name}" for code, name in pairs)
        lines.append(f"{kind}: {text}   ({struct.size} bytes) | parts")
    return "\n".join(["```text", *lines, "```"])


def shown(value: Any) -> str:
    """Return a plain value as the page writes it: JSON, with h'...' for bytes."""
    if isinstance(value, bytes):
        return f"h'{value.hex()}'"
    if isinstance(value, np.ndarray):
        return f"array({value.dtype.name}, {list(value.shape)}, h'{value.tobytes().hex()}')"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{shown(k)}: {shown(v)}" for k, v in value.items()) + "}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(shown, value)) + "]"
    return json.dumps(value, ensure_ascii=False)


def _hex(data: bytes, width: int = 48) -> Iterable[str]:
    return (data[at : at + width].hex() for at in range(0, len(data), width))


def identity_block() -> str:
    """Return the file `identity` of the example."""
    data = files()["identity"]
    value = whole_block(data, IDENTITY, "identity")
    parts = data[:8], data[8:12], data[12:16], data[16:-4], data[-4:]
    return "\n".join(["```text", shown(value), *(part.hex() for part in parts), "```"])


def segment_block() -> str:
    """Return the first segment of the example, frame by frame."""
    name = journal_name(1)
    data = files()[name]
    lines = ["```text", f"{name}: head", *_hex(data[:HEAD], 32)]
    for each in SegmentScan(data, name):
        fields = row_fields(each.kind, each.row, name)
        label = RowKind(each.kind).name.lower()
        lines.append(
            f"row {each.number}, {label}, time {each.time}, {shown(list(fields.values()))}"
        )
        lines += _hex(data[each.at : each.at + FRAME])
        padded = len(each.row) + -len(each.row) % 8
        lines += _hex(data[each.at + FRAME : each.at + FRAME + padded])
        lines += _hex(data[each.at + FRAME + padded : each.end])
    return "\n".join([*lines, "```"])


def snapshot_block() -> str:
    """Return the snapshot of the example, without most of its zeros."""
    name = snapshot_name(3)
    data = files()[name]
    value, end, _crc = read_block(reader(data), len(data), SNAPSHOT, name)
    lines = ["```text", shown(value), "0: the block"]
    parts = data[:8], data[8:12], data[12:16], data[16 : end - 4], data[end - 4 : end]
    lines += [row for part in parts for row in _hex(part)]
    for array, _dtype, _shape, offset, nbytes in value["arrays"]:
        at = 4096 + offset
        lines += [f"{at}: {array}", *_hex(data[at : at + nbytes])]
    return "\n".join([*lines, f"{len(data) - 28}: the footer", data[-28:].hex(), "```"])


BLOCKS: Mapping[str, Callable[[], str]] = {
    "identity": identity_block,
    "kinds": kinds_table,
    "steady": steady_line,
    "segment": segment_block,
    "snapshot": snapshot_block,
}
"""The marked blocks of the page, by name."""

page: Callable[[str], str] = partial(rewritten, blocks=BLOCKS)


def update(path: Path) -> None:
    """Rewrite the marked blocks of the page."""
    path.write_text(page(path.read_text(encoding="utf-8")), encoding="utf-8")
