"""A small state directory, file by file: the examples of docs/state.md, and the golden files."""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from typing import Any

import numpy as np

from aiops.state.directory import (
    GenerationFile,
    GenerationStart,
    StateIdentity,
    journal_name,
    snapshot_name,
)
from aiops.state.frames import END, SegmentHead, frame
from aiops.state.plain import pack
from aiops.state.row_kinds import STEADY_ROW, RowKind
from aiops.state.snapshot_file import SnapshotHeader, SnapshotPlan

RUN, SECRET = "8c2f", bytes(range(32))

STARTS = (GenerationStart(1, 0, ()), GenerationStart(2, 3, (0,)))

BEGIN: list[Any] = ["asgd", {"lr": 0.5}, {"max_model": 1 << 20}, RUN, "0.3.0", ""]
INITIALISED: list[Any] = [[["w", "float32", [3], 0]], []]
STEADY = (7, 21, 1, 0, 0, 0xC0FFEE)
"""Peer, id, seq, have, base, check."""

VALUES = np.array([1, 2, 3], np.float32)
GRADIENT = np.array([2, 0, -2], np.float32)

ROWS: tuple[tuple[int, RowKind, float, int, bytes, bytes], ...] = (
    (1, RowKind.BEGIN, 0.0, 0, pack(BEGIN), b""),
    (2, RowKind.INITIALISED, 0.25, 0, pack(INITIALISED), VALUES.tobytes()),
    (3, RowKind.SNAPSHOT, 0.25, 0, pack([1]), b""),
    (4, RowKind.RESUMED, 1.0, 0, pack([2]), b""),
    (5, RowKind.STEADY, 1.5, 1, STEADY_ROW.pack(*STEADY), GRADIENT.tobytes()),
    (6, RowKind.TICK, 2.5, 0, pack([]), b""),
)
"""Number, kind, time, flags, row and payload."""

HEADER = SnapshotHeader(
    row=3,
    generation=1,
    run=RUN,
    versions=[0],
    settings={"policy": "asgd", "lr": 0.5},
    wrote={"aiops": "0.3.0", "numpy": "2.0.0", "byteorder": "little"},
    owners={"model": [[["w", "float32", [3]]], []], "sums": np.array([4], np.int64)},
)

ARRAYS: Mapping[str, np.ndarray[Any, np.dtype[Any]]] = {
    "params": VALUES.view(np.uint8),
    "state/0/m": np.array([[0.5], [0.25], [0]], np.float64),
}


def segment(first: int, stop: int, generation: int, salt: int, synced: int) -> bytes:
    """Return the segment of the rows from ``first`` to before ``stop``.

    ``synced``: the newest row that was known to be on the disk when it was written.
    """
    out = SegmentHead(first, generation, RUN, salt).pack()
    for number, kind, time, flags, row, payload in ROWS[first - 1 : stop - 1]:
        settings = {"salt": salt, "unsynced": number - synced}
        crc = zlib.crc32(payload)
        before, after = frame(number, kind, time, flags, row, len(payload), crc, **settings)
        out += before + payload + after
    return out


def files() -> dict[str, bytes]:
    """Return the files of the directory by name.

    The last segment was recycled: frames of an older one, and zeros, lie behind its last row.
    """
    last = segment(4, 7, 2, 0x2B2B2B2B, synced=3) + END
    older = segment(1, 7, 1, 0x3C3C3C3C, synced=0)
    plan = SnapshotPlan(HEADER, ARRAYS)
    return {
        "identity": StateIdentity(RUN, 0, 1, 1.7e9).pack(),
        "generation": GenerationFile(2, STARTS, secret=SECRET).pack(),
        snapshot_name(3): b"".join(part for _at, buffers in plan.pieces() for part in buffers),
        journal_name(1): segment(1, 4, 1, 0x1A1A1A1A, synced=0),
        journal_name(4): last + older[len(last) :] + bytes(64),
    }
