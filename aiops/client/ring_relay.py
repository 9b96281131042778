"""Reach the other end of a ring's connection through the relay that the server named."""

from __future__ import annotations

from typing import TypeVar

from aiops.client.backoff import reason
from aiops.client.ring_link import Link, connect
from aiops.common import urls
from aiops.errors import ConnectionLost, RemoteProtocolError, Unauthorised, UsageError
from aiops.net.dns import addresses
from aiops.net.environment import CURRENT_ENVIRONMENT
from aiops.net.tls import TlsPeers
from aiops.wire.messages import PROTOCOL, Challenge, Error, Message, Prove
from aiops.wire.ring_messages import RelayHello, RelayReady, Round
from aiops.wire.ring_proofs import ChunkSeal, relay_proof, relay_proves, ring_name

M = TypeVar("M", bound=Message)


async def through_relay(
    this_round: Round,
    sender: int,
    sends: bool,
    name: str,
    patience: float,
    made: list[Link],
    tls: TlsPeers | None = None,
) -> Link:
    """Meet the other end of one connection of a ring at the relay.

    Parameters
    ----------
    this_round
        The round; it names a relay.
    sender
        The rank of the worker that sends chunks on this connection.
    sends
        Whether that is this worker.
    name
        The other worker, for people.
    patience
        Seconds that each wait may last.
    made
        The link is added to it as soon as there is one.
    tls
        The certificates, if the two workers speak TLS, which the relay passes on.

    Raises
    ------
    ConnectionLost, DeadlineExceeded
        When the relay cannot be reached, or the other end does not come.
    Unauthorised
        When the relay, or this worker, does not know the token of the ring.
    """
    env, relay = CURRENT_ENVIRONMENT.get(), this_round.relay
    try:
        host, port = urls.parse(relay, urls.RELAY_PORT)
        address = (env.known_addresses(host) or await addresses(host, patience))[0]
        link = await connect(address, port, f"{name} at the relay {relay}", patience)
    except UsageError:
        raise RemoteProtocolError(f"the server told of a relay {relay!r}: no address") from None
    except OSError as error:
        raise ConnectionLost(f"the relay {relay} is not found: {reason(error)}") from None
    except ConnectionLost:
        raise ConnectionLost(f"the relay {relay} cannot be reached from here") from None
    made.append(link)
    ring, token = ring_name(this_round.secret, this_round.number), this_round.ring_token
    hello = RelayHello(0, PROTOCOL, ring, sender, sends, env.token_bytes(16))
    await link.send(hello)
    challenge = _checked(await link.receive_one(), Challenge, relay)
    await link.send(Prove(0, relay_proof(token, "client", hello, challenge.nonce)))
    # The other worker's first bytes may come with it: they are for what reads next.
    ready = _checked(await link.receive_one(alone=True), RelayReady, relay)
    if not relay_proves(ready.proof, token, "server", hello, challenge.nonce):
        raise Unauthorised(
            f"the relay {relay} does not know the token of this ring: it may be another one",
            worker=name,
        )
    if tls is not None:
        await link.secure(tls.dialling if sends else tls.accepting, server_side=not sends)
    link.seal = ChunkSeal(this_round.secret, this_round.number, sender)
    return link


def _checked(message: Message, wanted: type[M], relay: str) -> M:
    """Return a message of the relay if it is the one that is due."""
    if isinstance(message, wanted):
        return message
    text = message.text if isinstance(message, Error) else f"it said {message.kind!r}"
    raise RemoteProtocolError(f"the relay {relay}: {text}")
