"""The settings of a demo, and the defaults that were found to train well."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from aiops.algorithms import find
from aiops.errors import UsageError, nearest
from aiops.lab.workloads import DATASETS
from aiops.serving.config import Config

MAX_WORKERS = 64


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """The defaults of one data set.

    Attributes
    ----------
    hidden
        Units of the perceptron's hidden layer.
    steps
        Mini-batches in all, over all workers.
    batch_size
        Examples in a mini-batch.
    lr
        Learning rate by policy; a policy that is not here keeps its own default.
    """

    hidden: int
    steps: int
    batch_size: int
    lr: Mapping[str, float]


_SMALL = {"fasgd": 0.005, "asgd": 0.04, "sasgd": 0.04, "softsync": 0.1, "hardsync": 0.1}
_LARGE = {"fasgd": 0.005, "asgd": 0.2, "sasgd": 0.4, "softsync": 0.4, "hardsync": 0.4}
_COLOUR = {"fasgd": 0.0003, "asgd": 0.02, "sasgd": 0.04, "softsync": 0.05, "hardsync": 0.05}

RECIPES: Mapping[str, Recipe] = {
    "digits": Recipe(hidden=64, steps=30_000, batch_size=32, lr=_SMALL),
    "mnist": Recipe(hidden=200, steps=10_000, batch_size=128, lr=_LARGE),
    "cifar10": Recipe(hidden=200, steps=6_000, batch_size=128, lr=_COLOUR),
    "synthetic": Recipe(hidden=64, steps=10_000, batch_size=32, lr=_SMALL),
}


@dataclass(frozen=True, kw_only=True)
class DemoSettings:
    """One demo, with nothing left open; `make` fills in the defaults."""

    policy: str
    workers: int
    dataset: str
    hidden: int
    steps: int
    batch_size: int
    seed: int
    lr: float | None
    set: tuple[str, ...] = field(default=())

    @classmethod
    def make(
        cls,
        *,
        policy: str = "fasgd",
        workers: int = 4,
        dataset: str = "digits",
        steps: int | None = None,
        batch_size: int | None = None,
        lr: float | None = None,
        set: tuple[str, ...] = (),
        seed: int = 0,
    ) -> DemoSettings:
        """Return the settings of a demo; what is None comes from the data set's recipe.

        Raises
        ------
        UsageError, ConflictError
            When they cannot work; before any process is started.
        """
        if dataset not in RECIPES:
            raise UsageError(f"no data set is called {dataset!r}; {nearest(dataset, DATASETS)}")
        recipe = RECIPES[dataset]
        steps = recipe.steps if steps is None else steps
        batch_size = recipe.batch_size if batch_size is None else batch_size
        _within("--workers", workers, 1, MAX_WORKERS)
        _within("--steps", steps, workers, 10**9)
        _within("--batch-size", batch_size, 1, 10**6)
        _within("--seed", seed, 0, 2**63 - 1)
        given = Config(set=list(set)).settings()
        if lr is None and "lr" not in given:
            lr = recipe.lr.get(policy)
        chosen = cls(
            policy=policy,
            workers=workers,
            dataset=dataset,
            hidden=recipe.hidden,
            steps=steps,
            batch_size=batch_size,
            seed=seed,
            lr=lr,
            set=set,
        )
        algorithm = find(policy).make(chosen.server.settings())
        algorithm.check(workers)
        if "average" in algorithm.plan(workers):
            raise UsageError(
                f"{policy}: the demo's workers push gradients, which this policy does not take;"
                " examples/average_numpy.py trains with it"
            )
        return chosen

    def share(self, index: int) -> int:
        """Return how many of the steps are the worker's of that number (from 0)."""
        return self.steps // self.workers + (index < self.steps % self.workers)

    @property
    def server(self) -> Config:
        """The server's settings."""
        return Config(policy=self.policy, workers=self.workers, set=list(self.set), lr=self.lr)


def _within(flag: str, value: int, low: int, high: int) -> None:
    if not low <= value <= high:
        raise UsageError(f"{flag} must be {low:,} to {high:,}, not {value:,}")
