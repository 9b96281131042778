"""The benchmark of PyTorch's steps: every way to take them, on real servers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from aiops.errors import UsageError
from benchmarks import torch_steps
from benchmarks.torch_steps import Options
from tests.rows import each_row

torch = pytest.importorskip("torch")


def test_a_tiny_run_makes_a_whole_report(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file, tiny = tmp_path / "out.json", ["--width", "8", "--blocks", "1", "--batch", "2"]
    short = ["--steps", "1", "--rounds", "2", "--device", "cpu"]
    torch_steps.main([*tiny, *short, f"--json={file}"])
    printed = capsys.readouterr().out
    for word in ("AdamW alone", "schedule-free, server on the host", "asgd, server on the host"):
        assert word in printed
    found = json.loads(file.read_text())
    assert len(found["cells"]) == 3
    for cell in found["cells"]:
        assert len(cell["rounds"]) == 2
        assert all(each["ms"] > 0 for each in cell["rounds"])
    assert found["cells"][0]["x_alone"]["median"] == 1
    assert [cell.less for cell in torch_steps.cells(found)] == [True, True]
    assert torch_steps.figure(found).panels[0].ticks == [cell["cell"] for cell in found["cells"]]


@each_row("wrong", [{"device": "tpu"}, {"width": 12}, {"steps": 0}, {"blocks": 0}, {"rounds": 0}])
def test_options_that_cannot_be(wrong: dict[str, Any]) -> None:
    with pytest.raises(UsageError):
        torch_steps.run(Options(**wrong))


def test_a_gpu_that_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(UsageError, match="PyTorch sees no GPU here"):
        torch_steps.run(Options(device="cuda"))
