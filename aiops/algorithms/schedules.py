"""Schedule the learning rate over a run: a factor, written as one or several phases.

=====================  ========================================================================
phase                  factor at position i, 0 or more
=====================  ========================================================================
``constant``           1
``warmup:N``           (i+1)/N below N, then 1 (Goyal et al. 2017). Where the learning rate is
                       scaled by λ, it rises from the unscaled one instead of from 0.
``linear:N[:F]``       falls linearly from 1 to F (default 0) at N, then F
``cosine:N[:F]``       F + (1−F)·(1 + cos(π·i/N))/2 up to N, then F (Loshchilov & Hutter)
``step:F:N1[:N2...]``  F to the power of how many of N1, N2, ... have passed
``inverse-sqrt:N``     sqrt(N/max(i, N)) (Vaswani et al. 2017, with a ``warmup:N`` before it)
=====================  ========================================================================

Phases joined with commas multiply: ``warmup:100,cosine:5000``. N is a whole number, also written as
``2e9``, in the unit that ``--set schedule_unit=...`` names:

============  ======================================================================================
unit          position i of an update
============  ======================================================================================
``updates``   the server's updates before it, which are the model's version
``examples``  the number, from 0, of the last example that it learns from: ``mini_batch`` for each
              mini-batch of the pushes that were used. A push of local training (``diloco``,
              ``fedbuff``) counts as all steps of its cycle; one that is ignored, refused or
              applied again counts nothing.
``tokens``    the same, with ``mini_batch`` the tokens of a mini-batch
``seconds``   the seconds since the first push, without those in which the server was paused, and
              those from the last push before its end to the next start; virtual ones in ``aiops
              cluster``; ``aiops simulate`` has none
============  ======================================================================================

All of it is part of ``--state``: a server that is started again goes on where the schedule was, and
a replay comes to the same rates. A run that goes on from a model alone (``--init``) begins where
``--set schedule_start=20000`` says. In a worker's local training (``inner_schedule``) positions are
its own steps.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

from aiops.errors import UsageError, nearest

Phase = Callable[[float], float]

UPDATES, SECONDS = "updates", "seconds"
UNITS = (UPDATES, "examples", "tokens", SECONDS)
"""The units of positions in a schedule."""


class Schedule:
    """The factor of the learning rate at each position.

    Parameters
    ----------
    text
        The phases, joined with commas, as in the table of this module.
    scale
        The factor of the rate after the warm-up (λ for linear scaling); the warm-up begins at
        1 / scale of it, or at 0 when scale is 1.

    Raises
    ------
    UsageError
        When a phase is unknown (it names the nearest), or its numbers do not fit it.

    Examples
    --------
    >>> rate = Schedule("warmup:4,linear:10")
    >>> [rate(i) for i in (0, 3, 5, 10)]
    [0.25, 0.7, 0.5, 0.0]
    >>> [Schedule("warmup:3", scale=4)(i) for i in (0, 1, 2, 3)]
    [2.0, 3.0, 4.0, 4.0]
    """

    def __init__(self, text: str = "constant", scale: float = 1.0) -> None:
        self.text, self.scale = text, scale
        self._phases = [self._phase(phase.strip()) for phase in text.split(",")]
        self.constant = all(phase is _one for phase in self._phases)

    def __call__(self, position: float) -> float:
        """Return the factor at a position, 0 or more."""
        factor = self.scale
        for phase in self._phases:
            factor *= phase(position)
        return factor

    def _phase(self, text: str) -> Phase:
        name, *given = text.split(":")
        if name not in _PHASES:
            raise UsageError(f"no schedule has a phase {name!r}; {nearest(name, _PHASES)}")
        make, form = _PHASES[name]
        try:
            return make(self, [float(number) for number in given])
        except (ValueError, IndexError):
            raise UsageError(f"schedule {text!r} must have the form {form}") from None

    def _warmup(self, numbers: Sequence[float]) -> Phase:
        (over,) = _counts(numbers, least=1, most=1)
        begin = 1 / self.scale if self.scale > 1 else 0.0
        return lambda i: 1.0 if i >= over else begin + (1 - begin) * (i + 1) / over


def _one(position: float) -> float:
    return 1.0


def _constant(schedule: Schedule, numbers: Sequence[float]) -> Phase:
    _counts(numbers, least=0, most=0)
    return _one


def _linear(schedule: Schedule, numbers: Sequence[float]) -> Phase:
    over, last = _over(numbers)
    return lambda i: last if i >= over else 1.0 - (1.0 - last) * i / over


def _cosine(schedule: Schedule, numbers: Sequence[float]) -> Phase:
    over, last = _over(numbers)
    return lambda i: (
        last if i >= over else last + (1 - last) * (1 + math.cos(math.pi * i / over)) / 2
    )


def _step(schedule: Schedule, numbers: Sequence[float]) -> Phase:
    factor = _fraction(numbers[0])
    marks = _counts(numbers[1:], least=1, most=1000)
    return lambda i: float(factor ** sum(i >= mark for mark in marks))


def _inverse_sqrt(schedule: Schedule, numbers: Sequence[float]) -> Phase:
    (over,) = _counts(numbers, least=1, most=1)
    return lambda i: math.sqrt(over / max(i, over))


def _over(numbers: Sequence[float]) -> tuple[int, float]:
    (over,) = _counts(numbers[:1], least=1, most=1)
    if len(numbers) > 2:
        raise ValueError
    return over, _fraction(numbers[1]) if len(numbers) == 2 else 0.0


def _fraction(number: float) -> float:
    if not 0 <= number <= 1:
        raise ValueError
    return number


def _counts(numbers: Sequence[float], least: int, most: int) -> list[int]:
    """Return the numbers as positions: integers, each at least 1."""
    good = least <= len(numbers) <= most and all(n >= 1 and n.is_integer() for n in numbers)
    if not good:
        raise ValueError
    return [int(number) for number in numbers]


_PHASES: Mapping[str, tuple[Callable[[Schedule, Sequence[float]], Phase], str]] = {
    "constant": (_constant, "constant"),
    "warmup": (Schedule._warmup, "warmup:N, N ≥ 1"),
    "linear": (_linear, "linear:N[:F], N ≥ 1, F from 0 to 1"),
    "cosine": (_cosine, "cosine:N[:F], N ≥ 1, F from 0 to 1"),
    "step": (_step, "step:F:N1[:N2...], F from 0 to 1, then the positions at which it applies"),
    "inverse-sqrt": (_inverse_sqrt, "inverse-sqrt:N, N ≥ 1"),
}
