"""What every test relies on."""

import gc
import os
import signal
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import settings

from tests.seeds import TIMES

# A machine that does other work, or compiles a kernel first, is no failure.
settings.register_profile("aiops", deadline=None, max_examples=50 * TIMES)
settings.load_profile("aiops")

# A shell without job control makes its background commands deaf to Ctrl-C, and their children too.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# Servers that tests start as processes update with NumPy's loops, which agree with Numba's to the
# last bit and load in half the time. Tests whose point is a process with Numba's say so.
os.environ.setdefault("AIOPS_KERNELS", "numpy")


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[Any]:
    """Spare the garbage collector the many thousands of tests, which live until the end."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()
        gc.collect()
        gc.freeze()
        gc.set_threshold(50_000, 10, 10)


@pytest.fixture
def none_pending() -> Iterator[None]:
    """Begin without a promise of Numba: a server of another test may still compile."""
    from tests import calls  # it imports aiops, which a conftest need not do for all tests

    with calls.none_pending():
        yield
