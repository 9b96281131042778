"""The worker's part of an algorithm, sans-I/O: strategies that carry out the client plan.

A `LocalStrategy` receives one gradient per mini-batch. It takes the local part of the step, and
returns the transfer to make; its driver (`aiops.client.training_loop` for a worker, the simulator,
a test) makes it, and passes on the answer. For each gradient::

    strategy.apply(gradients)                   # the worker's own step, if it takes any
    if strategy.due and strategy.under_way:     # no second transfer before the first has arrived
        ...wait for it...; strategy.arrived(receipt)
    transfer = strategy.transfer()              # the transfer to make now, or None
    if strategy.waits:                          # no other gradient before it has arrived
        ...wait for it...; strategy.arrived(receipt)

At most one transfer is under way. Between these calls a driver may pass on an answer at any time,
but not between computing a gradient and applying it: the gradient belongs to
`LocalStrategy.params` as they were.

The plan's keys: ``routine`` names the strategy; ``push_every``, ``fetch_every`` (steps), ``inner``
(an optimiser and its settings, `aiops.algorithms.optimizers`), ``overlap``, ``limit``,
``fragments``, ``in_step``, ``mix``, ``moving_rate``, ``lookahead``, ``gate`` and ``worker`` are
explained where they are used. A plan comes from a server, so its values are checked
(`aiops.client.strategies.plan`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from aiops.client.params import Params
from aiops.client.requests import Transfer
from aiops.client.strategies.base import Direct, LocalStrategy
from aiops.errors import UsageError, nearest

__all__ = ["Direct", "LocalStrategy", "Transfer", "strategy_for"]


def strategy_for(plan: Mapping[str, Any], params: Params) -> LocalStrategy:
    """Return the strategy that a client plan names.

    Parameters
    ----------
    plan
        As the server announced it.
    params
        The server's current parameters; the strategy's from here on.

    Raises
    ------
    UsageError
        When the plan asks for what this client does not know, or the model cannot be trained so.
    """
    name = plan.get("routine", "direct")
    if not isinstance(name, str) or name not in _ROUTINES:
        raise UsageError(
            f"the server wants workers to follow the routine {name!r}, which this client does not"
            f" know ({nearest(str(name), _ROUTINES)}): upgrade aiops here"
        )
    return _ROUTINES[name](plan, params)


def _accumulate(plan: Mapping[str, Any], params: Params) -> LocalStrategy:
    from aiops.client.strategies.accumulate import Accumulate

    return Accumulate(plan, params)


def _local(plan: Mapping[str, Any], params: Params) -> LocalStrategy:
    from aiops.client.strategies.local import Local

    return Local(plan, params)


def _elastic(plan: Mapping[str, Any], params: Params) -> LocalStrategy:
    from aiops.client.strategies.elastic import Elastic

    return Elastic(plan, params)


def _gated(plan: Mapping[str, Any], params: Params) -> LocalStrategy:
    from aiops.client.strategies.gated import Gated

    return Gated(plan, params)


# Workers whose gradients travel as they are need no kernels, so these are imported when wanted.
_ROUTINES: Mapping[str, Callable[[Mapping[str, Any], Params], LocalStrategy]] = {
    "direct": lambda plan, params: Direct(params),
    "accumulate": _accumulate,
    "local": _local,
    "elastic": _elastic,
    "gated": _gated,
}
