"""What a kernel is handed: spans of the arena, and the arrays they lie in."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from aiops.errors import UsageError
from aiops.kernels.vocabulary import Array

__all__ = ["STATISTIC_CAP", "STATISTIC_SCALE", "Kernel", "Spans", "check"]

STATISTIC_SCALE = 2.0**24
"""Units of the fixed-point statistic per 1.0."""

STATISTIC_CAP = 2.0**30
"""The largest fixed-point statistic of one element, in units; NaN counts as this, too."""


@dataclass(slots=True)
class Spans:
    """Which tensors a kernel updates, one row each; anything that makes such arrays is taken.

    ``lo`` and ``hi``: int64[n], the element range of each tensor in the arena section.
    ``src``: int64[n], where the tensor's first element lies in the gradient buffer.
    ``step``: float64[n], learning rate times modulation; cast to the compute dtype when used.
    """

    lo: npt.NDArray[np.int64]
    hi: npt.NDArray[np.int64]
    src: npt.NDArray[np.int64]
    step: npt.NDArray[np.float64]

    def __post_init__(self) -> None:
        self.lo = np.ascontiguousarray(self.lo, np.int64)
        self.hi = np.ascontiguousarray(self.hi, np.int64)
        self.src = np.ascontiguousarray(self.src, np.int64)
        self.step = np.ascontiguousarray(self.step, np.float64)

    def __len__(self) -> int:
        return len(self.lo)

    @classmethod
    def whole(cls, size: int, step: float) -> Spans:
        """One tensor of ``size`` elements that fills the section and the gradient buffer."""
        return cls(np.zeros(1, np.int64), np.array([size]), np.zeros(1, np.int64), np.array([step]))

    def rows(self) -> Iterator[tuple[int, int, int, float]]:
        """Yield ``(lo, hi, src, step)`` of each tensor as Python numbers."""
        return zip(
            self.lo.tolist(), self.hi.tolist(), self.src.tolist(), self.step.tolist(), strict=True
        )


class Kernel(Protocol):
    """A rule made executable for one dtype; see :func:`aiops.kernels.build`."""

    @property
    def backend(self) -> str:
        """Which backend executes it: ``"numpy"`` or ``"numba"``."""

    def __call__(
        self,
        spans: Spans,
        factor: float,
        base: Array,
        grad: Array,
        target: Array,
        state: Sequence[Array],
    ) -> npt.NDArray[np.int64]:
        """Update every span; return int64[n], the sums of the statistic per tensor.

        For each span the rule sees ``w = base[lo:hi]`` and
        ``g = grad[src : src + hi - lo] * factor`` (``factor`` cast to the compute dtype); the new
        ``w`` is written to ``target[lo:hi]`` and the state arrays are updated in place. Elements
        outside the spans are untouched. All arrays are one-dimensional and contiguous; ``target``
        may be ``base``; apart from that, an array that is written may not overlap another.

        With float32 and float64 every array has that dtype. With a 16-bit dtype ``grad`` and
        ``target`` have it, while ``base`` (the master copy, **updated in place**) and ``state``
        are float32; ``target`` is given the new master rounded to 16 bits.

        A sum is that of ``int64(clip(x * STATISTIC_SCALE, -STATISTIC_CAP, STATISTIC_CAP))`` over
        the statistic's new elements x, exact and so independent of order; zero if the rule has no
        statistic. Raises :class:`~aiops.errors.UsageError`, with nothing updated, when an array
        or a span does not fit.
        """

    def warm(self) -> None:
        """Do now what the first call would otherwise have to: compile."""


def check(
    name: str,
    spans: Spans,
    base: Array,
    grad: Array,
    target: Array,
    state: Sequence[Array],
    *,
    states: int,
    compute: np.dtype[Any],
    wire: np.dtype[Any],
) -> None:
    """Raise :class:`~aiops.errors.UsageError` unless a call of kernel ``name`` can be carried out.

    ``states`` is how many state arrays the rule has, ``compute`` the dtype of ``base`` and
    ``state``, ``wire`` that of ``grad`` and ``target``.
    """
    if len(state) != states:
        raise UsageError(
            f"kernel {name!r} was given {len(state)} state arrays, and its rule has {states}; "
            "pass them in the rule's order",
            kernel=name,
        )
    only_read = {"grad", "base"} if compute == wire else {"grad"}
    arrays = {"base": (base, compute), "grad": (grad, wire), "target": (target, wire)}
    arrays |= {f"state[{index}]": (array, compute) for index, array in enumerate(state)}
    for role, (array, dtype) in arrays.items():
        _check_array(name, role, array, dtype, written=role not in only_read)
    _check_spans(name, spans, min(array.size for array in (base, target, *state)), grad.size)
    for (one, (first, _)), (two, (second, _)) in combinations(arrays.items(), 2):
        in_place = {one, two} == {"base", "target"} and _start(first) == _start(second)
        harmless = in_place or {one, two} <= only_read
        if not harmless and np.may_share_memory(first, second):
            raise UsageError(
                f"kernel {name!r} was given {one} and {two} that overlap in memory; only target "
                "may be base, and then exactly",
                kernel=name,
                arrays=(one, two),
            )


def _start(array: Array) -> int:
    return int(array.__array_interface__["data"][0])


def _check_array(
    name: str, role: str, array: Array, dtype: np.dtype[Any], *, written: bool
) -> None:
    if array.dtype != dtype:
        fault, remedy = f"has dtype {array.dtype}, not {dtype}", "convert it first"
    elif array.ndim != 1 or not array.flags.c_contiguous:
        fault = f"has shape {array.shape} and strides {array.strides}"
        remedy = "pass a one-dimensional contiguous array"
    elif written and not array.flags.writeable:
        fault, remedy = "is read-only", "pass the array that is to be updated"
    else:
        return
    raise UsageError(f"kernel {name!r} was given {role} that {fault}; {remedy}", kernel=name)


def _check_spans(name: str, spans: Spans, size: int, grad_size: int) -> None:
    lo, hi, src = spans.lo, spans.hi, spans.src
    if not len(lo) == len(hi) == len(src) == len(spans.step):
        raise UsageError(
            f"kernel {name!r} was given spans with {len(lo)} lo, {len(hi)} hi, {len(src)} src and "
            f"{len(spans.step)} step; give one of each per tensor",
            kernel=name,
        )
    good = (lo >= 0) & (hi >= lo) & (hi <= size) & (src >= 0) & (src <= grad_size - (hi - lo))
    if not good.all():
        row = int(np.argmin(good))
        raise UsageError(
            f"span {row} of kernel {name!r} updates elements {lo[row]} to {hi[row]} of {size} from "
            f"gradient elements {src[row]} on, of {grad_size}; correct the span or the arrays",
            kernel=name,
            span=row,
        )
