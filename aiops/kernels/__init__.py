"""Kernels: mathematics written once, executed by several backends to the same bits.

A :class:`Rule` is a plain NumPy function over a small vocabulary. :func:`build` makes it a
:class:`Kernel`: NumPy executes the function as it stands, in blocks (the specification), and
Numba one fused loop generated from its source. Any NaN counts as the same NaN: its payload is
the only thing backends may differ in.

A state that has become subnormal (below 1.2e-38 in float32) is stored as 0 of its sign. A moving
average of a gradient that has ended would stay there for ever, and processors calculate with such
numbers 20 to 50 times slower.

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
from aiops.kernels.backend import Expected, at_hand, expected, resolve
from aiops.kernels.half import MasterKernel
from aiops.kernels.packed import FORMS, form_named
from aiops.kernels.reader import read
from aiops.kernels.reference import NumpyKernel
from aiops.kernels.rising import Rising
from aiops.kernels.rule import FIRST, FOLD, Rule
from aiops.kernels.scan import (
    SURVEYED,
    bounded,
    reaches,
    sum_squares,
    survey,
    surveyor,
    warm_survey,
)
from aiops.kernels.spans import STATISTIC_CAP, STATISTIC_SCALE, Kernel, Spans

__all__ = [
    "FIRST",
    "FOLD",
    "PACKED",
    "STATISTIC_CAP",
    "STATISTIC_SCALE",
    "SURVEYED",
    "Expected",
    "Kernel",
    "Rule",
    "Spans",
    "at_hand",
    "bounded",
    "build",
    "build_later",
    "expected",
    "reaches",
    "resolve",
    "sum_squares",
    "survey",
    "surveyor",
    "warm_survey",
]

PACKED = frozenset(FORMS)
"""The codecs whose payloads a kernel can read; see `build`."""


def build(
    rule: Rule, dtype: npt.DTypeLike, backend: str = "auto", grad: str | None = None
) -> Kernel:
    """Make ``rule`` executable over tensors of ``dtype``.

    ``dtype`` is float32, float64, float16 or bfloat16 (``ml_dtypes.bfloat16``); the 16-bit ones
    keep a float32 master, see :class:`Kernel`. ``backend`` is ``"numba"``, ``"numpy"`` or
    ``"auto"``: Numba where it can be imported, else NumPy, with one line of advice in the log.

    ``grad`` is the name of a codec (``fp16``, ``bf16``, ``int8``, ``onebit``; dtype float32 only).
    The kernel's ``grad`` is then a buffer of bytes, uint8, that holds a whole payload for every
    span, from byte ``src`` on, at any address. It has been checked: a payload is read whatever it
    is. The result has the bits of decoding first and updating then.

    Raises :class:`~aiops.errors.UsageError` for another dtype, backend or codec, and for a rule
    that uses anything outside the vocabulary, whatever the backend.
    """
    wanted = np.dtype(dtype)
    program = read(rule)
    packed = None if grad is None else form_named(grad)
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
    from aiops.kernels.fused_cpu import NumbaKernel

    return NumbaKernel(rule, program, wanted, packed)


def build_later(
    rule: Rule, dtype: npt.DTypeLike, backend: str = "auto", grad: str | None = None
) -> Kernel:
    """Make a kernel that can be called at once, and is as quick as `build`'s after its `warm`.

    Until then NumPy does its work, to the same bits: nothing is imported or compiled but by
    `warm`, which another thread may call. Arguments and errors are those of `build`, of which
    `warm` raises those that depend on the backend.
    """
    stand_in = build(rule, dtype, "numpy", grad)
    if backend == "numpy":
        return stand_in
    make = partial(build, rule, dtype, backend, grad)
    return Rising(make, stand_in, rule, np.dtype(dtype), whole=grad is not None)
