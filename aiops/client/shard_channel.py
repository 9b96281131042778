"""A session's connection to one shard of the model other than the lead, sans-I/O.

A client's connections to the shards of a model are made and ended together. Requests go to the
lead; the portion of a push that lies on another shard goes there as a `ShardParts`, and its portion
of an answer comes from there as one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from aiops._version import __version__
from aiops.errors import ConnectionLost, RemoteProtocolError, refusal
from aiops.wire import handshake, messages
from aiops.wire.connection import Buffer, Connection, SinkFor
from aiops.wire.messages import Challenge, Error, Message, Ping, ShardParts, ShardWelcome
from aiops.wire.shared_payloads import SharedPayloads
from aiops.wire.sinks import Discard, Sink

if TYPE_CHECKING:
    from aiops.client.session import Session


class ShardChannel:
    """One branch, for as long as its connection.

    Parameters
    ----------
    session
        The session, which is with the lead.
    shard
        The number of the shard, from 1.
    host, port
        Where it is.
    wire
        Makes this side's end of a connection.
    """

    def __init__(
        self,
        session: Session,
        shard: int,
        host: str,
        port: int,
        wire: Callable[[SinkFor], Connection],
    ) -> None:
        self._session, self.shard, self.host, self.port = session, shard, host, port
        self.server = f"shard {shard} at {host}:{port}"
        self.wire = wire(self._sink_for)
        self.wire.traffic = session.wire.traffic  # all is counted together
        self.attached = False
        self._out: list[Buffer] = []
        self._hello: messages.ShardHello | None = None
        self._challenge: Challenge | None = None

    # ------------------------------------------------------------ the connection

    def connected(self, shared: SharedPayloads | None = None) -> list[Buffer]:
        """Begin on its connection; return what to send."""
        self._hello = self._session.follow()
        self._say(self._hello)
        return self.outgoing()

    @property
    def missing(self) -> int:
        """The bytes of a payload in progress that are still to come."""
        return self.wire.missing

    @property
    def waiting(self) -> bool:
        """True while the next payload has no sink before the lead announces it: do not read."""
        return self.wire.waiting

    @property
    def waiting_for(self) -> str:
        """The answer that is waited for, in words."""
        return "its part of the parameters" if self.attached else "its welcome"

    def next_buffer(self) -> memoryview:
        """Return where the next received bytes belong."""
        return self.wire.next_buffer()

    def received(self, nbytes: int) -> None:
        """Process received bytes; raises as `Session.received` does."""
        if nbytes == 0:
            raise ConnectionLost(f"{self.server} closed the connection")
        self._hear_all(self.wire.received(nbytes))

    def resume(self) -> None:
        """Go on with a payload that may have a sink now that the lead has sent more."""
        if self.wire.waiting:
            self._hear_all(self.wire.resume())

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

    def push(self, portion: ShardParts, payloads: Sequence[Sequence[memoryview]]) -> None:
        """Send the shard its portion of a push."""
        self._out.extend(self.wire.send(portion, payloads))

    def _say(self, message: Message) -> None:
        self._out.extend(self.wire.send(message))

    def _sink_for(self, message: Message) -> Sink | None:
        if not isinstance(message, ShardParts):
            return Discard()
        return self._session.shards.portion_sink_for(self.shard, message)

    def _hear_all(self, heard: list[tuple[Message, Sink | None]]) -> None:
        for message, sink in heard:
            self._hear(message, sink)

    def _hear(self, message: Message, sink: Sink | None) -> None:
        if isinstance(message, Error):
            raise refusal(message.code, f"{self.server}: {message.text}", message.details)
        if isinstance(message, Challenge):
            assert self._hello is not None
            self._challenge = message
            token = self._session.token
            self._say(handshake.answer(message, self._hello, token, self.server))
        elif isinstance(message, ShardWelcome):
            assert self._hello is not None
            given = self._challenge, self._session.token, self.server
            handshake.check_welcome(message, self._hello, *given)
            self.attached = True
            self._session.branch_attached()
        elif isinstance(message, Ping):
            self._say(messages.Pong(message.id))
        elif isinstance(message, ShardParts):
            if not message.parts:
                raise RemoteProtocolError(f"{self.server} sent a portion of nothing")
            self._session.shards.hear_portion(self.shard, message, sink)


def following(session: Session, run: str, epoch: int, nonce: bytes) -> messages.ShardHello:
    """Return a client's hello to a follower."""
    return messages.ShardHello(
        id=0,
        protocol=messages.PROTOCOL,
        client=session.client,
        epoch=epoch,
        name=session.name,
        run=run,
        pongs=session.pongs,
        nonce=nonce,
        agent=f"aiops-python/{__version__}",
    )
