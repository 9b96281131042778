"""Decide whether an algorithm can train a model: its sparse tables, and its size."""

from __future__ import annotations

from aiops.algorithms.base import Algorithm, Immediate
from aiops.kernels import STATISTIC_MOST


def tables_obstacle(algorithm: Algorithm) -> str | None:
    """Return why the model may have no sparse tables, or None if it may.

    The rows of a table are updated one push at a time, and a row that a push does not name keeps
    its parameters and its state. So every gradient must be applied at once, and
    `Algorithm.sparse` must hold.
    """
    if not isinstance(algorithm.policy(1), Immediate):
        return (
            f"{algorithm.name} collects gradients or holds answers before a step, and the rows of a"
            " table are updated push by push: choose a policy that applies every gradient at"
            " once, such as asgd, sasgd or fasgd"
        )
    if algorithm.clip:
        return (
            f"{algorithm.name} with clip measures a gradient over all that an update touches, and a"
            " push of rows is no whole gradient: set clip to 0"
        )
    if not algorithm.sparse:
        return (
            f"the rule of {algorithm.name} has state that would stand still in the rows that a push"
            " does not name, and it does not say that this is right: choose asgd or sasgd"
            " (optimizer sgd or adagrad), or fasgd"
        )
    return None


def size_obstacle(algorithm: Algorithm, parameters: int) -> str | None:
    """Return why the model may not have as many parameters, outside its tables, or None if it may.

    The statistic of a rule is added up exactly, as 64-bit integers.
    """
    if algorithm.rule().statistic is None or parameters <= STATISTIC_MOST:
        return None
    return (
        f"{algorithm.name} adds up a statistic of every parameter, in 64 bits, which holds the sum"
        f" of {STATISTIC_MOST} at most, and the model has {parameters}: choose a policy without"
        " one, such as sasgd"
    )
