"""The kernels of a device have the bits of the NumPy reference: the very text, compiled by g++."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from aiops.errors import UsageError
from aiops.kernels import FOLD, STATISTIC_CAP, Rule, Spans, build
from aiops.kernels.cuda_source import THREADS, TILE, ArrayTypes
from aiops.kernels.device import Device
from aiops.kernels.device_kernel import RAW, DeviceKernel
from aiops.kernels.payloads import FORMATS
from benchmarks.kernels import rules
from tests.kernels.lifted import Lifted, down, up
from tests.kernels.rules import ALL, COMPENSATED, EVERYTHING, FASGD, SGD, bits, outcome, spans_over
from tests.kernels.test_backends import HALF, WIDE, arrays_for
from tests.kernels.test_payloads import RULES, Model

EVERY = {**rules(), **ALL}


@pytest.mark.parametrize("special", [False, True], ids=["ordinary", "special"])
@pytest.mark.parametrize("dtype", [*WIDE, *HALF], ids=str)
@pytest.mark.parametrize("rule", EVERY.values(), ids=EVERY.keys())
def test_it_agrees_with_the_reference_to_the_bit(
    device: Device, rule: Rule, dtype: np.dtype[Any], special: bool
) -> None:
    random = np.random.default_rng(7)
    fused, reference = Lifted(rule, dtype, device), build(rule, dtype, "numpy")
    for size in (1, 2, 65, 1000, 3 * TILE + 5):
        spans, grad = spans_over(random, size, rule)
        arrays = arrays_for(rule, random, size, grad, dtype, special)
        for in_place in (False, True) if dtype in WIDE else (False,):
            expected = outcome(rule, reference, spans, 0.3, arrays, in_place=in_place)
            assert outcome(rule, fused, spans, 0.3, arrays, in_place=in_place) == expected


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("in_place", [True, False])
def test_payloads_are_read_as_they_are(
    device: Device, name: str, rule: str, in_place: bool
) -> None:
    model = Model(RULES[rule], name)
    plain = build(model.rule, np.float32, "numpy")
    packed = Lifted(model.rule, np.float32, device, name)
    wanted = model.update(plain, model.lo, model.decoded, in_place)
    assert model.update(packed, model.src, model.payloads, in_place) == wanted


def test_raw_values_may_lie_at_any_address(device: Device) -> None:
    values = np.random.default_rng(0).standard_normal(300).astype(np.float32)
    buffer = np.frombuffer(b"abc" + values.tobytes(), np.uint8)
    w, wanted = np.ones(300, np.float32), np.ones(300, np.float32)
    spans = Spans.whole(300, 0.5)
    build(SGD, np.float32, "numpy")(spans, 1.0, wanted, values, wanted, [])
    spans = Spans([0], [300], [3], [0.5])
    Lifted(SGD, np.float32, device, RAW.name)(spans, 1.0, w, buffer, w, [])
    assert bits(w) == bits(wanted)


@pytest.mark.parametrize("threads", [2, 32, THREADS])
def test_threads_of_a_block_add_up_their_sums(threaded: Any, threads: int) -> None:
    """As many threads as a GPU has at once: what they add up does not depend on who is first."""
    random = np.random.default_rng(1)
    size = 2 * TILE + 77
    spans, grad = spans_over(random, size, EVERYTHING)
    arrays = arrays_for(EVERYTHING, random, size, grad, np.dtype(np.float32), special=True)
    reference = build(EVERYTHING, np.float32, "numpy")
    expected = outcome(EVERYTHING, reference, spans, 1.0, arrays, in_place=True)
    kernel = Lifted(EVERYTHING, np.float32, threaded(threads))
    assert outcome(EVERYTHING, kernel, spans, 1.0, arrays, in_place=True) == expected


@pytest.mark.parametrize("dtype", HALF, ids=str)
def test_every_half_is_read_and_rounded_as_numpy_does(device: Device, dtype: np.dtype[Any]) -> None:
    """Each of the 65,536, and the floats around those halfway between two of them."""
    halves = np.arange(1 << 16, dtype=np.uint16).view(dtype)
    nothing = np.zeros(1 << 16, dtype)
    stream = device.stream()
    fold = DeviceKernel(FOLD, ArrayTypes("float32", "float32", dtype.name), device, stream)
    total = up(device, stream, np.zeros(1 << 16, np.float32))
    spans = Spans.whole(1 << 16, 1.0)
    fold(spans, 1.0, total, up(device, stream, halves), total, [])
    with np.errstate(all="ignore"):
        exact = halves.astype(np.float32)
        assert bits(down(stream, total)) == bits(exact + np.float32(0))
    for more in (0, 1, 0xFFF, 0x1000, 0x1001, 0x7FFF, 0x8000, 0x8001):
        values = (exact.view(np.uint32) + np.uint32(more)).view(np.float32)
        master, target = values.copy(), nothing.copy()
        Lifted(FOLD, dtype, device)(spans, 1.0, master, nothing, target, [])
        with np.errstate(all="ignore"):
            assert bits(target) == bits((values + np.float32(0)).astype(dtype))


def test_what_was_sent_may_be_what_is_updated(device: Device) -> None:
    """Each element's thread has read both before it writes."""
    w, g = np.arange(50, dtype=np.float32), np.ones(50, np.float32)
    expected = w.copy()
    spans = Spans.whole(50, 0.5)
    build(COMPENSATED, np.float32, "numpy")(spans, 1.0, w.copy(), g, expected, [], [w])
    stream = device.stream()
    kernel = DeviceKernel(COMPENSATED, ArrayTypes(*["float32"] * 3), device, stream)
    there = up(device, stream, w)
    kernel(spans, 1.0, there, up(device, stream, g), there, [], [there])
    assert bits(down(stream, there)) == bits(expected)


def test_the_spans_are_sent_again_when_they_change(device: Device) -> None:
    stream = device.stream()
    kernel = DeviceKernel(FASGD, ArrayTypes(*["float32"] * 3), device, stream)
    reference = build(FASGD, np.float32, "numpy")
    here = [np.ones(100, np.float32) for _ in range(5)]
    there = [up(device, stream, array) for array in here]
    for spans in (
        Spans.whole(100, 0.1),
        Spans.whole(100, 0.1),
        Spans.whole(100, 0.2),
        Spans([0, 50], [50, 99], [50, 1], [0.1, 0.3]),
        Spans([], [], [], []),
        Spans([7], [7], [0], [0.3]),
        Spans.whole(3, 0.2),
    ):
        wanted = reference(spans, 1.0, here[0], here[1], here[0], here[2:])
        found = kernel(spans, 1.0, there[0], there[1], there[0], there[2:])
        assert found.tolist() == wanted.tolist()
        for one, other in zip(here, there, strict=True):
            assert bits(one) == bits(down(stream, other))


def test_a_sum_of_caps(device: Device) -> None:
    v = np.full(5, np.nan, np.float32)
    w, g = np.zeros(5, np.float32), np.full(5, np.nan, np.float32)
    n, b = np.zeros(5, np.float32), np.zeros(5, np.float32)
    sums = Lifted(FASGD, np.float32, device)(Spans.whole(5, 1.0), 1.0, w, g, w, [n, b, v])
    assert sums.tolist() == [5 * int(STATISTIC_CAP)]


class TestRefused:
    """With nothing updated, as by every backend."""

    def test_arrays_of_the_host(self, device: Device) -> None:
        kernel = DeviceKernel(SGD, ArrayTypes(*["float32"] * 3), device, device.stream())
        w = np.ones(3, np.float32)
        with pytest.raises(UsageError, match="given base that is no float32 on the device"):
            kernel(Spans.whole(3, 1.0), 1.0, w, w, w, [])

    def test_another_dtype(self, device: Device) -> None:
        kernel, w = Lifted(SGD, np.float32, device), np.ones(3, np.float32)
        with pytest.raises(UsageError, match="given grad that is no float32 on the device"):
            kernel(Spans.whole(3, 1.0), 1.0, w, np.ones(3), w, [])

    def test_a_state_too_few(self, device: Device) -> None:
        kernel, w = Lifted(FASGD, np.float32, device), np.ones(3, np.float32)
        with pytest.raises(UsageError, match="given 1 state arrays, and its rule has 3"):
            kernel(Spans.whole(3, 1.0), 1.0, w, w, w, [w])

    def test_a_span_too_long(self, device: Device) -> None:
        kernel, w = Lifted(SGD, np.float32, device), np.ones(3, np.float32)
        with pytest.raises(UsageError, match="updates elements 0 to 4 of 3"):
            kernel(Spans.whole(4, 1.0), 1.0, w, w, w, [])

    def test_arrays_that_overlap(self, device: Device) -> None:
        stream = device.stream()
        kernel = DeviceKernel(SGD, ArrayTypes(*["float32"] * 3), device, stream)
        w = up(device, stream, np.ones(9, np.float32))
        for base, grad, target in ((w[:5], w[3:8], w[:5]), (w[:5], w[5:], w[1:6])):
            with pytest.raises(UsageError, match="overlap in memory"):
                kernel(Spans.whole(4, 1.0), 1.0, base, grad, target, [])
