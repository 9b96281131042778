"""The directions benchmark: every way that there is, and compared."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from aiops.errors import UsageError
from benchmarks import directions
from benchmarks.directions import Options
from tests.rows import each_row


def test_a_tiny_run_makes_a_whole_report(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("torch")
    file = tmp_path / "out.json"
    directions.main(["--sides", "8,16", "--ways", "numpy,torch", "--rounds", "2", f"--json={file}"])
    printed = capsys.readouterr().out
    for word in ("8 × 8", "16 × 16", "numpy", "torch", "medians of 2 rounds"):
        assert word in printed
    found = json.loads(file.read_text())
    assert [cell["cell"] for cell in found["cells"]] == [
        *("numpy, 8 × 8", "torch, 8 × 8", "numpy, 16 × 16", "torch, 16 × 16")
    ]
    assert len(directions.cells(found)) == 2
    for cell in found["cells"]:
        assert len(cell["rounds"]) == 2
        assert all(each["ms"] > 0 for each in cell["rounds"])
        assert cell["x_numpy"]["median"] == 1 or cell["way"] == "torch"
    assert [line.label for line in directions.figure(found).panels[0].lines] == ["numpy", "torch"]


def test_another_direction_is_no_figure() -> None:
    def turned(array: Any) -> Any:
        return np.ascontiguousarray(array.T)

    with pytest.raises(RuntimeError, match="turned has made another direction"):
        directions._rounds(4, {"numpy": lambda array: array, "turned": turned}, Options())


@each_row(
    "wrong", [{"sides": (1,)}, {"rounds": 0}, {"ways": ("numpy", "jax")}, {"ways": ("torch",)}]
)
def test_options_that_cannot_be(wrong: dict[str, Any]) -> None:
    with pytest.raises(UsageError):
        Options(**wrong).check()
