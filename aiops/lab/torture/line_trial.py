"""Hostile partners of simulated servers: a follower at its lead, a primary at its standby.

In some rounds the partner's answers are changed, doubled, late, left out or invented, while others
work honestly. What that ends may be ended, with a documented error and no exception in the log: the
partner's connection, requests that need it, and without a state the model. Then the partner is
honest again, and all has to go on.
"""

from __future__ import annotations

from dataclasses import replace
from random import Random
from typing import cast

from aiops.lab.torture.attack_trial import AttackTrial
from aiops.lab.torture.attacked import Attacked, AttackPlan, draw_attack
from aiops.lab.torture.attacked_lines import PARTNERS, AttackedByPartner

_RATES = (0.03, 0.1, 0.1, 0.3, 0.8)
_CUTS = 0.5  # of rounds that begin with another connection, and so with the state of the partner


def draw_lines(seed: int, names: tuple[str, ...] = tuple(PARTNERS)) -> AttackPlan:
    """Return the plan of a seed."""
    rng = Random(f"lines {seed}")
    plan = draw_attack(rng, seed, names)
    return replace(plan, peers=rng.choice((1, 2, 4)), state=rng.random() < 0.7)


class LineTrial(AttackTrial):
    """A plan that is carried out; its ``peers`` are the rounds.

    Parameters
    ----------
    plan
        What to do.
    """

    exceptions_alone = True

    def make(self) -> Attacked:
        """Return what the plan attacks."""
        return PARTNERS[self.plan.variant](self.plan)

    async def attack(self, attacked: Attacked) -> None:
        """Have the partner be hostile for some rounds."""
        result, attacked = self.result, cast(AttackedByPartner, attacked)
        line = attacked.line
        for _ in range(self.plan.peers):
            line.rate = self._rng.choice(_RATES)
            if self.plan.state and self._rng.random() < _CUTS:
                line.cut()
            result.wrong += await attacked.trouble()
            result.wrong += await attacked.recover()
            result.sessions += 1
            if attacked.over or result.wrong:
                break
        counts = line.counts
        result.frames, result.refused, result.sent = counts.frames, counts.refused, counts.sent
