"""A device's kernel behind a host's arrays: they are brought there, and what was written back."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from aiops.kernels import Rule, Spans
from aiops.kernels.cuda_source import ArrayTypes
from aiops.kernels.device import Device, DeviceArray
from aiops.kernels.device_kernel import DeviceKernel


def kinds_of(dtype: Any, grad: str | None = None) -> ArrayTypes:
    """What the arrays of a kernel hold that `aiops.kernels.build` makes of the same arguments."""
    name = np.dtype(dtype).name
    if grad is not None:
        return ArrayTypes("float32", "float32", grad, packed=True)
    return ArrayTypes("float32" if np.dtype(dtype).itemsize == 2 else name, name, name)


class Lifted:
    """Implements ``Kernel`` for arrays of the host."""

    backend = "cuda"

    def __init__(self, rule: Rule, dtype: Any, device: Device, grad: str | None = None) -> None:
        self.device, self.stream = device, device.stream()
        self.kernel = DeviceKernel(rule, kinds_of(dtype, grad), device, self.stream)

    def warm(self) -> Lifted:
        self.kernel.warm()
        return self

    def __call__(
        self,
        spans: Spans,
        factor: float,
        base: Any,
        grad: Any,
        target: Any,
        state: Sequence[Any],
        reads: Sequence[Any] = (),
    ) -> Any:
        there = [up(self.device, self.stream, array) for array in (base, grad, *state, *reads)]
        first, gradient, *others = there
        same = base.ctypes.data == target.ctypes.data
        to = first if same else up(self.device, self.stream, target)
        kept, read = others[: len(state)], others[len(state) :]
        sums = self.kernel(spans, factor, first, gradient, to, kept, read)
        for array, source in zip((base, target, *state), (first, to, *kept), strict=True):
            array[:] = down(self.stream, source)
        return sums


def up(device: Device, stream: Any, array: Any) -> DeviceArray:
    """A copy of a host's array on a device."""
    source = np.ascontiguousarray(array).view(np.uint8)
    there = device.allocate(max(1, source.size))[: source.size]
    stream.upload(there, source)
    stream.finish()
    return there.view(array.dtype)


def down(stream: Any, array: DeviceArray) -> Any:
    """A copy of a device's array on the host."""
    data = np.empty(array.nbytes, np.uint8)
    stream.download(data, array.view(np.uint8))
    stream.finish()
    return data.view(array.dtype)
