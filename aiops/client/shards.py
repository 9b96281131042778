"""A session's traffic with the other shards of a model, sans-I/O.

A model on one server has no channels and no placement. On several, requests go to the lead and
answers come from it; their headers announce the parts on the other shards, which travel on the
channels as portions. An answer is complete when all of its portions are in place.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from aiops.client.handshake import Identity
from aiops.client.outbox import Lending, Outbox
from aiops.client.pending import PendingRequests
from aiops.client.receive_params import ParameterSink, PortionSink
from aiops.client.rows import RowsPortionSink, SpreadPayloads, SpreadRowsSink
from aiops.client.server_info import ServerInfo
from aiops.client.shard_channel import ShardChannel
from aiops.common import urls
from aiops.common.urls import ServerAddress
from aiops.errors import RemoteProtocolError, Unauthorised
from aiops.model.placement import Placement
from aiops.model.row_shards import announced_rows, own_parts
from aiops.model.tables import NamedTable
from aiops.wire.connection import Connection
from aiops.wire.messages import Message, Push, Welcome
from aiops.wire.server_messages import ShardParts
from aiops.wire.sinks import Discard, Sink
from aiops.wire.traffic import Traffic

Payloads = Sequence[Sequence[memoryview]]


class Shards:
    """The other shards of one session.

    Parameters
    ----------
    identity
        The client's.
    info
        The server, as far as it is known.
    pending
        The session's requests.
    wire
        Makes this side's end of a connection.
    traffic
        Counts the bytes of all channels.
    on_attached
        Called when the last channel is attached.

    Attributes
    ----------
    lead
        The address of the lead, and those of the other shards if the URL names them.
    host
        The lead's at present: it may have moved (`aiops.net.moved_servers`), with its followers.
    channels
        The present connections to those shards that hold, or may hold, a part of the model.
    """

    def __init__(
        self,
        identity: Identity,
        info: ServerInfo,
        pending: PendingRequests,
        wire: Callable[[], Connection],
        traffic: Traffic,
        *,
        on_attached: Callable[[], None],
    ) -> None:
        self._identity, self._info, self._pending = identity, info, pending
        self._make_wire, self._traffic, self._on_attached = wire, traffic, on_attached
        self.lead, self.host = ServerAddress("", 0), ""
        self.channels: list[ShardChannel] = []
        self._partial: dict[
            int, tuple[Message, ParameterSink | SpreadRowsSink]
        ] = {}  # answers that lack portions

    # ------------------------------------------------------------ the connections

    def open_channels(self, welcome: Welcome) -> None:
        """Make channels to the other shards; of a defined model, to those that hold a part of it.

        Raises
        ------
        Unauthorised
            When the user named others, or another number of them.
        """
        where = [(host or self.host, port) for host, port, _start in welcome.shards]
        followers = self.lead.followers
        if followers and len(followers) != len(where):
            raise Unauthorised(
                f"{self._info.url} has {len(where) + 1} shards, not the {len(followers) + 1} of"
                f" {urls.write_all([self.lead])}: name all of them, the lead first, or the lead"
                " alone; servers that may take each other's place are separated by commas"
            )
        _client, epoch = self._info.connection
        run = welcome.run, welcome.generation
        self.channels = [
            ShardChannel(self, shard, host, port, self._identity, epoch, run)
            for shard, (host, port) in enumerate(followers or where, 1)
        ]
        if welcome.model:
            self.leave_unused()

    def leave_unused(self) -> None:
        """Drop the channels to shards that hold no part of the model."""
        placement, spread = self._info.placement, self._info.rows.shards
        used = [] if placement is None else placement.used
        used = used if spread == 1 else list(range(spread))
        self.channels = [channel for channel in self.channels if channel.shard in used]

    def connection(self) -> Connection:
        """Return this side's end of a new connection; the bytes of all are counted together."""
        wire = self._make_wire()
        wire.traffic = self._traffic
        return wire

    @property
    def attached(self) -> bool:
        """True once every channel has been welcomed."""
        return all(channel.attached for channel in self.channels)

    @property
    def unattached(self) -> str:
        """The shards that are not attached yet, for error texts."""
        return ", ".join(channel.server for channel in self.channels if not channel.attached)

    def channel_attached(self) -> None:
        """Note that a shard has been attached."""
        if self.attached:
            self._on_attached()

    def resume(self) -> None:
        """Go on with portions that may have a sink now that the lead has sent more."""
        for channel in self.channels:
            channel.resume()

    def lost(self) -> None:
        """Forget all channels: the connections to all shards end together."""
        for channel in self.channels:
            channel.lost()
        self.channels = []
        self._partial.clear()

    # ------------------------------------------------------------ pushes

    @property
    def near(self) -> bool:
        """True if a shard with a channel is on this machine, and memory is shared with it."""
        return any(channel.wire.shared is not None for channel in self.channels)

    def push(
        self, placement: Placement, push: Push, payloads: Payloads, outbox: Outbox
    ) -> tuple[Push, Sequence[Sequence[memoryview]], list[Lending]]:
        """Send the others their portions of a push, all at once.

        Returns what the lead is sent, and what the others were lent from ``outbox``.
        """
        divided = placement.divide(push.parts, payloads)
        parts = placement.announced([pieces for pieces, _views in divided])
        mine, lent = divided[0][1], list[Lending]()
        for channel in self.channels:
            pieces, theirs = divided[channel.shard]
            if pieces:
                lending = channel.push(ShardParts(push.id, 0, tuple(pieces)), theirs, outbox)
                lent += [] if lending is None else [lending]
        return replace(push, parts=parts), [*mine, *([()] * (len(parts) - len(mine)))], lent

    def send_rows(
        self,
        named: NamedTable,
        spread: SpreadPayloads,
        message: Message,
        outbox: Outbox,
    ) -> tuple[Message, list[list[memoryview]], list[Lending]]:
        """Send the others their rows of a message; returns as `push` does."""
        lent = list[Lending]()
        for channel in self.channels:
            rows = spread.rows[channel.shard]
            if any(rows):
                portion = ShardParts(message.id, 0, own_parts(named, rows))
                lending = channel.push(portion, spread.payloads[channel.shard], outbox)
                lent += [] if lending is None else [lending]
        announced = announced_rows(spread.rows)
        parts = (*own_parts(named, spread.rows[0]), *announced)
        payloads = [*spread.payloads[0], *([] for _ in announced)]
        return replace(message, parts=parts), payloads, lent  # type: ignore[call-arg]

    # ------------------------------------------------------------ answers

    def sink_for(self, shard: int, portion: ShardParts) -> Sink | None:
        """Return the sink of a portion of an answer; None before the lead announces it.

        Raises
        ------
        RemoteProtocolError
            When it is another one than the lead has announced.
        """
        if portion.id not in self._pending.by_id:
            return Discard()
        request = self._pending.by_id[portion.id]
        if isinstance(request.into, SpreadRowsSink):
            return self._sink_for_rows(shard, portion)
        into, placement = self._pending.arriving(portion.id), self._info.placement
        if into is None or placement is None:
            return None
        low, high = placement.edges[shard : shard + 2]
        expected = [n for n, part in enumerate(into.parts) if low <= part.start < high]
        if shard not in into.missing or not into.announced(expected, portion.parts):
            raise RemoteProtocolError(
                f"shard {shard} of {self._info.url} sent other parts than its lead announced"
            )
        return PortionSink(into, expected[0])

    def _sink_for_rows(self, shard: int, portion: ShardParts) -> Sink | None:
        rows = self._pending.arriving_rows(portion.id)
        if rows is None:
            return None
        sink = rows.portion(shard, portion.parts) if shard in rows.missing else None
        if sink is None:
            raise RemoteProtocolError(
                f"shard {shard} of {self._info.url} sent other rows than were asked for"
            )
        return sink

    def portion_arrived(self, shard: int, portion: ShardParts, sink: Sink | None) -> None:
        """Note that a portion is in place; after the last one the answer is given out."""
        if isinstance(sink, RowsPortionSink):
            rows = self._pending.arriving_rows(portion.id)
            if rows is None:
                return
            rows.missing.discard(shard)
            if not rows.missing and portion.id in self._partial:
                message, whole = self._partial.pop(portion.id)
                self._pending.resolve(message, whole)
            return
        into = self._pending.arriving(portion.id)
        if into is None or not isinstance(sink, PortionSink):
            return
        into.missing.discard(shard)
        if not into.missing and portion.id in self._partial:
            message, whole = self._partial.pop(portion.id)
            assert isinstance(whole, ParameterSink), "its portion is one of parameters"
            self._pending.resolve(with_all_parts(message, whole), whole)

    def complete(self, message: Message, sink: Sink | None) -> Message | None:
        """Return an answer with all of its parts; None if portions of it are still to come."""
        if not isinstance(sink, ParameterSink | SpreadRowsSink):
            return message
        if sink.missing:
            self._partial[message.id] = message, sink
            return None
        return with_all_parts(message, sink) if isinstance(sink, ParameterSink) else message

    @property
    def late(self) -> tuple[int, str] | None:
        """The first request that lacks portions, and the shards that owe them, for error texts."""
        for id, (_message, into) in self._partial.items():
            if into.missing:
                late = [each.server for each in self.channels if each.shard in into.missing]
                return id, ", ".join(late)
        return None


def with_all_parts(message: Message, sink: ParameterSink) -> Message:
    """Return a lead's answer with the parts as all shards have sent them."""
    return replace(message, parts=sink.parts)  # type: ignore[call-arg]
