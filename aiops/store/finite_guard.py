"""Prove that updates cannot overflow, for many updates at a time, and say when that is not proven.

An update in place overwrites what it was made of, so one whose result is not finite has to be found
before it is made. `FiniteGuard` reads the magnitudes of parameters and state once, and has
`aiops.kernels.ranges` prove that none of the next (say, 65,536) updates can overflow, as long as
gradients, learning rates and scalars stay within limits. Those updates cost a comparison. One that
is not covered leads to a new proof, and if there is none, to a rehearsal: the update is computed
block by block into a scratch buffer, and made only if all of that is finite
(`aiops.store.updater.Updater.rehearse`).

So whether an update is refused depends on its result alone, and not on the proofs: a server that
was restarted, a standby and a replay refuse the same updates.

On a model over several servers each has a guard of its part. The lead keeps what each has proven
(`Proof`), and asks those for a rehearsal whose proof does not cover an update
(`aiops.shards.updating`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product

import numpy as np

from aiops.kernels.interface import STATISTIC_CAP
from aiops.kernels.ranges import Interval, bounded_for
from aiops.kernels.rule import Rule
from aiops.model.layout import Array, Ints

LIMIT = 1e18
"""Gradients are below this in magnitude (`aiops.kernels.scan.survey`)."""

_UPDATES = (65_536, 4_096, 256, 16)
_SPARE = (1024.0, 4.0, 1.0)
"""A proof holds for learning rates and scalars this many times as large as those now, if it can."""

_LARGER = 4.0
"""And for gradients this many times as large, if it does not hold for all."""

_REST = 256

_AT_ONCE = 4
"""Updates within which numbers that leave a proof are taken to change with each update."""

_SEEN = 32
"""Arrays of rates that are known to be within those of a proof."""

_REFUSED = np.iinfo(np.int64).min


def refusal(tensor: int) -> Ints:
    """Return the result of an update that was refused, for its values of this tensor.

    It stands for the sums of a statistic, and none of those is as small.
    """
    return np.array([_REFUSED, tensor], np.int64)


def largest_sums(sizes: Ints) -> Ints:
    """Return the largest magnitudes of the statistic's sums over tensors of these sizes.

    They fit int64 (`aiops.algorithms.model_support`), also of all tensors together.
    """
    return sizes * int(STATISTIC_CAP)


def refused_tensor(sums: Ints) -> int | None:
    """Return the tensor for which an update was refused, or None if it was made."""
    return int(sums[1]) if len(sums) == 2 and sums[0] == _REFUSED else None


@dataclass(slots=True)
class Proof:
    """The updates that one server has proven to be finite, as another server counts them.

    Attributes
    ----------
    left
        Their number.
    magnitude, step
        The largest magnitude of their gradients, times the factor, and their largest learning rate.
    scalars
        The interval of each of the rule's scalars.
    """

    left: int = 0
    magnitude: float = 0.0
    step: float = 0.0
    scalars: Sequence[Interval] = ()

    def covers(self, steps: Array, scalars: Array | None, magnitude: float) -> bool:
        """Return whether an update is proven to be finite, and count it; as of `FiniteGuard`."""
        if not self.left or not magnitude <= self.magnitude:
            return False
        if steps.max(initial=0.0) > self.step or steps.min(initial=0.0) < 0:
            return False
        if not _are_within(scalars, self.scalars):
            return False
        self.left -= 1
        return True

    def packed(self) -> bytes:
        """Return it as float64, little endian."""
        numbers = [
            self.left,
            self.magnitude,
            self.step,
            *(end for each in self.scalars for end in each),
        ]
        return np.array(numbers, "<f8").tobytes()

    @classmethod
    def unpacked(cls, data: bytes, scalars: int) -> Proof:
        """Return the proof that `packed` returned; nothing is proven by no bytes.

        ``scalars``: the number of the rule's scalars.

        Raises
        ------
        ValueError
            When it is none.
        """
        if not data:
            return cls()
        left, magnitude, step, *ends = np.frombuffer(data, "<f8").tolist()
        if len(ends) != 2 * scalars or not 0 <= left <= _UPDATES[0]:
            raise ValueError("it is no proof of this rule")
        return cls(int(left), magnitude, step, list(zip(ends[::2], ends[1::2], strict=True)))


class FiniteGuard:
    """The proof for the updates of one store.

    Parameters
    ----------
    rule
        The mathematics of an update.
    largest
        Of each section, the largest magnitude of its parameters and of its state.

    Attributes
    ----------
    magnitude
        The largest magnitude of gradients that the proof is for.
    narrow
        True if larger ones may be received.
    """

    # Those that compiled code reads: `aiops.compiled`.
    __slots__ = (
        *("__dict__", "__weakref__", "_left", "_scalars", "_seen", "_seen_scalars", "_step"),
        *("magnitude", "narrow"),
    )

    def __init__(self, rule: Rule, largest: Sequence[tuple[float, float]]) -> None:
        self._rule, self._largest = rule, largest
        # The narrowest numbers first: if there is no proof, it is for these that there is none.
        self._order = sorted(range(len(largest)), key=largest.__getitem__)
        self._left = 0  # updates that the proof is for
        self._updates, self._spare = 0, 1.0  # those at first, and as of `_SPARE`
        self._resting = 0  # updates for which none is sought
        self.magnitude, self.narrow = LIMIT, False
        self._step = 0.0  # the largest learning rate of the proof
        self._scalars: list[Interval] = []
        self._seen: dict[int, Array] = {}  # rates within that of the proof, by `id`
        self._seen_scalars: Array | None = None  # within those of the proof

    def covers(self, steps: Array, scalars: Array | None, magnitude: float) -> bool:
        """Return whether an update is proven to be finite, and count it.

        ``magnitude``: the largest of its gradient, times its factor. ``steps`` and ``scalars`` are
        as of `aiops.store.updater.Update`, and are not written to afterwards.
        """
        if not self._left or magnitude > self.magnitude:
            return False
        # Rates are arrays that come again, one for each staleness.
        if self._seen.get(id(steps)) is not steps and not self._has_rates(steps):
            return False
        if scalars is not self._seen_scalars and not self._has_scalars(scalars):
            return False
        self._left -= 1
        return True

    def _has_rates(self, steps: Array) -> bool:
        if steps.max(initial=0.0) > self._step or steps.min(initial=0.0) < 0:
            return False
        if len(self._seen) >= _SEEN:
            self._seen.clear()
        self._seen[id(steps)] = steps
        return True

    def _has_scalars(self, scalars: Array | None) -> bool:
        if not _are_within(scalars, self._scalars):
            return False
        self._seen_scalars = scalars
        return True

    @property
    def proof(self) -> Proof:
        """The proof that is left, for another server to count by."""
        return Proof(self._left, self.magnitude, self._step, tuple(self._scalars))

    def forget(self) -> None:
        """Have no proof: another server has counted by the last one, and it does not suffice."""
        self._left = 0

    def renew(
        self,
        measured: Callable[[], Sequence[Mapping[str, Interval]]],
        steps: Array,
        scalars: Array | None,
        magnitude: Callable[[], float],
    ) -> None:
        """Find a proof for updates like this one; without one none is covered.

        If none is found, none is sought for the next 256 updates: all are rehearsed.

        Parameters
        ----------
        measured
            Returns, for each section, the intervals of ``w`` and each state.
        steps, scalars
            As of `covers`.
        magnitude
            Returns the largest of this update's gradient, times its factor.
        """
        # If numbers left a proof that had nothing to spare at once, they would leave another, too.
        moved = self._spare == 1 and 0 < self._updates - self._left <= _AT_ONCE and self._left > 0
        self._left, self._seen_scalars = 0, None
        self._seen.clear()
        if self._resting:
            self._resting -= 1
            return
        self._resting = _REST
        if steps.min(initial=0.0) < 0:
            return
        step = float(steps.max(initial=0.0))
        columns = () if scalars is None else scalars.T
        ends = [(float(each.min()), float(each.max())) for each in columns if each.size]
        boxes = measured()
        spares = _SPARE[:-1] if moved else _SPARE
        most, *others, least = product(_UPDATES, spares)
        for self.narrow in (False, True):
            self.magnitude = min(_LARGER * magnitude(), LIMIT) if self.narrow else LIMIT
            tried = partial(self._try, boxes, step, ends)
            # Where the least cannot be proven, no more can.
            if tried(most) or (tried(least) and (any(map(tried, others)) or tried(least))):
                self._resting = 0
                return

    def _try(
        self,
        boxes: Sequence[Mapping[str, Interval]],
        step: float,
        scalars: Sequence[Interval],
        goal: tuple[int, float],
    ) -> bool:
        """Use a proof, if it holds; ``goal``: the number of updates, and how much is to spare."""
        updates, spare = goal
        self._step = spare * step
        self._scalars = [_around(low, high, spare) for low, high in scalars]
        if not all(self._proven(index, boxes[index], updates) for index in self._order):
            return False
        self._left, self._updates, self._spare = updates, updates, spare
        return True

    def _proven(self, index: int, box: Mapping[str, Interval], updates: int) -> bool:
        if not np.isfinite(list(box.values())).all():
            return False
        rule, (largest, largest_state) = self._rule, self._largest[index]
        limits = dict.fromkeys(rule.state, largest_state) | {"w": largest}
        numbers = {"g": (-self.magnitude, self.magnitude), "step": (0.0, self._step)}
        numbers |= dict(zip(rule.scalars, self._scalars, strict=True))
        return bounded_for(rule, box, numbers, limits, largest_state, updates=updates)


def magnitude(arrays: Iterable[Array]) -> float:
    """Return the largest magnitude in some arrays."""
    ends = [interval(array) for array in arrays]
    return max((max(-low, high) for low, high in ends), default=0.0)


def interval(array: Array) -> Interval:
    """Return the least and the largest value of an array; NaN if any is."""
    if not array.size:
        return 0.0, 0.0
    if array.dtype.itemsize < 4:
        array = array.astype(np.float32)
    return float(array.min()), float(array.max())


def _are_within(scalars: Array | None, bounds: Sequence[Interval]) -> bool:
    """Return whether each of a rule's scalars, float64[tensors, scalars], is in its interval."""
    if scalars is None or not scalars.size:
        return True
    low, high = np.array(bounds).T
    assert scalars.shape[1:] == low.shape
    return bool(((low <= scalars) & (scalars <= high)).all())


def _around(low: float, high: float, spare: float) -> Interval:
    """Return an interval of a scalar in the updates to come.

    A share stays one: if 1 − c, which is near to 1, could be 4, states would be multiplied by it in
    each update, and a proof would hold for the very c of now.
    """
    below, above = _below(low, spare), -_below(-high, spare)
    return (below, min(above, 1.0)) if low >= 0 and high <= 1 else (below, above)


def _below(low: float, spare: float) -> float:
    """Return a bound below a scalar for the updates to come."""
    return low / spare if low > 0 else low * spare
