"""Mark the helpers of compiled loops in modules that do not import Numba.

Numba is optional, and importing it takes a quarter of a second. So a module that has both the NumPy
specification and the compiled loops of something keeps the loops as plain functions.
`aiops.kernels.numba_jit.compile_loop` compiles one when it is first wanted, and with it the
functions that it calls: those marked with `helper`, and the stand-ins below.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

__all__ = [
    "HELPERS",
    "NumbaWord",
    "bf16_to_float",
    "disjoint",
    "float_to_fp16",
    "fp16_to_float",
    "helper",
    "prefetch",
    "read_only",
    "writable",
]

F = TypeVar("F", bound=Callable[..., Any])

HELPERS: dict[Callable[..., Any], dict[str, Any]] = {}
"""The marked functions, each with its options of ``numba.njit``."""


class NumbaWord:
    """Stands for the function of this name in `aiops.kernels.numba_jit`; not callable in Python."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __call__(self, *arguments: Any) -> Any:
        """Raise TypeError: only compiled code can call it."""
        raise TypeError(f"{self.name} exists in loops that Numba has compiled, not in Python")


disjoint = NumbaWord("disjoint")
prefetch = NumbaWord("prefetch")
bf16_to_float = NumbaWord("bf16_to_float")
fp16_to_float = NumbaWord("fp16_to_float")
float_to_fp16 = NumbaWord("float_to_fp16")
read_only = NumbaWord("read_only")
writable = NumbaWord("writable")


def helper(*, inline: bool = False) -> Callable[[F], F]:
    """Mark a function that loops call: it is compiled with the first of them.

    ``inline``: LLVM must inline it, so that the loop around it runs in vectors.
    """

    def mark(function: F) -> F:
        # No wrapper, which Python would call: it takes nearly as long to compile as a short loop.
        alone = {"no_cpython_wrapper": True, "no_cfunc_wrapper": True}
        HELPERS[function] = {"forceinline": True} if inline else {"nogil": True, **alone}
        return function

    return mark
