"""Use a GPU through CuPy: its memory, its streams, and kernels compiled by NVRTC.

CuPy is imported when a GPU is requested. Its `RawModule` is not used: it adds ``-ftz=true`` to all
options, and subnormals would not have NumPy's bits.
"""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from aiops.errors import AiopsError, UsageError
from aiops.kernels.cuda_fragments import OPTIONS
from aiops.kernels.device import (
    Argument,
    Bytes,
    Device,
    DeviceArray,
    DeviceEvent,
    DeviceStream,
    KernelSource,
)

_NONE = "cpu"


def number_of(name: str) -> int | None:
    """Return the number of the GPU in a setting (``--device``), or None for ``cpu``.

    >>> number_of("cpu"), number_of("cuda"), number_of("cuda:1")
    (None, 0, 1)

    Raises
    ------
    UsageError
        When the setting has another form.
    """
    kind, colon, number = name.partition(":")
    if name == _NONE:
        return None
    plain = number.isascii() and number.isdigit()
    if kind != "cuda" or (colon and not plain):
        raise UsageError(f"--device {name!r}: write cpu, cuda or cuda:N, such as cuda:0")
    return int(number) if colon else 0


def opened(name: str) -> Device | None:
    """Return the device in a setting (``--device``), ready for use, or None for ``cpu``.

    Raises
    ------
    UsageError
        When it cannot be used; the text tells why, and what to do.
    """
    number = number_of(name)
    return None if number is None else CupyDevice(number)


class CupyDevice:
    """Implements `aiops.kernels.device.Device`.

    Raises
    ------
    UsageError
        When CuPy or NVRTC is not installed, the driver is too old for them, or there is no such
        GPU.
    """

    def __init__(self, number: int = 0) -> None:
        try:
            import cupy
        except ImportError as error:
            raise UsageError(
                f"--device cuda:{number} needs CuPy, which cannot be imported ({error}): pip"
                " install 'aiops-ps[cuda12]', or [cuda13] where nvidia-smi says CUDA 13"
            ) from None
        self._cupy, self._runtime = cupy, cupy.cuda.runtime
        self._number = number
        self._check()
        self._runtime.setDevice(number)
        about = self._runtime.getDeviceProperties(number)
        title = about["name"]
        shown = title.decode() if isinstance(title, bytes) else str(title)
        self.name = f"cuda:{number} ({shown})"
        self._architecture = 10 * about["major"] + about["minor"]

    def _check(self) -> None:
        number, runtime = self._number, self._runtime
        try:
            self._cupy.cuda.nvrtc.getVersion()
        except Exception as error:  # CuPy looks for it now, and raises errors of its own
            raise UsageError(
                f"--device cuda:{number} needs NVRTC, which CuPy does not find"
                f" ({str(error).partition(chr(10))[0]}): pip install 'aiops-ps[cuda12]', or"
                " [cuda13] where nvidia-smi says CUDA 13"
            ) from None
        try:
            count = runtime.getDeviceCount()
        except runtime.CUDARuntimeError as error:
            raise UsageError(
                f"--device cuda:{number}: CUDA says {_text(error)!r}; see whether nvidia-smi shows"
                " a GPU and a driver that is new enough for this CuPy, or leave --device out"
            ) from None
        if number >= count:
            there = {0: "none", 1: "cuda:0 alone"}.get(count, f"cuda:0 to cuda:{count - 1}")
            raise UsageError(
                f"--device cuda:{number}: there is no such GPU, but {there}; see nvidia-smi -L and"
                " CUDA_VISIBLE_DEVICES"
            )

    # ------------------------------------------------------------ memory

    def allocate(self, nbytes: int) -> DeviceArray:
        """Allocate with cudaMalloc; the memory is freed with its last array."""
        runtime = self._runtime
        runtime.setDevice(self._number)
        try:
            start = runtime.malloc(nbytes)
        except runtime.CUDARuntimeError as error:
            free, total = runtime.memGetInfo()
            raise MemoryError(
                f"{self.name} has no room for another {nbytes} bytes: {free} of its {total} are"
                f" free ({_text(error)})"
            ) from None
        owner = _Allocation()
        weakref.finalize(owner, runtime.free, start).atexit = False
        return DeviceArray(start, nbytes, np.dtype(np.uint8), owner)

    def host(self, nbytes: int) -> Bytes:
        """Allocate with cudaHostAlloc; the memory is freed with its last array."""
        runtime = self._runtime
        runtime.setDevice(self._number)
        try:
            start = runtime.hostAlloc(max(nbytes, 1), runtime.hostAllocPortable)
        except runtime.CUDARuntimeError as error:
            raise MemoryError(
                f"no page-locked memory of {nbytes} bytes for {self.name}: {_text(error)}"
            ) from None
        raw = (ctypes.c_uint8 * max(nbytes, 1)).from_address(start)
        weakref.finalize(raw, runtime.freeHost, start).atexit = False
        return np.frombuffer(memoryview(raw), np.uint8)[:nbytes]

    def pin(self, data: Bytes, *, read_only: bool = False) -> Callable[[], None] | None:
        """Register the pages with cudaHostRegister."""
        runtime, start = self._runtime, data.ctypes.data
        runtime.setDevice(self._number)
        try:
            runtime.hostRegister(start, data.nbytes, _PORTABLE | (_READ_ONLY if read_only else 0))
        except runtime.CUDARuntimeError:  # pageable memory works as well, but slower
            return None

        def unpin() -> None:
            runtime.hostUnregister(start)

        return unpin

    # ------------------------------------------------------------ work

    def stream(self) -> DeviceStream:
        """Return a non-blocking stream."""
        self._runtime.setDevice(self._number)
        return _CupyStream(self._cupy, self._number, self.name)

    def function(self, text: KernelSource) -> object:
        """Compile with NVRTC, and load the module."""
        self._runtime.setDevice(self._number)
        module = self._cupy.cuda.function.Module()
        module.load(machine_code(self._cupy, text, self._architecture))
        return module.get_function(text.name)


_PORTABLE, _READ_ONLY = 1, 8
"""cudaHostRegisterPortable, cudaHostRegisterReadOnly."""


class _Allocation:
    """An object that lives as long as memory of the device; its finaliser frees that."""

    __slots__ = ("__weakref__",)


def machine_code(cupy: Any, text: KernelSource, architecture: int) -> bytes:
    """Compile a kernel for GPUs of a compute capability (90 is 9.0), and return the CUBIN.

    For a capability that this NVRTC does not know yet it returns PTX, which the driver compiles. No
    GPU is needed.
    """
    nvrtc = cupy.cuda.nvrtc
    known = [int(each) for each in nvrtc.getSupportedArchs()]
    exact = architecture in known
    chosen = architecture if exact else max(each for each in known if each <= architecture)
    options = (*OPTIONS, f"--gpu-architecture={'sm' if exact else 'compute'}_{chosen}")
    program = nvrtc.createProgram(text.source, f"{text.name}.cu", (), ())
    try:
        nvrtc.compileProgram(program, options)
        code: bytes = nvrtc.getCUBIN(program) if exact else nvrtc.getPTX(program)
    except nvrtc.NVRTCError as error:
        log = nvrtc.getProgramLog(program)
        raise AiopsError(
            f"NVRTC did not compile the kernel {text.name!r} ({error}), which is a fault of aiops:"
            f" please report it with this:\n{log}\n{text.source}"
        ) from None
    finally:
        nvrtc.destroyProgram(program)
    return code


class _CupyStream:
    """Implements `aiops.kernels.device.Stream`."""

    def __init__(self, cupy: Any, number: int, name: str) -> None:
        self._cupy, self._runtime, self._number = cupy, cupy.cuda.runtime, number
        self._name = name
        self._stream = cupy.cuda.Stream(non_blocking=True)

    def _copy(self, target: int, source: int, nbytes: int, kind: int) -> None:
        if nbytes:
            self._runtime.setDevice(self._number)
            self._runtime.memcpyAsync(target, source, nbytes, kind, self._stream.ptr)

    def upload(self, target: DeviceArray, source: Bytes) -> None:
        """Queue cudaMemcpyAsync from the host."""
        kind = self._runtime.memcpyHostToDevice
        self._copy(target.start, source.ctypes.data, target.nbytes, kind)

    def download(self, target: Bytes, source: DeviceArray) -> None:
        """Queue cudaMemcpyAsync to the host."""
        kind = self._runtime.memcpyDeviceToHost
        self._copy(target.ctypes.data, source.start, source.nbytes, kind)

    def copy(self, target: DeviceArray, source: DeviceArray) -> None:
        """Queue cudaMemcpyAsync within the device."""
        kind = self._runtime.memcpyDeviceToDevice
        self._copy(target.start, source.start, target.nbytes, kind)

    def clear(self, target: DeviceArray) -> None:
        """Queue cudaMemsetAsync."""
        if target.nbytes:
            self._runtime.setDevice(self._number)
            self._runtime.memsetAsync(target.start, 0, target.nbytes, self._stream.ptr)

    def launch(self, function: Any, blocks: int, threads: int, given: Sequence[Argument]) -> None:
        """Queue a kernel."""
        self._runtime.setDevice(self._number)
        arguments = tuple(
            np.uint64(each.start) if isinstance(each, DeviceArray) else each for each in given
        )
        function((blocks,), (threads,), arguments, stream=self._stream)

    def record_event(self) -> DeviceEvent:
        """Record an event without timing."""
        self._runtime.setDevice(self._number)
        event = self._cupy.cuda.Event(disable_timing=True)
        event.record(self._stream)
        return _CupyEvent(self, event)

    def finish(self) -> None:
        """Wait for the stream."""
        self.wait(self._stream)

    def wait(self, what: Any) -> None:
        """Wait for a stream or an event of CuPy.

        Raises
        ------
        AiopsError
            When queued work failed.
        """
        self._runtime.setDevice(self._number)
        try:
            what.synchronize()
        except self._runtime.CUDARuntimeError as error:
            raise AiopsError(
                f"{self._name} failed ({_text(error)}), and what it held is lost: start the server"
                " again, with --init if the model was saved"
            ) from None


class _CupyEvent:
    def __init__(self, stream: _CupyStream, event: Any) -> None:
        self._stream, self._event = stream, event

    def wait(self) -> None:
        self._stream.wait(self._event)


def _text(error: BaseException) -> str:
    return str(error).partition(": ")[2] or str(error)
