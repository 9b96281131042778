"""The part of a generated loop that reads the gradient: from an array, or out of a payload."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from aiops.kernels.packed import INT8_BLOCK, ONEBIT_BITS, ONEBIT_BLOCK

__all__ = ["BLOCK", "LOADERS", "PLAIN", "Loader"]


@dataclass(frozen=True)
class Loader:
    """Text for Numba.

    ``parameters`` of a loop over one span hold its gradient, and ``arguments`` are handed to them;
    ``_s`` is where the span's gradient begins in ``_grad``, and ``_n`` the span's elements.
    ``loops`` are lines, each indented beneath the one before where that opens a block; within the
    last, ``gradient`` is the element with index ``_i``. ``blocks`` are the same, with at most
    `BLOCK` elements to a turn of the outer loop; ``again`` are loops over the elements of such a
    turn, for adding up what it has stored, where the loops are too short to do that within.
    ``sections`` are lines of ``update`` that precede
    the loops. ``words`` come from `aiops.kernels.jit_cpu`.
    """

    parameters: tuple[str, ...]
    arguments: tuple[str, ...]
    loops: tuple[str, ...]
    blocks: tuple[str, ...]
    gradient: str
    again: tuple[str, ...] = ()
    sections: tuple[str, ...] = ()
    length: str = ""
    words: frozenset[str] = frozenset()


BLOCK = 16_384

_ALL = ("for _i in range(_w_.size):",)
_IN_BLOCKS = (
    f"for _b in range(0, _w_.size, {BLOCK}):",
    f"for _j in range(min({BLOCK}, _w_.size - _b)):",
    "_i = _np.uintp(_b + _j)",  # a signed index might count from the end: no vectors
)

PLAIN = Loader(
    parameters=("_g_",),
    arguments=("_grad[_s : _s + (_z - _a)]",),
    loops=_ALL,
    blocks=_IN_BLOCKS,
    gradient="_g_[_i]",
)
"""A gradient of the compute dtype."""


def _halves(name: str) -> Loader:
    return Loader(
        parameters=("_g_",),
        arguments=("_g_",),
        loops=_ALL,
        blocks=_IN_BLOCKS,
        gradient=f"_{name}_to_float(_g_[_i])",
        sections=("_g_ = _grad[_s : _s + 2 * _n].view(_np.uint16)",),
        length="2 * _n",
        words=frozenset({f"{name}_to_float"}),
    )


_SCALED = ("_u_", "_g_")
_INT8 = (
    "for _b in range(_u_.size):",
    "_unit = _u_[_b]",
    f"_p = _b * {INT8_BLOCK}",
    f"for _j in range(min({INT8_BLOCK}, _w_.size - _p)):",
    "_i = _np.uintp(_p + _j)",
)
_ONEBIT = (
    "for _b in range(_u_.size):",
    "_unit = _u_[_b]",
    f"_m = min({ONEBIT_BITS}, _g_.size - _b * {ONEBIT_BITS})",
    f"for _k in range({ONEBIT_BITS}):",
    f"_p = _b * {ONEBIT_BLOCK} + _k * _m",
    "for _j in range(min(_m, _w_.size - _p)):",
    "_i = _np.uintp(_p + _j)",
)

LOADERS: Mapping[str, Loader] = {
    "fp16": _halves("fp16"),
    "bf16": _halves("bf16"),
    "int8": Loader(
        parameters=_SCALED,
        arguments=_SCALED,
        loops=_INT8,
        blocks=_INT8,
        gradient="(_real(_g_[_i]) * _unit)",
        sections=(
            f"_c = _s + 4 * ((_n + {INT8_BLOCK - 1}) // {INT8_BLOCK})",
            "_u_ = _grad[_s:_c].view(_np.float32)",
            "_g_ = _grad[_c : _c + _n].view(_np.int8)",
        ),
        length=f"4 * ((_n + {INT8_BLOCK - 1}) // {INT8_BLOCK}) + _n",
    ),
    "onebit": Loader(
        parameters=_SCALED,
        arguments=_SCALED,
        loops=_ONEBIT,
        blocks=_ONEBIT,
        again=(
            f"for _j in range(min({ONEBIT_BLOCK}, _w_.size - _b * {ONEBIT_BLOCK})):",
            f"_i = _np.uintp(_b * {ONEBIT_BLOCK} + _j)",
        ),
        gradient=f"_onebit_to_float(_g_[_np.uintp(_b * {ONEBIT_BITS} + _j)], _k, _unit)",
        sections=(
            f"_c = _s + 4 * ((_n + {ONEBIT_BLOCK - 1}) // {ONEBIT_BLOCK})",
            "_u_ = _grad[_s:_c].view(_np.float32)",
            f"_e = _c + 4 * ((_n + {ONEBIT_BITS - 1}) // {ONEBIT_BITS})",
            "_g_ = _grad[_c:_e].view(_np.uint32)",
        ),
        length=f"4 * ((_n + {ONEBIT_BLOCK - 1}) // {ONEBIT_BLOCK}"
        f" + (_n + {ONEBIT_BITS - 1}) // {ONEBIT_BITS})",
        words=frozenset({"onebit_to_float"}),
    ),
}
"""Loaders of the payloads in `aiops.kernels.packed.FORMS`."""
