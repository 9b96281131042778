"""Downpour SGD."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from aiops.algorithms.local import Inner
from aiops.algorithms.optimised import Optimised


@dataclass(frozen=True, kw_only=True)
class Downpour(Optimised):
    """Downpour SGD: workers step by themselves, push what accrued, and fetch now and then.

    .. math::

        worker:  x ← x − α · g,  a ← a + g
                 every n_push steps push a, a ← 0;  every n_fetch steps x ← θ
        server:  θ ← θ − α · a

    The server applies everything at once. With n_push = n_fetch = 1 this is `ASGD`.

    Settings
    --------
    lr : float, default 0.04
        Learning rate α, the server's and the workers'.
    n_push : int, default 5
        Steps between pushes of the accrued (summed) gradient.
    n_fetch : int, default 5
        Steps between fetches.

    Source
    ------
    Dean et al. 2012, *Large scale distributed deep networks*, section 4.1 and algorithm 7.1; whose
    best results use ``--set optimizer=adagrad``.

    Note
    ----
    A worker pushes in the background and computes on; it waits only for a fetch, or when the push
    before has not been answered yet. As in the paper's algorithm 7.1, a fetch overwrites local
    steps that have not been pushed (they are not lost: they travel with the next push). ``clip``
    and ``optimizer`` are the server's; local steps are plain.

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

    def plan(self, workers: int | None) -> dict[str, Any]:
        """Tell workers to accrue."""
        inner = Inner.own_steps(self, workers)
        return {
            **super().plan(workers),
            "routine": "accumulate",
            "push_every": self.n_push,
            "fetch_every": self.n_fetch,
            "inner": inner.plan(),
        }
