"""The learning benchmark: a tiny run, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from aiops.algorithms import find
from aiops.errors import UsageError
from benchmarks import learning
from benchmarks.learning import RULES, Options
from tests.rows import each_row


@pytest.mark.slow
def test_a_tiny_run_makes_a_whole_report(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("matplotlib")
    file, plot = tmp_path / "out.json", tmp_path / "out.png"
    names = ["schedule-free-onebit", "hardsync", "diloco-int8"]
    line = f"--network perceptron --rules {','.join(names)} --compute 0.005 --seconds 0.25"
    learning.main([*line.split(), "--rate=2MB/s", f"--json={file}", f"--plot={plot}"])
    printed = capsys.readouterr().out
    for word in (*names, "2MB/s and 10 ms each way", "mini-batches"):
        assert word in printed
    found = json.loads(file.read_text())
    assert [cell["cell"] for cell in found["cells"]] == names
    for cell in found["cells"]:
        assert cell["mini_batches"]["min"] > 2
        assert 0 < cell["cost"]["median"] < 4
        assert cell["MB"]["median"] < 2 * 2 * 2 * 0.6  # two links, both ways
    assert [cell.less for cell in learning.cells(found)] == [True] * 3
    assert plot.read_bytes().startswith(b"\x89PNG")


@each_row("name", RULES)
def test_a_rule_can_be_started(name: str) -> None:
    rule, rate = RULES[name]
    settings = (*rule.settings, f"{rule.rate}={rate}", *rule.schedule(45.0, 450.0))
    find(rule.policy).make(dict(each.split("=", 1) for each in settings)).plan(2)


@each_row(
    ("wrong", "text"),
    [
        ({"workers": 0}, "numbers and times are positive"),
        ({"seconds": 0.0}, "numbers and times are positive"),
        ({"network": "gpt"}, "there is no 'gpt'"),
        ({"rules": ("asgd",)}, "there is no 'asgd'; did you mean 'asgd-"),
    ],
)
def test_options_that_cannot_be(wrong: dict[str, Any], text: str) -> None:
    with pytest.raises(UsageError, match=text):
        Options(**wrong).check()
