"""What a device does beside updates, to the bits of what a host does."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from aiops import kernels
from aiops.codecs import find
from aiops.codecs.topk import TopK
from aiops.kernels.device import Device
from aiops.kernels.device_operations import DeviceOperations
from aiops.kernels.scan import SUM_BLOCK
from tests.kernels.lifted import down, up
from tests.kernels.rules import bits
from tests.kernels.test_backends import HALF, WIDE, draw
from tests.rows import each_row

SIZES = (0, 1, 15, 16, 17, 1000, SUM_BLOCK, 17 * SUM_BLOCK + 33)


@pytest.mark.parametrize("dtype", [*WIDE, *HALF], ids=str)
def test_sums_of_squares(device: Device, dtype: np.dtype[Any]) -> None:
    random, stream = np.random.default_rng(0), device.stream()
    tools = DeviceOperations(device, stream)
    for size in SIZES:
        array = draw(random, size, dtype, special=False)
        found = tools.sum_squares(up(device, stream, array))
        assert found == kernels.sum_squares(array, "numpy")
    array[7] = np.inf
    assert tools.sum_squares(up(device, stream, array)) == np.inf


@pytest.mark.parametrize("dtype", HALF, ids=str)
def test_rounding(device: Device, dtype: np.dtype[Any]) -> None:
    random, stream = np.random.default_rng(0), device.stream()
    tools = DeviceOperations(device, stream)
    for size in (0, 1, 2048, 5001):
        source = draw(random, size, np.dtype(np.float32), special=True)
        target = up(device, stream, np.zeros(size, dtype))
        tools.narrow(target, up(device, stream, source))
        with np.errstate(all="ignore"):
            assert bits(down(stream, target)) == bits(source.astype(dtype))


def spread(device: Device, payload: Any, size: int) -> Any:
    stream = device.stream()
    tools = DeviceOperations(device, stream)
    target = up(device, stream, np.full(size, 7, np.float32))
    kept, form, cut = TopK.read(payload)
    there = up(device, stream, payload)
    tools.spread(target, there[TopK.VALUES : cut], there[cut:], kept, form)
    return down(stream, target)


@each_row("values", ["int8", "bf16"])
@each_row("fraction", [1e-6, 0.001, 0.01, 0.3, 1.0])
@each_row("size", [1, 300, 70_001])
def test_top_k(device: Device, values: str, fraction: float, size: int) -> None:
    """Gaps of one byte and of several, and chunks of them that end within one."""
    codec = find(f"topk:fraction={fraction},values={values}")
    random = np.random.default_rng(size)
    gradient = random.standard_normal(size).astype(np.float32)
    gradient[random.random(size) < 0.2] = -0.0
    payload = np.frombuffer(
        bytes(codec.encoder((size,), feedback=False).encode(gradient)), np.uint8
    )
    wanted = np.empty(size, np.float32)
    TopK.decode(payload, (size,), wanted, backend="numpy")
    assert spread(device, payload, size).tobytes() == wanted.tobytes()


@pytest.mark.parametrize("threads", [4, 256])
def test_threads_share_the_work(threaded: Any, threads: int) -> None:
    codec = find("topk:fraction=0.4,values=bf16")
    gradient = np.random.default_rng(0).standard_normal(40_000).astype(np.float32)
    payload = codec.encoder(gradient.shape, feedback=False).encode(gradient)
    payload = np.frombuffer(bytes(payload), np.uint8)
    wanted = np.empty(gradient.size, np.float32)
    TopK.decode(payload, gradient.shape, wanted, backend="numpy")
    device = threaded(threads)
    assert spread(device, payload, gradient.size).tobytes() == wanted.tobytes()
    stream = device.stream()
    found = DeviceOperations(device, stream).sum_squares(up(device, stream, gradient))
    assert found == kernels.sum_squares(gradient, "numpy")


def test_gaps_of_several_bytes(device: Device) -> None:
    """Entries far apart, whose gaps cross from one thread's bytes into the next one's."""
    size, places = 3_000_000, np.arange(1, 150) * 19_997
    gradient = np.zeros(size, np.float32)
    gradient[places] = places
    codec = find(f"topk:fraction={len(places) / size},values=bf16")
    payload = codec.encoder((size,), feedback=False).encode(gradient)
    payload = np.frombuffer(bytes(payload), np.uint8)
    found = spread(device, payload, size)
    assert np.flatnonzero(found).tolist() == places.tolist()
