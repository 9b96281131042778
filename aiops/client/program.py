"""Programs: generators that yield operations, which a driver carries out.

A program yields an operation, is sent its result (or is thrown its error), and returns the result
of the whole. Its decisions are the same under every driver: a thread that blocks, a task that
awaits, a simulator, a test.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Generator
from typing import Any, TypeAlias, TypeVar

OpT = TypeVar("OpT")
T = TypeVar("T")

Program: TypeAlias = Generator[OpT, Any, T]


def drive(script: Program[OpT, T], carry_out: Callable[[OpT], Any]) -> T:
    """Carry out the operations of a program; return its result."""
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
    """Carry out the operations of a program by awaiting each; return its result."""
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
