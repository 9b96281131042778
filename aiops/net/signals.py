"""Handle SIGINT and SIGTERM as calls in an event loop."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def handled(handler: Callable[[int], None]) -> Iterator[None]:
    """Have SIGINT and SIGTERM call a handler, with their number, in the running event loop.

    The handlers are removed at the end: uvloop's loop, when it ends, would leave the process
    without any.
    """
    loop, numbers = asyncio.get_running_loop(), (signal.SIGINT, signal.SIGTERM)
    for number in numbers:
        loop.add_signal_handler(number, handler, number)
    try:
        yield
    finally:
        for number in numbers:
            loop.remove_signal_handler(number)
