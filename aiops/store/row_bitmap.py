"""The rows of a table that are stored: a bit for each, and a mark for each block that has any.

A table may have 2⁴⁰ rows, of which a thousand are stored. To find those, the marks are read, and
the bits of the marked blocks alone: 2⁴⁰ bits would be 128 GiB. Both take memory as they are
written, and a block that has no row any more gives its own back.
"""

from __future__ import annotations

import mmap

import numpy as np
import numpy.typing as npt

from aiops.kernels.table_rows import Bits
from aiops.model.layout import Ints
from aiops.store.untouched import give_back, pages_of, untouched

BLOCK = 1 << 15
"""Rows with one mark: 4 KiB of bits, which are a page."""

_BYTES = BLOCK // 8


class RowBitmap:
    """Notes which rows of a table are stored.

    Parameters
    ----------
    rows
        Those of the table.

    Attributes
    ----------
    bits
        A bit for each row, of whole blocks. Call `mark` after setting some.
    """

    def __init__(self, rows: int) -> None:
        blocks, small = -(-rows // BLOCK), np.dtype(np.uint8)
        self.bits: Bits = untouched(blocks * _BYTES, small)
        self._marks = untouched(blocks, np.dtype(np.bool_))
        self._pages = pages_of(self.bits) if _BYTES % mmap.PAGESIZE == 0 else None

    def mark(self, ids: Ints) -> None:
        """Note that bits of these rows have been set."""
        self._marks[ids // BLOCK] = True

    def add(self, ids: Ints) -> None:
        """Note that these rows are stored."""
        np.bitwise_or.at(self.bits, ids >> 3, (1 << (ids & 7)).astype(np.uint8))
        self.mark(ids)

    def remove(self, ids: Ints, kept: Ints) -> None:
        """Note that rows are stored no longer; ``kept``: those that still are. Both in order."""
        np.bitwise_and.at(self.bits, ids >> 3, ~(1 << (ids & 7)).astype(np.uint8))
        blocks = np.unique(ids // BLOCK)
        begin, end = (np.searchsorted(kept, each * BLOCK) for each in (blocks, blocks + 1))
        empty = blocks[begin == end]
        self._marks[empty] = False
        if self._pages is not None:
            give_back(self._pages, empty, _BYTES)

    def has(self, ids: Ints) -> npt.NDArray[np.bool_]:
        """Return of each row whether it is stored."""
        found: npt.NDArray[np.bool_] = (self.bits[ids >> 3] >> (ids & 7)) & 1 == 1
        return found

    def blocks(self) -> Ints:
        """Return the numbers of the blocks in which rows are stored, in order."""
        return np.flatnonzero(self._marks)

    def ids(self) -> Ints:
        """Return the stored rows, int64, in order."""
        blocks = self.blocks()
        whole = self.bits.view(np.uint64).reshape(-1, BLOCK // 64)
        words = (whole if len(blocks) == len(whole) else whole[blocks]).reshape(-1)
        places = np.flatnonzero(words != 0)
        each = np.unpackbits(words[places].view(np.uint8), bitorder="little").reshape(-1, 64)
        where, bit = np.nonzero(each.view(np.bool_))
        begins = blocks[places // (BLOCK // 64)] * BLOCK + places % (BLOCK // 64) * 64
        return np.ascontiguousarray(begins[where] + bit, np.int64)
