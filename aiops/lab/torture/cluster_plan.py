"""The plan of a simulated cluster: all that its seed decides."""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from aiops.lab.torture.checker import DIGITS, CellRange
from aiops.lab.torture.plan import VARIANTS, Variant
from aiops.lab.torture.spread_rows import SPREAD
from aiops.net.faulty_disk import points

KINDS = (
    *("cut", "silence", "pause", "kill worker", "crash", "power", "crash at", "power at"),
    *("full disk", "slow disk", "stop", "delay", "clock"),
)
"""The faults of a cluster."""

PROMOTION = "promote"
"""The fault of a cluster with a standby: that is promoted, whether or not the server lives."""

PLACE = "place"
"""The fault of shards with standbys: a follower crashes, and its standby is to take its place."""

_STANDBYS = 0.25  # of all clusters: they take twice the time
_SHARDS = 0.25  # of those with a standby, and of the others

_ROWS = 0.5  # of those with shards, and of policies that take tables: rows are spread over them

_SHARD_CELLS = 8  # for each shard at the least: a shard's bytes are a multiple of 64

_LONGEST = 4.0  # virtual seconds in which faults come, and workers push


@dataclass(frozen=True, slots=True)
class ClusterFault:
    """One fault.

    Attributes
    ----------
    time
        Virtual seconds from the beginning.
    kind
        One of `KINDS`, `PROMOTION` or `PLACE`.
    target
        The host of the network's faults, and the number of the worker that is killed.
    seconds
        The time that it lasts; of a server, until it is started again; of a clock, for which it
        jumps ahead. A delay is a tenth of it.
    point, count
        The point at which the server crashes, and for which time.
    boot
        The time on the clock of a machine that starts after it.
    machine
        Of the server's faults: 0, the one that is to serve; 1, its standby, if there is one.
    shard
        With shards: 0, the lead, or the number of a follower.
    """

    time: float
    kind: str
    target: int = 0
    seconds: float = 0.0
    point: str = ""
    count: int = 1
    boot: float = 0.0
    machine: int = 0
    shard: int = 0


@dataclass(frozen=True, slots=True)
class ClusterPlan:
    """A server or its shards, their workers, the network and the faults.

    Attributes
    ----------
    seed
        It decides all the rest, and every interleaving.
    variant
        A name of `VARIANTS`.
    acks
        The server's ``--acks``.
    workers, kills
        Their number at any moment, and how many of them are killed and replaced.
    pushes
        The most of each worker: it pushes until the faults end, and ``last`` times after that.
    cells
        The places of one worker's pushes; on shards each push has its own, so that all shards have
        some.
    pauses
        Virtual seconds between the pushes of each worker.
    latency, jitter
        Virtual seconds, of every host.
    pieces
        The most bytes that arrive at once; 0: all there are.
    snapshot_every, sync_seconds
        Virtual seconds between snapshots, and those that a sync takes.
    threads
        Whether the threads of the disk take turns with the server at each of its operations.
    faults
        In the order of their times.
    last
        The pushes of each worker after the faults have ended.
    standby
        Whether the server has a standby.
    naive
        Whether a server whose standby was promoted is started as if it were to serve.
    deadline
        The server's ``--standby-deadline``, in virtual seconds.
    shards
        The servers that the model is spread over, each on a machine of its own.
    late
        Virtual seconds before each of them is started for the first time.
    rows
        Whether every other push is one of rows of a table that are spread over the shards.
    """

    seed: int
    variant: str
    acks: str
    workers: int
    pushes: int
    cells: int
    pauses: tuple[float, ...]
    latency: float
    jitter: float
    pieces: int
    snapshot_every: float
    sync_seconds: float
    threads: bool
    faults: tuple[ClusterFault, ...]
    last: int = 3
    standby: bool = False
    naive: bool = False
    deadline: float = 10.0
    shards: int = 1
    late: tuple[float, ...] = ()
    rows: bool = False

    @property
    def kills(self) -> int:
        """The number of workers that are killed."""
        return sum(fault.kind == "kill worker" for fault in self.faults)

    @property
    def checked(self) -> Variant:
        """The variant."""
        return VARIANTS[self.variant]

    @property
    def size(self) -> int:
        """The model's cells."""
        least = _SHARD_CELLS * self.shards if self.shards > 1 else 0
        return max(self.cells * (self.workers + self.kills), least)

    @property
    def lossy(self) -> bool:
        """True if acknowledged pushes may be lost, of which their workers are told."""
        kinds = {fault.kind for fault in self.faults}
        if self.standby:
            return self.acks != "replicated" or "full disk" in kinds
        if self.acks == "durable":
            return "full disk" in kinds
        return self.acks == "applied" or bool(kinds & {"power", "power at", "full disk"})

    def cells_of(self, life: int) -> CellRange:
        """Return the cells of a worker, which are counted from 0."""
        own = self.checked.scaled or self.shards > 1
        return CellRange(life * self.cells, self.cells, 1 if own else DIGITS)

    def settings(self) -> dict[str, Any]:
        """Return the server's settings."""
        flags = self.checked.flags
        named = [(flags[at], flags[at + 1]) for at in range(0, len(flags), 2)]
        found: dict[str, Any] = {
            flag.removeprefix("--").replace("-", "_"): text
            for flag, text in named
            if flag != "--set"
        }
        chosen = [text for flag, text in named if flag == "--set"]
        if self.variant == "softsync":
            chosen.append(f"n={self.workers // self.checked.scale}")
        if self.checked.counted:
            found["workers"] = self.workers
        return {
            **found,
            "set": chosen,
            "kernels": "numpy",
            "state": "state",
            "acks": self.acks,
            "snapshot_every": self.snapshot_every,
            "worker_deadline": 5.0,
            **({"standby_deadline": self.deadline} if self.standby else {}),
            **({"shard_bytes": 1} if self.shards > 1 else {}),
            **({"spread_tables": True} if self.rows else {}),
        }


def draw_cluster(seed: int, names: tuple[str, ...] = tuple(VARIANTS)) -> ClusterPlan:
    """Return the plan of a simulated cluster."""
    rng = random.Random(f"cluster {seed}")
    variant, workers = rng.choice(names), rng.choice((2, 2, 3, 4))
    if variant == "softsync":
        workers = rng.choice((2, 4))
    pushes = rng.randint(11, 27)
    faults = sorted(
        (_fault(rng, workers) for _ in range(rng.choice((0, 1, 3, 6, 10)))), key=lambda f: f.time
    )
    plan = ClusterPlan(
        seed,
        variant,
        acks=rng.choice(("applied", "written", "durable", "durable")),
        workers=workers,
        pushes=pushes,
        cells=pushes if VARIANTS[variant].scaled else -(-pushes // DIGITS),
        pauses=tuple(rng.choice((0.1, 0.5, 1.0)) * _LONGEST / pushes for _ in range(workers)),
        latency=rng.choice((0.0, 0.001, 0.05)),
        jitter=rng.choice((0.0, 0.0, 0.02)),
        pieces=rng.choice((0, 0, 200)),
        snapshot_every=rng.choice((0.3, 1.0, 5.0)),
        sync_seconds=rng.choice((0.0, 0.001, 0.02)),
        threads=rng.random() < 0.1,  # they take time
        faults=tuple(faults),
    )
    if random.Random(f"standby {seed}").random() < _STANDBYS:
        plan = _with_standby(plan)
    return _with_shards(plan) if random.Random(f"shards {seed}").random() < _SHARDS else plan


def _with_standby(plan: ClusterPlan) -> ClusterPlan:
    """Return a plan with a standby, of which more faults befall the servers."""
    rng = random.Random(f"promotions {plan.seed}")
    faults = [replace(fault, machine=rng.choice((0, 0, 1))) for fault in plan.faults]
    faults += [
        ClusterFault(rng.uniform(0.5, _LONGEST), PROMOTION, -1)
        for _ in range(rng.choice((0, 1, 1, 2, 3)))
    ]
    acks = rng.choice(("replicated",) * 4 + ("written", "durable"))
    return replace(
        plan,
        acks=acks,
        faults=tuple(sorted(faults, key=lambda fault: fault.time)),
        standby=True,
        naive=rng.random() < 0.4,
        deadline=1e6 if acks == "replicated" else rng.choice((0.5, 10.0)),
    )


def _with_shards(plan: ClusterPlan) -> ClusterPlan:
    """Return a plan with shards, of which some faults befall several at about the same time."""
    rng = random.Random(f"faults of shards {plan.seed}")
    shards = rng.choice((2, 2, 3, 4))
    faults = [replace(fault, shard=rng.randrange(shards)) for fault in plan.faults]
    for fault in (fault for fault in (*faults,) if fault.kind != PROMOTION):
        if rng.random() < 0.3:
            time = fault.time + rng.choice((0.0, 0.01, 0.1))
            others = rng.sample(range(shards), rng.randint(1, shards))
            faults += [replace(fault, time=time, shard=shard) for shard in others]
    faults += _places(plan, shards) if plan.standby else []
    return replace(
        plan,
        faults=tuple(sorted(faults, key=lambda fault: fault.time)),
        shards=shards,
        cells=plan.pushes,
        rows=plan.variant in SPREAD and random.Random(f"rows {plan.seed}").random() < _ROWS,
        late=tuple(rng.choice((0.0, 0.0, 0.1, 3.0)) for _ in range(shards)),
    )


def _places(plan: ClusterPlan, shards: int) -> list[ClusterFault]:
    """Return the places that standbys of followers are to take."""
    rng = random.Random(f"places {plan.seed}")
    return [
        ClusterFault(
            *(rng.uniform(0.5, _LONGEST), PLACE, -1),
            *(rng.choice((0.0, 0.1, 1.0, 3.0, 8.0)), ""),
            shard=rng.randrange(1, shards),
        )
        for _ in range(rng.choice((0, 1, 1, 2, 4)))
    ]


def parsed(plan: Mapping[str, Any]) -> ClusterPlan:
    """Return the plan that `dataclasses.asdict` made a record of."""
    faults = tuple(ClusterFault(**fault) for fault in plan["faults"])
    lists = {"pauses": tuple(plan["pauses"]), "late": tuple(plan.get("late", ()))}
    return ClusterPlan(**{**plan, **lists, "faults": faults})


def _fault(rng: random.Random, workers: int) -> ClusterFault:
    return ClusterFault(
        rng.uniform(0.0, _LONGEST),
        rng.choice(KINDS),
        rng.randrange(-1, workers),
        rng.choice((0.0, 0.0, 0.1, 0.1, 0.1, 1.0, 1.0, 3.0, 3.0, 8.0, 8.0, 40.0)),
        rng.choice(list(points())),
        rng.choice((1, 1, 2, 5, 20)),
        rng.choice((0.0, 3.0, 1e5)),
    )
