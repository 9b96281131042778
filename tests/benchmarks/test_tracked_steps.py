"""The tracked-steps benchmark: real servers, of which one is awake at a time."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from aiops.errors import UsageError
from benchmarks import tracked_steps
from benchmarks.tracked_steps import Options, interval
from tests.rows import each_row

pytest.importorskip("tensorboard")


@pytest.mark.slow
def test_a_tiny_run_makes_a_whole_report(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "out.json"
    short = ["--compute", "0.1", "--block", "0.05", "--rounds", "2", "--every", "0.02"]
    tracked_steps.main([*short, "--size", "4KiB", f"--json={file}"])
    printed = capsys.readouterr().out
    found = json.loads(file.read_text())
    assert [cell["cell"] for cell in found["cells"]] == list(tracked_steps.WAYS)
    for cell in found["cells"]:
        assert cell["cell"] in printed
        assert cell["ms"]["median"] > 0.1
        assert len(cell["rounds"]) == 2
        low, high = cell["interval"]
        assert low <= cell["x_none"]["median"] <= high
        more, least, most = cell["at_default"]
        assert more == pytest.approx((cell["x_none"]["median"] - 1) / 250)
        assert least <= more <= most
    assert found["cells"][0]["x_none"]["median"] == 1
    assert [cell.where for cell in tracked_steps.cells(found)] == list(tracked_steps.WAYS[1:])
    assert tracked_steps.figure(found).panels[0].ticks == list(tracked_steps.WAYS)


def test_the_interval_of_a_median() -> None:
    """The 40th and the 61st of a hundred, as tables of the binomial distribution have them."""
    assert interval([*range(100, 0, -1)]) == (40, 61)
    assert interval([3.0]) == (3.0, 3.0)
    assert interval([1.0, 2.0, 3.0]) == (1.0, 3.0)


@each_row(
    "wrong",
    [{"size": 0}, {"rounds": 0}, {"compute": 0.0}, {"block": 0.0}, {"block": 2.0}, {"every": 0.0}],
)
def test_options_that_cannot_be(wrong: dict[str, Any]) -> None:
    with pytest.raises(UsageError):
        tracked_steps.run(Options(**wrong))
