"""One bandwidth budget for all servers of a model: the share of each, and the traffic of all.

The budget is divided by the bytes of the model (`aiops.bandwidth.shares`). The lead tells each
follower its share (`PaceClients`), and each follower tells the lead what has crossed there
(`BudgetUsed`), ten times a second while bytes cross. The engine receives one `BudgetTick` about all
of them, so that gates are chosen by the whole budget's use. What servers send to each other is not
counted.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from itertools import pairwise

from aiops.bandwidth.shares import shares_of, weights_of
from aiops.engine.events import BudgetTick, Options, Order, SetBudget
from aiops.model.placement import Placement
from aiops.wire.server_messages import BudgetUsed, PaceClients


class BudgetShares:
    """The budgets of one sharded model, as its lead divides them.

    Parameters
    ----------
    options
        The budgets and the number of servers.
    """

    def __init__(self, options: Options) -> None:
        self._rates = options.budget, options.worker_budget
        self._weights = [0] * options.shards
        self._reports: dict[int, BudgetUsed] = {}  # the last of each follower
        self._crossed = 0  # bytes that followers have reported since the last tick
        self._peak = 0

    @property
    def any(self) -> bool:
        """True if there is a budget."""
        return self._rates != (None, None)

    def placed(self, placement: Placement, *, rows: bool = False) -> list[Order | SetBudget]:
        """Divide the budgets by the bytes of a placement; return what tells all servers.

        The lead's share shrinks first. A share that grows does so a second later (`TokenBucket`).
        ``rows``: whether rows of tables lie on all servers.
        """
        held = [high - low for low, high in pairwise(placement.edges)]
        self._weights = weights_of(held, rows=rows)
        orders = [self.order(shard) for shard in range(1, len(self._weights))] if self.any else []
        return [*self.paced(), *orders]

    def paced(self) -> list[SetBudget]:
        """Return what has the lead keep to its own share."""
        return [SetBudget(*self._share(0))] if self.any else []

    def order(self, shard: int, weights: Mapping[str, float] | None = None) -> Order:
        """Return the order that tells a follower its shares, and new weights of clients."""
        total, each = self._share(shard)
        return Order(shard, PaceClients(0, total or 0, each or 0, weights or {}))

    def _share(self, shard: int) -> tuple[int | None, int | None]:
        total, each = (
            None if rate is None else shares_of(rate, self._weights)[shard] for rate in self._rates
        )
        return total, each

    # ------------------------------------------------------------ the traffic of all

    def reported(self, shard: int, message: BudgetUsed) -> None:
        """Note what a follower has counted since its last report."""
        self._reports[shard] = message
        self._crossed += message.nbytes

    def lost(self, shard: int) -> None:
        """Forget the last report of a follower: its connections are gone."""
        self._reports.pop(shard, None)

    def of_all(self, tick: BudgetTick) -> BudgetTick:
        """Return a report of the lead's own traffic with that of its followers added.

        A worker that waits is likely to wait at several servers, and is counted once: ``busy`` is
        the largest of their numbers.
        """
        reports, crossed = list(self._reports.values()), self._crossed
        self._crossed = 0
        second = tick.second + sum(each.second for each in reports)
        self._peak = max(self._peak, tick.peak, second)
        return replace(
            tick,
            nbytes=tick.nbytes + crossed,
            second=second,
            peak=self._peak,
            backlog=tick.backlog + sum(each.backlog for each in reports),
            busy=max([tick.busy, *(each.busy for each in reports)]),
            limited=tick.limited or any(each.limited for each in reports),
        )


def first_share(options: Options) -> tuple[int | None, int | None]:
    """Return the lead's shares of the budgets before there is a model."""
    none = [0] * options.shards
    total, each = (
        None if rate is None else shares_of(rate, none)[0]
        for rate in (options.budget, options.worker_budget)
    )
    return total, each
