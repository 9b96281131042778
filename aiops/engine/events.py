"""Events (they happen to an engine), effects (it orders them) and the options it is run with.

Every event carries its time. The list of events is the journal: the same events give the same
parameters to the last bit, because the kernels are deterministic.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeAlias

import numpy as np

from aiops.common import failure_waits
from aiops.common.frozen import value
from aiops.errors import UsageError
from aiops.filters import choice
from aiops.model.arena import Arena
from aiops.model.layout import Array, Bytes, Ints
from aiops.model.placement import Placement
from aiops.model.tables import StoredTable
from aiops.store.capture_job import CaptureJob
from aiops.store.delta_replica import ReplicaJob
from aiops.store.evaluation import EvaluationJob
from aiops.store.parameters import MeasureJob, UpdateJob
from aiops.store.snapshots import Lease
from aiops.store.sparse_table import CopyRowsJob, TableJob
from aiops.wire.messages import Message
from aiops.wire.server_messages import Greeting
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
    tables: tuple[tuple[tuple[Any, ...], int], ...] = ()


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
    """A message is complete, its payloads in ``sink``; ``row``: of the journal, if there is one."""

    time: float
    peer: int
    message: Message
    sink: Sink | None = None
    row: int = 0


@value
class Left:
    """A connection ended."""

    time: float
    peer: int


@value
class Tick:
    """The time of a `WakeAt` has come."""

    time: float


@value
class Applied:
    """The outstanding `Apply` is done; ``sums`` is the result of its `Apply.run`."""

    time: float
    ticket: int
    sums: Ints


@value
class Stopping:
    """The server is going down: refuse further pushes, and answer the workers that wait.

    ``kept``: a successor goes on with this engine's state. It then answers those whose answers are
    held back: their gradients may be in the sum in progress, and must not be pushed again.
    """

    time: float
    kept: bool = False


@value
class Paused:
    """An administrator has paused pushes, for the reason ``why``; empty: they are taken again.

    Meanwhile they are refused as `Unavailable`, and no worker is overdue. All else goes on.
    """

    time: float
    why: str


@value
class Resumed:
    """The server was started again with the state of an earlier one: all connections are gone."""

    time: float
    generation: int


@value
class SnapshotDue:
    """A snapshot is to be taken, at a point of the sequence of updates.

    No further update is begun until the outstanding one is done, and a `CaptureJob` of this
    ``number`` has run in the place of the next. Everything else goes on.
    """

    time: float
    number: int


@value
class CopyDue:
    """A copy of the model is to be made, as it is where the model is evaluated.

    The effect `Copied` follows at once, or when what is outstanding is done.
    """

    time: float


@value
class BudgetTick:
    """The traffic under a bandwidth budget since the last such event, about 0.1 s ago.

    ``nbytes`` crossed, both ways; ``second`` of them and before in the last second, ``peak`` in the
    busiest second so far (0 without a budget for all together); ``backlog`` bytes wait; ``busy``
    connections have a message on its way; ``limited``: a connection had to wait meanwhile.
    """

    time: float
    nbytes: int
    second: int = 0
    peak: int = 0
    backlog: int = 0
    busy: int = 0
    limited: bool = False


@value
class Committed:
    """All rows of the journal up to this one are what an acknowledgement promises (``--acks``)."""

    time: float
    row: int


@value
class JournalEnded:
    """The journal cannot be written any more; ``why`` is a sentence."""

    time: float
    why: str


@value
class SnapshotWritten:
    """A snapshot is on the disk: it has all events up to this row.

    ``why``: the reason for which it is not, a sentence.
    """

    time: float
    row: int
    why: str = ""


@value
class Reported:
    """A follower's message has arrived at its lead, its payloads in ``sink``."""

    time: float
    shard: int
    message: Message
    sink: Sink | None = None


@value
class Lost:
    """A follower of this lead is lost; ``why`` is a sentence that names it."""

    time: float
    shard: int
    why: str


Event: TypeAlias = (
    Initialised
    | Joined
    | Received
    | Left
    | Tick
    | Applied
    | Stopping
    | Paused
    | Resumed
    | SnapshotDue
    | CopyDue
    | BudgetTick
    | Committed
    | JournalEnded
    | SnapshotWritten
    | Reported
    | Lost
)

# ---------------------------------------------------------------- effects


class LyingRows(Protocol):
    """Rows of tables that are sent as they lie in memory."""

    @property
    def answer(self) -> memoryview:
        """The bytes to send."""

    def answer_later(self) -> Bytes:
        """Return the same as an array, which owns the memory."""

    def free(self) -> None:
        """Put the memory back: it is not needed."""


@value
class Reply:
    """Send a message.

    The payloads of its parts are in the parameters that ``lease`` holds, or in the sink ``rows``.
    Whether it can be sent or not, the lease is then released, or the sink freed.
    """

    peer: int
    message: Message
    lease: Lease | None = None
    rows: LyingRows | None = None


Job: TypeAlias = (
    UpdateJob | TableJob | CopyRowsJob | ReplicaJob | EvaluationJob | CaptureJob | MeasureJob
)
"""What runs on any thread, one at a time."""


@value
class Copied:
    """Copy the parameters that ``lease`` holds, then release it: a copy was due.

    No job is outstanding until this effect is carried out, so tables are as they are then.
    """

    lease: Lease


class Collection(Protocol):
    """A version of a model that is collected from its servers.

    Attributes
    ----------
    arena
        All of it, when it is ``done`` without a ``failure``.
    version
        Its number.
    failure
        The reason why it cannot be collected.
    on_change
        Called when something has come, and when it has failed.
    """

    arena: Arena
    version: int
    failure: str
    on_change: Callable[[], None]

    @property
    def late(self) -> set[int]:
        """The shards that have not sent all."""

    @property
    def done(self) -> bool:
        """True if no portion is waited for any more: all have come, or it has failed."""

    def with_rows(self, mine: Sequence[StoredTable]) -> Sequence[StoredTable]:
        """Return the rows of tables on all servers, given those on the lead."""

    def fail(self, why: str) -> None:
        """End it without all portions, for this reason."""


@value
class Collected:
    """Copy the version that is being collected, when it is done.

    Only a lead of several shards has this effect, in the place of `Copied`. The orders for the
    others' portions come before.
    """

    collection: Collection


@value
class Apply:
    """Run a kernel (`run`, on any thread), then post `Applied` with its result."""

    ticket: int
    job: Job

    @property
    def run(self) -> Callable[[], Ints]:
        """The function to call; its result becomes `Applied.sums`."""
        return self.job.run


def _nothing() -> None:
    pass


@value
class Warm:
    """Compile the kernels (`steps`, in order, on any thread); `Apply` does not wait for it.

    When the server ends, or one fails, steps that have not begun may be omitted: one may take
    seconds. Then, as after the last one, `over` is called; it may be called again.
    """

    steps: Sequence[Callable[[], object]]
    over: Callable[[], object] = _nothing

    def run(self) -> None:
        """Take all steps."""
        try:
            for step in self.steps:
                step()
        finally:
            self.over()


@value
class Drop:
    """Close a connection."""

    peer: int
    why: str


@value
class WakeAt:
    """Post a `Tick` at this time, or soon after."""

    time: float


@value
class Note:
    """A line for the log."""

    text: str


@value
class Shares:
    """Set the weights by which these connections share the bandwidth budget: (peer, weight)."""

    weights: tuple[tuple[int, float], ...]


@value
class SetBudget:
    """Keep to these bandwidth budgets from here on: bytes per second of all clients, and of each.

    ``None``: there is none. They are this server's shares of the budgets of a model on several.
    """

    total: int | None
    each: int | None


@value
class DistributeModel:
    """The model is defined: send each follower its part of ``data``, which is the whole model.

    The first part is the engine's own. Only an engine of several shards has this effect. ``rows``:
    of each table, the ids and values of the rows that it begins with, if they are given; where rows
    lie on all shards, each gets its own.
    """

    placement: Placement
    data: Bytes
    rows: Sequence[tuple[Ints, Array]] = ()


@value
class Order:
    """Send an order to a follower of this lead; ``payloads`` are the views of its parts."""

    shard: int
    message: Message
    payloads: tuple[tuple[memoryview, ...], ...] = ()


@value
class End:
    """End the server; ``why``: the reason if it is an error."""

    why: str = ""


Effect: TypeAlias = (
    Reply
    | Copied
    | Collected
    | Apply
    | Warm
    | Drop
    | WakeAt
    | Note
    | Shares
    | SetBudget
    | DistributeModel
    | Order
    | End
)

OnApplied: TypeAlias = Callable[[Ints, float], list[Effect]]
"""Takes the result of a job, at a time, and returns the effects that follow."""


# ---------------------------------------------------------------- how an engine is run


_VERSIONS = 64 << 20
"""Bytes of versions that may be sent at once, even if they are more than `Options.live`."""

_DECIDING = (
    *("workers", "worker_deadline", "max_model", "heartbeat", "budget", "worker_budget", "gate"),
    *("recall", "push_codec", "fetch_codec", "fetch_lag", "shards", "shard_bytes"),
    *("spread_tables", "filter"),
)
"""The options that decide what the engine does. The others name the run or its relay, tell workers
how to reach each other, or decide how fast it is: ``live`` and ``backend``. ``relaxed`` reads are
not recorded."""


@dataclass(frozen=True, slots=True)
class Options:
    """The settings of a server, beside its algorithm.

    ``workers``: the number that take part (None: any). ``worker_deadline``: seconds a barrier waits
    for one worker. ``live``: as `live_of` has it. ``relaxed``: reads
    may mix versions. ``max_model``: bytes. ``backend``: the kernels used. ``heartbeat``: seconds of
    silence after which a client is pinged. ``run``: the run's name, random (clients find it in the
    welcome, and so notice another run). ``budget``, ``worker_budget``: bytes per second, both ways,
    of all clients together and of each. ``gate``: `aiops.bandwidth.gates.find` knows it.
    ``recall``: bytes of gradients kept to be applied again. ``push_codec``, ``fetch_codec``:
    `aiops.codecs.choice.CodecChoice` reads them. ``fetch_lag``: the most versions that coded
    parameters may be behind, 0: chosen by the server. ``shards``: the number of servers that the
    model is spread over, this one included. ``shard_bytes``: the least bytes that a server holds; a
    small model is spread over fewer servers. ``spread_tables``: the rows of tables are spread over
    them, too, by the hash of their numbers. ``filter``: as `aiops.filters.choice.chosen` takes it.
    ``relay``, ``relay_token``: the ``host:port`` of the relay through which workers that average
    reach each other, and what it shares with this server. ``tls``: they speak TLS to each other.
    ``watched``: workers are to say how long they have computed and waited, for people.
    """

    workers: int | None = None
    worker_deadline: float = 300.0
    live: int = 16
    relaxed: bool = False
    max_model: int = 8 << 30
    backend: str = "auto"
    heartbeat: float = failure_waits.DEFAULT
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
    spread_tables: bool = False
    filter: str = "off"
    relay: str = ""
    relay_token: str = field(default="", repr=False)
    tls: bool = False
    watched: bool = False

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
        choice.chosen(self.filter)

    @property
    def table_shards(self) -> int:
        """The number of servers that the rows of a table lie on."""
        return self.shards if self.spread_tables else 1

    def live_of(self, nbytes: int) -> int:
        """Return the most versions of ``nbytes`` parameters that may be sent at once."""
        return max(self.live, _VERSIONS // max(nbytes, 1))

    def deciding(self) -> dict[str, Any]:
        """Return the options that a replay needs, because the engine decides by them."""
        return {name: getattr(self, name) for name in _DECIDING}
