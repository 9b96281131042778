"""An algorithm among its neighbours, as a figure: test accuracy against samples seen."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy

from aiops.lab import figure_style
from aiops.lab.figure_style import BLUE, GREEN, ORANGE, thousands
from docs._tools.pages.curves import Curve, Curves

_SUBJECT = ORANGE
_OTHERS = (BLUE, GREEN, "#8a6fb0", "#7f7f7f")
_SIZE = (7.2, 3.6)  # inches
_LABEL = 0.062  # height of a label, as a share of the axis
_SHOWN = 0.06  # accuracy shown below where the worst curve ends


def draw_all(curves: Curves, names: Mapping[str, Sequence[str]], folder: Path) -> list[Path]:
    """Draw each algorithm that was run, with those of its neighbours that were.

    Parameters
    ----------
    curves
        What was measured.
    names
        Each algorithm's neighbours, by its name.
    folder
        Where ``NAME.png`` is written.

    Returns
    -------
    The files written.

    Raises
    ------
    UsageError
        When matplotlib is missing.
    """
    written = []
    for name, neighbours in names.items():
        subject = curves.of(name)
        if subject is not None:
            others = [curve for other in neighbours if (curve := curves.of(other))]
            written.append(folder / f"{name}.png")
            draw(subject, others, written[-1])
    return written


def draw(subject: Curve, others: Sequence[Curve], path: Path) -> None:
    """Draw one figure: each curve the mean over its seeds, in a band from least to most."""
    with figure_style.figure(_SIZE, figure__dpi=140) as figure:
        from PIL import Image  # matplotlib brings it

        _fill(figure.subplots(), subject, others)
        figure.canvas.draw()
        picture = Image.fromarray(numpy.asarray(figure.canvas.buffer_rgba())).convert("RGB")
    path.parent.mkdir(parents=True, exist_ok=True)
    # A palette makes the files a quarter of what they were, and is not to be seen.
    picture.quantize(128, dither=Image.Dither.NONE).save(path, optimize=True)


def _fill(axes: Any, subject: Curve, others: Sequence[Curve]) -> None:
    """Draw the curves, the subject on top, and a label at the end of each."""
    colours = [_OTHERS[number % len(_OTHERS)] for number in range(len(others))]
    drawn = [*zip(others, colours, strict=True), (subject, _SUBJECT)]
    low, high = limits([curve for curve, _colour in drawn])
    for curve, colour in drawn:
        chosen = curve is subject
        means = [100 * statistics.fmean(point) for point in curve.accuracies]
        if curve.seeds > 1:
            axes.fill_between(
                curve.samples,
                [100 * min(point) for point in curve.accuracies],
                [100 * max(point) for point in curve.accuracies],
                color=colour,
                alpha=0.22 if chosen else 0.12,
                linewidth=0,
            )
        axes.plot(curve.samples, means, color=colour, linewidth=2.2 if chosen else 1.2)
    last = max(1, *(curve.samples[-1] for curve, _colour in drawn))
    axes.set_xlim(0, last)
    axes.set_ylim(low, high)
    ends = [100 * statistics.fmean(curve.accuracies[-1]) for curve, _colour in drawn]
    for (curve, colour), height in zip(
        drawn, spread(ends, low, high, _LABEL * (high - low)), strict=True
    ):
        axes.annotate(
            f"{curve.policy}  {100 * statistics.fmean(curve.accuracies[-1]):.1f}",
            (last, height),
            xytext=(6, 0),
            textcoords="offset points",
            va="center",
            color=colour,
            fontweight="bold" if curve is subject else "normal",
            annotation_clip=False,
        )
    axes.xaxis.set_major_formatter(thousands)
    axes.set_xlabel("training samples seen by all workers")
    axes.set_ylabel("test accuracy (%)")


def limits(curves: Sequence[Curve]) -> tuple[float, float]:
    """Return the accuracies (in per cent) to show: where the curves end, and a little below.

    A curve that never learnt anything does not flatten the others: it is below the axis.
    """
    ends = [curve.mean for curve in curves]
    best = max(ends)
    worst = min(end for end in ends if end >= best - 0.3)
    low = max(0.0, math.floor(100 * (worst - _SHOWN)))
    top = max(max(max(point) for point in curve.accuracies) for curve in curves)
    return low, min(100.0, max(100 * top + 0.5, low + 1.0))


def spread(heights: Sequence[float], low: float, high: float, gap: float) -> list[float]:
    """Move labels apart, so that they are ``gap`` from each other, in the same order.

    >>> spread([5.0, 5.0, 1.0], 0.0, 10.0, 2.0)
    [4.0, 6.0, 1.0]
    """
    order = sorted(range(len(heights)), key=lambda index: heights[index])
    placed = [min(max(heights[index], low), high) for index in order]
    for _ in range(len(placed) ** 2):  # push neighbours apart, evenly, until all have room
        crowded = False
        for at in range(len(placed) - 1):
            missing = gap - (placed[at + 1] - placed[at])
            if missing > 1e-9:
                placed[at] -= missing / 2
                placed[at + 1] += missing / 2
                crowded = True
        if not crowded:
            break
    result = [0.0] * len(heights)
    for index, height in zip(order, placed, strict=True):
        result[index] = height
    return result
