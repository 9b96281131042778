"""The sharing benchmark: every piece of work done both ways, and compared."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from aiops.errors import UsageError
from aiops.kernels import parallel as kernels_parallel
from benchmarks import sharing
from benchmarks.sharing import Options
from tests.rows import each_row


@pytest.mark.slow
def test_a_tiny_run_makes_a_whole_report(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("matplotlib")
    monkeypatch.setattr(kernels_parallel, "LARGE", 1 << 10)
    file, plot = tmp_path / "out.json", tmp_path / "out.png"
    line = "--sizes 128KiB --threads 2 --rounds 2"
    sharing.main([*line.split(), f"--json={file}", f"--plot={plot}"])
    printed = capsys.readouterr().out
    for word in (
        "shared by 2 threads",
        "128 KiB",
        "fasgd of int8",
        "onebit, with feedback",
        "copy",
    ):
        assert word in printed
    found = json.loads(file.read_text())
    assert len(found["cells"]) == len(sharing.cells(found)) == 2 + 4 + 6 * 3
    for cell in found["cells"]:
        assert len(cell["rounds"]) == 2
        for one in cell["rounds"]:
            assert one["x_alone"] == one["alone_ms"] / one["shared_ms"]
    assert plot.read_bytes().startswith(b"\x89PNG")


def test_what_differs_is_no_figure() -> None:
    made = iter(range(100))
    task = (lambda parallel_map: None, lambda: np.array([next(made)]))
    with pytest.raises(RuntimeError, match="something else behind"):
        sharing._rounds(task, Options(rounds=1))


@each_row("wrong", [{"threads": 0}, {"rounds": 0}, {"sizes": (100,)}])
def test_options_that_cannot_be(wrong: dict[str, object]) -> None:
    with pytest.raises(UsageError):
        Options(**wrong).check()  # type: ignore[arg-type]
