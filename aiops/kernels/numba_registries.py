"""Have Numba load all that it can compile, without the linear algebra of SciPy.

Where SciPy is installed, Numba imports ``scipy.linalg`` to see whether it could compile ``np.dot``
and its like. That takes a third of Numba's start, and no kernel of ours calls them. So a stand-in
answers for SciPy meanwhile. Numba looks the functions up by name when it compiles a call, so other
users of Numba in this process can compile all of them all the same.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from types import ModuleType
from typing import Any

__all__ = ["load_registries"]

_LINALG, _BLAS = "scipy.linalg", "scipy.linalg.cython_blas"
_FUNCTIONS = "__pyx_capi__"  # the functions of a module for compiled code, by their names


class _UnloadedModule(ModuleType):
    """Stands for a module, which is imported when another thread asks it for a function."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") and name != _FUNCTIONS:  # of the import itself
            raise AttributeError(name)
        _withdraw(self)
        return getattr(importlib.import_module(self.__name__), name)


def _withdraw(module: ModuleType) -> None:
    if sys.modules.get(module.__name__) is module:
        del sys.modules[module.__name__]


@contextmanager
def _without_linear_algebra() -> Iterator[None]:
    """Have ``import scipy.linalg.cython_blas`` import nothing, unless it has been imported."""
    if _LINALG in sys.modules or find_spec("scipy") is None:
        yield
        return
    module = _UnloadedModule(_BLAS)
    sys.modules[_BLAS] = module
    try:
        yield
    finally:
        _withdraw(module)


def load_registries() -> None:
    """Load the types, functions and implementations that Numba has; the first compilation would."""
    from numba.core.registry import cpu_target

    with _without_linear_algebra():
        cpu_target.typing_context.refresh()
        cpu_target.target_context.refresh()
