"""The place of a follower that its lead has lost: its standby asks for it, and the lead gives it.

A lead alone decides who its followers are, so there are no two servers in one place. It gives the
place of a lost follower to a standby that has all that the model relies on, notes that, and leads
that server from then on. The one that had the place before is not led again, whether it comes back
or not: the number of the place, which the lead says in its hello, is higher than its own.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

from aiops.common import urls
from aiops.errors import AiopsError, ConnectionLost, Refused, RemoteProtocolError, Unavailable
from aiops.net.environment import Environment
from aiops.net.tls import TlsTarget
from aiops.serving.shard_links import ShardLinks
from aiops.serving.standby.link import ask
from aiops.serving.state.state_files import StateFiles
from aiops.shards.lead import Lead
from aiops.state.directory import TakenPlace
from aiops.wire.handshake import place_proof, proves_place
from aiops.wire.messages import Error, Message
from aiops.wire.server_messages import ShardState
from aiops.wire.standby_messages import PlaceGiven, TakePlace

_log = logging.getLogger("aiops.server")

_LONGEST_HOST, _PORTS = 255, 1 << 16

_ANY = ("0.0.0.0", "::")
"""Hosts of a listener on all addresses."""


class FollowerPlaces:
    """The places of a lead's followers, which it gives to their standbys.

    Parameters
    ----------
    lead, links, files
        The lead, its connections, and its state.
    """

    def __init__(self, lead: Lead, links: ShardLinks, files: StateFiles) -> None:
        self._lead, self._links, self._files = lead, links, files

    def restore(self) -> None:
        """Reach the followers that have taken a place before, instead of those of the settings."""
        for place in self._files.generations.places:
            self._lead.places[place.shard] = place.number
            if place.port:
                self._lead.move(place.shard, place.host, place.port)
                self._links.move(place.shard, place.host, place.port)

    def taken(self, shard: int) -> str:
        """Return the address of the server that has taken a place; empty: none has."""
        for place in self._files.generations.places:
            if place.shard == shard and place.port:
                return urls.address(place.host, place.port)
        return ""

    def answer(self, message: TakePlace) -> Message:
        """Give a standby the place that it asks for, or refuse it; return the answer."""
        why = self._refusal(message)
        if not why:
            number = 1 + self._lead.places.get(message.shard, 0)
            place = TakenPlace(message.shard, number, message.host, message.port)
            try:
                self._files.note_place(place)
            except OSError as error:
                why = f"the lead cannot keep that: {self._files.folder}: {error.strerror or error}"
        if why:
            _log.warning("the place of shard %d is not given: %s", message.shard, why)
            return Error(message.id, Refused.code, why, {}, False)
        _log.warning(
            "shard %d has a new server at %s, which was its standby: the one before is not led any"
            " more, and may be started with --standby and --shard %d",
            *(message.shard, urls.address(message.host, message.port), message.shard),
        )
        self._lead.places[message.shard] = number
        self._lead.move(message.shard, message.host, message.port)
        self._links.give(message.shard, message.host, message.port)
        return PlaceGiven(message.id, number)

    def _refusal(self, message: TakePlace) -> str:
        """Return why a standby is not given the place that it asks for; empty: it is."""
        secret, where = self._files.generations.secret, (message.host, message.port)
        facts = message.run, message.shard, *where
        if message.run != self._files.run or not proves_place(message.place_proof, secret, *facts):
            return (
                f"a standby of run {message.run} has asked for it, without a proof of that run that"
                f" is right (this is run {self._files.run})"
            )
        if not (0 < message.port < _PORTS and 0 < len(message.host) <= _LONGEST_HOST):
            return f"{message.host:.40}:{message.port} is no address"
        place, at = (message.run, message.shard, message.shards), (message.version, message.update)
        state = ShardState(0, True, *place, *at, message.measured, message.holds)
        return self._lead.place_refusal(state)


async def take_place(
    env: Environment,
    leads: Sequence[str],
    token: str | None,
    tls: Callable[[str], TlsTarget] | None,
    state: ShardState,
    secret: bytes,
    url: str,
    patience: float,
) -> int:
    """Ask the lead for the place of a follower that it has lost; return the number of the place.

    Parameters
    ----------
    env, token, tls
        As of `OutgoingLink`.
    leads
        The URLs of which one is the lead's.
    state
        What the standby holds.
    secret
        The run's.
    url
        The standby's own.
    patience
        Seconds that each of them may take.

    Raises
    ------
    Refused
        When the lead does not give it.
    ConnectionLost
        When there is no lead.
    """
    host, port = urls.parse(url)

    def request(local: str) -> Message:
        where, at = (local if host in _ANY else host, port), (state.version, state.update)
        proof = place_proof(secret, state.run, state.shard, *where)
        place = state.run, state.shard, state.shards
        return TakePlace(1, *place, *where, *at, state.measured, state.holds, proof)

    why = list[str]()
    for lead in leads:
        try:
            found = await ask(env, lead, token, request, patience, tls)
        except (ConnectionLost, Unavailable, OSError) as error:  # it is gone, or is a standby
            why.append(f"{lead}: {error}")
            continue
        except AiopsError as error:
            raise Refused(f"{lead}: {error}") from None
        if not isinstance(found, PlaceGiven):
            raise RemoteProtocolError(f"{lead}: {found.kind!r} is no answer to 'take_place'")
        return found.place
    raise ConnectionLost(f"no lead could be asked for the place ({'; '.join(why)})")
