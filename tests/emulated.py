"""A device on this processor: the kernels' own text, compiled by g++, over memory of the host.

So the generated mathematics is held to NumPy's bits, and everything above a device runs, where
there is no GPU. Its streams do nothing until somebody waits for them: whoever looks at a result,
or overwrites a source, too early is caught at it.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import shutil
import subprocess
import tempfile
import threading
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from aiops.kernels.device import Argument, Bytes, DeviceArray, KernelSource
from aiops.model.arena import aligned

OPTIONS = ("-std=c++17", "-O1", "-ffp-contract=off", "-fno-strict-aliasing", "-shared", "-fPIC")
POISON = 0xAB
"""What fresh memory holds."""

SHIM = r"""
#include <ucontext.h>
struct _Three { unsigned x, y, z; };
static _Three threadIdx, blockIdx, blockDim, gridDim;
#define __global__
#define __device__
#define __forceinline__ inline
#define __shared__ static
#define __launch_bounds__(...)
static inline float sqrt(float x) { return __builtin_sqrtf(x); }
static inline double sqrt(double x) { return __builtin_sqrt(x); }
static inline float fabs(float x) { return __builtin_fabsf(x); }
static inline double fabs(double x) { return __builtin_fabs(x); }
static inline unsigned __float_as_uint(float x) {
    unsigned bits; __builtin_memcpy(&bits, &x, 4); return bits;
}
static inline float __uint_as_float(unsigned bits) {
    float x; __builtin_memcpy(&x, &bits, 4); return x;
}
static inline unsigned long long atomicAdd(unsigned long long *to, unsigned long long more) {
    unsigned long long before = *to; *to += more; return before;
}
static ucontext_t _home, _fibers[1024];
static bool _over[1024];
static char _stacks[1024][1 << 14];
static inline void __syncthreads() {
    if (blockDim.x > 1) swapcontext(&_fibers[threadIdx.x], &_home);
}
"""

RUN = r"""
static void **_given;
static void _call() { FUNCTION(ARGUMENTS); }
static void _fiber() { _call(); _over[threadIdx.x] = true; }
extern "C" void _run(unsigned blocks, unsigned threads, void **given) {
    _given = given;
    gridDim.x = blocks;
    blockDim.x = threads;
    for (blockIdx.x = 0; blockIdx.x < blocks; blockIdx.x++) {
        if (threads == 1) { threadIdx.x = 0; _call(); continue; }
        for (unsigned t = 0; t < threads; t++) {
            getcontext(&_fibers[t]);
            _fibers[t].uc_stack.ss_sp = _stacks[t];
            _fibers[t].uc_stack.ss_size = sizeof _stacks[t];
            _fibers[t].uc_link = &_home;
            makecontext(&_fibers[t], _fiber, 0);
            _over[t] = false;
        }
        for (unsigned left = threads; left;) {
            left = threads;
            // Backwards, since a processor's first thread is not the first to come anywhere.
            for (unsigned t = threads; t-- > 0;) {
                threadIdx.x = t;
                if (!_over[t]) swapcontext(&_home, &_fibers[t]);
                left -= _over[t];
            }
        }
    }
}
"""

COMPILER = shutil.which("g++")
needs_compiler = pytest.mark.skipif(COMPILER is None, reason="there is no g++ to compile with")


@functools.cache
def compiled(text: KernelSource) -> Callable[..., None]:
    """Compile a kernel's text; its machine code is kept for other processes and other days."""
    assert COMPILER is not None
    arguments = ", ".join(
        f"*({kind} *)_given[{place}]" for place, (kind, _name) in enumerate(text.parameters)
    )
    run = RUN.replace("FUNCTION", text.name).replace("ARGUMENTS", arguments)
    source = SHIM + text.source + run
    identity = hashlib.sha256(" ".join((source, *OPTIONS, COMPILER)).encode()).hexdigest()[:24]
    folder = Path(tempfile.gettempdir()) / f"aiops-emulated-{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    assert folder.stat().st_uid == os.getuid(), f"{folder} is somebody else's"
    library = folder / f"{identity}.so"
    if not library.exists():
        fresh = folder / f"{identity}.{os.getpid()}.{threading.get_ident()}"
        command = [COMPILER, *OPTIONS, "-x", "c++", "-", "-o", str(fresh)]
        done = subprocess.run(command, input=source, text=True, capture_output=True, check=False)
        assert done.returncode == 0, f"{done.stderr}\n{text.source}"
        fresh.replace(library)
    function: Callable[..., None] = ctypes.PyDLL(str(library))._run  # one call at a time
    return function


class DeviceEvent:
    def __init__(self, stream: EmulatedStream) -> None:
        self._stream, self._place = stream, stream.begun

    def wait(self) -> None:
        self._stream.run(self._place)


class EmulatedStream:
    """Does nothing until it is waited for."""

    def __init__(self, threads: int) -> None:
        self._threads = threads
        self._waiting: deque[Callable[[], object]] = deque()
        self._lock = threading.RLock()
        self.begun = self.done = 0

    def _begin(self, what: Callable[[], object]) -> None:
        with self._lock:
            self._waiting.append(what)
            self.begun += 1

    def run(self, place: int) -> None:
        with self._lock:
            while self.done < place:
                self._waiting.popleft()()
                self.done += 1

    def upload(self, target: DeviceArray, source: Bytes) -> None:
        assert target.nbytes == source.nbytes
        self._begin(partial(_copy, host(target), source))

    def download(self, target: Bytes, source: DeviceArray) -> None:
        assert target.nbytes == source.nbytes
        self._begin(partial(_copy, target, host(source)))

    def copy(self, target: DeviceArray, source: DeviceArray) -> None:
        assert target.nbytes == source.nbytes
        self._begin(partial(_copy, host(target), host(source)))

    def clear(self, target: DeviceArray) -> None:
        self._begin(partial(host(target).fill, 0))

    def launch(self, function: Any, blocks: int, threads: int, given: Sequence[Argument]) -> None:
        text: KernelSource = function
        assert len(given) == len(text.parameters)
        numbers: list[Any] = []
        for argument, (kind, name) in zip(given, text.parameters, strict=True):
            if isinstance(argument, DeviceArray):
                assert kind.endswith("*"), name
                argument = np.uint64(argument.start)
            else:
                assert argument.dtype == _CTYPES[kind.removeprefix("const ")], name
            numbers.append(np.array(argument))
        pointers = np.array([number.ctypes.data for number in numbers], np.uint64)
        code = compiled(text)

        def run(keep: object = (numbers, given)) -> None:
            code(blocks, min(threads, self._threads), pointers.ctypes.data_as(ctypes.c_void_p))

        self._begin(run)

    def record_event(self) -> DeviceEvent:
        return DeviceEvent(self)

    def finish(self) -> None:
        self.run(self.begun)


_CTYPES = {"long long": np.int64, "double": np.float64, "float": np.float32}


class EmulatedDevice:
    """A device of so many bytes, which runs so many of a block's threads (all do the same)."""

    def __init__(self, capacity: int = 1 << 30, threads: int = 1) -> None:
        self.name = "emulated"
        self.capacity, self.used, self.pinned = capacity, 0, 0
        self._threads = threads

    def allocate(self, nbytes: int) -> DeviceArray:
        if self.used + nbytes > self.capacity:
            left = self.capacity - self.used
            raise MemoryError(f"{self.name} has no {nbytes} bytes left, only {left}")
        memory = np.full(nbytes + 256, POISON, np.uint8)
        skip = -memory.ctypes.data % 256
        owner = _Memory(memory)
        self.used += nbytes
        weakref.finalize(owner, self._free, nbytes)
        return DeviceArray(memory.ctypes.data + skip, nbytes, np.dtype(np.uint8), owner)

    def _free(self, nbytes: int) -> None:
        self.used -= nbytes

    def function(self, text: KernelSource) -> KernelSource:
        compiled(text)
        return text

    def stream(self) -> EmulatedStream:
        return EmulatedStream(self._threads)

    def host(self, nbytes: int) -> Bytes:
        return aligned(nbytes)

    def pin(self, data: Bytes, *, read_only: bool = False) -> Callable[[], None] | None:
        assert data.flags.writeable is not read_only, "memory that is mapped privately is copied"
        nbytes = len(data)
        self.pinned += nbytes

        def unpin() -> None:
            self.pinned -= nbytes

        return unpin


class _Memory:
    def __init__(self, memory: Bytes) -> None:
        self.memory = memory


def host(array: DeviceArray) -> Bytes:
    """The bytes of a device's array, for the device alone."""
    raw = (ctypes.c_uint8 * array.nbytes).from_address(array.start)
    return np.frombuffer(raw, np.uint8)


def _copy(target: Bytes, source: Bytes) -> None:
    target.reshape(-1).view(np.uint8)[:] = source.reshape(-1).view(np.uint8)
