"""A client's side of the handshake, with a server or with one shard of a model."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from aiops._version import __version__
from aiops.client.known_run import KnownRun
from aiops.wire import handshake
from aiops.wire.messages import PROTOCOL, Challenge, Hello, Prove, Welcome
from aiops.wire.server_messages import Greeting, ShardHello, ShardWelcome

_AGENT = f"aiops-python/{__version__}"


@dataclass(frozen=True, slots=True)
class Identity:
    """The facts that a client states of itself when it connects.

    Attributes
    ----------
    client
        Its id: unique, the same for all its connections.
    name
        Its name in reports.
    role
        ``"worker"`` or ``"observer"``.
    token
        The server's token, or None.
    nonce
        Makes 16 fresh random bytes.
    pongs
        Whether it answers pings even while no request is under way.
    """

    client: str
    name: str
    role: str
    token: str | None
    nonce: Callable[[], bytes]
    pongs: bool


class Handshake:
    """The handshake of one connection: it begins with a hello, and is over with the welcome.

    Parameters
    ----------
    identity
        The client's.
    server
        The server in words, for error texts.
    hello
        The client's first message.
    """

    hello: Greeting

    def __init__(self, identity: Identity, server: str, hello: Greeting) -> None:
        self._token, self._server, self.hello = identity.token, server, hello
        self._challenge: Challenge | None = None

    @classmethod
    def with_server(
        cls,
        identity: Identity,
        server: str,
        epoch: int,
        nonce: bytes,
        run: KnownRun,
        acked: int = 0,
    ) -> Handshake:
        """Begin with a server: the only one, or the lead of several.

        Parameters
        ----------
        identity, server
            As above.
        epoch, nonce
            The number of this connection, and 16 fresh random bytes.
        run
            The run that is known.
        acked
            The highest sequence number that it has acknowledged.
        """
        hello = Hello(
            id=0,
            protocol=PROTOCOL,
            client=identity.client,
            epoch=epoch,
            name=identity.name,
            role=identity.role,
            pongs=identity.pongs,
            nonce=nonce,
            agent=_AGENT,
            run=run.name,
            generation=run.generation,
            acked=acked,
            generation_proof=run.proof,
        )
        return cls(identity, server, hello)

    @classmethod
    def with_shard(
        cls, identity: Identity, server: str, epoch: int, nonce: bytes, run: tuple[str, int]
    ) -> Handshake:
        """Begin with another shard of a model; ``run`` is the lead's, with its generation."""
        hello = ShardHello(
            id=0,
            protocol=PROTOCOL,
            client=identity.client,
            epoch=epoch,
            name=identity.name,
            run=run[0],
            pongs=identity.pongs,
            nonce=nonce,
            agent=_AGENT,
            generation=run[1],
            worker=identity.role == "worker",
        )
        return cls(identity, server, hello)

    def answer(self, challenge: Challenge) -> Prove:
        """Return the answer to a challenge.

        Raises
        ------
        Unauthorised
            When there is no token to prove.
        """
        self._challenge = challenge
        return handshake.answer(challenge, self.hello, self._token, self._server)

    def check(self, welcome: Welcome | ShardWelcome) -> None:
        """Check that a welcome comes from a server that knows the token too.

        Raises
        ------
        Unauthorised
            When it does not.
        RemoteProtocolError
            When it speaks another version of the protocol.
        """
        handshake.check_welcome(welcome, self.hello, self._challenge, self._token, self._server)
