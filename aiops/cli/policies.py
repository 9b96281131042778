"""``aiops policies``: the list of algorithms, and the page of each."""

from __future__ import annotations

import importlib
import inspect
import json
from collections.abc import Iterable
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markdown import Markdown
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from aiops.algorithms import BUILT_IN, available, find
from aiops.algorithms.base import Algorithm
from aiops.cli import policy_catalog, policy_docstring
from aiops.cli.policy_catalog import TOPICS, grouped
from aiops.cli.policy_docstring import plain, summary
from aiops.cli.policy_page import PageWriter, joined
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
            _entry(console, name, plain(summary(kinds[name])), width)
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
    compared = ", ".join(policy_catalog.neighbours(kind))
    parts = _WRITER.algorithm(name, kind, f"*{policy_catalog.family(kind)}*")
    _print_page(console, [*parts, f"## Compare\n\n{compared}" if compared else ""])
    console.print(
        Text.assemble(("Code ", "bold"), inspect.getsourcefile(kind) or ""), soft_wrap=True
    )


def _show_topic(console: Console, topic: str, as_json: bool) -> None:
    if not as_json:
        _print_page(console, _WRITER.topic(topic))
        return
    page = policy_docstring.read(importlib.import_module(TOPICS[topic]).__doc__)
    tables = [block.rows for block in page.body if block.kind == "table"]
    rows = [
        dict(zip(table[0], map(plain, row), strict=True)) for table in tables for row in table[1:]
    ]
    _print_json({"name": topic, "summary": page.summary, "rows": rows})


def _print_page(console: Console, parts: Iterable[str]) -> None:
    console.print(Markdown(joined(parts), code_theme="bw", hyperlinks=False))


def _command_for(reference: str) -> str | None:
    """Return what a reference of a docstring is in the terminal: a command, or a name."""
    target = policy_catalog.references().get(reference)
    return f"`aiops policies {target}`" if target in TOPICS else target and f"`{target}`"


_WRITER = PageWriter(_command_for)


# ---------------------------------------------------------------- for tools


def _listed(name: str, kind: type[Algorithm]) -> dict[str, Any]:
    return {
        "name": name,
        "family": policy_catalog.family(kind),
        "summary": plain(summary(kind)),
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
            "meaning": plain(setting.meaning),
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
        "source": " ".join(plain(block.text) for block in source),
        "neighbours": policy_catalog.neighbours(kind),
        "worker": known.worker,
        "waits_for": known.waits_for,
        "memory": known.memory,
        "overlap": known.overlap,
        "command": policy_catalog.command(name, kind),
        "file": inspect.getsourcefile(kind),
    }


def _print_json(value: Any) -> None:
    print(json.dumps(value, ensure_ascii=False, indent=2))
