"""Define what an algorithm consists of: a policy, a rule, and a client plan.

* A **policy** decides, on integers alone (workers, staleness), what becomes of a gradient: applied,
  collected, ignored or refused, and whether its worker is answered now. It returns a `Decision`.
* A **rule** is the mathematics of one update (`aiops.kernels.rule.Rule`); with it goes a learning
  rate per update.
* A **client plan** tells the workers what to do (`aiops.client.strategies`): a map of plain values,
  sent in the handshake.

An algorithm is a frozen dataclass derived from `Algorithm`: its fields are its settings, its
docstring is its page. To add one, write one file, and name it as ``--policy package.module:Class``,
in the entry-point group ``aiops.algorithms``, or in `aiops.algorithms.BUILT_IN`.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple, Self

import numpy as np

from aiops.algorithms.checks import made_part, try_modulation, try_plan, try_scalars
from aiops.algorithms.optimizers import sgd
from aiops.algorithms.per_tensor import Clause, PerTensor
from aiops.algorithms.schedules import SECONDS, UNITS, UPDATES, Schedule
from aiops.common.settings import read_setting
from aiops.errors import ConflictError, UsageError
from aiops.kernels.clipping import Clip
from aiops.kernels.rule import Rule
from aiops.kernels.rule_parser import parse
from aiops.kernels.trimmed_mean import NO_TRIM, Trim
from aiops.model.layout import Array, Tensor


class Decision(NamedTuple):
    """A policy's decision on a gradient.

    Attributes
    ----------
    use
        Whether the gradient is added to the sum of the next step.
    divide
        Take the step now, with the sum divided by this; None: do not take it yet.
    hold
        Whether its worker is answered only once `Policy.may_go` returns True.
    why
        The sentence with which a gradient that is not used is refused. If it is empty the gradient
        is ignored: its worker gets an ordinary answer that tells so, and goes on.
    """

    use: bool
    divide: int | None = None
    hold: bool = False
    why: str = ""


APPLY = Decision(True, divide=1)
"""Take a step with this gradient alone, at once."""
COLLECT = Decision(True)
"""Add it to the sum, and answer at once."""
IGNORE = Decision(False)
"""Leave it out; its worker gets the parameters and goes on."""


class Policy:
    """The decisions of one run; each server has an instance of its own. Derive and override."""

    awaits_workers: ClassVar[bool] = False
    """Whether the answer to a worker may wait for pushes of certain others."""

    repeatable: ClassVar[bool] = False
    """Whether the class's own `push` goes by its arguments alone, and changes nothing: asked twice
    about a gradient, it says the same. A server answers more quickly where that is so."""

    rows_at_once: ClassVar[bool] = False
    """Whether a model may have sparse tables, whose rows are updated push by push: the class's own
    `push` uses every gradient, alone or in a mean that may take longer. Answers may be held."""

    def push(self, worker: int, staleness: int) -> Decision:
        """Decide on a gradient.

        Parameters
        ----------
        worker
            The number of its worker.
        staleness
            The updates since the parameters that it was computed on, ≥ 0: the largest over its
            tensors.
        """
        raise NotImplementedError

    def workers_changed(self, waited_for: frozenset[int]) -> Decision | None:
        """Take note of the workers that are waited for; return a decision if that completes a sum.

        Called when a worker joins, leaves, exceeds ``--worker-deadline``, or pushes again after it.
        """
        return None

    def may_go(self, worker: int, published: bool) -> bool:
        """Return whether a worker whose answer is held may have it now.

        Called for every held worker after each update and each `workers_changed`. ``published``:
        whether a new version has just been published, which is the default condition.
        """
        return published

    def state(self) -> Mapping[str, Any]:
        """Return all that later decisions depend on, for `restore`: with ``--state`` it is kept.

        By default these are the instance's attributes. Override both methods if one of them is
        anything but None, a number, text, bytes, an array, or a tuple, list, set, frozenset or dict
        of these.
        """
        return vars(self)

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue from what `state` returned, on an instance made with the same settings."""
        vars(self).update(state)


class Immediate(Policy):
    """Apply every gradient at once; no worker waits for another."""

    repeatable = True
    rows_at_once = True

    def push(self, worker: int, staleness: int) -> Decision:
        """Apply it."""
        return APPLY


def repeatable(policy: Policy) -> bool:
    """Return whether the class that brought a policy's `push` in says that it is `repeatable`.

    What a class says does not hold for the `push` of a class that is derived from it.
    """
    return _said_of_push(policy, "repeatable")


def rows_at_once(policy: Policy) -> bool:
    """Return whether the class that brought a policy's `push` in says that it is `rows_at_once`."""
    return _said_of_push(policy, "rows_at_once")


def _said_of_push(policy: Policy, what: str) -> bool:
    owner = next(cls for cls in type(policy).__mro__ if "push" in vars(cls))
    return bool(vars(owner).get(what, False))


@dataclass(frozen=True, kw_only=True)
class Algorithm:
    """The base of all algorithms. Fields are settings; every one needs a default.

    Settings
    --------
    lr : float
        Learning rate α.
    schedule : str, default ``constant``
        How it changes over the run, as `aiops.algorithms.schedules` describes; for example
        ``warmup:500,cosine:20000``.
    schedule_unit : str, default ``updates``
        What the schedule counts: ``updates``, ``examples``, ``tokens`` or ``seconds``.
    schedule_start : float, default 0
        Where in its unit the schedule begins: for a run that goes on from a model.
    mini_batch : int, default 0
        The examples, or tokens, of one mini-batch of a worker, for a schedule that counts them.
    scale_lr : bool, default False
        Multiply it by λ (``--workers``), from update 0 or over the schedule's warm-up (Goyal et
        al. 2017; as `no-delay`'s paper does).
    clip : float, default 0
        Scale down an update's (mean) gradient whose norm over all tensors it touches is larger
        (Pascanu et al. 2013); 0: never. Where workers push gradients, it may be for some tensors
        alone: ``--set clip=0.1@embed*``.
    per_tensor : str, default none
        Other values for some tensors, by their names: ``--set lr=0.001@embed*,*head*``
        (`aiops.algorithms.per_tensor`). With 0 as the rate a tensor keeps its values.
    """

    name: ClassVar[str]
    needs_workers: ClassVar[bool] = False
    """Whether ``--workers N`` is required; `barrier` may depend on the settings."""
    accepts_sums: ClassVar[bool] = True
    """Whether the rule works on a sum of several gradients as on one, if many times as large."""
    lr_meaning: ClassVar[str] = "a positive learning rate"
    """The meaning of ``lr``, in the error about a value that cannot be."""

    lr: float = 0.01
    schedule: str = "constant"
    schedule_unit: str = UPDATES
    schedule_start: float = 0.0
    mini_batch: int = 0
    scale_lr: bool = False
    clip: float = 0.0
    per_tensor: str = ""

    def __post_init__(self) -> None:
        """Check the settings; derived classes add their own checks with `require`."""
        self.require("lr", self.lr > 0, self.lr_meaning)
        self.require("clip", self.clip >= 0, "0 (no clipping) or more")
        self.require("schedule_unit", self.schedule_unit in UNITS, f"one of {', '.join(UNITS)}")
        self.require("schedule_start", self.schedule_start >= 0, "0 or more")
        counts = self.schedule_unit not in (UPDATES, SECONDS)
        what = f"the {self.schedule_unit} of one mini-batch, 1 or more" if counts else "0 or more"
        self.require("mini_batch", self.mini_batch >= int(counts), what)
        try:
            Schedule(self.schedule)
            for clause in PerTensor.of(self.per_tensor).clauses:
                self._check_clause(clause)
        except UsageError as error:
            raise UsageError(f"{self.name}: {error}") from None

    def _check_clause(self, clause: Clause) -> None:
        """Refuse a value with a pattern if it is of a setting that all tensors share."""
        known = self.patterned
        if clause.setting in known:
            return
        hint = f"these may: {', '.join(known)}" if known else "nor may any other here"
        raise UsageError(f"{clause}: {clause.setting} may not differ between tensors; {hint}")

    def require(self, setting: str, holds: bool, what: str) -> None:
        """Refuse the value of a setting.

        Parameters
        ----------
        setting
            The field's name.
        holds
            Whether the value is allowed; floats must also be finite, and 0 or of a magnitude
            between 1e-37 and 1e37.
        what
            The allowed values, in words: ``"0 or more"``.

        Raises
        ------
        UsageError
            When it is not; it names the algorithm, the setting and the value.
        """
        value = getattr(self, setting)
        if not holds or (isinstance(value, float) and not math.isfinite(value)):
            raise UsageError(f"{self.name}: {setting} must be {what}, not {value!r}")
        if isinstance(value, float) and value and not 1e-37 < abs(value) < 1e37:
            text = f"{self.name}: {setting} = {value!r} is outside the range of float32"
            raise UsageError(f"{text}: stay between 1e-37 and 1e37")

    def check(self, workers: int | None, relaxed: bool = False) -> None:
        """Refuse settings that cannot work together, and parts that cannot work.

        Parameters
        ----------
        workers
            How many take part (``--workers``), or None: any number.
        relaxed
            Whether reads may mix versions (``--consistency relaxed``).

        Raises
        ------
        ConflictError
            When settings exclude each other; it tells which, and what to change.
        UsageError
            When the rule uses anything that kernels do not support (it names the line), `policy` or
            `plan` returns none, or `modulation` or `scalars` anything but finite numbers.
        """
        rule = made_part(self.name, "rule", self.rule, Rule)
        parse(rule)
        try_modulation(self.name, self.modulation)
        if self.barrier and workers is None:
            raise ConflictError(
                f"{self.name} waits for a known number of workers: say how many with --workers N"
            )
        if self.scale_lr and workers is None:
            raise ConflictError(
                "scale_lr multiplies the learning rate by the number of workers: say how many with"
                " --workers N"
            )
        made_part(self.name, "policy", lambda: self.policy(workers), Policy)
        try_plan(self.name, lambda: self.plan(workers))
        if rule.scalars:  # the last of them are the tensors' own
            shared = len(rule.scalars) - len(self.tensor_scalars(""))
            try_scalars(self.name, self.scalars, rule.scalars[:shared])
        if relaxed and rule.reads:
            raise ConflictError(
                f"{self.name} compares with the version that a worker was sent, and with"
                " --consistency relaxed there are no whole versions: drop one of them"
            )

    @property
    def barrier(self) -> bool:
        """True if, with these settings, the number of workers must be known."""
        return self.needs_workers

    def rule(self) -> Rule:
        """Return the mathematics of an update; plain SGD unless overridden."""
        return Rule(sgd)

    def scalars(self, update: int, staleness: float, gain: float) -> tuple[float, ...]:
        """Return the values of the rule's ``scalars`` for a tensor; `tensor_scalars` follow them.

        Parameters
        ----------
        update
            The number of the tensor's update, from 1.
        staleness
            The mean of the gradients used before it, lately (`aiops.engine.staleness`), ≥ 0.
        gain
            What the rule's gauge has the rate multiplied by (`aiops.engine.rate_gain`), ≥ 1.
        """
        return ()

    @property
    def most_gain(self) -> float:
        """The most that the rule's gauge may have the rate multiplied by, ≥ 1; 1 without one."""
        return 1.0

    def offset_kept(self, updates: int, staleness: float) -> float:
        """Return φ, how much of the rule's ``offset`` a tensor has where it is evaluated, 0 to 1.

        The model is evaluated at w − (1−φ) · offset (`aiops.store.evaluation`).

        Parameters
        ----------
        updates
            Those that the tensor has had, ≥ 0.
        staleness
            The mean, as of `scalars`.
        """
        return 1.0

    def row_scalars(self, update: int) -> tuple[float, ...]:
        """Return them for a sparse table's update 1, 2, ... of some of its rows."""
        return self.scalars(update, 0.0, 1.0)

    def rates(self, workers: int | None) -> float | Callable[[float], float]:
        """Return the learning rate, or it as a function of an update's position in the schedule.

        That is the number of the update, from 0, or another count (``schedule_unit``). ``workers``:
        how many take part, or None.
        """
        schedule = Schedule(self.schedule, float(workers or 1) if self.scale_lr else 1.0)
        if schedule.constant:
            return self.lr * schedule.scale
        start = self.schedule_start
        return lambda position: self.lr * schedule(position + start)

    def row_rates(self, workers: int | None) -> float | Callable[[float], float]:
        """Return the same of sparse tables, of which each push of rows is an update."""
        return self.rates(workers)

    @property
    def rate_hint(self) -> str:
        """The learning rates to look at where training diverges, for errors."""
        return f"a learning rate (--set lr=..., now {self.lr:g})"

    @property
    def second_moments(self) -> bool:
        """True if the rule divides gradients by roots of their mean squares."""
        return False

    def cautions(self) -> tuple[str, ...]:
        """Return warnings of settings that are allowed, and unlikely to be meant."""
        return ()

    def without_effect(self, choice: str, users: Mapping[str, Collection[str]]) -> tuple[str, ...]:
        """Return the warnings of settings that only some values of another one use.

        Parameters
        ----------
        choice
            The other setting.
        users
            Its values that use a setting, by the setting's name.
        """
        chosen, found = getattr(self, choice), list[str]()
        defaults = {each.name: each.default for each in dataclasses.fields(self)}
        for setting, values in users.items():
            if getattr(self, setting) != defaults[setting] and chosen not in values:
                text = f"{self.name}: {setting}={getattr(self, setting):g} has no effect with"
                found.append(f"{text} {choice}={chosen}: it is of {', '.join(values)}")
        return tuple(found)

    def crowded(self, present: int, workers: int | None) -> str:
        """Return the warning of a number of workers that are there; by default there is none.

        ``workers``: the number that the server was told, as of `policy`.
        """
        return ""

    def at_floor(self, vbar: float) -> str:
        """Return the warning of a statistic that lies on its floor."""
        floor = self.rule().statistic_floor
        return (
            f"the statistic of {self.name} is {vbar:.3g}, within 10 % of its floor of {floor:.3g}:"
            " steps and gates that go by it hardly do so any more"
        )

    @property
    def patterned(self) -> tuple[str, ...]:
        """The settings that may have other values for some tensors (``per_tensor``)."""
        return ("lr", "clip")

    @property
    def clips(self) -> bool:
        """True if updates of some tensors at least are scaled down to a norm."""
        return self.clipping([]) is not None

    def clipped(self, tensors: Iterable[str]) -> list[str]:
        """Return those tensors (or tables), by their names, that have a largest norm."""
        others = PerTensor.of(self.per_tensor)
        return sorted(each for each in tensors if others.value("clip", each, self.clip))

    def clipping(self, tensors: Sequence[str]) -> Clip | None:
        """Return the groups of a model's tensors whose norms are bounded; None: none is.

        ``tensors``: their names.
        """
        return PerTensor.of(self.per_tensor).clip(self.clip, tensors)

    def rate_factor(self, tensor: str, shape: Sequence[int] = ()) -> float:
        """Return what the learning rate is multiplied by for a tensor, or for a table.

        ``shape``: the tensor's; () of a table.
        """
        return PerTensor.of(self.per_tensor).value("lr", tensor, self.lr) / self.lr

    def tensor_scalars(self, tensor: str, shape: Sequence[int] = ()) -> tuple[float, ...]:
        """Return the last of the rule's ``scalars``: those that name and shape decide.

        ``shape``: the tensor's; () of a table.
        """
        return ()

    def numbers_of(self, tensors: Sequence[Tensor]) -> tuple[Array | None, Array]:
        """Return `rate_factor` and `tensor_scalars` of n tensors.

        Returns
        -------
        factors
            float64[n]; None if the rate is the same for all tensors.
        scalars
            float64[n, k], often without a column.
        """
        factors = np.array([self.rate_factor(tensor.name, tensor.shape) for tensor in tensors])
        own = [self.tensor_scalars(tensor.name, tensor.shape) for tensor in tensors]
        scalars = np.array(own, np.float64)
        differ = bool((factors != 1.0).any())
        return factors if differ else None, scalars.reshape(len(tensors), -1 if tensors else 0)

    @property
    def linear(self) -> bool:
        """True if a step is proportional to its gradient.

        Then each collected gradient is weighted with its own modulation. Otherwise the step is
        modulated with their mean, since an optimiser that normalises gradients undoes a weight.
        """
        return self.rule().function is sgd and not self.clips

    def trimming(self, workers: int | None) -> Trim:
        """Return whether a step takes a trimmed mean of the gradients collected; default: the sum.

        ``workers``: as of `policy`.
        """
        return NO_TRIM

    def sum_momentum(self, workers: int | None) -> float | None:
        """Return the memory of the momentum of collected gradients, of whose directions steps are.

        None, the default: steps are made of their sum itself. ``workers``: as of `policy`.
        """
        return None

    @property
    def sparse(self) -> bool:
        """True if rows that a push does not name may keep their values and their state.

        Then the model may have sparse tables. It is right where a gradient of 0 changes nothing, or
        where skipping is as good, as in the lazy optimisers of `aiops.algorithms.optimizers`.
        """
        return self.rule().function is sgd

    def modulation(self, staleness: int) -> float:
        """Return s(τ) ≥ 0, the factor of the learning rate for a gradient of this staleness (≥ 0).

        It goes by the staleness and the settings alone: the server asks once for each.
        """
        return 1.0

    def policy(self, workers: int | None) -> Policy:
        """Return a fresh policy; `Immediate` unless overridden."""
        return Immediate()

    def plan(self, workers: int | None) -> dict[str, Any]:
        """Return the client plan, sent to workers in the handshake.

        Keys: ``recompute``, whether a worker computes a refused gradient again on newer parameters;
        ``routine``, and the settings of that (`aiops.client.strategies`).
        """
        return {"recompute": False, "routine": "direct"}

    def settings(self) -> dict[str, Any]:
        """Return the settings as plain values."""
        return {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}

    @classmethod
    def make(cls, settings: Mapping[str, Any]) -> Self:
        """Make an algorithm from settings, as values or as text (``--set key=value``).

        Raises
        ------
        UsageError
            When a setting is unknown (it names the nearest), or its value is of another type.
        """
        defaults = {field.name: field.default for field in dataclasses.fields(cls)}
        values = {k: read_setting(cls.name, k, v, defaults) for k, v in settings.items()}
        for key, value in values.items():
            if type(value) is int and not -(2**62) < value < 2**62:
                raise UsageError(f"{cls.name}: {key} must be below 2**62, not {value}")
        return cls(**values)
