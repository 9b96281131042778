"""A server's report as a few numbers and a row for each client, for a terminal."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from aiops.dashboard.document import Report

Row = dict[str, Any]

_OVERDUE = 3.0
"""Times its usual interval after which a worker's rate falls, as the time since its last push
says."""


class Count(NamedTuple):
    """A worker's gradients so far, and when its last push was answered."""

    pushes: int
    answered: float


class Overview(NamedTuple):
    """A server at one moment.

    Attributes
    ----------
    facts
        Numbers by name; None: not known, as rates are at the first report.
    rows
        The clients that are connected. Of each ``rate`` is in gradients per second, between its
        last pushes before the last two reports that differ; ``idle`` the share of its time that it
        waits for the server, between the last two times that it said so; ``unused`` the number of
        gradients that were refused or ignored; ``silence`` is in seconds.
    names
        Of the numbers that clients log.
    counts
        By worker: from what on its next rate is measured.
    """

    facts: dict[str, Any]
    rows: list[Row]
    names: list[str]
    counts: Mapping[int, Count] = {}

    @classmethod
    def of(
        cls, now: Report, before: Report | None = None, last: Overview | None = None
    ) -> Overview:
        """Return that of a report, with rates since the one before, if there is one.

        ``last``: the overview of the one before.
        """
        passed = now["seconds"] - before["seconds"] if before else 0.0  # wall clocks are set
        known = {line["worker"]: line for line in before["workers"]} if before else {}
        shown = {row["worker"]: row for row in last.rows} if last else {}
        counts = dict(last.counts) if last else {}
        if before and not last:
            counts = {number: _count(before, line) for number, line in known.items()}
        lines = {line["worker"]: line for line in now["workers"] if line["present"]}
        rows = [_row(line, known.get(n), shown.get(n)) for n, line in lines.items()]
        for row in rows:
            number = row["worker"]
            count, rate = _count(now, lines[number]), shown.get(number, row)["rate"]
            found = _push_rate(count, counts.get(number), rate, now["seconds"])
            row["rate"], counts[number] = found
        counts = {number: counts[number] for number in lines}
        logged: Mapping[str, Sequence[float]] = now["logged"]
        facts = {
            "policy": now["policy"],
            "seconds": now["seconds"],
            "version": now["version"],
            "updates_per_second": _rate(before, now, passed, "version"),
            "mean_staleness": now["mean_staleness"],
            "workers": sum(row["state"] != "observer" for row in rows),
            "silent": sum(row["state"] == "silent" for row in rows),
            "refused": sum(now["refused"].values()),
            "paused": now["paused"],
            "received_per_second": _traffic(before, now, passed, "pushed"),
            "sent_per_second": _traffic(before, now, passed, "fetched"),
            "budget": (now["budget"] or {}).get("bytes_per_second"),
            "memory": (now["memory"] or {}).get("resident"),
            "logged": {name: values[0] for name, values in logged.items()},
            "warnings": len(now["warnings"]),
        }
        return cls(facts, rows, [*logged], counts)

    def sorted_by(self, name: str, *, reverse: bool = False) -> list[Row]:
        """Return the rows in the order of a column (`KEYS`, or the name of a logged number)."""
        key = KEYS.get(name) or (lambda row: -row["logged"].get(name, -math.inf))
        return sorted(self.rows, key=lambda row: (key(row), row["worker"]), reverse=reverse)


KEYS: Mapping[str, Callable[[Row], Any]] = {
    "name": lambda row: (row["state"] == "observer", _natural(row["name"])),
    "state": lambda row: row["state"],
    "rate": lambda row: -(row["rate"] or 0.0),
    "idle": lambda row: -(row["idle"] or 0.0),
    "staleness": lambda row: -row["staleness"],
    "pushes": lambda row: -row["pushes"],
    "unused": lambda row: -row["unused"],
    "received": lambda row: -row["received"],
    "sent": lambda row: -row["sent"],
    "silence": lambda row: -row["silence"],
}
"""The columns by which rows can be sorted, the largest number first."""


def _natural(name: str) -> list[tuple[int, str]]:
    """Return the key by which numbers in names count as numbers.

    >>> sorted(["w10", "w2", "a"], key=_natural)
    ['a', 'w2', 'w10']
    """
    parts = re.split(r"([0-9]{1,18})", name)
    return [(int(part), "") if n % 2 else (-1, part) for n, part in enumerate(parts)]


def _row(line: Mapping[str, Any], before: Mapping[str, Any] | None, last: Row | None) -> Row:
    state = "observer" if line["role"] != "worker" else "silent" if line["excused"] else "worker"
    return {
        "worker": line["worker"],
        "name": line["name"],
        "state": state,
        "rate": None,
        "idle": _idle(before, line, last),
        "staleness": line["staleness"],
        "pushes": line["pushes"],
        "unused": line["refused"] + line["ignored"],
        "received": line["bytes_pushed"],
        "sent": line["bytes_fetched"],
        "silence": line["seconds_since_answer"],
        "logged": line["logged"],
    }


def _count(report: Report, line: Mapping[str, Any]) -> Count:
    return Count(line["pushes"], report["seconds"] - line["seconds_since_answer"])


def _push_rate(
    now: Count, first: Count | None, rate: float | None, seconds: float
) -> tuple[float | None, Count]:
    """Return a worker's gradients per second, and the count that the next are to be measured from.

    They are measured from answer to answer, so a worker with fewer gradients than reports has an
    even rate. After more than its usual time without one the rate falls as that time grows.
    ``rate``: as it was at the report before. ``seconds``: the time of this one.
    """
    if first is None or now.pushes < first.pushes or seconds < first.answered:
        return None, now
    if now.pushes > first.pushes and now.answered > first.answered:
        rate, first = (now.pushes - first.pushes) / (now.answered - first.answered), now
    silence = seconds - first.answered
    return min(rate, _OVERDUE / silence) if rate and silence > 0 else rate, first


def _idle(
    before: Mapping[str, Any] | None, now: Mapping[str, Any], last: Row | None
) -> float | None:
    """Return the share of a worker's time that it waits; None: it does not say."""
    names = ("compute_seconds", "idle_seconds")
    if any(now[name] is None for name in names):
        return None
    first = [(before or {}).get(name) or 0.0 for name in names]
    compute, idle = (now[name] - since for name, since in zip(names, first, strict=True))
    if compute + idle <= 0 and last and last["idle"] is not None:  # it has said nothing since
        return float(last["idle"])
    if compute + idle <= 0:
        compute, idle = (now[name] for name in names)
    return idle / (compute + idle) if compute + idle > 0 else None


def _traffic(before: Report | None, now: Report, passed: float, way: str) -> float | None:
    first = before["ledger"][way] if before else None
    return _rate(first, now["ledger"][way], passed, "bytes")


def _rate(
    before: Mapping[str, Any] | None, now: Mapping[str, Any], passed: float, name: str
) -> float | None:
    """Return by how much a number has risen in a second; None: that is not known."""
    if before is None or passed <= 0 or now[name] < before[name]:
        return None
    return float(now[name] - before[name]) / passed
