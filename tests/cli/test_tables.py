"""A ledger's tables on a terminal."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from aiops.bandwidth.byte_accounting import Ledger
from aiops.cli import tables
from aiops.cli.tables import ledger_tables
from tests.common.test_ledger_sums import account


def test_the_tables() -> None:
    console = Console(file=io.StringIO(), width=100)
    for part in ledger_tables(account().report()):
        console.print(part)
    assert isinstance(console.file, io.StringIO)
    lines = [" ".join(line.split()) for line in console.file.getvalue().splitlines()]
    assert "pushed 5.1 kB 5.0 kB 8.0 kB 0 B 8.0 kB skipped" in lines
    assert "fetched 28.1 kB 28.0 kB 28.0 kB 0 B 28.0 kB unchanged" in lines
    assert "t0 1.0 kB 4.0 kB 7.0 kB" in lines
    assert "... and 2 more" in lines


def test_nothing_has_crossed_yet() -> None:
    assert list(ledger_tables(Ledger().report())) == []


def test_in_a_pipe_a_row_is_one_line(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)
    name, shown = "snapshot-" + 20 * "0", tables.table("file", *map(str, range(20)))
    shown.add_row(name, *20 * ["1,234"])
    tables.console().print(shown)
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == ["file", name]
