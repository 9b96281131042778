"""One planned run of an experiment, as a value: its name, its work, and its key.

The work is a `Simulation`, or any other frozen dataclass that can be pickled and called:
``work(on_progress)`` does it and returns plain values (`aiops.lab.experiments.execution`). Its
fields are the settings by which a finished run is found again.
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

OnProgress: TypeAlias = Callable[[int], None]
"""A callback that takes the iterations done so far; called from time to time."""

Result: TypeAlias = Mapping[str, Any]
"""The result of a run, as JSON has it."""


class Measurement(Protocol):
    """Work that measures something of its own: a frozen dataclass that is called.

    Its time is estimated by its field ``simulation``.
    """

    @property
    def simulation(self) -> Simulation:
        """The simulation that it trains."""

    def __call__(self, on_progress: OnProgress) -> Result:
        """Do the work, and return the result.

        It has a ``digest``; ``curve``, a list of samples with an ``iteration`` each; and
        ``diverged``, None or a sentence.
        """


RunWork: TypeAlias = Simulation | Measurement


@dataclass(frozen=True)
class PlannedRun:
    """A run: one seed of one curve of one panel.

    Attributes
    ----------
    panel, curve
        The panel and the curve of the figure that it belongs to.
    seed
        The seed: runs of one curve differ in nothing else.
    work
        The simulation to run, or the measurement to call.
    role
        ``reported``, or ``pool``: it serves to choose a setting, and is not shown.
    """

    panel: str
    curve: str
    seed: int
    work: RunWork
    role: str = "reported"

    @cached_property
    def settings(self) -> dict[str, Any]:
        """The settings of the work, as plain values."""
        found: dict[str, Any] = plain(self.work)
        return found

    @cached_property
    def key(self) -> str:
        """The key of the work: equal work has the same key, whatever its panel and curve.

        Another version of aiops may come to other results, so its runs have other keys.
        """
        named = {"aiops": aiops.__version__, "work": self.settings}
        text = json.dumps(named, sort_keys=True, allow_nan=False)
        return hashlib.sha256(text.encode()).hexdigest()[:24]

    @property
    def name(self) -> str:
        """Its name in one line: panel, curve and seed."""
        return f"{self.panel}, {self.curve}, seed {self.seed}"

    @property
    def simulation(self) -> Simulation:
        """The simulation that it trains."""
        return self.work if isinstance(self.work, Simulation) else self.work.simulation
