"""Which policies are measured, which variants of them, and between which settings we chose."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from aiops.algorithms import BUILT_IN, find
from aiops.errors import UsageError, nearest
from aiops.serving.config import Config


@dataclass(frozen=True)
class Case:
    """A policy with settings other than its defaults; ``variant`` names them."""

    policy: str
    variant: str = ""
    settings: Mapping[str, Any] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """What tables call it."""
        return f"{self.policy} {self.variant}".rstrip()

    @property
    def averaging(self) -> bool:
        """Whether its workers have models of their own, which they average."""
        return self.policy == "average"

    def check(self, workers: int) -> None:
        """Fail with an AiopsError where the server would, before anything is started."""
        find(self.policy).make(self.settings).check(workers)


VARIANTS: Sequence[Case] = (
    *(
        Case("sasgd", modulation, {"modulate": modulation})
        for modulation in ("inverse-plus-one", "polynomial", "hinge", "delay-adaptive")
    ),
    Case("asgd", "momentum", {"optimizer": "momentum", "lr": 0.005}),
    Case("asgd", "nesterov", {"optimizer": "nesterov", "lr": 0.005}),
    Case("asgd", "adagrad", {"optimizer": "adagrad", "lr": 0.01}),
    Case("asgd", "rmsprop", {"optimizer": "rmsprop", "lr": 0.0005}),
    Case("asgd", "adam", {"optimizer": "adam", "lr": 0.0005}),
    Case("asgd", "adamw", {"optimizer": "adamw", "lr": 0.0005, "weight_decay": 0.01}),
    Case("diloco", "async", {"mode": "async"}),
    Case("diloco", "streaming", {"fragments": 2, "overlap": True, "mix": 0.5}),
    Case("no-delay", "cycles", {"variant": 2}),
    Case("ssp", "local steps", {"get_model_frequency": 5}),
    Case("hardsync", "reject", {"admission": "reject"}),
    Case("dcasgd", "constant", {"adaptive": False}),
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


def chosen(only: Sequence[str], settings: Sequence[str]) -> tuple[list[Case], list[Case]]:
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
    known = [case.name for case in (*map(Case, policies()), *VARIANTS)]
    for name in only:
        if name not in known:
            raise UsageError(f"nothing here is called {name!r}; {nearest(name, known)}")
    if settings:
        given = Config(set=list(settings)).settings()
        names = only or policies()
        return [], [Case(name, " ".join(settings), given) for name in names if name in BUILT_IN]
    plain = [Case(name) for name in policies() if not only or name in only]
    variants = [case for case in VARIANTS if not only or case.policy in only or case.name in only]
    return plain, variants


def grid(only: Sequence[str]) -> Iterator[Case]:
    """Yield the cases of a search: one setting of a policy given at a time."""
    for policy in only or sorted(GRID):
        for name, values in GRID.get(policy, {}).items():
            for value in values:
                yield Case(policy, f"{name}={value}", {name: value})
