"""The devices that kernels are tried on."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from aiops.kernels.device import Device
from tests.emulated import COMPILER, EmulatedDevice

WITHOUT = "there is no g++ to compile with"


@pytest.fixture(scope="session", params=["emulated"])
def device(request: pytest.FixtureRequest) -> Device:
    """A device that kernels run on."""
    if COMPILER is None:
        pytest.skip(WITHOUT)
    return EmulatedDevice()


@pytest.fixture
def threaded() -> Callable[[int], Device]:
    """Makes an emulated device that runs so many threads of a block."""
    if COMPILER is None:
        pytest.skip(WITHOUT)
    return lambda threads: EmulatedDevice(threads=threads)
