"""A call that cannot be carried out is refused with the reason, and changes nothing."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

from aiops.errors import UsageError
from aiops.kernels import Kernel, Spans, build
from tests.kernels.rules import FASGD

SIZE = 10


@pytest.fixture(params=["numba", "numpy"])
def kernel(request: pytest.FixtureRequest) -> Kernel:
    return build(FASGD, np.float32, request.param)


def arrays() -> dict[str, np.ndarray]:
    names = ("base", "grad", "target", "n", "b", "v")
    return {name: np.full(SIZE, 0.5, np.float32) for name in names}


def refused(kernel: Kernel, given: dict[str, np.ndarray], spans: Spans | None = None) -> str:
    """Call; return the refusal's text, having made sure that nothing changed."""
    before = {name: array.copy() for name, array in given.items()}
    state = [given[name] for name in ("n", "b", "v") if name in given]
    with pytest.raises(UsageError) as caught:
        kernel(
            Spans.whole(SIZE, 0.1) if spans is None else spans,
            1.0,
            given["base"],
            given["grad"],
            given["target"],
            state,
        )
    for name, array in given.items():
        np.testing.assert_array_equal(array, before[name])
    assert "kernel 'fasgd'" in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize("role", ["base", "grad", "target", "b"])
def test_a_wrong_dtype(kernel: Kernel, role: str) -> None:
    given = arrays()
    given[role] = given[role].astype(np.float64)
    shown = "state[1]" if role == "b" else role
    assert f"given {shown} that has dtype float64, not float32" in refused(kernel, given)


def test_a_wrong_layout(kernel: Kernel) -> None:
    given = arrays()
    given["v"] = np.full(2 * SIZE, 0.5, np.float32)[::2]
    assert "state[2] that has shape (10,) and strides (8,)" in refused(kernel, given)
    given["v"] = np.full((SIZE, 1), 0.5, np.float32)
    assert "state[2] that has shape (10, 1)" in refused(kernel, given)


@pytest.mark.parametrize("role", ["target", "n"])
def test_a_read_only_array_that_is_written(kernel: Kernel, role: str) -> None:
    given = arrays()
    given[role].flags.writeable = False
    assert "is read-only" in refused(kernel, given)


def test_a_missing_state(kernel: Kernel) -> None:
    given = arrays()
    del given["v"]
    assert "given 2 state arrays, and its rule has 3" in refused(kernel, given)


@pytest.mark.parametrize("one", ["base", "grad", "target", "n", "b", "v"])
@pytest.mark.parametrize("two", ["base", "grad", "target", "n", "b", "v"])
def test_arrays_that_overlap(kernel: Kernel, one: str, two: str) -> None:
    given = arrays()
    buffer = np.full(2 * SIZE - 1, 0.5, np.float32)
    given[one], given[two] = buffer[:SIZE], buffer[SIZE - 1 :]
    if one == two or {one, two} == {"base", "grad"}:
        # Both are only read.
        kernel(
            Spans.whole(SIZE, 0.1),
            1.0,
            *(given[k] for k in ("base", "grad", "target")),
            [given[k] for k in ("n", "b", "v")],
        )
        return
    assert "overlap in memory" in refused(kernel, given)


@pytest.mark.parametrize(
    ("lo", "hi", "src"),
    [
        (-1, 5, 0),
        (5, 4, 0),
        (0, 11, 0),
        (0, 10, 1),
        (0, 1, 10),
        (0, 1, -1),
        (0, 1, 2**63 - 1),
        (1, -(2**63), 0),
        (-(2**63), 5, 0),
    ],
)
def test_a_span_that_does_not_fit(kernel: Kernel, lo: int, hi: int, src: int) -> None:
    spans = Spans([0, lo], [5, hi], [0, src], [0.1, 0.1])
    text = refused(kernel, arrays(), spans)
    assert f"span 1 of kernel 'fasgd' updates elements {lo} to {hi} of 10" in text


def test_columns_of_different_length(kernel: Kernel) -> None:
    text = refused(kernel, arrays(), Spans([0, 5], [5, 10], [0, 5], [0.1]))
    assert "spans with 2 lo, 2 hi, 2 src and 1 step" in text


@pytest.mark.parametrize("backend", ["numba", "numpy"])
def test_16_bit_kernels_check_the_roles_of_the_two_dtypes(backend: str) -> None:
    kernel = build(FASGD, ml_dtypes.bfloat16, backend)
    given = arrays()
    assert "grad that has dtype float32, not bfloat16" in refused(kernel, given)
    for role in ("grad", "target"):
        given[role] = given[role].astype(ml_dtypes.bfloat16)
    given["base"].flags.writeable = False
    assert "base that is read-only" in refused(kernel, given)
    given["base"] = given["base"].astype(ml_dtypes.bfloat16)
    assert "base that has dtype bfloat16, not float32" in refused(kernel, given)


def test_spans_take_lists_and_have_a_length() -> None:
    spans = Spans([0, 5], [5, 10], [0, 5], [1, 2])
    assert len(spans) == 2
    assert spans.lo.dtype == spans.hi.dtype == spans.src.dtype == np.int64
    assert spans.step.dtype == np.float64
    assert list(spans.rows()) == [(0, 5, 0, 1.0), (5, 10, 5, 2.0)]
