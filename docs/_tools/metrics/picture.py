"""Draw a recorded run as the board of Grafana shows it: the same questions, asked of the record.

::

    python -m docs._tools.metrics.picture docs/results/monitoring.json docs/monitoring.png
"""

from __future__ import annotations

import argparse
import json
import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

from aiops.lab import drawing
from aiops.lab.figures import Figure, Panel, Series

_WINDOW = 4.0  # seconds over which a rate is taken

Line: TypeAlias = list[float]


class RecordedRun:
    """The series of a record, as `docs._tools.metrics.recording` writes it."""

    def __init__(self, record: Mapping[str, Any]) -> None:
        self.times: Line = record["times"]
        self._series: Mapping[str, Line] = {
            name: [math.nan if value is None else value for value in values]
            for name, values in record["series"].items()
        }

    def lines(self, name: str, **wanted: str) -> dict[str, Line]:
        """Return the series of a metric that have these labels, by their other labels' values."""
        found = {}
        for series, values in self._series.items():
            metric, _, rest = series.partition("{")
            labels = dict(re.findall(r'(\w+)="([^"]*)"', rest))
            if metric == name and wanted.items() <= labels.items():
                others = [value for label, value in labels.items() if label not in wanted]
                found[" ".join(others)] = values
        assert found, f"{name} is not in the record"
        return found

    def line(self, name: str, **wanted: str) -> Line:
        """Return the one series of a metric that has these labels and no other."""
        return self.lines(name, **wanted)[""]

    def rate(self, values: Sequence[float]) -> Line:
        """Return the increase per second over the last seconds, at each scrape but the first."""
        found, first = [math.nan], 0
        for now in range(1, len(self.times)):
            while self.times[now] - self.times[first] > _WINDOW and first < now - 1:
                first += 1
            seconds = self.times[now] - self.times[first]
            found.append((values[now] - values[first]) / seconds)
        return found

    def quantile(self, name: str, q: float) -> Line:
        """Return a quantile of a histogram over the last seconds, as ``histogram_quantile``."""
        by_bound = self.lines(f"{name}_bucket")
        bounds = sorted(map(float, by_bound))
        rates = {float(bound): self.rate(values) for bound, values in by_bound.items()}
        return [_quantile(bounds, [rates[b][n] for b in bounds], q) for n in range(len(self.times))]


def _quantile(bounds: Sequence[float], counts: Sequence[float], q: float) -> float:
    rank = q * counts[-1]
    if not counts[-1] > 0:
        return math.nan
    index = next(number for number, count in enumerate(counts) if count >= rank)
    if math.isinf(bounds[index]):
        return bounds[index - 1]
    if not index:
        return bounds[0]
    below, above = counts[index - 1], counts[index]
    return bounds[index - 1] + (bounds[index] - bounds[index - 1]) * (rank - below) / (
        above - below
    )


def _over(above: Sequence[float], below: Sequence[float]) -> Line:
    return [a / b if b > 0 else math.nan for a, b in zip(above, below, strict=True)]


def _sum(lines: Sequence[Sequence[float]]) -> Line:
    return [math.fsum(values) for values in zip(*lines, strict=True)]


def figure(record: Mapping[str, Any]) -> Figure:
    """Return the picture of a record; its panels have the names that they have on the board."""
    run = RecordedRun(record)

    def panel(title: str, unit: str, lines: Mapping[str, Line], **how: Any) -> Panel:
        drawn = [Series(label, run.times, [values]) for label, values in lines.items()]
        return Panel(title, "seconds", unit, drawn, **{"bottom": 0, **how})

    def rates(name: str, **wanted: str) -> dict[str, Line]:
        return {label: run.rate(line) for label, line in run.lines(name, **wanted).items()}

    staleness = "aiops_staleness_updates"
    mean = _over(run.rate(run.line(f"{staleness}_sum")), run.rate(run.line(f"{staleness}_count")))
    sent = rates("aiops_transfers_total", outcome="sent")
    shares = {}
    for direction, line in sent.items():
        every = [*rates("aiops_transfers_total", direction=direction).values()]
        shares[direction] = _over(line, _sum(every))
    traffic = {label: [v / 1e3 for v in line] for label, line in _traffic(run).items()}
    panels = [
        panel("Updates per second", "", {"updates": run.rate(run.line("aiops_updates_total"))}),
        panel(
            "Staleness",
            "updates",
            {"mean": mean, "99 %": run.quantile(staleness, 0.99)},
        ),
        panel("Gate: share sent", "", shares, top=1),
        panel("Traffic", "kB/s", traffic),
        panel("Pushes per second", "", rates("aiops_worker_pushes_total")),
        panel("Ready", "", {"ready": run.line("aiops_ready")}, top=1.1),
    ]
    title = "A run as Prometheus saw it: a worker leaves at 60 %, pushes are paused at 80 %"
    return Figure(title, panels, 3)


def _traffic(run: RecordedRun) -> dict[str, Line]:
    lines = run.lines("aiops_traffic_bytes_total")
    return {label: run.rate(line) for label, line in lines.items()}


def main() -> None:
    """Draw the record named on the command line."""
    parser = argparse.ArgumentParser(prog="python -m docs._tools.metrics.picture")
    parser.add_argument("record", type=Path)
    parser.add_argument("picture", type=Path)
    chosen = parser.parse_args()
    record = json.loads(chosen.record.read_text(encoding="utf-8"))
    drawing.save(figure(record), chosen.picture.with_suffix(""), (chosen.picture.suffix,))


if __name__ == "__main__":
    main()
