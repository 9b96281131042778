"""A server's report as sections of a document: plain values, small, each bounded.

A follower and a standby have less to report than others: what is missing is left out.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

Report = Mapping[str, Any]
Section = Any

MOST_LINES = 100
"""Tensors, shards, standbys and the like that are shown."""

LONGEST_TEXT = 300
"""Characters of a text that are shown."""

STALENESS_BUCKETS = (0, 1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1023)
"""Upper bounds of the bars of the histogram; the last bar is for all above."""


class WorkerRow(NamedTuple):
    """One client that is connected.

    Attributes
    ----------
    number, name
        Its number, which no other has, and its name.
    state
        ``worker``, ``silent`` (a barrier has waited for it too long) or ``observer``.
    pushes, refused, ignored, staleness
        Gradients that were used, refused and not used, and the staleness of the last.
    bytes_in, bytes_out
        Bytes received from it and sent to it.
    answered
        When a push of it was last answered, or it joined; in seconds of the server's clock.
    compute, idle
        Seconds that it has computed and waited, as it says; None: it has not said.
    logged
        The numbers that it has logged last, by name.
    """

    number: int
    name: str
    state: str
    pushes: int
    refused: int
    ignored: int
    staleness: int
    bytes_in: int
    bytes_out: int
    answered: float
    compute: float | None = None
    idle: float | None = None
    logged: Mapping[str, float] = {}


def sections(report: Report, shares: Mapping[str, float]) -> dict[str, Section]:
    """Return the sections of a document but for workers, series and events.

    Parameters
    ----------
    report
        The server's, with ``ready`` (the reason for which it is not; empty: it is).
    shares
        Of a processor that the server's threads have used lately, by name.
    """
    return {
        "state": _state(report),
        "settings": _settings(report),
        "traffic": _traffic(report),
        "staleness": _staleness(report),
        "tensors": _tensors(report),
        "threads": {name: round(share, 3) for name, share in shares.items()},
        "profile": _profile(report),
        "shards": [_shard(line) for line in (report.get("shards") or ())[:MOST_LINES]],
        "standbys": _standbys(report),
        "tables": [_table(line) for line in (report.get("tables") or ())[:MOST_LINES]],
        "warnings": [*_warnings(report)],
    }


def _state(report: Report) -> dict[str, Any]:
    names = (
        *("policy", "version", "gradients", "ignored", "rate_gain", "parameters", "tensors"),
        *("kernels", "device", "versions_alive", "waiting", "aiops"),
    )
    found = {name: report[name] for name in names if name in report}
    memory, kept = report.get("memory") or {}, report.get("state") or {}
    return {
        **found,
        "ready": text(report.get("ready", "")),
        "mean_staleness": _number(report.get("mean_staleness")),
        "vbar": _number(report.get("vbar")),
        "refused": sum((report.get("refused") or {}).values()),
        "awaited": len(report.get("waited_for") or ()),
        "resident": memory.get("resident"),
        "bound": memory.get("bound"),
        "generation": kept.get("generation"),
        "standby_of": text(kept["standby_of"]) if "standby_of" in kept else None,
    }


def _settings(report: Report) -> dict[str, str]:
    given = [*(report.get("settings") or {}).items()][:MOST_LINES]
    return {text(str(name)): text(str(value)) for name, value in given}


def _traffic(report: Report) -> dict[str, Any]:
    ledger, budget = report.get("ledger") or {}, report.get("budget") or {}
    found = {}
    for way in ("pushed", "fetched"):
        flow = ledger.get(way) or {}
        avoided = ("reapplied", "skipped", "not_modified", "not_wanted")
        found[way] = {
            "bytes": flow.get("bytes", 0),
            "payload": flow.get("payload", 0),
            "raw": flow.get("raw", 0),
            "avoided": sum(flow.get(name, 0) for name in avoided),
        }
    names = ("bytes_per_second", "worker_bytes_per_second", "used", "backlog", "utilisation")
    gates = ("c_push", "c_fetch")
    found["budget"] = {name: _number(budget.get(name)) for name in (*names, *gates) if budget}
    return found


def _staleness(report: Report) -> list[int]:
    """Return how many gradients each bar of the histogram has."""
    counts = [0] * (len(STALENESS_BUCKETS) + 1)
    for tau, count in (report.get("staleness") or {}).items():
        counts[bisect_left(STALENESS_BUCKETS, int(tau))] += count
    return counts


def _tensors(report: Report) -> list[list[Any]]:
    """Return the largest tensors: name, size, usual gradient norm, statistic, parameters' norm."""
    found = report.get("by_tensor")
    if not found:
        return []
    sizes: Sequence[int] = found["sizes"]
    largest = sorted(range(len(sizes)), key=lambda index: (-sizes[index], index))[:MOST_LINES]
    norms, means, params = (found.get(name) for name in ("norm", "vbar", "params"))
    return [
        [
            text(found["names"][index]),
            sizes[index],
            _number(norms[index]) if norms else None,
            _number(means[index]) if means else None,
            _number(params[index]) if params else None,
        ]
        for index in largest
    ]


def _profile(report: Report) -> dict[str, float]:
    profile = report.get("profile") or {}
    return {what: cell["share"] for what, cell in profile.items() if what != "seconds"}


def _shard(line: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "shard": line["shard"],
        "gone": text(str(line["gone"] or "")),
        **{name: line[name] for name in ("bytes", "version", "behind")},
    }


def _standbys(report: Report) -> list[dict[str, Any]]:
    names = ("name", "behind_rows", "behind_seconds", "behind_bytes")
    rows = ((report.get("state") or {}).get("standbys") or ())[:MOST_LINES]
    return [{name: row.get(name) for name in names} for row in rows]


def _table(line: Mapping[str, Any]) -> dict[str, Any]:
    names = ("rows", "made", "evicted", "bytes", "version")
    return {"name": text(line["name"]), **{name: line[name] for name in names}}


def _warnings(report: Report) -> Iterator[str]:
    """Yield what a person should read, the most urgent first."""
    state = report.get("state") or {}
    for why in (state.get("ended"), state.get("snapshot_error"), state.get("no_feed")):
        if why:
            yield text(str(why))
    yield from map(text, (report.get("file_errors") or ())[:MOST_LINES])
    screened = report.get("filter") or {}
    if screened.get("quarantined"):
        yield text(f"quarantined: {', '.join(screened['quarantined'][:MOST_LINES])}")
    if report.get("corrupted"):
        yield f"{report['corrupted']:,} connections ended with a wrong checksum"
    yield from map(text, (report.get("warnings") or ())[:MOST_LINES])


def text(given: str) -> str:
    """Return a text cut to the length that is shown.

    >>> len(text("x" * 1000)) == LONGEST_TEXT
    True
    """
    return given if len(given) <= LONGEST_TEXT else given[: LONGEST_TEXT - 1] + "…"


def _number(value: float | None) -> float | None:
    return None if value is None or not math.isfinite(value) else float(f"{value:.6g}")
