"""What the contract suites run over: every algorithm, with its kinds, and every backend."""

from __future__ import annotations

import os
from typing import Any

from aiops.algorithms import BUILT_IN
from tests.devices import DEVICES

WITHOUT_GRADIENTS = {"average"}
"""The algorithms whose workers keep their gradients: their server has no updates to make."""


def others(text: str) -> dict[str, tuple[str, dict[str, Any]]]:
    """The cases of $AIOPS_CONTRACT: ``package.module:Name key=value ...``, more after a ``;``."""
    cases: dict[str, tuple[str, dict[str, Any]]] = {}
    for words in filter(None, (case.split() for case in text.split(";"))):
        settings = dict(word.split("=", 1) for word in words[1:])
        cases[" ".join(words)] = (words[0], settings)
    return cases


CASES: dict[str, tuple[str, dict[str, Any]]] = {
    # Local training in short cycles: the suites take only some dozens of steps per worker.
    **{
        name: (name, {})
        for name in BUILT_IN
        if name not in {"diloco", "fedbuff", "schedule-free", *WITHOUT_GRADIENTS}
    },
    "asgd-adagrad": ("asgd", {"optimizer": "adagrad", "lr": 0.3}),
    "asgd-rmsprop": ("asgd", {"optimizer": "rmsprop", "lr": 0.02}),
    **{
        f"asgd-{name}": ("asgd", {"optimizer": name, "lr": 0.01, "weight_decay": 0.001})
        for name in ("momentum", "nesterov", "adam", "adamw")
    },
    "asgd-clip": ("asgd", {"clip": 1.0, "schedule": "warmup:10,cosine:5000:0.5"}),
    "hardsync-clip-per-tensor": ("hardsync", {"clip": 1.0, "per_tensor": "clip=0.5@*[bf]*"}),
    "asgd-examples": (
        "asgd",
        {"schedule": "linear:100000:0.5", "schedule_unit": "examples", "mini_batch": 8},
    ),
    "softsync-seconds": (
        "softsync",
        {"n": 2, "schedule": "linear:100000:0.5", "schedule_unit": "seconds"},
    ),
    "asgd-per-tensor": (
        "asgd",
        {
            "optimizer": "adamw",
            "lr": 0.01,
            "weight_decay": 0.001,
            "per_tensor": "weight_decay=0@*[bf]* lr=0.005@*[bf]*",
        },
    ),
    "dcasgd-constant": ("dcasgd", {"adaptive": False, "lam": 0.04}),
    "diloco": ("diloco", {"local_steps": 4, "inner": "sgd", "inner_lr": 0.05}),
    "diloco-adamw": ("diloco", {"local_steps": 4, "inner_lr": 0.02, "momentum": 0.5}),
    "diloco-per-tensor": (
        "diloco",
        {
            "local_steps": 4,
            "inner_lr": 0.02,
            "inner_weight_decay": 0.1,
            "momentum": 0.5,
            "inner_clip": 1.0,
            "per_tensor": "inner_weight_decay=0@*[bf]* inner_lr=0.01@*[bf]* lr=0.5@*[bf]*"
            " inner_clip=0.5@*[bf]*",
        },
    ),
    "diloco-async": (
        "diloco",
        {"mode": "async", "local_steps": 4, "inner": "sgd", "inner_lr": 0.05, "momentum": 0.5},
    ),
    "diloco-streaming": (
        "diloco",
        {
            "local_steps": 4,
            "fragments": 2,
            "mix": 0.5,
            "overlap": True,
            "inner": "sgd",
            "inner_lr": 0.05,
            "momentum": 0.5,
        },
    ),
    "downpour-2-3": ("downpour", {"n_push": 2, "n_fetch": 3}),
    "fasgd-relative": ("fasgd", {"relative": 0.01, "lr": 0.0005}),
    "fedbuff": ("fedbuff", {"local_steps": 3, "inner_lr": 0.05}),
    "hardsync-reject": ("hardsync", {"admission": "reject"}),
    "hardsync-trim": ("hardsync", {"trim": 0.3}),
    "softsync-trim": ("softsync", {"n": 1, "trim": 0.2, "optimizer": "momentum", "lr": 0.02}),
    "fedbuff-trim": ("fedbuff", {"local_steps": 3, "inner_lr": 0.05, "trim": 0.25}),
    "hardsync-adam": ("hardsync", {"optimizer": "adam", "lr": 0.02}),
    "no-delay-1": ("no-delay", {"tau_max": 1}),
    "no-delay-cycles": ("no-delay", {"variant": 2, "tau_max": 4}),
    "ringmaster-2": ("ringmaster", {"r": 2}),
    "softsync-2": ("softsync", {"n": 2}),
    "softsync-4": ("softsync", {"n": 4}),
    "softsync-adam": ("softsync", {"optimizer": "adam", "lr": 0.02}),
    "schedule-free": ("schedule-free", {"lr": 0.02, "schedule": "warmup:10"}),
    "schedule-free-collect": (
        "schedule-free",
        {"lr": 0.05, "schedule": "warmup:10", "collect": 2},
    ),
    "schedule-free-plain": (
        "schedule-free",
        {"orthogonal": False, "lr": 0.02, "schedule": "warmup:10"},
    ),
    "ssp-0": ("ssp", {"s": 0}),
    "ssp-local": ("ssp", {"s": 2, "get_model_frequency": 3}),
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
    **others(os.environ.get("AIOPS_CONTRACT", "")),
    "diloco-directions": ("diloco", {"local_steps": 4, "inner_lr": 0.02, "inner_orthogonal": 0.7}),
}
BACKENDS = ("numpy", "numba")
PLACES = (*BACKENDS, *DEVICES)
WORKERS = 4


def at_its_rate(case: tuple[str, dict[str, Any]]) -> tuple[str, dict[str, Any]]:
    """Return a case whose rate does not rise by itself: it rises by what all tensors do."""
    name, settings = case
    return name, {**settings, "rise": 1} if name == "schedule-free" else settings
