"""A session's connection to one shard of the model other than the lead, sans-I/O.

A client's connections to the shards of a model are made and ended together. Requests go to the
lead; the portion of a push that lies on another shard goes there as a `ShardParts`, and its portion
of an answer comes from there as one.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from aiops.client.handshake import Handshake, Identity
from aiops.client.outbox import Lending, Outbox
from aiops.errors import ConnectionLost, RemoteProtocolError, fatal
from aiops.wire import messages
from aiops.wire.connection import Buffer, Connection, Messages, with_sinks
from aiops.wire.messages import Challenge, Error, Message, Ping, TableRows
from aiops.wire.server_messages import ShardParts, ShardWelcome
from aiops.wire.shared_payloads import SharedPayloads
from aiops.wire.sinks import Discard, Sink


class ChannelOwner(Protocol):
    """The owner of a session's channels (`aiops.client.shards.Shards`)."""

    def connection(self) -> Connection:
        """Return this side's end of a new connection."""

    def channel_attached(self, server: str, last_seq: int) -> None:
        """Note that a shard has been attached, and its last push of rows by this client."""

    def sink_for(self, shard: int, portion: ShardParts) -> Sink | None:
        """Return the sink of a portion of an answer; None before the lead announces it."""

    def portion_arrived(self, shard: int, portion: ShardParts, sink: Sink | None) -> None:
        """Note that a portion is in place."""

    def rows_sink(self, shard: int, message: TableRows) -> Sink:
        """Return the sink of the rows that a shard sends."""

    def rows_answered(self, shard: int, answer: TableRows | Error) -> None:
        """Note that a shard has answered a request about rows."""


class ShardChannel:
    """The connection to one shard, and no other connection after it.

    Parameters
    ----------
    owner
        Makes the connection, and receives the portions of answers.
    shard
        The number of the shard, from 1.
    host, port
        Its address.
    identity
        The client's.
    epoch, run
        Those of the connection to the lead.
    """

    wire: Connection
    attached: bool
    host: str
    port: int
    shard: int

    def __init__(
        self,
        owner: ChannelOwner,
        shard: int,
        host: str,
        port: int,
        identity: Identity,
        epoch: int,
        run: tuple[str, int],
    ) -> None:
        self._owner, self.shard, self.host, self.port = owner, shard, host, port
        self._identity, self._epoch, self._run = identity, epoch, run
        self.server: str = f"shard {shard} at {host}:{port}"
        self.wire = owner.connection()
        self.attached = False
        self._out: list[Buffer] = []
        self._handshake = self._begun(b"")

    # ------------------------------------------------------------ the connection

    def _begun(self, nonce: bytes) -> Handshake:
        return Handshake.with_shard(self._identity, self.server, self._epoch, nonce, self._run)

    def connected(self, shared: SharedPayloads | None = None) -> list[Buffer]:
        """Begin on its connection; return what to send.

        ``shared``: the segments of both sides, if the shard is on this machine.
        """
        if shared is not None:
            shared.give_back = self._give_back
            self.wire.shared = shared
        self._handshake = self._begun(self._identity.nonce())
        self._send(self._handshake.hello)
        return self.outgoing()

    @property
    def idle(self) -> bool:
        """True if it is attached, and nothing is under way on its connection."""
        return self.attached and not self._out and not self.wire.midway

    @property
    def waiting(self) -> bool:
        """True while the next payload has no sink before the lead announces it: do not read."""
        return self.wire.pending is not None

    def next_buffer(self) -> memoryview:
        """Return where the next received bytes belong."""
        return self.wire.next_buffer()

    def received(self, nbytes: int) -> None:
        """Process received bytes; raises as `Session.received` does."""
        if nbytes == 0:
            raise ConnectionLost(f"{self.server} closed the connection")
        self._handle_all(self.wire.received(nbytes))

    def resume(self) -> None:
        """Go on with a payload that may have a sink now that the lead has sent more."""
        if self.wire.pending is not None:
            self._handle_all([])

    def outgoing(self) -> list[Buffer]:
        """Return what is to be sent now, and forget it."""
        out, self._out = self._out, []
        return out

    def leave(self) -> list[Buffer]:
        """Return nothing to send: only the lead is sent a leave."""
        return []

    def lost(self) -> None:
        """End the connection's state: it is gone."""
        self.wire.lost()
        self._out = []

    # ------------------------------------------------------------ messages

    def ask(
        self, message: Message, payloads: Sequence[Sequence[memoryview]], outbox: Outbox | None
    ) -> Lending | None:
        """Send the shard its share of a request; return what it was lent, if it is near."""
        shared = self.wire.shared
        lent = None
        if shared is not None and outbox is not None:
            lent = outbox.lend(payloads, shared.show)
        for share in lent.shares if lent is not None else ():
            self._send(share)
        self._out.extend(self.wire.send(message, payloads, () if lent is None else lent.places))
        return lent

    def _give_back(self, id: int) -> None:
        """Release parameters that the shard has lent."""
        if self.wire.state == "shard open":
            self._send(messages.Release(id))

    def _send(self, message: Message) -> None:
        self._out.extend(self.wire.send(message))

    def _sink_for(self, message: Message) -> Sink | None:
        if isinstance(message, TableRows):
            return self._owner.rows_sink(self.shard, message)
        if not isinstance(message, ShardParts):
            return Discard()
        return self._owner.sink_for(self.shard, message)

    def _handle_all(self, received: Messages) -> None:
        for message, sink in with_sinks(self.wire, received, self._sink_for):
            self._handle(message, sink)

    def _handle(self, message: Message, sink: Sink | None) -> None:
        if isinstance(message, TableRows) or (isinstance(message, Error) and not message.fatal):
            self._owner.rows_answered(self.shard, message)
        elif isinstance(message, Error):
            raise fatal(message.code, f"{self.server}: {message.text}", message.details)
        elif isinstance(message, Challenge):
            self._send(self._handshake.answer(message))
        elif isinstance(message, ShardWelcome):
            self._handshake.check(message)
            self.attached = True
            self._owner.channel_attached(self.server, message.last_seq)
        elif isinstance(message, Ping):
            self._send(messages.Pong(message.id))
        elif isinstance(message, ShardParts):
            if not message.parts:
                raise RemoteProtocolError(f"{self.server} sent a portion of nothing")
            self._owner.portion_arrived(self.shard, message, sink)
