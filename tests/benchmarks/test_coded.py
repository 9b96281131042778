"""The coded benchmark: a server with codecs beside one without, and its report."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from aiops.errors import UsageError
from benchmarks import coded
from benchmarks.coded import Options
from tests.rows import each_row


@pytest.mark.slow
def test_a_tiny_run_makes_a_whole_report(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "out.json"
    line = "--sizes 2KiB --workers 1 --codecs raw/raw,int8/raw --rounds 2 --seconds 0.001"
    coded.main([*line.split(), f"--json={file}"])
    printed = capsys.readouterr().out
    for word in ("2 KiB", "int8", "parameters", "x raw", "p99 µs"):
        assert word in printed
    (cell,) = json.loads(file.read_text())["cells"]
    raw, int8 = cell["contenders"]["raw/raw"], cell["contenders"]["int8/raw"]
    for figures in (raw, int8):
        assert figures["failed"] is None
    for one, other in zip(int8["rounds"], raw["rounds"], strict=True):
        assert one["x_raw/raw"] == one["cycles_per_second"] / other["cycles_per_second"]


def report() -> dict[str, Any]:
    """Return a report of two pairs of codecs."""

    def rounds(rate: float) -> dict[str, Any]:
        one = {"cycles_per_second": rate, "x_raw/raw": rate / 100}
        spreads = {key: dict.fromkeys(("median", "min", "max"), one[key]) for key in one}
        return {"failed": None, "rounds": [one], "p50_us": 1.0, "p99_us": 2.0, **spreads}

    contenders = {"raw/raw": rounds(100), "int8/raw": rounds(90)}
    cell = {"cell": "4 KiB, 1 worker", "size": 4096, "workers": 1, "contenders": contenders}
    options = {"codecs": [*contenders], "workers": [1], "rounds": 1}
    return {"benchmark": "coded", "options": options, "cells": [cell]}


def test_cells_are_compared_beside_raw() -> None:
    first, second = coded.cells(report())
    assert (first.beside, second.beside) == ("", "raw")


def test_the_figure_has_all_but_raw() -> None:
    (panel,) = coded.figure(report()).panels
    assert [*panel.ticks] == ["int8/raw"]
    assert coded.table(report()).row_count >= 2


@each_row(
    ("changed", "words"),
    [
        ({"sizes": ()}, "needed"),
        ({"workers": (0,)}, "positive"),
        ({"codecs": ("int8/raw",)}, "raw/raw"),
        ({"codecs": ("raw/raw", "int8")}, "PUSH/FETCH"),
        ({"codecs": ("raw/raw", "int9/raw")}, "int9"),
    ],
)
def test_options_that_make_no_sense(changed: dict[str, Any], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        replace(Options(), **changed).check()
