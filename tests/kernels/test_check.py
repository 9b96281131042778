"""A call that cannot be carried out is refused with the reason, and changes nothing."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

from aiops.errors import UsageError
from aiops.kernels import Kernel, Spans, build
from tests.kernels.rules import COMPENSATED, EVERYTHING, FASGD, PASSED_ON
from tests.rows import each_row

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


@each_row("role", ["base", "grad", "target", "b"])
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


@each_row("role", ["target", "n"])
def test_a_read_only_array_that_is_written(kernel: Kernel, role: str) -> None:
    given = arrays()
    given[role].flags.writeable = False
    assert "is read-only" in refused(kernel, given)


def test_a_missing_state(kernel: Kernel) -> None:
    given = arrays()
    del given["v"]
    assert "given 2 state arrays, and its rule has 3" in refused(kernel, given)


@each_row("one", ["base", "grad", "target", "n", "b", "v"])
@each_row("two", ["base", "grad", "target", "n", "b", "v"])
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


@each_row(
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
def test_scalars_that_the_rule_has_not_or_that_are_missing(backend: str) -> None:
    w, g = (np.full(SIZE, 0.5, np.float32) for _ in range(2))
    plain, halves = build(FASGD, np.float32, backend), ([0, 5], [5, 10], [0, 5], [0.1, 0.1])
    text = refused(plain, arrays(), Spans(*halves, [[1.0], [2.0]]))
    assert "scalars of shape (2, 1), not (2, 0); give each tensor its scalars: the rule has" in text
    kernel = build(PASSED_ON, np.float32, backend)
    for wrong in ([[1.0, 2.0]], [[1.0, 2.0]] * 2, [[1.0]], [1.0, 2.0], [[[1.0]], [[2.0]]]):
        with pytest.raises(UsageError, match=r"not \(2, 1\); give each tensor its scalars: more"):
            kernel(Spans(*halves, wrong), 1.0, w, g, w, [w.copy()], [g])
    with pytest.raises(UsageError, match=r"scalars of shape \(2, 0\), not \(2, 1\)"):
        kernel(Spans(*halves), 1.0, w, g, w, [w.copy()], [g])
    assert w.tolist() == [0.5] * SIZE


@pytest.mark.parametrize("backend", ["numba", "numpy"])
def test_what_is_read_fits_too(backend: str) -> None:
    kernel = build(COMPENSATED, np.float32, backend)
    w, g, sent = (np.full(SIZE, 0.5, np.float32) for _ in range(3))
    for reads, reason in (
        ([], "given 0 read-only arrays, and its rule has 1"),
        ([sent, sent], "given 2 read-only arrays, and its rule has 1"),
        ([sent.astype(np.float64)], r"reads\[0\] that has dtype float64, not float32"),
        ([np.ones((SIZE, 1), np.float32)], r"reads\[0\] that has shape"),
        ([sent[1:]], "updates elements 0 to 10 of 9"),
        ([w], r"target and reads\[0\] that overlap|base and reads\[0\] that overlap"),
    ):
        with pytest.raises(UsageError, match=reason):
            kernel(Spans.whole(SIZE, 0.1), 1.0, w, g, w, [], reads)
    assert w.tolist() == [0.5] * SIZE
    other = np.zeros_like(w)
    with pytest.raises(UsageError, match=r"target and reads\[0\] that overlap"):
        kernel(Spans.whole(SIZE, 0.1), 1.0, w, g, other, [], [other])
    sent.flags.writeable = False
    kernel(Spans.whole(SIZE, 0.1), 1.0, w, g, w, [], [sent])
    assert w[0] == np.float32(0.5) - np.float32(0.1) * np.float32(0.5)


@pytest.mark.parametrize("backend", ["numba", "numpy"])
def test_a_state_among_what_is_read_is_not_taken_for_one(backend: str) -> None:
    kernel = build(EVERYTHING, np.float32, backend)
    w, g, one, two, three, four = (np.full(SIZE, 0.5, np.float32) for _ in range(6))
    spans = Spans.whole(SIZE, 0.1, [1.0, 0.5])
    with pytest.raises(UsageError, match="given 1 state arrays, and its rule has 2"):
        kernel(spans, 1.0, w, g, w, [one], [two, three, four])
    with pytest.raises(UsageError, match=r"state\[1\] and reads\[0\] that overlap"):
        kernel(spans, 1.0, w, g, w, [one, two], [two, three])
    kernel(spans, 1.0, w, g, w, [one, two], [g, g])


@pytest.mark.parametrize("backend", ["numba", "numpy"])
def test_16_bit_kernels_update_their_master_so_nobody_reads_it(backend: str) -> None:
    kernel = build(COMPENSATED, np.float16, backend)
    base, buffer = np.full(SIZE, 0.5, np.float32), np.full(3 * SIZE, 0.5, np.float16)
    grad, target, sent = buffer[:SIZE], buffer[SIZE : 2 * SIZE], buffer[2 * SIZE :]
    spans = Spans.whole(SIZE, 0.1)
    for wrong, reason in (
        (sent.astype(np.float32), r"reads\[0\] that has dtype float32, not float16"),
        (base.view(np.float16)[:SIZE], r"base and reads\[0\] that overlap"),
        (target, r"target and reads\[0\] that overlap"),
    ):
        with pytest.raises(UsageError, match=reason):
            kernel(spans, 1.0, base, grad, target, [], [wrong])
    kernel(spans, 1.0, base, grad, target, [], [grad])


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
    assert spans.scalars.shape == (2, 0)
    assert Spans.whole(5, 1.0).scalars.shape == (1, 0)
    assert Spans.whole(5, 1.0, [0.5, 2]).scalars.tolist() == [[0.5, 2.0]]
    assert list(spans.rows()) == [(0, 5, 0, 1.0), (5, 10, 5, 2.0)]
