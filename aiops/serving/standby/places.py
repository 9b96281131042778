"""The place of a follower that its lead has lost: its standby asks for it, and the lead gives it.

A lead alone decides who its followers are, so there are no two servers in one place. It gives the
place of a lost follower to a standby that has all that the model relies on, notes that, and leads
that server from then on. The one that had the place before is not led again, whether it comes back
or not: the number of the place, which the lead says in its hello, is higher than its own.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from ipaddress import ip_address

from aiops.common import urls
from aiops.errors import (
    AiopsError,
    ConnectionLost,
    Refused,
    RemoteProtocolError,
    Standby,
    Unavailable,
)
from aiops.model.parts import LARGEST
from aiops.net.environment import Environment
from aiops.net.tls import TlsTarget
from aiops.serving.config import Config
from aiops.serving.shard_links import ShardLinks
from aiops.serving.standby.link import ask
from aiops.serving.state.state_files import StateFiles
from aiops.shards.lead import Lead
from aiops.shards.reports import check_state
from aiops.state.directory import TakenPlace
from aiops.wire.handshake import place_proof, proves_place
from aiops.wire.messages import Error, Message
from aiops.wire.server_messages import ShardState
from aiops.wire.standby_messages import PlaceGiven, TakePlace

_log = logging.getLogger("aiops.server")

_BEGINS = 10.0
"""Seconds that a standby has to itself to begin in the place that it was given."""

_SOON = 0.1
"""Seconds until a lead that has lost a follower just now is asked again."""

_LONGEST_HOST, _PORTS = 255, 1 << 16

_ANY = ("0.0.0.0", "::")
"""Hosts of a listener on all addresses."""


class FollowerPlaces:
    """The places of a lead's followers, which it gives to their standbys.

    Parameters
    ----------
    lead, links, files, config, now
        The lead, its connections, its state, its settings and its clock.

    Attributes
    ----------
    on_taken
        Called with a shard whose place a server has that the settings do not name.
    """

    def __init__(
        self,
        lead: Lead,
        links: ShardLinks,
        files: StateFiles,
        config: Config,
        now: Callable[[], float],
    ) -> None:
        self._lead, self._links, self._files, self._now = lead, links, files, now
        self._given: dict[int, tuple[str, int, float]] = {}  # by shard: to which address, and when
        self._own, self._named = config.host, config.reach()
        self.on_taken: Callable[[int], None] = lambda shard: None

    def restore(self) -> None:
        """Reach the followers that have taken a place before, instead of those of the settings."""
        for place in self._files.generations.places:
            self._lead.followers.places[place.shard] = place.number
            if place.port:
                self._lead.followers.move(place.shard, place.host, place.port)
                self._links.move(place.shard, self._reached(place.host), place.port)

    def begin(self) -> None:
        """Tell which places have been taken, now that this lead serves."""
        for place in self._files.generations.places:
            if place.port:
                self.on_taken(place.shard)

    def is_taken(self, shard: int) -> bool:
        """Return whether a server has a place that the settings do not name."""
        return any(place.shard == shard and place.port for place in self._files.generations.places)

    def _reached(self, host: str) -> str:
        """Return a host as this server reaches it; empty: its own."""
        return host or urls.local_address(self._own)

    def answer(self, message: TakePlace) -> Message:
        """Give a standby the place that it asks for, or refuse it; return the answer."""
        why = self._refusal(message)
        if not why:
            number = self._lead.followers.next_place(message.shard, message.generation)
            near = _is_loopback(message.host) and self._own in _ANY  # at another host for others
            host, port = "" if near else message.host, message.port
            named = self._named[message.shard - 1]
            returns = (named[0] or self._reached(""), named[1]) == (self._reached(host), port)
            place = TakenPlace(message.shard, number, *(("", 0) if returns else (host, port)))
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
        self._given[message.shard] = message.host, message.port, self._now()
        self._lead.followers.places[message.shard] = number
        self._lead.followers.move(message.shard, *(named if returns else (host, port)))
        self._links.give(message.shard, self._reached(host), port)
        if not returns:
            self.on_taken(message.shard)
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
        if self._lead.followers.next_place(message.shard, message.generation) > LARGEST:
            return (
                f"generation {message.generation:,}, or that of a server that had the place, is"
                " followed by none"
            )
        beginning = self._beginning(message)
        if beginning:
            return f"{beginning} was given it, and begins to be that follower"
        place, at = (message.run, message.shard, message.shards), (message.version, message.update)
        state = ShardState(0, True, *place, *at, message.measured, message.holds)
        try:
            check_state(state)
        except RemoteProtocolError as error:
            return str(error)
        return self._lead.readmission.place_refusal(state)

    def _beginning(self, message: TakePlace) -> str:
        """Return the address of another server that was given a place just now, and is not there.

        Else two standbys could take it from each other again and again.
        """
        given = self._given.get(message.shard)
        if given is None or given[:2] == (message.host, message.port):
            return ""
        over = self._lead.followers.has_begun(message.shard) or self._now() >= given[2] + _BEGINS
        return "" if over else urls.address(*given[:2])


def _is_loopback(host: str) -> bool:
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


async def take_place(
    env: Environment,
    leads: Sequence[str],
    token: str | None,
    tls: Callable[[str], TlsTarget] | None,
    state: ShardState,
    generation: int,
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
    generation
        The highest of which it knows.
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
        here = local if host in _ANY else host
        return TakePlace(
            id=1,
            run=state.run,
            shard=state.shard,
            shards=state.shards,
            host=here,
            port=port,
            generation=generation,
            version=state.version,
            update=state.update,
            measured=state.measured,
            holds=state.holds,
            place_proof=place_proof(secret, state.run, state.shard, here, port),
        )

    why = list[str]()
    for lead in leads:
        try:
            try:
                found = await ask(env, lead, token, request, patience, tls)
            except Unavailable as error:
                if isinstance(error, Standby):
                    raise
                await asyncio.sleep(_SOON)  # it ended all connections, as it lost the follower
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
