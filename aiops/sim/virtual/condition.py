"""Waiting in virtual time until a condition holds."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from aiops.errors import DeadlineExceeded
from aiops.sim.virtual.blocked_tasks import blocked_tasks
from aiops.sim.virtual.loop import VirtualLoop


async def until(loop: VirtualLoop, check: Callable[[], bool], what: str, limit: float) -> None:
    """Wait until ``check`` returns True; it is called whenever time is about to go on.

    Parameters
    ----------
    loop
        The running loop.
    check
        The condition. An exception of it is raised here.
    what
        What is waited for, for the error.
    limit
        Virtual seconds.

    Raises
    ------
    DeadlineExceeded
        When it does not hold within the limit; the text lists the tasks that wait.
    """
    became: asyncio.Future[None] = loop.create_future()

    def look() -> None:
        if became.done():
            return
        try:
            if check():
                became.set_result(None)
        except Exception as error:
            became.set_exception(error)

    loop.onlookers[look] = None
    try:
        async with asyncio.timeout(limit):
            await became
    except TimeoutError:
        if not became.cancelled():
            raise  # the check raised it
        raise DeadlineExceeded(
            f"not within {limit:g} virtual seconds: {what}; {blocked_tasks(loop)}. Find the task"
            " that should have done it, or give it longer with limit=..."
        ) from None
    finally:
        del loop.onlookers[look]
