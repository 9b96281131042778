"""``aiops policies``: which algorithms there are, and what one of them does."""

from __future__ import annotations

import dataclasses
import inspect
import re
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from aiops.algorithms import available, find
from aiops.algorithms.base import Algorithm

Name = Annotated[
    str | None, typer.Argument(help="Tell everything about this one; or package.module:Class.")
]


def policies(name: Name = None) -> None:
    """List the algorithms; with a NAME, show its equations, settings and source."""
    console = Console(highlight=False)
    if name is None:
        _list(console)
    else:
        _show(console, name, find(name))


def _list(console: Console) -> None:
    names = sorted(available())
    width = max(map(len, names)) + 2
    for name in names:
        line = Text.assemble((f"{name:<{width}}", "bold"), find(name).summary())
        console.print(line, soft_wrap=True)


def _show(console: Console, name: str, algorithm: type[Algorithm]) -> None:
    console.print(Text(algorithm.name, style="bold cyan"))
    console.print()
    console.print(Text(_page(algorithm)), soft_wrap=True)
    console.print()
    console.print(Text("Settings, as --set key=value", style="bold"))
    table = Table(box=None, header_style="dim", padding=(0, 3, 0, 0))
    table.add_column("key", style="bold", no_wrap=True)
    table.add_column("default", no_wrap=True)
    table.add_column("type", style="dim", no_wrap=True)
    for field in dataclasses.fields(algorithm):
        table.add_row(field.name, str(field.default), type(field.default).__name__)
    console.print(table)
    console.print()
    workers = " --workers N" if algorithm.needs_workers else ""
    console.print(Text(f"aiops serve --policy {name}{workers}", style="bold"))
    console.print(Text(f"source: {inspect.getsourcefile(algorithm)}", style="dim"), soft_wrap=True)


def _page(algorithm: type[Algorithm]) -> str:
    """Return its docstring, with the marks of the documentation tool taken out."""
    text = inspect.getdoc(algorithm) or "It has no docstring."
    for mark, plain in ((".. math::", "   "), ("``", ""), ("\\|", "|")):
        text = text.replace(mark, plain)
    lines = "\n".join(line.rstrip() for line in text.splitlines())
    return re.sub(r"\n{3,}", "\n\n", lines)
