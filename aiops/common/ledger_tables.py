"""A server's ledger as tables: bytes that crossed, bytes that were saved, the busiest tensors."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from rich.console import RenderableType
from rich.table import Table

from aiops.common import formatting
from aiops.common.tables import table as empty_table

_TENSORS = 12  # rows that fit a screen


class TensorTraffic(NamedTuple):
    """The bytes of one tensor: pushed, fetched, and saved."""

    name: str
    pushed: int
    fetched: int
    saved: int


def saved(account: Mapping[str, Any]) -> int:
    """Return the bytes that codecs, gates and versions saved, both ways."""
    pushed, fetched = account["pushed"], account["fetched"]
    coded = pushed["raw"] - pushed["payload"] + fetched["raw"] - fetched["payload"]
    held = pushed["reapplied"] + pushed["skipped"] + fetched["not_wanted"]
    return int(coded + held + fetched["not_modified"])


def by_tensor(account: Mapping[str, Any]) -> Iterator[TensorTraffic]:
    """Yield the traffic of each tensor, the busiest first."""
    columns = account["tensors"]
    for place, name in enumerate(columns["names"]):
        row = {key: column[place] for key, column in columns.items() if key != "more"}
        coded = row["pushed_raw"] - row["pushed"] + row["fetched_raw"] - row["fetched"]
        held = row["reapplied"] + row["skipped"] + row["not_wanted"] + row["not_modified"]
        yield TensorTraffic(name, row["pushed"], row["fetched"], coded + held)


def tables(account: Mapping[str, Any]) -> Iterator[RenderableType]:
    """Yield a table of both directions, and one of the busiest tensors."""
    if not account["pushed"]["bytes"]:
        return
    yield ""
    yield _ways(account)
    lines = list(by_tensor(account))
    if len(lines) > 1:
        yield ""
        yield _tensors(account, lines)


def _ways(account: Mapping[str, Any]) -> Table:
    table = empty_table("bytes", "in all", "tensors", "raw", "overhead", "left out")
    table.columns[-1].no_wrap = False
    left_out = {
        "pushed": {"reapplied": "re-applied", "skipped": "skipped"},
        "fetched": {"not_modified": "unchanged", "not_wanted": "not wanted"},
    }
    for name, reasons in left_out.items():
        way = account[name]
        kept = [f"{formatting.nbytes(way[k])} {text}" for k, text in reasons.items() if way[k]]
        sums = (way["bytes"], way["payload"], way["raw"], way["overhead"])
        table.add_row(name, *map(formatting.nbytes, sums), ", ".join(kept) or "–")
    return table


def _tensors(account: Mapping[str, Any], lines: list[TensorTraffic]) -> Table:
    table = empty_table("tensor", "pushed", "fetched", "saved")
    for line in lines[:_TENSORS]:
        table.add_row(line.name, *map(formatting.nbytes, line[1:]))
    more = len(lines) - _TENSORS + account["tensors"]["more"]
    if more > 0:
        table.add_row(f"... and {more:,} more", style="dim")
    return table
