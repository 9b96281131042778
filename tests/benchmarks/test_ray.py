"""The report of the Ray benchmark; tests/ray/test_cluster.py is what has a cluster."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from aiops.errors import UsageError
from benchmarks import ray, report
from benchmarks.ray import GAPS, Options
from benchmarks.ray_loops import acknowledged
from tests.rows import each_row


def test_a_report_is_shown_and_compared() -> None:
    kills = {name: report.spread([1.0, 2.0, 4.0]) for name in GAPS}
    cell = {"cell": "4 KiB", "size": 4096, "rounds": [{"run": 110.0, "ray": 100.0}]}
    spreads = {name: report.spread([value]) for name, value in (("run", 110), ("ray", 100))}
    found = {
        "options": {"workers": 16, "nodes": 4, "rounds": 3},
        "kills": {**kills, "lost": 0.0},
        "standby": {**kills, "server_gap": report.spread([0.5]), "lost": 0.0},
        "cells": [{**cell, **spreads, "cost": report.spread([1.1])}],
    }
    rows = list(zip(*(column.cells for column in ray.table(found).columns), strict=True))
    assert (GAPS["server_gap"], "2.00 s (1.00-4.00)") in rows
    assert (f"{GAPS['server_gap']}, with a standby", "0.50 s (0.50-0.50)") in rows
    assert ("4 KiB: a step under Ray ÷ under aiops run", "1.10 (1.10-1.10)") in rows
    assert len(list(ray.cells(found))) == 2 * len(GAPS) + 1
    assert ray.figure(found).panels


def test_acknowledgements_are_read_while_one_is_being_written(tmp_path: Path) -> None:
    assert len(acknowledged(tmp_path, 0)) == 0
    (tmp_path / "acks-0").write_bytes(np.array([1.0, 2.0]).tobytes() + b"abc")
    assert acknowledged(tmp_path, 0).tolist() == [1.0, 2.0]


@each_row(
    ("wrong", "said"),
    [
        ({"parts": ("deaths",)}, "no part is 'deaths'"),
        ({"rounds": 0}, "positive"),
        ({"nodes": 1}, "at least 2 nodes"),
    ],
)
def test_options_that_cannot_be(wrong: dict[str, object], said: str) -> None:
    with pytest.raises(UsageError, match=said):
        Options(**wrong).check()  # type: ignore[arg-type]
