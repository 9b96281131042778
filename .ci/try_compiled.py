"""Train over a server in this program, and fail unless compiled code has carried the exchanges.

``python .ci/try_compiled.py``, with the Python that has the wheel: cibuildwheel's test.
"""

from __future__ import annotations

import asyncio

import numpy as np

import aiops
from aiops.compiled import exchange_type


async def main() -> None:
    """Take a few steps; the first ones are the general way."""
    assert exchange_type() is not None, f"{aiops.__file__} has no compiled code that can be used"
    carried = 0
    async with aiops.serve(port=0, policy="asgd", set={"lr": 0.1}) as server:

        def train() -> list[float]:
            nonlocal carried
            with aiops.Worker(server.url, {"w": np.ones(4, np.float32)}) as worker:
                for _ in range(5):
                    worker.step({"w": np.ones(4, np.float32)})
                carried = worker._client._connection.short.compiled is not None
                return worker.params["w"].tolist()

        assert np.allclose(await asyncio.to_thread(train), 0.5)
    assert carried, "the exchanges took the way in Python"
    print(f"compiled code carries exchanges: {aiops.__file__}")


if __name__ == "__main__":
    asyncio.run(main())
