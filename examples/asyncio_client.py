"""Train and watch from one event loop: three asynchronous workers and an observer.

::

    python examples/asyncio_client.py                   # with a server inside the same loop
    python examples/asyncio_client.py URL               # with a server that runs already

No worker waits for the observer, and it changes nothing. It fetches the parameters and the
statistics at the same time (calls on one `AsyncClient` are pipelined) and tests the parameters.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
from collections.abc import Sequence
from itertools import islice

import aiops
from aiops.lab.workloads import MLP, batches, load

WORKERS, STEPS, BATCH_SIZE = 3, 500, 32

digits = load("digits").flat()
model = MLP((digits.features, 64, digits.classes))


async def work(url: str, index: int) -> None:
    """Take `STEPS` steps; while one worker awaits the server, another one computes."""
    async with aiops.AsyncWorker(url, model.init(seed=0), name=f"worker-{index}") as worker:
        for x, y in islice(batches(digits, BATCH_SIZE, 0, index, WORKERS), STEPS):
            _loss, gradients = model.gradients(worker.params, x, y)
            await worker.step(gradients)  # pushes, fetches; worker.params is up to date


async def watch(url: str, training: asyncio.Event) -> float:
    """Report on the model twice per second while it is trained; return its final accuracy."""
    async with aiops.AsyncClient(url) as ps:
        while True:
            ending = not training.is_set()  # read before the fetch: the last fetch is then complete
            params, stats = await asyncio.gather(ps.fetch(evaluation=True), ps.stats())
            accuracy = model.accuracy(params, digits.test_x, digits.test_y)
            staleness = stats["mean_staleness"]
            print(f"version {params.version:5}  staleness {staleness:.2f}  accuracy {accuracy:.1%}")
            if ending:
                return accuracy
            await asyncio.sleep(0.5)


async def train(url: str) -> float:
    """Run the workers and the observer together; return the final accuracy."""
    async with aiops.AsyncClient(url, role="worker", name="first") as ps:
        await ps.define(model.init(seed=0))  # until then, `fetch` raises NotReady
    training = asyncio.Event()
    training.set()
    watching = asyncio.create_task(watch(url, training))
    await asyncio.gather(*(work(url, index) for index in range(WORKERS)))
    training.clear()
    return await watching


async def main(argv: Sequence[str]) -> int:
    """Train at the server given in ``argv`` or ``$AIOPS_URL``, or at one in this event loop."""
    url = argv[0] if argv else os.environ.get("AIOPS_URL")
    async with contextlib.AsyncExitStack() as stack:
        if not url:
            url = (await stack.enter_async_context(aiops.serve(port=0))).url
        print(f"test accuracy: {await train(url):.1%}")
    return 0


if __name__ == "__main__":
    sys.exit(asyncio.run(main(sys.argv[1:])))
