"""Divide a bandwidth budget between the servers of one model.

Each server keeps its own share, so that all of them together keep the budget in any second without
asking each other. A push or a fetch of the whole model crosses at each server in proportion to the
bytes of the model there. So the budget is divided by these bytes: all portions then take equally
long, and no share is left over while another is short. A sixteenth of it is divided evenly, for
headers, and for what comes before there is a model.

Rows of tables that lie on all servers cross at each of them in equal parts, but how many do is not
known before. Then half of the budget is divided by the bytes of the tensors, and half evenly.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from aiops.bandwidth.units import LEAST, format_rate, too_slow
from aiops.errors import ConflictError

_EVEN = 16
"""A sixteenth of a budget is divided evenly."""


def shares_of(rate: int, held: Sequence[int]) -> list[int]:
    """Return the bytes per second of each server; their sum is ``rate``.

    ``held``: the bytes of the model on each. Before there is a model all of them are 0, and the
    first server has what is divided by bytes.

    >>> shares_of(1_600_000, [0, 0]), shares_of(1_600_000, [600, 200])
    ([1550000, 50000], [1175000, 425000])
    """
    even = max(rate // (_EVEN * len(held)), LEAST)
    rest, total = rate - even * len(held), sum(held)
    found = [even + rest * nbytes // total for nbytes in held] if total else [even] * len(held)
    found[0] += rate - sum(found)
    return found


def weights_of(held: Sequence[int], *, rows: bool) -> list[int]:
    """Return what a budget is divided by, given the bytes of the tensors on each server.

    ``rows``: whether rows of tables lie on all of them.

    >>> weights_of([600, 200], rows=False), weights_of([600, 200], rows=True)
    ([600, 200], [2000, 1200])
    """
    if not rows:
        return [*held]
    total = sum(held)
    return [nbytes * len(held) + total for nbytes in held] if total else [1] * len(held)


def check_shares(shards: int, budget: int | None, worker_budget: int | None) -> None:
    """Check that each of several servers has enough of each budget for its handshakes.

    Raises
    ------
    ConflictError
        When a budget is too small for their number.
    """
    least = 2 * shards * LEAST
    for name, rate in ("bandwidth", budget), ("worker", worker_budget):
        if shards > 1 and rate is not None and rate < least:
            raise ConflictError(
                f"a --{name}-budget of {format_rate(rate)} is too small for {shards} servers: give"
                f" at least {format_rate(least)}, or fewer --shards"
            )


def too_slow_on(
    rate: int, servers: Sequence[Iterable[tuple[str, int]]], *, rows: bool = False
) -> str | None:
    """Return why a budget that several servers share cannot carry a model, or None.

    ``servers``: of each, the names and bytes of the tensors, or pieces of tensors, that it holds.
    ``rows``: whether rows of tables lie on all of them.
    """
    held = [list(each) for each in servers]
    nbytes = [sum(nbytes for _name, nbytes in each) for each in held]
    shares = shares_of(rate, weights_of(nbytes, rows=rows))
    reasons = (too_slow(share, each) for share, each in zip(shares, held, strict=True))
    return next((why for why in reasons if why is not None), None)
