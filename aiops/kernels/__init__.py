"""Execute update rules, written once as NumPy functions, by several backends to the same bits.

A :class:`Rule` is a plain NumPy function over a small vocabulary. :func:`build` makes a
:class:`Kernel` of it: NumPy executes the function as it stands, in blocks (the specification), and
Numba executes one fused loop generated from its source. Backends may differ only in the payload of
a NaN.

A state element that has become subnormal (below 1.2e-38 in float32) is stored as 0 of its sign. The
moving average of a gradient that has become 0 would otherwise stay subnormal, and processors
calculate with such numbers 20 to 50 times slower.

>>> import numpy as np
>>> def sgd(w, g, step):
...     return (w - step * g,)
>>> kernel = build(Rule(sgd), np.dtype(np.float32), backend="numpy")
>>> w, g = np.ones(4, np.float32), np.ones(4, np.float32)
>>> _ = kernel(Spans.whole(4, step=0.5), 1.0, w, g, w, [])
>>> w
array([0.5, 0.5, 0.5, 0.5], dtype=float32)
"""

from __future__ import annotations

from functools import partial

import numpy as np
import numpy.typing as npt

from aiops.errors import UsageError
from aiops.kernels.backend import PendingNumba, current_backend, need_numba, numba_pending, resolve
from aiops.kernels.deferred import DeferredKernel
from aiops.kernels.interface import (
    STATISTIC_CAP,
    STATISTIC_MOST,
    STATISTIC_SCALE,
    Kernel,
    Spans,
)
from aiops.kernels.master_kernel import MasterKernel
from aiops.kernels.numpy_kernel import NumpyKernel
from aiops.kernels.payloads import FORMATS, format_named
from aiops.kernels.rule import FIRST, FOLD, Rule
from aiops.kernels.rule_parser import parse
from aiops.kernels.scan import (
    SURVEYED,
    bounded,
    first_infinite,
    infinity_finder,
    largest_magnitude,
    reaches,
    sum_squares,
    survey,
    surveyor,
    warm_survey,
)

__all__ = [
    "FIRST",
    "FOLD",
    "PACKED",
    "STATISTIC_CAP",
    "STATISTIC_MOST",
    "STATISTIC_SCALE",
    "SURVEYED",
    "Kernel",
    "PendingNumba",
    "Rule",
    "Spans",
    "bounded",
    "build",
    "build_later",
    "current_backend",
    "first_infinite",
    "infinity_finder",
    "largest_magnitude",
    "need_numba",
    "numba_pending",
    "reaches",
    "resolve",
    "sum_squares",
    "survey",
    "surveyor",
    "warm_survey",
]

PACKED = frozenset(FORMATS)
"""The codecs whose payloads a kernel can read: the values of ``grad`` in `build`."""


def build(
    rule: Rule, dtype: npt.DTypeLike, backend: str = "auto", grad: str | None = None
) -> Kernel:
    """Make ``rule`` executable over tensors of ``dtype``.

    Parameters
    ----------
    rule
        The update.
    dtype
        float32, float64, float16 or bfloat16 (``ml_dtypes.bfloat16``). The 16-bit ones keep a
        float32 master, as :class:`Kernel` describes.
    backend
        ``"numba"``, ``"numpy"`` or ``"auto"``: Numba where it can be imported, else NumPy, with one
        line of advice in the log.
    grad
        The name of a codec in `PACKED`; float32 only. The kernel's ``grad`` is then uint8, and
        holds a whole payload for every span, from byte ``src`` on, at any address. The payloads
        must have been checked. The result has the bits of decoding first and updating then.

    Raises
    ------
    UsageError
        For another dtype, backend or codec, and for a rule that uses anything outside the
        vocabulary, whatever the backend.
    """
    wanted = np.dtype(dtype)
    program = parse(rule)
    packed = None if grad is None else format_named(grad)
    if packed is not None and wanted != np.float32:
        raise UsageError(
            f"rule {rule.name!r} cannot be built to read gradients of {grad!r} for dtype {wanted}:"
            " that codec is for float32; decode them first",
            dtype=str(wanted),
        )
    if wanted.isnative and wanted.name in ("float16", "bfloat16"):
        return MasterKernel(rule, wanted, build(rule, np.float32, backend))
    if not wanted.isnative or wanted.name not in ("float32", "float64"):
        raise UsageError(
            f"rule {rule.name!r} cannot be built for dtype {wanted}; choose native float32, "
            "float64, float16 or bfloat16",
            dtype=str(wanted),
        )
    if resolve(backend) == "numpy":
        return NumpyKernel(rule, wanted, packed)
    from aiops.kernels.numba_kernel import NumbaKernel

    return NumbaKernel(rule, program, wanted, packed)


def build_later(
    rule: Rule, dtype: npt.DTypeLike, backend: str = "auto", grad: str | None = None
) -> Kernel:
    """Make a kernel that can be called before it is compiled.

    Until its ``warm`` has returned, which another thread may call, NumPy executes it, to the same
    bits; from then on it is as fast as `build`'s. Parameters and errors are those of `build`, but
    errors that depend on the backend are raised by ``warm``.
    """
    stand_in = build(rule, dtype, "numpy", grad)
    if backend == "numpy":
        return stand_in
    make = partial(build, rule, dtype, backend, grad)
    return DeferredKernel(make, stand_in, rule, np.dtype(dtype), whole=grad is not None)
