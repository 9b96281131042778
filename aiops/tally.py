"""Bytes by tensor: what a `Ledger` is made of."""

from __future__ import annotations

import numpy as np

from aiops.layout import Ints, Layout


class Tally:
    """Bytes by tensor. Whole models, the usual case, are only counted.

    Attributes
    ----------
    whole
        How many whole models, raw.
    each
        int64[tensors], bytes beside those; None: none.
    settled
        Bytes beside those, whose tensors stand in another ledger (see `Ledger.settle`).
    """

    __slots__ = ("each", "settled", "whole")

    def __init__(self) -> None:
        self.whole = self.settled = 0
        self.each: Ints | None = None

    def room(self, layout: Layout) -> Ints:
        """Return `each`, made if need be."""
        if self.each is None:
            self.each = np.zeros(len(layout.tensors), np.int64)
        return self.each

    def add(self, other: Tally) -> None:
        """Add what another one has counted, but for what is settled."""
        self.whole += other.whole
        if other.each is not None:
            self.each = other.each + (0 if self.each is None else self.each)

    def settle(self, into: Tally) -> None:
        """Hand the tensors over, and keep their sum."""
        if self.each is not None:
            self.settled += int(self.each.sum())
            into.each = self.each + (0 if into.each is None else into.each)
            self.each = None

    def nbytes(self, layout: Layout | None) -> int:
        """Return the sum in bytes."""
        models = 0 if layout is None else self.whole * layout.nbytes
        return models + self.settled + (0 if self.each is None else int(self.each.sum()))

    def by_tensor(self, layout: Layout) -> Ints:
        """Return bytes per tensor, int64, in arena order."""
        models: Ints = self.whole * layout.nbytes_each
        return models if self.each is None else models + self.each


class Flow:
    """The payloads of one direction, as they crossed.

    Attributes
    ----------
    messages
        Those that brought a payload.
    sent, coded
        Bytes that crossed, of all parts and of those in a codec.
    plain
        What the parts in a codec would have been raw.
    """

    __slots__ = ("coded", "messages", "plain", "sent")

    def __init__(self) -> None:
        self.messages = 0
        self.sent, self.coded, self.plain = Tally(), Tally(), Tally()
