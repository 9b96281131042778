"""Gather a report on an event loop, by turns with the loop's other work."""

from __future__ import annotations

import asyncio
import time
from typing import TypeVar

from aiops.common.gathering import Gathering

__all__ = ["in_turns"]

T = TypeVar("T")


async def in_turns(gathering: Gathering[T]) -> tuple[T, float]:
    """Return what is gathered, and the seconds of the loop's thread on a processor that it took.

    At each pause what else is ready is done first, so a report of a thousand clients holds no
    exchange for longer than a slice of it takes.
    """
    took = 0.0
    while True:
        begun = time.thread_time()
        try:
            next(gathering)
        except StopIteration as ended:
            return ended.value, took + time.thread_time() - begun
        took += time.thread_time() - begun
        await asyncio.sleep(0)
