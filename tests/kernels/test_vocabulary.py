"""The words: NumPy's results, and the signs of zero that NumPy leaves open."""

from __future__ import annotations

import doctest
import importlib

import numpy as np
import pytest

from aiops.kernels import Rule, Spans, build, numba_jit, vocabulary
from aiops.kernels.vocabulary import where
from tests.kernels.rules import bits, stored
from tests.rows import each_row

AWKWARD = [0.0, -0.0, 1.0, -1.0, 2.5, np.inf, -np.inf, np.nan, 1e-45, -1e-45, 3e38]
PAIRS = np.array([(x, y) for x in AWKWARD for y in AWKWARD], np.float32)


@pytest.mark.parametrize("word", ["maximum", "minimum"])
def test_extrema_are_numpys_with_positive_zeros(word: str) -> None:
    x, y = PAIRS.T
    found = getattr(vocabulary, word)(x, y)
    assert found.dtype == np.float32
    np.testing.assert_array_equal(found, getattr(np, word)(x, y))
    assert not np.signbit(found[found == 0]).any()
    assert not np.signbit(getattr(vocabulary, word)(np.float32(-0.0), -0.0))


@each_row("word", ["maximum", "minimum", "sign", "sqrt", "absolute"])
def test_compiled_words_equal_numpys_on_scalars(word: str) -> None:
    compiled, plain = getattr(numba_jit, word), getattr(vocabulary, word)
    arguments = PAIRS if word in ("maximum", "minimum") else PAIRS[:: len(AWKWARD), :1]
    with np.errstate(invalid="ignore"):
        for row in arguments:
            expected, found = np.float32(plain(*row)), np.float32(compiled(*row))
            np.testing.assert_equal(found, expected)
            if not np.isnan(expected):
                assert np.signbit(found) == np.signbit(expected)


def test_a_literal_beside_an_array_does_not_widen_it() -> None:
    x = np.ones(3, np.float32)
    for result in (
        vocabulary.maximum(x, 0.1),
        vocabulary.minimum(0.1, x),
        vocabulary.where(x > 0, x, 0.1),
        vocabulary.sqrt(np.float32(2)),
        vocabulary.where(np.float32(1) > 0, np.float32(1), 0.1),
    ):
        assert result.dtype == np.float32


def branches(w, g, m, k, step, last, low, high):
    """Choices made by scalars: between arrays, scalars, an array and a scalar or a literal."""
    late = last > 0.5
    number = where(late, low, high)
    m = where(late, w, g)
    k = where(last == low, m * number, where(late, step, -0.1))
    return where(number >= last, w, 0.3) + number * 0.1, m, k


@pytest.mark.parametrize("last", [0.7, 0.5, 0.1, -0.0, np.nan])
def test_where_may_choose_by_a_scalar(last: float) -> None:
    dtype = np.float32
    rule = Rule(
        branches, {"m": 0.0, "k": 0.0}, scalars=("last",), constants={"low": 0.1, "high": -2.5}
    )
    x, y = np.ascontiguousarray(PAIRS.T, dtype)
    left = []
    for backend in ("numba", "numpy"):
        w, m, k = x.copy(), np.zeros_like(x), np.zeros_like(x)
        kernel = build(rule, dtype, backend)
        kernel(Spans.whole(len(x), 0.3, [last]), 1.0, w, y, w, [m, k])
        left.append([bits(array) for array in (w, m, k)])
        late = last > 0.5
        number, last_ = dtype(0.1) if late else dtype(-2.5), dtype(last)
        assert bits(m) == bits(stored(x if late else y))
        chosen = x if number >= last_ else np.full_like(x, 0.3)
        assert bits(w) == bits(chosen + number * dtype(0.1))
        if last == 0.1:
            with np.errstate(all="ignore"):
                assert bits(k) == bits(m * number)
        else:
            assert bits(k) == bits(np.full_like(x, 0.3 if late else -0.1))
    assert left[0] == left[1]


def test_words_are_known_by_identity() -> None:
    assert vocabulary.word(vocabulary.abs) == vocabulary.word(abs) == "absolute"
    assert vocabulary.word(np.sqrt) is None
    assert vocabulary.word(None) is None
    assert vocabulary.word([]) is None


@pytest.mark.parametrize("module", ["aiops.kernels", "aiops.kernels.rule"])
def test_the_examples_in_the_docstrings_run(module: str) -> None:
    failed, run = doctest.testmod(importlib.import_module(module))
    assert run
    assert not failed
