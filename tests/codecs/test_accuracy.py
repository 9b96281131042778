"""How much each codec loses, and how long its payloads are."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

from aiops.codecs import find
from tests.codecs.cases import BACKENDS, decoded, encoded, kinds_of_values, normal
from tests.rows import each_row

SIZE = 3000


def of_blocks(values: np.ndarray, block: int, reduce: object) -> np.ndarray:
    """A figure per block, repeated for each of its elements."""
    cut = [values[at : at + block] for at in range(0, values.size, block)]
    return np.concatenate([np.full(part.size, reduce(part)) for part in cut])


@each_row("kind", kinds_of_values(SIZE))
def test_int8_is_within_half_a_step(kind: str) -> None:
    values = kinds_of_values(SIZE)[kind]
    found = decoded("int8", encoded("int8", values, (SIZE,), "numba"), (SIZE,))
    step = of_blocks(np.abs(values.astype(np.float64)), 256, np.max) / 127
    slack = 1.0 if kind != "largest" else 2.1  # 128 scales must stay below 1e18
    assert (np.abs(found.astype(np.float64) - values) <= step * 0.5001 * slack + 2e-36).all()


@each_row("kind", kinds_of_values(SIZE))
def test_fp16_is_numpys(kind: str) -> None:
    values = kinds_of_values(SIZE)[kind]
    payload = encoded("fp16", values, (SIZE,), "numba")
    wanted = np.clip(values, -65504, 65504).astype("<f2")
    assert payload.tobytes() == wanted.tobytes()


@pytest.mark.parametrize("kind", kinds_of_values(SIZE))
def test_bf16_is_ml_dtypess(kind: str) -> None:
    values = kinds_of_values(SIZE)[kind]
    payload = encoded("bf16", values, (SIZE,), "numba")
    assert payload.tobytes() == values.astype(ml_dtypes.bfloat16).tobytes()


def test_every_half_is_read_as_numpy_reads_it() -> None:
    bits = np.arange(1 << 16, dtype="<u2")
    bits = bits[bits & 0x7FFF < 0x7C00]
    found = decoded("fp16", bits.view(np.uint8), bits.shape, "numba")
    assert found.tobytes() == bits.view("<f2").astype(np.float32).tobytes()


def test_onebit_is_the_mean_with_signs() -> None:
    values = normal((SIZE,))
    found = decoded("onebit", encoded("onebit", values, (SIZE,), "numba"), (SIZE,))
    mean = of_blocks(np.abs(values.astype(np.float64)), 1024, np.mean)
    np.testing.assert_allclose(found, np.copysign(mean, values), rtol=1e-5)


@each_row("backend", BACKENDS)
@each_row("kind", kinds_of_values(SIZE))
@each_row("fraction", [0.0001, 0.01, 0.37, 1.0])
def test_topk_keeps_exactly_the_largest(kind: str, fraction: float, backend: str) -> None:
    values = kinds_of_values(SIZE)[kind]
    codec = f"topk:{fraction},values=bf16"
    kept = max(1, round(fraction * SIZE))
    found = decoded(codec, encoded(codec, values, (SIZE,), backend), (SIZE,))
    order = np.lexsort((np.arange(SIZE), -np.abs(values)))[:kept]
    wanted = np.zeros(SIZE, np.float32)
    wanted[order] = values[order].astype(ml_dtypes.bfloat16)
    np.testing.assert_array_equal(found, wanted)


def test_topk_at_one_percent_takes_little_room() -> None:
    for seed in range(3):
        size = 100_000
        payload = encoded("topk:0.01", normal((size,), seed), (size,), "numba")
        assert len(payload) <= 2.5 * 1000


@each_row("gap", [0, 1, 126, 127, 128, 16_383, 16_384, 2_097_152])
@each_row("backend", BACKENDS)
def test_topk_gaps_of_every_length(gap: int, backend: str) -> None:
    values = np.zeros(gap + 3, np.float32)
    values[1], values[gap + 2] = -3.0, 5.0
    codec = f"topk:{2 / values.size!r}"
    payload = encoded(codec, values, values.shape, backend)
    assert len(payload) == 8 + 4 + 2 + 1 + max(1, -(-gap.bit_length() // 7))
    np.testing.assert_allclose(decoded(codec, payload, values.shape, backend), values, rtol=0.01)


def test_lowrank_finds_a_matrix_of_low_rank() -> None:
    draw = np.random.default_rng(1)
    whole = draw.standard_normal((50, 3)) @ draw.standard_normal((3, 70))
    values = whole.astype(np.float32).reshape(-1)
    encoder = find("lowrank:3,values=float32").encoder((50, 70), feedback=False)
    for _ in range(2):
        payload = np.frombuffer(bytes(encoder.encode(values)), np.uint8)
    found = decoded("lowrank", payload, (50, 70))
    np.testing.assert_allclose(found, values, atol=1e-4)
    assert len(payload) == 8 + 3 * (50 + 70) * 4


def test_lowrank_goes_on_after_a_matrix_of_zeros() -> None:
    encoder = find("lowrank:2").encoder((8, 9), feedback=True)
    assert not decoded(
        "lowrank", np.frombuffer(encoder.encode(np.zeros(72, "f4")), "u1"), (8, 9)
    ).any()
    values = normal((8, 9))
    payload = np.frombuffer(encoder.encode(values), np.uint8)
    left = np.linalg.norm(values - decoded("lowrank", payload, (8, 9)))
    assert left < np.linalg.norm(values)


@each_row("spec", ["onebit", "topk:0.05", "lowrank:1", "int8", "fp16"])
def test_feedback_delivers_all_in_the_end(spec: str) -> None:
    """The mean of what arrives comes to be what was sent: nothing is lost for good."""
    shape = (40, 30)
    values = normal(shape)
    encoder = find(spec).encoder(shape, feedback=True)
    received = np.zeros(1200)
    for _ in range(200):
        payload = np.frombuffer(encoder.encode(values), np.uint8)
        received += decoded(spec, payload, shape)
    off = np.linalg.norm(received / 200 - values) / np.linalg.norm(values)
    assert off < 0.25
