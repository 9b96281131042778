"""Connect the standby of a lead to those of its followers, and promote them all."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from aiops.durable.shard_standbys import StandbyGroup
from aiops.engine.events import Event, Lost, Order, Reported
from aiops.errors import Refused
from aiops.net.environment import Environment
from aiops.net.tls import TlsTarget
from aiops.serving.config import Config
from aiops.serving.shard_links import ShardLinks
from aiops.wire.server_messages import KeepSets
from aiops.wire.sinks import Discard

_log = logging.getLogger("aiops.server")

_TICK = 1.0
"""Seconds between two questions what the followers' standbys have."""

_PROMOTION = 60.0
"""Seconds that the followers' standbys may take to become followers."""


class ShardStandbys:
    """The connections of a lead's standby to those of its followers.

    Parameters
    ----------
    config
        Its settings.
    env
        Its clock, and what dials.
    run
        The run.
    policy, settings
        The lead's algorithm.
    generation, prove
        Return a generation of the primary's term, and the proof of a lead of it.
    servers
        Returns the shards that have a part of the model.
    keep
        Has the lead's standby keep the snapshots of these rows, and later ones.
    tls, place
        As of `ShardLinks`.
    """

    def __init__(
        self,
        config: Config,
        env: Environment,
        run: str,
        policy: str,
        settings: Mapping[str, Any],
        generation: Callable[[], int],
        prove: Callable[[int], bytes],
        servers: Callable[[], Sequence[int]],
        keep: Callable[[Sequence[int]], None],
        tls: Callable[[str], TlsTarget] | None,
        place: Callable[[int], int],
    ) -> None:
        addresses, self._env = config.follower_addresses(), env
        count = len(addresses) + 1
        names = [
            f"the standby of shard {shard} of {count} at {host}:{port}"
            for shard, (host, port) in enumerate(addresses, 1)
        ]
        self._keep, self._deadline = keep, config.hello_deadline
        self._group = StandbyGroup(run, names, servers)
        self._links = ShardLinks(
            *(addresses, config.token, run, policy, settings, config.waits, env),
            *(lambda shard, message: Discard(), self._post, self._group.refusal, generation),
            prove,
            lambda error: None,  # it is never to go back
            standby=True,
            tls=tls,
            place=place,
        )
        self._changed = asyncio.Event()
        self._ticker: asyncio.TimerHandle | None = None

    def begin(self, cuts: Sequence[int]) -> None:
        """Begin to connect to them; ``cuts``: the snapshots that the lead's standby has."""
        self._group.holds(cuts)
        self._links.begin(self._deadline)
        self._tick(asyncio.get_running_loop())

    def move(self, shard: int, host: str, port: int) -> None:
        """Reach a follower's standby at another address from here on: it was started again."""
        self._links.move(shard, host, port)

    def saved(self, cut: int) -> None:
        """Note that the lead's standby has a snapshot."""
        self._send(self._group.saved(cut))

    def report(self) -> list[dict[str, Any]]:
        """Return their lines of the statistics."""
        return self._group.report()

    async def check(self) -> None:
        """Check that all of them can be promoted.

        Raises
        ------
        Refused
            When one cannot be; the text names it.
        """
        self._send(self._group.ask())
        await self._until(lambda: self._group.answered, self._deadline)
        if self._group.why_not:
            raise Refused(f"this standby cannot be promoted: {self._group.why_not}")

    async def promote(self) -> None:
        """Have all of them become followers; none is connected afterwards.

        Raises
        ------
        Refused
            When one has not.
        """
        self._send(self._group.promote())
        await self._until(lambda: self._group.decided, _PROMOTION)
        why = self._group.not_promoted
        if why:
            raise Refused(f"{why}; promote again when it is there")
        self.end(leave=False)

    def end(self, *, leave: bool = True) -> None:
        """End the connections; ``leave``: have the followers' standbys end too."""
        if self._ticker is not None:
            self._ticker.cancel()
        self._links.end(leave=leave)

    def forked(self) -> None:
        """Let go of them in a fork."""
        self._links.forked()

    def _tick(self, loop: asyncio.AbstractEventLoop) -> None:
        self._ticker = loop.call_later(_TICK, self._tick, loop)
        self._send(self._group.ask())

    async def _until(self, true: Callable[[], bool], seconds: float) -> None:
        """Return when something is true, or as many seconds later."""
        try:
            async with asyncio.timeout(seconds):
                while not true():
                    self._changed.clear()
                    await self._changed.wait()
        except TimeoutError:
            return

    def _post(self, event: Event) -> None:
        assert isinstance(event, Reported | Lost), "there are no others of a follower"
        self._send(self._group.handle(event))
        self._changed.set()

    def _send(self, orders: Sequence[Order]) -> None:
        for order in orders:
            if order.shard:
                self._links.send(order)
            else:
                assert isinstance(order.message, KeepSets), "it is the only one"
                self._keep(order.message.cuts)
