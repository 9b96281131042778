"""The waits of a server that ends: for answers, for files, for connections to close."""

from __future__ import annotations

import asyncio
import contextlib

from aiops.serving.acceptor import Acceptor, Coordinator
from aiops.serving.event_dispatcher import EventDispatcher
from aiops.serving.run_state import RunState
from aiops.serving.state.shard_states import LeadState

_UNMOVED = 0.5
"""Seconds without progress after which unsent answers do not delay a server's end."""


class Draining:
    """The waits of one server before it closes; each has an end.

    Parameters
    ----------
    coordinator, connections, run_state, dispatcher
        The server's.
    deadline
        Seconds for which answers are waited for at most.
    """

    def __init__(
        self,
        coordinator: Coordinator,
        connections: Acceptor,
        run_state: RunState,
        dispatcher: EventDispatcher,
        deadline: float,
    ) -> None:
        self._coordinator, self._connections = coordinator, connections
        self._run_state, self._dispatcher, self._deadline = run_state, dispatcher, deadline

    async def answered(self) -> None:
        """Wait until everything is answered and sent, or peers have stopped reading."""
        loop, connections, run_state = (
            asyncio.get_running_loop(),
            self._connections,
            self._run_state,
        )
        moved = began = loop.time()
        sent = -1
        while (
            not self._coordinator.idle
            or connections.unsent
            or run_state.holds
            or run_state.feeds_behind
        ):
            now, before = loop.time(), sent
            sent = connections.sent
            if sent != before or not self._coordinator.idle:
                moved = now
            if run_state.holds:
                moved = now  # the disk has its time
            if now - began >= self._deadline or now - moved >= _UNMOVED:
                return
            await self._change(0.05)

    async def last_set(self, until: float) -> None:
        """Have all servers of a sharded model write their states, until a time at most."""
        state, loop = self._run_state.kept, asyncio.get_running_loop()
        if not isinstance(state, LeadState):
            return
        while loop.time() < until and state.take_last() and not self._dispatcher.broken:
            await self._change(0.05)
        state.report_last()

    async def all_gone(self) -> None:
        """Wait until no connection is left, for at most half a second."""
        loop = asyncio.get_running_loop()
        until = loop.time() + _UNMOVED
        while self._connections.peers and loop.time() < until:
            await self._change(0.05)

    async def _change(self, seconds: float) -> None:
        """Wait until an event is handled or a connection ends, for at most ``seconds``."""
        self._dispatcher.changed = changed = asyncio.Event()
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(changed.wait(), seconds)
