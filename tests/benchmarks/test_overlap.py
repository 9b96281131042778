"""The overlap benchmark: a tiny run, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from aiops.errors import UsageError
from benchmarks import overlap
from benchmarks.overlap import Options
from tests.rows import each_row


@pytest.mark.slow
def test_a_tiny_run_makes_a_whole_report(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("matplotlib")
    file, plot = tmp_path / "out.json", tmp_path / "out.png"
    line = "--overlaps 0,1 --hidden 16 --compute 0.005 --rounds 1 --seconds 0.3 --rate 2MB/s"
    overlap.main([*line.split(), f"--json={file}", f"--plot={plot}"])
    printed = capsys.readouterr().out
    for word in ("hardsync", "asgd, overlap=1", "a ring all-reduce", "test loss"):
        assert word in printed
    found = json.loads(file.read_text())
    assert list(found["cases"]) == ["hardsync", "0", "1"]
    for case in found["cases"].values():
        assert case["per_second"]["min"] > 0
        assert 0 < case["loss"]["median"] < 10
    assert found["cases"]["0"]["times_off"] == {"median": 1.0, "min": 1.0, "max": 1.0}
    assert found["computed"]["limit"] == 1 / 0.005
    assert [cell.beside for cell in overlap.cells(found)] == ["asgd", "", "asgd"]
    assert plot.read_bytes().startswith(b"\x89PNG")


@each_row("wrong", [{"workers": 0}, {"rounds": 0}, {"overlaps": (1, 2)}])
def test_wrong_options(wrong: dict[str, object]) -> None:
    with pytest.raises(UsageError, match="0 is among --overlaps"):
        overlap.run(Options(**wrong))  # type: ignore[arg-type]
