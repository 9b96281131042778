"""Execute a rule with NumPy as it stands: the specification of all backends.

The rule is called for blocks so small that NumPy's temporaries stay in cache: about twice as fast
as on whole tensors, and the same result, since rules are elementwise.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from aiops.kernels.interface import STATISTIC_CAP, STATISTIC_SCALE, Spans, check
from aiops.kernels.payloads import PayloadFormat
from aiops.kernels.rule import Rule
from aiops.kernels.vocabulary import Array

__all__ = ["BLOCK", "NumpyKernel"]

BLOCK = 16_384
"""Elements per block: a dozen float32 temporaries then fit into 1 MiB of second-level cache."""


class NumpyKernel:
    """A rule over float32 or float64, executed by NumPy; implements ``Kernel``."""

    backend = "numpy"

    def __init__(
        self, rule: Rule, dtype: np.dtype[Any], packed: PayloadFormat | None = None
    ) -> None:
        self.rule = rule
        self.dtype = dtype
        self.packed = packed
        self._constants = {name: dtype.type(value) for name, value in rule.constants.items()}
        self._tiny = np.finfo(dtype).tiny
        self._summed = rule.summed

    def __repr__(self) -> str:
        return f"<NumpyKernel {self.rule.name} {self.dtype}>"

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
        """Update every span, block by block, as `Kernel` specifies."""
        check(
            *(self.rule, spans, base, grad, target, state, reads),
            compute=self.dtype,
            wire=self.dtype,
            packed=self.packed,
        )
        real = self.dtype.type
        sums = np.zeros(len(spans), np.int64)
        with np.errstate(all="ignore"):
            scale = real(factor)
            for row, (lo, hi, src, step) in enumerate(spans.rows()):
                numbers = [real(step), *map(real, spans.scalars[row].tolist())]
                for start in range(lo, hi, BLOCK):
                    stop = min(start + BLOCK, hi)
                    if self.packed is None:
                        gradient = grad[src + start - lo : src + stop - lo] * scale
                    else:
                        read = self.packed.read(grad[src:], hi - lo, start - lo, stop - lo)
                        gradient = read * scale
                    arrays = [base[start:stop], gradient]
                    arrays += [array[start:stop] for array in reads]
                    written = [array[start:stop] for array in state]
                    arrays += written
                    sums[row] += self._block(arrays, numbers, [target[start:stop], *written])
        return sums

    def warm(self) -> NumpyKernel:
        """Return this kernel: there is nothing to compile."""
        return self

    def _block(self, arrays: list[Array], numbers: list[Any], written: list[Array]) -> int:
        results = self.rule.function(*arrays, *numbers, **self._constants)
        # A result may be the old value of another array, which must not be overwritten first.
        fresh = [
            result.copy() if any(result is array for array in arrays) else result
            for result in results
        ]
        gauge = fresh.pop() if self.rule.gauge else None
        for array, result in zip(written, fresh, strict=True):
            array[...] = result
        for array in written[1:]:
            np.multiply(array, 0, out=array, where=np.abs(array) < self._tiny)
        if gauge is not None:
            return _fixed_point(gauge)
        return 0 if self._summed is None else _fixed_point(written[self._summed])


def _fixed_point(values: Array) -> int:
    scaled = values * values.dtype.type(STATISTIC_SCALE)
    # fmin takes the other operand where one is NaN.
    np.fmin(scaled, values.dtype.type(STATISTIC_CAP), out=scaled)
    np.fmax(scaled, values.dtype.type(-STATISTIC_CAP), out=scaled)
    return int(scaled.astype(np.int64).sum())
