"""Followers that do not do what they were ordered: how long a lead waits for them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from aiops.common.failure_waits import FailureWaits
from aiops.engine.events import Lost
from aiops.store.parameters import UpdateRound
from tests.shards.kept_world import Actor, KeptWorld
from tests.shards.test_orders_of_events import Checker

WAITS = FailureWaits()


class Waiting:
    """A lead that has ordered a round of both of its followers, which have not done it yet."""

    def __init__(self, round: UpdateRound) -> None:
        self.world = KeptWorld(3, 3)
        self.world.actors = [Actor(self.world, f"worker-{n}", Checker(2.0**n, 4)) for n in range(3)]
        self.lead: Any = self.world.lead_brain
        while not self._begun(round):
            self.world.step()
        [self.update] = self.updating._outstanding.values()
        self.began = self.world.now
        nbytes = self.update.job.cost + self.updating._placement.layouts[1].nbytes
        self.limit = self.began + WAITS.work(nbytes)

    @property
    def updating(self) -> Any:
        return self.lead.model.updating

    def _begun(self, round: UpdateRound) -> bool:
        found = self.updating._outstanding.values() if self.lead.model else ()
        return any(each.job.round is round and {1, 2} <= each.missing for each in found)

    def late(self, now: float) -> dict[int, str]:
        found: dict[int, str] = self.lead.late(now, WAITS)
        return found


@pytest.mark.parametrize("round", [UpdateRound.REHEARSE, UpdateRound.STEP])
def test_those_that_have_not_done_it_are_late(round: UpdateRound) -> None:
    waiting = Waiting(round)
    assert waiting.late(waiting.limit - 0.1) == {}
    found = waiting.late(waiting.limit + 0.1)
    assert found.keys() == {1, 2}
    ticket, version = waiting.update.ticket, waiting.lead.engine.version + 1
    assert f"its part of update {ticket}, of version {version}, in 60 s" in found[2]
    waiting.update.missing.discard(2)  # it has done it
    assert waiting.late(waiting.limit + 0.1).keys() == {1}


def test_one_that_is_lost_is_late_only_after_it_is_back() -> None:
    waiting = Waiting(UpdateRound.STEP)
    state = list[Any](waiting.world.hosts)[1].coordinator.state()
    later = waiting.limit + 0.1
    waiting.lead.handle(Lost(later, 1, "it was late"))
    assert waiting.late(later).keys() == {2}
    waiting.update.since[1] = waiting.began  # a round that began while it was away
    assert waiting.late(later).keys() == {2}
    waiting.lead._on_state(1, state)
    assert waiting.late(later).keys() == {2}
    assert waiting.late(later + waiting.limit - waiting.began + 0.1).keys() == {1, 2}


def test_large_updates_may_take_longer() -> None:
    """And a process may be stopped for as long as it may be silent."""
    assert WAITS.work(0) == WAITS.unanswered
    assert WAITS.work(10 << 30) == pytest.approx(WAITS.unanswered + 320)
    waiting = Waiting(UpdateRound.STEP)
    asked = list[int]()
    waiting.updating.late(np.inf, lambda nbytes: asked.append(nbytes) or np.inf)
    assert min(asked) > waiting.update.job.cost > 0
