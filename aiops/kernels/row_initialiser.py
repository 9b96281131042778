"""Generate the initial values of the rows of sparse tables.

Element c of row r of a table with seed s is drawn from output c of the generator splitmix64 started
at ``mix(mix(s) + r)``: integers and correctly rounded operations only, so it is the same on every
machine. The loops of `aiops.kernels.table_rows` give the same bits.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from aiops.kernels.vocabulary import Array

__all__ = ["CELLS", "GOLDEN", "KINDS", "MIX", "RowInitialiser", "first_rows", "quantiles"]

Ints = npt.NDArray[np.int64]

GOLDEN = 0x9E37_79B9_7F4A_7C15
MIX = 0xBF58_476D_1CE4_E5B9, 0x94D0_49BB_1331_11EB
CELLS = 4096
"""Cells of equal probability into which the normal distribution is cut; linear within a cell."""

KINDS = ("zeros", "uniform", "normal")


@dataclass(frozen=True, slots=True)
class RowInitialiser:
    """The distribution of a table's initial values.

    Attributes
    ----------
    kind
        One of `KINDS`.
    scale
        Half the range of ``uniform``; the standard deviation of ``normal``, cut at two of them.
    seed
        0 to 2**63 - 1.
    """

    kind: str
    scale: float
    seed: int

    @property
    def start(self) -> int:
        """The number that a row's number is added to, before that is mixed."""
        return _mixed(self.seed)


def _mixed(x: int) -> int:
    """Return the first output of splitmix64 started at x."""
    z = (x + GOLDEN) % (1 << 64)
    z = (z ^ z >> 30) * MIX[0] % (1 << 64)
    z = (z ^ z >> 27) * MIX[1] % (1 << 64)
    return z ^ z >> 31


def first_rows(first: RowInitialiser, ids: Ints, width: int, dtype: np.dtype[Any]) -> Array:
    """Return the initial values of the rows ``ids``: ``dtype[len(ids), width]``."""
    if first.kind == "zeros":
        return np.zeros((len(ids), width), dtype)
    with np.errstate(over="ignore"):  # sums and products are modulo 2**64
        starts = _mix(ids.view(np.uint64) + np.uint64(first.start) + np.uint64(GOLDEN))
        steps = np.arange(1, width + 1, dtype=np.uint64) * np.uint64(GOLDEN)
        drawn = _mix(starts[:, None] + steps)
    if first.kind == "uniform":
        unit = (drawn >> np.uint64(11)).astype(np.float64) * 2.0**-52 - 1.0
    else:
        table = quantiles()
        cell = (drawn >> np.uint64(52)).astype(np.intp)
        inside = (drawn & np.uint64(2**52 - 1)).astype(np.float64) * 2.0**-52
        unit = table[cell] + inside * (table[cell + 1] - table[cell])
    return (unit * first.scale).astype(dtype)


def _mix(z: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    z = (z ^ z >> np.uint64(30)) * np.uint64(MIX[0])
    z = (z ^ z >> np.uint64(27)) * np.uint64(MIX[1])
    return z ^ z >> np.uint64(31)


@functools.cache
def quantiles() -> npt.NDArray[np.float64]:
    """Return z with P(Z < z) = i/4096 for the normal distribution cut to [-2, 2], i = 0 to 4096.

    By Newton's method on the Maclaurin series, in additions, multiplications and divisions only:
    a library's ``log`` or ``exp`` may differ in the last bit from one machine to the next.
    """
    whole = _area(np.array([2.0]))[0]
    wanted = np.linspace(-1.0, 1.0, CELLS + 1) * whole
    z: npt.NDArray[np.float64] = wanted / whole * 2.0
    for _ in range(40):
        z = z - (_area(z) - wanted) / _bell(z)
        z = np.clip(z, -2.0, 2.0)
    z[0], z[-1] = -2.0, 2.0
    z.flags.writeable = False
    return z


def _area(z: Array) -> Array:
    """Return the integral of exp(-x²/2) from 0 to z, for |z| ≤ 2."""
    term, total = z, z
    for n in range(1, 40):
        term = term * z * z / (-2.0 * n)
        total = total + term / (2 * n + 1)
    return total


def _bell(z: Array) -> Array:
    """Return exp(-z²/2) for |z| ≤ 2."""
    term = total = np.ones_like(z)
    for n in range(1, 40):
        term = term * z * z / (-2.0 * n)
        total = total + term
    return total
