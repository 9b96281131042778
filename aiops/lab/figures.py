"""A figure as a value: panels, and the series of data in them. `aiops.lab.drawing` draws it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

KINDS = ("line", "bars", "points", "rows")


@dataclass(frozen=True)
class Series:
    """The data that is drawn in one colour.

    Attributes
    ----------
    label
        Lines of one label have one colour in all panels, and one entry in the legend.
    x
        The places, float[n].
    ys
        The values of each seed at each x, float[seeds, n]; nan where there is none.
    kind
        ``line``: their mean, in a band from least to most. ``bars``: the same, as bars.
        ``points``: each for itself. ``rows``: as bars are, but each of x is a row, the values go
        to the right, and the mean is a dot on a bar from least to most; where not all seeds have
        a value the number of those that have is written.
    median
        Whether the middle is the median instead of the mean.
    """

    label: str
    x: Sequence[float]
    ys: Sequence[Sequence[float]]
    kind: str = "line"
    median: bool = False

    def __post_init__(self) -> None:
        """Check that it can be drawn."""
        assert self.kind in KINDS, self.kind
        assert all(len(y) == len(self.x) for y in self.ys), self.label


@dataclass(frozen=True)
class Panel:
    """One pair of axes; ``log`` names those that are logarithmic, ``"x"``, ``"y"`` or ``"xy"``.

    ``bottom`` and ``top`` are where the axis of y begins and ends, if not where the lines do;
    ``ticks`` name x = 0, 1, 2 and so on, if they are not numbers. Lines of rows stand on their
    side: the ticks name the rows, from above, and ``bottom`` and ``top`` are left and right.
    """

    title: str
    xlabel: str
    ylabel: str
    lines: Sequence[Series]
    log: str = ""
    bottom: float | None = None
    top: float | None = None
    ticks: Sequence[str] = ()

    def __post_init__(self) -> None:
        """Check that it can be drawn."""
        rows = [row for line in self.lines if line.kind == "rows" for row in line.x]
        if rows:
            assert max(rows) < len(self.ticks), f"{self.title}: rows without names"
            assert {line.kind for line in self.lines} == {"rows"}, f"{self.title}: not rows alone"


@dataclass(frozen=True)
class Figure:
    """Panels row by row, ``columns`` of them in a row.

    Panels of rows share these, which the first of them names.
    """

    title: str
    panels: Sequence[Panel]
    columns: int
