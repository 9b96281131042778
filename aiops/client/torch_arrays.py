"""PyTorch's tensors and arrays over the same memory, and copies from devices to the host."""

from __future__ import annotations

import os
import re
import sys
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack, suppress
from typing import Any, TypeVar
from weakref import WeakSet

import numpy as np
import torch as _torch

from aiops.client.params import Params
from aiops.model.arena import Arena
from aiops.model.layout import Array, dtype_named

T = TypeVar("T")

_LOCKED: WeakSet[Arena] = WeakSet()
"""Those that were page-locked, or cannot be."""

_PORTABLE = 1  # cudaHostRegisterPortable: for all devices


def to_array(tensor: Any) -> Array:
    """Return a CPU tensor as an array over the same memory."""
    if tensor.dtype == _torch.bfloat16:  # which NumPy does not know
        return np.asarray(tensor.view(_torch.int16).numpy()).view(dtype_named("bfloat16"))
    array: Array = tensor.numpy()
    return array


def to_tensor(array: Array) -> Any:
    """Return an array as a CPU tensor over the same memory."""
    if array.dtype.name == "bfloat16":
        return _torch.from_numpy(array.view(np.int16)).view(_torch.bfloat16)
    return _torch.from_numpy(array)


def lock_cuda_pages(params: Params | None, beside: Mapping[str, Any]) -> None:
    """Page-lock those of some arrays that are copied from and to CUDA devices (`page_lock`).

    ``beside``: the devices' tensors by their arrays' names, and others.
    """
    names = [name for name, tensor in beside.items() if tensor.is_cuda]
    if params is not None and names:
        page_lock(params, names, beside[names[0]].device)


def page_lock(params: Params, names: Sequence[str], device: Any) -> None:
    """Page-lock some arrays, and those between them, as long as their arena lives.

    Copies from and to CUDA devices take a seventh of the time then, and do not hold up the host.
    Where pages cannot be locked they are as they were. An arena is locked once: the first names
    count.

    Parameters
    ----------
    params
        Has the arrays.
    names
        Of the arrays that are copied.
    device
        A CUDA device that is in use anyway.
    """
    arena = params.arena
    if arena in _LOCKED or not (arena.segment is not None or _locked_pages_stay()):
        return
    _LOCKED.add(arena)
    arrays = [arena.views[name] for name in names]
    begin = min(array.ctypes.data for array in arrays)
    end = max(array.ctypes.data + array.nbytes for array in arrays)
    if end == begin:
        return
    with _torch.cuda.device(device):
        if int(_torch.cuda.cudart().cudaHostRegister(begin, end - begin, _PORTABLE)) == 0:
            weakref.finalize(arena, _unlock, begin, device, os.getpid()).atexit = False
            return
        with suppress(RuntimeError):  # the next kernel is told of that error; it is none
            _torch.zeros(1, device=device)


def _unlock(begin: int, device: Any, process: int) -> None:
    if os.getpid() == process:  # a fork has locked nothing
        with _torch.cuda.device(device):
            _torch.cuda.cudart().cudaHostUnregister(begin)


def _locked_pages_stay() -> bool:
    """Return whether memory that is not shared stays where it was locked when the process forks.

    Linux before 5.9 gave the process that wrote first another page.
    """
    if sys.platform != "linux":
        return True
    found = re.match(r"(\d+)\.(\d+)", os.uname().release)
    return found is not None and (int(found[1]), int(found[2])) >= (5, 9)


def host_copy(tensor: Any, into: Array | None) -> Any:
    """Return a tensor as a CPU tensor: itself, where it is one.

    One on a CUDA device is copied ``into`` an array of its shape and dtype, if there is one, and
    the copy may still be under way; see `finish_copies`.
    """
    if tensor.device.type != "cuda" or into is None:
        return tensor.cpu()
    return to_tensor(into).copy_(tensor, non_blocking=True)


def finish_copies(devices: Iterable[Any]) -> None:
    """Wait until tensors that are on their way from CUDA devices are here."""
    for device in devices:
        if device.type == "cuda":
            _torch.cuda.current_stream(device).synchronize()


def on_same_streams(devices: Iterable[Any], function: Callable[[], T]) -> Callable[[], T]:
    """Return a function for another thread, for which CUDA devices work on this thread's streams.

    On others they would not wait for what this thread has told them to compute.
    """
    streams = [_torch.cuda.current_stream(each) for each in devices if each.type == "cuda"]

    def run() -> T:
        with ExitStack() as entered:
            for stream in streams:
                entered.enter_context(_torch.cuda.stream(stream))
            return function()

    return run
