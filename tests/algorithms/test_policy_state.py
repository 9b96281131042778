"""A policy's state: kept and restored, it decides as if nothing had happened."""

from __future__ import annotations

import random
from typing import Any

import pytest

from aiops.algorithms import find
from aiops.algorithms.base import APPLY, Decision, Policy
from aiops.engine.capture import policy_state
from aiops.errors import UsageError
from tests.contract.cases import CASES
from tests.rows import each_row

WORKERS = 4


def policy(case: str) -> Policy:
    name, settings = CASES[case]
    return find(name).make(settings).policy(WORKERS)


def ask(policy: Policy, rng: random.Random) -> Any:
    """One call, as an engine makes it."""
    match rng.randrange(4):
        case 0:
            members = rng.sample(range(1, WORKERS + 1), rng.randrange(1, WORKERS + 1))
            return policy.workers_changed(frozenset(members))
        case 1:
            return policy.may_go(rng.randrange(1, WORKERS + 1), rng.random() < 0.5)
        case _:
            return policy.push(rng.randrange(1, WORKERS + 1), rng.choice((0, 0, 0, 1, 20)))


@each_row("case", CASES)
def test_a_restored_policy_decides_alike(case: str) -> None:
    rng, live = random.Random(case), policy(case)
    live.workers_changed(frozenset(range(1, WORKERS + 1)))
    for _ in range(40):
        restored = policy(case)
        restored.restore(policy_state(live))
        for _ in range(10):
            seed = rng.getrandbits(32)
            assert ask(restored, random.Random(seed)) == ask(live, random.Random(seed))
        assert policy_state(restored) == policy_state(live)


class Sampler(Policy):
    """Keeps an object."""

    def __init__(self) -> None:
        self.rng = random.Random(1)

    def push(self, worker: int, staleness: int) -> Decision:
        return APPLY


class Slotted(Policy):
    """Keeps a number where `vars` does not see it."""

    __slots__ = ("count",)


class Careful(Sampler):
    """Writes its object as plain values."""

    def state(self) -> dict[str, Any]:
        return {"rng": self.rng.getstate()}

    def restore(self, state: Any) -> None:
        self.rng.setstate(state["rng"])


def test_a_policy_that_keeps_an_object_is_refused_with_its_attribute() -> None:
    with pytest.raises(UsageError, match=r"Sampler keeps a Random in \.rng.*state\(\) and restor"):
        policy_state(Sampler())
    with pytest.raises(UsageError, match=r"Slotted keeps \.count in a slot"):
        policy_state(Slotted())


def test_a_policy_may_write_its_own_state() -> None:
    live, restored = Careful(), Careful()
    live.rng.random()
    kept = policy_state(live)
    expected = live.rng.random()
    restored.restore(kept)
    assert restored.rng.random() == expected
