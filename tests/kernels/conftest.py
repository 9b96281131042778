"""The devices that kernels are tried on."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from aiops.kernels.device import Device
from tests.devices import DEVICES, device_named
from tests.emulated import COMPILER, EmulatedDevice


@pytest.fixture(scope="session", params=DEVICES)
def device(request: pytest.FixtureRequest) -> Device:
    """A device that kernels run on."""
    return device_named(request.param)


@pytest.fixture
def threaded() -> Callable[[int], Device]:
    """Makes an emulated device that runs a given number of threads per block."""
    if COMPILER is None:
        pytest.skip("there is no g++ to compile with")
    return lambda threads: EmulatedDevice(threads=threads)
