"""Which backend executes a kernel on this machine."""

from __future__ import annotations

import functools
import logging
from weakref import WeakSet

from aiops.errors import UsageError, nearest

__all__ = ["BACKENDS", "Expected", "at_hand", "expected", "resolve"]

BACKENDS = ("auto", "numba", "numpy")

logger = logging.getLogger("aiops.kernels")


def resolve(backend: str) -> str:
    """Return ``"numba"`` or ``"numpy"`` for a wish, which may be ``"auto"``.

    ``"auto"`` is Numba where it can be imported, else NumPy, with one line of advice in the log
    of ``aiops.kernels``. Raises :class:`~aiops.errors.UsageError` for an unknown name, and for
    ``"numba"`` where it cannot be had.
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
        raise UsageError(
            f"the numba backend cannot be had: {obstacle}; install it with "
            "pip install 'aiops-ps[server]', or choose the backend 'numpy'",
            backend=backend,
        )
    _advise(obstacle)
    return "numpy"


class Expected:
    """A promise that another thread makes Numba ready; until it has come, NumPy works `at_hand`.

    Importing Numba takes a quarter of a second, and compiling with it seconds: whoever must answer
    meanwhile has NumPy, which gives the same bits. A promise that is forgotten is over, too.
    """

    def __init__(self) -> None:
        _EXPECTED.add(self)

    def came(self) -> None:
        """Say that Numba can be used."""
        _EXPECTED.discard(self)


_EXPECTED: WeakSet[Expected] = WeakSet()


def expected() -> bool:
    """Say whether another thread is making Numba ready."""
    return len(_EXPECTED) > 0


def at_hand(backend: str) -> str:
    """Return what `resolve` does, or ``"numpy"`` while another thread makes Numba ready.

    For work of the moment; what is kept for long asks `resolve`, which imports Numba.
    """
    return "numpy" if _EXPECTED else resolve(backend)


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
