"""Read a fixed sample of a model's values, by which the filters compare pushes."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from aiops.filters.arithmetic import Values, squares_by_tensor
from aiops.kernels.lazy_numba import bf16_to_float, fp16_to_float, helper
from aiops.model.layout import DTYPES, Bytes, Cover, Ints, Layout

SAMPLED = 2048
"""Elements of a large model that are read, about; each tensor has its share of them."""

RUN = 16
"""Elements that are read together, as they lie in one line of the cache."""

_LEAST = 8192
"""Each tensor has a whole run unless that is more than this in all, and one element at least."""


def seed_number(seed: bytes) -> int:
    """Return the number that a seed of positions is, as messages carry it."""
    return int.from_bytes(seed, "big")


class SampleReader:
    """Reads the sampled values of a model, or of the part of one that a server holds.

    Parameters
    ----------
    layout
        Of the bytes that are read.
    tensors, inside
        int64[n], for each position: its tensor in the layout, and its element there. They rise.
    scale
        float64[n], by which the values are multiplied.

    Attributes
    ----------
    size
        The number of positions.
    """

    def __init__(self, layout: Layout, tensors: Ints, inside: Ints, scale: Values) -> None:
        self._layout, self._tensors = layout, tensors
        self._inside, self._scale = inside, scale
        self.size = len(inside)
        self._sections: list[tuple[slice, Ints]] = []
        for section in layout.sections:
            low, high = np.searchsorted(tensors, [section.first, section.last])
            at = slice(int(low), int(high))
            begin = layout.starts[tensors[at]] - section.start
            self._sections.append((at, begin // section.dtype.itemsize + inside[at]))

    def read(self, data: Bytes) -> Values:
        """Return the sampled values of a whole model, or of its whole gradient, as it lies."""
        out = np.empty(self.size)
        for section, (at, places) in zip(self._layout.sections, self._sections, strict=True):
            out[at] = data[section.start : section.stop].view(section.dtype)[places]
        out *= self._scale
        return out

    def read_part(self, data: Bytes, cover: Cover) -> Values:
        """Return the sampled values of a gradient of some tensors; 0 where there is none."""
        out = np.zeros(self.size)
        covered = self.covered(cover)
        for section, (at, _places) in zip(self._layout.sections, self._sections, strict=True):
            here = np.flatnonzero(covered[at]) + at.start
            rows = np.searchsorted(cover.tensors, self._tensors[here])
            item = section.dtype.itemsize
            typed = data[: len(data) // item * item].view(section.dtype)
            out[here] = typed[cover.starts[rows] // item + self._inside[here]]
        out *= self._scale
        return out

    def of_gradient(self, data: Bytes, cover: Cover) -> Values:
        """Return the sampled values of a gradient, of all tensors or of some."""
        return self.read(data) if cover.whole else self.read_part(data, cover)

    def covered(self, cover: Cover) -> npt.NDArray[np.bool_]:
        """Return which positions lie in the tensors that a push covers."""
        return np.isin(self._tensors, cover.tensors)


class Sample(SampleReader):
    """Positions in a model, and what is read there of a gradient or of the parameters.

    Runs of 16 elements are spread evenly over each tensor, each at a random place of its stretch,
    the more the larger the tensor. A small tensor is read whole. Every value is multiplied by the
    root of the elements that it stands for, so that sums of products estimate those of all.

    Of a model on several servers each reads the positions of its part (`of`). Joined in the order
    of the servers these values are those of the whole, to the bit, wherever tensors are cut.

    Parameters
    ----------
    layout
        The tensors.
    seed
        Of the positions. A worker that knows it can hide values beside them.

    Attributes
    ----------
    ends
        int64[tensors + 1], where the positions of each tensor begin, and where the last end.
    runs
        For `read_loop`. int64[n, 4], of each run: the index of its first element, from the model's
        beginning, in units of its dtype; its first position; that after its last; its dtype's place
        in `DTYPES`.
    scales
        float64[n], by which the values of each run are multiplied.
    """

    def __init__(self, layout: Layout, seed: int) -> None:
        places = _places(layout, seed)
        counts = np.array([len(each) for each in places], np.int64)
        self.ends = np.concatenate([[0], np.cumsum(counts)]).astype(np.int64)
        tensors = np.repeat(np.arange(len(places)), counts)
        inside = np.concatenate([*places, np.empty(0, np.int64)])
        scale = np.sqrt(layout.sizes / np.maximum(counts, 1))[tensors]
        super().__init__(layout, tensors, inside, scale)
        self.runs, self.scales = self._runs()

    def _runs(self) -> tuple[Ints, Values]:
        """Return the runs of elements that lie together in one tensor, and their scales."""
        known = [(DTYPES.index(s.dtype.name), s.dtype.itemsize) for s in self._layout.sections]
        tensors = [s.last - s.first for s in self._layout.sections]
        kinds, items = np.repeat(np.array(known, np.int64).reshape(-1, 2), tensors, axis=0).T
        places = self._layout.starts // items
        places = places[self._tensors] + self._inside
        breaks = (np.diff(places) != 1) | (np.diff(self._tensors) != 0)
        first = np.flatnonzero(np.concatenate([[True] * bool(self.size), breaks])).astype(np.int64)
        last = np.append(first[1:], self.size)[: len(first)]
        rows = (places[first], first, last, kinds[self._tensors[first]])
        return np.stack(rows, axis=1), self._scale[first]

    def of(self, held: Layout) -> SampleReader:
        """Return what reads the positions in a part of the model; ``held``: its pieces."""
        if held.within is None:
            return self
        low, high, begins = (np.zeros(len(held.tensors), np.int64) for _ in range(3))
        for number, piece in enumerate(held.tensors):
            owner = self._layout.index[piece.name]
            tensor = self._layout.tensors[owner]
            begins[number] = (held.begin + piece.offset - tensor.offset) // piece.dtype.itemsize
            first, last = self.ends[owner : owner + 2]
            ends = begins[number] + np.array([0, piece.size])
            low[number], high[number] = first + np.searchsorted(self._inside[first:last], ends)
        counts = high - low
        tensors = np.repeat(np.arange(len(counts)), counts)
        at = np.concatenate([*map(np.arange, low, high), np.empty(0, np.int64)]).astype(np.int64)
        return SampleReader(held, tensors, self._inside[at] - begins[tensors], self._scale[at])

    def norms(self, values: Values, last: float) -> Values:
        """Return the norm of each tensor, exact where it is read whole, and then ``last``."""
        found = np.zeros(len(self._layout.tensors) + 1)
        found[-1] = last
        found[:-1] = np.sqrt(squares_by_tensor(values, self._tensors, len(found) - 1))
        return found


def _places(layout: Layout, seed: int) -> list[Ints]:
    """Return the positions in each tensor, rising."""
    width = min(RUN, max(1, _LEAST // max(len(layout.tensors), 1)))
    runs = np.maximum(SAMPLED * layout.sizes // (RUN * max(layout.parameters, 1)), 1)
    # Its raw numbers are the same with every version of NumPy.
    draw = np.random.PCG64(seed)
    found = []
    for size, count in zip(layout.sizes.tolist(), runs.tolist(), strict=True):
        if size <= count * width:
            found.append(np.arange(size))
            continue
        stretch = size // count
        inside = draw.random_raw(count) % np.uint64(stretch - width + 1)
        starts = np.arange(count) * stretch + inside.astype(np.int64)
        found.append((starts[:, None] + np.arange(width)).reshape(-1))
    return found


@helper()
def read_loop(data: Any, runs: Any, scales: Any, out: Any) -> Any:
    """Read what `Sample.read` does."""
    halves = data[: data.size // 2 * 2].view(np.uint16)
    singles = data[: data.size // 4 * 4].view(np.float32)
    doubles = data[: data.size // 8 * 8].view(np.float64)
    for run in range(scales.size):
        place, first, last, kind = runs[run, 0], runs[run, 1], runs[run, 2], runs[run, 3]
        scale = scales[run]
        if kind == 1:
            for i in range(last - first):
                out[first + i] = np.float64(singles[place + i]) * scale
        elif kind == 0:
            for i in range(last - first):
                out[first + i] = doubles[place + i] * scale
        elif kind == 2:
            for i in range(last - first):
                out[first + i] = np.float64(bf16_to_float(halves[place + i])) * scale
        else:
            for i in range(last - first):
                out[first + i] = np.float64(fp16_to_float(halves[place + i])) * scale
