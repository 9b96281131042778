"""Call a kernel before it is compiled: until then NumPy executes it, to the same bits."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from aiops.kernels.interface import Kernel, Spans, check
from aiops.kernels.parallel import cut
from aiops.kernels.rule import Rule
from aiops.kernels.vocabulary import Array

__all__ = ["PIECE", "DeferredKernel"]

PIECE = 65_536
"""Elements that NumPy updates before the next check whether the kernel is ready."""


class DeferredKernel:
    """A kernel that `warm` makes, on any thread; implements ``Kernel``.

    A call before that is executed by NumPy, piece after piece; when the kernel becomes ready during
    the call, it updates the pieces that are left. So no call waits for a compiler, and none is slow
    for longer than it must.

    Parameters
    ----------
    make
        Makes the kernel; may import and compile for seconds.
    stand_in
        A NumPy kernel of the same rule.
    rule, dtype
        Those of both kernels.
    whole
        Whether calls are never cut into pieces, because their gradients are payloads.
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
        return f"<DeferredKernel {self.current!r}>"

    @property
    def current(self) -> Kernel:
        """The kernel if it is ready, else its stand-in."""
        return self._ready or self._stand_in

    @property
    def backend(self) -> str:
        """The backend that executes it now."""
        return self.current.backend

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
        """Update every span, as `Kernel` specifies, with what is ready."""
        ready, arrays = self._ready, (factor, base, grad, target, state, reads)
        if ready is not None:
            return ready(spans, *arrays)
        if self._whole or int((spans.hi - spans.lo).sum()) <= PIECE:
            return self.current(spans, *arrays)
        compute = np.dtype(np.float32) if self._dtype.itemsize == 2 else self._dtype
        fit = self._rule, spans, base, grad, target, state, reads
        check(*fit, compute=compute, wire=self._dtype)  # of the whole call, before the first piece
        sums = np.zeros(len(spans), np.int64)
        for rows, part in cut(spans, PIECE):
            np.add.at(sums, rows, self.current(part, *arrays))
        return sums

    def warm(self) -> Kernel:
        """Make the kernel, which executes all calls from then on, and return it."""
        if self._ready is None:
            self._ready = self._make().warm()
        return self._ready
