"""Scripts: what is to be done, said by a generator, for a shell to carry out.

A script yields orders, is sent what came of each (or has thrown into it what went wrong), and
returns the result. What it decides is the same for all who drive it: a thread that blocks, a task
that awaits, a simulator, a test.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Generator
from typing import Any, TypeAlias, TypeVar

OpT = TypeVar("OpT")
T = TypeVar("T")

Program: TypeAlias = Generator[OpT, Any, T]


def drive(script: Program[OpT, T], carry_out: Callable[[OpT], Any]) -> T:
    """Carry out the orders of a script; return its result."""
    try:
        order = next(script)
        while True:
            try:
                done = carry_out(order)
            except BaseException as error:
                order = script.throw(error)
            else:
                order = script.send(done)
    except StopIteration as end:
        result: T = end.value
        return result
    finally:
        script.close()


async def drive_awaiting(script: Program[OpT, T], carry_out: Callable[[OpT], Awaitable[Any]]) -> T:
    """Do the same where carrying out an order is awaited."""
    try:
        order = next(script)
        while True:
            try:
                done = await carry_out(order)
            except BaseException as error:
                order = script.throw(error)
            else:
                order = script.send(done)
    except StopIteration as end:
        result: T = end.value
        return result
    finally:
        script.close()
