"""The series and panels that the benchmarks' figures have in common."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from aiops.lab.figures import Panel, Series
from benchmarks import report


def rounds(label: str, cells: Sequence[Mapping[str, Any]], key: str, times: float = 1.0) -> Series:
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
    return Series(label, range(len(cells)), ys, median=True)


def rows(label: str, found: Mapping[int, Mapping[str, float]], times: float = 1.0) -> Series:
    """Make a line of rows: dots at medians, on bars from the least to the greatest.

    Parameters
    ----------
    label
        The line's.
    found
        A `report.spread` for each row that has one, by the row's number.
    times
        By which the figures are multiplied.
    """
    ys = [[times * each[key] for each in found.values()] for key in ("median", "min", "max")]
    return Series(
        label, list(found), ys, "rows", median=True
    )  # of these three, too, it is the median


def once(label: str, found: Mapping[int, float]) -> Series:
    """Make a line of rows of figures that have no spread, by the row's number."""
    return Series(label, list(found), [list(found.values())], "rows")


def latencies(title: str, contenders: Mapping[str, Mapping[str, Any]]) -> Panel:
    """Make a panel of latency percentiles, a line for each contender that has them."""
    keys = list(report.PERCENTILES)
    lines = [
        Series(name, range(len(keys)), [[figures[key] for key in keys]])
        for name, figures in contenders.items()
        if all(key in figures for key in keys)
    ]
    return Panel(title, "percentile", "latency, µs", lines, "y", ticks=report.PERCENTILE_NAMES)


def crowd(count: int) -> str:
    """Write a number of workers."""
    return f"{count} worker{'s' * (count != 1)}"


def failed(cell: Mapping[str, Any]) -> bool:
    """Return whether a cell has no figures, because its contender failed in the end."""
    return bool(cell.get("failed"))
