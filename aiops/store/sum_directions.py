"""Make directions of collected gradients: those of the mean, which no worker has.

The direction (`aiops.client.strategies.directions`) of a gradient of few examples is mostly noise,
and a mean of directions is not the direction of the mean. So where the server collects gradients,
workers push them as they are, and the momentum and the directions of matrices are made here, once
for each sum. Standbys, followers and replays have the same bits
(`aiops.kernels.exact_orthogonalise`). On a device they are made by its host.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from functools import partial

import numpy as np

from aiops import kernels
from aiops.kernels.exact_orthogonalise import orthogonalised_exactly
from aiops.model.layout import Array, Ints, Layout, compute_dtype
from aiops.model.matrices import as_matrix
from aiops.store.backends import ComputeBackend

_COST = 256
"""Bytes that are read in the time that an element's direction takes: about 20 ns, on one thread."""

_LARGEST = 1.1
"""No element of an orthogonalised matrix is larger."""


class SumDirections:
    """The momentum of the matrices of one store.

    A matrix that is cut over several servers is one matrix for each piece.

    Parameters
    ----------
    layout
        The tensors that are held here.
    compute
        The backend, in whose memory the momenta are.
    memory
        The memory µ of the momentum, in [0, 1).

    Attributes
    ----------
    momenta
        By section, those of all its matrices one after the other, in the compute dtype.
    cost
        Bytes that are read in the time that directions take.
    """

    def __init__(self, layout: Layout, compute: ComputeBackend, memory: float) -> None:
        self._layout, self._compute, self._memory = layout, compute, memory
        self._matrices: dict[int, tuple[int, tuple[int, int]]] = {}  # where its momentum is; shape
        self.momenta: list[Array] = []
        for section in layout.sections:
            place = 0
            for index in range(section.first, section.last):
                shape = _shape(layout, index)
                if shape is not None:
                    self._matrices[index], place = (place, shape), place + math.prod(shape)
            self.momenta.append(compute.array(place, compute_dtype(section.dtype), 0.0))
        self.cost = _COST * sum(map(len, self.momenta))

    def put(self, sums: Sequence[Array], tensors: Ints) -> None:
        """Put directions in the place of the sums of matrices.

        The momentum is m ← µ m + (1−µ) sum. Its direction has the length of the sum.

        Parameters
        ----------
        sums
            The sum in progress, by section.
        tensors
            int64, the tensors that it has.
        """
        for number, mine in self._matrices_of(tensors):
            compute, given, kept = self._compute, sums[number], self.momenta[number]
            values, momenta = compute.on_host(given), compute.on_host(kept)
            for index in mine:
                low, high = (int(end[0]) for end in self._layout.ranges(number, np.array([index])))
                place, shape = self._matrices[index]
                self._put_one(shape, values[low:high], momenta[place : place + high - low])
            for array, found in ((given, values), (kept, momenta)):
                if found is not array:
                    compute.fill(array, partial(_copy, found))

    def _put_one(self, shape: tuple[int, int], values: Array, momentum: Array) -> None:
        """Put a direction in the place of one matrix's sum."""
        momentum *= momentum.dtype.type(self._memory)
        momentum += momentum.dtype.type(1 - self._memory) * values
        backend = "numpy" if self._compute.backend == "numpy" else "auto"
        length = math.sqrt(max(shape)) * math.sqrt(
            kernels.sum_squares(values, backend) / values.size
        )
        values[:] = (orthogonalised_exactly(momentum.reshape(shape)) * length).reshape(-1)

    def forget(self, tensors: Ints) -> None:
        """Set the momenta of some tensors to 0: they have the gradients of a refused step."""
        for number, mine in self._matrices_of(tensors):
            kept = self.momenta[number]
            momenta = self._compute.on_host(kept)
            for index in mine:
                place, shape = self._matrices[index]
                momenta[place : place + math.prod(shape)] = 0
            if momenta is not kept:
                self._compute.fill(kept, partial(_copy, momenta))

    def _matrices_of(self, tensors: Ints) -> Iterator[tuple[int, list[int]]]:
        """Yield each section that has matrices of these tensors, by its number, and those."""
        matrices = [each for each in tensors.tolist() if each in self._matrices]
        for number, section in enumerate(self._layout.sections):
            mine = [each for each in matrices if section.first <= each < section.last]
            if mine:
                yield number, mine


def _shape(layout: Layout, index: int) -> tuple[int, int] | None:
    """Return rows and columns of a tensor, or of the piece of one; None if it is no matrix."""
    tensor, shape = layout.tensors[index], layout.tensors[index].shape
    if layout.within is not None:
        whole, begin = layout.within
        shape = whole.tensors[whole.tensor_at(begin + tensor.offset)].shape
    matrix = as_matrix(shape) if tensor.size else None
    return matrix and (tensor.size // matrix[1], matrix[1])


def growth(layout: Layout) -> float:
    """Return by how much a direction's largest magnitude may exceed that of what it is made of."""
    sides = [max(as_matrix(tensor.shape) or (1, 1)) for tensor in layout.tensors]
    return _LARGEST * math.sqrt(max(sides, default=1))


def _copy(found: Array, target: Array) -> None:
    target[:] = found
