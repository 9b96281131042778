"""Looking over what a peer sent before it may touch anything: bad values, and Σx².

Both backends give the same answers to the bit, whatever the machine.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np

from aiops.errors import UsageError
from aiops.kernels.backend import at_hand, resolve
from aiops.kernels.vocabulary import Array

__all__ = [
    "LANES",
    "SUM_BLOCK",
    "SURVEYED",
    "SURVEY_BLOCK",
    "Surveyor",
    "bounded",
    "reaches",
    "sum_squares",
    "survey",
    "surveyor",
    "warm_survey",
]

SURVEY_BLOCK = 16_384
"""Elements surveyed before looking whether one of them was bad."""

SUM_BLOCK = 16_384
"""Elements per partial sum of :func:`sum_squares`."""

LANES = 16
"""Sums that run side by side in a block: element i goes to lane i mod 16."""


@dataclass(frozen=True, slots=True)
class _Format:
    """How to see that a float is bad from its bits: as an integer, its absolute value is large."""

    unsigned: np.dtype[Any]
    magnitude: int  # the mask that leaves out the sign
    limit: int  # the first magnitude that is bad: NaN and infinity lie above every number


_FORMATS = {
    "float64": _Format(np.dtype(np.uint64), 0x7FFF_FFFF_FFFF_FFFF, 0x43AB_C16D_674E_C800),
    "float32": _Format(np.dtype(np.uint32), 0x7FFF_FFFF, 0x5D5E_0B6B),
    "bfloat16": _Format(np.dtype(np.uint16), 0x7FFF, 0x5D5E),
    "float16": _Format(np.dtype(np.uint16), 0x7FFF, 0x7C00),  # it ends far below 1e18
}

SURVEYED = tuple(_FORMATS)
"""The dtypes of which there are surveys."""

Surveyor: TypeAlias = Callable[[Array], int]
"""Returns the index of an array's first unfit element, or -1."""

_Survey: TypeAlias = Callable[[Array, int, int], int]
_SumSquares: TypeAlias = Callable[[Array, float], float]


def survey(array: Array, backend: str = "auto") -> int:
    """Return the index of the first element that no model survives, or -1 if all are fit.

    Unfit is what is not finite or has an absolute value of 1e18 (rounded to the dtype) or more:
    its square would be infinite in float32 and stay in the optimiser's statistics for ever.
    ``array`` is contiguous, of dtype float16, bfloat16, float32 or float64; the index counts its
    elements in memory order. Reads each element once. Raises
    :class:`~aiops.errors.UsageError` for another dtype or layout, or an unknown backend.
    """
    form = _format("survey", array)
    bits = array.reshape(-1).view(form.unsigned)
    return _scans(backend)[0](bits, form.magnitude, form.limit)


def surveyor(dtype: np.dtype[Any], backend: str = "auto") -> Surveyor:
    """Return :func:`survey` for flat contiguous arrays of one dtype, with all else settled.

    It neither imports nor compiles anything before it is called.
    """
    form = _format("survey", np.empty(0, dtype))
    unsigned, magnitude, limit = form.unsigned, form.magnitude, form.limit
    if backend == "numpy":
        return lambda flat: _survey_numpy(flat.view(unsigned), magnitude, limit)
    ready: list[tuple[Callable[..., int], Any, Any]] = []

    def survey_of(flat: Array) -> int:
        if not ready:
            if at_hand(backend) == "numpy":
                return _survey_numpy(flat.view(unsigned), magnitude, limit)
            from aiops.kernels import scan_cpu

            ready.append(scan_cpu.compiled_survey(unsigned.itemsize, magnitude, limit))
        scan, mask, bound = ready[0]
        return scan(flat.view(unsigned), mask, bound)

    return survey_of


def bounded(limit: int, backend: str = "auto") -> Surveyor:
    """Return what finds the first element of a flat int64 array that is not in [0, limit).

    It neither imports nor compiles anything before it is called.
    """
    # What is negative is large.
    return lambda flat: reaches(flat.view(np.uint64), 2**64 - 1, limit, backend)


def warm_survey(dtype: str, backend: str = "auto") -> None:
    """Compile the survey of one of `SURVEYED` now, or read it from the cache folder."""
    if resolve(backend) != "numpy":
        from aiops.kernels import scan_cpu

        form = _FORMATS[dtype]
        scan_cpu.compiled_survey(form.unsigned.itemsize, form.magnitude, form.limit)


def reaches(bits: Array, magnitude: int, limit: int, backend: str = "auto") -> int:
    """Return the first index at which ``bits & magnitude`` is ``limit`` or more, or -1.

    ``bits`` is flat and contiguous, of dtype uint16, uint32 or uint64.
    """
    return _scans(backend)[0](bits, magnitude, limit)


def sum_squares(array: Array, backend: str = "auto") -> float:
    """Return the sum of ``x * x`` over all elements, in float64 and in a fixed order.

    From the array's start, each block of 16,384 elements is summed in 16 lanes (element i of the
    block is added to lane i mod 16), the lanes are added from left to right, and then the blocks
    in order: the same bits on every machine, at the speed of memory. ``array`` as in
    :func:`survey`; not finite if an element is not, or if the sum overflows.
    """
    form = _format("sum_squares", array)
    flat = array.reshape(-1)
    add = _scans(backend)[1]
    if form.unsigned.itemsize > 2:
        return add(flat, 0.0)
    total = 0.0
    for start in range(0, flat.size, 4 * SUM_BLOCK):
        total = add(flat[start : start + 4 * SUM_BLOCK].astype(np.float32), total)
    return total


def _format(what: str, array: Array) -> _Format:
    form = _KNOWN.get(array.dtype) or _FORMATS.get(array.dtype.name)
    if form is None or not array.dtype.isnative:
        raise UsageError(
            f"{what} was given an array of dtype {array.dtype}; it takes native "
            f"{', '.join(_FORMATS)}",
            dtype=str(array.dtype),
        )
    if not array.flags.c_contiguous:
        raise UsageError(
            f"{what} was given an array of shape {array.shape} and strides {array.strides}; pass a "
            "contiguous one",
            strides=array.strides,
        )
    return form


# A look-up by dtype is quick, and one by name is not; bfloat16 is absent without ml_dtypes.
_KNOWN = {np.dtype(name): _FORMATS[name] for name in ("float16", "float32", "float64")}


def _scans(backend: str) -> tuple[_Survey, _SumSquares]:
    if at_hand(backend) == "numpy":
        return _survey_numpy, _sum_squares_numpy
    from aiops.kernels import scan_cpu

    return scan_cpu.survey, scan_cpu.sum_squares


def _survey_numpy(bits: Array, magnitude: int, limit: int) -> int:
    scratch = np.empty(min(bits.size, SURVEY_BLOCK), bits.dtype)
    mask = bits.dtype.type(magnitude)
    for start in range(0, bits.size, SURVEY_BLOCK):
        block = bits[start : start + SURVEY_BLOCK]
        magnitudes = np.bitwise_and(block, mask, out=scratch[: block.size])
        if magnitudes.max() >= limit:
            return start + int(np.argmax(magnitudes >= limit))
    return -1


def _sum_squares_numpy(array: Array, total: float) -> float:
    scratch = np.empty(min(array.size, SUM_BLOCK), np.float64)
    with np.errstate(all="ignore"):
        for start in range(0, array.size, SUM_BLOCK):
            block = array[start : start + SUM_BLOCK]
            squares = scratch[: block.size]
            squares[...] = block
            squares *= squares
            whole = squares.size - squares.size % LANES
            # Along the outer axis NumPy adds row after row; along the inner one it would not.
            lanes = squares[:whole].reshape(-1, LANES).sum(axis=0)
            lanes[: squares.size - whole] += squares[whole:]
            total += float(np.add.accumulate(lanes)[-1])
    return total
