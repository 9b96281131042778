"""Figures on paper: legible at a column's width, in colours that the colour-blind tell apart."""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from aiops.demo.plot import STYLE
from aiops.errors import UsageError
from aiops.experiments.figure import Figure, Line, Panel

# Okabe and Ito, "Color universal design", 2008; their yellow is too pale for a line.
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#000000")
_DASHES = ("-", "--", "-.", ":")
_SIZE = {1: (4.2, 2.9), 2: (3.4, 2.5), 3: (2.5, 2.1), 4: (2.1, 1.9)}  # inches, by columns
_SUFFIXES = (".png", ".svg")


def save(figure: Figure, stem: Path) -> list[Path]:
    """Draw a figure; return the files, ``STEM.png`` and ``STEM.svg``.

    Raises
    ------
    UsageError
        When matplotlib is missing, or a file cannot be written.
    """
    try:
        import matplotlib
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure as Paper
    except ImportError:
        raise UsageError("figures need matplotlib: pip install 'aiops-ps[demo]'") from None
    rows = math.ceil(len(figure.panels) / figure.columns)
    width, height = _SIZE[min(figure.columns, max(_SIZE))]
    style = {**STYLE, "font.size": 8.0, "axes.titlesize": 8.0, "lines.linewidth": 1.2}
    colours = _colours(figure)
    with matplotlib.rc_context(style):
        size = width * figure.columns, height * rows + 0.3 + 0.17 * (len(colours) // 3 + 1)
        paper = Paper(figsize=size, layout="constrained")
        FigureCanvasAgg(paper)
        places = paper.subplots(rows, figure.columns, squeeze=False).flatten().tolist()
        for place in places[len(figure.panels) :]:
            place.set_axis_off()
        for panel, place in zip(figure.panels, places, strict=False):
            _draw(panel, place, colours)
        paper.suptitle(figure.title, x=0.01, ha="left", fontsize=9, fontweight="bold")
        _legend(paper, places, colours, 2 if figure.columns == 1 else 2 * figure.columns - 1)
        files = [stem.with_suffix(suffix) for suffix in _SUFFIXES]
        try:
            for path in files:
                # Without a date, equal results are equal files.
                metadata = {"Date": None} if path.suffix == ".svg" else None
                paper.savefig(path, dpi=200, metadata=metadata)
        except OSError as error:
            raise UsageError(f"{stem} cannot be written: {error.strerror}") from None
    return files


def _colours(figure: Figure) -> dict[str, tuple[str, str]]:
    """Return each label's colour and dashes."""
    labels = dict.fromkeys(line.label for panel in figure.panels for line in panel.lines)
    count = len(COLOURS)
    return {
        label: (COLOURS[number % count], _DASHES[number // count % len(_DASHES)])
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


def _draw(panel: Panel, axes: Any, colours: dict[str, tuple[str, str]]) -> None:
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
    for which, scale in (("x", axes.set_xscale), ("y", axes.set_yscale)):
        if which in panel.log:
            scale("log")
    if "y" in panel.log:
        for formatter in (axes.yaxis.set_major_formatter, axes.yaxis.set_minor_formatter):
            formatter(_sparse)
    if "x" not in panel.log:
        axes.xaxis.set_major_formatter(_thousands)
        axes.locator_params(axis="x", nbins=5)
    if panel.bottom is not None:
        axes.set_ylim(bottom=panel.bottom)
    if panel.top is not None:
        axes.set_ylim(top=panel.top)
    axes.set_title(panel.title)
    axes.set_xlabel(panel.xlabel)
    axes.set_ylabel(panel.ylabel)


def _line(line: Line, axes: Any, colour: str, dashes: str) -> None:
    if not line.x or not line.ys:
        return
    ys = np.asarray(line.ys, float)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # an x at which no seed has a value
        low, middle, high = np.nanmin(ys, 0), np.nanmean(ys, 0), np.nanmax(ys, 0)
    if len(ys) > 1:
        axes.fill_between(line.x, low, high, color=colour, alpha=0.2, linewidth=0)
    few = "o" if len(line.x) <= 12 else None
    axes.plot(line.x, middle, dashes, color=colour, label=line.label, marker=few)


def _bars(line: Line, axes: Any, colour: str, place: int, count: int) -> None:
    if not line.x or not line.ys:
        return
    ys = np.asarray(line.ys, float)
    width = 0.85 / count
    at = np.asarray(line.x) + (place - (count - 1) / 2) * width
    axes.bar(at, np.nan_to_num(ys).mean(0), width, color=colour, label=line.label)


def _thousands(value: float, _position: Any = None) -> str:
    return f"{value:,.0f}" if value == round(value) else f"{value:g}"


def _sparse(value: float, _position: Any = None) -> str:
    """Label a logarithmic axis with plain numbers, and not too many."""
    return f"{value:g}" if f"{value:e}"[0] in "125" else ""
