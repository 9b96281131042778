"""The workers of a simulated cluster, of either kind: those of a server, and those that average."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, Self, TypeAlias

import numpy as np

from aiops.algorithms import find
from aiops.client.asyncio.averager import AsyncModelAverager
from aiops.client.asyncio.worker import AsyncWorker
from aiops.common.closing import AsyncClosing
from aiops.errors import UsageError
from aiops.model.layout import Array
from aiops.serving.config import Config

Compute: TypeAlias = Callable[[Mapping[str, Array]], Awaitable[Mapping[str, Array]]]
"""From parameters to the gradients of the next mini-batch, after its compute time."""


class AveragingWorker(AsyncClosing):
    """A worker that trains a model of its own by plain SGD, and averages it with the others'.

    Its methods and figures are those of `AsyncWorker`.

    Attributes
    ----------
    model
        Its parameters.
    """

    recomputed = 0

    def __init__(
        self,
        url: str,
        params: Mapping[str, Array],
        *,
        overlap: int,
        name: str,
        timeout: float,
    ) -> None:
        if overlap:
            raise UsageError("workers that average push nothing that could overlap: leave it out")
        self.model = {key: np.array(array) for key, array in params.items()}
        self._averager = AsyncModelAverager(url, self.model, name=name, timeout=timeout)
        self.idle_seconds = 0.0

    @property
    def steps(self) -> int:
        """Mini-batches so far."""
        return self._averager.steps

    @property
    def traffic(self) -> tuple[int, int]:
        """Bytes received and sent, both the server's and the other workers'."""
        return self._averager.traffic

    @property
    def carried(self) -> int:
        """Bytes that crossed the network; over all workers each byte is counted once."""
        return sum(self.traffic) - self._averager.stats.traffic.bytes_in

    async def step(self, compute: Compute) -> None:
        """Train on a mini-batch: it is computed, and applied, under the model's lock."""
        loop = asyncio.get_running_loop()
        asked, busy = loop.time(), 0.0
        async with self._averager.step():
            began = loop.time()
            for name, gradient in (await compute(self.model)).items():
                self.model[name] -= self._averager.lr * gradient
            busy = loop.time() - began
        self.idle_seconds += loop.time() - asked - busy

    async def connect(self) -> Self:
        """Join the other workers."""
        await self._averager.connect()
        return self

    async def close(self) -> None:
        """Leave the other workers."""
        await self._averager.close()


SimulatedWorker: TypeAlias = AsyncWorker | AveragingWorker


def worker_kind(config: Config) -> type[AsyncWorker] | type[AveragingWorker]:
    """Return the class of workers that a server with these settings needs.

    Raises
    ------
    UsageError
        When the settings cannot work.
    """
    plan = find(config.policy).make(config.settings()).plan(config.workers)
    return AveragingWorker if "average" in plan else AsyncWorker


def carried(members: Sequence[SimulatedWorker]) -> int:
    """Return the bytes that crossed the network for some workers, each counted once."""
    return sum(
        one.carried if isinstance(one, AveragingWorker) else sum(one.traffic) for one in members
    )


def mean_model(members: Sequence[SimulatedWorker]) -> dict[str, Array]:
    """Return the mean of the models of averaging workers."""
    models = [one.model for one in members if isinstance(one, AveragingWorker)]
    found: dict[str, Array] = {}
    for name, array in models[0].items():
        every: list[Any] = [model[name] for model in models]
        found[name] = np.mean(every, axis=0, dtype=np.float64).astype(array.dtype)
    return found
