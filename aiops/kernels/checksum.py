"""CRC-32, the one of zlib, ten times as fast where the processor can multiply without carries.

A CRC is the remainder of the bytes, read as a polynomial. A block can be replaced by its product
with a constant that has the same remainder a block further on, where it is added to the bytes
there. So a loop of carry-less multiplications folds all blocks into one, and zlib does the rest.
After V. Gopal and others, "Fast CRC Computation for Generic Polynomials Using PCLMULQDQ
Instruction" (Intel, 2009).
"""

from __future__ import annotations

import zlib
from typing import Any

import numpy as np

from aiops.kernels.backend import resolve
from aiops.kernels.lazy_numba import NumbaWord

__all__ = ["LARGE", "crc32", "warm_crc32"]

LARGE = 8192
"""Bytes from which the loop is worth its call."""

fold_crc = NumbaWord("fold_crc")

_ready: list[tuple[Any, int]] = []  # the loop and the bytes of a block, once it is compiled


def crc32(data: bytes | bytearray | memoryview) -> int:
    """Return the CRC-32 of contiguous bytes, as `zlib.crc32`; the GIL is free meanwhile."""
    length = len(data)
    if length < LARGE or not _ready:
        return zlib.crc32(data)
    fold, block = _ready[0]
    whole = length - length % block
    folded = np.empty(block, np.uint8)
    fold(np.frombuffer(data, np.uint8, whole), folded)
    found = zlib.crc32(folded.data, 0xFFFFFFFF)  # from a state of 0: the block has the first state
    return zlib.crc32(memoryview(data)[whole:], found) if whole < length else found


def warm_crc32(backend: str = "auto") -> None:
    """Compile the loop, or read it from the cache folder; until then zlib does all."""
    if _ready or resolve(backend) == "numpy":
        return
    from numba import types

    from aiops.kernels.numba_jit import FOLDED, array_of, compile_loop

    if FOLDED:
        signature = types.int64(array_of("uint8"), array_of("uint8", writable=True))
        _ready.append((compile_loop(_fold_loop, signature), FOLDED))


def _fold_loop(data: Any, into: Any) -> Any:
    fold_crc(data, into)
    return 0
