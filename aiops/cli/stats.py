"""``aiops stats``: a server's statistics, once or live."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any

import typer
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from aiops.algorithms import BUILT_IN, find, per_tensor
from aiops.cli.flags import Json, Timeout, Token, Url
from aiops.cli.tables import console as standard_output
from aiops.cli.tables import ledger_tables
from aiops.cli.tables import table as empty_table
from aiops.common import formatting
from aiops.errors import ConnectionLost

Watch = Annotated[bool, typer.Option("--watch", help="Once a second, until Ctrl-C.")]

_EVERY = 1.0
_REASONS = 8  # workers whose last refusal is told
_MOST = 40  # staleness bars and members that fit a screen


def stats(
    url: Url,
    watch: Watch = False,
    as_json: Json = False,
    token: Token = None,
    timeout: Timeout = 5.0,
) -> None:
    """Print a server's statistics; --watch: live; --json: one object per line."""
    from aiops.client.sync.client import Client

    console = standard_output()
    with Client(url, token=token, timeout=timeout) as client:
        if not watch:
            _print(console, client.url, client.stats(), as_json=as_json)
            return
        try:
            _watch(console, client, as_json=as_json)
        except KeyboardInterrupt:
            pass
        except ConnectionLost as error:
            print(f"the server is gone: {error}", file=sys.stderr)
            raise typer.Exit(0) from None


def _watch(console: Console, client: Any, *, as_json: bool) -> None:
    if as_json or not console.is_terminal:
        while True:
            report = client.stats()
            print(json.dumps(report) if as_json else _line(report), flush=True)
            time.sleep(_EVERY)
    with Live(console=console, auto_refresh=False, screen=False) as live:
        while True:
            live.update(tables(client.url, client.stats()), refresh=True)
            time.sleep(_EVERY)


def _print(console: Console, url: str, report: Mapping[str, Any], *, as_json: bool) -> None:
    if as_json:
        print(json.dumps(report))
    else:
        console.print(tables(url, report))


def _line(report: Mapping[str, Any]) -> str:
    present = sum(row["role"] == "worker" and row["present"] for row in report["workers"])
    return (
        f"{report['seconds']:8.1f} s  {report['policy']}  version {report['version']:,}"
        f"  {report['updates_per_second']:,.0f} updates/s"
        f"  staleness {report['mean_staleness']:.2f}  {present} workers"
    )


def tables(url: str, report: Mapping[str, Any]) -> RenderableType:
    """Return a report as tables."""
    parts = (
        *(
            _facts(report),
            *_warnings(report),
            *_paused(report),
            *_file_errors(report),
            *_promises(report),
            *_corrupted(report),
        ),
        *_copies(report),
        *_standbys(report),
        *(*_waits(report), *_budget(report), *_profile(report), *_shards(report)),
        *(*_tables(report), *_data_sets(report), *_filter(report), *_staleness(report)),
        *(*ledger_tables(report["ledger"]), "", _clients(report), *_tokens(report)),
    )
    return Group(_heading(url, report), "", *parts)


def _heading(url: str, report: Mapping[str, Any]) -> Text:
    chosen = _chosen(report)
    others = str(chosen.pop(per_tensor.SETTING, ""))
    each = [*(f"{key}={value}" for key, value in chosen.items()), *others.split()]
    settings = ", ".join(each)
    text = Text(url, style="bold cyan")
    text.append(f"  {report['policy']}", style="bold")
    text.append(f"  {settings}", style="dim")
    return text


def _chosen(report: Mapping[str, Any]) -> dict[str, Any]:
    """Return the learning rates, and the settings that are not the algorithm's defaults."""
    settings: dict[str, Any] = report["settings"]
    # An algorithm of another package is not imported because a server names it.
    known = report["policy"] in BUILT_IN
    defaults = find(report["policy"])().settings() if known else {}
    return {k: v for k, v in settings.items() if k in ("lr", "inner_lr") or defaults.get(k) != v}


def _facts(report: Mapping[str, Any]) -> Table:
    grid = Table.grid(padding=(0, 3))
    for _ in range(3):
        grid.add_column(style="dim", no_wrap=True)
        grid.add_column(justify="right", no_wrap=True)
    facts = [
        ("version", f"{report['version']:,}"),
        ("updates/s", f"{report['updates_per_second']:,.1f}"),
        ("up", formatting.seconds(report["seconds"])),
        ("gradients", f"{report['gradients']:,}"),
        ("wasted", f"{report['wasted']:,}"),
        ("mean staleness", f"{report['mean_staleness']:.2f}"),
        ("parameters", f"{report['parameters']:,}"),
        ("tensors", f"{report['tensors']:,}"),
        ("v̄", formatting.optional(report["vbar"], ".4g")),
        ("kernels", report.get("device") or report["kernels"] or "–"),
        ("versions alive", f"{report['versions_alive']}"),
        ("versions spare", f"{report['versions_spare']}"),
        ("readers cut", f"{report['readers_cut']}"),
        *_schedule(report),
        *_memory(report),
        ("waiting", f"{report['waiting']} of {len(report['waited_for'])}"),
    ]
    for first in range(0, len(facts), 3):
        grid.add_row(*(cell for fact in facts[first : first + 3] for cell in fact))
    return grid


def _schedule(report: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield what raises the rate, and the position in a schedule that does not count updates."""
    if report["rate_gain"] != 1:
        yield "learning rate", f"×{report['rate_gain']:.2f}"
    if report.get("schedule") is not None:
        settings = report["settings"]
        position = report["schedule"] + settings["schedule_start"]
        yield f"schedule's {settings['schedule_unit']}", f"{position:,.0f}"


def _warnings(report: Mapping[str, Any]) -> Iterator[RenderableType]:
    """List what the server has warned of, in a paragraph each."""
    for text in report.get("warnings", ()):
        yield ""
        yield Text(text, style="yellow")


def _paused(report: Mapping[str, Any]) -> Iterator[RenderableType]:
    """Say why no pushes are taken, if they are not."""
    if report.get("paused"):
        yield ""
        yield Text(f"takes no pushes: {report['paused']}", style="red")


def _corrupted(report: Mapping[str, Any]) -> Iterator[RenderableType]:
    """Say how often bytes were changed on the way, if they were."""
    if report.get("corrupted"):
        yield ""
        text = f"{report['corrupted']:,} connections ended with a wrong checksum"
        yield Text(text, style="red")


def _waits(report: Mapping[str, Any]) -> Iterator[RenderableType]:
    """List the waits that follow from --failure-timeout."""
    if waits := report.get("waits"):
        yield ""
        listed = ", ".join(f"{name} {seconds:g} s" for name, seconds in waits.items())
        yield Text(f"waits: {listed}", style="dim")


def _memory(report: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    memory = report.get("memory")
    if memory is not None:
        held = memory["resident"]
        yield "memory", "–" if held is None else formatting.nbytes(held)
        yield "memory at most", formatting.nbytes(memory["bound"])


def _file_errors(report: Mapping[str, Any]) -> Iterator[RenderableType]:
    """Say what a server could not write, in a line each."""
    for sentence in report.get("file_errors", ()):
        yield ""
        yield Text(sentence, style="red")


def _promises(report: Mapping[str, Any]) -> Iterator[RenderableType]:
    """Say where acknowledgements mean less than was asked for, and where snapshots are missing."""
    state = report.get("state") or {}
    if state.get("ended"):  # the lead's has those of its followers
        means = f"acknowledgements mean {state['acks']!r}, and not {state['wanted']!r}"
        yield ""
        yield Text(f"{means}: {state['ended']}", style="red")
    for number, each in enumerate((state, *state.get("shards", ()))):
        if each.get("snapshot_error"):
            where = f"shard {number}: " if number else ""
            yield ""
            yield Text(f"{where}the last snapshot: {each['snapshot_error']}", style="red")


def _copies(report: Mapping[str, Any]) -> Iterator[RenderableType]:
    """Return a line about the copies of the server's state, if it makes any."""
    copy = (report.get("state") or {}).get("copy")
    if copy is None:
        return
    text = Text("copies  ", style="dim")
    text.append(copy["url"], style="bold")
    text.append(f"  version {copy['version']:,}, {copy['copies']:,} made, the last in")
    text.append(f" {copy['seconds']:.1f} s")
    yield from ("", text)
    if copy["error"]:
        yield Text(f"no copy: {copy['error']}", style="red")


def _standbys(report: Mapping[str, Any]) -> Iterator[RenderableType]:
    """Return a table of the server's standbys, or a standby's own line."""
    state = report.get("state") or {}
    if "standby_of" in state:
        text = Text("standby of  ", style="dim")
        text.append(state["standby_of"], style="bold")
        text.append(f"  row {state['applied']:,}, {state['behind_rows']:,} behind")
        yield from ("", text)
        if state["no_feed"]:
            yield Text(f"no feed: {state['no_feed']}", style="red")
    shards = state.get("shards", ())
    if "standby_of" in state and shards:
        yield from ("", _standbys_of_followers(shards))
        return
    rows = [
        (f"{row['name']}{place}", row)
        for place, each in [("", state), *((f" (shard {n})", s) for n, s in enumerate(shards, 1))]
        for row in each.get("standbys", ())
    ]
    if rows:
        found = empty_table("standby", "row", "synced", "rows behind", "seconds", "bytes behind")
        for name, row in rows:
            found.add_row(
                *(name, f"{row['row']:,}", f"{row['synced']:,}"),
                *(f"{row['behind_rows']:,}", f"{row['behind_seconds']:.2f}"),
                formatting.nbytes(row["behind_bytes"]),
            )
        yield from ("", found)


def _standbys_of_followers(shards: Sequence[Mapping[str, Any]]) -> Table:
    """Return a table of the standbys of followers, as the standby of their lead knows them."""
    found = empty_table("standby", "row", "synced", "rows behind", "")
    for line in shards:
        numbers = [f"{line[key]:,}" if key in line else "–" for key in ("applied", "synced")]
        behind = f"{line['behind_rows']:,}" if "behind_rows" in line else "–"
        why = line["gone"] or line.get("no_feed", "")
        found.add_row(line["name"], *numbers, behind, why, style="red" if why else None)
    return found


def _budget(report: Mapping[str, Any]) -> Iterator[RenderableType]:
    """Return a line about the bandwidth budget, if there is one."""
    budget = report.get("budget")
    if not budget:
        return
    limits = [
        f"{formatting.nbytes(budget[key])}/s{suffix}"
        for key, suffix in (("bytes_per_second", ""), ("worker_bytes_per_second", " each"))
        if budget[key]
    ]
    text = Text("budget  ", style="dim")
    text.append(", ".join(limits), style="bold")
    used, peak = (formatting.nbytes(budget[key]) for key in ("used", "peak"))
    text.append(f"  last second {used}, busiest {peak}")
    if budget["utilisation"] is not None:
        text.append(f", {formatting.percent(budget['utilisation'])} used while bytes waited")
    if budget["c_push"] is not None:
        text.append(f"  c_push {budget['c_push']:.3g}  c_fetch {budget['c_fetch']:.3g}")
    yield ""
    yield text


def _profile(report: Mapping[str, Any]) -> Iterator[RenderableType]:
    """Return a line about the shares of a server's time, if it runs with --profile."""
    profile = report.get("profile")
    if not profile:
        return
    text = Text("time    ", style="dim")
    shares = [(what, cell) for what, cell in profile.items() if what != "seconds"]
    text.append("  ".join(f"{what} {formatting.percent(cell['share'])}" for what, cell in shares))
    yield ""
    yield text


def _shards(report: Mapping[str, Any]) -> Iterator[RenderableType]:
    """Return a table of the shards, if there are several."""
    shards = report.get("shards")
    if not shards:
        return
    table = empty_table("shard", "parameters", "version", "behind")
    for line in shards[:_MOST]:
        host = f"{line['host']}:" if line["host"] else "port "
        name = "lead" if not line["shard"] else f"{line['shard']} at {host}{line['port']}"
        table.add_row(
            f"{name}: gone" if line["gone"] else name,
            formatting.nbytes(line["bytes"]),
            f"{line['version']:,}",
            f"{line['behind']:,}",
            style="red" if line["gone"] else None,
        )
    yield ""
    yield table


def _tables(report: Mapping[str, Any]) -> Iterator[RenderableType]:
    """Return a table of the sparse tables, if there are any."""
    if not report["tables"]:
        return
    columns = ("rows", "width", "stored", "evicted", "memory", "version", "mean staleness")
    table = empty_table("table", *columns)
    for line in report["tables"][:_MOST]:
        table.add_row(
            line["name"],
            f"{line['rows']:,}",
            f"{line['width']:,} {line['dtype']}",
            f"{line['made']:,}",
            f"{line['evicted']:,}",
            formatting.nbytes(line["bytes"]),
            f"{line['version']:,}",
            f"{line['mean_staleness']:.2f}",
        )
    yield ""
    yield table


def _data_sets(report: Mapping[str, Any]) -> Iterator[RenderableType]:
    """Return a table of the data sets whose examples the server hands out, if there are any."""
    rows = report.get("data_sets", ())
    if not rows:
        return
    columns = ("examples", "epoch", "seen", "under way", "to do", "tasks", "done", "waiting")
    table = empty_table("data set", *columns)
    for row in rows[:_MOST]:
        numbers = (
            *("examples", "epoch", "seen", "examples_under_way", "examples_to_do"),
            *("tasks_under_way", "tasks_done", "waiting"),
        )
        table.add_row(row["name"], *(f"{row[name]:,}" for name in numbers))
    yield ""
    yield table


def _filter(report: Mapping[str, Any]) -> Iterator[RenderableType]:
    """Return a line about the filter, if there is one."""
    row = report.get("filter")
    if row is None:
        return
    text = Text(f"filter {row['filter']}: {row['refused']:,} pushes refused")
    if row["quarantined"]:
        text.append(f"; quarantined: {', '.join(row['quarantined'])}", style="red")
    yield ""
    yield text
    for name, why in list(row["reasons"].items())[-_REASONS:]:
        yield Text(f"  refused last of {name!r}: {why}", style="dim")


def _staleness(report: Mapping[str, Any]) -> Iterator[RenderableType]:
    """Return the histogram of staleness as bars."""
    counts = {int(tau): count for tau, count in report["staleness"].items()}
    if not counts:
        return
    most, total = max(counts.values()), sum(counts.values())
    table = Table.grid(padding=(0, 2))
    table.add_column(justify="right", style="dim")
    table.add_column(justify="right")
    table.add_column(style="green")
    taus = sorted(counts)
    for tau in taus[: _MOST // 3]:
        bar = "█" * round(30 * counts[tau] / most) or "▏"
        table.add_row(str(tau), f"{counts[tau] / total:.1%}", bar)
    rest = sum(counts[tau] for tau in taus[_MOST // 3 :])
    if rest:
        table.add_row("more", f"{rest / total:.1%}", "")
    yield ""
    yield Text("staleness", style="bold")
    yield table


def _clients(report: Mapping[str, Any]) -> Table:
    columns = ("state", "pushes", "refused", "stale", "pushed", "fetched", "answered")
    table = empty_table("client", *columns)
    table.columns[1].justify = "left"
    rows = sorted(report["workers"], key=lambda row: (not row["present"], row["worker"]))
    for row in rows[:_MOST]:
        table.add_row(
            Text(formatting.printable(row["name"])),
            _state(row),
            f"{row['pushes']:,}",
            f"{row['refused']:,}",
            f"{row['staleness']:,}",
            formatting.nbytes(row["bytes_pushed"]),
            formatting.nbytes(row["bytes_fetched"]),
            formatting.seconds(row["seconds_since_answer"]) + " ago",
            style=None if row["present"] else "dim",
        )
    more = max(0, len(rows) - _MOST) + report["departed_more"]
    if more:
        table.add_row(f"... and {more:,} more", style="dim")
    return table


def _tokens(report: Mapping[str, Any]) -> Iterator[RenderableType]:
    """Return a table of the server's tokens, if it asks for one."""
    rows = report.get("tokens", ())
    if not rows:
        return
    table = empty_table("token", "role", "connections", "refused", "waited", "")
    for row in rows[:_MOST]:
        numbers = f"{row['connections']:,}", f"{row['refused']:,}"
        waited = formatting.seconds(row["waited"]) if row["waited"] else "–"
        now = f"{row['waiting']:,} wait: over its quota" if row["waiting"] else ""
        said = "expired" if row["expired"] else now
        table.add_row(row["name"], row["role"], *numbers, waited, said)
    yield ""
    yield table


def _state(row: Mapping[str, Any]) -> str:
    if not row["present"]:
        return "gone"
    if row["role"] != "worker":
        return "observer"
    return "silent" if row["excused"] else "worker"
