"""One run of an experiment: what it is called, and what is to be done, as a value.

What is to be done is a `Simulation`, or any other frozen dataclass that can be pickled and called:
``work(tell)`` does it and returns plain values (`aiops.lab.experiments.works`). Its fields are the
settings by which a finished run is found again.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol, TypeAlias

import aiops
from aiops.common.jsonable import plain
from aiops.sim.turns.simulation import Simulation

Tell: TypeAlias = Callable[[int], None]
"""Called now and then with the iterations done so far."""

Result: TypeAlias = Mapping[str, Any]
"""What a run came to, as JSON has it."""


class Measurement(Protocol):
    """A frozen dataclass that does its work when it is called.

    It has a field ``simulation``: what it trains, by which its time is estimated.
    """

    @property
    def simulation(self) -> Simulation:
        """What is trained."""

    def __call__(self, tell: Tell) -> Result:
        """Do it.

        The result has a ``digest``; ``curve``, a list of samples with an ``iteration`` each; and
        ``diverged``, None or a sentence.
        """


Work: TypeAlias = Simulation | Measurement


@dataclass(frozen=True)
class Case:
    """A run: one seed of one curve of one panel.

    Attributes
    ----------
    panel, curve
        Where it belongs, for people.
    seed
        Its number among runs that differ in nothing else.
    work
        What is to be done.
    role
        ``reported``, or ``pool``: it serves to choose a setting, and is not shown.
    """

    panel: str
    curve: str
    seed: int
    work: Work
    role: str = "reported"

    @cached_property
    def settings(self) -> dict[str, Any]:
        """What is done, as plain values."""
        found: dict[str, Any] = plain(self.work)
        return found

    @cached_property
    def key(self) -> str:
        """A name that all runs of the same work share, whatever they are called.

        Another version of aiops may come to other results, so its runs have other keys.
        """
        named = {"aiops": aiops.__version__, "work": self.settings}
        text = json.dumps(named, sort_keys=True, allow_nan=False)
        return hashlib.sha256(text.encode()).hexdigest()[:24]

    @property
    def name(self) -> str:
        """It for people, in a line."""
        return f"{self.panel}, {self.curve}, seed {self.seed}"

    @property
    def simulation(self) -> Simulation:
        """What it trains."""
        return self.work if isinstance(self.work, Simulation) else self.work.simulation
