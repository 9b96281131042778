"""A device with memory of its own, as kernels and stores see it: handed in, never imported.

`aiops.kernels.cupy_device` is one. What a device does is begun on a `Stream` and done in the order
in which it was begun there; whoever needs the result calls `Stream.finish`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt

__all__ = ["Argument", "Bytes", "Device", "DeviceArray", "Mark", "Stream", "Text"]

Bytes = npt.NDArray[np.uint8]


@dataclass(frozen=True, slots=True)
class Text:
    """A kernel's source: CUDA C++ that includes nothing, with one function of this name.

    ``parameters``: each one's type and name, in order.
    """

    name: str
    source: str
    parameters: tuple[tuple[str, str], ...]


class DeviceArray:
    """A flat run of elements in a device's memory; slices and views are the same memory.

    ``start`` is its address there. ``owner`` lives as long as any array of its memory.
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
        """Return the same bytes as elements of another dtype; they must be aligned to it."""
        wanted = np.dtype(dtype)
        assert self.nbytes % wanted.itemsize == 0 == self.start % wanted.itemsize, "not aligned"
        return DeviceArray(self.start, self.nbytes // wanted.itemsize, wanted, self.owner)

    def overlaps(self, other: DeviceArray) -> bool:
        """Say whether two arrays share memory."""
        return self.start < other.start + other.nbytes and other.start < self.start + self.nbytes


Argument: TypeAlias = DeviceArray | np.generic
"""What a kernel is called with: memory, or a number of exactly its parameter's type."""


class Mark(Protocol):
    """A point in a stream."""

    def wait(self) -> None:
        """Return when all that was begun on the stream before it is done."""


class Stream(Protocol):
    """What is done in order. Any thread may begin something; errors may show at `finish` only."""

    def upload(self, target: DeviceArray, source: Bytes) -> None:
        """Begin to copy bytes of the host, which stay as they are until it is done."""

    def download(self, target: Bytes, source: DeviceArray) -> None:
        """Begin to copy to the host; ``target`` is not looked at until it is done."""

    def copy(self, target: DeviceArray, source: DeviceArray) -> None:
        """Begin to copy within the device."""

    def clear(self, target: DeviceArray) -> None:
        """Begin to set bytes to 0."""

    def launch(
        self, function: object, blocks: int, threads: int, given: Sequence[Argument]
    ) -> None:
        """Begin to run what `Device.function` returned, by so many blocks of threads."""

    def mark(self) -> Mark:
        """Return where the stream is now."""

    def finish(self) -> None:
        """Return when all that was begun is done."""


class Device(Protocol):
    """One device.

    Attributes
    ----------
    name
        What people call it: ``cuda:0 (NVIDIA H100 80GB HBM3)``.
    """

    name: str

    def allocate(self, nbytes: int) -> DeviceArray:
        """Return memory, aligned to 256 bytes, whose values mean nothing.

        Raises
        ------
        MemoryError
            When it has no more; the text is a sentence.
        """

    def function(self, text: Text) -> object:
        """Compile a kernel."""

    def stream(self) -> Stream:
        """Return a new stream."""

    def host(self, nbytes: int) -> Bytes:
        """Return memory of the host that this device copies from and to by itself: page-locked."""

    def pin(self, data: Bytes) -> Callable[[], None] | None:
        """Make whole pages such memory; return what ends that, or None if it cannot be."""
