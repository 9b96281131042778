"""The worker's part of an algorithm, sans-I/O: strategies that carry out the client plan.

A `LocalStrategy` receives one gradient per mini-batch. It takes the local part of the step, and
returns the transfer to make; its driver (`aiops.client.training_loop` for a worker, the simulator,
a test) makes it, and passes on the answer. For each gradient::

    gradients = directions.of(gradients)        # if there are `directions_for` the plan;
                                                # `directions.took()` once the step is taken
    strategy.apply(gradients)                   # the worker's own step, if it takes any
    if strategy.due and strategy.under_way:     # no other transfer before the oldest has arrived
        ...wait for it...; strategy.arrived(receipt)
    transfer = strategy.transfer()              # the transfer to make now, or None
    if strategy.waits:                          # no other gradient before it has arrived
        ...wait for it...; strategy.arrived(receipt)

At most `LocalStrategy.depth` transfers are under way, which is one nearly always. Between these
calls a driver may pass on an answer at any time, but not between computing a gradient and applying
it: the gradient belongs to `LocalStrategy.params` as they were.

The plan's keys: ``routine`` names the strategy; ``push_every``, ``fetch_every`` (steps), ``inner``
(an optimiser and its settings, `aiops.algorithms.optimizers`), ``no_overlap``, ``overlap``,
``limit``, ``fragments``, ``in_step``, ``mix``, ``moving_rate``, ``lookahead``, ``gate``, ``worker``
and ``orthogonal`` are explained where they are used. A plan comes from a server, so its values are
checked (`aiops.client.strategies.plan`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from aiops.client.params import Params
from aiops.client.requests import Transfer
from aiops.client.strategies.base import Direct, LocalStrategy
from aiops.errors import UsageError, nearest

if TYPE_CHECKING:
    from aiops.client.strategies.directions import Directions

__all__ = [
    "Direct",
    "LocalStrategy",
    "Transfer",
    "directions_for",
    "no_overlap",
    "strategy_for",
]


def strategy_for(plan: Mapping[str, Any], params: Params, overlap: int = 0) -> LocalStrategy:
    """Return the strategy that a client plan names.

    Parameters
    ----------
    plan
        As the server announced it.
    params
        The server's current parameters; the strategy's from here on.
    overlap
        How many exchanges may be under way while gradients are computed; 0: as the plan has it.

    Raises
    ------
    UsageError
        When the plan asks for what this client does not know, the model cannot be trained so, or
        exchanges may not overlap with computing.
    """
    name = plan.get("routine", "direct")
    if not isinstance(name, str) or name not in _ROUTINES:
        raise UsageError(
            f"the server wants workers to follow the routine {name!r}, which this client does not"
            f" know ({nearest(str(name), _ROUTINES)}): upgrade aiops here"
        )
    why = no_overlap(plan) if overlap else ""
    if why:
        raise UsageError(f"this policy does not work with overlap: {why}; leave overlap out")
    return _ROUTINES[name](plan, params, overlap)


_NO_OVERLAP: Mapping[str, str] = {
    "waits": "the answer to a push waits for other workers, and so this worker waits on purpose",
    "sent": "its rule compares a gradient with the parameters that its worker was sent last, and"
    " these would be newer than those that it was computed at",
    "newest": "only gradients of the newest parameters are used, and these would be a step older",
}
"""Why a worker may not overlap exchanges and computing: by the plan's ``no_overlap``."""

_LOCAL_STEPS: Mapping[str, str] = {
    "local": "a worker takes several steps for each exchange, so have it take more of them"
    " (--set local_steps=N; diloco also has --set overlap=true)",
    "elastic": "a worker takes p steps for each exchange, so have it take more of them (--set p=N)",
}
"""The same by the routine, unless the plan's ``overlap`` has it done in any case."""


def no_overlap(plan: Mapping[str, Any]) -> str:
    """Return why workers may not compute on while a push is answered; empty: they may."""
    if "no_overlap" in plan:
        word = str(plan["no_overlap"])
        return _NO_OVERLAP.get(word, f"the server refuses it, because of {word!r}")
    if plan.get("overlap", "none") != "none":
        return ""
    return _LOCAL_STEPS.get(str(plan.get("routine")), "")


def _direct(plan: Mapping[str, Any], params: Params, overlap: int) -> LocalStrategy:
    if not overlap:
        return Direct(params)
    from aiops.client.strategies.overlapped import Overlapped

    # An increment is of the version that was held when it was asked for.
    return Overlapped(params, 1 if plan.get("fetch_codec") else overlap)


def directions_for(plan: Mapping[str, Any], params: Params) -> Directions | None:
    """Return what makes directions of gradients before a strategy gets them, if the plan says so.

    None: it does not, or no tensor is a matrix.

    Raises
    ------
    UsageError
        When the plan's value is none.
    """
    if "orthogonal" not in plan:
        return None
    from aiops.client.strategies.directions import Directions

    return Directions(plan, params.layout) or None


def _accumulate(plan: Mapping[str, Any], params: Params, overlap: int) -> LocalStrategy:
    from aiops.client.strategies.accumulate import Accumulate

    return Accumulate(plan, params, overlap=bool(overlap))


def _local(plan: Mapping[str, Any], params: Params, overlap: int) -> LocalStrategy:
    from aiops.client.strategies.local import Local

    return Local(plan, params)


def _elastic(plan: Mapping[str, Any], params: Params, overlap: int) -> LocalStrategy:
    from aiops.client.strategies.elastic import Elastic

    return Elastic(plan, params)


def _gated(plan: Mapping[str, Any], params: Params, overlap: int) -> LocalStrategy:
    from aiops.client.strategies.gated import Gated

    return Gated(plan, params, overlap=bool(overlap))


# Workers whose gradients travel as they are need no kernels, so these are imported when wanted.
_ROUTINES: Mapping[str, Callable[[Mapping[str, Any], Params, int], LocalStrategy]] = {
    "direct": _direct,
    "accumulate": _accumulate,
    "local": _local,
    "elastic": _elastic,
    "gated": _gated,
}
