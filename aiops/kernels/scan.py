"""Scan received tensors before they are used: find unfit values, and sum squares.

Both backends return the same bits, on every machine.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from struct import Struct
from typing import Any, TypeAlias

import numpy as np

from aiops.errors import UsageError
from aiops.kernels.backend import current_backend, resolve
from aiops.kernels.vocabulary import Array

__all__ = [
    "LANES",
    "SUM_BLOCK",
    "SURVEYED",
    "SURVEY_BLOCK",
    "Surveyor",
    "bits_surveyed",
    "bounded",
    "first_infinite",
    "largest_magnitude",
    "reaches",
    "sum_squares",
    "survey",
    "surveyor",
    "warm_survey",
]

SURVEY_BLOCK = 16_384
"""Elements whose largest magnitude is found before it is compared with the limit."""

SUM_BLOCK = 16_384
"""Elements per partial sum of :func:`sum_squares`."""

LANES = 16
"""Sums that run side by side in a block: element i goes to lane i mod 16."""


@dataclass(frozen=True, slots=True)
class _FloatBits:
    """The bits of a float dtype: a magnitude, read as an integer, is unfit from ``limit`` on."""

    unsigned: np.dtype[Any]
    magnitude: int  # the mask that leaves out the sign
    limit: int  # the first unfit magnitude: NaN and infinity lie above every number
    infinity: int  # that of infinity
    packed: tuple[Struct, Struct]  # of its bits, and of the number that they are
    shift: int = 0  # to those of the number


_FLOAT32 = (Struct("=I"), Struct("=f"))
_FORMATS = {
    "float64": _FloatBits(
        *(np.dtype(np.uint64), 0x7FFF_FFFF_FFFF_FFFF, 0x43AB_C16D_674E_C800, 0x7FF << 52),
        (Struct("=Q"), Struct("=d")),
    ),
    "float32": _FloatBits(np.dtype(np.uint32), 0x7FFF_FFFF, 0x5D5E_0B6B, 0x7F80_0000, _FLOAT32),
    "bfloat16": _FloatBits(np.dtype(np.uint16), 0x7FFF, 0x5D5E, 0x7F80, _FLOAT32, shift=16),
    "float16": _FloatBits(  # it ends far below 1e18
        *(np.dtype(np.uint16), 0x7FFF, 0x7C00, 0x7C00), (Struct("=H"), Struct("=e"))
    ),
}

SURVEYED = tuple(_FORMATS)
"""The names of the dtypes that can be surveyed."""

Surveyor: TypeAlias = Callable[[Array], int]
"""Returns the index of an array's first unfit element. If there is none it is negative: -1 - m,
where m are the bits of the largest magnitude, which `largest_magnitude` reads."""


def survey(array: Array, backend: str = "auto") -> int:
    """Return the index of the first unfit element, or -1 if there is none.

    Unfit is an element that is not finite or has an absolute value of 1e18 (rounded to the dtype)
    or more: its square would be infinite in float32 and never leave the optimiser's statistics.

    Parameters
    ----------
    array
        Contiguous, of any shape; float16, bfloat16, float32 or float64. The index counts its
        elements in memory order. Each is read once.
    backend
        ``"auto"``, ``"numba"`` or ``"numpy"``.

    Raises
    ------
    UsageError
        For another dtype or layout, or an unknown backend.
    """
    form = _format("survey", array)
    return reaches(array.reshape(-1).view(form.unsigned), form.magnitude, form.limit, backend)


def surveyor(dtype: np.dtype[Any], backend: str = "auto") -> Surveyor:
    """Return a `Surveyor` for flat contiguous arrays of one dtype, which finds what `survey` does.

    Numba is imported, and the loop compiled, by the first call.
    """
    form = _format("survey", np.empty(0, dtype))
    return _finder(form.unsigned, form.magnitude, form.limit, backend)


def bits_surveyed(dtype: np.dtype[Any]) -> tuple[int, int, int]:
    """Return the numbers of a survey of one dtype, for another implementation of it.

    They are bytes of an element, the bits of its magnitude, and the least one that is unfit.
    """
    form = _format("survey", np.empty(0, dtype))
    return form.unsigned.itemsize, form.magnitude, form.limit


def infinity_finder(dtype: np.dtype[Any], backend: str = "auto") -> Surveyor:
    """Return :func:`first_infinite` for flat contiguous arrays of one dtype, as `surveyor` does."""
    form = _format("first_infinite", np.empty(0, dtype))
    return _finder(form.unsigned, form.magnitude, form.infinity, backend)


def _finder(unsigned: np.dtype[Any], magnitude: int, limit: int, backend: str) -> Surveyor:
    """Return :func:`reaches` for flat arrays of one size of element, with fewer steps per call."""
    if backend == "numpy":
        return lambda flat: _survey_numpy(flat.view(unsigned), magnitude, limit)
    ready: list[tuple[Callable[..., int], Any, Any]] = []

    def find(flat: Array) -> int:
        if not ready:
            if current_backend(backend) == "numpy":
                return _survey_numpy(flat.view(unsigned), magnitude, limit)
            ready.append(compiled_survey(unsigned.itemsize, magnitude, limit))
        scan, mask, bound = ready[0]
        return scan(flat.view(unsigned), mask, bound)

    return find


def largest_magnitude(found: int, dtype: np.dtype[Any]) -> float:
    """Return the largest magnitude in an array for which a `Surveyor` returned a negative number.

    ``dtype``: the array's. 0 for an empty array.
    """
    form = _KNOWN.get(dtype) or _FORMATS[dtype.name]
    bits = form.packed[0].pack(-1 - found << form.shift)
    value: float = form.packed[1].unpack(bits)[0]
    return value


def first_infinite(array: Array, backend: str = "auto") -> int:
    """Return the index of the first element that is not finite, or -1; as :func:`survey`."""
    form = _format("first_infinite", array)
    bits = array.reshape(-1).view(form.unsigned)
    return reaches(bits, form.magnitude, form.infinity, backend)


def bounded(limit: int, backend: str = "auto") -> Surveyor:
    """Return a function that finds the first element of a flat int64 array not in [0, limit)."""
    # As unsigned numbers, negative ones are larger than all others.
    return _finder(np.dtype(np.uint64), 2**64 - 1, limit, backend)


def warm_survey(dtype: str, backend: str = "auto") -> None:
    """Compile the survey of one of `SURVEYED` now, or read it from the cache folder."""
    if resolve(backend) != "numpy":
        form = _FORMATS[dtype]
        compiled_survey(form.unsigned.itemsize, form.magnitude, form.limit)


def reaches(bits: Array, magnitude: int, limit: int, backend: str = "auto") -> int:
    """Return the first index at which ``bits & magnitude`` is ``limit`` or more, or -1.

    ``bits`` is flat and contiguous, of dtype uint16, uint32 or uint64.
    """
    if current_backend(backend) == "numpy":
        return max(_survey_numpy(bits, magnitude, limit), -1)
    scan, mask, bound = compiled_survey(bits.itemsize, magnitude, limit)
    found: int = scan(bits, mask, bound)
    return max(found, -1)


def sum_squares(array: Array, backend: str = "auto") -> float:
    """Return the sum of ``x * x`` over all elements, in float64 and in a fixed order.

    From the array's start, each block of 16,384 elements is summed in 16 lanes (element i of the
    block is added to lane i mod 16), the lanes are added from left to right, and then the blocks
    in order: the same bits on every machine, at the speed of memory. ``array`` and errors as in
    :func:`survey`. The sum is not finite if an element is not, or if it overflows.
    """
    form = _format("sum_squares", array)
    flat, itemsize = array.reshape(-1), form.unsigned.itemsize
    numpy = current_backend(backend) == "numpy"
    add: Callable[[Array, float], float]
    add = _sum_squares_numpy if numpy else _compiled_sum(max(4, itemsize))
    if itemsize > 2:
        return add(flat, 0.0)
    total = 0.0
    for start in range(0, flat.size, 4 * SUM_BLOCK):
        total = add(flat[start : start + 4 * SUM_BLOCK].astype(np.float32), total)
    return total


def _format(what: str, array: Array) -> _FloatBits:
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


def _survey_numpy(bits: Array, magnitude: int, limit: int) -> int:
    scratch = np.empty(min(bits.size, SURVEY_BLOCK), bits.dtype)
    mask = bits.dtype.type(magnitude)
    most = 0
    for start in range(0, bits.size, SURVEY_BLOCK):
        block = bits[start : start + SURVEY_BLOCK]
        magnitudes = np.bitwise_and(block, mask, out=scratch[: block.size])
        largest = int(magnitudes.max())
        if largest >= limit:
            return start + int(np.argmax(magnitudes >= limit))
        most = max(most, largest)
    return -1 - most


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


# ---------------------------------------------------------------- Numba


@functools.cache
def compiled_survey(itemsize: int, magnitude: int, limit: int) -> tuple[Any, Any, Any]:
    """Return the survey loop for unsigned integers of ``itemsize`` bytes, and its mask and limit.

    It is compiled once, and kept on disk.
    """
    from numba import types

    from aiops.kernels.numba_jit import array_of, compile_loop

    dtype = np.dtype(f"u{itemsize}")
    scalar = getattr(types, dtype.name)
    signature = types.int64(array_of(dtype.name), scalar, scalar)
    scan = compile_loop(_survey_loop, signature)
    return scan, dtype.type(magnitude), dtype.type(limit)


@functools.cache
def _compiled_sum(itemsize: int) -> Any:
    from numba import types

    from aiops.kernels.numba_jit import array_of, compile_loop

    signature = types.float64(array_of(f"float{8 * itemsize}"), types.float64)
    return compile_loop(_sum_squares_loop, signature)


def _survey_loop(bits: Any, magnitude: Any, limit: Any) -> Any:
    unsigned = type(limit)  # Numba works out & in 64 bits, which holds half as many per vector
    most = unsigned(0)
    for start in range(0, bits.size, SURVEY_BLOCK):
        block = bits[start : start + SURVEY_BLOCK]
        largest = unsigned(0)
        for i in range(block.size):
            this = unsigned(block[i] & magnitude)
            largest = this if this > largest else largest
        if largest >= limit:
            for i in range(block.size):
                if unsigned(block[i] & magnitude) >= limit:
                    return start + i
        most = largest if largest > most else most
    return -1 - np.int64(most)


def _sum_squares_loop(array: Any, total: Any) -> Any:
    lanes = np.empty(LANES, np.float64)
    for start in range(0, array.size, SUM_BLOCK):
        block = array[start : start + SUM_BLOCK]
        lanes[:] = 0.0
        rows = block.size // LANES
        by_four = rows - rows % 4
        # Unsigned, because Numba lets a signed index count from the end, which costs a test.
        for row in range(0, by_four, 4):
            at = np.uintp(row * LANES)
            for lane in range(np.uintp(LANES)):
                sum_ = lanes[lane]
                x = np.float64(block[at + lane])
                sum_ += x * x
                x = np.float64(block[at + lane + np.uintp(LANES)])
                sum_ += x * x
                x = np.float64(block[at + lane + np.uintp(2 * LANES)])
                sum_ += x * x
                x = np.float64(block[at + lane + np.uintp(3 * LANES)])
                sum_ += x * x
                lanes[lane] = sum_
        for i in range(by_four * LANES, block.size):
            x = np.float64(block[i])
            lanes[i % LANES] += x * x
        sum_ = lanes[0]
        for lane in range(1, LANES):
            sum_ += lanes[lane]
        total += sum_
    return total
