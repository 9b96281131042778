"""The part of a generated loop that reads the gradient: from an array, or out of a payload."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from aiops.kernels.packed import INT8_BLOCK, ONEBIT_BITS, ONEBIT_BLOCK

__all__ = ["LOADERS", "PLAIN", "TURN", "Loader"]

TURN = 32
"""Elements to a turn of the outer loop, in which what a later turn reads is asked for.

Few, since a processor asks for little more than a dozen cache lines at once: it would stand still
until the first of a long list have come. No block of a payload ends within a turn.
"""

assert INT8_BLOCK % TURN == 0
assert ONEBIT_BITS == TURN

_TURNS = (f"for _b in range(0, _w_.size, {TURN}):", f"    _m = {TURN}")


@dataclass(frozen=True)
class Loader:
    """Text for Numba.

    ``parameters`` of a loop over one span hold its gradient, and ``arguments`` are handed to them;
    ``_s`` is where the span's gradient begins in ``_grad``, and ``_n`` the span's elements.
    ``turns`` open the outer loop or loops; they leave in ``_b`` where a turn's elements begin and
    in ``_m`` how many they are at most, which may be more than the span has left. ``gradient`` is
    the element with index ``_i``, the ``_j``-th of a turn. ``ahead`` are the parameters with an
    item for each element, which are asked for ahead. ``sections`` are lines of ``update`` that
    precede the loops. ``words`` come from `aiops.kernels.jit_cpu`.
    """

    parameters: tuple[str, ...]
    arguments: tuple[str, ...]
    gradient: str
    turns: tuple[str, ...] = _TURNS
    ahead: tuple[str, ...] = ("_g_",)
    sections: tuple[str, ...] = ()
    length: str = ""
    words: frozenset[str] = frozenset()


PLAIN = Loader(
    parameters=("_g_",),
    arguments=("_grad[_s : _s + (_z - _a)]",),
    gradient="_g_[_i]",
)
"""A gradient of the compute dtype."""


def _halves(name: str) -> Loader:
    return Loader(
        parameters=("_g_",),
        arguments=("_g_",),
        gradient=f"_{name}_to_float(_g_[_i])",
        sections=("_g_ = _grad[_s : _s + 2 * _n].view(_np.uint16)",),
        length="2 * _n",
        words=frozenset({f"{name}_to_float"}),
    )


LOADERS: Mapping[str, Loader] = {
    "fp16": _halves("fp16"),
    "bf16": _halves("bf16"),
    "int8": Loader(
        parameters=("_u_", "_g_"),
        arguments=("_u_", "_g_"),
        turns=(*_TURNS, f"    _unit = _u_[_b // {INT8_BLOCK}]"),
        gradient="(_real(_g_[_i]) * _unit)",
        sections=(
            f"_c = _s + 4 * ((_n + {INT8_BLOCK - 1}) // {INT8_BLOCK})",
            "_u_ = _grad[_s:_c].view(_np.float32)",
            "_g_ = _grad[_c : _c + _n].view(_np.int8)",
        ),
        length=f"4 * ((_n + {INT8_BLOCK - 1}) // {INT8_BLOCK}) + _n",
    ),
    "onebit": Loader(
        parameters=("_u_", "_g_"),
        arguments=("_u_", "_g_"),
        turns=(
            "for _t in range(_u_.size):",
            "    _unit = _u_[_t]",
            f"    _word = {ONEBIT_BITS} * _t",
            f"    _m = min({ONEBIT_BITS}, _g_.size - _word)",
            f"    for _bit in range({ONEBIT_BITS}):",
            f"        _b = {ONEBIT_BLOCK} * _t + _bit * _m",
            "        _mask = _np.uint32(1 << _bit)",
        ),
        gradient="_onebit_to_float(_g_[_np.uintp(_word + _j)], _mask, _unit)",
        ahead=(),
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
