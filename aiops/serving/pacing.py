"""A server's bandwidth budget: who paces its connections, and what the engine is told of it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Self

from aiops.bandwidth.token_bucket import Budget
from aiops.engine.events import BudgetTick, Shares
from aiops.net.environment import Environment
from aiops.net.paced_transport import PacedTransport, Pacer
from aiops.serving.config import Config
from aiops.serving.peer import Peer

_EVERY = 0.1
"""Seconds between two looks at what crosses."""

_CONNECTION = 16
"""Bytes per second that a budget must have per connection: each holds a grant of one byte."""


class Pacing:
    """The budget of one server.

    Parameters
    ----------
    pacer
        What grants the connections their turns.
    post
        Told every so often what has crossed (`BudgetTick`), while anything does.

    Attributes
    ----------
    most
        Connections that the budget has bytes for.
    """

    def __init__(self, pacer: Pacer, post: Callable[[BudgetTick], None]) -> None:
        self.pacer, self._post = pacer, post
        self.most = pacer.narrowed // _CONNECTION
        self._next: asyncio.TimerHandle | None = None
        self._spent = 0  # bytes that had crossed at the last look
        self._idle = True  # nothing was on its way then

    @classmethod
    def of(
        cls, config: Config, here: Environment, post: Callable[[BudgetTick], None]
    ) -> Self | None:
        """Return that of a server; None when it has no budget."""
        total, each = config.budgets()
        rates = [rate for rate in (total, each) if rate is not None]
        if not rates:
            return None
        return cls(Pacer(Budget(total, each, here.now()), here.now, min(rates)), post)

    def begin(self, loop: asyncio.AbstractEventLoop) -> None:
        """Look at what crosses, now and every so often."""
        self._next = loop.call_later(_EVERY, self.begin, loop)
        pacer, budget = self.pacer, self.pacer.budget
        now, total = pacer.now(), budget.total
        crossed, self._spent = budget.spent - self._spent, budget.spent
        second, peak = (total.used(now), total.peak) if total is not None else (0, 0)
        busy, pressed = pacer.busy(), pacer.pressed()
        idle, self._idle = self._idle, not (crossed or second or busy)
        if not (idle and self._idle):  # there is nothing new about nothing
            self._post(BudgetTick(now, crossed, second, peak, budget.wanted, busy, pressed))

    def stop(self) -> None:
        """Look no more; the connections that are there are still paced."""
        if self._next is not None:
            self._next.cancel()

    def share(self, shares: Shares, peers: dict[int, Peer]) -> None:
        """Give these peers their shares of the budget."""
        for number, weight in shares.weights:
            peer = peers.get(number)
            if peer is not None and isinstance(peer.link, PacedTransport):
                self.pacer.budget.weigh(peer.link.flow, weight)
