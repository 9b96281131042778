"""The displays of a demo."""

from __future__ import annotations

import io

import pytest
from rich.console import Console
from rich.text import Text

from aiops.lab.demo.display import LineDisplay, LiveDisplay, display_for, print_summary
from aiops.lab.demo.record import DemoRecord
from aiops.lab.demo.settings import DemoSettings


def console(*, terminal: bool) -> tuple[Console, io.StringIO]:
    file = io.StringIO()
    return Console(file=file, force_terminal=terminal, width=100, no_color=True), file


def test_which_display_depends_on_where_the_output_goes() -> None:
    assert isinstance(display_for(console(terminal=True)[0]), LiveDisplay)
    assert isinstance(display_for(console(terminal=False)[0]), LineDisplay)


def test_the_live_table(record: DemoRecord) -> None:
    where, file = console(terminal=True)
    with display_for(where) as display:
        display.show(record)
        seen = file.getvalue()
    for text in ("fasgd on digits, 2 workers", "aiops://127.0.0.1:1", "200/200 mini-batches"):
        assert text in seen
    for text in ("95.0%", "▁██", "0.2500", "█", "1.25", "v̄ 0.25", "24.0 kB"):
        assert text in seen
    row = next(line for line in seen.splitlines() if "worker-2" in line)
    cells = ["done", "100/100", "0.5000", "1", "4.0", "kB", "8.0", "kB", "25.0%", "1"]
    assert row.split()[2:-1] == cells


def test_the_live_table_before_there_is_anything_to_show() -> None:
    where, file = console(terminal=True)
    with display_for(where) as display:
        display.show(DemoRecord(DemoSettings.make()))
        assert "worker-4" in file.getvalue()


@pytest.mark.parametrize("width", [80, 200])
def test_the_live_table_fits_its_terminal(width: int, record: DemoRecord) -> None:
    where, file = console(terminal=True)
    where.width = width
    with display_for(where) as display:
        display.show(record)
        seen = file.getvalue().replace("v̄", "v")  # two code points, one column
        rows = [Text.from_ansi(line).plain for line in seen.splitlines()]
    assert {len(row) for row in rows} == {min(width, 96)}
    assert not any("…" in row for row in rows)


def test_plain_lines_are_one_per_phase_and_second(record: DemoRecord) -> None:
    where, file = console(terminal=False)
    display = LineDisplay(where)
    early = DemoRecord(record.settings)
    display.show(early)
    display.show(early)
    early.phase = "training"
    for sample in record.samples:
        early.seconds = sample.seconds
        early.samples.append(sample)
        display.show(early)
        display.show(early)
    lines = file.getvalue().splitlines()
    assert [line.split()[0] for line in lines] == ["starting", "training", "0.0", "1.0", "2.0"]
    assert "version 200  loss 0.2500  accuracy 95.0%  staleness 1.25" in lines[-1]


@pytest.mark.parametrize("terminal", [True, False])
@pytest.mark.parametrize("complete", [True, False])
def test_the_summary(terminal: bool, complete: bool, record: DemoRecord) -> None:
    where, file = console(terminal=terminal)
    print_summary(where, record, complete=complete, plot="out/demo.png")
    said = file.getvalue()
    assert ("done" if complete else "stopped early") in said
    for text in ("95.0%", "200 (100 per second)", "1.25 updates", "3 gradients", "out/demo.png"):
        assert text in said


def test_the_summary_of_a_run_that_never_began() -> None:
    where, file = console(terminal=False)
    print_summary(where, DemoRecord(DemoSettings.make()), complete=False, plot=None)
    assert file.getvalue().splitlines()[1].split() == ["reached", "starting"]
