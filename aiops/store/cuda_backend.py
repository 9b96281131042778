"""Keep parameters, masters, state and sums on a CUDA device, and update them there.

The device holds the parameters once, and an update is always in place. Readers lease a copy on the
host, in page-locked memory, made once per version: during the update if the version before was
read, otherwise on the first read. So pushes between which no worker fetches cost no copies. Where
every push is answered with parameters, the copy is made beside the event loop.

The version that a rule compares with (`Rule.reads`) is uploaded from the host's copy, the one that
its worker was sent. To keep all such versions on the device would take one model per worker.
"""

from __future__ import annotations

import math
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np

from aiops import kernels
from aiops.codecs import raw
from aiops.codecs.topk import TopK
from aiops.kernels.cuda_source import ArrayTypes
from aiops.kernels.device import Bytes, Device, DeviceArray, DeviceEvent
from aiops.kernels.device_kernel import RAW, DeviceKernel
from aiops.kernels.device_operations import DeviceOperations
from aiops.kernels.interface import Kernel, Operands, Spans
from aiops.kernels.parallel import cut
from aiops.kernels.rule import Rule
from aiops.model.arena import Arena
from aiops.model.layout import Array, Ints, Layout, compute_dtype
from aiops.model.shared_memory import Attach, Memory
from aiops.store.backends import HostBackend
from aiops.store.gradient import Gradient
from aiops.store.resources import Resources
from aiops.store.snapshots import Version

_PIECE = 1 << 18  # elements that are filled with a value at a time

PORTION = 8 << 20
"""Bytes of a gradient uploaded at a time: upload, update and download are pipelined."""


class CudaBackend:
    """A `ComputeBackend` on a device; its arrays are `DeviceArray`.

    Parameters
    ----------
    device
        Provides the memory and the kernels.
    layout
        The tensors that are held.
    backend
        The host's kernels, which decode what the device's do not: low-rank factors, codecs of
        third parties, and coded tensors that are not float32.
    machine
        Counts the time of uploads and downloads.

    Raises
    ------
    MemoryError
        When the device has no room.
    """

    joins = False

    def __init__(self, device: Device, layout: Layout, backend: str, machine: Resources) -> None:
        self._device, self._layout = device, layout
        self._stream, self._up, self._down = (device.stream() for _ in range(3))
        self._operations = DeviceOperations(device, self._stream)
        self._host = HostBackend(layout, backend, machine)
        self._uploaded = machine.measure("upload", self._upload)
        self._downloaded = machine.measure("download", self._download)
        self._wait_upload = machine.measure("upload", self._await_upload)
        self._wait_uploads = machine.measure("upload", self._up.finish)
        self._wait_downloads = machine.measure("download", self._down.finish)
        self._parameters = self._allocate(layout.nbytes)
        self._sections = self._cut(self._parameters)
        self._buffers = Buffers(device, layout.nbytes)
        self._sent: DeviceArray | None = None
        self._decoded: DeviceArray | None = None  # for a decoded gradient
        self._decoders: dict[str, DeviceKernel] = {}
        self._version_on_host: Version | None = None  # the last version with a copy on the host
        self._uploads: deque[tuple[int, DeviceEvent]] = deque()  # under way: their ends, events
        self._uploaded_to = 0  # the end of the last upload that is complete
        self._source: Bytes | None = None  # the bytes being uploaded, kept alive until they are
        self._host_copy: Arena | None = None  # gets updated parameters at once
        self._copied = 0  # bytes of it whose copy has begun

    @property
    def backend(self) -> str:
        """The kernels in use: ``"cuda"``."""
        return "cuda"

    # ------------------------------------------------------------ arrays and kernels

    def _allocate(self, nbytes: int) -> DeviceArray:
        return self._device.allocate(max(nbytes, 1))[:nbytes]

    def _cut(self, data: DeviceArray) -> list[Any]:
        return [data[s.start : s.stop].view(s.dtype) for s in self._layout.sections]

    def array(self, size: int, dtype: np.dtype[Any], value: float | None = None) -> Any:
        """Return an array on the device; all elements are ``value``, if there is one."""
        found = self._allocate(size * dtype.itemsize).view(dtype)
        if value is not None:
            piece = np.full(min(size, _PIECE), value, dtype).view(np.uint8)
            there = found.view(np.uint8)
            for start in range(0, there.nbytes, max(piece.nbytes, 1)):
                part = there[start : start + piece.nbytes]
                self._up.upload(part, piece[: part.nbytes])
            self._up.finish()
        return found

    def kernel(self, rule: Rule, dtype: np.dtype[Any], codec: str | None = None) -> Any:
        """Build a kernel for the device's arrays."""
        if codec is not None:
            return self._built(rule, ArrayTypes("float32", "float32", codec, packed=True))
        return self._built(rule, ArrayTypes(compute_dtype(dtype).name, dtype.name, dtype.name))

    def folding(self, rule: Rule, dtype: np.dtype[Any]) -> Any:
        """Build a kernel that reads gradients in their own dtype."""
        real = compute_dtype(dtype).name
        return self._built(rule, ArrayTypes(real, real, dtype.name))

    def _built(self, rule: Rule, kinds: ArrayTypes) -> DeviceKernel:
        return DeviceKernel(rule, kinds, self._device, self._stream)

    def widened(self, gradient: Array) -> Array:
        """Return the gradient: the kernels widen it themselves."""
        return gradient

    def update(
        self, kernel: Kernel, spans: Spans, operands: Operands, *, whole: bool = False
    ) -> Ints:
        """Call a kernel, on portions of a gradient whose upload is still under way.

        The parameters of each portion are copied to the arena that readers will lease while the
        next portion is uploaded.
        """
        _factor, _base, grad, target, _state, _reads = operands
        if whole or not self._uploads or grad.dtype == np.uint8:
            self._finish_uploads()
            return kernel(spans, *operands)
        sums = np.zeros(len(spans), np.int64)
        for rows, part in cut(spans, PORTION // grad.dtype.itemsize):
            last = int((part.src + part.hi - part.lo).max())
            self._wait_upload(grad[:last])
            np.add.at(sums, rows, kernel(part, *operands))
            if self._host_copy is not None:
                self._stream.finish()
                self._begin_copy(self._host_copy, target, part)
        return sums

    def _begin_copy(self, arena: Arena, target: Any, part: Spans) -> None:
        """Begin to copy updated elements to the arena that is read, if they are parameters."""
        begin, item = target.start - self._parameters.start, target.dtype.itemsize
        if not 0 <= begin < self._parameters.nbytes:
            return  # a master, from which the parameters are rounded later
        for low, high in zip(part.lo.tolist(), part.hi.tolist(), strict=True):
            at = slice(begin + item * low, begin + item * high)
            self._down.download(arena.data[at], self._parameters[at])
            self._copied += item * (high - low)

    def sum_squares(self, array: Any) -> float:
        """Return the sum of squares, once all of a gradient is uploaded."""
        self._finish_uploads()
        return self._operations.sum_squares(array)

    def finite(self, array: Any) -> bool:
        """Return whether all are finite; a float64 beyond 1e154 passes for one that is not."""
        return math.isfinite(self.sum_squares(array))

    def copy(self, target: Any, source: Any) -> None:
        """Queue a copy on the device."""
        self._finish_uploads()
        self._stream.copy(target.view(np.uint8), source.view(np.uint8))

    def narrow(self, target: Any, master: Any) -> None:
        """Round a master into the parameters."""
        self._operations.narrow(target, master)

    def read_packed(self) -> frozenset[str]:
        """Return the codecs whose payloads the device's kernels read."""
        return kernels.PACKED

    def on_host(self, array: Any) -> Array:
        """Download an array, once the kernels that write it are done."""
        self._finish_uploads()
        self._stream.finish()
        data = np.empty(array.nbytes, np.uint8)
        self._down.download(data, array.view(np.uint8))
        self._down.finish()
        found: Array = data.view(array.dtype)
        return found

    def fill(self, array: Any, write: Callable[[Array], object]) -> None:
        """Upload what is written."""
        data = np.empty(array.nbytes, np.uint8)
        write(data.view(array.dtype))
        self._upload(array.view(np.uint8), data)

    # ------------------------------------------------------------ gradients

    def resident(self, gradient: Gradient) -> Gradient:
        """Upload a gradient as it came, if it is not on the device."""
        data: Any = gradient.data
        if isinstance(data, DeviceArray):
            return gradient
        return Gradient(self._upload_gradient(gradient), gradient.cover, gradient.parts)

    def _upload_gradient(self, gradient: Gradient) -> Any:
        self._finish_uploads()
        there, data = self._buffers.take(len(gradient.data)), gradient.data
        if len(data) < 2 * PORTION:
            self._uploaded(there, data)
            return there
        self._source, self._uploaded_to = data, there.start
        for start in range(0, len(data), PORTION):
            stop = min(start + PORTION, len(data))
            self._up.upload(there[start:stop], data[start:stop])
            self._uploads.append((there.start + stop, self._up.record_event()))
        return there

    def _await_upload(self, array: DeviceArray) -> None:
        """Wait until all of an array is uploaded."""
        while self._uploads and self._uploaded_to < array.start + array.nbytes:
            self._uploaded_to, mark = self._uploads.popleft()
            mark.wait()

    def _finish_uploads(self) -> None:
        """Wait until the whole gradient is uploaded."""
        if self._source is not None:
            self._wait_uploads()
            self._uploads.clear()
            self._source = None

    def _upload(self, target: DeviceArray, source: Bytes) -> None:
        self._up.upload(target, source)
        self._up.finish()

    def dense(self, gradient: Gradient) -> Gradient:
        """Decode a gradient on the device if it has kernels for all of it, else on the host."""
        known = {RAW.name, TopK.name, *kernels.PACKED}
        tensors = [self._layout.tensors[i] for i in gradient.cover.tensors.tolist()]
        single = all(tensor.dtype == np.float32 for tensor in tensors)
        if not gradient.parts or not single or any(p.codec not in known for p in gradient.parts):
            return self.resident(self._host.dense(gradient))
        there = self._upload_gradient(gradient)
        self._finish_uploads()
        if self._decoded is None:
            self._decoded = self._allocate(self._layout.nbytes)
        self._decode(gradient, there, self._decoded)
        found: Any = self._decoded
        return Gradient(found, gradient.cover)

    def decoded(self, gradient: Gradient) -> Gradient:
        """Decode a gradient on the host."""
        return self._host.dense(gradient)

    def _decode(self, gradient: Gradient, there: DeviceArray, room: DeviceArray) -> None:
        """Decode the parts of a gradient to the places of its cover; ``there`` is its upload."""
        layout, cover, begin = self._layout, gradient.cover, 0
        spans: dict[str, list[tuple[int, int, int]]] = {}
        for part in gradient.parts:
            index = layout.tensor_at(part.start)
            row = int(np.searchsorted(cover.tensors, index))
            low = int(cover.starts[row]) + part.start - layout.tensors[index].offset
            high = low + part.stop - part.start
            payload = there[begin : begin + part.nbytes]
            if part.codec == raw.NAME:
                self._stream.copy(room[low:high], payload)
            elif part.codec == TopK.name and high > low:
                kept, form, cut = TopK.read(gradient.data[begin : begin + part.nbytes])
                target = room[low:high].view(np.float32)
                values = payload[TopK.VALUES : cut]
                self._operations.spread(target, values, payload[cut:], kept, form)
            elif high > low:
                spans.setdefault(part.codec, []).append((low // 4, high // 4, begin))
            begin += part.nbytes
        whole = room.view(np.float32)
        for codec, rows in spans.items():
            if codec not in self._decoders:
                self._decoders[codec] = self.kernel(kernels.FIRST, np.dtype(np.float32), codec)
            lo, hi, src = np.array(rows, np.int64).T
            each = Spans(lo, hi, src, np.ones(len(rows)))
            self._decoders[codec](each, 1.0, whole, there, whole, ())

    # ------------------------------------------------------------ versions

    def parameters(self, version: Version) -> Sequence[Array]:
        """Return the sections of the only version on the device."""
        return self._sections

    def sent(self, version: Version, current: Version) -> Sequence[Array]:
        """Return the device's sections, or upload an older version from its copy on the host."""
        if version is current:
            return self._sections
        if self._sent is None:
            self._sent = self._allocate(self._layout.nbytes)
        self._uploaded(self._sent, version.arena.data)
        return self._cut(self._sent)

    def load(self, arena: Arena, masters: Sequence[Any]) -> None:
        """Upload the parameters and the masters."""
        self._upload(self._parameters, arena.data)
        for master, section in zip(masters, arena.sections, strict=True):
            if master is not None:
                self._upload(master.view(np.uint8), section.astype(np.float32).view(np.uint8))

    def begin(self, base: Version, target: Version, whole: bool, read_soon: bool) -> None:
        """Copy parameters during the update if its version is read soon, else on demand."""
        self._version_on_host, self._copied = None, 0
        self._host_copy = target.room if read_soon else None

    def end(self, target: Version, read_soon: bool) -> None:
        """Wait for the update, and for the copy of a version that is read soon."""
        self._finish_uploads()
        self._stream.finish()
        if not read_soon:
            return
        if self._copied < self._parameters.nbytes:
            self._downloaded(target.room)
        else:
            self._wait_downloads()
        self._host_copy, self._version_on_host = None, target

    def pending_copy(self, version: Version) -> Callable[[], None] | None:
        """Return the download of a version that has no copy on the host yet."""
        return None if version is self._version_on_host else partial(self._downloaded, version.room)

    def _download(self, arena: Arena) -> None:
        self._down.download(arena.data, self._parameters)
        self._down.finish()


class Buffers:
    """Device memory for uploaded gradients; each buffer returns with its last reference."""

    def __init__(self, device: Device, nbytes: int) -> None:
        self._device, self._nbytes = device, nbytes
        self._spare: deque[DeviceArray] = deque(self._made(nbytes) for _ in range(2))

    def _made(self, nbytes: int) -> DeviceArray:
        return self._device.allocate(max(nbytes, 1))

    def take(self, nbytes: int) -> DeviceArray:
        """Return a buffer of ``nbytes``, a spare one if there is one."""
        try:
            memory = self._spare.popleft()
        except IndexError:
            memory = self._made(max(nbytes, self._nbytes))
        if len(memory) < nbytes:  # a coded gradient can be longer than the model
            memory = self._made(nbytes)
        loan = _Loan(self._spare, memory)
        return DeviceArray(memory.start, nbytes, memory.dtype, loan)


class _Loan:
    def __init__(self, spare: deque[DeviceArray], memory: DeviceArray) -> None:
        self._spare, self._memory = spare, memory

    def __del__(self) -> None:
        self._spare.append(self._memory)


class PageLocked(Memory):
    """Makes page-locked memory, which a device reads and writes without the processor.

    Parameters
    ----------
    inner
        Makes the arenas; those in shared memory are page-locked in place.
    device
        The device that page-locks.
    """

    def __init__(self, inner: Memory, device: Device) -> None:
        self._inner, self._device = inner, device

    def arena(self, layout: Layout) -> Arena:
        """Return an arena in page-locked memory."""
        made = self._inner.arena(layout)
        if made.segment is None:
            return Arena(layout, self._device.host(layout.nbytes))
        _while_it_lives(made, self._device.pin(made.data))
        return made

    def holding(self, layout: Layout, data: Bytes) -> Arena:
        """Return a page-locked arena with a copy of ``data``."""
        made = self.arena(layout)
        made.data[:] = data
        return made

    def buffer(self, nbytes: int) -> Bytes:
        """Return a page-locked receive buffer."""
        return self._device.host(nbytes)

    def attached(self, attach: Attach, nbytes: int) -> Bytes:
        """Map a worker's segment, and page-lock it.

        It is mapped as it is: page-locking a private mapping copies its pages, and what the worker
        writes there afterwards would not be seen.
        """
        data = attach(nbytes, private=False)
        _while_it_lives(data, self._device.pin(data, read_only=True))
        return data


def _while_it_lives(memory: object, end: Callable[[], None] | None) -> None:
    """Call ``end``, which unlocks pages, when the memory is let go."""
    if end is not None:
        weakref.finalize(memory, end).atexit = False
