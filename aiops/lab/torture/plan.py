"""The plan of a trial: all that its seed decides."""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np

from aiops.lab.torture.checker import DIGITS, CellRange, Factors
from aiops.model.layout import Array
from aiops.net.faulty_disk import points

_SHARDED = (
    *("asgd", "ssp", "sasgd", "softsync", "fasgd", "hardsync", "momentum", "adam"),
    "schedule-free",
)


class _Layout(NamedTuple):
    """The servers of a trial: a second site has standbys of the first one's shards."""

    sites: int
    shards: int
    targets: tuple[tuple[int, ...], ...]
    """What is killed together: never a server and its standby, as a promotion needs one of them."""


LAYOUTS: Mapping[str, _Layout] = {
    "single": _Layout(1, 1, ((0,),)),
    "standby": _Layout(2, 1, ((0,), (0,), (1,))),
    "shards": _Layout(1, 2, ((0,), (0,), (0,), (1,), (1,), (0, 1))),
    "three shards": _Layout(1, 3, ((0,), (1,), (2,), (1, 2), (0, 2), (0, 1, 2))),
    "shards with standbys": _Layout(2, 2, ((0, 1), (0, 1), (0,), (1,), (2,), (3,), (2, 3))),
}

_CODED = 300
_TINY, _LENT = 0, 12_288  # cells; what is above 64 KiB is lent through shared memory


def inverse(staleness: Array) -> Array:
    """Return the factors of `SASGD`."""
    return 1 / np.maximum(staleness, 1)


def exponential(staleness: Array) -> Array:
    """Return the factors of `Exponential`."""
    return np.exp(-0.1 * staleness)


def one(staleness: Array) -> Array:
    """Return 1 for each push: it has a cell of its own, and its codec changes no power of two."""
    return np.ones_like(staleness)


@dataclass(frozen=True, slots=True)
class Variant:
    """A policy with its settings, and the way it is checked.

    Attributes
    ----------
    flags
        The server's.
    additive
        Whether the model is a sum of pushes: then each push is counted by its amount.
    scale
        The number of pushes of which it takes the mean.
    scaled
        The factors of pushes that depend on their staleness: each has a cell of its own.
    own
        Whether the answer to a push has it applied.
    counted
        Whether it must be told the number of workers.
    means
        Whether each version adds the mean of a round of pushes: `mean_violations`.
    touched
        Whether a push changes its cell and no other: `touched_violations`.
    plain
        Whether workers push gradients as they are, whatever the policy has them do.
    local
        Whether workers have steps of their own: what a restart takes they push again, later.
    steady
        Whether its coded gradients are to be steady exchanges: of float32, of enough cells to be
        coded, at servers whose kernels are Numba's.
    """

    flags: tuple[str, ...]
    additive: bool = True
    scale: int = 1
    scaled: Factors | None = None
    own: bool = False
    counted: bool = False
    means: bool = False
    touched: bool = True
    plain: bool = False
    local: bool = False
    steady: bool = False

    @property
    def dtype(self) -> str:
        """The model's."""
        return "float32" if self.steady else "float64"

    @property
    def least(self) -> int:
        """The cells that the model has at least."""
        return _CODED if self.steady else 0

    @property
    def digits(self) -> int:
        """The pushes to a cell."""
        return DIGITS if self.additive and self.scaled is None else 1

    @property
    def tells(self) -> bool:
        """True if what ``--acks applied`` loses is told to the push."""
        return self.additive and self.scale == 1 and not (self.plain or self.local)


def _asgd(*flags: str, **given: Any) -> Variant:
    return Variant(("--policy", "asgd", *flags), **given)


def _set(policy: str, *settings: str, **given: Any) -> Variant:
    flags = (word for setting in settings for word in ("--set", setting))
    return Variant(("--policy", policy, *flags), **given)


VARIANTS: Mapping[str, Variant] = {
    "asgd": _set("asgd", "lr=1", own=True),
    "ssp": _set("ssp", "lr=1", "s=3", own=True),
    "sasgd": _set("sasgd", "lr=1", scaled=inverse),
    "softsync": _set("softsync", "lr=1", "modulate=none", scale=2, counted=True),
    "fasgd": _set("fasgd", additive=False),
    "hardsync": _set(
        "hardsync", "lr=1", "admission=wait", additive=False, counted=True, means=True
    ),
    "momentum": _set("asgd", "optimizer=momentum", additive=False),
    "adam": _set("asgd", "optimizer=adam", additive=False),
    "coded": _asgd("--push-codec", "topk:0.25", "--fetch-codec", "int8", additive=False),
    "schedule-free": _set("schedule-free", additive=False),
}
"""Those of simulated clusters, and of processes."""

_LOCAL = ("lr=1", "local_steps=1", "inner=sgd", "inner_lr=1", "optimizer=sgd")
_LR1 = ("--set", "lr=1")

PROCESS_VARIANTS: Mapping[str, Variant] = {
    **VARIANTS,
    "exponential": _set("exponential", "lr=1", "rho=0.1", scaled=exponential),
    "downpour": _set("downpour", "lr=1", "n_push=1", "n_fetch=1", local=True),
    "ringmaster": _set("ringmaster", "lr=1", "r=2"),
    "rennala": _set("rennala", "lr=1", "b=2", scale=2),
    "fedbuff": _set("fedbuff", *_LOCAL, "modulate=none", "k=2", scale=2),
    "diloco": _set("diloco", *_LOCAL, additive=False, counted=True, means=True),
    "no-delay": _set("no-delay", additive=False, counted=True, means=True, plain=True),
    "easgd": _set("easgd", "kappa=0.05", additive=False, plain=True),
    "eamsgd": _set("eamsgd", "kappa=0.05", additive=False, plain=True),
    "dcasgd": _set("dcasgd", additive=False),
    "gap-aware": _set("gap-aware", additive=False),
    "nesterov": _set("asgd", "optimizer=nesterov", additive=False),
    "adagrad": _set("asgd", "optimizer=adagrad", additive=False),
    "rmsprop": _set("asgd", "optimizer=rmsprop", additive=False),
    "adamw": _set("asgd", "optimizer=adamw", additive=False),
    "bf16": _asgd(*_LR1, "--push-codec", "bf16", "--fetch-codec", "bf16", scaled=one),
    "fp16": _asgd(*_LR1, "--push-codec", "fp16", "--fetch-codec", "fp16", scaled=one),
    "int8": _asgd(*_LR1, "--push-codec", "int8", "--fetch-codec", "int8", additive=False),
    "onebit": _asgd(*_LR1, "--push-codec", "onebit", additive=False, touched=False),
    "bf16-up": _asgd(*_LR1, "--push-codec", "bf16", scaled=one, steady=True),
    "int8-up": _asgd(*_LR1, "--push-codec", "int8", additive=False, steady=True),
}
"""Those of processes: all policies and optimisers but ``average``, whose server takes no push, and
all codecs but ``lowrank``, which needs matrices. With gates or several local steps a worker decides
what it pushes, so no push is a step, and none can be counted by it."""


@dataclass(frozen=True, slots=True)
class SecondKill:
    """Servers that are killed before what follows a kill of the lead is done.

    Attributes
    ----------
    amid
        ``promotion``: since its standby was asked to take its place; ``return``: since the servers
        of the old site were started as standbys of the new ones.
    seconds
        The time from then on.
    targets
        The servers that are killed together, as in `KillMoment`: the promoted lead is 0.
    """

    amid: str
    seconds: float
    targets: tuple[int, ...]


class LineCut(NamedTuple):
    """The line between a lead and its follower is cut, and healed.

    For ``seconds``; ``silent``: as when a cable is pulled, so that no connection ends; else they
    are reset.
    """

    seconds: float
    silent: bool


@dataclass(frozen=True, slots=True)
class KillMoment:
    """The moment at which a process is killed.

    Attributes
    ----------
    pushes
        The acknowledgements that clients see first: of a server since its start, of a worker its
        own.
    seconds
        And then this time; of an early one since it was started.
    early
        Whether it is killed whether or not it is ready.
    point, count
        The point of ``AIOPS_FAULTS`` at which it ends itself, and for which time, unless the rest
        comes first; empty: none.
    targets
        The servers that are killed together, by their numbers: those that serve, the lead first,
        and behind them their standbys in the same order.
    second
        The kill that follows at once, of servers that take the place of these.
    cut
        What is done in place of a kill.
    """

    pushes: int = 0
    seconds: float = 0.0
    early: bool = False
    point: str = ""
    count: int = 1
    targets: tuple[int, ...] = (0,)
    second: SecondKill | None = None
    cut: LineCut | None = None

    @property
    def kills(self) -> int:
        """The servers that are killed."""
        return len(self.targets) + (len(self.second.targets) if self.second else 0)


@dataclass(frozen=True, slots=True)
class TrialPlan:
    """One server, its workers, and the processes that are killed.

    Attributes
    ----------
    seed
        It decides all the rest. Instants are measured from events of real processes, so a trial
        that is repeated has the same plan, and not the same interleaving.
    variant
        A name of `VARIANTS`.
    near
        Whether workers use the machine's memory; False: TCP.
    acks
        The server's ``--acks``; empty: it has no ``--state``.
    workers
        Their number at any moment.
    moments
        When processes are killed, one after the other; of workers, for each life.
    pauses
        Seconds between the pushes of each worker.
    size
        The model's cells.
    cells
        Those of each worker.
    layout
        ``single``; ``standby``: a server and its standby; ``shards``: a lead and a follower;
        ``three shards``: a lead and two; ``shards with standbys``: a lead and a follower, and a
        standby of each.
    snapshot_every
        Seconds between snapshots.
    orderly
        Whether servers are asked to end, by SIGTERM, in place of being killed.
    """

    seed: int
    variant: str
    near: bool
    acks: str
    workers: int
    moments: tuple[KillMoment, ...]
    pauses: tuple[float, ...]
    size: int
    cells: int
    layout: str = "single"
    snapshot_every: float = 30.0
    orderly: bool = False

    @property
    def kills(self) -> int:
        """The processes that are killed, but for those that are killed together."""
        return len(self.moments) - self.cuts

    @property
    def sites(self) -> int:
        """2 with standbys, else 1."""
        return LAYOUTS[self.layout].sites

    @property
    def shards(self) -> int:
        """The servers that have a part of the model."""
        return LAYOUTS[self.layout].shards

    @property
    def cuts(self) -> int:
        """The times that the line between a lead and its first follower is cut."""
        return sum(moment.cut is not None for moment in self.moments)

    @property
    def lossy(self) -> bool:
        """True if acknowledged pushes may be lost, as clients are told."""
        return self.acks == "applied" and not self.orderly

    @property
    def checked(self) -> Variant:
        """The variant."""
        return PROCESS_VARIANTS[self.variant]

    def flags(self) -> list[str]:
        """Return the server's flags, but for its folder, its port and its peers."""
        flags = [*self.checked.flags, "--kernels", "auto" if self.checked.steady else "numpy"]
        if self.acks:
            flags += ["--acks", self.acks, "--snapshot-every", str(self.snapshot_every)]
        if self.shards > 1:
            flags += ["--shard-bytes", "1"]
        if self.checked.counted:
            flags += ["--workers", str(self.workers)]
        if self.variant == "softsync":
            flags += ["--set", f"n={self.workers // self.checked.scale}"]
        return flags if self.near else [*flags, "--no-shm"]

    def cells_of(self, life: int) -> CellRange:
        """Return the cells of a worker process, which are counted from 0."""
        return CellRange(life * self.cells, self.cells, self.checked.digits)


def draw_servers(seed: int, names: tuple[str, ...] = tuple(PROCESS_VARIANTS)) -> TrialPlan:
    """Return the plan of a trial in which servers are killed."""
    rng = random.Random(seed)
    variant = rng.choice(names)
    checked = PROCESS_VARIANTS[variant]
    sharded = ("shards", "shards with standbys") * (variant in _SHARDED)
    layout = rng.choice(("single",) * 16 + ("standby", *sharded))
    if layout == "shards" and random.Random(f"shards of {seed}").random() < 0.5:
        layout = "three shards"
    acks = rng.choice(("written", "written", "durable", *("applied",) * checked.tells))
    if LAYOUTS[layout].sites > 1:
        acks = "replicated"
    elif LAYOUTS[layout].shards > 1:
        acks = rng.choice(("written", "durable", *("applied",) * checked.tells))
    workers = rng.choice((2, 2, 4))
    cells = 128 if checked.digits > 1 else 768
    near = rng.random() < 0.5
    moments = [_server_moment(rng, layout) for _ in range(rng.randint(6, 14))]
    second = random.Random(f"second kills of {seed}")  # the rest is as without them
    if LAYOUTS[layout].sites > 1:
        moments = [_with_second(second, layout, moment) for moment in moments]
    if LAYOUTS[layout].sites == 1 < LAYOUTS[layout].shards:
        moments += [_cut(second) for _ in range(second.randint(0, 4))]
        second.shuffle(moments)
    return TrialPlan(
        seed,
        variant,
        near=near,
        acks=acks,
        workers=workers,
        moments=tuple(moments),
        pauses=tuple(rng.choice((0.0, 0.0005, 0.003)) for _ in range(workers)),
        size=max(
            *(cells * workers, rng.choice((_TINY, _TINY, _TINY, _LENT))),
            PROCESS_VARIANTS[variant].least,
        ),
        cells=cells,
        layout=layout,
        snapshot_every=rng.choice((0.02, 0.02, 0.2, 30.0)) if acks != "applied" else 0.02,
    )


def draw_endings(seed: int, names: tuple[str, ...] = tuple(PROCESS_VARIANTS)) -> TrialPlan:
    """Return the plan of a trial in which servers are asked to end.

    It is that of `draw_servers`, but for what happens to the servers: all that serve are asked to
    end at the same time, as a service manager does it, and none is killed amid what follows.
    """
    plan = draw_servers(seed, names)
    moments = tuple(
        KillMoment(moment.pushes, moment.seconds, moment.early, targets=tuple(range(plan.shards)))
        for moment in plan.moments
        if moment.cut is None
    )
    return replace(plan, moments=moments, orderly=True)


def _server_moment(rng: random.Random, layout: str) -> KillMoment:
    kind, (sites, shards, choices) = rng.random(), LAYOUTS[layout]
    targets = rng.choice(choices)
    if kind < 0.15 and sites == 1:  # shards may be going back to an earlier moment
        seconds = rng.uniform(0, 0.3 if shards > 1 else 0.1)
        return KillMoment(seconds=seconds, early=True, targets=targets)
    if kind < 0.4 and layout == "single":
        point = rng.choice(sorted(points()))
        count = rng.randint(1, 15) if point.startswith("journal.") else rng.choice((1, 1, 2, 3))
        return KillMoment(rng.randint(20, 30), point=point, count=count)
    return KillMoment(rng.randint(1, 25), _moment(rng), targets=targets)


def _with_second(rng: random.Random, layout: str, moment: KillMoment) -> KillMoment:
    """Return a moment, in half of all promotions with a kill amid what follows."""
    if 0 not in moment.targets or rng.random() < 0.5:
        return moment
    shards = LAYOUTS[layout].shards
    amid = rng.choice(("promotion", "promotion", "return"))
    there = [*range(shards)] if amid == "promotion" else [*range(2 * shards)]
    targets = tuple(sorted(rng.sample(there, rng.randint(1, len(there)))))
    seconds = rng.choice((rng.uniform(0, 0.01), rng.uniform(0, 0.05), rng.uniform(0, 0.3)))
    return replace(moment, second=SecondKill(amid, seconds, targets))


def _cut(rng: random.Random) -> KillMoment:
    longest = rng.choice((0.05, 0.5, 3.0))
    cut = LineCut(rng.uniform(0, longest), rng.random() < 0.5)
    return KillMoment(rng.randint(1, 25), _moment(rng), targets=(), cut=cut)


def _moment(rng: random.Random) -> float:
    return rng.choice((0.0, rng.uniform(0, 0.002), rng.uniform(0, 0.02)))


def draw_workers(seed: int, names: tuple[str, ...] = tuple(PROCESS_VARIANTS)) -> TrialPlan:
    """Return the plan of a trial in which workers are killed."""
    rng = random.Random(seed)
    variant = rng.choice(names)
    kills, workers = rng.randint(30, 60), rng.choice((2, 4))
    most = rng.choice((2, 8, 16))
    cells = 16 if PROCESS_VARIANTS[variant].digits > 1 else 32
    moments = []
    for _ in range(kills):
        if rng.random() < 0.15:
            moments.append(KillMoment(seconds=rng.uniform(0, 0.06), early=True))
        else:
            moments.append(KillMoment(rng.randint(0, most), _moment(rng) / 4))
    return TrialPlan(
        seed,
        variant,
        near=rng.random() < 0.5,
        acks=rng.choice(("", "", "written", "durable")),
        workers=workers,
        moments=tuple(moments),
        pauses=tuple(rng.choice((0.0, 0.0, 0.001)) for _ in range(kills + workers)),
        size=max(
            *(cells * (kills + workers), rng.choice((_TINY, _TINY, _TINY, _LENT))),
            PROCESS_VARIANTS[variant].least,
        ),
        cells=cells,
    )
