"""The survey finds the first bad value; the sum of squares has one order, so one result."""

from __future__ import annotations

import math

import ml_dtypes
import numpy as np
import pytest

from aiops.errors import UsageError
from aiops.kernels import largest_magnitude, sum_squares, survey, surveyor
from aiops.kernels.scan import LANES, SUM_BLOCK, SURVEY_BLOCK
from tests.rows import each_row

BACKENDS = ["numba", "numpy"]
DTYPES = [np.dtype(d) for d in (np.float16, ml_dtypes.bfloat16, np.float32, np.float64)]


def largest_good(dtype: np.dtype) -> float:
    """The largest value that a survey lets through."""
    if dtype == np.float16:
        return float(np.finfo(dtype).max)
    limit = np.array([1e18], dtype)
    return float((limit.view(f"u{dtype.itemsize}") - 1).view(dtype)[0])


@each_row("backend", BACKENDS)
@each_row("dtype", DTYPES, ids=str)
def test_good_values_pass(dtype: np.dtype, backend: str) -> None:
    top = largest_good(dtype)
    tiny = float(ml_dtypes.finfo(dtype).smallest_subnormal)
    values = np.array([0.0, -0.0, 1.0, -1.0, tiny, -tiny, top, -top] * 7, dtype)
    assert survey(values, backend) == -1
    assert survey(values[:0], backend) == -1


@each_row("backend", BACKENDS)
@each_row("dtype", DTYPES, ids=str)
@each_row("bad", [np.nan, -np.nan, np.inf, -np.inf, 1e18, -1e18, 1e30])
def test_the_first_bad_value_is_found(dtype: np.dtype, bad: float, backend: str) -> None:
    with np.errstate(over="ignore"):
        value = np.array(bad).astype(dtype)
    size = 2 * SURVEY_BLOCK + 100
    for index in (0, 1, 31, SURVEY_BLOCK - 1, SURVEY_BLOCK, size - 1):
        values = np.ones(size, dtype)
        values[index] = value
        values[index + 1 :: 7] = np.inf
        assert survey(values, backend) == index


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_survey_reads_any_memory_and_shape(backend: str) -> None:
    buffer = bytearray(b"\x00" + np.array([1.0, 2.0, np.nan], np.float32).tobytes())
    unaligned = np.frombuffer(bytes(buffer), np.float32, offset=1)
    assert survey(unaligned, backend) == 2
    assert survey(np.array([[1.0, 2.0], [np.inf, 3.0]]), backend) == 2
    assert survey(np.array(np.nan), backend) == 0


@pytest.mark.parametrize("scan", [survey, sum_squares])
def test_what_cannot_be_scanned_is_refused(scan) -> None:
    for dtype in (np.int32, np.dtype(">f4"), np.complex64):
        with pytest.raises(UsageError, match="it takes native float64, float32"):
            scan(np.ones(3, dtype))
    with pytest.raises(UsageError, match="pass a contiguous one"):
        scan(np.ones(6)[::2])
    with pytest.raises(UsageError, match="there is no kernel backend 'nunba'; did you mean"):
        scan(np.ones(3), "nunba")


def by_definition(array: np.ndarray) -> float:
    """The definition in Python floats, which are float64: 16 lanes per block of 16,384."""
    total = 0.0
    for start in range(0, array.size, SUM_BLOCK):
        lanes = [0.0] * LANES
        for index, x in enumerate(array[start : start + SUM_BLOCK].astype(np.float64).tolist()):
            lanes[index % LANES] += x * x
        block = lanes[0]
        for lane in lanes[1:]:
            block += lane
        total += block
    return total


@each_row("backend", BACKENDS)
@each_row("dtype", DTYPES, ids=str)
def test_the_sum_of_squares_is_its_definition_to_the_bit(dtype: np.dtype, backend: str) -> None:
    random = np.random.default_rng(8)
    for size in (0, 1, 15, 16, 17, 63, 64, 65, 129, SUM_BLOCK, 5 * SUM_BLOCK + 77):
        scale = 10.0 ** random.integers(-3, 4, size)
        values = (random.standard_normal(size) * scale).astype(dtype)
        assert sum_squares(values, backend) == by_definition(values)


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_sum_of_squares_of_what_is_not_finite(backend: str) -> None:
    values = np.ones(100, np.float32)
    values[50] = -np.inf
    assert sum_squares(values, backend) == math.inf
    values[51] = np.nan
    assert math.isnan(sum_squares(values, backend))
    assert sum_squares(np.full(40, 1e200), backend) == math.inf
    assert sum_squares(np.full(2, 3e38, np.float32), backend) == pytest.approx(1.8e77)


@each_row("backend", ["numpy", "numba"])
@each_row("dtype", ["float16", "float32", "float64"])
def test_a_surveyor_finds_what_survey_finds(backend: str, dtype: str) -> None:
    look = surveyor(np.dtype(dtype), backend)
    values = np.ones(40_000, dtype)
    for largest in (1.0, 2.5, 1000.0):
        values[17_000] = -largest
        assert largest_magnitude(look(values), values.dtype) == largest
    assert largest_magnitude(look(values[:0]), values.dtype) == 0
    for bad in (np.nan, np.inf, -np.inf):
        values[33_333] = bad
        assert look(values) == survey(values, backend) == 33_333


def test_a_surveyor_refuses_a_dtype_at_once() -> None:
    with pytest.raises(UsageError, match="int32"):
        surveyor(np.dtype(np.int32))
