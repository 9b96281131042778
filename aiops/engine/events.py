"""What happens to an engine (events) and what it wants done (effects).

Every event carries its time. The list of events is the journal: the same events give the same
effects and, because the kernels are deterministic, the same parameters to the last bit.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import numpy as np

from aiops.common.frozen import value
from aiops.engine.table_receive import RowsSink
from aiops.errors import UsageError
from aiops.model.layout import Bytes, Ints
from aiops.model.placement import Placement
from aiops.store.delta_replica import ReplicaJob
from aiops.store.parameters import UpdateJob
from aiops.store.snapshots import Lease
from aiops.store.sparse_table import TableJob
from aiops.wire.messages import Greeting, Message
from aiops.wire.sinks import Sink
from aiops.wire.traffic import Traffic

# ---------------------------------------------------------------- events


@value
class Initialised:
    """The model is given at start (``--init``): its rows and its bytes in arena order.

    ``tables``: each table as it is announced, with the number of its rows that are given. They
    follow in ``data``: per table their ids (int64), then the rows.
    """

    time: float
    rows: tuple[tuple[str, str, tuple[int, ...]], ...]
    data: np.ndarray[Any, np.dtype[np.uint8]]
    tables: tuple[tuple[tuple[str, int, int, str, str, float, int], int], ...] = ()


@value
class Joined:
    """A client passed the handshake on connection ``peer``."""

    time: float
    peer: int
    hello: Greeting
    proof: bytes = b""
    traffic: Traffic = field(default_factory=Traffic)


@value
class Received:
    """A whole message came, its payloads in ``sink``."""

    time: float
    peer: int
    message: Message
    sink: Sink | None = None


@value
class Left:
    """A connection ended."""

    time: float
    peer: int


@value
class Tick:
    """Time has passed, as a `WakeAt` asked for."""

    time: float


@value
class Applied:
    """The outstanding `Apply` is done; ``sums`` are its numbers."""

    time: float
    ticket: int
    sums: Ints


@value
class Stopping:
    """The server is going down: answer whoever waits, and take no more pushes."""

    time: float


@value
class BudgetTick:
    """What crossed under a bandwidth budget since the last such event, about 0.1 s ago.

    ``nbytes`` crossed, both ways; ``second`` of them and before in the last second, ``peak`` in the
    busiest second so far (0 without a budget for all together); ``backlog`` bytes wait; ``busy``
    connections have a message on its way; ``pressed``: somebody waited meanwhile.
    """

    time: float
    nbytes: int
    second: int = 0
    peak: int = 0
    backlog: int = 0
    busy: int = 0
    pressed: bool = False


@value
class Told:
    """A follower of this lead says something, its payloads in ``sink``."""

    time: float
    shard: int
    message: Message
    sink: Sink | None = None


@value
class Lost:
    """A follower of this lead is gone: why, in a sentence that names it."""

    time: float
    shard: int
    why: str


Event: TypeAlias = (
    Initialised | Joined | Received | Left | Tick | Applied | Stopping | BudgetTick | Told | Lost
)

# ---------------------------------------------------------------- effects


@value
class Reply:
    """Send a message; a lease holds the parameters that its parts stand for, or ``rows`` do."""

    peer: int
    message: Message
    lease: Lease | None = None
    rows: RowsSink | None = None


@value
class Apply:
    """Run a kernel (`run`, on any thread) and come back with `Applied`."""

    ticket: int
    job: UpdateJob | TableJob | ReplicaJob

    @property
    def run(self) -> Callable[[], Ints]:
        """What to call; its result is `Applied.sums`."""
        return self.job.run


@value
class Warm:
    """Make the kernels ready (`steps`, in order, on any thread); `Apply` does not wait for it.

    What is left may be left undone when the server ends: a step may take seconds.
    """

    steps: Sequence[Callable[[], object]]

    def run(self) -> None:
        """Do all of it."""
        for step in self.steps:
            step()


@value
class Drop:
    """Close a connection."""

    peer: int
    why: str


@value
class WakeAt:
    """Send a `Tick` at this time (or later, but soon)."""

    time: float


@value
class Note:
    """Something a person should know: for the log."""

    text: str


@value
class Shares:
    """Weigh these connections anew in the line for the bandwidth budget."""

    weights: tuple[tuple[int, float], ...]


@value
class DistributeModel:
    """The model is defined: the followers are to be handed their parts of it, ``data`` as a whole.

    The first part is the engine's own.
    """

    placement: Placement
    data: Bytes


@value
class Order:
    """Tell a follower of this lead something; ``payloads`` are the views of its parts."""

    shard: int
    message: Message
    payloads: tuple[tuple[memoryview, ...], ...] = ()


@value
class End:
    """The server is to end; ``why``, if it is not as it should be."""

    why: str = ""


Effect: TypeAlias = (
    Reply | Apply | Warm | Drop | WakeAt | Note | Shares | DistributeModel | Order | End
)


# ---------------------------------------------------------------- how an engine is run


_BANDWIDTH = ("gate", "recall", "push_codec", "fetch_codec", "fetch_lag")


@dataclass(frozen=True, slots=True)
class Options:
    """How a server is run, beside its algorithm.

    ``workers``: how many take part (None: any number). ``worker_deadline``: seconds a barrier
    waits for one worker. ``live``: at most so many versions of the parameters alive. ``relaxed``:
    reads may mix versions. ``max_model``: bytes. ``backend``: which kernels. ``heartbeat``: seconds
    of silence after which a client is pinged (clients are told, so that they look in time).
    ``run``: what this run is called, random (clients are told, so that they notice another).
    ``budget``, ``worker_budget``: bytes per second, both ways, of all clients together and of each.
    ``gate``: `aiops.bandwidth.gates.find` knows it. ``recall``: bytes of gradients kept to be
    applied again.
    ``push_codec``, ``fetch_codec``: `aiops.codecs.choice.CodecChoice` reads them. ``fetch_lag``: by
    how many versions coded parameters may be behind, 0: as many as seems best. ``shards``: how many
    servers the model is spread over, this one included. ``shard_bytes``: over fewer, where one
    would hold less than so many bytes.
    """

    workers: int | None = None
    worker_deadline: float = 300.0
    live: int = 8
    relaxed: bool = False
    max_model: int = 8 << 30
    backend: str = "auto"
    heartbeat: float = 20.0
    run: str = ""
    budget: int | None = None
    worker_budget: int | None = None
    gate: str = ""
    recall: int = 256 << 20
    push_codec: tuple[str, ...] = ()
    fetch_codec: tuple[str, ...] = ()
    fetch_lag: int = 0
    shards: int = 1
    shard_bytes: int = 1 << 20

    def __post_init__(self) -> None:
        """Check the values."""
        for name in (
            *("workers", "worker_deadline", "live", "max_model", "budget", "worker_budget"),
            "shard_bytes",
        ):
            value = getattr(self, name)
            if value is not None and value <= 0:
                raise UsageError(f"{name} must be more than 0, not {value}")
        for name in ("recall", "fetch_lag"):
            if getattr(self, name) < 0:
                raise UsageError(f"{name} must be 0 or more, not {getattr(self, name)}")

    def deciding(self) -> dict[str, Any]:
        """Return those by which the engine decides, for a replay."""
        names = ("workers", "worker_deadline", "budget", "worker_budget", *_BANDWIDTH)
        return {name: getattr(self, name) for name in names}
