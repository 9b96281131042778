"""Description of waiting tasks, for the errors of a run that cannot go on."""

from __future__ import annotations

import asyncio
from typing import Any

_SHOWN = 12  # tasks that a text names


def blocked_tasks(loop: asyncio.AbstractEventLoop) -> str:
    """Return a list, as half a sentence, of the tasks that wait and the line at which each does."""
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
    """Return the frame in which a coroutine, or one that it awaits, is suspended."""
    frame = None
    while coroutine is not None:
        frame = (
            getattr(coroutine, "cr_frame", None) or getattr(coroutine, "ag_frame", None) or frame
        )
        coroutine = getattr(coroutine, "cr_await", None) or getattr(coroutine, "ag_await", None)
    return frame
