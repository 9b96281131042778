"""Sums of bytes by tensor, the columns of a `Ledger`.

Transfers that did not happen count in raw bytes: a hundred bytes of a `Reapply` count as a whole
model. So the sums can exceed 64 bits. They neither wrap nor round: they are int64 while that holds
them, and Python's integers beyond.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from aiops.model.layout import Array, Layout
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

    settled: int
    whole: int

    __slots__ = ("_each", "_most", "settled", "whole")

    def __init__(self) -> None:
        self.whole = self.settled = 0
        self._each: Array | None = None  # [tensors], bytes beside whole models; None: none
        self._most = 0  # what they add up to at most

    def room(self, layout: Layout, nbytes: int) -> Array:
        """Return an array by tensor to which ``nbytes`` bytes (in all, at most) may be added.

        It is int64, or object once all bytes counted may exceed that.
        """
        return self._room(len(layout.tensors), nbytes)

    def _room(self, tensors: int, nbytes: int) -> Array:
        each = self._each
        if each is None:
            each = np.zeros(tensors, np.int64)
        self._most += nbytes
        if self._most > LONGEST and each.dtype != object:
            each = each.astype(object)
        self._each = each
        return each

    def add(self, other: Tally) -> None:
        """Add what another one has counted, but for what is settled."""
        self.whole += other.whole
        if other._each is not None:
            self._add(other)

    def _add(self, other: Tally) -> None:
        if other._each is not None:
            room = self._room(len(other._each), other._most)
            room += other._each

    def settle(self, into: Tally) -> None:
        """Move the bytes by tensor to another tally, and keep their sum."""
        self.settled += self._sum()
        into._add(self)
        self._each, self._most = None, 0

    def _sum(self) -> int:
        return 0 if self._each is None else int(self._each.sum())

    def nbytes(self, layout: Layout | None) -> int:
        """Return the sum in bytes."""
        models = 0 if layout is None else self.whole * layout.nbytes
        return models + self.settled + self._sum()

    def by_tensor(self, layout: Layout) -> Array:
        """Return bytes per tensor in arena order: int64, or object where they are too many."""
        nbytes: Array = layout.nbytes_each
        if self.whole * layout.nbytes + self._most > _EASY:
            nbytes = nbytes.astype(object)
        models: Array = self.whole * nbytes
        return models if self._each is None else models + self._each

    def state(self) -> list[Any] | None:
        """Return the counts as plain values, for `restore`; None if there are none."""
        each = self._each
        if each is None and not (self.whole or self.settled):
            return None
        kept: Any = None
        if each is not None:  # as integers, where 64 bits are too few
            kept = each.tolist() if each.dtype == object else each.copy()
        return [self.whole, self.settled, self._most, kept]

    def restore(self, state: Sequence[Any] | None) -> None:
        """Continue from what `state` returned."""
        self.whole, self.settled, self._most, each = state or (0, 0, 0, None)
        self._each = np.array(each, object) if isinstance(each, list) else each


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

    coded: Tally
    plain: Tally
    sent: Tally

    __slots__ = ("coded", "messages", "plain", "sent")

    def __init__(self) -> None:
        self.messages: int = 0
        self.sent, self.coded, self.plain = Tally(), Tally(), Tally()
