"""A server's connections to other servers of its run: a standby's feed, a promotion, a fence."""

from __future__ import annotations

import asyncio
import os
from collections import deque
from collections.abc import Callable

from aiops._version import __version__
from aiops.common import urls
from aiops.errors import AiopsError, ConnectionLost, DeadlineExceeded, RemoteProtocolError, refusal
from aiops.net.dns import addresses, first_reached
from aiops.net.environment import Environment
from aiops.net.tls import TlsTarget
from aiops.net.transport import MessageTransport
from aiops.wire import handshake
from aiops.wire.connection import Buffer, Connection, Limits
from aiops.wire.messages import PROTOCOL, Challenge, Error, Hello, Message, Ping, Pong, Welcome
from aiops.wire.server_messages import Greeting
from aiops.wire.sinks import Discard, Sink
from aiops.wire.standby_messages import StandbyWelcome

_LIMITS = Limits(header=64 << 20)

_MOST = 64 << 20
"""Bytes that may have been received and wait to be handled, unless one message is longer."""

_PINGABLE = ("open", "standby open")


class OutgoingLink:
    """A connection that this process opens to another server, whose messages wait in order.

    Parameters
    ----------
    env
        The clock, and what dials.
    url
        The server's address; one, not several.
    token
        The token that both share, if any.
    sink_for
        Returns the sink of a message with payloads. By default they are discarded.
    tls
        Returns how to connect to a host by TLS, if the URL is of such a server.

    Attributes
    ----------
    lost
        The reason for which the connection has ended; None: it has not.
    """

    def __init__(
        self,
        env: Environment,
        url: str,
        token: str | None,
        sink_for: Callable[[Message], Sink] | None = None,
        tls: Callable[[str], TlsTarget] | None = None,
    ) -> None:
        self._tls = tls if urls.is_tls(url) else None
        self._env, self._url, self._token = env, url, token
        self._sink_for = sink_for or (lambda message: Discard())
        self.lost: AiopsError | None = None
        self._waiting = False  # for room
        self._received: deque[tuple[Message, Sink | None]] = deque()
        self._nbytes = 0  # of the payloads in it
        self._changed = asyncio.Event()
        self._link = MessageTransport(Connection("client", _LIMITS), self, 0, self._room)

    async def open(self, hello: Greeting, patience: float) -> Welcome | StandbyWelcome:
        """Connect and go through the handshake.

        Parameters
        ----------
        hello
            The greeting.
        patience
            Seconds that this may take.

        Returns
        -------
        Welcome or StandbyWelcome
            The server's answer, whose proof is right.

        Raises
        ------
        ConnectionLost, Refused, RemoteProtocolError
            When there is no such server, or it refuses.
        """
        host, port = urls.parse(self._url)
        loop = asyncio.get_running_loop()
        until = loop.time() + patience
        tls = None if self._tls is None else self._tls(host)

        async def reach(address: str) -> None:
            await self._env.dial(lambda: self._link, address, port, tls)

        challenge: Challenge | None = None
        try:
            async with asyncio.timeout(patience):
                known = self._env.known_addresses(host)
                await first_reached(known or await addresses(host, patience), until, reach)
                self.send(hello)
                while True:
                    message, _sink = await self.receive(patience)
                    if isinstance(message, Challenge):
                        challenge = message
                        self.send(handshake.answer(message, hello, self._token, self._url))
                    elif isinstance(message, Welcome | StandbyWelcome):
                        given = challenge, self._token, self._url
                        handshake.check_welcome(message, hello, *given)
                        return message
                    else:
                        raise RemoteProtocolError(f"{self._url}: {message.kind!r} is no welcome")
        except TimeoutError:
            self.close()
            raise DeadlineExceeded(f"{self._url} has not answered in {patience:g} s") from None
        except OSError as error:
            self.close()
            if isinstance(error, AiopsError):
                raise
            raise ConnectionLost(f"{self._url} cannot be reached ({_reason(error)})") from None
        except BaseException:
            self.close()
            raise

    @property
    def local_host(self) -> str:
        """The address of this side of the connection."""
        transport = self._link.transport
        name = transport.get_extra_info("sockname") if transport is not None else None
        return str(name[0]) if isinstance(name, tuple) else "127.0.0.1"

    def send(self, message: Message) -> None:
        """Send a message; it is dropped if the connection has ended."""
        if self.lost is None and self._link.wire.state != "closed":
            buffers: list[Buffer] = self._link.wire.send(message)
            self._link.send(buffers)

    async def receive(self, silence: float) -> tuple[Message, Sink | None]:
        """Return the next message, with the sink of its payloads.

        Parameters
        ----------
        silence
            Seconds after which the server is pinged; after three times as long it is lost.

        Raises
        ------
        ConnectionLost
            When the connection has ended, and all that came has been returned.
        Refused, Superseded
            When the server has sent a fatal error.
        """
        came, quiet = self._link.wire.traffic.bytes_in, 0
        while not self._received:
            if self.lost is not None:
                raise self.lost
            self._changed.clear()
            try:
                async with asyncio.timeout(silence):
                    await self._changed.wait()
            except TimeoutError:
                bytes_in = self._link.wire.traffic.bytes_in
                quiet = quiet + 1 if bytes_in == came else 0
                came = bytes_in
                if quiet >= 3:
                    why = f"{self._url} has not answered a ping for {2 * silence:.3g} s"
                    self._link.fault(DeadlineExceeded(why))
                elif self._link.wire.state in _PINGABLE:
                    self.send(Ping(0))
        message, sink = self._received.popleft()
        self._nbytes -= _payload(message)
        if self._waiting:
            self._waiting = False
            asyncio.get_running_loop().call_soon(self._resume)
        return message, sink

    def close(self) -> None:
        """Close the connection when all is sent."""
        self._link.close()

    def fault(self, error: AiopsError) -> None:
        """End the connection at once."""
        if self._link.transport is None:
            self.lost = self.lost or error
            self._changed.set()
        self._link.fault(error)

    def forked(self) -> None:
        """Let go of it in a fork."""
        self._link.forked()

    def _room(self, message: Message) -> Sink | None:
        if self._nbytes and self._nbytes + _payload(message) > _MOST:
            return None
        self._nbytes += _payload(message)
        return self._sink_for(message)

    def _resume(self) -> None:
        if not self._link.resume():
            self._waiting = True

    # ------------------------------------------------------------ calls of the transport

    def link_made(self, link: MessageTransport) -> None:
        """Do nothing: `open` sends the greeting."""

    def link_received(self, link: MessageTransport, message: Message, sink: Sink | None) -> None:
        """Answer a ping; keep all else until it is asked for."""
        if isinstance(message, Ping):
            if link.wire.state in _PINGABLE:
                self.send(Pong(message.id))
        elif isinstance(message, Error) and message.fatal:
            details = message.details
            self.lost = refusal(message.code, message.text, details)
            self._changed.set()
            link.close()
        elif not isinstance(message, Pong):
            self._received.append((message, sink))
            self._changed.set()

    def link_waits(self, link: MessageTransport) -> None:
        """Go on when what came has been handled."""
        self._waiting = True

    def link_lost(self, link: MessageTransport, error: AiopsError) -> None:
        """Note that the connection has ended."""
        self.lost = self.lost or error
        self._changed.set()


def _payload(message: Message) -> int:
    return sum(part.nbytes for part in getattr(message, "parts", ()))


def observer(env: Environment, name: str) -> Hello:
    """Return the greeting of a client that asks one thing."""
    named = env.token_bytes(8).hex(), 1, name, "observer", True
    return Hello(0, PROTOCOL, *named, env.token_bytes(16), f"aiops-python/{__version__}")


async def ask(
    env: Environment,
    url: str,
    token: str | None,
    request: Callable[[str], Message],
    patience: float,
    tls: Callable[[str], TlsTarget] | None = None,
) -> Message:
    """Connect to a server, send it one message, and return the answer.

    Parameters
    ----------
    env, url, token, tls
        As of `OutgoingLink`.
    request
        Returns the message, given the address of this side of the connection.
    patience
        Seconds that it may take.

    Raises
    ------
    AiopsError
        When there is none within ``patience`` seconds, or it is a refusal.
    """
    link = OutgoingLink(env, url, token, tls=tls)
    try:
        async with asyncio.timeout(patience):
            await link.open(observer(env, "aiops"), patience)
            link.send(request(link.local_host))
            found, _sink = await link.receive(patience)
    except TimeoutError:
        raise DeadlineExceeded(f"{url} has not answered in {patience:g} s") from None
    finally:
        link.close()
    if isinstance(found, Error):
        raise refusal(found.code, found.text, found.details)
    return found


def _reason(error: OSError) -> str:
    """Return the system's own words; asyncio has others for those, which name its calls."""
    known = error.errno is not None and error.errno > 0
    return os.strerror(error.errno or 0) if known else str(error.strerror or error)
