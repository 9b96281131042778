"""A kernel in the making: until it is ready, NumPy does its work, to the same bits."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from aiops.kernels.rule import Rule
from aiops.kernels.sharing import cut
from aiops.kernels.spans import Kernel, Spans, check
from aiops.kernels.vocabulary import Array

__all__ = ["PIECE", "Rising"]

PIECE = 65_536
"""Elements that NumPy updates before it looks whether the kernel is ready."""


class Rising:
    """A kernel that `warm` makes, on any thread; implements ``Kernel``.

    A call that comes meanwhile is begun by NumPy, piece after piece, and what is left when the
    kernel is ready is left to that. So nobody waits for a compiler, and nobody for NumPy while
    there is something quicker.

    Parameters
    ----------
    make
        Makes the kernel; may import and compile for seconds.
    stand_in
        The same rule, by NumPy.
    rule, dtype
        What both are of.
    whole
        Whether a call cannot be cut, because its gradients are payloads.
    """

    def __init__(
        self,
        make: Callable[[], Kernel],
        stand_in: Kernel,
        rule: Rule,
        dtype: np.dtype[Any],
        *,
        whole: bool = False,
    ) -> None:
        self._make, self._stand_in = make, stand_in
        self._rule, self._dtype, self._whole = rule, dtype, whole
        self._ready: Kernel | None = None

    def __repr__(self) -> str:
        return f"<Rising {self.at_hand!r}>"

    @property
    def at_hand(self) -> Kernel:
        """The kernel if it is ready, else what stands in for it."""
        return self._ready or self._stand_in

    @property
    def backend(self) -> str:
        """Which backend executes it now."""
        return self.at_hand.backend

    def __call__(
        self,
        spans: Spans,
        factor: float,
        base: Array,
        grad: Array,
        target: Array,
        state: Sequence[Array],
        reads: Sequence[Array] = (),
    ) -> npt.NDArray[np.int64]:
        """Update every span; see :class:`aiops.kernels.Kernel`."""
        ready, arrays = self._ready, (factor, base, grad, target, state, reads)
        if ready is not None:
            return ready(spans, *arrays)
        if self._whole or int((spans.hi - spans.lo).sum()) <= PIECE:
            return self.at_hand(spans, *arrays)
        compute = np.dtype(np.float32) if self._dtype.itemsize == 2 else self._dtype
        fit = self._rule, spans, base, grad, target, state, reads
        check(*fit, compute=compute, wire=self._dtype)  # all of it, before any is updated
        sums = np.zeros(len(spans), np.int64)
        for rows, part in cut(spans, PIECE):
            np.add.at(sums, rows, self.at_hand(part, *arrays))
        return sums

    def warm(self) -> None:
        """Make the kernel, and have it do the work from here on."""
        if self._ready is None:
            made = self._make()
            made.warm()
            self._ready = made
