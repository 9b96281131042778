"""Choose the backend that executes kernels on this machine: Numba or NumPy."""

from __future__ import annotations

import functools
import importlib.util
import logging
from weakref import WeakSet

from aiops.errors import UsageError, nearest

__all__ = ["BACKENDS", "PendingNumba", "current_backend", "need_numba", "numba_pending", "resolve"]

BACKENDS = ("auto", "numba", "numpy")

logger = logging.getLogger("aiops.kernels")


def resolve(backend: str) -> str:
    """Return the backend that a setting stands for, ``"numba"`` or ``"numpy"``; import Numba.

    Parameters
    ----------
    backend
        One of `BACKENDS`. ``"auto"`` is Numba where it can be imported, else NumPy, with one line
        of advice in the log of ``aiops.kernels``.

    Raises
    ------
    UsageError
        For an unknown name, and for ``"numba"`` where it cannot be used.
    """
    if backend == "numpy":
        return backend
    if backend not in BACKENDS:
        raise UsageError(
            f"there is no kernel backend {backend!r}; {nearest(backend, BACKENDS)}",
            backend=backend,
        )
    obstacle = _obstacle()
    if obstacle is None:
        return "numba"
    if backend == "numba":
        raise _missing(obstacle)
    _advise(obstacle)
    return "numpy"


def need_numba() -> None:
    """Refuse if Numba is not installed, without importing it, which takes a quarter of a second.

    Raises
    ------
    UsageError
        As `resolve`.
    """
    if importlib.util.find_spec("numba") is None:
        raise _missing("No module named 'numba'")


def _missing(obstacle: str) -> UsageError:
    return UsageError(
        f"the numba backend cannot be had: {obstacle}; install it with "
        "pip install 'aiops-ps[server]', or choose the backend 'numpy'",
        backend="numba",
    )


class PendingNumba:
    """A promise that another thread is importing Numba and compiling with it.

    Importing Numba takes a quarter of a second, compiling seconds. Until every promise of the
    process is over (`arrived`) or garbage collected, `current_backend` is NumPy, which gives the
    same bits, so that replies do not wait for the compiler. What makes one calls `arrived` in the
    end, whatever happens: the collector may take its time.
    """

    def __init__(self) -> None:
        _PENDING.add(self)

    def arrived(self) -> None:
        """Keep the promise, or give it up: Numba can be used. It may be called again."""
        _PENDING.discard(self)


_PENDING: WeakSet[PendingNumba] = WeakSet()


def numba_pending() -> bool:
    """Return whether another thread is importing Numba or compiling with it."""
    return len(_PENDING) > 0


def current_backend(backend: str) -> str:
    """Return what `resolve` does, or ``"numpy"`` while Numba is pending.

    For a single call. An object that is kept for long uses `resolve`, which imports Numba.
    """
    return "numpy" if _PENDING else resolve(backend)


@functools.cache
def _obstacle() -> str | None:
    try:
        import numba
    except ImportError as error:  # absent, or it does not support this NumPy
        return str(error)
    if numba.config.DISABLE_JIT:
        return "NUMBA_DISABLE_JIT is set"
    return None


@functools.cache
def _advise(obstacle: str) -> None:
    logger.warning(
        "kernels run on plain NumPy, several times slower than with Numba (%s): "
        "pip install 'aiops-ps[server]'",
        obstacle,
    )
