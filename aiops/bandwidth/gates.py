"""Bandwidth gates: decide when a worker pushes and fetches, and what to do with skipped gradients.

A `Gate` is a value, its settings; the server announces it in the client plan, and the worker's
strategy (`aiops.client.strategies.gated`) asks `Gate.chances` before each transfer. What a user
writes is ``--gate bfasgd:c_push=0.08,c_fetch=0.125,stamp=newest``.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Self

import numpy as np

from aiops.algorithms.base import Algorithm
from aiops.common.settings import read_settings
from aiops.errors import ConflictError, UsageError, nearest
from aiops.model.layout import Array

SKIPPED = ("accumulate", "reapply", "discard")
COMBINE = ("sum", "mean")
STAMPS = ("oldest", "mean", "newest")
BY = ("model", "tensor")

LEVEL_MEMORY = 10
"""Answers over which the level of a statistic is averaged, for gates that are relative to it."""

NEAR = 2.0
"""A statistic's level is never more than this many times above or below its last value."""

LEAST_SHARE = 0.05
"""The share of pushes below which a gate is taken to starve the training."""


@dataclass(frozen=True, kw_only=True)
class Gate:
    """The settings that every gate has.

    Settings
    --------
    skipped : str, default ``accumulate``
        The use of a gradient that is not pushed. ``accumulate``: it is kept, and pushed with
        those that follow. ``reapply``: the server applies the worker's last gradient again (Odena
        2016). ``discard``: nothing.
    combine : str, default ``sum``
        Accumulated gradients are pushed as their ``sum`` (no step is lost) or their ``mean``
        (one step, as large as any).
    stamp : str, default ``oldest``
        The version that accumulated gradients are taken to be computed at: of the ``oldest``, their
        ``mean``, or the ``newest``.
    by : str, default ``model``
        Whether one decision holds for the whole ``model``, or each ``tensor`` has its own.
    local : float, default 0
        Learning rate at which a worker takes its gradients as steps of its own too, until it
        fetches (as under local SGD): what it computes next is then nearer to where the model is by
        now. 0: it computes at the parameters as fetched.
    longest : int, default 100
        Opportunities passed over in a row after which the gate opens in any case.
    share : float, default 0
        The least share of opportunities to push at which it opens in any case: of any n in a row
        it lets ``share`` · (n − ``longest``) pass, for each tensor with ``by=tensor``. 0.05 for
        ``bfasgd``, whose share depends on the model.
    seed : int, default 0
        Of the workers' random streams; each worker has its own.
    """

    name: ClassVar[str] = ""
    needs_statistic: ClassVar[bool] = False

    skipped: str = "accumulate"
    combine: str = "sum"
    stamp: str = "oldest"
    by: str = "model"
    local: float = 0.0
    longest: int = 100
    share: float = 0.0
    seed: int = 0

    def __post_init__(self) -> None:
        """Check the settings."""
        for setting, known in (
            ("skipped", SKIPPED),
            ("combine", COMBINE),
            ("stamp", STAMPS),
            ("by", BY),
        ):
            value = getattr(self, setting)
            if value not in known:
                raise UsageError(
                    f"gate {self.name}: {setting} is one of {', '.join(known)}, not {value!r};"
                    f" {nearest(str(value), known)}"
                )
        self._require("longest", 1 <= self.longest <= 1_000_000, "from 1 to 1,000,000")
        self._require("share", 0 <= self.share <= 1, "from 0 to 1")
        self._require("local", 0 <= self.local < 1e37, "0 or more")
        self._require("seed", 0 <= self.seed < 1 << 63, "0 or more")
        if self.skipped == "reapply" and self.by == "tensor":
            raise ConflictError(
                f"gate {self.name}: skipped=reapply applies a worker's last gradient as a whole, so"
                " it does not go with by=tensor; choose by=model, or skipped=accumulate"
            )

    def _require(self, setting: str, holds: bool, what: str) -> None:
        value = getattr(self, setting)
        if not holds or not math.isfinite(value):
            raise UsageError(f"gate {self.name}: {setting} must be {what}, not {value!r}")

    @classmethod
    def make(cls, settings: str) -> Self:
        """Make the gate of settings as a user writes them, ``key=value`` with commas between.

        Raises
        ------
        UsageError
            For a setting that is unknown or given twice, or a value that cannot be.
        """
        defaults = {field.name: field.default for field in dataclasses.fields(cls)}
        return cls(**read_settings(f"gate {cls.name}", settings, defaults))

    @property
    def spec(self) -> str:
        """The text for ``--gate`` that makes this gate: its settings that are not the defaults."""
        values = [(f.name, getattr(self, f.name), f.default) for f in dataclasses.fields(self)]
        written = ",".join(f"{name}={value}" for name, value, default in values if value != default)
        return f"{self.name}:{written}" if written else self.name

    def check(self, algorithm: Algorithm, workers: int | None) -> None:
        """Refuse an algorithm that does not go with this gate.

        Raises
        ------
        ConflictError
            With a sentence that says why, and what to do.
        """
        name, plan = algorithm.name, algorithm.plan(workers)
        if "average" in plan:
            raise ConflictError(
                f"under {name} workers push no gradients, so there is nothing to keep back: drop"
                " --gate, or choose a policy to which workers push every gradient, such as fasgd"
            )
        if plan.get("routine", "direct") != "direct":
            raise ConflictError(
                f"under {name} a worker decides by its own plan when it pushes and fetches: drop"
                " --gate and choose that plan's settings, or choose a policy to which workers push"
                " every gradient, such as fasgd"
            )
        if algorithm.policy(workers).awaits_workers:
            raise ConflictError(
                f"{name} waits for the pushes of all its workers, and a gate keeps some of them"
                " back: drop --gate, or choose a policy without a barrier, such as fasgd"
            )
        if algorithm.rule().reads:
            raise ConflictError(
                f"{name} compares each gradient with the parameters that its worker was sent, and"
                " behind a gate a worker has been sent several versions: drop --gate, or choose"
                " another policy, such as fasgd"
            )
        if self.needs_statistic and algorithm.rule().statistic is None:
            raise ConflictError(
                f"the gate {self.name} goes by a statistic of the gradients, and {name} keeps none:"
                " choose fasgd, or a gate that needs none (periodic, constant)"
            )

    def plan(self, algorithm: Algorithm) -> dict[str, Any]:
        """Return what is added to the client plan."""
        values = dataclasses.asdict(self)
        return {"routine": "gated", "gate": {"kind": self.name, **values}}

    @classmethod
    def from_plan(cls, values: Mapping[str, Any]) -> Gate:
        """Return the gate that a client plan announces.

        Raises
        ------
        UsageError
            When this client does not know it.
        """
        kind = KINDS.get(str(values.get("kind")))
        known = {field.name: field for field in dataclasses.fields(kind or Gate)}
        if kind is None or {*values} - {*known, "kind"}:
            raise UsageError(
                f"the server's gate {values!r:.80} is not known to this client: upgrade aiops here"
            )
        try:
            kinds: dict[str, Any] = {key: type(field.default) for key, field in known.items()}
            return kind(**{key: kinds[key](values[key]) for key in known if key in values})
        except (TypeError, ValueError, OverflowError):
            raise UsageError(
                f"the server announces a gate that cannot be: {values!r:.80}"
            ) from None

    def chances(
        self,
        step: int,
        statistic: Array | None,
        constants: tuple[float, ...],
        level: Array | None = None,
    ) -> tuple[Array | float, Array | float]:
        """Return the probabilities of a push and of a fetch after a step.

        Parameters
        ----------
        step
            The worker's mini-batches so far, this one included: 1, 2, ...
        statistic
            The algorithm's: one number for the model, or float[tensors]; None: not known yet.
        constants
            c_push and c_fetch as the server has chosen them last to keep to a budget, or none.
        level
            The running mean of the statistic, as `followed` returned it; None: it is at its level.
        """
        raise NotImplementedError

    def followed(self, level: Array | None, statistic: Array) -> Array | None:
        """Return the level of a statistic after its next value; None: the gate needs none.

        ``level``: before it, or None at first.
        """
        return None

    def starves_below(self, constants: tuple[float, ...]) -> float:
        """Return the value of the statistic below which `own_share` is under `LEAST_SHARE`.

        It is infinite if all are, and its negative if none is. ``constants`` is as of `chances`.
        """
        return math.inf if np.min(self.own_share(None, constants)) < LEAST_SHARE else -math.inf

    def own_share(self, statistic: Array | None, constants: tuple[float, ...]) -> Array | float:
        """Return the share of pushes that the gate lets pass by itself, its bounds apart.

        Parameters are as of `chances`.
        """
        return self.chances(1, statistic, constants)[0]


@dataclass(frozen=True, kw_only=True)
class BFASGD(Gate):
    """B-FASGD's: the larger the gradients' deviation v̄, the more likely a transfer.

    .. math::

        transmit  iff  r < 1 / (1 + c / (v̄ + ε)),   r uniform in [0, 1)

    With ``relative`` v̄ is measured in units of its own level, so that c means the same on every
    model: at its level v̄ has a share of 1/(1 + c) of the transfers, and no share is ever below
    1/(1 + 2c).

    .. math::

        transmit  iff  r < 1 / (1 + c · v̂/v̄),   v̂ ← v̂ + (v̄ − v̂)/10,   v̄/2 ≤ v̂ ≤ 2 v̄

    Settings
    --------
    c_push, c_fetch : float, default 0
        c of each direction; 0 always transmits. Under ``--bandwidth-budget`` the initial value.
    relative : bool, default False
        Take c relative to the running mean v̂ of v̄ (of each tensor's own, with ``by=tensor``).
    eps : float, default 1e-4
        ε; not used with ``relative``.
    floor_free : bool, default False
        Subtract from v̄ the value that it cannot fall below (FASGD's sqrt(ε)), so that the gate
        uses the deviation alone.
    floor : float, default 0
        The value subtracted; with ``floor_free`` the algorithm provides it.

    Source
    ------
    Odena, *Faster Asynchronous SGD*, eq 9. The text's "inversely proportional" is a slip: the right
    side grows with v̄.
    """

    name = "bfasgd"
    needs_statistic = True

    c_push: float = 0.0
    c_fetch: float = 0.0
    relative: bool = False
    share: float = LEAST_SHARE
    eps: float = 1e-4
    floor_free: bool = False
    floor: float = 0.0

    def __post_init__(self) -> None:
        """Check the settings."""
        super().__post_init__()
        for setting in ("c_push", "c_fetch", "floor"):
            self._require(setting, getattr(self, setting) >= 0, "0 or more")
        self._require("eps", self.eps > 0, "more than 0")

    def plan(self, algorithm: Algorithm) -> dict[str, Any]:
        """Return the client plan, with the algorithm's floor if ``floor_free`` is set."""
        plan = super().plan(algorithm)
        if self.floor_free:
            plan["gate"]["floor"] = algorithm.rule().statistic_floor
        return plan

    def chances(
        self,
        step: int,
        statistic: Array | None,
        constants: tuple[float, ...],
        level: Array | None = None,
    ) -> tuple[Array | float, Array | float]:
        """Return eq 9's right side; 1 while the statistic is not known."""
        if statistic is None:
            return 1.0, 1.0
        push, fetch = constants or (self.c_push, self.c_fetch)
        deviation = np.maximum(statistic - self.floor, 0.0)
        if not self.relative:
            deviation = deviation + self.eps
        elif level is None:
            deviation = np.ones_like(deviation)
        else:  # a level of 0 is that of a statistic of 0
            deviation = np.divide(deviation, level, np.ones_like(deviation), where=level > 0)
        with np.errstate(over="ignore"):  # c beyond all measure: never
            return 1.0 / (1.0 + push / deviation), 1.0 / (1.0 + fetch / deviation)

    def own_share(self, statistic: Array | None, constants: tuple[float, ...]) -> Array | float:
        """Return eq 9's right side; if the gate is relative, that of v̄ at its level."""
        return super().own_share(np.ones(1) if self.relative else statistic, constants)

    def starves_below(self, constants: tuple[float, ...]) -> float:
        """Return v̄ at which eq 9's right side is `LEAST_SHARE`."""
        push = (constants or (self.c_push,))[0]
        most = 1 / LEAST_SHARE - 1
        if self.relative:
            return math.inf if push > most else -math.inf
        below = push / most - self.eps
        return self.floor + below if below > 0 else -math.inf

    def followed(self, level: Array | None, statistic: Array) -> Array | None:
        """Return v̂, within a factor of 2 of v̄: v̄ falls fast at first, and v̂ must not lag."""
        if not self.relative:
            return None
        deviation = np.maximum(statistic.astype(np.float64) - self.floor, 0.0)
        if level is None:
            return deviation
        mean = level + (deviation - level) / LEVEL_MEMORY
        return np.clip(mean, deviation / NEAR, deviation * NEAR)


@dataclass(frozen=True, kw_only=True)
class Periodic(Gate):
    """Every k-th step pushes, every k-th step fetches (Dean et al. 2012).

    Settings
    --------
    k_push, k_fetch : int, default 1
        Mini-batches from one push, or fetch, to the next.
    """

    name = "periodic"

    k_push: int = 1
    k_fetch: int = 1
    longest: int = 1_000_000

    def __post_init__(self) -> None:
        """Check the settings."""
        super().__post_init__()
        for setting in ("k_push", "k_fetch"):
            holds = 1 <= getattr(self, setting) <= 1_000_000
            self._require(setting, holds, "from 1 to 1,000,000")

    def chances(
        self,
        step: int,
        statistic: Array | None,
        constants: tuple[float, ...],
        level: Array | None = None,
    ) -> tuple[Array | float, Array | float]:
        """Return 1 when it is time, and 0 otherwise."""
        return float(step % self.k_push == 0), float(step % self.k_fetch == 0)

    def own_share(self, statistic: Array | None, constants: tuple[float, ...]) -> Array | float:
        """Return 1/k."""
        return 1 / self.k_push


@dataclass(frozen=True, kw_only=True)
class Constant(Gate):
    """A coin: the control experiment beside B-FASGD's gate at equal traffic.

    Settings
    --------
    p_push, p_fetch : float, default 1
        Probability of a transfer.
    """

    name = "constant"

    p_push: float = 1.0
    p_fetch: float = 1.0

    def __post_init__(self) -> None:
        """Check the settings."""
        super().__post_init__()
        for setting in ("p_push", "p_fetch"):
            self._require(setting, 0 < getattr(self, setting) <= 1, "more than 0, at most 1")

    def chances(
        self,
        step: int,
        statistic: Array | None,
        constants: tuple[float, ...],
        level: Array | None = None,
    ) -> tuple[Array | float, Array | float]:
        """Return them."""
        return self.p_push, self.p_fetch


KINDS: Mapping[str, type[Gate]] = {kind.name: kind for kind in (BFASGD, Periodic, Constant)}
"""The gates, by name."""


def find(spec: str) -> Gate:
    """Return the gate that a user speaks of: ``"bfasgd:c_push=0.08"``.

    Raises
    ------
    UsageError
        When there is none of that name, with the nearest, or a setting cannot be.
    """
    name, _colon, settings = spec.partition(":")
    kind = KINDS.get(name.strip())
    if kind is None:
        raise UsageError(f"no gate is called {name!r}; {nearest(name, KINDS)}")
    return kind.make(settings)


def for_budget(algorithm: Algorithm, workers: int | None) -> Gate | None:
    """Return the gate with which a bandwidth budget is kept, if no other was chosen.

    None where the algorithm does not go with it: its transfers are paced, and not chosen.
    """
    gate = BFASGD()
    try:
        gate.check(algorithm, workers)
    except ConflictError:
        return None
    return gate
