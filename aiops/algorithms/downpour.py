"""Downpour SGD."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from aiops.algorithms.local_training import InnerOptimizer, refuse_other_schedules
from aiops.algorithms.server_optimizer import Optimised


@dataclass(frozen=True, kw_only=True)
class Downpour(Optimised):
    """Downpour SGD: workers step locally, push accrued gradients, and fetch at intervals.

    .. math::

        worker:  x ← x − α · g,  a ← a + g
                 every n_push steps push a, a ← 0;  every n_fetch steps x ← θ
        server:  θ ← θ − α · a

    The server applies every push at once. With n_push = n_fetch = 1 this is `ASGD`.

    Settings
    --------
    lr : float, default 0.04
        Learning rate α, the server's and the workers'.
    n_push : int, default 5
        Steps between pushes of the accrued (summed) gradient.
    n_fetch : int, default 5
        Steps between fetches.

    Steps
    -----
    A step of a worker is one mini-batch of µ examples, and is a local step; every n_push steps
    their sum is pushed. An update, and so a version, is of one push, and stands for n_push·µ
    examples of one worker. By default ``schedule`` counts updates, at the server and in local
    steps: λ for n_push steps of each worker.

    Source
    ------
    Dean et al. 2012, *Large scale distributed deep networks*, section 4.1 and algorithm 7.1. Its
    best results use Adagrad: ``--set optimizer=adagrad``.

    Note
    ----
    A worker pushes in the background and goes on computing; it waits only for a fetch, or while its
    previous push is unanswered. As in the paper's algorithm 7.1, a fetch overwrites local steps
    that have not been pushed; their gradients are in the next push. ``clip`` and ``optimizer``
    apply to the server; local steps are plain SGD.

    Example
    -------
    >>> plan = Downpour(n_push=2, n_fetch=10).plan(workers=None)
    >>> plan["routine"], plan["push_every"], plan["fetch_every"]
    ('accumulate', 2, 10)
    """

    family = "local training"
    neighbours = "asgd no-delay easgd"
    name = "downpour"
    lr: float = 0.04
    n_push: int = 5
    n_fetch: int = 5

    def __post_init__(self) -> None:
        """Check the settings."""
        super().__post_init__()
        self.require("n_push", self.n_push >= 1, "1 or more")
        self.require("n_fetch", self.n_fetch >= 1, "1 or more")
        refuse_other_schedules(self)

    def plan(self, workers: int | None) -> dict[str, Any]:
        """Return the plan of accruing workers."""
        inner = InnerOptimizer.own_steps(self, workers)
        return {
            **super().plan(workers),
            "routine": "accumulate",
            "push_every": self.n_push,
            "fetch_every": self.n_fetch,
            "inner": inner.plan(),
        }
