"""Large tensors are not copied in our Python, on either side."""

from __future__ import annotations

import asyncio
import threading
import tracemalloc
from typing import Any

import numpy as np
import pytest
import uvloop

import aiops

SIZE = 64 << 20


@pytest.mark.slow
def test_an_exchange_of_64_mib_allocates_next_to_nothing() -> None:
    """Client and server share this process, so what tracemalloc sees is both (NumPy tells it)."""
    started, url, stop = threading.Event(), "", asyncio.Event()
    loop: Any = uvloop.new_event_loop()

    async def serve() -> None:
        nonlocal url
        # Numba would compile meanwhile, in Python, where nothing has run this update before.
        async with aiops.serve(policy="asgd", port=0, kernels="numpy") as server:
            url = server.url
            started.set()
            await stop.wait()

    thread = threading.Thread(target=lambda: loop.run_until_complete(serve()))
    thread.start()
    try:
        assert started.wait(20)
        with aiops.Client(url, role="worker") as client:
            params = client.define({"w": np.zeros(SIZE // 4, np.float32)})
            gradients = {"w": np.ones(SIZE // 4, np.float32)}
            for _ in range(3):  # the receive buffer and the spare arena are made once
                client.exchange(params, gradients)
            tracemalloc.start()
            for _ in range(4):
                client.exchange(params, gradients)
            _now, peak = tracemalloc.get_traced_memory()
            tracemalloc.stop()
        assert peak < SIZE // 64
        assert params.version == 7
    finally:
        loop.call_soon_threadsafe(stop.set)
        thread.join(20)
        loop.close()
