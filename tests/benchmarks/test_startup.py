"""The startup benchmark: servers started with a cache and without, their first answers checked."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from aiops.errors import UsageError
from benchmarks import startup
from benchmarks.startup import STEPS, Options
from tests.rows import each_row


@pytest.mark.slow
def test_a_tiny_run_makes_a_whole_report(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("matplotlib")
    monkeypatch.setenv("AIOPS_KERNELS", "auto")  # when they are compiled is what it measures
    file, plot = tmp_path / "out.json", tmp_path / "out.png"
    line = "--sizes 256B --policy asgd --rounds 1"
    startup.main([*line.split(), f"--json={file}", f"--plot={plot}"])
    printed = capsys.readouterr().out
    for word in ("256 B", "warm", "cold", *STEPS.values(), "within 100 ms"):
        assert word in printed
    found = json.loads(file.read_text())
    assert [cell["cell"] for cell in found["cells"]] == ["256 B, warm", "256 B, cold"]
    for cell in found["cells"]:
        (one,) = cell["rounds"]
        assert 0 < one["welcome"] < one["push"]
        assert one["push"] <= one["numba"]
        assert one["url"] > 0
    assert len(list(startup.cells(found))) == 2 * len(STEPS)
    assert plot.read_bytes().startswith(b"\x89PNG")
    assert [path.name for path in tmp_path.iterdir() if path not in (file, plot)] == []


@each_row(
    ("wrong", "said"),
    [
        ({"caches": ("lukewarm",)}, "no cache is 'lukewarm'"),
        ({"rounds": 0}, "positive"),
        ({"policy": "dcasgd"}, "dcasgd cannot be checked here"),
        ({"policy": "fasg"}, "did you mean 'fasgd'"),
    ],
)
def test_options_that_cannot_be(wrong: dict[str, object], said: str) -> None:
    with pytest.raises(UsageError, match=said):
        Options(**wrong).check()  # type: ignore[arg-type]
