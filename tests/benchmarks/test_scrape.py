"""The scrape benchmark: scrapes of a real server, and exchanges beside them."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from aiops.errors import UsageError
from benchmarks import scrape
from benchmarks.scrape import Options
from tests.rows import each_row

pytest.importorskip("prometheus_client")


@pytest.mark.slow
def test_a_tiny_run_makes_a_whole_report(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "out.json"
    line = "--workers 2,3 --tensors 4 --rounds 1 --seconds 0.05 --scrapes 2"
    scrape.main([*line.split(), f"--json={file}"])
    printed = capsys.readouterr().out
    for word in ("scrape ms", "of it on the loop", "beside scrapes"):
        assert word in printed
    two, three = json.loads(file.read_text())["cells"]
    assert (two["workers"], three["workers"]) == (2, 3)
    for cell in (two, three):
        times = cell["scrape_ms"]
        assert 0 < times["gathering"]["min"] < times["alone"]["max"]
        assert cell["scrapes"] > 0
        assert cell["exchange_us"]["beside"]["p50_us"] > 0
    assert three["series"] > two["series"] > 100
    assert three["bytes"] > two["bytes"]
    assert scrape.figure({"cells": [two, three]}).panels


@each_row("wrong", [{"workers": (0,)}, {"seconds": 0.0}, {"scrapes": 0}])
def test_options_that_make_no_sense(wrong: dict[str, object]) -> None:
    with pytest.raises(UsageError, match="are positive"):
        scrape.run(replace(Options(), **wrong))  # type: ignore[arg-type]
