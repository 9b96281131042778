"""Series of numbers over a run of any length, in bounded memory."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping

Columns = dict[str, list[float | None]]

FINE = 600
"""Points that are kept as they were added: the last ones."""

COARSE = 600
"""Points that all before them are averaged into, at most."""

MOST_NAMES = 32
"""Names of series beside a run's own: another takes the room of the one last seen longest ago."""


class RunSeries:
    """Numbers by name at rising times: fine at the end, and coarser the longer the run is.

    A point that leaves the fine end is averaged with its neighbours. Once there are `COARSE`
    averages, each two become one, and an average takes twice as many points from there on.

    Parameters
    ----------
    own
        Names that always have room.

    Attributes
    ----------
    names
        In the order in which they came.
    """

    def __init__(self, own: Collection[str] = ()) -> None:
        self.names: list[str] = []
        self._own = frozenset(own)
        self._others: dict[str, None] = {}  # names, the one last seen longest ago first
        self._fine: list[_Point] = []
        self._coarse: list[_Point] = []
        self._open: list[_Point] = []  # that are to become one average
        self._every = 1

    def add(self, time: float, values: Mapping[str, float | None]) -> dict[str, float]:
        """Add a point; return its values that are kept, rounded: those that are finite."""
        given = {name: rounded(value) for name, value in values.items() if value is not None}
        given = {name: value for name, value in given.items() if math.isfinite(value)}
        for name in [name for name in given if name in self._others]:
            del self._others[name]
            self._others[name] = None
        for name in given:
            if name not in self.names:
                self._admit(name, given)
        kept = {name: value for name, value in given.items() if name in self.names}
        self._fine.append((time, kept))
        if len(self._fine) > FINE:
            self._age(self._fine.pop(0))
        return kept

    def _admit(self, name: str, given: Collection[str]) -> None:
        """Have a series of this name, if there is room, or one that is not given now goes."""
        if name not in self._own and len(self._others) >= MOST_NAMES:
            oldest = next(iter(self._others))
            if oldest in given:
                return
            del self._others[oldest]
            self.names.remove(oldest)
        self.names.append(name)
        if name not in self._own:
            self._others[name] = None

    def _age(self, point: _Point) -> None:
        self._open.append(point)
        if len(self._open) < self._every:
            return
        self._coarse.append(_mean(self._open))
        self._open = []
        if len(self._coarse) >= COARSE:
            pairs = zip(self._coarse[::2], self._coarse[1::2], strict=True)
            self._coarse = [_mean(pair) for pair in pairs]
            self._every *= 2

    def columns(self) -> Columns:
        """Return all points, the oldest first: their times as ``t``, and a list for each name."""
        points = [*self._coarse, *([_mean(self._open)] if self._open else []), *self._fine]
        found: Columns = {"t": [round(time, 1) for time, _values in points]}
        for name in self.names:
            found[name] = [values.get(name) for _time, values in points]
        return found


_Point = tuple[float, Mapping[str, float]]


def _mean(points: list[_Point] | tuple[_Point, ...]) -> _Point:
    """Return the mean of points, at the time of the last."""
    found: dict[str, float] = {}
    for name in dict.fromkeys(name for _time, values in points for name in values):
        have = [values[name] for _time, values in points if name in values]
        found[name] = rounded(sum(value / len(have) for value in have))  # no sum is infinite
    return points[-1][0], found


def rounded(value: float) -> float:
    """Return a number with four significant digits, as far as a screen shows them.

    >>> rounded(0.123456), rounded(123456.0), rounded(2)
    (0.1235, 123500.0, 2)
    """
    return value if isinstance(value, int) else float(f"{value:.4g}")
