"""What the contract suites run over: every algorithm, with its kinds, and every backend."""

from __future__ import annotations

from typing import Any

from aiops.algorithms import BUILT_IN

WITHOUT_GRADIENTS = {"average"}
"""The algorithms whose workers keep their gradients: their server has no updates to make."""

CASES: dict[str, tuple[str, dict[str, Any]]] = {
    **{name: (name, {}) for name in BUILT_IN if name not in WITHOUT_GRADIENTS},
    "hardsync-reject": ("hardsync", {"admission": "reject"}),
    "softsync-2": ("softsync", {"n": 2}),
    "softsync-4": ("softsync", {"n": 4}),
    **{
        f"sasgd-{kind}": ("sasgd", {"modulate": kind})
        for kind in (
            "none",
            "inverse-plus-one",
            "exponential",
            "polynomial",
            "hinge",
            "delay-adaptive",
        )
    },
}
BACKENDS = ("numpy", "numba")
WORKERS = 4
