"""The followers of a server that leads them: connections, places, and the model on all of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from aiops.common import urls
from aiops.durable.recovery import Recovered
from aiops.engine.events import Effect, Event
from aiops.net.environment import Environment
from aiops.net.tls import TlsServer
from aiops.serving.config import Config
from aiops.serving.run_state import RunState
from aiops.serving.shard_links import ShardLinks
from aiops.serving.standby.places import FollowerPlaces
from aiops.serving.state.state_files import StateFiles
from aiops.shards.collecting import Collecting
from aiops.shards.lead import Lead
from aiops.wire.connection import SinkFor
from aiops.wire.messages import Message
from aiops.wire.sinks import Sink


class Leading:
    """The followers of one server, as its lead has them.

    Parameters
    ----------
    lead, config, env, run_state, tls
        The server's.
    post, perform, stop_with
        Handle an event; carry out an effect; end with an error.
    on_taken
        Called with a shard whose place a server has that the settings do not name.

    Attributes
    ----------
    links
        The connections to the followers.
    places
        The places that standbys of followers may take; None: it keeps no state.
    """

    def __init__(
        self,
        lead: Lead,
        config: Config,
        env: Environment,
        run_state: RunState,
        tls: TlsServer | None,
        post: Callable[[Event], None],
        perform: Callable[[Effect], Any],
        stop_with: Callable[[BaseException | None], None],
        on_taken: Callable[[int], None],
    ) -> None:
        self._lead, self._config, self._run_state, self._perform = lead, config, run_state, perform
        algorithm = lead.engine.algorithm
        self.links = links = ShardLinks(
            config.follower_addresses(),
            *(config.token, lead.engine.options.run, algorithm.name, algorithm.settings()),
            *(config.waits, env),
            lead.sink_for_follower,
            post,
            lead.readmission.refusal,
            run_state.lead_generation,
            run_state.lead_proof,
            stop_with,
            tls=None if tls is None else tls.target,
            place=lambda shard: lead.followers.places.get(shard, 0),
            late=lead.late,
        )
        self.places: FollowerPlaces | None = None
        if run_state.files is not None:
            self.places = FollowerPlaces(lead, links, run_state.files, config, env.now)
            self.places.on_taken = on_taken

    async def begin(self, keep: Callable[[StateFiles, Recovered | None], None]) -> None:
        """Connect to the followers, and go back with them to the newest moment that all have.

        They go back first. If this server began another history before, and ended then, rows of two
        histories would have the same numbers. Standbys that were promoted are at the moments up to
        which each was fed. ``keep``: begins to keep the state that was recovered.
        """
        files, ahead = self._run_state.files, dict[int, int]()
        states = await self.links.connect(self._config.hello_deadline)
        if files is not None:
            recovered, ahead = self._run_state.go_back(files, self._lead, states)
            await self.links.roll_back(ahead)
            keep(files, recovered)
        self.links.lead(ahead)

    def moved(self, shard: int, port: int) -> None:
        """Reach a follower on this machine at another port from here on: it was started again."""
        if self.places is not None and self.places.is_taken(shard):
            self.places.on_taken(shard)
        else:
            self._lead.followers.move(shard, "", port)
            self.links.move(shard, urls.local_address(self._config.host), port)

    def send_away(self, client: str, why: str) -> None:
        """Have the followers take a client no more."""
        for order in self._lead.send_away(client, why):
            self._perform(order)

    def collect(self) -> Collecting | None:
        """Begin to collect the model from all shards; None while it cannot be read."""
        collecting = self._lead.collect()
        for order in collecting.orders if collecting is not None else ():
            self._perform(order)
        return collecting


def sinks_with_orders(lead: Lead, perform: Callable[[Effect], Any]) -> Callable[[int], SinkFor]:
    """Return the function of the sinks of each connection; the lead's orders are carried out."""

    def of_peer(peer: int) -> SinkFor:
        def sink_for(message: Message) -> Sink | None:
            sink, orders = lead.sink_for(peer, message)
            for order in orders:
                perform(order)
            return sink

        return sink_for

    return of_peer
