"""FedBuff: federated learning with buffered asynchronous aggregation."""

from __future__ import annotations

from dataclasses import dataclass

from aiops.algorithms.base import Policy
from aiops.algorithms.local_training import LocalTraining
from aiops.algorithms.modulation import Modulated
from aiops.algorithms.policies import EveryNth
from aiops.algorithms.server_optimizer import Optimised
from aiops.algorithms.trimming import Trimmed


@dataclass(frozen=True, kw_only=True)
class FedBuff(Modulated, LocalTraining, Trimmed, Optimised):
    """FedBuff: local training, and a server that averages a buffer of K updates.

    .. math::

        worker:  x ← θ;  H times x ← x − α_in · g;  push Δ = θ − x
        server:  θ ← θ − α · (1/K) Σ s(τ_l) · Δ_l  after K updates,   s(τ) = (1+τ)^(−1/2)

    No worker waits for another: it goes on with the newest parameters whether or not the buffer is
    full.

    Settings
    --------
    lr : float, default 1
        Learning rate α of the server; that of the workers' own steps is ``inner_lr``.
    k : int, default 4
        K, updates per step of the server (the paper's 10 is for hundreds of workers).
    modulate : str, default ``polynomial``
        s(τ), with its constants ``a`` (0.5), ``rho``, ``b`` and ``n``: see below.
    local_steps, inner, inner_lr : int, str, float; defaults 10, ``sgd``, 0.1
        See below.

    Steps
    -----
    A step of a worker is a local one, with one mini-batch of µ examples; every H steps their change
    is pushed. An update, and so a version, is of K pushes, and stands for K·H·µ examples. By
    default ``schedule`` counts updates; ``inner_schedule`` counts each worker's own steps. So
    ``lr`` is the server's learning rate, and not that of the usual training loop, which is
    ``inner_lr``.

    Source
    ------
    Nguyen et al. 2022, *Federated learning with buffered asynchronous aggregation*, algorithm 1 and
    section 5 (weights).

    Example
    -------
    >>> FedBuff().modulation(staleness=3)
    0.5
    """

    family = "local training"
    neighbours = "diloco softsync easgd"
    name = "fedbuff"
    lr: float = 1.0
    k: int = 4
    modulate: str = "polynomial"
    inner_lr: float = 0.1

    def __post_init__(self) -> None:
        """Check the settings."""
        super().__post_init__()
        self.require("k", self.k >= 1, "1 or more")

    def gathered(self, workers: int | None) -> int:
        """Return K."""
        return self.k

    def policy(self, workers: int | None) -> Policy:
        """Return the policy that steps after every K updates."""
        return EveryNth(self.k)
