"""A trial of hostile peers: a server is attacked, and has to serve on as if they had never been."""

from __future__ import annotations

import asyncio
import time
import traceback
from abc import ABC, abstractmethod
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from random import Random

from aiops.errors import AiopsError
from aiops.lab.torture.attack_variants import attacked
from aiops.lab.torture.attacked import Attacked, AttackPlan
from aiops.lab.torture.said import errors_noted
from aiops.sim.virtual.world import World

_HONEST = 5  # steps at the end
_LIMIT = 20_000.0  # virtual seconds
_ROOT = Path(__file__).parents[3]  # of the package: reports are read on other machines


@dataclass(slots=True)
class AttackResult:
    """The findings of a trial.

    Attributes
    ----------
    plan
        The trial's.
    sessions
        Hostile connections.
    frames
        Hostile frames.
    refused
        Those of them that were refused by the decoder alone, if these are counted.
    sent
        The bytes that were sent to a server that had not closed the connection.
    compiled
        Steady exchanges that compiled code answered.
    answers
        By kind, and for errors by code: what the server said.
    acts
        By kind: what was done, of a `MailboxTrial`.
    wrong
        What contradicts the promise, one sentence each.
    seconds
        The time that it took.
    """

    plan: AttackPlan
    sessions: int = 0
    frames: int = 0
    refused: int = 0
    sent: int = 0
    compiled: int = 0
    answers: Counter[str] = field(default_factory=Counter)
    acts: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)
    seconds: float = 0.0


class AttackTrial(ABC):
    """A plan that is carried out.

    Parameters
    ----------
    plan
        What to do.
    """

    exceptions_alone = False
    """True if of errors that are logged only exceptions are wrong."""

    def __init__(self, plan: AttackPlan) -> None:
        self.plan, self.result = plan, AttackResult(plan)
        self._rng = Random(f"peers {plan.seed}")

    def run(self) -> AttackResult:
        """Carry it out."""
        began = time.monotonic()
        with errors_noted(self.result.wrong, exceptions_alone=self.exceptions_alone):
            try:
                made, pieces = self.make(), self._rng.choice((None, 7, 100))
                World(seed=self.plan.seed, limit=_LIMIT, pieces=pieces).run(self._all(made))
            except AiopsError as error:
                self.result.wrong.append(f"{type(error).__name__}: {error}")
            except Exception as error:
                self.result.wrong.append(f"the simulation ended: {told(error)}")
        self.result.seconds = time.monotonic() - began
        return self.result

    def make(self) -> Attacked:
        """Return what the plan attacks."""
        return attacked(self.plan)

    async def _all(self, made: Attacked) -> None:
        async with made as attacked:
            await self.attack(attacked)
            await asyncio.sleep(1.0)
            for _ in range(_HONEST):
                await self.step(attacked)
            self.result.wrong += await attacked.check()

    @abstractmethod
    async def attack(self, attacked: Attacked) -> None:
        """Have hostile peers come and go."""

    async def step(self, attacked: Attacked) -> None:
        """Have the honest worker make a step."""
        wrong = await attacked.step()
        if wrong:
            self.result.wrong.append(wrong)


def told(error: BaseException) -> str:
    """Return an exception, the first of a group, and the line that raised it."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    place = traceback.extract_tb(error.__traceback__)[-1]
    path = Path(place.filename)
    file = path.relative_to(_ROOT) if path.is_relative_to(_ROOT) else path.name
    return f"{type(error).__name__}: {error} ({file}:{place.lineno})"
