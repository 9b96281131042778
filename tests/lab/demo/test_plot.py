"""A demo as a figure."""

from __future__ import annotations

import builtins
import math
from pathlib import Path
from typing import Any

import pytest

from aiops.errors import UsageError
from aiops.lab.demo import plot
from aiops.lab.demo.record import DemoRecord
from tests.lab.demo.conftest import report

pytest.importorskip("matplotlib")


@pytest.mark.parametrize(
    ("suffix", "begins"), [(".png", b"\x89PNG"), (".svg", b"<?xml"), (".pdf", b"%PDF")]
)
def test_is_saved_in_every_format(
    suffix: str, begins: bytes, record: DemoRecord, tmp_path: Path
) -> None:
    path = tmp_path / "new" / f"demo{suffix}"
    plot.save(record, path)
    assert path.read_bytes().startswith(begins)


def test_shows_what_was_seen(record: DemoRecord) -> None:
    figure = plot.figure(record)
    assert figure.title == "fasgd on digits: 2 workers, 200 updates in 2.0 s"
    (loss,), (accuracy,), (staleness,), traffic = (panel.lines for panel in figure.panels)
    assert (loss.x, loss.ys) == ([0, 80, 200], [[2.5, 0.5, 0.25]])
    assert accuracy.label == "test accuracy, 95.0% in the end"
    assert accuracy.ys == [[10, 90, 95]]
    assert staleness.ys == [[25, 50, 0, 25]]
    assert [(line.label, line.ys) for line in traffic] == [
        ("pushed 8.0 kB", [[0, 0.002, 0.008]]),
        ("both ways 24.0 kB", [[0, 0.006, 0.024]]),
    ]


def test_a_diverged_run_can_be_drawn_too(record: DemoRecord, tmp_path: Path) -> None:
    record.seconds = 3.0
    record.note(report(300, {"0": 300}, 1), 300, math.nan, 0.1)
    plot.save(record, tmp_path / "demo.png")
    assert math.isnan(plot.figure(record).panels[0].lines[0].ys[0][-1])


def test_a_long_tail_of_staleness_is_left_out(record: DemoRecord) -> None:
    record.seconds = 3.0
    record.note(report(300, {"0": 990, "2": 9, "700": 1}, 1), 300, 0.1, 0.9)
    (staleness,) = plot.figure(record).panels[2].lines
    assert list(staleness.x) == [0, 1, 2]
    assert staleness.label.endswith("largest 700")


@pytest.mark.parametrize(
    ("out", "means"),
    [("out", "out/demo.png"), ("a.b/c", "a.b/c/demo.png"), ("x/y.svg", "x/y.svg")],
)
def test_where_it_goes(out: str, means: str) -> None:
    assert plot.place(Path(out)) == Path(means)


def test_a_folder_may_have_a_dot(tmp_path: Path) -> None:
    folder = tmp_path / "run.1"
    folder.mkdir()
    assert plot.place(folder) == folder / "demo.png"


def test_without_matplotlib(
    record: DemoRecord, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = builtins.__import__

    def without(name: str, *rest: Any) -> Any:
        if name.startswith("matplotlib"):
            raise ImportError(name)
        return real(name, *rest)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(UsageError, match=r"pip install 'aiops-ps\[demo\]'"):
        plot.save(record, tmp_path / "demo.png")


def test_where_it_cannot_go(record: DemoRecord, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(UsageError, match=r"demo\.png cannot be written"):
        plot.save(record, tmp_path / "file" / "demo.png")
