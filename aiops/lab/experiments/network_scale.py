"""The scale of experiments that train the papers' perceptron, or a transformer in its place.

``--with network=transformer``: the small transformer of `one_rule`
(`aiops.lab.experiments.gpt`), whose data set and size are its own. Its results are told in nats,
since which byte is likeliest says less than how likely it is.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Self

from aiops.lab.experiments.execution import PERCEPTRON, TRANSFORMER
from aiops.lab.experiments.experiment import Scale
from aiops.lab.experiments.runs import FinishedRun
from aiops.lab.experiments.seed_statistics import spread, tails

NETWORK = {"network": (PERCEPTRON, TRANSFORMER)}
"""The knob of these experiments."""

ADAMW = ("optimizer=adamw", "beta2=0.95", "clip=1")
"""A server's settings to train a transformer, where its policy admits them."""


@dataclass(frozen=True)
class ComparedFigure:
    """The figure by which runs are compared when they have ended.

    Attributes
    ----------
    series
        Its name in a run's samples.
    times
        A factor of what is shown.
    unit, apart
        Of what is shown, and of a difference.
    title
        Of what is shown, on an axis.
    digits
        After the point.
    """

    series: str
    times: float
    unit: str
    apart: str
    title: str
    digits: int

    def ends(self, runs: Sequence[FinishedRun]) -> list[float]:
        """Return each run's mean over its last tenth, as shown."""
        return [self.times * value for value in tails(runs, self.series)]

    def text(self, values: Sequence[float]) -> str:
        """Return the mean of what is shown, and from the least to the most."""
        return spread(values, self.digits)


ERROR = ComparedFigure("error", 100.0, "%", "points", "error on held-out data (%)", 1)
NATS = ComparedFigure("cost", 1.0, "nats", "nats", "cost on held-out text (nats per byte)", 2)


@dataclass(frozen=True, kw_only=True)
class NetworkScale(Scale):
    """A scale at which the perceptron is trained, or the transformer."""

    @property
    def network(self) -> str:
        """The network that is trained."""
        return self.knobs.get("network", PERCEPTRON)

    @property
    def transformer(self) -> bool:
        """True if the small transformer is trained."""
        return self.network == TRANSFORMER

    @property
    def measure(self) -> ComparedFigure:
        """The figure by which its runs are compared."""
        return NATS if self.transformer else ERROR

    def chosen(self, knobs: Mapping[str, str]) -> Self:
        """Return the scale with these settings, the transformer's where they say so."""
        found = super().chosen(knobs)
        return found.of_transformer() if found.transformer else found

    def of_transformer(self) -> Self:
        """Return the scale at which the transformer is trained, whatever the perceptron's is."""
        raise NotImplementedError
