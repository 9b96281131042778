"""The examples themselves: arrays, sequences, and what is read by ranges of rows."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence, Set
from typing import Any, Protocol

import numpy as np

from aiops.common.settings import whole_number
from aiops.errors import UsageError
from aiops.model.layout import Ints
from aiops.model.parts import LARGEST


class Source(Protocol):
    """Examples that are numbered from 0."""

    def __len__(self) -> int:
        """Return their number."""

    def rows(self, indices: Ints) -> Any:
        """Return the mini-batch of the examples with these numbers (int64), in this order."""


_NO_ARRAYS = (str, bytes, list, tuple, range, Mapping, Set)
"""Types that have a length, and take no array of indices."""


class ArrayExamples:
    """Arrays of equal length: one, a tuple or list, or a mapping; a batch is of that form.

    Parameters
    ----------
    arrays
        NumPy arrays, PyTorch tensors, or whatever takes an array of indices.

    Raises
    ------
    UsageError
        When one of them is no array, or their lengths differ.
    """

    def __init__(self, arrays: Any) -> None:
        self._arrays = arrays
        each = arrays
        if isinstance(arrays, Mapping):
            each = list(arrays.values())
        elif not isinstance(arrays, tuple | list):
            each = [arrays]
        for array in each:
            if isinstance(array, _NO_ARRAYS) or not hasattr(array, "__len__"):
                problem = f"holds {type(array).__name__}"
            elif getattr(array, "ndim", 1) == 0:
                problem = "holds a number, which has no length"
            else:
                continue
            raise UsageError(
                f"a data set is one or more arrays of one length, and this {type(arrays).__name__}"
                f" {problem}: make an array of the examples, as numpy.asarray does"
            )
        lengths = {len(array) for array in each}
        if len(lengths) != 1:
            raise UsageError(
                f"a data set is one or more arrays of one length, not of {sorted(lengths)}"
            )
        [self._length] = lengths

    def __len__(self) -> int:
        return self._length

    def rows(self, indices: Ints) -> Any:
        """Return the rows of each array."""
        arrays = self._arrays
        if isinstance(arrays, Mapping):
            return {name: array[indices] for name, array in arrays.items()}
        if isinstance(arrays, tuple | list):
            return tuple(array[indices] for array in arrays)
        return arrays[indices]


class SequenceExamples:
    """A sequence of examples, such as a PyTorch data set in the map style; a batch is a list."""

    def __init__(self, items: Sequence[Any]) -> None:
        self._items = items

    def __len__(self) -> int:
        return len(self._items)

    def rows(self, indices: Ints) -> list[Any]:
        """Return the examples."""
        return [self._items[index] for index in indices.tolist()]


class RowRanges:
    """Examples that are read by ranges of rows, as of files or of a Ray data set.

    Of a batch, neighbours are read together. With ``shuffle`` a number of rows (a block), a batch
    needs one or two ranges, which are read once: the last ones are kept.

    Parameters
    ----------
    length
        The number of rows.
    read
        Called with a range (start, stop); returns an array, or a tuple or a mapping of arrays, of
        these rows.
    unit
        Rows that are read at a time, at ``unit`` times 0, 1, 2, … Set it to the ``shuffle`` of
        `batches`. Or, for units of different sizes, the first row of each: 0, and rising.
    kept
        The number of units that are kept in memory.

    Raises
    ------
    UsageError
        When a number is not whole, or less than 1, or the first rows do not rise from 0.
    """

    def __init__(
        self,
        length: int,
        read: Callable[[int, int], Any],
        *,
        unit: int | Sequence[int] | Ints = 1024,
        kept: int = 4,
    ) -> None:
        self._read = read
        self._length = whole_number("the length", length, 1, LARGEST)
        self._most = whole_number("the number of units kept", kept, 1, LARGEST)
        self._unit: int | Ints
        if isinstance(unit, Sequence | np.ndarray):
            self._unit = _firsts(unit, self._length)
        else:
            self._unit = whole_number("the unit", unit, 1, LARGEST)
        self._kept: dict[int, Any] = {}

    def __len__(self) -> int:
        return self._length

    def rows(self, indices: Ints) -> Any:
        """Return rows, in any order, of as many units as they are in."""
        units = self._units(indices)
        pieces = [
            (units == unit, self._read_unit(unit), indices[units == unit] - self._first(unit))
            for unit in np.unique(units).tolist()
        ]
        first = pieces[0][1]
        if isinstance(first, Mapping):
            return {name: _joined([(p[0], p[1][name], p[2]) for p in pieces]) for name in first}
        if isinstance(first, tuple | list):
            return tuple(
                _joined([(p[0], p[1][place], p[2]) for p in pieces]) for place in range(len(first))
            )
        return _joined(pieces)

    def _units(self, indices: Ints) -> Ints:
        """Return the unit of each row."""
        if isinstance(self._unit, int):
            return indices // self._unit
        return np.searchsorted(self._unit, indices, side="right") - 1

    def _first(self, unit: int) -> int:
        """Return the first row of a unit; of the one after the last, or any later: the length."""
        if isinstance(self._unit, int):
            return min(unit * self._unit, self._length)
        return int(self._unit[unit]) if unit < len(self._unit) else self._length

    def _read_unit(self, unit: int) -> Any:
        found = self._kept.pop(unit, None)
        if found is None:
            found = self._read(self._first(unit), self._first(unit + 1))
            while len(self._kept) >= self._most:
                del self._kept[next(iter(self._kept))]
        self._kept[unit] = found
        return found


def _joined(pieces: Sequence[tuple[Any, Any, Ints]]) -> Any:
    """Return rows of several arrays as one; each piece: which of the result, an array, its rows."""
    arrays = [np.asarray(array) for _here, array, _rows in pieces]
    dtype = np.result_type(*arrays)  # texts of two units may differ in length, integers in size
    found = np.empty((len(pieces[0][0]), *arrays[0].shape[1:]), dtype)
    for (here, _array, rows), array in zip(pieces, arrays, strict=True):
        found[here] = array[rows]
    return found


def _firsts(unit: Sequence[int] | Ints, length: int) -> Ints:
    """Return the first row of each unit as an array."""
    firsts = np.asarray(unit)
    if firsts.dtype.kind in "iu" and firsts.ndim == 1:
        ends = np.append(firsts.astype(np.int64), length)
        if ends[0] == 0 and not (np.diff(ends) < 1).any():
            return ends[:-1]
    raise UsageError(
        "the first rows of the units must be whole numbers that rise from 0, and stay below the"
        " length; leave out units without rows"
    )


def source_of(data: Any) -> Source:
    """Return the source of what a user gives as data.

    Raises
    ------
    UsageError
        When it has no length, or none that is more than 0.
    """
    found: Source
    if hasattr(data, "rows") and hasattr(data, "__len__"):
        found = data
    elif isinstance(data, tuple | list | Mapping) or hasattr(data, "dtype"):
        found = ArrayExamples(data)
    elif hasattr(data, "__len__") and hasattr(data, "__getitem__"):
        found = SequenceExamples(data)
    else:
        raise UsageError(
            f"a data set is arrays, a sequence, or an object with rows(indices) and a length, not"
            f" {type(data).__name__}; wrap what is read by ranges in aiops.data.RowRanges"
        )
    if len(found) < 1:
        raise UsageError("the data set is empty")
    return found
