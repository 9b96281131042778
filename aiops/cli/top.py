"""``aiops top``: a server and its workers, live in a terminal."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Mapping
from difflib import get_close_matches
from typing import Annotated, Any

import typer
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from aiops.cli.flags import Json, Timeout, Token, Url
from aiops.cli.tables import console as standard_output
from aiops.common import formatting
from aiops.dashboard.overview import KEYS, Overview, Row
from aiops.errors import ConnectionLost, UsageError, nearest
from aiops.net.keys import Keys, keys

Once = Annotated[bool, typer.Option("--once", help="Print one look, a second long, and end.")]
Every = Annotated[float, typer.Option("--every", help="Seconds between looks.")]
Sort = Annotated[str, typer.Option("--sort", help=f"A column: {', '.join(KEYS)}, or as logged.")]
Reverse = Annotated[bool, typer.Option("--reverse", help="The smallest first.")]

_FEW = 3  # logged numbers that have a column
_LONGEST = 28  # characters of a name
_ONCE = 1.0  # seconds that a look is long
_LEAST, _MOST = 0.2, 86400.0  # seconds between looks
_BESIDE = 8  # lines beside the rows
_HELP = "q ends · s sorts by the next column · r reverses"

_COLUMNS: Mapping[str, tuple[str, Callable[[Row], str], int]] = {
    # the column: its title, its text, and the width of a terminal that has it
    "state": ("state", lambda row: row["state"], 0),
    "rate": ("grad/s", lambda row: formatting.optional(row["rate"], ",.1f"), 0),
    "idle": ("idle", lambda row: formatting.optional(row["idle"], ".0%"), 0),
    "staleness": ("stale", lambda row: f"{row['staleness']:,}", 0),
    "pushes": ("pushes", lambda row: f"{row['pushes']:,}", 80),
    "unused": ("unused", lambda row: f"{row['unused']:,}", 90),
    "received": ("received", lambda row: formatting.nbytes(row["received"]), 100),
    "sent": ("sent", lambda row: formatting.nbytes(row["sent"]), 100),
    "silence": ("answered", lambda row: formatting.seconds(row["silence"]) + " ago", 70),
}


def top(
    url: Url,
    once: Once = False,
    as_json: Json = False,
    every: Every = 2.0,
    sort: Sort = "name",
    reverse: Reverse = False,
    token: Token = None,
    timeout: Timeout = 5.0,
) -> None:
    """Show a server and its workers, live; --once: one look; --json: an object per look."""
    from aiops.client.sync.client import Client

    if not _LEAST <= every <= _MOST:
        raise UsageError(f"--every is from {_LEAST:g} to {_MOST:,.0f} seconds, not {every:g}")
    console, order = standard_output(), _Order(sort, reverse)
    look: _Look | None = None
    try:
        named: Any = {"token": token, "timeout": timeout, "name": "aiops top"}
        with Client(url, **named) as client, keys() as pressed:
            look = _Look(client, order)
            if once or as_json or not console.is_terminal:
                _print(console, look, _ONCE if once else every, once=once, as_json=as_json)
            else:
                _show(console, look, every, pressed)
    except KeyboardInterrupt:
        pass
    except ConnectionLost as error:
        if look is None or once:  # it was never reached, or there was nothing to print
            raise
        print(f"the server is gone: {error}", file=sys.stderr)
        raise typer.Exit(0) from None


class _Order:
    """The column that rows are sorted by."""

    def __init__(self, name: str, reverse: bool) -> None:
        self.name, self.reverse = name, reverse

    def check(self, found: Overview) -> None:
        """Raise `UsageError` when there is no such column.

        It may be the name of a number before that is logged, unless it looks like a column's.
        """
        known = self.name in KEYS or self.name in found.names
        if not known and (found.names or get_close_matches(self.name, KEYS, cutoff=0.5)):
            every = [*KEYS, *found.names]
            raise UsageError(f"--sort: no column {self.name!r}; {nearest(self.name, every)}")

    def next(self, found: Overview) -> None:
        """Sort by the next column."""
        every = [*KEYS, *found.names]
        place = every.index(self.name) if self.name in every else -1
        self.name = every[(place + 1) % len(every)]


class _Look:
    """Looks at a server, each with rates since the one before."""

    def __init__(self, client: Any, order: _Order) -> None:
        self.order, self.url = order, client.url
        self._client, self._before = client, client.stats()
        self.last = Overview.of(self._before)
        order.check(self.last)

    def again(self) -> Overview:
        """Ask the server, and return what it says."""
        report = self._client.stats()
        self.last = Overview.of(report, self._before, self.last)
        self._before = report
        return self.last

    def rows(self) -> list[Row]:
        """Return the rows of the last look in their order."""
        return self.last.sorted_by(self.order.name, reverse=self.order.reverse)


def _print(console: Console, look: _Look, every: float, *, once: bool, as_json: bool) -> None:
    while True:
        time.sleep(every)
        found = look.again()
        if as_json:
            print(json.dumps({**found.facts, "rows": look.rows()}), flush=True)
        else:
            console.print(screen(look.url, found, look.rows(), look.order.name, console.width))
        if once:
            return


def _show(console: Console, look: _Look, every: float, pressed: Keys) -> None:
    def drawn() -> RenderableType:
        most = max(1, console.height - _BESIDE)
        return screen(look.url, look.last, look.rows(), look.order.name, console.width, most)

    with Live(drawn(), console=console, auto_refresh=False, screen=True) as live:
        due = time.monotonic() + min(every, 1.0)  # the first has no rates
        while True:
            key = pressed.wait(max(0.0, due - time.monotonic()))
            if key in ("q", "Q", "\x04"):
                return
            if key == "s":
                look.order.next(look.last)
            elif key == "r":
                look.order.reverse = not look.order.reverse
            elif not key:
                look.again()
                due = time.monotonic() + every
            live.update(drawn(), refresh=True)


def screen(
    url: str,
    found: Overview,
    rows: list[Row],
    order: str,
    width: int,
    most: int | None = None,
) -> RenderableType:
    """Return a look as text, ``most`` rows of it (None: all)."""
    facts, names = found.facts, found.names[:_FEW]
    logged = {name: f"{facts['logged'][name]:.4g}" for name in names}
    budget = facts["budget"]
    lines = [
        {
            "version": f"{facts['version']:,}",
            "updates/s": formatting.optional(facts["updates_per_second"], ",.1f"),
            "staleness": f"{facts['mean_staleness']:.2f}",
            "workers": f"{facts['workers']:,}"
            + (f" ({facts['silent']:,} silent)" if facts["silent"] else ""),
            "refused": f"{facts['refused']:,}",
        },
        {
            "received": _per_second(facts["received_per_second"]),
            "sent": _per_second(facts["sent_per_second"]),
            **({"budget": _per_second(budget)} if budget else {}),
            "memory": "–" if facts["memory"] is None else formatting.nbytes(facts["memory"]),
            "up": formatting.seconds(facts["seconds"]),
        },
        {formatting.printable(name): value for name, value in logged.items()},
    ]
    head = Text(url, style="bold cyan", overflow="ellipsis", no_wrap=True)
    head.append(f"  {facts['policy']}", style="bold")
    if facts["warnings"]:
        head.append(f"  {facts['warnings']} warnings: aiops stats", style="yellow")
    parts: list[RenderableType] = [head, *(_line(each) for each in lines if each)]
    if facts["paused"]:
        parts.append(Text(f"takes no pushes: {formatting.printable(facts['paused'])}", style="red"))
    shown = rows if most is None else rows[:most]
    parts += ["", _table(shown, names, order, width)]
    if len(shown) < len(rows):
        parts.append(Text(f"... and {len(rows) - len(shown):,} more", style="dim"))
    if most is not None:
        parts.append(Text(_HELP, style="dim", overflow="ellipsis", no_wrap=True))
    return Group(*parts)


def _per_second(nbytes: float | None) -> str:
    return "–" if nbytes is None else formatting.nbytes(nbytes) + "/s"


def _line(facts: Mapping[str, str]) -> Text:
    line = Text(overflow="ellipsis", no_wrap=True)
    for name, text in facts.items():
        line.append(f"{name} ", style="dim")
        line.append(f"{text}   ")
    return line


def _table(rows: list[Row], names: list[str], order: str, width: int) -> Table:
    table = Table(box=None, header_style="bold", padding=(0, 1, 0, 0))
    table.add_column(
        _title("client", order == "name"), no_wrap=True, overflow="ellipsis", max_width=_LONGEST
    )
    columns = {name: each for name, each in _COLUMNS.items() if width >= each[2]}
    for name, (title, _text, _least) in columns.items():
        justify: Any = "left" if name == "state" else "right"
        table.add_column(_title(title, order == name), justify=justify, no_wrap=True)
    for name in names:
        title = formatting.printable(name)
        table.add_column(_title(title, order == name), justify="right", no_wrap=True)
    for row in rows:
        logged = [row["logged"].get(name) for name in names]
        table.add_row(
            Text(formatting.printable(row["name"])),
            *(Text(text(row)) for _title, text, _least in columns.values()),
            *(Text(formatting.optional(value, ".4g")) for value in logged),
            style={"silent": "red", "observer": "dim"}.get(row["state"]),
        )
    return table


def _title(text: str, chosen: bool) -> Text:
    return Text(f"{text}*" if chosen else text)
