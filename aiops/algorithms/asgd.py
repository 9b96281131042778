"""Asynchronous SGD."""

from __future__ import annotations

from dataclasses import dataclass

from aiops.algorithms.server_optimizer import Optimised


@dataclass(frozen=True, kw_only=True)
class ASGD(Optimised):
    """Asynchronous SGD: apply every gradient at once, however stale.

    .. math:: θ ← θ − α · g

    The server answers each push with the new parameters; no worker waits for another.

    Settings
    --------
    lr : float, default 0.04
        Learning rate α.

    Steps
    -----
    A step of a worker is one mini-batch of µ examples, and pushes its gradient. An update, and so a
    version, is of one gradient, and stands for µ examples. By default ``schedule`` counts updates,
    those of all λ workers together: λ for each step of one worker.

    Source
    ------
    Bengio et al. 2003; Dean et al. 2012 (Downpour SGD with n_push = n_fetch = 1); the "Async SGD
    protocol" of Odena, *Faster Asynchronous SGD*, section 2.1.

    Example
    -------
    >>> ASGD(lr=0.1).modulation(staleness=7)
    1.0
    """

    family = "asynchronous"
    neighbours = "sasgd fasgd hardsync downpour"
    name = "asgd"
    lr: float = 0.04
