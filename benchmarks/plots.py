"""What the benchmarks' figures have in common; `aiops.experiments.drawing` draws them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from aiops.experiments.figure import Line, Panel
from benchmarks import report


def rounds(label: str, cells: Sequence[Mapping[str, Any]], key: str, times: float = 1.0) -> Line:
    """Make a line of a figure's medians, in a band of its rounds.

    Parameters
    ----------
    label
        The line's.
    cells
        What was measured at each x: with ``rounds``, or without where there is nothing.
    key
        The figure's name in a round.
    times
        By which it is multiplied.
    """
    columns = [
        [times * one[key] for one in cell.get("rounds", ()) if key in one and not failed(cell)]
        for cell in cells
    ]
    count = max(map(len, columns), default=0)
    ys = [
        [column[number] if number < len(column) else math.nan for column in columns]
        for number in range(count)
    ]
    return Line(label, range(len(cells)), ys, median=True)


def latencies(title: str, contenders: Mapping[str, Mapping[str, Any]]) -> Panel:
    """Make a panel of latency percentiles, a line for each contender that has them."""
    keys = list(report.PERCENTILES)
    lines = [
        Line(name, range(len(keys)), [[figures[key] for key in keys]])
        for name, figures in contenders.items()
        if all(key in figures for key in keys)
    ]
    return Panel(title, "percentile", "latency, µs", lines, "y", ticks=report.PERCENTILE_NAMES)


def failed(cell: Mapping[str, Any]) -> bool:
    """Tell whether figures are none, because who made them failed in the end."""
    return bool(cell.get("failed"))
