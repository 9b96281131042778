"""Tables on a terminal, as all commands draw them, and those of a server's ledger."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from rich.console import Console, RenderableType
from rich.table import Table

from aiops.common import formatting, ledger_sums

_TENSORS = 12  # rows that fit a screen
_UNFOLDED = 1000  # columns, where there is no screen


def console() -> Console:
    """Return standard output; in a pipe or a file, a row of a table is one line for `grep`."""
    made = Console(highlight=False)
    if not made.is_terminal and "COLUMNS" not in os.environ:
        made.width = _UNFOLDED
    return made


def warn(texts: Iterable[str]) -> None:
    """Print a server's warnings to standard error, a line each."""
    for text in texts:
        print(f"warning: {text}", file=sys.stderr)


def table(first: str, *others: str, gap: int = 1) -> Table:
    """Return an empty table: a column of text that wraps, and columns of figures at its right."""
    made = Table(box=None, header_style="bold", padding=(0, gap, 0, 0))
    made.add_column(first, overflow="fold")
    for name in others:
        made.add_column(name, justify="right", no_wrap=True)
    return made


def facts(cells: Mapping[str, str]) -> Table:
    """Return a table of one row for each name and text."""
    made = Table(box=None, show_header=False, padding=(0, 2, 0, 0))
    made.add_column(style="dim")
    made.add_column(overflow="fold")
    for name, text in cells.items():
        made.add_row(name, text)
    return made


def ledger_tables(account: Mapping[str, Any]) -> Iterator[RenderableType]:
    """Yield a table of both directions, and one of the busiest tensors."""
    if not account["pushed"]["bytes"]:
        return
    yield ""
    yield _ways(account)
    lines = list(ledger_sums.by_tensor(account))
    if len(lines) > 1:
        yield ""
        yield _tensors(account, lines)


def _ways(account: Mapping[str, Any]) -> Table:
    shown = table("bytes", "in all", "tensors", "raw", "overhead", "left out")
    shown.columns[-1].no_wrap = False
    left_out = {
        "pushed": {"reapplied": "re-applied", "skipped": "skipped"},
        "fetched": {"not_modified": "unchanged", "not_wanted": "not wanted"},
    }
    for name, reasons in left_out.items():
        way = account[name]
        kept = [f"{formatting.nbytes(way[k])} {text}" for k, text in reasons.items() if way[k]]
        sums = (way["bytes"], way["payload"], way["raw"], way["overhead"])
        shown.add_row(name, *map(formatting.nbytes, sums), ", ".join(kept) or "–")
    return shown


def _tensors(account: Mapping[str, Any], lines: list[ledger_sums.TensorTraffic]) -> Table:
    shown = table("tensor", "pushed", "fetched", "saved")
    for line in lines[:_TENSORS]:
        shown.add_row(line.name, *map(formatting.nbytes, line[1:]))
    more = len(lines) - _TENSORS + account["tensors"]["more"]
    if more > 0:
        shown.add_row(f"... and {more:,} more", style="dim")
    return shown
