"""Pace a server's connections under its bandwidth budget, and report its use to the engine."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Self

from aiops.bandwidth.token_bucket import Budget
from aiops.engine.events import BudgetTick, Shares
from aiops.net.environment import Environment
from aiops.net.paced_transport import PacedTransport, Pacer
from aiops.serving.peer import Peer

_EVERY = 0.1
"""Seconds between two reports of a budget's use."""

_CONNECTION = 16
"""Bytes per second that a budget must have per connection: each holds a grant of one byte."""


_HANDSHAKE, _HANDSHAKES, _FEWEST = 4096, 1.0, 4
"""Bytes of a TLS handshake, roughly; the seconds of the budget that those under way may take (more
would all be given up by their clients, and begun again, without end); and how many there may be in
any case."""


class Pacing:
    """The budget of one server.

    Parameters
    ----------
    pacer
        Grants bytes to the connections.
    post
        Handles a `BudgetTick`, ten times a second while bytes cross.

    Attributes
    ----------
    most
        Connections that the budget has bytes for.
    """

    def __init__(self, pacer: Pacer, post: Callable[[BudgetTick], None]) -> None:
        self.pacer, self._post = pacer, post
        self.most = pacer.narrowed // _CONNECTION
        self._next: asyncio.TimerHandle | None = None
        self._spent = 0  # bytes that had crossed at the last report
        self._idle = True  # nothing was on its way then

    @classmethod
    def of(
        cls,
        total: int | None,
        each: int | None,
        env: Environment,
        post: Callable[[BudgetTick], None],
    ) -> Self | None:
        """Return the pacing of a server; None if it has no budget.

        ``total``, ``each``: bytes per second of all clients together, and of each.
        """
        rates = [rate for rate in (total, each) if rate is not None]
        if not rates:
            return None
        return cls(Pacer(Budget(total, each, env.now()), env.now, min(rates)), post)

    @property
    def most_handshakes(self) -> int:
        """Handshakes of TLS that it can pay for before clients lose patience."""
        return max(_FEWEST, int(self.pacer.narrowed * _HANDSHAKES / _HANDSHAKE))

    def change(self, total: int | None, each: int | None) -> None:
        """Keep to other rates from here on."""
        pacer = self.pacer
        pacer.budget.change(total, each, pacer.now())
        pacer.narrowed = min(rate for rate in (total, each) if rate is not None)
        self.most = pacer.narrowed // _CONNECTION
        pacer.serve()

    def owe(self) -> None:
        """Keep to the budget together with the start before, whose last second is not known."""
        self.pacer.budget.owe(self.pacer.now())

    def begin(self, loop: asyncio.AbstractEventLoop) -> None:
        """Report the budget's use, now and at intervals."""
        self._next = loop.call_later(_EVERY, self.begin, loop)
        pacer, budget = self.pacer, self.pacer.budget
        now, total = pacer.now(), budget.total
        crossed, self._spent = budget.spent - self._spent, budget.spent
        second, peak = (total.used(now), total.peak) if total is not None else (0, 0)
        busy, limited = pacer.busy(), pacer.limited()
        idle, self._idle = self._idle, not (crossed or second or busy)
        if not (idle and self._idle):  # one report of an idle budget is enough
            self._post(BudgetTick(now, crossed, second, peak, budget.wanted, busy, limited))

    def stop(self) -> None:
        """Report no more; open connections are still paced."""
        if self._next is not None:
            self._next.cancel()

    def share(self, shares: Shares, peers: dict[int, Peer]) -> None:
        """Give these peers their shares of the budget."""
        for number, weight in shares.weights:
            peer = peers.get(number)
            if peer is not None and isinstance(peer.link, PacedTransport):
                self.pacer.budget.weigh(peer.link.flow, weight)
