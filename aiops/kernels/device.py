"""The interface of a device with memory of its own, such as a GPU.

Kernels and stores are handed a `Device`; `aiops.kernels.cupy_device` is one. Work on a device is
queued on a `DeviceStream` and done in the order in which it was queued; `DeviceStream.finish` waits
for it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt

__all__ = [
    "Argument",
    "Bytes",
    "Device",
    "DeviceArray",
    "DeviceEvent",
    "DeviceStream",
    "KernelSource",
]

Bytes = npt.NDArray[np.uint8]


@dataclass(frozen=True, slots=True)
class KernelSource:
    """A kernel in CUDA C++ that includes nothing and defines one kernel.

    Attributes
    ----------
    name
        The function's.
    source
        The text.
    parameters
        The type and the name of each parameter, in order.
    """

    name: str
    source: str
    parameters: tuple[tuple[str, str], ...]


class DeviceArray:
    """A flat run of elements in a device's memory; slices and views share that memory.

    Attributes
    ----------
    start
        Its address on the device.
    size
        Its number of elements.
    dtype
        Their dtype.
    owner
        An object that lives as long as any array of its memory.
    """

    __slots__ = ("dtype", "owner", "size", "start")

    def __init__(self, start: int, size: int, dtype: np.dtype[Any], owner: object) -> None:
        self.start, self.size, self.dtype, self.owner = start, size, dtype, owner

    def __len__(self) -> int:
        return self.size

    def __repr__(self) -> str:
        return f"<DeviceArray {self.dtype}[{self.size}] at {self.start:#x}>"

    @property
    def nbytes(self) -> int:
        """Its length in bytes."""
        return self.size * self.dtype.itemsize

    def __getitem__(self, part: slice) -> DeviceArray:
        first, last, step = part.indices(self.size)
        assert step == 1, "device memory is sliced in whole runs"
        start = self.start + first * self.dtype.itemsize
        return DeviceArray(start, max(0, last - first), self.dtype, self.owner)

    def view(self, dtype: npt.DTypeLike) -> DeviceArray:
        """Return the same bytes as elements of another dtype, to which they must be aligned."""
        wanted = np.dtype(dtype)
        assert self.nbytes % wanted.itemsize == 0 == self.start % wanted.itemsize, "not aligned"
        return DeviceArray(self.start, self.nbytes // wanted.itemsize, wanted, self.owner)

    def overlaps(self, other: DeviceArray) -> bool:
        """Return whether two arrays share memory."""
        return self.start < other.start + other.nbytes and other.start < self.start + self.nbytes


Argument: TypeAlias = DeviceArray | np.generic
"""An argument of a kernel: memory, or a number of exactly its parameter's type."""


class DeviceEvent(Protocol):
    """A point in a stream."""

    def wait(self) -> None:
        """Wait until all work queued on the stream before this point is done."""


class DeviceStream(Protocol):
    """A queue of work on a device.

    Any thread may queue work, and the methods return before it is done. An error may be raised by a
    later call, at the latest by `finish`.
    """

    def upload(self, target: DeviceArray, source: Bytes) -> None:
        """Queue a copy from the host; ``source`` must not change until it is done."""

    def download(self, target: Bytes, source: DeviceArray) -> None:
        """Queue a copy to the host; ``target`` must not be read until it is done."""

    def copy(self, target: DeviceArray, source: DeviceArray) -> None:
        """Queue a copy within the device."""

    def clear(self, target: DeviceArray) -> None:
        """Queue the setting of bytes to 0."""

    def launch(
        self, function: object, blocks: int, threads: int, given: Sequence[Argument]
    ) -> None:
        """Queue a kernel.

        Parameters
        ----------
        function
            A result of `Device.function`.
        blocks, threads
            The number of blocks, and of threads in each.
        given
            The kernel's arguments, in the order of its parameters.
        """

    def record_event(self) -> DeviceEvent:
        """Return the point that the stream has reached."""

    def finish(self) -> None:
        """Wait until all queued work is done."""


class Device(Protocol):
    """One device.

    Attributes
    ----------
    name
        As it is shown to users: ``cuda:0 (NVIDIA H100 80GB HBM3)``.
    """

    name: str

    def allocate(self, nbytes: int) -> DeviceArray:
        """Return uninitialised memory, uint8[nbytes], aligned to 256 bytes.

        Raises
        ------
        MemoryError
            When the device has no more; the text is a sentence.
        """

    def function(self, text: KernelSource) -> object:
        """Compile a kernel, and return it for `DeviceStream.launch`."""

    def stream(self) -> DeviceStream:
        """Return a new stream."""

    def host(self, nbytes: int) -> Bytes:
        """Return page-locked memory of the host, which the device copies from and to by itself."""

    def pin(self, data: Bytes, *, read_only: bool = False) -> Callable[[], None] | None:
        """Page-lock whole pages of the host.

        ``read_only``: this process may not write them, and the device only reads them.

        Returns the function that unlocks them, or None when the system refuses.
        """
