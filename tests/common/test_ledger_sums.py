"""The sums of a ledger: what was saved, and each tensor's bytes."""

from __future__ import annotations

import numpy as np

from aiops.bandwidth.byte_accounting import Ledger
from aiops.common import ledger_sums
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
    assert ledger_sums.saved(report) == 3000 + 8000 + 28_000
    lines = {line.name: line for line in ledger_sums.by_tensor(report)}
    assert lines["t0"] == ("t0", 1000, 4000, 3000 + 4000)
    assert lines["t1"] == ("t1", 4000, 4000, 4000)
    assert lines["t13"] == ("t13", 0, 0, 4000)
    assert sum(line.saved for line in lines.values()) == ledger_sums.saved(report)


def test_nothing_was_saved_yet() -> None:
    assert ledger_sums.saved(Ledger(Layout.of({"w": np.zeros(1)})).report()) == 0
