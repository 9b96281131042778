"""Ctrl-C and a request to end, as calls in an event loop."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def heard(handler: Callable[[int], None]) -> Iterator[None]:
    """Have SIGINT and SIGTERM call a handler, with their number, in the running event loop.

    Afterwards they do what they do in any Python program: an event loop that ends, or uvloop's at
    any rate, would leave a process deaf to them.
    """
    loop, numbers = asyncio.get_running_loop(), (signal.SIGINT, signal.SIGTERM)
    for number in numbers:
        loop.add_signal_handler(number, handler, number)
    try:
        yield
    finally:
        for number in numbers:
            loop.remove_signal_handler(number)
