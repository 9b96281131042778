"""Read a fixed sample of a model's values, by which the filters compare pushes."""

from __future__ import annotations

from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from aiops.model.layout import Bytes, Cover, Ints, Layout

Values: TypeAlias = npt.NDArray[np.float64]

SAMPLED = 2048
"""Elements of a large model that are read, about; each tensor has its share of them."""

RUN = 16
"""Elements that are read together, as they lie in one line of the cache."""

_LEAST = 8192
"""Each tensor has a whole run unless that is more than this in all, and one element at least."""


class Sample:
    """Positions in a model, and what is read there of a gradient or of the parameters.

    Runs of 16 elements are spread evenly over each tensor, each at a random place of its stretch,
    the more the larger the tensor. A small tensor is read whole. Every value is multiplied by the
    root of the elements that it stands for, so that sums of products estimate those of all.

    Parameters
    ----------
    layout
        The tensors.
    seed
        Of the positions. A worker that knows it can hide values beside them.

    Attributes
    ----------
    size
        The number of positions.
    """

    def __init__(self, layout: Layout, seed: int) -> None:
        self._layout = layout
        places = _places(layout, seed)
        counts = np.array([len(each) for each in places])
        self._tensors = np.repeat(np.arange(len(places)), counts)  # of each position
        self._inside: Ints = np.concatenate([*places, np.empty(0, np.int64)])  # in its tensor
        self.size = len(self._inside)
        self._scale = np.sqrt(layout.sizes / np.maximum(counts, 1))[self._tensors]
        self._read = np.flatnonzero(counts)  # the tensors that are not empty
        self._first = np.searchsorted(self._tensors, self._read)
        self._sections: list[tuple[slice, Ints]] = []
        for section in layout.sections:
            low, high = np.searchsorted(self._tensors, [section.first, section.last])
            at = slice(int(low), int(high))
            begin = layout.starts[self._tensors[at]] - section.start
            self._sections.append((at, begin // section.dtype.itemsize + self._inside[at]))

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

    def covered(self, cover: Cover) -> npt.NDArray[np.bool_]:
        """Return which positions lie in the tensors that a push covers."""
        return np.isin(self._tensors, cover.tensors)

    def norms(self, values: Values, last: float) -> Values:
        """Return the norm of each tensor, exact where it is read whole, and then ``last``."""
        found = np.zeros(len(self._layout.tensors) + 1)
        found[-1] = last
        if self.size:
            found[self._read] = np.sqrt(np.add.reduceat(values * values, self._first))
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
