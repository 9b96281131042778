"""The numbers of the next step: the learning rate of each tensor, and the rule's scalars."""

from __future__ import annotations

import numpy as np

from aiops.algorithms.base import Algorithm
from aiops.algorithms.checks import modulation_at
from aiops.engine.rate_gain import RateGain
from aiops.engine.staleness import RecentStaleness
from aiops.model.layout import Array, Cover, Ints, Layout
from aiops.store.snapshots import Version

_MOST = 1024  # rows of staleness that are kept


class Modulations(dict[int, float]):
    """Modulations by staleness, made when they are asked for.

    Raises
    ------
    UsageError
        When the algorithm has no finite number ≥ 0 for a staleness. The server ends: no update is
        made with it, and no worker is to blame.
    """

    def __init__(self, algorithm: Algorithm) -> None:
        super().__init__()
        self._algorithm = algorithm

    def __missing__(self, staleness: int) -> float:
        if len(self) >= _MOST:
            self.clear()
        algorithm = self._algorithm
        self[staleness] = found = modulation_at(algorithm.name, algorithm.modulation, staleness)
        return found


class EvenSteps(dict[int, tuple[Array, Array]]):
    """Modulations and learning rates of all tensors, by their common staleness.

    They are float64[tensors] each, and made when they are asked for: the usual exchange finds its
    rates without a Python call. ``factors``: those of ``rate``, per tensor; None: they are 1.
    """

    def __init__(
        self, modulations: Modulations, tensors: int, factors: Array | None, rate: float
    ) -> None:
        super().__init__()
        self._modulations, self._tensors, self._factors = modulations, tensors, factors
        self.rate = rate

    def __missing__(self, staleness: int) -> tuple[Array, Array]:
        if len(self) >= _MOST:
            self.clear()
        scales = np.full(self._tensors, self._modulations[staleness])
        steps = scales * self.rate
        if self._factors is not None:
            steps *= self._factors
        found = self[staleness] = scales, steps
        return found


class StepNumbers:
    """The learning rates and scalars of one run.

    Attributes
    ----------
    scheduled
        Whether the learning rate depends on a position: `move_to` comes before each step.
    even
        The numbers of tensors that are all equally stale.
    recent_staleness
        That of the gradients used lately, on which scalars may depend.
    gain
        What the rule's gauge has the rate multiplied by, on which they may depend, too.
    """

    def __init__(self, algorithm: Algorithm, workers: int | None, layout: Layout) -> None:
        self._algorithm, self._layout = algorithm, layout
        self._rates = rates = algorithm.rates(workers)
        self.scheduled = callable(rates)
        self._factors, self._own_scalars = algorithm.numbers_of(layout.tensors)
        rate = 0.0 if callable(rates) else rates
        self._modulations = Modulations(algorithm)
        self.even = EvenSteps(self._modulations, len(layout.tensors), self._factors, rate)
        self.recent_staleness = RecentStaleness()
        self.gain = RateGain(algorithm.most_gain)
        # Of `scalars`: for which level, mean and gain, and what.
        self._level_scalars: tuple[tuple[int, float, float], Array | None] = (-1, 0.0, 1.0), None

    def move_to(self, position: float) -> None:
        """Go on with the learning rate of a position in the schedule."""
        rate = self._rates(position) if callable(self._rates) else self._rates
        if rate != self.even.rate:
            self.even.rate = rate
            self.even.clear()

    def of(self, cover: Cover, staleness: int, stale: Ints | None) -> tuple[Array, Array]:
        """Return modulation and learning rate of each of the n tensors covered, float64[n].

        ``stale``: int64[n], the staleness of each; None: they all have the gradient's.
        """
        if stale is not None:
            scales = np.array([self._modulations[tau] for tau in stale.tolist()], np.float64)
            steps = scales * self.even.rate
            return scales, steps if self._factors is None else steps * self._factors[cover.tensors]
        scales, steps = self.even[staleness]
        count = len(cover.tensors)  # modulations are all the same, and so are rates as a rule
        return scales[:count], steps[slice(count) if self._factors is None else cover.tensors]

    def collected(self, touched: Ints, modulation: Array | None) -> Array:
        """Return the learning rates of a step with a sum of gradients, float64[touched].

        ``modulation``: float64[touched], their mean modulation; None: they were weighted with it.
        """
        steps = np.full(len(touched), self.even.rate)
        if self._factors is not None:
            steps *= self._factors[touched]
        if modulation is not None:
            steps *= modulation
        return steps

    def offset_left_out(self, current: Version) -> Array:
        """Return 1 − φ (`Algorithm.offset_kept`) of each tensor of a version, float64[tensors]."""
        kept, mean, level = self._algorithm.offset_kept, self.recent_staleness.mean, current.level
        if level is not None:
            return np.full(len(self._layout.tensors), 1 - kept(level, mean))
        return np.array([1 - kept(each, mean) for each in current.tensor_versions.tolist()])

    def scalars(self, current: Version, touched: Ints) -> Array:
        """Return the rule's scalars of the next update, float64[touched tensors, scalars]."""
        level, mean, gain = current.level, self.recent_staleness.mean, self.gain.factor
        if level is None:
            versions = current.tensor_versions[touched].tolist()
            scalars = self._algorithm.scalars
            rows = {each: scalars(each + 1, mean, gain) for each in set(versions)}
            mine = np.array([rows[version] for version in versions], np.float64)
            return np.hstack([mine.reshape(len(versions), -1), self._own_scalars[touched]])
        known, found = self._level_scalars
        if found is None or known != (level, mean, gain):
            row, own = self._algorithm.scalars(level + 1, mean, gain), self._own_scalars
            width = len(row)
            found = np.empty((len(self._layout.tensors), width + (own.size and own.shape[1])))
            found[:, :width] = row
            if own.size:
                found[:, width:] = own
            self._level_scalars = (level, mean, gain), found
        return found if touched is self._layout.all else found[touched]
