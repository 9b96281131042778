"""Orthogonalise a matrix to the same bits on every machine.

Matrix products are a BLAS library's, which adds up in an order of its own: it depends on the
processor and on the number of threads, and so do the last bits. A server's standbys, followers and
replays must have the bits of the server, so here products are *exact*. The factors are rounded to
integers of so few bits (23 of them in a product over 128 values) that each sum of products is an
integer below 2⁵³, and float64 holds all of those: in whichever order they are added, none is
rounded. All else is done element by element, where IEEE 754 leaves no choice.

That is about as precise as float32, and half as fast. A worker, whose directions are its own,
has no need of it (`aiops.kernels.orthogonalise`).
"""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

from aiops.kernels.orthogonalise import NOTHING, STEPS, TINY, block_groups
from aiops.kernels.vocabulary import Array

__all__ = ["exact_product", "orthogonalised_exactly"]

_MANTISSA = 53
_MOST = 26
"""Bits of a factor beyond which nothing is gained."""

Wide = npt.NDArray[np.float64]


def orthogonalised_exactly(matrix: Array) -> Array:
    """Return a matrix as `aiops.kernels.orthogonalise.orthogonalised` does, to the same bits.

    Parameters
    ----------
    matrix
        float32[m, n] or float64[m, n], finite. It stays as it is.

    Returns
    -------
    Array
        float64[m, n], of elements up to 1.1 in magnitude.
    """
    wide = matrix.shape[0] <= matrix.shape[1]
    found, largest = np.zeros(matrix.shape), _largest(matrix)
    if largest < NOTHING:
        return found
    for first, rows, count in block_groups(min(matrix.shape)):
        for start in range(first, first + rows * count, rows):
            # A tall matrix is not transposed, which would take longer than the products.
            part = np.s_[start : start + rows] if wide else np.s_[:, start : start + rows]
            block = np.ascontiguousarray(matrix[part], np.float64)
            found[part] = _block(block, TINY * largest, wide=wide)
    return found


def exact_product(a: Wide, b: Wide) -> Wide:
    """Return the product of float64[m, k] and float64[k, n], as rounded before it is added up.

    Each factor is rounded to a multiple of a power of two, of which its largest magnitude is about
    2**((53 − log₂ k) / 2).
    """
    bits = _bits(a.shape[1])
    (p, low), (q, high) = _integers(a, bits), _integers(b, bits)
    return (p @ q) * 2.0 ** -(low + high)


def _block(x: Wide, least: float, *, wide: bool) -> Wide:
    """Orthogonalise one block: its rows if it is ``wide``, or else its columns.

    ``least``: the length below which it counts as zeros.
    """
    if _largest(x) * math.sqrt(x.size) < least:  # it is not longer than that
        return np.zeros_like(x)
    integers, power = _integers(x, _bits(max(x.shape)))
    gram = integers @ integers.T if wide else integers.T @ integers
    # In integers of 64 bits, as more than 2**53 may come together.
    square = float(int(gram.diagonal().astype(np.int64).sum()))
    if math.sqrt(square) < least * 2.0**power:
        return np.zeros_like(x)
    gram /= square
    made: Wide | None = None
    for number, (a, b, c) in enumerate(STEPS):
        step = c * exact_product(gram, gram) + b * gram
        step.reshape(-1)[:: len(step) + 1] += a
        made = step if made is None else exact_product(step, made)
        if number < len(STEPS) - 1:
            gram = exact_product(exact_product(step, gram), step)
    assert made is not None
    rounded, low = _integers(made, _bits(len(made)))
    product = rounded @ integers if wide else integers @ rounded.T
    return product * (2.0**-low / math.sqrt(square))


def _bits(terms: int) -> int:
    """Return the bits of factors of which that many products have an exact sum."""
    return min(_MOST, (_MANTISSA - max(terms - 1, 0).bit_length()) // 2)


def _integers(x: Wide, bits: int) -> tuple[Wide, int]:
    """Return integers of at most these bits, as float64, and the power of two they stand for.

    x is about integers / 2**power.
    """
    power = bits - math.frexp(_largest(x))[1]
    found: Wide = x * 2.0**power
    return np.rint(found, out=found), power


def _largest(x: Array) -> float:
    return max(float(x.max(initial=0.0)), -float(x.min(initial=0.0)))
