"""The part of a generated loop that reads the gradient: from an array, or out of a payload."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from aiops.kernels.packed import INT8_BLOCK, ONEBIT_BITS, ONEBIT_BLOCK

__all__ = ["LOADERS", "PLAIN", "TURN", "Loader"]

TURN = 256
"""Elements to a turn of the outer loop: of ``int8``, those that share a scale."""

assert TURN == INT8_BLOCK
assert ONEBIT_BLOCK % TURN == 0


@dataclass(frozen=True)
class Loader:
    """Text for Numba.

    ``parameters`` of a loop over one span hold its gradient, and ``arguments`` are handed to them;
    ``_s`` is where the span's gradient begins in ``_grad``, and ``_n`` the span's elements.
    ``gradient`` is the element with index ``_i``, the ``_j``-th of a turn. ``turn`` are lines that
    precede a turn of `TURN` elements, the first of which is ``_b``, ``ahead`` the parameters with
    an item for each element, which are asked for ahead. ``sections`` are lines of ``update`` that
    precede the loops. ``words`` come from `aiops.kernels.jit_cpu`.
    """

    parameters: tuple[str, ...]
    arguments: tuple[str, ...]
    gradient: str
    ahead: tuple[str, ...] = ("_g_",)
    turn: tuple[str, ...] = ()
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
        turn=(f"_unit = _u_[_b // {INT8_BLOCK}]",),
        gradient="(_real(_g_[_i]) * _unit)",
        sections=(
            f"_c = _s + 4 * ((_n + {INT8_BLOCK - 1}) // {INT8_BLOCK})",
            "_u_ = _grad[_s:_c].view(_np.float32)",
            "_g_ = _grad[_c : _c + _n].view(_np.int8)",
        ),
        length=f"4 * ((_n + {INT8_BLOCK - 1}) // {INT8_BLOCK}) + _n",
    ),
    "onebit": Loader(
        parameters=("_u_", "_g_", "_d_"),
        arguments=("_u_", "_g_", "_d_"),
        ahead=(),
        turn=(
            f"_k = _b % {ONEBIT_BLOCK}",
            "if not _k:",
            f"    _m = _b // {ONEBIT_BITS}",
            f"    _onebit_to_floats(_g_[_m : _m + {ONEBIT_BLOCK // ONEBIT_BITS}],"
            f" _u_[_b // {ONEBIT_BLOCK}], _d_)",
        ),
        gradient="_d_[_np.uintp(_k + _j)]",
        sections=(
            f"_c = _s + 4 * ((_n + {ONEBIT_BLOCK - 1}) // {ONEBIT_BLOCK})",
            "_u_ = _grad[_s:_c].view(_np.float32)",
            f"_e = _c + 4 * ((_n + {ONEBIT_BITS - 1}) // {ONEBIT_BITS})",
            "_g_ = _grad[_c:_e].view(_np.uint32)",
            f"_d_ = _np.empty({ONEBIT_BLOCK}, _np.float32)",
        ),
        length=f"4 * ((_n + {ONEBIT_BLOCK - 1}) // {ONEBIT_BLOCK}"
        f" + (_n + {ONEBIT_BITS - 1}) // {ONEBIT_BITS})",
        words=frozenset({"onebit_to_floats"}),
    ),
}
"""Loaders of the payloads in `aiops.kernels.packed.FORMS`."""
