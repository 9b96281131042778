"""What an algorithm is: a value of three parts.

* A **policy** decides, on integers alone (workers, versions, staleness): use this gradient now,
  collect it, hold the answer, ignore it, refuse it. It returns a `Decision` and touches nothing.
* A **rule** is the mathematics of one update (`aiops.kernels.rule.Rule`), and with it a learning
  rate per update.
* A **client plan** is what the server tells the workers to do (`aiops.client.routines`); a plain
  map.

An algorithm is a frozen dataclass derived from `Algorithm`: its fields are its settings, its
docstring is its page. To add one, write one file; name it as ``--policy package.module:Class``, or
add it to `aiops.algorithms.BUILT_IN` or to the entry-point group ``aiops.algorithms``.
"""

from __future__ import annotations

import dataclasses
import inspect
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple, Self

from aiops.algorithms.optimizers import sgd
from aiops.algorithms.schedules import Schedule
from aiops.errors import ConflictError, UsageError, nearest
from aiops.kernels.reader import read
from aiops.kernels.rule import Rule


class Decision(NamedTuple):
    """What is to become of a gradient.

    ``use``
        Whether it takes part at all.
    ``divide``
        Take a step now, with the sum of what was collected divided by this; None: not yet.
    ``hold``
        Answer its worker only when `Policy.may_go` says so.
    ``why``
        For a gradient that is not used: the sentence with which it is refused. Without one it is
        ignored: its worker gets an ordinary answer that says so, and goes on.
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
"""Do nothing with it; its worker gets the parameters and goes on."""


class Policy:
    """The decisions of one run; made anew for each server. Derive and override."""

    repeatable: ClassVar[bool] = False
    """Whether the class's own `push` goes by its arguments alone, and changes nothing: asked twice
    about a gradient, it says the same. A server answers more quickly where that is so."""

    def push(self, worker: int, staleness: int) -> Decision:
        """Decide on a gradient of a worker (``staleness`` ≥ 0: the largest over its tensors)."""
        raise NotImplementedError

    def crew(self, waited_for: frozenset[int]) -> Decision | None:
        """Hear which workers are waited for now; return a verdict if that completes a sum.

        Called when a worker joins, leaves, falls silent past its deadline, or speaks again.
        """
        return None

    def may_go(self, worker: int, published: bool) -> bool:
        """Say whether a worker whose answer is held may have it now.

        Asked of every held worker after each update and each change of crew; ``published``:
        whether a new version has just been published, which is what most wait for.
        """
        return published


class Immediate(Policy):
    """Every gradient is applied at once: no worker ever waits for another."""

    repeatable = True

    def push(self, worker: int, staleness: int) -> Decision:
        """Apply it."""
        return APPLY


def repeatable(policy: Policy) -> bool:
    """Return whether the class that brought a policy's `push` in says that it is `repeatable`.

    What a class says does not hold for the `push` of a class that is derived from it.
    """
    owner = next(cls for cls in type(policy).__mro__ if "push" in vars(cls))
    return bool(vars(owner).get("repeatable", False))


@dataclass(frozen=True, kw_only=True)
class Algorithm:
    """The base of all algorithms. Fields are settings; every one needs a default.

    Settings
    --------
    lr : float
        Learning rate α.
    schedule : str, default ``constant``
        How it changes over the updates: see `aiops.algorithms.schedules`, for example
        ``warmup:500,cosine:20000``.
    scale_lr : bool, default False
        Multiply it by λ (``--workers``), from update 0 or over the schedule's warm-up (Goyal et
        al. 2017; as `no-delay`'s paper does).
    clip : float, default 0
        Scale down an update's (mean) gradient whose norm over all tensors it touches is larger
        (Pascanu et al. 2013); 0: do not.
    """

    name: ClassVar[str]
    needs_workers: ClassVar[bool] = False
    """Whether ``--workers N`` must say how many take part; see also `barrier`."""
    saved_up: ClassVar[bool] = True
    """Whether a gradient may hold what was left out of earlier ones, and so be many times one."""
    family: ClassVar[str] = "other"
    """The heading that it is listed under: any words; ours are in `aiops.cli.policy_catalog`."""
    neighbours: ClassVar[str] = ""
    """The names of those that its page compares it with, the nearest first, with spaces between."""

    lr: float = 0.01
    schedule: str = "constant"
    scale_lr: bool = False
    clip: float = 0.0

    def __post_init__(self) -> None:
        """Check the settings; derived classes add their own checks with `require`."""
        self.require("lr", self.lr > 0, "a positive learning rate")
        self.require("clip", self.clip >= 0, "0 (no clipping) or more")
        try:
            Schedule(self.schedule)
        except UsageError as error:
            raise UsageError(f"{self.name}: {error}") from None

    def require(self, setting: str, holds: bool, what: str) -> None:
        """Refuse a setting that is not ``what`` it must be.

        Raises
        ------
        UsageError
            Naming the algorithm, the setting and its value.
        """
        value = getattr(self, setting)
        if not holds or (isinstance(value, float) and not math.isfinite(value)):
            raise UsageError(f"{self.name}: {setting} must be {what}, not {value!r}")
        if isinstance(value, float) and value and not 1e-37 < abs(value) < 1e37:
            text = f"{self.name}: {setting} = {value!r} is out of what float32 calculates with"
            raise UsageError(f"{text}: stay between 1e-37 and 1e37")

    def check(self, workers: int | None, relaxed: bool = False) -> None:
        """Refuse settings that cannot work together, and a rule that cannot be compiled.

        Parameters
        ----------
        workers
            How many take part (``--workers``), or None: any number.
        relaxed
            Whether reads may mix versions (``--consistency relaxed``).

        Raises
        ------
        ConflictError
            Saying why.
        UsageError
            Naming the rule, the line and what in it no kernel can do.
        """
        read(self.rule())
        if self.barrier and workers is None:
            raise ConflictError(
                f"{self.name} waits for a known number of workers: say how many with --workers N"
            )
        if self.scale_lr and workers is None:
            raise ConflictError(
                "scale_lr multiplies the learning rate by the number of workers: say how many with"
                " --workers N"
            )
        if relaxed and self.rule().reads:
            raise ConflictError(
                f"{self.name} compares with the version that a worker was sent, and with"
                " --consistency relaxed there are no whole versions: drop one of them"
            )

    @property
    def barrier(self) -> bool:
        """Whether, with these settings, it must know how many workers take part."""
        return self.needs_workers

    def rule(self) -> Rule:
        """Return the mathematics of an update; plain SGD unless overridden."""
        return Rule(sgd)

    def scalars(self, update: int) -> tuple[float, ...]:
        """Return the values of the rule's ``scalars`` for a tensor's first, second, ... update."""
        return ()

    def rates(self, workers: int | None) -> Callable[[int], float]:
        """Return the learning rate as a function of the update's number 0, 1, 2, ..."""
        schedule = Schedule(self.schedule, float(workers or 1) if self.scale_lr else 1.0)
        if schedule.constant:
            rate = self.lr * schedule.scale
            return lambda update: rate
        return lambda update: self.lr * schedule(update)

    @property
    def gated(self) -> bool:
        """Whether its workers may keep pushes back: nobody waits for one of a certain worker."""
        return True

    @property
    def floor(self) -> float:
        """What the mean of the rule's statistic cannot fall below."""
        return 0.0

    @property
    def linear(self) -> bool:
        """Whether a step is proportional to its gradient, and to nothing else.

        Then a collected gradient is weighted with its own modulation; otherwise (an optimiser that
        normalises gradients would undo that) the step is modulated with the mean.
        """
        return self.rule().function is sgd and not self.clip

    @property
    def sparse(self) -> bool:
        """Whether a gradient of 0 leaves an element and its state alone, so that it may be skipped.

        Rows of tables that a push does not name are skipped.
        """
        return self.rule().function is sgd

    def modulation(self, staleness: int) -> float:
        """Return what the learning rate is multiplied by for a gradient this stale (≥ 0)."""
        return 1.0

    def policy(self, workers: int | None) -> Policy:
        """Return a fresh policy; `Immediate` unless overridden."""
        return Immediate()

    def tables(self) -> str | None:
        """Return why the model may have no sparse tables, or None: it may.

        A table's rows are updated one push at a time, and a row that a push does not name keeps its
        parameters and its state. A rule for which that is wrong (whose state must move with every
        update of the model) says so here; one for which it is right, returns None.
        """
        if not isinstance(self.policy(1), Immediate):
            return (
                f"{self.name} collects gradients or holds answers before a step, and the rows of a"
                " table are updated push by push: choose a policy that applies every gradient at"
                " once, such as asgd, sasgd or fasgd"
            )
        if self.clip:
            return (
                f"{self.name} with clip measures a gradient over all that an update touches, and a"
                " push of rows is no whole gradient: set clip to 0"
            )
        if not self.sparse:
            return (
                f"the rule of {self.name} has state that would stand still in the rows that a push"
                " does not name, and it does not say that this is right: choose asgd or sasgd"
                " (optimizer sgd or adagrad), or fasgd"
            )
        return None

    def plan(self, workers: int | None) -> dict[str, Any]:
        """Return the workers' part, announced in the handshake.

        ``recompute``: a refused gradient is to be computed again on newer parameters.
        ``linear``: a step is proportional to its gradient, so a worker may scale its learning
        rate by scaling its gradient. ``routine`` and what belongs to it: `aiops.client.routines`.
        """
        return {"recompute": False, "linear": self.linear, "routine": "direct"}

    def settings(self) -> dict[str, Any]:
        """Return the settings as plain values."""
        return dataclasses.asdict(self)

    @classmethod
    def make(cls, settings: Mapping[str, Any]) -> Self:
        """Make the algorithm from settings, given as values or as text (``--set key=value``).

        Raises
        ------
        UsageError
            When a setting is unknown (with the nearest that is known) or has no such value.
        """
        known = {field.name: field for field in dataclasses.fields(cls)}
        values = {}
        for key, value in settings.items():
            if key not in known:
                raise UsageError(f"{cls.name} has no setting {key!r}; {nearest(key, known)}")
            values[key] = _convert(cls.name, key, value, known[key].default)
        return cls(**values)

    @classmethod
    def described(cls) -> dict[str, str]:
        """Return what each setting means: from the page of the class, or else of a base of it."""
        found: dict[str, str] = {}
        for base in cls.__mro__:
            for name, text in _descriptions(inspect.cleandoc(base.__doc__ or "")):
                found.setdefault(name, text)
        return {field.name: found.get(field.name, "") for field in dataclasses.fields(cls)}

    @classmethod
    def own_settings(cls) -> list[str]:
        """Return the settings that its own page explains, or that it brought in itself."""
        explained = [name for name, _text in _descriptions(inspect.cleandoc(cls.__doc__ or ""))]
        own = dict.fromkeys([*explained, *vars(cls).get("__annotations__", ())])
        fields = {field.name for field in dataclasses.fields(cls)}
        return [name for name in own if name in fields]

    @classmethod
    def summary(cls) -> str:
        """Return the first line of its docstring."""
        return (inspect.getdoc(cls) or "").partition("\n")[0]


def _descriptions(page: str) -> Iterator[tuple[str, str]]:
    """Yield (setting, description) from the section "Settings" of a docstring."""
    _before, _heading, section = page.partition("Settings\n--------\n")
    names: list[str] = []
    lines: list[str] = []
    for line in [*section.splitlines(), ""]:
        if line.startswith("    "):
            lines.append(line.strip())
            continue
        yield from ((name, " ".join(lines)) for name in names)
        names, lines = [], []
        head, colon, _type = line.partition(" : ")
        if not colon:
            return
        names = [name.strip() for name in head.split(",")]


def _convert(algorithm: str, key: str, value: Any, default: Any) -> Any:
    """Read a setting as the type of its default."""
    try:
        if isinstance(default, bool):
            words = {"true": True, "yes": True, "1": True, "false": False, "no": False, "0": False}
            return words[str(value).lower()]
        if isinstance(default, int):
            if isinstance(value, float) and not value.is_integer():
                raise ValueError
            if not -(2**62) < int(value) < 2**62:
                raise ValueError
            return int(value)
        return type(default)(value)
    except (ValueError, TypeError, KeyError):
        kind = type(default).__name__
        raise UsageError(f"{algorithm}: {key} must be a {kind}, not {value!r}") from None
