"""PyTorch's tensors and arrays over the same memory, and copies from devices to the host."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import ExitStack
from typing import Any, TypeVar

import numpy as np
import torch as _torch

from aiops.model.layout import Array, dtype_named

T = TypeVar("T")


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


class HostCopy:
    """The host's copy of a tensor, which is another one in each step.

    Of one on a CUDA device it is in page-locked memory, which is kept.
    """

    __slots__ = ("_memory",)

    def __init__(self) -> None:
        self._memory: Any = None

    def of(self, tensor: Any) -> Any:
        """Return a tensor as a CPU tensor: itself, where it is one.

        A copy from a CUDA device may still be under way; see `finish_copies`.
        """
        if tensor.device.type != "cuda":
            return tensor.cpu()
        if self._memory is None:
            self._memory = _torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
        return self._memory.copy_(tensor, non_blocking=True)


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
