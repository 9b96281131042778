"""PyTorch's tensors and arrays over the same memory, and copies from devices to the host."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
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


def page_lock(params: Params) -> None:
    """Page-lock some arrays for copies from and to CUDA devices, as long as their arena lives.

    Such copies take a seventh of the time, and do not hold up the host. Where pages cannot be
    locked they are as they were.
    """
    arena = params.arena
    if arena in _LOCKED or not arena.data.nbytes:
        return
    _LOCKED.add(arena)
    runtime, begin = _torch.cuda.cudart(), arena.data.ctypes.data
    if int(runtime.cudaHostRegister(begin, arena.data.nbytes, 0)) == 0:
        weakref.finalize(arena, runtime.cudaHostUnregister, begin).atexit = False
        return
    with suppress(RuntimeError):  # the next kernel is told of that error; it is none
        _torch.zeros(1, device="cuda")


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
