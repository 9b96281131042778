"""Asynchronous SGD with an exponential penalty on staleness."""

from __future__ import annotations

from dataclasses import dataclass

from aiops.algorithms.sasgd import SASGD


@dataclass(frozen=True, kw_only=True)
class Exponential(SASGD):
    """Asynchronous SGD whose learning rate falls exponentially with staleness.

    .. math:: θ ← θ − α · exp(−ρτ) · g

    Settings
    --------
    lr : float, default 0.04
        Learning rate α.
    modulate : str, default ``exponential``
        This is `SASGD` with another default: any member of the family may be named.
    rho : float, default 0.1
        ρ, the penalty per version of staleness.

    Steps
    -----
    A step of a worker is one mini-batch of µ examples, and pushes its gradient. An update, and so a
    version, is of one gradient, and stands for µ examples. By default ``schedule`` counts updates,
    those of all λ workers together: λ for each step of one worker.

    Source
    ------
    Chan & Lane 2014, *Distributed asynchronous optimization of convolutional neural networks*;
    compared with by Odena, *Faster Asynchronous SGD*, section 2.

    Example
    -------
    >>> [round(Exponential().modulation(tau), 3) for tau in (0, 1, 10)]
    [1.0, 0.905, 0.368]
    """

    family = "staleness-aware"
    neighbours = "sasgd fasgd asgd"
    name = "exponential"
    modulate: str = "exponential"
