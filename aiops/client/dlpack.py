"""Tensors of other frameworks, as arrays in this process's memory (DLPack)."""

from __future__ import annotations

from typing import Any

import numpy as np

from aiops.errors import UsageError
from aiops.model.layout import Array

__all__ = ["on_host"]

_DEVICES = {1: "the host", 2: "a CUDA device", 10: "a ROCm device", 8: "a Metal device"}
"""Numbers of `DLPack <https://dmlc.github.io/dlpack/latest/>`_ (``DLDeviceType``)."""


def on_host(name: str, value: Any) -> Array:
    """Return a tensor as an array: over its own memory if that is the host's, else a copy.

    Anything that NumPy takes will do, and what exports DLPack: PyTorch's, JAX's and CuPy's tensors,
    on any device from which their framework copies to the host by itself (``dl_device``).

    Raises
    ------
    UsageError
        When it cannot be had so; naming the tensor, its device, and what to do.
    """
    if isinstance(value, np.ndarray):
        return value
    if not hasattr(value, "__dlpack_device__"):
        return np.asarray(value)
    why: Exception
    try:
        # PyTorch's own synchronises with the device's stream before the copy.
        found: Array = np.from_dlpack(value, device="cpu")
        return found
    except Exception as error:  # each framework raises its own
        why = error
    try:  # what NumPy has no DLPack for: JAX's bfloat16, tensors of older frameworks
        return np.asarray(value)
    except Exception:  # what DLPack said is to the point
        raise UsageError(
            f"{name!r}: this {type(value).__module__.partition('.')[0]} tensor on"
            f" {_device(value)} cannot be read as an array ({why}): pass one on the host that"
            " requires no gradient and whose dtype NumPy has; aiops.client.torch.RemoteOptimizer"
            " and aiops.client.jax see to all that by themselves"
        ) from why


def _device(value: Any) -> str:
    try:
        kind, number = value.__dlpack_device__()
    except Exception:  # as PyTorch's tensors without values
        return f"device {getattr(value, 'device', '?')}"
    return _DEVICES.get(int(kind), f"device {int(kind)}:{number}")
