"""Sums of bytes by tensor, the columns of a `Ledger`.

Transfers that did not happen count in raw bytes: a hundred bytes of a `Reapply` count as a whole
model. So the sums can exceed 64 bits. They neither wrap nor round: they are int64 while that holds
them, and Python's integers beyond.
"""

from __future__ import annotations

import numpy as np

from aiops.model.layout import Array, Ints, Layout
from aiops.wire.fields import LONGEST

_EASY = 1 << 61
"""Sums up to here are int64, with room for sums and differences of a few of them."""


class Tally:
    """Bytes by tensor. Whole models, the usual case, are only counted.

    Attributes
    ----------
    whole
        The number of whole models, raw.
    settled
        Further bytes whose tensors are in another ledger (`Ledger.settle`).
    """

    __slots__ = ("_beyond", "_each", "_most", "settled", "whole")

    def __init__(self) -> None:
        self.whole = self.settled = 0
        self._each: Ints | None = None  # int64[tensors], bytes beside whole models; None: none
        self._most = 0  # what they add up to at most, never more than int64 holds
        self._beyond: Array | None = None  # object[tensors], the bytes carried over from those

    def room(self, layout: Layout, nbytes: int) -> Array:
        """Return an array by tensor to which ``nbytes`` bytes (in all, at most) may be added.

        It is int64, or object where ``nbytes`` exceeds int64.
        """
        return self._room(len(layout.tensors), nbytes)

    def _room(self, tensors: int, nbytes: int) -> Array:
        most = self._most + nbytes
        if nbytes > LONGEST:
            return self._carry(tensors)
        if self._each is None or most > LONGEST:
            if self._each is not None:
                self._carry(tensors)
            self._each, most = np.zeros(tensors, np.int64), nbytes
        self._most = most
        return self._each

    def _carry(self, tensors: int) -> Array:
        """Move the int64 sums to Python's integers, and return those."""
        beyond = np.zeros(tensors, object) if self._beyond is None else self._beyond
        if self._each is not None:
            beyond += self._each.astype(object)
        self._each, self._most, self._beyond = None, 0, beyond
        return beyond

    def add(self, other: Tally) -> None:
        """Add what another one has counted, but for what is settled."""
        self.whole += other.whole
        self._add(other)

    def _add(self, other: Tally) -> None:
        if other._each is not None:
            room = self._room(len(other._each), other._most)
            room += other._each
        if other._beyond is not None:
            if self._beyond is None:
                self._beyond = np.zeros(len(other._beyond), object)
            self._beyond += other._beyond

    def settle(self, into: Tally) -> None:
        """Move the bytes by tensor to another tally, and keep their sum."""
        self.settled += self._sum()
        into._add(self)
        self._each, self._beyond, self._most = None, None, 0

    def _sum(self) -> int:
        each = 0 if self._each is None else int(self._each.sum())
        return each + (0 if self._beyond is None else int(self._beyond.sum()))

    def nbytes(self, layout: Layout | None) -> int:
        """Return the sum in bytes."""
        models = 0 if layout is None else self.whole * layout.nbytes
        return models + self.settled + self._sum()

    def by_tensor(self, layout: Layout) -> Array:
        """Return bytes per tensor in arena order: int64, or object where they are too many."""
        if self._beyond is None and self.whole * layout.nbytes + self._most <= _EASY:
            models: Array = self.whole * layout.nbytes_each
            return models if self._each is None else models + self._each
        found: Array = self.whole * layout.nbytes_each.astype(object)
        for more in (self._each, self._beyond):
            if more is not None:
                found = found + more
        return found


class Flow:
    """The payloads of one direction, as they crossed.

    Attributes
    ----------
    messages
        The number of messages with a payload.
    sent, coded
        Bytes that crossed, of all parts and of those in a codec.
    plain
        The raw bytes of the parts in a codec.
    """

    __slots__ = ("coded", "messages", "plain", "sent")

    def __init__(self) -> None:
        self.messages = 0
        self.sent, self.coded, self.plain = Tally(), Tally(), Tally()
