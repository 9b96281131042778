"""Rows of steady exchanges whose gradients are coded, and such rows that are damaged."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from aiops.algorithms.asgd import ASGD
from aiops.durable.rows import events_of
from aiops.engine.engine import Engine
from aiops.engine.events import Options
from aiops.errors import DamagedState
from aiops.state.frames import JournalFrame
from aiops.state.plain import pack
from aiops.state.row_kinds import STEADY_ROW, RowKind
from tests.rows import each_row


def frame(parts: Any, payload: bytes) -> JournalFrame:
    row = STEADY_ROW.pack(1, 2, 2, 0, 0, 7) + pack(parts)
    return JournalFrame(5, int(RowKind.STEADY), 1.0, 0, row, memoryview(payload), 0, 0, 0)


@each_row(
    ("parts", "nbytes"),
    [
        ([[0, 4]], 4),
        ([[]], 4),
        ([7], 4),
        (["abc"], 4),
        ([[0, 4, "int8", "4"]], 4),
        ([[0, 4, "int8", 9]], 4),
        ([[0, 4, "int8", 3], [4, 8, "raw", 4]], 11),
        ({"a": 1}, 4),
    ],
)
def test_parts_that_are_none(parts: Any, nbytes: int) -> None:
    engine = Engine(ASGD(lr=0.5), Options())
    with pytest.raises(DamagedState, match="row 5 is damaged"):
        events_of(engine, frame(parts, bytes(nbytes)))


def test_a_row_that_is_cut_in_its_parts() -> None:
    engine = Engine(ASGD(lr=0.5), Options())
    whole = frame([[0, 4, "raw", 4]], np.ones(1, np.float32).tobytes())
    with pytest.raises(DamagedState):
        events_of(engine, replace(whole, row=whole.row[:-1]))
