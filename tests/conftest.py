"""What every test relies on."""

import contextlib
import fcntl
import gc
import importlib
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings

from tests.seeds import examples

# A machine that does other work, or compiles a kernel first, is no failure.
settings.register_profile("aiops", deadline=None, max_examples=examples(50))
settings.load_profile("aiops")

# A shell without job control makes its background commands deaf to Ctrl-C, and their children too.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# Threads for matrix products wait for the next one in a busy loop, which other tests pay. So NumPy
# gets one, and PyTorch's wait otherwise (a hundred steps of a small network: 0.04 s, not 1.2 s).
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

# Servers that tests start as processes update with NumPy's loops, which agree with Numba's to the
# last bit and load in half the time. Tests whose point is a process with Numba's say so.
os.environ.setdefault("AIOPS_KERNELS", "numpy")


_LONGEST = ("tests", "ray", "test_cluster.py")


def _rewrite_in_turn(place: int, of: int) -> None:
    """Import the modules of tests, beginning at this process's share of them.

    Where no byte code is kept yet, pytest rewrites each module's assertions as it imports it, which
    is more work than all else of a collection, and every process of pytest-xdist would do it for
    every module at the same time. So each begins elsewhere, and finds the others' byte code.
    """
    tests = Path(__file__).parent
    found = sorted(tests.rglob("test_*.py"))
    for path in found[len(found) * place // of : len(found) * (place + 1) // of]:
        name = ".".join(path.relative_to(tests.parent).with_suffix("").parts)
        with contextlib.suppress(Exception, pytest.skip.Exception):  # the collection tells it
            importlib.import_module(name)


def _compile_in_turn() -> None:
    """Have one process of pytest-xdist at a time compile a loop with Numba.

    Where no machine code is kept yet, each would compile the same loops at the same time; so the
    others find them compiled.
    """
    jit = sys.modules.get("aiops.kernels.numba_jit")
    if jit is None:
        return
    compiled = jit.compiled

    def in_turn(*given: Any, **options: Any) -> Any:
        with open(str(jit.__file__)) as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            try:
                return compiled(*given, **options)
            finally:
                fcntl.flock(file, fcntl.LOCK_UN)  # also where a process was forked meanwhile

    jit.compiled = in_turn  # type: ignore[attr-defined]


@pytest.hookimpl(wrapper=True)
def pytest_collection(session: pytest.Session) -> Iterator[Any]:
    """Spare the garbage collector the many thousands of tests, which live until the end."""
    gc.disable()
    worker = os.environ.get("PYTEST_XDIST_WORKER", "")
    if worker and session.config.args_source is pytest.Config.ArgsSource.TESTPATHS:
        _rewrite_in_turn(int(worker[2:]), int(os.environ["PYTEST_XDIST_WORKER_COUNT"]))
    try:
        return (yield)
    finally:
        if worker:
            _compile_in_turn()
        gc.freeze()  # first: enabled, it would walk through all of them at once
        gc.set_threshold(50_000, 10, 10)
        gc.enable()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Begin the longest tests at a fifth of each process's first share.

    They wait more than they compute: where they come late, the end of the course waits for them
    with idle processors, and at the beginning all processes import and compile. Each process of
    pytest-xdist begins with its share of the tests, in order, so they are in the first share,
    behind the benchmarks, of which each takes longer than most other tests.
    """
    longest = [item for item in items if item.path.parts[-3:] == _LONGEST]
    if longest and len(longest) < len(items):
        others = [item for item in items if item not in longest]
        at = len(others) // 5 // int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
        items[:] = [*others[:at], *longest, *others[at:]]


@pytest.fixture
def none_pending() -> Iterator[None]:
    """Begin without a promise of Numba: a server of another test may still compile."""
    from tests import calls  # it imports aiops, which a conftest need not do for all tests

    with calls.none_pending():
        yield
