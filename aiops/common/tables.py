"""Tables on a terminal, as all commands draw them."""

from __future__ import annotations

from collections.abc import Mapping

from rich.table import Table


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
