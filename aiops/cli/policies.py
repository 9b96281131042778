"""``aiops policies``: the list of algorithms, and the page of each."""

from __future__ import annotations

import importlib
import inspect
import json
import re
from collections.abc import Iterable
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from aiops.algorithms import BUILT_IN, available, find
from aiops.algorithms.base import Algorithm
from aiops.cli import policy_catalog, policy_docstring
from aiops.cli.policy_catalog import TOPICS
from aiops.cli.policy_docstring import DocBlock
from aiops.cli.policy_settings import OWN, SettingGroup, grouped
from aiops.errors import UsageError, nearest

Name = Annotated[
    str | None,
    typer.Argument(
        help="Explain this one, or package.module:Class; or a topic that many share:"
        f" {', '.join(TOPICS)}."
    ),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print it as JSON, for tools.")]

_WIDEST = 100  # columns of prose; wider is hard to read


def policies(name: Name = None, as_json: AsJson = False) -> None:
    """List the algorithms; with a NAME, show its equations, settings and source."""
    console = Console(highlight=False)
    console.width = min(console.width, _WIDEST)
    if name is None:
        kinds, broken = _loaded()
        if as_json:
            _print_json([_listed(key, kinds[key]) for key in sorted(kinds)])
        else:
            _list(console, kinds, broken)
    elif name in TOPICS and name not in available():
        _show_topic(console, name, as_json)
    else:
        kind = _found(name)
        if as_json:
            _print_json(_described(name, kind))
        else:
            _show(console, name, kind)


def _found(name: str) -> type[Algorithm]:
    if ":" not in name and name not in available():
        known = [*available(), *TOPICS]
        raise UsageError(f"no policy is called {name!r}; {nearest(name, known)}")
    return find(name)


def _loaded() -> tuple[dict[str, type[Algorithm]], dict[str, str]]:
    """Return all algorithms by name, and the errors of those that could not be loaded."""
    kinds, broken = {}, {}
    for name in available():
        try:
            kinds[name] = find(name)
        except Exception as error:
            if name in BUILT_IN:
                raise
            broken[name] = f"cannot be loaded: {error}"
    return kinds, broken


# ---------------------------------------------------------------- for people


def _list(console: Console, kinds: dict[str, type[Algorithm]], broken: dict[str, str]) -> None:
    width = max(map(len, [*kinds, *broken])) + 2
    for family, names in policy_catalog.families(kinds).items():
        console.print(Text(family.capitalize(), style="bold cyan"))
        for name in names:
            _entry(
                console, name, policy_docstring.plain(policy_docstring.summary(kinds[name])), width
            )
        console.print()
    for name, why in broken.items():
        _entry(console, name, why, width)
    for command, what in (
        ("aiops policies NAME", "equations, settings, source"),
        (f"aiops policies {'|'.join(TOPICS)}", "topics that many share"),
    ):
        console.print(Text.assemble((command, "bold"), ("  " + what, "dim")), soft_wrap=True)


def _entry(console: Console, name: str, text: str, width: int) -> None:
    """Print an entry of the list; outside a terminal as one line of any length, for grep."""
    if console.is_terminal:
        _line(console, name, text, width)
    else:
        console.print(Text(f"  {name:<{width}}{text}"), soft_wrap=True)


def _line(console: Console, name: str, text: str, width: int) -> None:
    grid = Table.grid(padding=0)
    grid.add_column(width=width, style="bold", no_wrap=True)
    grid.add_column()
    grid.add_row(name, text)
    console.print(Padding(grid, (0, 0, 0, 2), expand=False))


def _show(console: Console, name: str, kind: type[Algorithm]) -> None:
    page, known = policy_docstring.read(kind.__doc__), policy_catalog.facts(kind)
    command = policy_catalog.command(name, kind)  # may raise, so first
    console.print(Text.assemble((name, "bold cyan"), ("  " + policy_catalog.family(kind), "dim")))
    console.print()
    console.print(_prose(page.summary or "It has no docstring."))
    console.print()
    _blocks(console, page.body)
    for label, text in (
        ("A worker", known.worker),
        ("Waits for", known.waits_for),
        ("Memory", f"{known.memory} (the server's, for each parameter)"),
    ):
        _line(console, label, text, 12)
    console.print()
    for group in grouped(kind):
        _settings(console, group)
    for heading, blocks in page.sections.items():
        if heading != "Settings":
            console.print(Text(heading, style="bold"))
            _blocks(console, blocks)
    if policy_catalog.neighbours(kind):
        console.print(
            Text.assemble(("Compare  ", "bold"), ", ".join(policy_catalog.neighbours(kind)))
        )
    console.print(Text.assemble(("Run      ", "bold"), command))
    source = Text.assemble(("Code     ", "bold"), (inspect.getsourcefile(kind) or "", "dim"))
    console.print(source, soft_wrap=True)


def _show_topic(console: Console, topic: str, as_json: bool) -> None:
    page = policy_docstring.read(importlib.import_module(TOPICS[topic]).__doc__)
    if as_json:
        tables = [block.rows for block in page.body if block.kind == "table"]
        rows = [
            dict(zip(table[0], map(_plain, row), strict=True))
            for table in tables
            for row in table[1:]
        ]
        _print_json({"name": topic, "summary": page.summary, "rows": rows})
        return
    console.print(Text(topic, style="bold cyan"))
    console.print()
    console.print(_prose(page.summary))
    console.print()
    _blocks(console, page.body)
    for heading, blocks in page.sections.items():
        console.print(Text(heading, style="bold"))
        _blocks(console, blocks)


def _settings(console: Console, group: SettingGroup) -> None:
    own = group.title == OWN
    title = Text("Settings" if own else group.title, style="bold")
    console.print(title.append("  as --set key=value" if own else "", style="not bold dim"))
    table = Table(box=None, header_style="dim", padding=(0, 2, 0, 0), pad_edge=False)
    table.add_column("key", style="bold", no_wrap=True)
    table.add_column("default", no_wrap=True)
    table.add_column("type", style="dim", no_wrap=True)
    table.add_column("meaning")
    for setting in group.settings:
        table.add_row(setting.name, str(setting.default), setting.type, _prose(setting.meaning))
    console.print(Padding(table, (0, 0, 1, 2), expand=False))


def _blocks(console: Console, blocks: Iterable[DocBlock]) -> None:
    """Print the blocks of a docstring, formulas and examples set in."""
    for block in blocks:
        if block.kind == "text":
            console.print(Padding(_prose(block.text), (0, 0, 1, 0)))
        elif block.kind == "table":
            _table(console, block)
        else:
            style = "dim" if block.kind == "example" else "cyan"
            console.print(Padding(Text(block.text, style=style), (0, 0, 1, 4), expand=False))


def _table(console: Console, block: DocBlock) -> None:
    table = Table(box=None, header_style="dim", padding=(0, 2, 0, 0), pad_edge=False)
    for number, head in enumerate(block.rows[0]):
        table.add_column(_plain(head), style="bold" if number == 0 else "", no_wrap=number == 0)
    for row in block.rows[1:]:
        table.add_row(*map(_plain, row))
    console.print(Padding(table, (0, 0, 1, 2), expand=False))


def _prose(text: str) -> Text:
    """Return it without markup; titles are in italics, references are commands to type."""
    parts = re.split(r"\*([^*]+)\*", policy_docstring.plain(text, _reference))
    return Text.assemble(*((part, "italic" if n % 2 else "") for n, part in enumerate(parts)))


def _reference(name: str) -> str:
    target = policy_catalog.references().get(name, name)
    return f"aiops policies {target}" if target in TOPICS else target


def _plain(text: str) -> str:
    return policy_docstring.plain(text)


# ---------------------------------------------------------------- for tools


def _listed(name: str, kind: type[Algorithm]) -> dict[str, Any]:
    return {
        "name": name,
        "family": policy_catalog.family(kind),
        "summary": _plain(policy_docstring.summary(kind)),
        "class": f"{kind.__module__}:{kind.__qualname__}",
        "built_in": name in BUILT_IN,
    }


def _described(name: str, kind: type[Algorithm]) -> dict[str, Any]:
    page, known = policy_docstring.read(kind.__doc__), policy_catalog.facts(kind)
    settings = [
        {
            "name": setting.name,
            "type": setting.type,
            "default": setting.default,
            "meaning": _plain(setting.meaning),
            "group": group.title,
        }
        for group in grouped(kind)
        for setting in group.settings
    ]
    source = page.sections.get("Source", [])
    return {
        **_listed(name, kind),
        "equations": [block.text for block in page.body if block.kind == "math"],
        "settings": settings,
        "source": " ".join(_plain(block.text) for block in source),
        "neighbours": policy_catalog.neighbours(kind),
        "worker": known.worker,
        "waits_for": known.waits_for,
        "memory": known.memory,
        "command": policy_catalog.command(name, kind),
        "file": inspect.getsourcefile(kind),
    }


def _print_json(value: Any) -> None:
    print(json.dumps(value, ensure_ascii=False, indent=2))
