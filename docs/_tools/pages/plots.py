"""An algorithm among its neighbours, as a figure: test accuracy against samples seen."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path

from aiops.lab import drawing
from aiops.lab.figures import Figure, Panel, Series
from docs._tools.pages.curves import Curve, Curves

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
        shown = [curve for each in (name, *neighbours) if (curve := curves.of(each))]
        if curves.of(name):
            written += drawing.save(figure(shown), folder / name, (".png",))
    return written


def figure(curves: Sequence[Curve]) -> Figure:
    """Return the figure of some curves: means over their seeds, in bands from least to most."""
    lines = [
        Series(
            f"{curve.policy}: {100 * curve.mean:.1f} %",
            curve.samples,
            [[100 * accuracy for accuracy in seed] for seed in zip(*curve.accuracies, strict=True)],
        )
        for curve in curves
    ]
    low, high = limits(curves)
    axes = "training samples seen by all workers", "test accuracy (%)"
    subject, *others = (curve.policy for curve in curves)
    title = f"{subject} beside {', '.join(others)}" if others else subject
    return Figure(title, [Panel("", *axes, lines, bottom=low, top=high)], columns=1)


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
