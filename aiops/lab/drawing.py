"""Draws `aiops.lab.figures` with matplotlib, legible at a column's width."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from aiops.lab import figure_style
from aiops.lab.figure_style import GREY, MARKERS, SUFFIXES, short, sparse, thousands
from aiops.lab.figures import Figure, Panel, Series

_SIZE = {1: (4.2, 2.9), 2: (3.4, 2.5), 3: (2.5, 2.1), 4: (2.1, 1.9)}  # inches, by columns
_SMALL = {"font__size": 8.0, "axes__titlesize": 8.0, "lines__linewidth": 1.2}
_ROW = 0.155  # inches: its height
_LYING = {1: 2.9, 2: 1.9, 3: 1.5, 4: 1.22}  # inches: the width of a panel of rows, by columns
_NARROW_FROM = 3  # panels in a row
_NAMES = (1.1, 0.07)  # inches: what the rows' names take, at least and for each character
_MANY, _MANY_NARROW = 2e5, 5e4  # what goes beyond is numbered in thousands and millions
_ENTRY = (0.6, 0.052)  # inches: what a legend's entry takes, and for each character
_NARROW, _WIDE = 2, 1e4  # ranges for which a logarithmic axis has no use, or only decades fit


def save(figure: Figure, stem: Path, suffixes: Sequence[str] = SUFFIXES) -> list[Path]:
    """Draw a figure; return the files, ``STEM.png`` and ``STEM.svg``, or those of ``suffixes``.

    Raises
    ------
    UsageError
        When matplotlib is missing, or a file cannot be written.
    """
    rows = math.ceil(len(figure.panels) / figure.columns)
    colours = _colours(figure)
    size = _size(figure, rows)
    legend = _columns(size[0], colours)
    height = size[1] + 0.3 + 0.17 * math.ceil(len(colours) / legend)
    with figure_style.figure((size[0], height), **_SMALL) as paper:
        places = paper.subplots(rows, figure.columns, squeeze=False).flatten().tolist()
        for place in places[len(figure.panels) :]:
            place.set_axis_off()
        for number, (panel, place) in enumerate(zip(figure.panels, places, strict=False)):
            _draw(panel, place, colours, narrow=figure.columns >= _NARROW_FROM)
            if number % figure.columns and _lies(panel) and _lies(figure.panels[number - 1]):
                place.tick_params(labelleft=False)  # the panel beside it names the rows
            elif figure.columns > _NARROW_FROM and place.get_xscale() == "linear":
                place.locator_params(axis="x", nbins=2)  # there is no room for more numbers
        figure_style.title(paper, figure.title, 9)
        _legend(paper, places, colours, legend)
        files = [stem.with_name(stem.name + suffix) for suffix in suffixes]
        return [figure_style.save(paper, path) for path in files]


def _lies(panel: Panel) -> bool:
    return any(line.kind == "rows" for line in panel.lines)


def _columns(width: float, labels: Iterable[str]) -> int:
    """Return in how many columns a legend fits under a figure of this width, in inches."""
    once, each = _ENTRY
    longest = max((len(label) for label in labels), default=0)
    return max(1, int(width / (once + each * longest)))


def _size(figure: Figure, rows: int) -> tuple[float, float]:
    """Return width and height in inches, without the legend."""
    if all(_lies(panel) for panel in figure.panels):
        width = _LYING[min(figure.columns, max(_LYING))]
        most = max(len(panel.ticks) for panel in figure.panels)
        least, each = _NAMES
        names = max(len(name) for panel in figure.panels for name in panel.ticks)
        across = max(least, each * names) + width * figure.columns
        return across, (0.6 + _ROW * most) * rows
    width, height = _SIZE[min(figure.columns, max(_SIZE))]
    return width * figure.columns, height * rows


def _colours(figure: Figure) -> dict[str, tuple[str, str]]:
    """Return each label's colour and dashes."""
    labels = dict.fromkeys(line.label for panel in figure.panels for line in panel.lines)
    return {
        label: (figure_style.colour(number), figure_style.dashes(number))
        for number, label in enumerate(labels)
    }


def _legend(paper: Any, places: Sequence[Any], colours: dict[str, Any], columns: int) -> None:
    entries: dict[str, Any] = {}
    for place in places:
        handles, labels = place.get_legend_handles_labels()
        entries |= dict(zip(labels, handles, strict=True))
    shown = [label for label in colours if label in entries]
    paper.legend(
        [entries[label] for label in shown],
        shown,
        loc="outside lower left",
        ncols=columns,
        fontsize=7,
    )


def _draw(panel: Panel, axes: Any, colours: dict[str, tuple[str, str]], *, narrow: bool) -> None:
    if _lies(panel):
        _lying(panel, axes, colours)
        return
    bars = [line for line in panel.lines if line.kind == "bars"]
    for line in panel.lines:
        colour, dashes = colours[line.label]
        if line.kind == "bars":
            _bars(line, axes, colour, bars.index(line), len(bars))
        elif line.kind == "points":
            for y in line.ys:
                axes.plot(line.x, y, "o", color=colour, markersize=2.5, alpha=0.5, mew=0)
            axes.plot([], [], "o", color=colour, label=line.label)
        else:
            _line(line, axes, colour, dashes)
    for which in "xy":
        many = _MANY_NARROW if narrow else _MANY
        _scale(axes, which, logarithmic=which in panel.log, many=many)
    if panel.ticks:
        axes.set_xticks(range(len(panel.ticks)), panel.ticks)
        axes.grid(visible=False, axis="x")
    if panel.bottom is not None:
        axes.set_ylim(bottom=panel.bottom)
    if panel.top is not None:
        axes.set_ylim(top=panel.top)
    axes.set_title(panel.title)
    axes.set_xlabel(panel.xlabel)
    axes.set_ylabel(panel.ylabel)


def _scale(axes: Any, which: str, *, logarithmic: bool, many: float = _MANY) -> None:
    """Set the scale of an axis, and how its numbers are written."""
    axis = getattr(axes, f"{which}axis")
    low, high = getattr(axes, f"get_{which}lim")()
    if not logarithmic or 0 < low < high < _NARROW * low:
        if high > many:
            axis.set_major_formatter(short)
        elif which == "x":
            axis.set_major_formatter(thousands)
        if which == "x":
            axes.locator_params(axis="x", nbins=5)
        return
    getattr(axes, f"set_{which}scale")("log")
    low, high = getattr(axes, f"get_{which}lim")()
    if high < _WIDE * low:
        for formatter in (axis.set_major_formatter, axis.set_minor_formatter):
            formatter(sparse)


def _line(line: Series, axes: Any, colour: str, dashes: str) -> None:
    if not line.x or not line.ys:
        return
    ys = np.asarray(line.ys, float)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # an x at which no seed has a value
        middle = np.nanmedian(ys, 0) if line.median else np.nanmean(ys, 0)
        low, high = np.nanmin(ys, 0), np.nanmax(ys, 0)
    if len(ys) > 1:
        axes.fill_between(line.x, low, high, color=colour, alpha=0.2, linewidth=0)
    few = "o" if len(line.x) <= 12 else None
    if len(line.x) == 1:
        axes.vlines(line.x, low, high, color=colour)
    axes.plot(line.x, middle, dashes, color=colour, label=line.label, marker=few)


def _bars(line: Series, axes: Any, colour: str, place: int, count: int) -> None:
    if not line.x or not line.ys:
        return
    ys = np.asarray(line.ys, float)
    width = 0.85 / count
    at = np.asarray(line.x) + (place - (count - 1) / 2) * width
    axes.bar(at, np.nan_to_num(ys).mean(0), width, color=colour, label=line.label)


def _lying(panel: Panel, axes: Any, colours: dict[str, tuple[str, str]]) -> None:
    """Draw a panel of rows."""
    for number, line in enumerate(panel.lines):
        _rows(line, axes, colours[line.label][0], MARKERS[number % len(MARKERS)])
    anything = any(math.isfinite(v) for line in panel.lines for ys in line.ys for v in ys)
    _scale(axes, "x", logarithmic="x" in panel.log and anything)
    if panel.bottom is not None:
        axes.set_xlim(left=panel.bottom)
    if panel.top is not None:
        axes.set_xlim(right=panel.top)
    axes.set_yticks(range(len(panel.ticks)), panel.ticks)
    axes.set_ylim(len(panel.ticks) - 0.4, -0.6)  # from above
    axes.tick_params(axis="y", length=0, pad=2)
    axes.tick_params(axis="x", which="both", labelsize=7)
    axes.spines["left"].set_visible(False)
    axes.grid(visible=False, axis="y")
    axes.grid(axis="x", color="#d0d0d0")
    for row in range(0, len(panel.ticks), 2):  # so that the eye stays in its row
        axes.axhspan(row - 0.5, row + 0.5, color="black", alpha=0.05, linewidth=0)
    axes.set_title(panel.title)
    axes.set_xlabel(panel.xlabel, fontsize=7)


def _rows(line: Series, axes: Any, colour: str, mark: str) -> None:
    """Draw what belongs to some of the rows."""
    seeds = [[value for value in row if math.isfinite(value)] for row in zip(*line.ys, strict=True)]
    axes.plot([], [], mark, color=colour, markersize=4, label=line.label)
    for row, values in zip(line.x, seeds, strict=False):
        if values:
            axes.plot(
                [min(values), max(values)], [row, row], color=colour, linewidth=2.6, alpha=0.4
            )
        if len(values) == len(line.ys):
            middle = np.median(values) if line.median else np.mean(values)
            axes.plot(middle, row, mark, color=colour, markersize=4, clip_on=False)
            continue
        axes.plot(values, [row] * len(values), mark, color=colour, markersize=3, mfc="none")
        text = f"{len(values)} of {len(line.ys)}" if values else "–"
        axes.annotate(
            text,
            (1.0, row),
            xycoords=("axes fraction", "data"),
            ha="right",
            va="center",
            fontsize=6,
            color=GREY,
        )
