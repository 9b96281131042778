"""The DDP benchmark: a tiny run, and what is refused."""

from __future__ import annotations

import doctest
import json
from pathlib import Path
from typing import Any

import pytest

from aiops.errors import UsageError
from benchmarks import ddp
from benchmarks.ddp import Options
from tests.rows import each_row
from tests.zygote import IMPORTED, ForkingModule


@pytest.mark.slow
def test_a_tiny_run_makes_a_whole_report(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("torch")
    # Six processes import PyTorch, so they are forked from one that has.
    monkeypatch.setattr(ddp, "subprocess", ForkingModule())
    monkeypatch.setenv(IMPORTED, "torch,torch._dynamo,torch.distributed.run")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")  # as the benchmark says it to what it starts
    file = tmp_path / "out.json"
    words = "--workers=1 --steps=2 --rates=0.003 --schedules=cosine"
    ddp.main([*words.split(), f"--json={file}"])
    printed = capsys.readouterr().out
    found = json.loads(file.read_text())
    names = [cell["cell"] for cell in found["cells"]]
    assert names == ["aiops, nothing set", "DDP, AdamW 0.003, cosine"]
    for cell in found["cells"]:
        assert cell["cell"] in printed
        assert 4 < cell["cost"]["median"] < 7
    assert [cell.less for cell in ddp.cells(found)] == [True] * 2


def test_what_failed_is_shown() -> None:
    with pytest.raises(RuntimeError, match="ended with 1:\nno"):
        ddp._trained(["sh", "-c", "echo no; exit 1"], 1)


def test_the_schedule() -> None:
    worker = pytest.importorskip("benchmarks.ddp_worker")
    assert doctest.testmod(worker).failed == 0


@each_row(
    ("wrong", "text"),
    [
        ({"workers": 0}, "positive"),
        ({"steps": 1}, "each worker takes a step"),
        ({"rates": (0.0,)}, "positive"),
        ({"rounds": 0}, "positive"),
        ({"schedules": ("cosin",)}, "'cosin'; did you mean 'cosine'"),
    ],
)
def test_options_that_cannot_be(wrong: dict[str, Any], text: str) -> None:
    with pytest.raises(UsageError, match=text):
        Options(**wrong).check()
