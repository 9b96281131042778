"""Decide whether an algorithm can train sparse tables."""

from __future__ import annotations

from aiops.algorithms.base import Algorithm, Immediate


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
