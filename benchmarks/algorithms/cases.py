"""The policies that are measured, their variants, and the settings that were searched."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from aiops.algorithms import BUILT_IN, find
from aiops.errors import UsageError, nearest
from aiops.serving.config import Config


@dataclass(frozen=True)
class AlgorithmCase:
    """A policy with settings other than its defaults; ``variant`` names them."""

    policy: str
    variant: str = ""
    settings: Mapping[str, Any] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """Its name in tables."""
        return f"{self.policy} {self.variant}".rstrip()

    @property
    def averaging(self) -> bool:
        """True if its workers have models of their own, which they average."""
        return self.policy == "average"

    def check(self, workers: int) -> None:
        """Fail with an AiopsError where the server would, before anything is started."""
        find(self.policy).make(self.settings).check(workers)


VARIANTS: Sequence[AlgorithmCase] = (
    *(
        AlgorithmCase("sasgd", modulation, {"modulate": modulation})
        for modulation in ("inverse-plus-one", "polynomial", "hinge", "delay-adaptive")
    ),
    AlgorithmCase("asgd", "momentum", {"optimizer": "momentum", "lr": 0.005}),
    AlgorithmCase("asgd", "nesterov", {"optimizer": "nesterov", "lr": 0.005}),
    AlgorithmCase("asgd", "adagrad", {"optimizer": "adagrad", "lr": 0.01}),
    AlgorithmCase("asgd", "rmsprop", {"optimizer": "rmsprop", "lr": 0.0005}),
    AlgorithmCase("asgd", "adam", {"optimizer": "adam", "lr": 0.0005}),
    AlgorithmCase("asgd", "adamw", {"optimizer": "adamw", "lr": 0.0005, "weight_decay": 0.01}),
    AlgorithmCase("diloco", "async", {"mode": "async"}),
    AlgorithmCase("diloco", "streaming", {"fragments": 2, "overlap": True, "mix": 0.5}),
    AlgorithmCase("no-delay", "cycles", {"variant": 2}),
    AlgorithmCase("ssp", "local steps", {"get_model_frequency": 5}),
    AlgorithmCase("hardsync", "reject", {"admission": "reject"}),
    AlgorithmCase("dcasgd", "constant", {"adaptive": False}),
)
"""Run with one seed, after the policies."""

GRID: Mapping[str, Mapping[str, Sequence[Any]]] = {
    "diloco": {"inner_lr": (0.0005, 0.001, 0.002)},
    "downpour": {"lr": (0.02, 0.04, 0.08)},
    "eamsgd": {"lr": (0.01, 0.02, 0.04)},
    "easgd": {"lr": (0.04, 0.1, 0.2, 0.4)},
    "fedbuff": {"inner_lr": (0.1, 0.2, 0.4)},
    "gap-aware": {"lr": (0.005, 0.01, 0.02)},
    "hardsync": {"lr": (0.1, 0.2, 0.4)},
    "no-delay": {"lr": (0.1, 0.2, 0.4)},
    "rennala": {"lr": (0.1, 0.2, 0.4)},
    "softsync": {"lr": (0.04, 0.1, 0.2)},
}
"""What ``--tune`` tries of each policy, on held-out examples: from this, defaults were chosen.

A default that was more than a point below the best gave way to the smallest value that was not half
a point below it (EASGD's and softsync's learning rates did: 0.04 became 0.1). The others keep what
their papers chose, or what goes with it: FASGD 0.005; SASGD 0.04, and with it the rest of
asynchronous SGD.
"""


def policies() -> list[str]:
    """Return the names of all policies of ours."""
    return sorted(BUILT_IN)


def chosen(
    only: Sequence[str], settings: Sequence[str]
) -> tuple[list[AlgorithmCase], list[AlgorithmCase]]:
    """Return what to run: (policies with their defaults, variants).

    Parameters
    ----------
    only
        Names of policies (with their variants) or of variants, as ``asgd`` or ``asgd adam``; none:
        everything.
    settings
        ``key=value`` for all of them: then they are all variants, of that name.

    Raises
    ------
    UsageError
        When there is no such policy or variant.
    """
    known = [case.name for case in (*map(AlgorithmCase, policies()), *VARIANTS)]
    for name in only:
        if name not in known:
            raise UsageError(f"nothing here is called {name!r}; {nearest(name, known)}")
    if settings:
        given = Config(set=list(settings)).settings()
        names = only or policies()
        return [], [
            AlgorithmCase(name, " ".join(settings), given) for name in names if name in BUILT_IN
        ]
    plain = [AlgorithmCase(name) for name in policies() if not only or name in only]
    variants = [case for case in VARIANTS if not only or case.policy in only or case.name in only]
    return plain, variants


def grid(only: Sequence[str]) -> Iterator[AlgorithmCase]:
    """Yield the cases of a search: one setting of a policy given at a time."""
    for policy in only or sorted(GRID):
        for name, values in GRID.get(policy, {}).items():
            for value in values:
                yield AlgorithmCase(policy, f"{name}={value}", {name: value})
