"""Zeros that take memory page by page, as they are written."""

from __future__ import annotations

import mmap
import platform
import sys
from typing import Any

import numpy as np
import numpy.typing as npt

from aiops.model.layout import Ints

_NO_HUGE_PAGES = getattr(mmap, "MADV_NOHUGEPAGE", None)
_USUAL = sys.platform == "linux" and platform.machine() in ("x86_64", "aarch64", "riscv64")
_NO_RESERVE = getattr(mmap, "MAP_NORESERVE", 0x4000 if _USUAL else 0)  # Python 3.13 has the name
_SMALL = 1 << 20  # bytes: smaller arrays are allocated by NumPy


def untouched(count: int, dtype: np.dtype[Any]) -> npt.NDArray[Any]:
    """Return zeros that take up memory page by page, as they are written.

    They may be more than the machine has (no reserve). Huge pages, which NumPy requests where it
    can, are switched off: the first row written in one would take 2 MiB.

    Raises
    ------
    MemoryError
        When the system has no address space for them, or reserves memory all the same.
    """
    nbytes = count * dtype.itemsize
    if nbytes < _SMALL or _NO_HUGE_PAGES is None:
        return np.zeros(count, dtype)
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _NO_RESERVE
    try:
        pages = mmap.mmap(-1, nbytes, flags=flags)
    except OSError as error:
        raise MemoryError(error.strerror) from None
    pages.madvise(_NO_HUGE_PAGES)
    return np.frombuffer(pages, dtype)


def pages_of(array: npt.NDArray[Any]) -> mmap.mmap | None:
    """Return the pages of an array that `untouched` has made; None: NumPy has allocated it."""
    base: Any = array.base
    while isinstance(base, np.ndarray):
        base = base.base
    pages = base.obj if isinstance(base, memoryview) else base
    return pages if isinstance(pages, mmap.mmap) else None


def give_back(pages: mmap.mmap, numbers: Ints, nbytes: int) -> None:
    """Give memory back to the system; it reads as zeros, and takes none until it is written.

    Parameters
    ----------
    pages
        Those of an array that `untouched` has made.
    numbers
        Which of the pieces that the array is cut into, in order.
    nbytes
        Of a piece: whole pages.
    """
    if not len(numbers):
        return
    breaks = np.flatnonzero(np.diff(numbers) != 1) + 1
    begins, lasts = numbers[np.r_[0, breaks]], numbers[np.r_[breaks - 1, len(numbers) - 1]]
    for begin, last in zip(begins.tolist(), lasts.tolist(), strict=True):
        pages.madvise(mmap.MADV_DONTNEED, begin * nbytes, (last + 1 - begin) * nbytes)
