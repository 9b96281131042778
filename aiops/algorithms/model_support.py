"""Decide whether an algorithm can train a model: its tables, its size, its tensors' names."""

from __future__ import annotations

from collections.abc import Collection, Iterable

from aiops.algorithms.base import Algorithm, rows_at_once
from aiops.algorithms.per_tensor import PerTensor, literal
from aiops.kernels import STATISTIC_MOST

_SHOWN = 8
"""Tables that an error names."""


def tables_obstacle(
    algorithm: Algorithm, tables: Collection[str] = ("",), *, alone: bool = False
) -> str | None:
    """Return why the model may not have some sparse tables, or None if it may.

    The rows of a table are updated one push at a time, and a row that a push does not name keeps
    its parameters and its state. So every gradient must be applied at once, by a rule that reads
    nothing else than the row, and `Algorithm.sparse` must hold.

    Parameters
    ----------
    algorithm
        The server's.
    tables
        Their names. Default: one whose name no pattern of the settings means.
    alone
        Whether the model has no tensor beside its tables.
    """
    name, policy = algorithm.name, algorithm.policy(1)
    if not rows_at_once(policy):
        return (
            f"{name} collects gradients before a step or leaves some out, and the rows of a table"
            " are updated push by push: choose a policy that applies every gradient at once, such"
            " as asgd, sasgd, ssp or fasgd"
        )
    if alone and policy.awaits_workers:
        return (
            f"{name} counts a worker's steps by its pushes of tensors, and a model of tables alone"
            " has none: add a tensor (a bias will do), or choose a policy that makes no worker"
            " wait, such as asgd"
        )
    if alone and algorithm.schedule_unit in ("examples", "tokens"):
        return (
            f"{name} counts {algorithm.schedule_unit} by pushes of tensors, and a model of tables"
            " alone has none: add a tensor (a bias will do), or count updates or seconds"
        )
    clipped = algorithm.clipped(tables)
    if clipped:
        more = f" and so on, for {len(clipped)} tables" if len(clipped) > _SHOWN else ""
        return (
            f"{name} with clip measures a gradient over all that an update touches, and a push of"
            f" rows is no whole gradient: set clip to 0 for tables, --set"
            f" 'clip=0@{','.join(map(literal, clipped[:_SHOWN])) or '*'}'{more}"
        )
    if algorithm.rule().reads:
        return (
            f"{name} compares with the parameters that a worker was sent, and the server does not"
            " keep rows that it has sent: choose asgd, sasgd or fasgd"
        )
    if not algorithm.sparse:
        return (
            f"the rule of {name} does not say that it suits rows: its state would stand still in"
            " those that a push does not name, and a push of rows is a gradient. Choose asgd,"
            " sasgd or ssp with any optimizer, or fasgd"
        )
    return None


def size_obstacle(algorithm: Algorithm, parameters: int) -> str | None:
    """Return why the model may not have as many parameters, outside its tables, or None if it may.

    The statistic of a rule, or its gauge, is added up exactly, as 64-bit integers.
    """
    if algorithm.rule().summed is None or parameters <= STATISTIC_MOST:
        return None
    return (
        f"{algorithm.name} adds up a statistic of every parameter, in 64 bits, which holds the sum"
        f" of {STATISTIC_MOST} at most, and the model has {parameters}: choose a policy without"
        " one, such as sasgd"
    )


def names_obstacle(algorithm: Algorithm, names: Iterable[str]) -> str | None:
    """Return which pattern of the settings matches no tensor or table of a model, or None.

    ``names``: those of all tensors and tables.
    """
    return PerTensor.of(algorithm.per_tensor).unmatched(list(names))
