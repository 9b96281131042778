"""The cases of the simulator's contract: every policy, bare, behind a gate, and with codecs."""

from __future__ import annotations

from typing import Any

import numpy as np

from aiops.errors import ConflictError
from aiops.lab.workloads import PerceptronTask
from aiops.sim.turns.simulation import Simulation
from tests.contract.cases import CASES as ALL

POLICIES = {name: case for name, case in ALL.items() if "seconds" not in case[1].values()}
"""The cases of the algorithms' contract that need no time: a simulation in turns has none."""

TASK = PerceptronTask("digits", hidden=8)

WAYS: dict[str, dict[str, Any]] = {
    "bare": {},
    "gate": {"gate": "bfasgd:c_push=0.05,c_fetch=0.1"},
    "relative": {"gate": "bfasgd:c_push=4,c_fetch=2,relative=true,by=tensor,share=0.3"},
    "codecs": {"push_codec": ("topk:0.2",), "fetch_codec": ("int8",)},
    "both": {
        "gate": "constant:p_push=0.5,p_fetch=0.5,by=tensor",
        "push_codec": ("int8",),
        "fetch_codec": ("onebit",),
    },
    "reapply": {"gate": "periodic:k_push=2,k_fetch=2,skipped=reapply"},
}


def simulation(policy: str = "fasgd", /, **settings: Any) -> Simulation:
    """Return a small simulation on digits."""
    small = {"clients": 4, "batch_size": 8, "iterations": 60, "samples": 2}
    small |= {"dataset": "digits", "hidden": 8, "kernels": "numpy"}
    return Simulation(policy=policy, **{**small, **settings})


def of_case(name: str, way: str, **settings: Any) -> Simulation:
    """Return the small simulation of a case of the algorithms' contract."""
    policy, chosen = POLICIES[name]
    texts = tuple(f"{key}={value}" for key, value in chosen.items())
    return simulation(policy, set=texts, **WAYS[way], **settings)


def _possible() -> list[tuple[str, str]]:
    """Return the cases, without those that an engine refuses: not every policy can be gated."""
    found = []
    for name in POLICIES:
        for way in WAYS:
            try:
                of_case(name, way).engine()
            except ConflictError:
                continue
            found.append((name, way))
    return found


CASES = _possible()


def _each_once(first: int) -> list[tuple[str, str]]:
    """Return a case of every policy, in ways by turns, and all cases of three policies."""
    ways: dict[str, list[str]] = {}
    for name, way in CASES:
        ways.setdefault(name, []).append(way)
    found = {(name, of[(i + first) % len(of)]) for i, (name, of) in enumerate(ways.items())}
    found |= {case for case in CASES if case[0] in ("fasgd", "hardsync", "easgd")}
    return [case for case in CASES if case in found]


FEWER, OTHERS = _each_once(0), _each_once(1)
"""Two selections of the cases: a way of messages is the same code for every policy."""


def random_pieces(seed: int, most: int = 700) -> Any:
    """Return what says how many bytes arrive at a time."""
    random = np.random.default_rng(seed)
    return lambda: int(random.integers(1, most))


class Counting:
    """A change of a priority that depends on earlier ones."""

    def __init__(self) -> None:
        self.count = 0

    def __call__(self, priority: float) -> float:
        """Return a lower one each time."""
        self.count += 1
        return priority - self.count % 7


counting = Counting()
