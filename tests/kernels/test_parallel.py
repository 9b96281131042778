"""Work that several share has the bits of one who does it alone."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from aiops.algorithms import find
from aiops.kernels import Spans, build, parallel, surveyor
from aiops.kernels.parallel import add, beside, copy, cut, filled, serial_map, survey, update
from aiops.kernels.payloads import FORMATS
from tests.rows import each_row

BACKENDS = ("numpy", "numba")


def backwards(pieces: Sequence[Callable[[], Any]]) -> None:
    """Runs the pieces in reverse order."""
    for piece in reversed(pieces):
        piece()


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parallel, "LARGE", 64)
    monkeypatch.setattr(parallel, "PIECE", 400)


@each_row(
    ("backend", "dtype"),
    [
        *(("numpy", dtype) for dtype in (np.float32, np.float64, ml_dtypes.bfloat16)),
        *(("numba", dtype) for dtype in (np.float32, ml_dtypes.bfloat16)),
    ],
)
@each_row("policy", ["asgd", "fasgd"])
def test_an_update(backend: str, policy: str, dtype: Any) -> None:
    rule, random = find(policy).make({}).rule(), np.random.default_rng(3)
    kernel = build(rule, dtype, backend)
    wide = np.float64 if dtype == np.float64 else np.float32
    sizes = np.array([1, 700, 0, 3, 250, 99])
    lo = np.concatenate(([5], 5 + np.cumsum(sizes)[:-1]))
    total = 5 + int(sizes.sum()) + 7
    found = []
    for parallel_map in (serial_map, backwards):
        random = np.random.default_rng(3)
        base = random.normal(size=total).astype(wide)
        grad = random.normal(size=total).astype(dtype)
        target = np.zeros(total, dtype)
        state = [np.full(total, value, wide) for value in rule.state.values()]
        spans = Spans(lo, lo + sizes, lo - 5, np.linspace(0.1, 0.6, len(sizes)))
        sums = update(kernel, parallel_map, spans, (0.5, base, grad, target, state, ()))
        found.append([array.tobytes() for array in (sums, base, target, *state)])
    assert found[0] == found[1]


@given(
    st.lists(st.integers(0, 300), min_size=1, max_size=9),
    st.integers(1, 700),
)
def test_pieces_are_the_whole(sizes: list[int], most: int) -> None:
    hi = np.cumsum(sizes)
    lo = hi - sizes
    spans = Spans(lo, hi, lo + 13, np.arange(len(sizes)) / 8, np.arange(len(sizes))[:, None])
    rows, covered = [], []
    for mine, part in cut(spans, most):
        assert (part.hi - part.lo).sum() <= 2 * most
        assert np.array_equal(part.src, part.lo + 13)
        assert np.array_equal(part.step, mine / 8)
        assert np.array_equal(part.scalars[:, 0], mine)
        assert ((part.lo >= lo[mine]) & (part.hi <= hi[mine])).all()
        rows += mine.tolist()
        covered += [at for a, b in zip(part.lo, part.hi, strict=True) for at in range(a, b)]
    assert covered == list(range(sum(sizes)))
    assert rows == sorted(rows)
    assert set(rows) == set(range(len(sizes)))


@each_row("backend", BACKENDS)
@each_row("bad", [(), (0,), (999,), (500, 120, 700)])
def test_a_survey(backend: str, bad: tuple[int, ...]) -> None:
    array = np.ones(1000, np.float32)
    array[list(bad)] = np.nan
    find = surveyor(array.dtype, backend)
    found = survey(find, array, backwards)
    assert found == survey(find, array, serial_map) == min(bad, default=find(array))


def test_a_copy() -> None:
    source = np.random.default_rng(0).integers(0, 255, 1001).astype(np.uint8)
    for parallel_map in (serial_map, backwards):
        target = np.zeros(1001, np.uint8)
        copy(target, source, parallel_map)
        assert np.array_equal(target, source)


def test_a_sum() -> None:
    random = np.random.default_rng(0)
    one, other = random.normal(size=(2, 1001)).astype(np.float32)
    expected = one + other
    for parallel_map in (serial_map, backwards):
        target = one.copy()
        assert add(target, other, parallel_map) is target
        assert np.array_equal(target, expected)


@each_row("value", [0.0, -0.0, 1.0, 0.1])
@each_row("dtype", [np.float64, np.float32, np.float16, ml_dtypes.bfloat16])
@each_row("size", [0, 7, 1001])
def test_a_new_array_that_holds_a_value(size: int, dtype: Any, value: float) -> None:
    for parallel_map in (serial_map, backwards):
        found = filled(size, np.dtype(dtype), value, parallel_map)
        assert found.flags.writeable
        assert found.dtype == dtype
        assert found.tobytes() == np.full(size, value, dtype).tobytes()


@each_row("codec", ["fp16", "int8", "onebit"])
@each_row("backend", BACKENDS)
def test_an_update_from_payloads(backend: str, codec: str) -> None:
    """They are not cut: each lies as a whole."""
    rule, sizes = find("fasgd").make({}).rule(), np.array([1, 700, 0, 3, 1500, 99, 64])
    kernel, form = build(rule, np.float32, backend, codec), FORMATS[codec]
    lengths = form.length(sizes)
    grad = np.random.default_rng(5).integers(0, 60, int(lengths.sum()), np.uint8)
    lo, src, total = np.cumsum(sizes) - sizes, np.cumsum(lengths) - lengths, int(sizes.sum())
    found = []
    for parallel_map in (serial_map, backwards):
        base = np.random.default_rng(3).normal(size=total).astype(np.float32)
        state = [np.full(total, value, np.float32) for value in rule.state.values()]
        spans = Spans(lo, lo + sizes, src, np.linspace(0.1, 0.6, len(sizes)))
        sums = update(kernel, parallel_map, spans, (0.5, base, grad, base, state, ()), whole=True)
        found.append([array.tobytes() for array in (sums, base, *state)])
    assert found[0] == found[1]


def test_a_processor_is_left_to_a_thread_that_is_busy() -> None:
    done, shared = list[int](), list[int]()

    def share(pieces: Sequence[Callable[[], Any]]) -> None:
        shared.append(len(pieces))
        serial_map(pieces)

    def pieces(count: int) -> list[Callable[[], Any]]:
        return [partial(done.append, number) for number in range(count)]

    beside(lambda: len(done) < 3, share)(pieces(5))
    assert (done, shared) == ([0, 1, 2, 3, 4], [2])
    beside(lambda: True, share)(pieces(2))
    assert (done[5:], shared) == ([0, 1], [2, 0])
