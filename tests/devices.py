"""The devices that can be had here: the emulated one, and a GPU where CuPy sees one."""

from __future__ import annotations

import functools
import importlib.util

from aiops.kernels.device import Device
from aiops.model.shared_memory import Memory
from aiops.store.cuda_backend import PageLocked
from aiops.store.resources import Resources
from tests.emulated import COMPILER, EmulatedDevice


@functools.cache
def gpu() -> Device | None:
    """The first GPU, or None."""
    if importlib.util.find_spec("cupy") is None:
        return None
    from aiops.errors import UsageError
    from aiops.kernels.cupy_device import CupyDevice

    try:
        return CupyDevice(0)
    except UsageError:
        return None


DEVICES = (
    *(["emulated"] if COMPILER is not None else []),
    *(["cuda"] if gpu() is not None else []),
)
"""Their names; tests/kernels/test_cupy_device.py alone reports one that is missing."""


def device_named(name: str) -> Device:
    """One of them."""
    found = EmulatedDevice() if name == "emulated" else gpu()
    assert found is not None
    return found


def machine_with(device: Device) -> Resources:
    """A machine that keeps its models there."""
    return Resources(PageLocked(Memory(), device), device=device)
