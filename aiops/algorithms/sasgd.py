"""Staleness-aware asynchronous SGD."""

from __future__ import annotations

from dataclasses import dataclass

from aiops.algorithms.modulation import Modulated
from aiops.algorithms.server_optimizer import Optimised


@dataclass(frozen=True, kw_only=True)
class SASGD(Modulated, Optimised):
    """Staleness-aware asynchronous SGD: divide the learning rate by the staleness.

    .. math:: θ ← θ − α · s(τ) · g,   s(τ) = 1/τ if τ > 0, else 1

    τ is the number of updates since the parameters that the gradient was computed on.

    Settings
    --------
    lr : float, default 0.04
        Learning rate α; 0.04 is what the FASGD paper found best for this rule on MNIST.
    modulate : str, default ``inverse``
        s(τ), with its constants ``rho``, ``a``, ``b`` and ``n``: see below.

    Steps
    -----
    A step of a worker is one mini-batch of µ examples, and pushes its gradient. An update, and so a
    version, is of one gradient, and stands for µ examples. By default ``schedule`` counts updates,
    those of all λ workers together: λ for each step of one worker.

    Source
    ------
    Zhang, Gupta, Lian & Liu 2015, *Staleness-aware async-SGD for distributed deep learning*, eq 1.

    Note
    ----
    FRED's own code and DynSGD divide by τ + 1: use ``--set modulate=inverse-plus-one``.

    Example
    -------
    >>> [SASGD().modulation(tau) for tau in (0, 1, 4)]
    [1.0, 1.0, 0.25]
    """

    family = "staleness-aware"
    neighbours = "asgd exponential fasgd softsync"
    name = "sasgd"
    lr: float = 0.04
