"""A server's ledger in sums: bytes that were saved, and the bytes of each tensor."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple


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
