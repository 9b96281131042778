"""Collect the gradients of one step: their sum, or all of them for a trimmed mean."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np

from aiops import kernels
from aiops.kernels.trimmed_mean import left_out, trimmed_mean
from aiops.model.layout import Array, Layout, compute_dtype
from aiops.store.backends import ComputeBackend
from aiops.store.finite_guard import LIMIT
from aiops.store.gradient import Gradient, rows_in, section_size, spans_of


class Accumulator:
    """The sum of gradients that a rule collects before it takes a step, in the compute dtype.

    Parameters
    ----------
    layout, compute
        The tensors, and the backend.
    firsts, folds
        The kernels of `aiops.kernels.FIRST` and `FOLD`, for each section of the layout.

    Attributes
    ----------
    arrays
        The sum, by section.
    filled
        bool[tensors], those that have a sum already.
    bound
        A bound of its magnitude.
    """

    def __init__(
        self,
        layout: Layout,
        compute: ComputeBackend,
        firsts: Sequence[kernels.Kernel],
        folds: Sequence[kernels.Kernel],
    ) -> None:
        self.layout, self._compute = layout, compute
        self.arrays = [
            compute.array(section_size(section), compute_dtype(section.dtype))
            for section in layout.sections
        ]
        self.filled: Array = np.zeros(len(layout.tensors), bool)
        self.bound = math.inf  # of the sum's magnitude; it may be one that a snapshot had
        self._firsts, self._folds = firsts, folds

    def fold(self, gradient: Gradient, weights: Array) -> None:
        """Add a gradient: ``sum ← sum + weight · g`` (``sum ← weight · g`` the first time)."""
        again = self.filled[gradient.cover.tensors]
        if not self.filled.any():
            self.bound = 0.0
        self.bound += LIMIT * float(np.abs(weights).max(initial=0.0))
        for rows, chosen_kernels in ((~again, self._firsts), (again, self._folds)):
            for index, section in enumerate(self.layout.sections):
                chosen = rows_in(gradient.cover.tensors, section, rows)
                if not len(chosen):
                    continue
                spans, grad = spans_of(self.layout, index, gradient, chosen, weights)
                total, wide = self.arrays[index], self._compute.widened(grad)
                operands = 1.0, total, wide, total, (), ()
                self._compute.update(chosen_kernels[index], spans, operands)
        self.filled[gradient.cover.tensors] = True

    def reset(self) -> None:
        """Begin a new sum."""
        self.filled[:] = False

    def stored(self) -> dict[str, Array]:
        """Return the arrays of the sum in progress, by name."""
        return {f"sum/{index}": array for index, array in enumerate(self.arrays)}

    def restore(self, filled: Array) -> None:
        """Have the arrays for a sum with this `filled`, which are to be read again."""
        self.filled[:] = filled


class GradientHolder:
    """The gradients of a step, of which the mean of each coordinate without its ends is taken.

    Each is in an array of its own, so that the mean does not depend on the order in which they
    came, and none is added to another: the largest of 2e17 would leave nothing of the rest. A
    tensor's number n is in array n, if not every gradient is of all tensors.

    Parameters
    ----------
    layout, compute, firsts
        As of `Accumulator`.
    share
        Of the values of a coordinate, how many are left out at each end.

    Attributes
    ----------
    filled
        int64[tensors], the gradients of each.
    bound
        A bound of the mean's magnitude.
    """

    def __init__(
        self,
        layout: Layout,
        compute: ComputeBackend,
        firsts: Sequence[kernels.Kernel],
        share: float,
    ) -> None:
        self.layout, self._compute, self._firsts, self._share = layout, compute, firsts, share
        self.filled: Array = np.zeros(len(layout.tensors), np.int64)
        self.bound = math.inf
        self._held = [self._made()]
        self._mean_taken = False  # it is in the first array
        self._kernels: dict[tuple[int, np.dtype[Any]], kernels.Kernel] = {}  # by count and dtype

    def _made(self) -> list[Array]:
        return [
            self._compute.array(section_size(section), compute_dtype(section.dtype))
            for section in self.layout.sections
        ]

    def fold(self, gradient: Gradient, weights: Array) -> None:
        """Hold a gradient, times its weight."""
        counts = self.filled[gradient.cover.tensors]
        if not self.filled.any():
            self.bound, self._mean_taken = 0.0, False
        self.bound = max(self.bound, LIMIT * float(np.abs(weights).max(initial=0.0)))
        for count in np.unique(counts).tolist():
            if count == len(self._held):
                self._held.append(self._made())
            for index, section in enumerate(self.layout.sections):
                chosen = rows_in(gradient.cover.tensors, section, counts == count)
                if not len(chosen):
                    continue
                spans, grad = spans_of(self.layout, index, gradient, chosen, weights)
                held, wide = self._held[count][index], self._compute.widened(grad)
                operands = 1.0, held, wide, held, (), ()
                self._compute.update(self._firsts[index], spans, operands)
        self.filled[gradient.cover.tensors] += 1

    @property
    def arrays(self) -> list[Array]:
        """The mean of each tensor, by section: nothing is folded afterwards before a `reset`."""
        if not self._mean_taken:
            self._take_mean()
        return self._held[0]

    def _take_mean(self) -> None:
        self._mean_taken = True
        for count in np.unique(self.filled[self.filled > 1]).tolist():
            for index, section in enumerate(self.layout.sections):
                mine = np.flatnonzero(self.filled[section.first : section.last] == count)
                if not len(mine):
                    continue
                lo, hi = self.layout.ranges(index, mine + section.first)
                spans = kernels.Spans(lo, hi, lo, np.ones(len(mine)))
                base, grad, *reads = (held[index] for held in self._held[:count])
                kernel = self._kernel(count, compute_dtype(section.dtype))
                self._compute.update(kernel, spans, (1.0, base, grad, base, (), reads))

    def _kernel(self, count: int, dtype: np.dtype[Any]) -> kernels.Kernel:
        key = count, dtype
        if key not in self._kernels:
            rule = trimmed_mean(count, left_out(self._share, count))
            self._kernels[key] = self._compute.kernel(rule, dtype).warm()
        return self._kernels[key]

    def warming(self, count: int) -> list[Callable[[], object]]:
        """Return the calls that compile the kernels for this number of gradients."""
        if count < 2:
            return []
        dtypes = {compute_dtype(section.dtype) for section in self.layout.sections}
        return [partial(self._kernel, count, dtype) for dtype in dtypes]

    def reset(self) -> None:
        """Hold no gradient."""
        self.filled[:] = 0
        self._mean_taken = False

    def stored(self) -> dict[str, Array]:
        """Return the arrays of the gradients held, by name."""
        held = self._held[: int(self.filled.max(initial=0))]
        return {
            f"sum/{index}/{number}": array
            for number, arrays in enumerate(held)
            for index, array in enumerate(arrays)
        }

    def restore(self, filled: Array) -> None:
        """Have the arrays for gradients with this `filled`, which are to be read again."""
        self.filled[:] = filled
        while len(self._held) < int(filled.max(initial=0)):
            self._held.append(self._made())
