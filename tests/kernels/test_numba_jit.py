"""What generated kernels import beside the vocabulary's words: halves, and small numbers."""

from __future__ import annotations

import numba
import numpy as np
import pytest

from aiops.kernels import numba_jit

HALVES = np.arange(2**16, dtype=np.uint16)
FINITE = HALVES[HALVES & 0x7C00 != 0x7C00]


def over(word: object, out: type) -> object:
    """Return a loop that applies a word to every element, as a kernel would."""

    def loop(values, results):
        for i in range(values.size):
            results[i] = word(values[i])

    compiled = numba.njit(loop)

    def call(values: np.ndarray) -> np.ndarray:
        results = np.zeros(values.size, out)
        compiled(values, results)
        return results

    return call


@pytest.mark.parametrize("word", ["fp16_to_float", "fp16_bits_to_float"])
def test_halves_are_read_as_numpy_reads_them(word: str) -> None:
    found = over(getattr(numba_jit, word), np.float32)(FINITE)
    expected = FINITE.view(np.float16).astype(np.float32)
    assert found.tobytes() == expected.tobytes()


@pytest.mark.parametrize("word", ["float_to_fp16", "float_to_fp16_bits"])
def test_halves_are_rounded_as_numpy_rounds_them(word: str) -> None:
    draw = np.random.default_rng(5)
    exact = np.sort(FINITE.view(np.float16).astype(np.float32))
    ties = (exact[:-1] + exact[1:]) / 2
    spread = draw.standard_normal(50_000) * 10.0 ** draw.integers(-12, 4, 50_000)
    values = np.concatenate(
        [exact, ties, np.nextafter(ties, np.float32(1)), np.nextafter(ties, np.float32(-1)), spread]
    )
    values = values[np.abs(values) <= 65_504].astype(np.float32)
    found = over(getattr(numba_jit, word), np.uint16)(values)
    assert found.tobytes() == values.astype(np.float16).tobytes()


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_subnormal_numbers_become_zeros_of_their_sign(dtype: type) -> None:
    info = np.finfo(dtype)
    small = [info.tiny, np.nextafter(info.tiny, dtype(0)), info.smallest_subnormal, 0.0]
    values = np.array([*small, 1.0, info.max, np.inf, np.nan], dtype)
    values = np.concatenate([values, -values])
    plain = np.array([numba_jit.flushed(value) for value in values], dtype)
    kept = np.array([1, 0, 0, 0, 1, 1, 1, 1], bool)
    expected = np.where(np.tile(kept, 2), values, np.copysign(dtype(0), values))
    assert plain.tobytes() == expected.tobytes()

    @numba.njit
    def loop(values, results):
        for i in range(values.size):
            results[i] = numba_jit.flushed(values[i])

    found = np.zeros_like(values)
    loop(values, found)
    assert found.tobytes() == expected.tobytes()
