"""Waiting in virtual time: until something is so, and who waits where."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from aiops.errors import DeadlineExceeded

if TYPE_CHECKING:
    from aiops.sim.virtual.loop import VirtualLoop

_SHOWN = 12  # tasks that a deadlock names


def waiting(loop: asyncio.AbstractEventLoop) -> str:
    """Say which tasks wait, and where each does."""
    found = []
    for task in sorted(asyncio.all_tasks(loop), key=lambda task: task.get_name()):
        frames = task.get_stack()
        where = "has not begun"
        if frames:
            inner = _innermost(task.get_coro()) or frames[-1]
            code = inner.f_code
            file = code.co_filename.rpartition("/")[2]
            where = f"waits in {code.co_qualname} ({file}:{inner.f_lineno})"
        found.append(f"{task.get_name()!r} {where}")
    more = f", and {len(found) - _SHOWN} more" if len(found) > _SHOWN else ""
    return ", ".join(found[:_SHOWN]) + more if found else "no task is left"


def _innermost(coroutine: Any) -> Any:
    """Return the frame in which a coroutine, or what it awaits, stands still."""
    frame = None
    while coroutine is not None:
        frame = (
            getattr(coroutine, "cr_frame", None) or getattr(coroutine, "ag_frame", None) or frame
        )
        coroutine = getattr(coroutine, "cr_await", None) or getattr(coroutine, "ag_await", None)
    return frame


async def until(loop: VirtualLoop, check: Callable[[], bool], what: str, limit: float) -> None:
    """Wait until it is so: see `aiops.testing.until`."""
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
            raise  # it is the check's own
        raise DeadlineExceeded(
            f"not within {limit:g} virtual seconds: {what}; {waiting(loop)}. Find out who should"
            " have done it, or give it longer with limit=..."
        ) from None
    finally:
        del loop.onlookers[look]
