"""Numba has the bits of the NumPy reference, which has those of the rule on whole arrays."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

from aiops.kernels import FOLD, STATISTIC_SCALE, Rule, Spans, build
from aiops.kernels.numpy_kernel import BLOCK
from tests.kernels.rules import (
    ALL,
    COMPENSATED,
    EVERY_WORD,
    EVERYTHING,
    FASGD,
    LITERAL,
    PASSED_ON,
    SGD,
    SWAP,
    bits,
    outcome,
    spans_over,
)
from tests.rows import each_row

WIDE = (np.dtype(np.float32), np.dtype(np.float64))
HALF = (np.dtype(np.float16), np.dtype(ml_dtypes.bfloat16))


def draw(random: np.random.Generator, size: int, dtype: np.dtype, special: bool) -> np.ndarray:
    """Values of many magnitudes, with all that is awkward about floats among them."""
    values = random.standard_normal(size) * 10.0 ** random.integers(-3, 4, size)
    if special:
        tiny = float(ml_dtypes.finfo(dtype).smallest_subnormal)
        huge = float(ml_dtypes.finfo(dtype).max)
        awkward = [0.0, -0.0, np.nan, np.inf, -np.inf, tiny, -3 * tiny, huge, -huge, 1e-20, 1.0]
        chosen = random.random(size) < 0.5
        values[chosen] = random.choice(awkward, int(chosen.sum()))
    with np.errstate(all="ignore"):
        return values.astype(dtype)


def arrays_for(
    rule: Rule, random: np.random.Generator, size: int, grad: int, dtype: np.dtype, special: bool
) -> list[np.ndarray]:
    compute = np.dtype(np.float32) if dtype in HALF else dtype
    return [
        draw(random, size, compute, special),
        draw(random, grad, dtype, special),
        draw(random, size, dtype, special),
        *(draw(random, size, compute, special) for _ in rule.state),
        *(draw(random, size, dtype, special) for _ in rule.reads),
    ]


@pytest.mark.parametrize("backend", ["numba", "numpy"])
@pytest.mark.parametrize("dtype", WIDE, ids=str)
def test_a_state_that_fades_away_ends_at_zero(backend: str, dtype: np.dtype) -> None:
    """Rounded, 0.9 times the smallest number is that number: it would stay there for ever."""
    small = np.finfo(dtype).tiny
    m = np.array([small, -small, 4 * small, np.nan, np.inf], dtype)
    w, g = np.ones_like(m), np.zeros_like(m)
    build(LITERAL, dtype, backend)(Spans.whole(len(m), 0.1), 1.0, w, g, w, [m])
    assert m[0] == 0
    assert m[1] == 0
    assert small < m[2] < 4 * small
    assert np.isnan(m[3])
    assert np.isinf(m[4])


COMPILED = [
    *((rule, dtype) for rule in ALL for dtype in (np.dtype(np.float32), *HALF)),
    *((rule, np.dtype(np.float64)) for rule in ("fasgd", "every_word", "everything")),
]
"""All rules with the loops of float32, also under masters; all words with those of float64."""


# Compiling the loops is most of it: each is compiled once, and tried with both.
@pytest.mark.parametrize(("name", "dtype"), COMPILED, ids=str)
def test_backends_agree_to_the_bit(name: str, dtype: np.dtype) -> None:
    for special in (False, True):
        assert_agreement(name, dtype, special)


def assert_agreement(name: str, dtype: np.dtype, special: bool) -> None:
    rule, random = ALL[name], np.random.default_rng(7)
    fused, reference = build(rule, dtype, "numba"), build(rule, dtype, "numpy")
    for size in (1, 2, 7, 64, 65, 1000, 3 * BLOCK + 5):
        spans, grad = spans_over(random, size, rule)
        arrays = arrays_for(rule, random, size, grad, dtype, special)
        for in_place in (False, True) if dtype in WIDE else (False,):
            for factor in (1.0, 0.3):
                expected = outcome(rule, reference, spans, factor, arrays, in_place=in_place)
                assert outcome(rule, fused, spans, factor, arrays, in_place=in_place) == expected


@each_row("dtype", WIDE, ids=str)
@each_row("rule", ALL.values(), ids=ALL.keys())
def test_the_reference_is_the_rule_itself(rule: Rule, dtype: np.dtype) -> None:
    random = np.random.default_rng(3)
    size = 2 * BLOCK + 11
    base, grad, target, *others = arrays_for(rule, random, size, size, dtype, special=False)
    state, reads = others[: len(rule.state)], others[len(rule.state) :]
    more = [0.75, 0.3][: len(rule.scalars)]
    constants = {name: dtype.type(value) for name, value in rule.constants.items()}
    gradient, step = grad * dtype.type(0.5), dtype.type(0.01)
    with np.errstate(all="ignore"):
        results = rule.function(
            base, gradient, *reads, *state, step, *map(dtype.type, more), **constants
        )
    assert all(result.dtype == dtype for result in results)
    expected_bits = [bits(np.broadcast_to(result, size)) for result in results]

    spans = Spans.whole(size, 0.01, more)
    build(rule, dtype, "numpy")(spans, 0.5, base, grad, target, state, reads)

    assert [bits(array) for array in (target, *state)] == expected_bits


@pytest.mark.parametrize("backend", ["numba", "numpy"])
def test_one_step_of_fasgd_by_hand(backend: str) -> None:
    w, g = np.array([1.0, -2.0]), np.array([0.5, 4.0])
    n, b, v = np.zeros(2), np.zeros(2), np.ones(2)
    sums = build(FASGD, np.float64, backend)(Spans.whole(2, 0.1), 2.0, w, g, w, [n, b, v])
    doubled = np.array([1.0, 8.0])
    deviation = np.sqrt(0.05 * doubled**2 - (0.05 * doubled) ** 2 + 1e-4)
    np.testing.assert_allclose(n, 0.05 * doubled**2)
    np.testing.assert_allclose(b, 0.05 * doubled)
    np.testing.assert_allclose(v, 0.9 + 0.1 * deviation)
    np.testing.assert_allclose(w, [1.0, -2.0] - 0.1 / v * doubled)
    assert sums[0] / STATISTIC_SCALE == pytest.approx(v.sum(), abs=2 / STATISTIC_SCALE)


@each_row("backend", ["numba", "numpy"])
@each_row("dtype", [*WIDE, *HALF], ids=str)
def test_elements_outside_the_spans_stay(dtype: np.dtype, backend: str) -> None:
    random = np.random.default_rng(1)
    arrays = arrays_for(FASGD, random, 100, 100, dtype, special=False)
    before = [array.copy() for array in arrays]
    spans = Spans([3, 60], [40, 61], [50, 0], [0.1, 0.2])
    base, grad, target, *state = arrays
    build(FASGD, dtype, backend)(spans, 1.0, base, grad, target, state)
    outside = np.ones(100, bool)
    outside[3:40] = outside[60:61] = False
    for now, then in zip((base, target, *state), (before[0], *before[2:]), strict=True):
        assert bits(now[outside]) == bits(then[outside])
    assert bits(grad) == bits(before[1])
    assert not np.array_equal(target[3:40], before[2][3:40])
    assert np.array_equal(base, before[0]) == (dtype in WIDE)  # a master is updated in place


@pytest.mark.parametrize("backend", ["numba", "numpy"])
def test_two_views_of_the_same_memory_are_in_place(backend: str) -> None:
    w, g = np.ones(5, np.float32), np.ones(5, np.float32)
    build(SGD, np.float32, backend)(Spans.whole(5, 0.5), 1.0, w[:], g, w[:], [])
    assert w.tolist() == [0.5] * 5


@pytest.mark.parametrize("backend", ["numba", "numpy"])
def test_a_gradient_may_be_read_only_and_anywhere_in_memory(backend: str) -> None:
    buffer = b"\xce" + np.arange(6, dtype=np.float32).tobytes()
    grad = np.frombuffer(buffer, np.float32, offset=1)
    assert not grad.flags.aligned
    assert not grad.flags.writeable
    w = np.zeros(6, np.float32)
    build(SGD, np.float32, backend)(Spans.whole(6, 1.0), 1.0, w, grad, w, [])
    assert w.tolist() == [0.0, -1.0, -2.0, -3.0, -4.0, -5.0]


@pytest.mark.parametrize("backend", ["numba", "numpy"])
def test_states_may_change_places(backend: str) -> None:
    w, g, target, a, b = (np.full(3, x, np.float32) for x in (7.0, 2.0, 0.0, 5.0, 6.0))
    kernel = build(SWAP, np.float32, backend)
    kernel(Spans.whole(3, 10.0), 1.0, w, g, w, [a, b])
    assert (w[0], a[0], b[0]) == (20.0, 6.0, 7.0)
    kernel(Spans.whole(3, 10.0), 1.0, w, g, target, [a, b])
    assert (w[0], target[0], a[0], b[0]) == (20.0, 20.0, 7.0, 20.0)


def test_a_literal_does_not_widen_float32() -> None:
    text = build(LITERAL, np.float32, "numba").text
    assert "_c0 = _real(1.0)" in text
    assert "((_c0 - gamma) * g)" in text
    g, m = np.random.default_rng(9).standard_normal((2, 1000)).astype(np.float32)
    gamma = np.float32(0.9)
    expected = gamma * m + (np.float32(1.0) - gamma) * g
    widened = (float(gamma) * m.astype(np.float64) + (1.0 - float(gamma)) * g).astype(np.float32)
    assert not np.array_equal(expected, widened)
    for backend in ("numba", "numpy"):
        w, state = np.zeros_like(g), m.copy()
        kernel = build(LITERAL, np.float32, backend)
        kernel(Spans.whole(1000, 1.0), 1.0, w, g, w, [state])
        assert bits(state) == bits(expected)


def third(w, g, step, share):
    return (w + share * g,)


def test_constants_are_rounded_once_from_double() -> None:
    for backend in ("numba", "numpy"):
        w, g = np.zeros(1, np.float32), np.ones(1, np.float32)
        rule = Rule(third, constants={"share": 1 / 3})
        build(rule, np.float32, backend)(Spans.whole(1, 1.0), 1.0, w, g, w, [])
        assert w[0] == np.float32(1 / 3)


def namesakes(w, g, lo, target, i, x, step, factor, base, update, real):
    a = lo + factor * g
    total = target - base * i
    return w - step * a, a, total, x, i * update + real


def test_a_rule_may_use_the_names_that_the_generator_uses() -> None:
    state = {"lo": 1.0, "target": 2.0, "i": 3.0, "x": 4.0}
    rule = Rule(namesakes, state, {"factor": 0.5, "base": 0.25, "update": 0.125, "real": 2.0})
    random = np.random.default_rng(6)
    spans, grad = spans_over(random, 99)
    arrays = arrays_for(rule, random, 99, grad, np.dtype(np.float32), special=False)
    fused, reference = (
        outcome(rule, build(rule, np.float32, backend), spans, 0.5, arrays, in_place=False)
        for backend in ("numba", "numpy")
    )
    assert fused == reference


@pytest.mark.parametrize("backend", ["numba", "numpy"])
def test_no_span_and_empty_spans_change_nothing(backend: str) -> None:
    kernel = build(FOLD, np.float32, backend)
    w, g = np.ones(3, np.float32), np.ones(3, np.float32)
    assert kernel(Spans([], [], [], []), 1.0, w, g, w, []).tolist() == []
    assert kernel(Spans([1, 3], [1, 3], [0, 3], [1.0, 1.0]), 1.0, w, g, w, []).tolist() == [0, 0]
    assert w.tolist() == [1.0] * 3


def test_every_word_is_exercised() -> None:
    text = build(EVERY_WORD, np.float32, "numba").text
    for word in ("where", "sqrt", "maximum", "minimum", "absolute", "sign"):
        assert f"_{word}(" in text
    for operator in ("+", "-", "*", "/", "<", "<=", ">", ">=", "==", "!="):
        assert f" {operator} " in text


@each_row(
    ("dtype", "step"), [(np.float16, 2e5), (ml_dtypes.bfloat16, 3.4e38)], ids=["half", "bfloat16"]
)
@each_row("backend", ["numba", "numpy"])
def test_a_master_beyond_16_bits_becomes_infinite_in_silence(
    dtype: type, step: float, backend: str
) -> None:
    base, grad = np.zeros(2, np.float32), np.array([1.0, 0.0], dtype)
    target = np.zeros(2, dtype)
    build(SGD, dtype, backend)(Spans.whole(2, -step), 1.0, base, grad, target, [])
    assert base.tolist() == [np.float32(step), 0.0]
    assert target.astype(np.float32).tolist() == [np.inf, 0.0]


@pytest.mark.parametrize("backend", ["numba", "numpy"])
def test_updates_too_small_for_16_bits_add_up_in_the_master(backend: str) -> None:
    base, grad = np.ones(1, np.float32), np.ones(1, np.float16)
    target = np.ones(1, np.float16)
    kernel = build(SGD, np.float16, backend)
    for _ in range(8):
        kernel(Spans.whole(1, 2.0**-13), 1.0, base, grad, target, [])
    assert base[0] == 1.0 - 8 * 2.0**-13
    assert target[0] == np.float16(1.0 - 2.0**-10)


@each_row("backend", ["numba", "numpy"])
@each_row("dtype", [np.dtype(np.float32), *HALF], ids=str)
def test_each_tensor_has_its_own_scalars_and_its_part_of_what_is_read(
    dtype: np.dtype, backend: str
) -> None:
    kernel = build(PASSED_ON, dtype, backend)
    compute = np.dtype(np.float32) if dtype in HALF else dtype
    base, m = np.full(6, -1.0, compute), np.full(6, -2.0, compute)
    grad, target, sent = np.zeros(6, dtype), np.full(6, -3.0, dtype), np.arange(6).astype(dtype)
    spans = Spans([4, 0], [6, 3], [0, 2], [1.0, 1.0], [[0.1], [0.3]])
    kernel(spans, 1.0, base, grad, target, [m], [sent])
    assert target.tolist() == [0.0, 1.0, 2.0, -3.0, 4.0, 5.0]
    wanted = [0.3, 0.3, 0.3, -2.0, 0.1, 0.1]
    assert m.tolist() == np.array(wanted).astype(compute).tolist()
    assert sent.tolist() == list(range(6))


@pytest.mark.parametrize("backend", ["numba", "numpy"])
def test_without_tensors_nobody_asks_for_scalars(backend: str) -> None:
    w, g, m = (np.ones(3, np.float32) for _ in range(3))
    kernel = build(PASSED_ON, np.float32, backend)
    assert kernel(Spans([], [], [], []), 1.0, w, g, w, [m], [g]).tolist() == []


@pytest.mark.parametrize("backend", ["numba", "numpy"])
def test_out_of_place_a_rule_may_read_what_it_updates(backend: str) -> None:
    """A gradient without delay was computed at the very parameters that it is applied to."""
    base, grad, target = (np.full(4, x, np.float32) for x in (2.0, 0.5, 0.0))
    kernel = build(COMPENSATED, np.float32, backend)
    kernel(Spans.whole(4, 1.0), 1.0, base, grad, target, [], [base])
    assert target.tolist() == [1.5] * 4
    kernel(Spans.whole(4, 1.0), 1.0, base, grad, target, [], [grad])
    assert target.tolist() == pytest.approx([2.0 - (0.5 + 0.04 * 0.5 * 0.5 * 1.5)] * 4)


@pytest.mark.parametrize("rule", [FASGD, EVERYTHING], ids=["fasgd", "everything"])
@pytest.mark.parametrize("dtype", HALF, ids=str)
def test_16_bit_blocks_cut_and_join_spans_without_a_trace(dtype: np.dtype, rule: Rule) -> None:
    """One span over several blocks and many small ones give what each gives alone."""
    random = np.random.default_rng(5)
    sizes = [70_000, 1, 0, 65_536, 300, 300, 100]
    gaps = [0, 0, 0, 0, 0, 7, 0]
    hi = np.cumsum(sizes) + np.cumsum(gaps)
    lo = hi - sizes
    step = random.uniform(0.01, 1.0, len(sizes))
    more = random.uniform(0.0, 1.0, (len(sizes), len(rule.scalars)))
    spans = Spans(lo, hi, lo, step, more)
    arrays = arrays_for(rule, random, int(hi[-1]), int(hi[-1]), dtype, special=False)
    parallel_map, apart = ([array.copy() for array in arrays] for _ in range(2))
    kernel = build(rule, dtype, "numba")
    split = 3 + len(rule.state)
    base, grad, target, *state = parallel_map[:split]
    sums = kernel(spans, 0.5, base, grad, target, state, parallel_map[split:])
    base, grad, target, *state = apart[:split]
    each = [
        kernel(Spans([a], [z], [a], [s], [m]), 0.5, base, grad, target, state, apart[split:])[0]
        for (a, z, _, s), m in zip(spans.rows(), spans.scalars, strict=True)
    ]
    assert sums.tolist() == each
    assert [bits(array) for array in parallel_map] == [bits(array) for array in apart]
