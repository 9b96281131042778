"""The interface of kernels: the spans of a call, the protocol, and the checks of arguments."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache
from itertools import combinations
from typing import Any, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt

from aiops.errors import UsageError
from aiops.kernels.payloads import PayloadFormat
from aiops.kernels.rule import Rule
from aiops.kernels.vocabulary import Array

__all__ = [
    "STATISTIC_CAP",
    "STATISTIC_MOST",
    "STATISTIC_SCALE",
    "Kernel",
    "Operands",
    "Spans",
    "check",
    "check_counts",
    "check_spans",
]

STATISTIC_SCALE = 2.0**24
"""Units of the fixed-point statistic per 1.0."""

STATISTIC_CAP = 2.0**30
"""The largest fixed-point statistic of one element, in units; NaN counts as this too."""

STATISTIC_MOST = (2**63 - 1) // int(STATISTIC_CAP)
"""The most elements whose fixed-point statistics have a sum that int64 holds for certain."""


_NONE: npt.NDArray[np.float64] = np.empty((0, 0))
_BYTES = np.dtype(np.uint8)


@dataclass(slots=True)
class Spans:
    """The n tensors that a call of a kernel updates, one row each.

    Arguments are converted to contiguous arrays of the dtypes below.

    Attributes
    ----------
    lo, hi
        int64[n], the element range [lo, hi) of each tensor in the arena section.
    src
        int64[n], the index of the tensor's first element in the gradient buffer; for a kernel that
        reads payloads, the byte at which the tensor's payload begins.
    step
        float64[n], learning rate times modulation; cast to the compute dtype when used.
    scalars
        float64[n, k], the k scalars of the rule for each tensor, cast like ``step``; by default
        float64[n, 0], for a rule without scalars.
    """

    lo: npt.NDArray[np.int64]
    hi: npt.NDArray[np.int64]
    src: npt.NDArray[np.int64]
    step: npt.NDArray[np.float64]
    scalars: npt.NDArray[np.float64] = field(default_factory=lambda: _NONE)

    def __post_init__(self) -> None:
        self.lo = np.ascontiguousarray(self.lo, np.int64)
        self.hi = np.ascontiguousarray(self.hi, np.int64)
        self.src = np.ascontiguousarray(self.src, np.int64)
        self.step = np.ascontiguousarray(self.step, np.float64)
        if self.scalars is _NONE:
            self.scalars = np.empty((len(self.lo), 0))
        else:
            self.scalars = np.ascontiguousarray(self.scalars, np.float64)

    def __len__(self) -> int:
        return len(self.lo)

    @classmethod
    def whole(cls, size: int, step: float, scalars: Sequence[float] = ()) -> Spans:
        """One tensor of ``size`` elements that fills the section and the gradient buffer."""
        zero = np.zeros(1, np.int64)
        return cls(zero, np.array([size]), zero, np.array([step]), np.array([scalars], np.float64))

    def flat(self, count: int) -> tuple[npt.NDArray[np.float64], ...]:
        """Return a tuple of ``scalars`` in one dimension, or an empty one if ``count`` is 0.

        Raises ValueError unless there are ``count`` of them per tensor.
        """
        tensors = len(self.lo)
        if tensors and self.scalars.shape != (tensors, count):
            raise ValueError("scalars do not fit")
        return (self.scalars.reshape(-1),) if count else ()

    def take(self, rows: npt.NDArray[np.int64] | slice) -> Spans:
        """Return some of the tensors, by their indices."""
        lo, hi, src, step = self.lo[rows], self.hi[rows], self.src[rows], self.step[rows]
        return Spans(lo, hi, src, step, self.scalars[rows])

    def rows(self) -> Iterator[tuple[int, int, int, float]]:
        """Yield ``(lo, hi, src, step)`` of each tensor as Python numbers."""
        return zip(
            self.lo.tolist(), self.hi.tolist(), self.src.tolist(), self.step.tolist(), strict=True
        )


Operands: TypeAlias = tuple[float, Array, Array, Array, Sequence[Array], Sequence[Array]]
"""The arguments of a `Kernel` after the spans: factor, base, grad, target, state, reads."""


class Kernel(Protocol):
    """A rule made executable for one dtype, by :func:`aiops.kernels.build`."""

    @property
    def backend(self) -> str:
        """The backend that executes it: ``"numpy"``, ``"numba"`` or ``"cuda"``."""

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
        """Update every span.

        For each span the rule is called with ``w = base[lo:hi]``, ``read[lo:hi]`` of each of
        ``reads`` and ``g = grad[src : src + hi - lo] * factor``. The new ``w`` is written to
        ``target[lo:hi]``, and the state arrays are updated in place. Elements outside the spans are
        untouched. All arrays are one-dimensional and contiguous. ``target`` may be ``base``; apart
        from that, an array that is written may not overlap another, so a read may share memory with
        ``base`` only where ``target`` is another array.

        With float32 and float64 every array has that dtype. With a 16-bit dtype ``grad``, ``reads``
        and ``target`` have it, while ``base`` (the master copy, **updated in place**) and ``state``
        are float32; the new master, rounded to 16 bits, is written to ``target``.

        Parameters
        ----------
        spans
            The tensors.
        factor
            Multiplied with every gradient element; cast to the compute dtype first.
        base
            The parameters before the update.
        grad
            The gradients, or the bytes of their payloads.
        target
            The parameters after the update.
        state
            The rule's state arrays, in its order.
        reads
            The rule's reads, in its order.

        Returns
        -------
        int64[n]
            Per tensor, the sum of ``int64(clip(x * STATISTIC_SCALE, -STATISTIC_CAP,
            STATISTIC_CAP))`` over the new elements x of the statistic, or of the gauge: exact, and
            so independent of order. Zeros for a rule that has neither.

        Raises
        ------
        UsageError
            When an array or a span does not fit; nothing is updated then.
        """

    def warm(self) -> Kernel:
        """Compile now, so that the first call does not; return the kernel to call from now on."""


def check(
    rule: Rule,
    spans: Spans,
    base: Array,
    grad: Array,
    target: Array,
    state: Sequence[Array],
    reads: Sequence[Array],
    *,
    compute: np.dtype[Any],
    wire: np.dtype[Any],
    packed: PayloadFormat | None = None,
) -> None:
    """Raise :class:`~aiops.errors.UsageError` unless a kernel of the rule can execute the call.

    The arguments up to ``reads`` are those of `Kernel`. ``compute`` is the dtype of ``base`` and
    ``state``, ``wire`` that of ``grad``, ``reads`` and ``target``. With ``packed``, ``grad`` holds
    payloads of that format, as uint8.
    """
    name = rule.name
    check_counts(rule, state, reads)
    gradient = wire if packed is None else _BYTES
    arrays = base, grad, target, *state, *reads
    dtypes = compute, gradient, wire, *(compute,) * len(state), *(wire,) * len(reads)
    written = compute != wire, False, True, *(True,) * len(state), *(False,) * len(reads)
    for index, (array, dtype, writes) in enumerate(zip(arrays, dtypes, written, strict=True)):
        if not _fits(array, dtype, writes):
            raise _unfit(name, _role(index, state), array, dtype)
    size = min(array.size for array in (base, target, *state, *reads))
    check_spans(name, spans, size, grad.size, rule.scalars, packed)
    for one, two in _pairs(len(state), len(reads), compute != wire):
        first, second = arrays[one], arrays[two]
        if np.may_share_memory(first, second):
            if (one, two) == (0, 2) and _start(first) == _start(second):
                continue  # in place
            roles = _role(one, state), _role(two, state)
            raise UsageError(
                f"kernel {name!r} was given {roles[0]} and {roles[1]} that overlap in memory; only "
                "target may be base, and then exactly",
                kernel=name,
                arrays=roles,
            )


@cache
def _pairs(states: int, reads: int, masters: bool) -> tuple[tuple[int, int], ...]:
    """Return the pairs of a call's arrays, by their places, of which one is written."""
    only_read = {1, *range(3 + states, 3 + states + reads), *(() if masters else (0,))}
    pairs = combinations(range(3 + states + reads), 2)
    return tuple(pair for pair in pairs if not only_read.issuperset(pair))


def _role(index: int, state: Sequence[object]) -> str:
    """Return what the array at a place is called in an error."""
    if index < 3:
        return ("base", "grad", "target")[index]
    index -= 3
    return f"state[{index}]" if index < len(state) else f"reads[{index - len(state)}]"


def check_counts(rule: Rule, state: Sequence[object], reads: Sequence[object]) -> None:
    """Raise :class:`~aiops.errors.UsageError` unless there are as many arrays as the rule names."""
    for kind, given, wanted in (("state", state, rule.state), ("read-only", reads, rule.reads)):
        if len(given) != len(wanted):
            raise UsageError(
                f"kernel {rule.name!r} was given {len(given)} {kind} arrays, and its rule has "
                f"{len(wanted)}; pass them in the rule's order",
                kernel=rule.name,
            )


def _start(array: Array) -> int:
    return int(array.__array_interface__["data"][0])


def _fits(array: Array, dtype: np.dtype[Any], writes: bool) -> bool:
    flags = array.flags
    return (
        array.dtype == dtype
        and array.ndim == 1
        and flags.c_contiguous
        and (flags.writeable or not writes)
    )


def _unfit(name: str, role: str, array: Array, dtype: np.dtype[Any]) -> UsageError:
    """Return the refusal of an array that does not fit."""
    if array.dtype != dtype:
        fault, remedy = f"has dtype {array.dtype}, not {dtype}", "convert it first"
    elif array.ndim != 1 or not array.flags.c_contiguous:
        fault = f"has shape {array.shape} and strides {array.strides}"
        remedy = "pass a one-dimensional contiguous array"
    else:
        fault, remedy = "is read-only", "pass a writable array"
    return UsageError(f"kernel {name!r} was given {role} that {fault}; {remedy}", kernel=name)


def check_spans(
    name: str,
    spans: Spans,
    size: int,
    grad_size: int,
    scalars: Sequence[str],
    packed: PayloadFormat | None,
) -> None:
    """Raise :class:`~aiops.errors.UsageError` unless the spans fit the arrays.

    ``size`` is the number of elements of the arena section, ``grad_size`` that of the gradient
    buffer, or its bytes if it holds payloads of the format ``packed``; ``scalars`` are the names of
    the rule's.
    """
    lo, hi, src = spans.lo, spans.hi, spans.src
    if not len(lo) == len(hi) == len(src) == len(spans.step):
        raise UsageError(
            f"kernel {name!r} was given spans with {len(lo)} lo, {len(hi)} hi, {len(src)} src and "
            f"{len(spans.step)} step; give one of each per tensor",
            kernel=name,
        )
    if len(lo) and spans.scalars.shape != (len(lo), len(scalars)):
        raise UsageError(
            f"kernel {name!r} was given spans with scalars of shape {spans.scalars.shape}, not "
            f"({len(lo)}, {len(scalars)}); give each tensor its scalars: "
            f"{', '.join(scalars) or 'the rule has none'}",
            kernel=name,
        )
    taken = hi - lo if packed is None else packed.length(hi - lo)
    good = (lo >= 0) & (hi >= lo) & (hi <= size) & (src >= 0) & (src <= grad_size - taken)
    if not good.all():
        row = int(np.argmin(good))
        raise UsageError(
            f"span {row} of kernel {name!r} updates elements {lo[row]} to {hi[row]} of {size} from "
            f"gradient {'elements' if packed is None else 'bytes'} {src[row]} on, of {grad_size}"
            f"{f' ({taken[row]} are needed)' if packed else ''}; correct the span or the arrays",
            kernel=name,
            span=row,
        )
