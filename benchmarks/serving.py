"""A server as a process, for benchmarks that connect to it themselves."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Iterator, Mapping
from contextlib import AsyncExitStack, contextmanager
from pathlib import Path
from typing import Any

import aiops
from aiops.lab.processes import ChildProcess, command
from aiops.lab.training_run import START_DEADLINE

_AT_ONCE = 50  # workers that connect at the same time
_GRACE = 1.0  # seconds that it has to end by itself


@contextmanager
def serving(policy: str, *flags: str, cache: Path | None = None) -> Iterator[tuple[str, int]]:
    """Run a server in a process of its own; yield its URL and the process's number.

    ``cache`` is the folder that it takes for the user's cache (``XDG_CACHE_HOME``).

    Raises
    ------
    ProcessFailed
        When it ends before it listens; its standard error has the reason.
    """
    words = command("aiops.server", "--port=0", f"--policy={policy}", "--log-level=warning", *flags)
    environment = None if cache is None else {**os.environ, "XDG_CACHE_HOME": str(cache.resolve())}
    with ChildProcess(
        "the server", words, environment=environment, lines=True, grace=_GRACE
    ) as server:
        yield server.first_line(START_DEADLINE), server.popen.pid


def free_port() -> int:
    """Return a port that is free now."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port: int = listener.getsockname()[1]
        return port


async def crowd(
    stack: AsyncExitStack,
    url: str,
    model: Mapping[str, Any],
    gradients: Mapping[str, Any],
    count: int,
) -> list[aiops.AsyncWorker]:
    """Return this many workers of a server, each of which has pushed once; ``stack`` ends them."""
    workers = [aiops.AsyncWorker(url, model, name=f"worker-{k}") for k in range(count)]
    for first in range(0, count, _AT_ONCE):
        some = workers[first : first + _AT_ONCE]
        await asyncio.gather(*(stack.enter_async_context(worker) for worker in some))
        await asyncio.gather(*(worker.step(gradients) for worker in some))
    return workers
