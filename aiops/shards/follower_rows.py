"""The rows of tables that lie on a follower: served by an engine whose model has the tables alone.

A row's shard decides about it as one server does about all rows: it has a clock of each table, an
order of the pushes that it has received, and its own memory of the clients and the answers to their
pushes. No order of the lead's is needed, so pushes of several clients are under way on all shards
at once. Each push is sent to every shard, if need be without rows: so the clocks of all count the
same pushes, and where pushes do not race, learning rates, staleness and the optimiser's counts are
those of one server.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from aiops.algorithms.base import Algorithm
from aiops.common.frozen import value
from aiops.engine.admission import Admission
from aiops.engine.capture import settings_of
from aiops.engine.engine import Engine
from aiops.engine.events import (
    Applied,
    Apply,
    Effect,
    Event,
    Joined,
    Left,
    Options,
    Received,
    Reply,
    SnapshotDue,
    Warm,
)
from aiops.engine.receive import PushSink
from aiops.engine.registration import Definition, rows_bytes, rows_in
from aiops.engine.restore import Queued, ReadArray, restore
from aiops.errors import Unavailable, UsageError
from aiops.model.arena import aligned
from aiops.model.layout import Array, Bytes, Layout
from aiops.model.parts import LARGEST
from aiops.model.row_shards import GIVEN_ROWS, SPREAD_TABLES
from aiops.model.tables import Tables, share_of
from aiops.shards.counting import COUNTS
from aiops.shards.stored_rows import StoredRowsWork
from aiops.store.capture_job import CaptureJob
from aiops.store.resources import Resources
from aiops.store.updater import NONE
from aiops.wire.messages import PROTOCOL, Error, FetchRows, Hello, PushRows, Welcome
from aiops.wire.server_messages import LoadShard, ShardHello
from aiops.wire.sinks import Sink
from aiops.wire.traffic import Traffic


class FollowerRows:
    """The rows of one follower.

    Parameters
    ----------
    whole
        The model's tables.
    algorithm, options, machine
        Those of the follower.
    admission
        Of the rows that clients send; the shell knows its pools.
    shards
        The number of servers that the rows lie on.

    Attributes
    ----------
    tables
        The tables, as they are kept here.
    engine
        Decides about the rows. Its tickets are those of the follower's `Apply` with another sign.
    begun
        The kernels to compile.
    closed
        The reason for which pushes are refused, as a sentence; empty: they are taken.
    """

    def __init__(
        self,
        whole: Tables,
        algorithm: Algorithm,
        options: Options,
        machine: Resources,
        admission: Admission,
        shards: int,
    ) -> None:
        tables = Tables({named.name: share_of(named.table, shards) for named in whole.each})
        alone = replace(
            options,
            shards=1,
            spread_tables=True,
            budget=None,
            worker_budget=None,
            gate="",
            push_codec=(),
            fetch_codec=(),
            filter="off",  # the lead's, which look at no rows
            relay="",
        )
        self.engine = Engine(algorithm, alone, machine)
        self.engine.admission = admission
        training = self.engine.begin(Definition(Layout((), empty=True), aligned(0), tables))
        self.tables, self.closed = tables, ""
        self.begun = [effect for effect in training.begun if isinstance(effect, Warm)]
        self._capture: Apply | None = None  # the follower's, until it is done
        self._ticket = 0  # of that capture among the updates of rows

    def put(self, counts: Sequence[int], data: Bytes) -> None:
        """Begin with the rows that lie in memory, a number of each table.

        Raises
        ------
        ValueError
            When they are no rows of these tables.
        """
        try:
            given = rows_in(data, self.tables, counts) if counts else ()
            for store, rows in zip(self.engine.tables, given, strict=bool(counts)):
                store.put(*rows)
        except UsageError as error:
            raise ValueError(str(error)) from None

    # ------------------------------------------------------------ messages

    def sink_for(self, message: FetchRows | PushRows) -> Sink | None:
        """Return the sink of a message's payloads; None: no room now, wait with the engine."""
        return self.engine.admission.sink_for(message)

    def received(self, event: Received, hello: ShardHello) -> list[Effect]:
        """Handle a message about rows, of the client that has introduced itself like this."""
        message = event.message
        last = self.last_push_of(hello.client) if self.closed else LARGEST
        if isinstance(message, PushRows) and message.seq > last:
            if isinstance(event.sink, PushSink):
                event.sink.free()
            refusal = Error(message.id, Unavailable.code, self.closed, {}, False)
            return [Reply(event.peer, refusal)]
        if self.engine.membership.at(event.peer) is None:
            self.engine.handle(joined(event.time, event.peer, hello))
        return self._translated(self.engine.handle(event))

    def last_push_of(self, client: str) -> int:
        """Return the highest number of a client's pushes; 0: none is known."""
        member = self.engine.membership.find(client)
        return 0 if member is None else member.last_seq

    def close(self, why: str) -> None:
        """Refuse pushes from here on, for this reason; empty: take them again."""
        self.closed, training = why, self.engine.training
        if training is not None and training.rows_shortcut is not None:
            training.rows_shortcut.closed = bool(why)

    def applied(self, event: Applied) -> list[Effect]:
        """Take the result of a job."""
        return self._translated(self.engine.handle(replace(event, ticket=-event.ticket)))

    def left(self, time: float, peer: int) -> None:
        """Send nothing more to a connection that has ended."""
        self.engine.handle(Left(time, peer))

    def send_all(self, id: int, lead: int, time: float) -> list[Effect]:
        """Send the lead all rows, when the turn of that has come among the updates."""
        training = self.engine.training
        assert training is not None, "there are tables"
        work = StoredRowsWork(self.engine.tables, id, lead)
        return self._translated(training.updates.work(work, time))

    def counts(self) -> dict[str, dict[str, int]]:
        """Return, by table, the counts that are sums over all shards."""
        lines = [table.report() for table in self.engine.tables]
        return {line["name"]: {name: line[name] for name in COUNTS} for line in lines}

    # ------------------------------------------------------------ captures and replay

    def capture(self, apply: Apply, time: float) -> list[Effect]:
        """Have a capture of the follower's state take its turn among the updates of rows."""
        assert isinstance(apply.job, CaptureJob), "it is a capture"
        self._capture = apply
        return self._translated(self.engine.handle(SnapshotDue(time, apply.job.row)))

    def captured(self, event: Applied) -> list[Effect]:
        """Go on with the updates of rows, if a job that is done was that capture."""
        if self._capture is None or event.ticket != self._capture.ticket:
            return []
        self._capture = None
        return self._translated(self.engine.handle(replace(event, ticket=self._ticket)))

    def replay(self, event: Event) -> list[Effect]:
        """Handle an event of the journal's; return the jobs that follow."""
        if isinstance(event, Joined) and self.engine.membership.at(event.peer) is not None:
            self.engine.handle(Left(event.time, event.peer))  # of an earlier start
        return self._translated(self.engine.handle(event))

    def restore(self, owners: Mapping[str, Any], read: ReadArray, queued: Queued) -> list[Effect]:
        """Continue from a capture, with the pushes that are queued; return the jobs that follow.

        Raises
        ------
        UsageError, DamagedState
            As of `aiops.engine.restore.restore`.
        """

        def rows_alone(name: str, array: Array) -> None:
            if name.startswith("table/"):  # all else has no elements: there are no tensors
                read(name, array)

        captured = _Captured(settings_of(self.engine), owners)
        effects = restore(self.engine, captured, rows_alone, queued)
        self.begun = [effect for effect in effects if isinstance(effect, Warm)]
        [ticket] = [effect.ticket for effect in effects if isinstance(effect, Apply)]
        return self._translated(self.engine.handle(Applied(self.engine.now, ticket, NONE)))

    def end_replay(self) -> None:
        """Have every client leave: their connections are gone."""
        if self.engine.training is not None:
            self.engine.training.abandon()
        for peer in self.engine.membership.peers():
            self.engine.handle(Left(self.engine.now, peer))

    # ------------------------------------------------------------ effects

    def _translated(self, effects: Sequence[Effect]) -> list[Effect]:
        """Return the follower's effects: answers about rows, and jobs."""
        found = list[Effect]()
        for effect in effects:
            if isinstance(effect, Apply) and isinstance(effect.job, CaptureJob):
                assert self._capture is not None, "it was ordered"
                self._ticket = effect.ticket
                found.append(self._capture)
            elif isinstance(effect, Apply):
                found.append(Apply(-effect.ticket, effect.job))
            elif isinstance(effect, Reply) and not isinstance(effect.message, Welcome):
                found.append(effect)
        return found


@value
class _Captured:
    """The plain values of a capture of the rows."""

    settings: Mapping[str, Any]
    owners: Mapping[str, Any]


def joined(time: float, peer: int, hello: ShardHello) -> Joined:
    """Return the event with which a client joins that has introduced itself like this."""
    greeting = Hello(
        id=0,
        protocol=PROTOCOL,
        client=hello.client,
        epoch=hello.epoch,
        name=hello.name,
        role="worker" if hello.worker else "observer",
        pongs=False,
        nonce=hello.nonce,
        agent=hello.agent,
        run=hello.run,
    )
    return Joined(time, peer, greeting, b"", Traffic())


def tables_of(order: LoadShard) -> Tables | None:
    """Return the tables whose rows an order spreads over all shards; None: it spreads none.

    Raises
    ------
    ValueError
        When they make no sense.
    """
    described = order.plan.get(SPREAD_TABLES, ())
    if not described:
        return None
    try:
        return Tables.from_description(described, [row[0] for row in order.model])
    except (TypeError, UsageError) as error:
        raise ValueError(f"its tables make no sense: {error}") from None


def rows_given(order: LoadShard) -> tuple[list[int], int]:
    """Return how many rows of each table come with an order, and their bytes; none: no counts.

    Raises
    ------
    ValueError
        When the counts make no sense.
    """
    counts, tables = order.plan.get(GIVEN_ROWS, ()), tables_of(order)
    if not counts:
        return [], 0
    if tables is None or not isinstance(counts, tuple) or len(counts) != len(tables):
        raise ValueError("it brings rows of other tables than the model has")
    if not all(
        type(count) is int and 0 <= count <= named.table.rows
        for count, named in zip(counts, tables.each, strict=True)
    ):
        raise ValueError("it brings more rows of a table than that has")
    return [*counts], rows_bytes(tables, counts)
