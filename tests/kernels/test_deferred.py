"""A kernel in the making: NumPy begins, the kernel ends, and the bits do not tell who did what."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from aiops.errors import UsageError
from aiops.kernels import Kernel, Spans, build, build_later, deferred
from aiops.kernels.deferred import DeferredKernel
from aiops.kernels.vocabulary import Array
from tests.kernels.rules import FASGD, SGD
from tests.rows import each_row

SIZES = np.array([3, 700, 0, 250, 99])


class Counting:
    """A kernel that counts the elements it updates, and has something happen after each call."""

    def __init__(self, inner: Kernel, after: Any = None) -> None:
        self.inner, self.backend, self.after = inner, inner.backend, after
        self.elements = 0

    def __call__(self, spans: Spans, *arrays: Any) -> Any:
        self.elements += int((spans.hi - spans.lo).sum())
        sums = self.inner(spans, *arrays)
        if self.after is not None:
            self.after()
        return sums

    def warm(self) -> Kernel:
        self.inner.warm()
        return self


def updated(kernel: Kernel, dtype: Any = np.float32) -> list[bytes]:
    """What an update leaves behind."""
    wide = np.float64 if dtype == np.float64 else np.float32
    total, random = int(SIZES.sum()), np.random.default_rng(3)
    lo = np.cumsum(SIZES) - SIZES
    base, grad = random.normal(size=total).astype(wide), random.normal(size=total).astype(dtype)
    target = np.zeros(total, dtype)
    state = [np.full(total, value, wide) for value in FASGD.state.values()]
    spans = Spans(lo, lo + SIZES, lo, np.linspace(0.1, 0.6, len(SIZES)))
    sums = kernel(spans, 0.5, base, grad, target, state)
    return [array.tobytes() for array in (sums, base, target, *state)]


@each_row("dtype", [np.float32, np.float64, ml_dtypes.bfloat16])
@each_row("calls", [0, 1, 3, 99])
def test_whoever_does_it_the_bits_are_the_same(
    calls: int, dtype: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(deferred, "PIECE", 200)
    seen: list[int] = []

    def ready_after_some() -> None:
        seen.append(1)
        if len(seen) == calls:
            kernel.warm()

    first = Counting(build(FASGD, dtype, "numpy"), ready_after_some)
    then = Counting(build(FASGD, dtype))
    kernel = DeferredKernel(lambda: then, first, FASGD, np.dtype(dtype))
    if calls == 0:
        kernel.warm()
    assert updated(kernel, dtype) == updated(build(FASGD, dtype, "numpy"), dtype)
    assert first.elements + then.elements == SIZES.sum()
    assert (first.elements > 0, then.elements > 0) == (calls > 0, calls < 99)
    assert kernel.backend == ("numpy" if calls == 99 else "numba")


def test_what_does_not_fit_is_refused_before_anything_is_updated(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(deferred, "PIECE", 200)
    kernel, weights = build_later(SGD, np.float32), np.ones(900, np.float32)
    spans = Spans([0, 450], [450, 901], [0, 450], [1.0, 1.0])  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="span 1 of kernel"):
        kernel(spans, 1.0, weights, np.ones(900, np.float32), weights, [])
    assert (weights == 1).all()


def test_payloads_are_not_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(deferred, "PIECE", 64)
    halves: Array = np.arange(300, dtype=np.float16)
    weights = np.zeros(300, np.float32)
    kernel = build_later(SGD, np.float32, grad="fp16")
    kernel(Spans.whole(300, -1.0), 1.0, weights, halves.view(np.uint8), weights, [])
    assert np.array_equal(weights, np.arange(300))


def test_numpy_has_nothing_to_wait_for() -> None:
    assert not isinstance(build_later(SGD, np.float32, "numpy"), DeferredKernel)


def test_a_rule_or_dtype_that_cannot_be_is_refused_at_once() -> None:
    with pytest.raises(UsageError, match="cannot be built for dtype int32"):
        build_later(SGD, np.int32)


def test_nothing_is_imported_before_it_is_warmed() -> None:
    code = (
        "import sys, numpy as np\n"
        "from aiops import kernels\n"
        "kernel = kernels.build_later(kernels.FOLD, np.float32)\n"
        "look = kernels.surveyor(np.dtype(np.float32)), kernels.bounded(3)\n"
        "promise = kernels.PendingNumba()\n"
        "w = np.ones(3, np.float32)\n"
        "kernel(kernels.Spans.whole(3, 1.0), 1.0, w, w.copy(), w, [])\n"
        "assert look[0](w) == -1 - 0x40000000 and look[1](np.array([1, 3])) == 1\n"
        "sys.exit('numba' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
