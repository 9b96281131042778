"""Numbers of a run at one moment, for trackers of experiments: one value for each name."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

Report = Mapping[str, Any]

PREFIX = "server/"
"""What the names of the server's own numbers begin with; trackers make a group of them."""

_PLAIN: Mapping[str, tuple[str, ...]] = {
    "version": ("version",),
    "gradients": ("gradients",),
    "ignored": ("ignored",),
    "rate_gain": ("rate_gain",),
    "vbar": ("vbar",),
    "resident_bytes": ("memory", "resident"),
}
_RATES: Mapping[str, tuple[str, ...]] = {
    "updates_per_second": ("version",),
    "received_bytes_per_second": ("ledger", "pushed", "bytes"),
    "sent_bytes_per_second": ("ledger", "fetched", "bytes"),
}


class RunScalars:
    """Makes the numbers of a run from one report of its server after another.

    What workers have logged (`aiops.Worker.log`) has the name that they gave it, and the mean over
    them. The server's own numbers begin with ``server/``; rates and the mean staleness are those
    since the report before, so the first has none.
    """

    def __init__(self) -> None:
        self._last: tuple[float, Report] | None = None

    def take(self, time: float, report: Report) -> dict[str, float]:
        """Return the numbers of a report, those that are finite.

        Parameters
        ----------
        time
            When it was made, in seconds.
        report
            The server's (`aiops.engine.statistics`).
        """
        last, self._last = self._last, (time, report)
        found: dict[str, Any] = {name: mean for name, (mean, *_) in _logged(report)}
        own = {name: value_at(report, *path) for name, path in _PLAIN.items()}
        counts = report.get("worker_counts") or {}
        own["workers"] = counts.get("active", 0) + counts.get("silent", 0) if counts else None
        own["refused"] = sum((report.get("refused") or {}).values())
        if last is not None and time > last[0]:
            for name, path in _RATES.items():
                own[name] = rate(last[1], report, time - last[0], *path)
            own["staleness"] = staleness_between(last[1], report)
        found |= {PREFIX + name: value for name, value in own.items()}
        return {name: float(value) for name, value in found.items() if _is_finite(value)}


def value_at(report: Report, *path: str) -> Any:
    """Return what a report has at a path of keys; None where it lacks one."""
    found: Any = report
    for key in path:
        found = (found or {}).get(key)
    return found


def rate(before: Report, now: Report, passed: float, *path: str) -> float | None:
    """Return by how much a count rises in a second; None: it has fallen, or is missing."""
    counts = [value_at(each, *path) for each in (before, now)]
    if None in counts or counts[1] < counts[0]:
        return None
    return float(counts[1] - counts[0]) / passed


def staleness_between(before: Report, now: Report) -> float | None:
    """Return the mean staleness of the gradients used between two reports; None: there are none."""
    used = now.get("gradients", 0) - before.get("gradients", 0)
    if used <= 0:
        return None
    totals = [each.get("mean_staleness", 0.0) * each.get("gradients", 0) for each in (before, now)]
    return float(max(0.0, (totals[1] - totals[0]) / used))


def _logged(report: Report) -> Iterator[tuple[str, Any]]:
    yield from (report.get("logged") or {}).items()


def _is_finite(value: Any) -> bool:
    return isinstance(value, int | float) and math.isfinite(value)
