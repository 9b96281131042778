"""Kernels: mathematics written once, executed by several backends to the same bits.

A :class:`Rule` is a plain NumPy function over a small vocabulary. :func:`build` makes it a
:class:`Kernel`: NumPy executes the function as it stands, in blocks (the specification), and
Numba one fused loop generated from its source. Any NaN counts as the same NaN: its payload is
the only thing backends may differ in.

A state that has become subnormal (below 1.2e-38 in float32) is stored as 0 of its
sign. A moving average of a
gradient that has ended would stay there for ever, and processors calculate with such numbers 20 to
50 times slower.

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

import numpy as np
import numpy.typing as npt

from aiops.errors import UsageError
from aiops.kernels.backend import resolve
from aiops.kernels.half import MasterKernel
from aiops.kernels.reader import read
from aiops.kernels.reference import NumpyKernel
from aiops.kernels.rule import FIRST, FOLD, Rule
from aiops.kernels.scan import bounded, reaches, sum_squares, survey, surveyor
from aiops.kernels.spans import STATISTIC_CAP, STATISTIC_SCALE, Kernel, Spans

__all__ = [
    "FIRST",
    "FOLD",
    "STATISTIC_CAP",
    "STATISTIC_SCALE",
    "Kernel",
    "Rule",
    "Spans",
    "bounded",
    "build",
    "reaches",
    "resolve",
    "sum_squares",
    "survey",
    "surveyor",
]


def build(rule: Rule, dtype: npt.DTypeLike, backend: str = "auto") -> Kernel:
    """Make ``rule`` executable over tensors of ``dtype``.

    ``dtype`` is float32, float64, float16 or bfloat16 (``ml_dtypes.bfloat16``); the 16-bit ones
    keep a float32 master, see :class:`Kernel`. ``backend`` is ``"numba"``, ``"numpy"`` or
    ``"auto"``: Numba where it can be imported, else NumPy, with one line of advice in the log.

    Raises :class:`~aiops.errors.UsageError` for another dtype or backend, and for a rule that
    uses anything outside the vocabulary, whatever the backend.
    """
    wanted = np.dtype(dtype)
    program = read(rule)
    if wanted.isnative and wanted.name in ("float16", "bfloat16"):
        return MasterKernel(rule, wanted, build(rule, np.float32, backend))
    if not wanted.isnative or wanted.name not in ("float32", "float64"):
        raise UsageError(
            f"rule {rule.name!r} cannot be built for dtype {wanted}; choose native float32, "
            "float64, float16 or bfloat16",
            dtype=str(wanted),
        )
    if resolve(backend) == "numpy":
        return NumpyKernel(rule, wanted)
    from aiops.kernels.fused_cpu import NumbaKernel

    return NumbaKernel(rule, program, wanted)
