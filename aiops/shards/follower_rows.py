"""The rows of tables that lie on a follower: served by an engine whose model has the tables alone.

A row's shard decides about it as one server does about all rows: it has a clock of each table, an
order of the pushes that it has received, and its own memory of the clients and the answers to their
pushes. No order of the lead's is needed, so pushes of several clients are under way on all shards
at once. Each push is sent to every shard, if need be without rows: so the clocks of all count the
same pushes, and where pushes do not race, learning rates, staleness and the optimiser's counts are
those of one server.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from aiops.algorithms.base import Algorithm
from aiops.engine.admission import Admission
from aiops.engine.engine import Engine
from aiops.engine.events import Applied, Apply, Effect, Joined, Left, Options, Received, Reply, Warm
from aiops.engine.registration import Definition
from aiops.engine.table_receive import RowsSink
from aiops.errors import UsageError
from aiops.model.arena import aligned
from aiops.model.layout import Layout
from aiops.model.tables import Tables
from aiops.shards.counting import COUNTS
from aiops.store.resources import Resources
from aiops.wire.messages import PROTOCOL, FetchRows, Hello, PushRows, Welcome
from aiops.wire.server_messages import ShardHello
from aiops.wire.sinks import Sink
from aiops.wire.traffic import Traffic


class FollowerRows:
    """The rows of one follower.

    Parameters
    ----------
    described
        The model's tables, as a `LoadShard` has them.
    tensors
        The names of the model's tensors.
    algorithm, options, machine
        Those of the follower.
    admission
        Of the rows that clients send; the shell knows its pools.

    Attributes
    ----------
    engine
        Decides about the rows. Its tickets are those of the follower's `Apply` with another sign.
    begun
        The kernels to compile.

    Raises
    ------
    ValueError
        When the tables make no sense.
    """

    def __init__(
        self,
        described: Sequence[tuple[object, ...]],
        tensors: Sequence[str],
        algorithm: Algorithm,
        options: Options,
        machine: Resources,
        admission: Admission,
    ) -> None:
        try:
            tables = Tables.from_description(described, tensors)
        except (TypeError, UsageError) as error:
            raise ValueError(f"its tables make no sense: {error}") from None
        alone = replace(
            options,
            shards=1,
            spread_tables=True,
            budget=None,
            worker_budget=None,
            gate="",
            push_codec=(),
            fetch_codec=(),
            relay="",
        )
        self.engine = Engine(algorithm, alone, machine)
        self.engine.admission = admission
        training = self.engine.begin(Definition(Layout((), empty=True), aligned(0), tables))
        self.begun = [effect for effect in training.begun if isinstance(effect, Warm)]

    # ------------------------------------------------------------ messages

    def sink_for(self, message: FetchRows | PushRows) -> Sink | None:
        """Return the sink of a message's payloads; None: no room now, wait with the engine.

        A version that this shard has not reached is taken for its present one: shards that were
        brought back to an earlier moment may differ in it, and the lead has checked its own.
        """
        sink = self.engine.admission.sink_for(message)
        if isinstance(sink, RowsSink):
            sink.version = min(sink.version, self.engine.tables[message.table].version)
        return sink

    def received(self, event: Received, hello: ShardHello) -> list[Effect]:
        """Handle a message about rows, of the client that has introduced itself like this."""
        effects = list[Effect]()
        if self.engine.membership.at(event.peer) is None:
            effects += self._joined(event, hello)
        return effects + self._translated(self.engine.handle(event))

    def applied(self, event: Applied) -> list[Effect]:
        """Take the result of a job."""
        return self._translated(self.engine.handle(replace(event, ticket=-event.ticket)))

    def left(self, time: float, peer: int) -> None:
        """Send nothing more to a connection that has ended."""
        self.engine.handle(Left(time, peer))

    def counts(self) -> dict[str, dict[str, int]]:
        """Return, by table, the counts that are sums over all shards."""
        lines = [table.report() for table in self.engine.tables]
        return {line["name"]: {name: line[name] for name in COUNTS} for line in lines}

    def _joined(self, event: Received, hello: ShardHello) -> list[Effect]:
        """Have a client join that has sent its first message about rows on this connection."""
        role = "worker" if hello.worker else "observer"
        greeting = Hello(
            id=0,
            protocol=PROTOCOL,
            client=hello.client,
            epoch=hello.epoch,
            name=hello.name,
            role=role,
            pongs=False,
            nonce=hello.nonce,
            agent=hello.agent,
            run=hello.run,
        )
        joined = Joined(event.time, event.peer, greeting, b"", Traffic())
        return self._translated(self.engine.handle(joined))

    def _translated(self, effects: Sequence[Effect]) -> list[Effect]:
        """Return the follower's effects: answers about rows, and jobs."""
        found = list[Effect]()
        for effect in effects:
            if isinstance(effect, Apply):
                found.append(Apply(-effect.ticket, effect.job))
            elif isinstance(effect, Reply) and not isinstance(effect.message, Welcome):
                found.append(effect)
        return found
