"""Runs as if they had been made."""

from __future__ import annotations

from typing import Any

import pytest

from aiops.bandwidth.byte_accounting import Ledger
from aiops.lab.experiments.bandwidth.case import BandwidthCase
from aiops.lab.experiments.bandwidth.results import Row, row_of
from aiops.lab.experiments.bandwidth.run import BandwidthOutcome, BandwidthSample
from aiops.lab.experiments.bandwidth.worker import BandwidthReport
from aiops.model.layout import Layout
from aiops.model.parts import Part
from aiops.wire.messages import Ack, Push

SMALL = BandwidthCase(dataset="digits", hidden=8, batch_size=8, gradients=60, workers=2, samples=2)


def made(case: BandwidthCase, nbytes: int, error: float) -> Row:
    """Return the row of a run that pushed and fetched ``nbytes``, with such an error."""
    ledger = Ledger(Layout([("w", "float32", (100,)), ("b", "float32", (10,))]))
    parts = (Part(0, 440, "raw", 440, 0),)
    ledger.asked(Push(1, 1, True, 0, parts))
    ledger.answered(Ack(1, 1, 1, True, 0, 0.0, None, b"", parts))
    ledger.traffic.bytes_in = ledger.traffic.bytes_out = nbytes
    report: dict[str, Any] = {"ledger": ledger.report(), "mean_staleness": 0.5}
    samples = [
        BandwidthSample(
            seconds=float(look),
            gradients=30 * look,
            version=30 * look,
            pushed=nbytes * look // 2,
            fetched=nbytes * look // 2,
            loss=1.0,
            error=error,
        )
        for look in range(3)
    ]
    done = [BandwidthReport(gradients=60, seconds=4.0, idle=1.0, account=ledger.brief())]
    return row_of(case, BandwidthOutcome(2.0, samples, report, done))


@pytest.fixture
def rows() -> list[Row]:
    """Three runs, of which the second is worse than the third in everything."""
    cases = (
        SMALL,
        BandwidthCase(gate="periodic:k_push=2"),
        BandwidthCase(gate="periodic:k_push=4"),
    )
    figures = ((10_000, 0.05), (5000, 0.2), (4000, 0.1))
    return [made(case, *figure) for case, figure in zip(cases, figures, strict=True)]
