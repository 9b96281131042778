"""Any bytes at all may be checked; what passes decodes within bounds, the same on both backends."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.codecs.cases import BACKENDS, SPECS, encoded, kind_of, normal
from tests.rows import each_row
from tests.seeds import examples

SHAPES = [(0,), (1,), (40,), (300,), (20, 17), (1030,)]
GUARD = 64
"""Elements on both sides of the output, which nothing may touch."""


def judge(spec: str, payload: np.ndarray, shape: tuple[int, ...]) -> str | None:
    """Check on both backends, and decode what passes; return the fault."""
    kind = kind_of(spec)
    before = payload.copy()
    faults = [kind.check(payload, shape, backend) for backend in BACKENDS]
    assert faults[0] == faults[1]
    if faults[0] is not None:
        assert len(faults[0]) < 200
        return faults[0]
    size = int(np.prod(shape, dtype=np.int64))
    results = []
    for backend in BACKENDS:
        room = np.full(size + 2 * GUARD, 7.25, np.float32)
        out = room[GUARD : GUARD + size]
        kind.decode(payload, shape, out, backend=backend)
        assert (room[:GUARD] == 7.25).all()
        assert (room[GUARD + size :] == 7.25).all()
        assert (np.abs(out) < 1e18).all()
        results.append(out.tobytes())
    assert results[0] == results[1]
    np.testing.assert_array_equal(payload, before)
    return None


@pytest.mark.parametrize("spec", SPECS)
@settings(max_examples=examples(30), deadline=None, derandomize=True)
@given(data=st.data())
def test_any_bytes(spec: str, data: st.DataObject) -> None:
    shape = data.draw(st.sampled_from(SHAPES))
    payload = np.frombuffer(data.draw(st.binary(max_size=200)), np.uint8)
    judge(spec, payload, shape)


@pytest.mark.parametrize("spec", SPECS)
@settings(max_examples=examples(60), deadline=None, derandomize=True)
@given(data=st.data())
def test_good_payloads_gone_bad(spec: str, data: st.DataObject) -> None:
    shape = data.draw(st.sampled_from(SHAPES))
    payload = encoded(spec, normal(shape), shape, "numpy").copy()
    assert judge(spec, payload, shape) is None
    if len(payload):
        for _ in range(data.draw(st.integers(0, 4))):
            # Headers and ends are where most can go wrong.
            where = data.draw(
                st.integers(0, len(payload) - 1)
                | st.integers(0, min(15, len(payload) - 1))
                | st.integers(max(0, len(payload) - 15), len(payload) - 1)
            )
            payload[where] = data.draw(st.sampled_from([0, 1, 127, 128, 255]) | st.integers(0, 255))
    cut = data.draw(st.just(0) | st.integers(-9, 9))
    payload = payload[:cut] if cut < 0 else np.append(payload, np.full(cut, 128, np.uint8))
    judge(spec, payload, shape)


def topk(kept: int, gaps: list[int], form: int = 0, scale: float = 1.0) -> np.ndarray:
    """A payload of int8 values, written by hand."""
    head = np.array([kept, form], "<u4").tobytes()
    scales = np.full(-(-kept // 256), scale, "<f4").tobytes()
    return np.frombuffer(head + scales + bytes(range(1, kept + 1)) + bytes(gaps), np.uint8)


@each_row(
    ("payload", "fault"),
    [
        (topk(3, [0, 0, 37]), None),
        (topk(3, [0, 0, 38]), "has entry 2 beyond its 40 elements"),
        (topk(3, [0xA7, 0, 0, 0]), "has entry 1 beyond its 40 elements"),
        (topk(3, [0x80, 0x80, 0x80, 0x80, 0x80, 0, 0, 0]), "has a gap of more than 5 bytes"),
        (topk(3, [0xFF, 0xFF, 0xFF, 0xFF, 0x7F, 0, 0]), "has entry 0 beyond its 40 elements"),
        (topk(3, [0, 0, 0x80]), "ends within the gap of entry 2"),
        (topk(3, [0, 0]), "has 17 bytes, and 3 entries take 18 or more"),
        (topk(3, [0, 0, 0, 0]), "goes on after its 3 entries"),
        (topk(41, [0] * 41), "has 41 entries for 40 elements"),
        (topk(3, [0, 0, 0], form=2), "has the form 02000000, which is none"),
        (topk(3, [0, 0, 0], form=256), "has the form 00010000, which is none"),
        (topk(3, [0, 0, 0], scale=-0.0), "has the scale -0 for block 0"),
        (topk(3, [0, 0, 0], scale=np.nan), "has the scale nan for block 0"),
        (topk(3, [0, 0, 0], scale=1e16), "has the scale 1e\\+16 for block 0"),
        (topk(0, []), None),
        (topk(0, [0]), "goes on after its 0 entries"),
    ],
)
def test_entries_are_in_order_and_inside(payload: np.ndarray, fault: str | None) -> None:
    found = judge("topk", payload, (40,))
    if fault is None:
        assert found is None
    else:
        assert found is not None
        assert found.startswith(fault.replace("\\", ""))


@each_row("spec", ["int8", "onebit"])
@each_row("scale", [-1.0, -0.0, np.nan, np.inf, -np.inf, 1.1e18])
def test_a_scale_that_is_none(spec: str, scale: float) -> None:
    shape = (1030,)
    payload = encoded(spec, normal(shape), shape, "numpy").copy()
    payload[4:8].view("<f4")[:] = scale
    fault = judge(spec, payload, shape)
    assert fault is not None
    assert fault.startswith(f"has the scale {scale:g} for block 1: it must be in 0 to ")
    payload[4:8] = 0
    assert judge(spec, payload, shape) is None


@each_row(("spec", "bits"), [("fp16", 0x7C00), ("bf16", 0x5D5F), ("bf16", 0x7FC0)])
@each_row("sign", [0, 0x8000])
def test_a_half_that_no_model_survives(spec: str, bits: int, sign: int) -> None:
    payload = np.zeros(80, np.uint8)
    payload[6:8].view("<u2")[:] = bits | sign
    fault = judge(spec, payload, (40,))
    assert fault is not None
    assert fault.endswith("for element 3")


def test_two_large_factors_have_a_larger_product() -> None:
    payload = encoded("lowrank", normal((20, 17)), (20, 17), "numpy").copy()
    payload[8:].view("<u2")[:] = 0x5000  # 8.6e9
    fault = judge("lowrank", payload, (20, 17))
    assert fault == "stands for elements that may be 1e18 or more in magnitude"
