"""A ledger as people read it."""

from __future__ import annotations

import io

import numpy as np
from rich.console import Console

from aiops.bandwidth.byte_accounting import Ledger
from aiops.common import ledger_tables
from aiops.model.layout import Layout
from aiops.model.parts import Part
from aiops.wire.messages import Ack, Push

LAYOUT = Layout([(f"t{index}", "float32", (1000,)) for index in range(14)])


def account() -> Ledger:
    """A worker that pushed one tensor in a codec and one raw, and was sent half of the model."""
    ledger = Ledger(LAYOUT, own=True)
    parts = (Part(0, 4000, "int8", 1000, 0), Part(4000, 8000, "raw", 4000, 0))
    half = (Part(0, 28_000, "raw", 28_000, 1),)
    ledger.asked(Push(1, 1, True, 0, parts))
    ledger.skipped_push(np.array([0, 1]))
    ledger.answered(Ack(1, 1, 1, True, 0, 0.0, None, b"", half))
    ledger.traffic.bytes_out, ledger.traffic.bytes_in = 5100, 28_100
    return ledger


def test_what_did_not_have_to_cross() -> None:
    report = account().report()
    assert ledger_tables.saved(report) == 3000 + 8000 + 28_000
    lines = {line.name: line for line in ledger_tables.by_tensor(report)}
    assert lines["t0"] == ("t0", 1000, 4000, 3000 + 4000)
    assert lines["t1"] == ("t1", 4000, 4000, 4000)
    assert lines["t13"] == ("t13", 0, 0, 4000)
    assert sum(line.saved for line in lines.values()) == ledger_tables.saved(report)


def test_the_tables() -> None:
    console = Console(file=io.StringIO(), width=100)
    for part in ledger_tables.tables(account().report()):
        console.print(part)
    assert isinstance(console.file, io.StringIO)
    lines = [" ".join(line.split()) for line in console.file.getvalue().splitlines()]
    assert "pushed 5.1 kB 5.0 kB 8.0 kB 0 B 8.0 kB skipped" in lines
    assert "fetched 28.1 kB 28.0 kB 28.0 kB 0 B 28.0 kB unchanged" in lines
    assert "t0 1.0 kB 4.0 kB 7.0 kB" in lines
    assert "... and 2 more" in lines


def test_nothing_has_crossed_yet() -> None:
    assert list(ledger_tables.tables(Ledger().report())) == []
    assert ledger_tables.saved(Ledger(Layout.of({"w": np.zeros(1)})).report()) == 0
