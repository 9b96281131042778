"""Write the part of a Numba loop that reads the gradient, from an array or out of a payload."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from aiops.kernels.payloads import INT8_BLOCK, ONEBIT_BITS, ONEBIT_BLOCK

__all__ = ["LOADERS", "PLAIN", "TURN", "GradientLoader"]

TURN = 32
"""Elements of a turn of the outer loop; each turn prefetches the cache lines of a later one.

Few, since a processor has little more than a dozen cache lines in flight: with more requests it
would stall until the first have arrived. No block of a payload ends within a turn.
"""

assert INT8_BLOCK % TURN == 0
assert ONEBIT_BITS == TURN

_TURNS = (f"for _b in range(0, _w_.size, {TURN}):", f"    _m = {TURN}")


@dataclass(frozen=True)
class GradientLoader:
    """Pieces of text of a generated module, as `aiops.kernels.numba_source` puts them together.

    In the text, ``_s`` is the start of a span's gradient in ``_grad``, and ``_n`` the number of the
    span's elements.

    Attributes
    ----------
    parameters
        The parameters of the loop over one span that hold its gradient.
    arguments
        The expressions that ``update`` passes for them.
    gradient
        The expression of the element with index ``_i``, the ``_j``-th of a turn.
    turns
        The lines that open the outer loop or loops. They set ``_b`` to the first element of a turn,
        and ``_m`` to the number of its elements, which may be more than the span has left.
    ahead
        The parameters with an item per element, which are prefetched.
    sections
        Lines of ``update`` before the loops.
    length
        The expression of the bytes of a payload; empty where ``_grad`` is no payload.
    words
        The functions of `aiops.kernels.numba_jit` that the pieces call.
    """

    parameters: tuple[str, ...]
    arguments: tuple[str, ...]
    gradient: str
    turns: tuple[str, ...] = _TURNS
    ahead: tuple[str, ...] = ("_g_",)
    sections: tuple[str, ...] = ()
    length: str = ""
    words: frozenset[str] = frozenset()


PLAIN = GradientLoader(
    parameters=("_g_",),
    arguments=("_part(_grad, _s, _s + (_z - _a))",),
    gradient="_g_[_i]",
)
"""A gradient of the compute dtype."""


def _halves(name: str) -> GradientLoader:
    return GradientLoader(
        parameters=("_g_",),
        arguments=("_g_",),
        gradient=f"_{name}_to_float(_g_[_i])",
        sections=("_g_ = _part(_grad, _s, _s + 2 * _n).view(_np.uint16)",),
        length="2 * _n",
        words=frozenset({f"{name}_to_float"}),
    )


LOADERS: Mapping[str, GradientLoader] = {
    "fp16": _halves("fp16"),
    "bf16": _halves("bf16"),
    "int8": GradientLoader(
        parameters=("_units", "_g_"),
        arguments=("_units", "_g_"),
        turns=(*_TURNS, f"    _unit = _units[_b // {INT8_BLOCK}]"),
        gradient="(_real(_g_[_i]) * _unit)",
        sections=(
            f"_c = _s + 4 * ((_n + {INT8_BLOCK - 1}) // {INT8_BLOCK})",
            "_units = _part(_grad, _s, _c).view(_np.float32)",
            "_g_ = _part(_grad, _c, _c + _n).view(_np.int8)",
        ),
        length=f"4 * ((_n + {INT8_BLOCK - 1}) // {INT8_BLOCK}) + _n",
    ),
    "onebit": GradientLoader(
        parameters=("_units", "_g_"),
        arguments=("_units", "_g_"),
        turns=(
            "for _t in range(_units.size):",
            "    _unit = _units[_t]",
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
            "_units = _part(_grad, _s, _c).view(_np.float32)",
            f"_e = _c + 4 * ((_n + {ONEBIT_BITS - 1}) // {ONEBIT_BITS})",
            "_g_ = _part(_grad, _c, _e).view(_np.uint32)",
        ),
        length=f"4 * ((_n + {ONEBIT_BLOCK - 1}) // {ONEBIT_BLOCK}"
        f" + (_n + {ONEBIT_BITS - 1}) // {ONEBIT_BITS})",
        words=frozenset({"onebit_to_float"}),
    ),
}
"""Loaders of the payloads in `aiops.kernels.payloads.FORMATS`."""
