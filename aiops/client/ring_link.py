"""One connection between two workers of a round: messages, each wait with a deadline."""

from __future__ import annotations

import asyncio
import ipaddress
import socket
import ssl
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from aiops.common import forks
from aiops.errors import ConnectionLost, DeadlineExceeded, RemoteProtocolError, Unauthorised
from aiops.net.environment import CURRENT_ENVIRONMENT
from aiops.net.socket_options import tune
from aiops.net.tls import explained
from aiops.net.tls_stream import TlsStream
from aiops.wire.connection import Connection, Limits, Messages, with_sinks
from aiops.wire.messages import Error, Message
from aiops.wire.ring_messages import RingHello, Round
from aiops.wire.ring_proofs import ChunkSeal, proof, proves
from aiops.wire.sinks import Sink
from aiops.wire.state_machine import Side

_LIMITS = Limits(header=4 << 10, parts=1)


def _too_early(message: Message) -> Sink:
    raise RemoteProtocolError("a chunk came before its round began")


class Link:
    """One connection between two workers; every wait has a deadline and names the other.

    Attributes
    ----------
    seal
        Of its chunks, if it leads through a relay.
    """

    wire: Connection
    name: str
    patience: float
    sock: socket.socket

    def __init__(self, sock: socket.socket, side: Side, name: str, patience: float) -> None:
        sock.setblocking(False)
        tune(sock)
        self.sock, self.name, self.patience = sock, name, patience
        self.wire = Connection(side, _LIMITS)
        self.seal: ChunkSeal | None = None
        self._tls: TlsStream | None = None
        forks.note(self)

    async def secure(self, context: ssl.SSLContext, *, server_side: bool) -> None:
        """Go through a TLS handshake; from then on all is encrypted.

        Raises
        ------
        Untrusted, ConnectionLost
            When one side does not accept the other's certificate, or the connection ends.
        """
        made = TlsStream(self.sock, context, server_side=server_side)
        await self._bounded(made.handshake(), "did not finish the TLS handshake")
        self._tls = made

    async def receive(
        self, sink_for: Callable[[Message], Sink] = _too_early, most: int | None = None
    ) -> Messages:
        """Receive what there is, or wait for something; return the messages now whole.

        ``most``: bytes that are received at most.
        """
        buffer = self.wire.next_buffer()[:most]
        if self._tls is not None:
            receiving: Awaitable[int] = self._tls.receive_into(buffer)
        else:
            receiving = asyncio.get_running_loop().sock_recv_into(self.sock, buffer)
        count = await self._bounded(receiving, "sent nothing")
        if not count:
            raise ConnectionLost(f"worker {self.name} went away in the midst of an average")
        try:
            return with_sinks(self.wire, self.wire.received(count), sink_for)
        except RemoteProtocolError as error:
            raise RemoteProtocolError(f"worker {self.name}: {error}") from None

    async def send(self, message: Message, payloads: Sequence[Sequence[memoryview]] = ()) -> None:
        """Send a message."""
        loop = asyncio.get_running_loop()
        for buffer in self.wire.send(message, payloads):
            if self._tls is not None:
                sending: Awaitable[None] = self._tls.send_all(buffer)
            else:
                sending = loop.sock_sendall(self.sock, buffer)
            await self._bounded(sending, "took nothing")

    async def receive_one(self, *, alone: bool = False) -> Message:
        """Wait for one message without payloads; ``alone``: receive no byte of what follows it."""
        while True:
            for message, _sink in await self.receive(most=1 if alone else None):
                return message

    async def receive_hello(self) -> RingHello:
        """Wait for the first message of the other side."""
        message = await self.receive_one()
        if isinstance(message, RingHello):
            return message
        text = message.text if isinstance(message, Error) else f"said {message.kind!r}"
        raise RemoteProtocolError(f"worker {self.name} did not greet, but {text}")

    async def greet(self, this_round: Round, right: int) -> None:
        """Exchange hellos with the next worker of the ring.

        Raises
        ------
        Unauthorised
            When it cannot prove the round's secret; nothing else is sent to it.
        """
        number, rank, secret = this_round.number, this_round.rank, this_round.secret
        await self.send(RingHello(0, number, rank, proof(secret, "client", number, rank)))
        reply = await self.receive_hello()
        if (reply.number, reply.rank) != (number, right) or not proves(
            reply.proof, secret, "server", number, right
        ):
            raise unknown(self, this_round)

    async def answer(self, this_round: Round) -> None:
        """Answer the hello of the worker before this one in the ring."""
        number, rank = this_round.number, this_round.rank
        mine = proof(this_round.secret, "server", number, rank)
        await self.send(RingHello(0, number, rank, mine))

    async def _bounded(self, waiting: Awaitable[Any], what: str) -> Any:
        try:
            async with asyncio.timeout(self.patience):
                return await waiting
        except TimeoutError:
            raise DeadlineExceeded(
                f"worker {self.name} {what} for {self.patience:g} s in the midst of an average:"
                " is it stopped, or behind a firewall?"
            ) from None
        except OSError as error:
            raise explained(f"worker {self.name}", error) from None

    def close(self) -> None:
        """End the connection; what was sent still arrives."""
        self.wire.lost()
        self.sock.close()

    def forked(self) -> None:
        """Let go of it in a fork."""
        forks.blank(self.sock.fileno())


def belongs(hello: RingHello, this_round: Round, left: int) -> bool:
    """Return whether a hello comes from the worker before this one in the ring."""
    return (hello.number, hello.rank) == (this_round.number, left) and proves(
        hello.proof, this_round.secret, "client", this_round.number, left
    )


def unknown(link: Link, this_round: Round) -> Unauthorised:
    """Return the error of a worker that cannot prove the round's secret."""
    text = f"worker {link.name} does not know the secret of round {this_round.number}"
    return Unauthorised(text, worker=link.name)


async def connect(host: str, port: int, name: str, patience: float) -> Link:
    """Connect to an IP address.

    Raises
    ------
    ConnectionLost
        When it cannot be reached.
    RemoteProtocolError
        When ``host`` is a name: the loop would look it up in a thread that nothing can end.
    """
    loop = asyncio.get_running_loop()
    sock = None
    try:
        async with asyncio.timeout(patience):
            sock = CURRENT_ENVIRONMENT.get().unconnected_socket(str(ipaddress.ip_address(host)))
            sock.setblocking(False)
            await loop.sock_connect(sock, (host, port))
        return Link(sock, "client", name, patience)
    except ValueError:
        raise RemoteProtocolError(f"the server told of a worker {name}: no IP address") from None
    except OSError as error:  # a TimeoutError is one
        if sock is not None:
            sock.close()
        why = error.strerror or str(error) or f"no answer in {patience:g} s"
        raise ConnectionLost(f"worker {name} cannot be reached from here: {why}") from None
    except BaseException:
        if sock is not None:
            sock.close()
        raise
