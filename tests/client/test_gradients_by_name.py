"""Gradients that are no arrays by name are refused by that, under every policy."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest

from aiops import AsyncWorker, Worker
from aiops.algorithms import BUILT_IN
from aiops.errors import UsageError
from tests.support import ServerThread

MODEL = {"w": np.zeros((4, 3), np.float32), "b": np.zeros(3, np.float32)}
GRADIENTS = {name: np.ones_like(array) for name, array in MODEL.items()}
WRONG: dict[str, tuple[Any, str]] = {
    "nothing": (None, "not NoneType$"),
    "a list": ([*GRADIENTS.values()], "not list$"),
    "with the loss": ((0.5, GRADIENTS), r"not tuple \(a function returns them alone, without a"),
    "a function of nothing": (lambda params: None, "not NoneType$"),
    "a function with the loss": (lambda params: (0.5, GRADIENTS), "without a loss"),
}


@pytest.mark.parametrize("policy", sorted(BUILT_IN.keys() - {"average"}))  # it takes no gradients
def test_they_are_refused_and_the_next_step_is_taken(policy: str) -> None:
    with (
        ServerThread(policy=policy, kernels="numpy", workers=1) as server,
        Worker(server.url, MODEL) as worker,
    ):
        overlaps = True
        for wrong, says in WRONG.values():
            with pytest.raises(UsageError, match=f"gradients are arrays by name.*{says}"):
                worker.step(wrong)
        worker.step(lambda params: GRADIENTS)
        try:
            beside = Worker(server.url, MODEL, overlap=True)
        except UsageError:  # it does not work with that
            overlaps = False
        if overlaps:
            with beside, pytest.raises(UsageError, match="gradients are arrays by name"):
                beside.step((0.5, GRADIENTS))


@pytest.mark.parametrize("policy", ["asgd", "downpour", "schedule-free"])
def test_an_asyncio_worker_refuses_them(policy: str) -> None:
    async def main(url: str) -> None:
        async with AsyncWorker(url, MODEL) as worker:
            for wrong, says in WRONG.values():
                with pytest.raises(UsageError, match=f"gradients are arrays by name.*{says}"):
                    await worker.step(wrong)
            await worker.step(GRADIENTS)

    with ServerThread(policy=policy, kernels="numpy", workers=1) as server:
        asyncio.run(main(server.url))
