"""Buffers under a bound."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any

from aiops.engine.buffer_pool import BufferPool


def test_the_bound() -> None:
    pool = BufferPool(100)
    first, second = pool.take(60), pool.take(40)
    assert first is not None
    assert second is not None
    assert pool.take(1) is None
    pool.give(first)
    assert pool.out == 40
    assert pool.take(61) is None
    assert pool.take(60) is not None
    assert pool.peak == 100


def test_one_larger_than_everything_gets_through_alone() -> None:
    pool = BufferPool(100)
    small = pool.take(1)
    assert small is not None
    assert pool.take(1000) is None
    pool.give(small)
    large = pool.take(1000)
    assert large is not None
    assert pool.take(1) is None
    pool.give(large)
    assert pool.out == 0


def test_a_buffer_is_used_again() -> None:
    pool = BufferPool(100)
    first = pool.take(40)
    assert first is not None
    address = first.ctypes.data
    assert address % 64 == 0
    pool.give(first)
    again = pool.take(40)
    assert again is not None
    assert again.ctypes.data == address


def test_what_is_out_and_what_is_kept_stay_within_the_bound() -> None:
    pool = BufferPool(100)
    sizes = (20, 30, 25, 25, 60, 40, 100, 10, 90)
    for first, second in pairwise(sizes):
        taken = [pool.take(first), pool.take(second)]
        for buffer in taken:
            assert pool.out + pool.kept <= 100
            if buffer is not None:
                pool.give(buffer)
    assert pool.kept <= 100


def test_those_in_line_are_served_in_turn() -> None:
    pool = BufferPool(100)
    first = pool.take(100)
    assert first is not None
    served: list[tuple[str, Any]] = []

    def wish(name: str, size: int) -> Callable[[], bool]:
        def again() -> bool:
            buffer = pool.take(size)
            if buffer is not None:
                served.append((name, buffer))
            return buffer is not None

        return again

    for name, size in (("a", 50), ("b", 60), ("c", 10)):
        pool.wait(wish(name, size))
    pool.give(first)
    assert [name for name, _buffer in served] == ["a"], "c does not overtake b"
    assert pool.waiting == 2
    pool.give(served[0][1])
    assert [name for name, _buffer in served] == ["a", "b", "c"]
    assert pool.waiting == 0


def test_nobody_overtakes_those_in_line() -> None:
    """Else a large push would wait for ever while small ones come and go."""
    pool = BufferPool(100)
    first = pool.take(60)
    assert first is not None
    served: list[Any] = []

    def again() -> bool:
        buffer = pool.take(90)
        if buffer is not None:
            served.append(buffer)
        return buffer is not None

    assert pool.take(90) is None
    pool.wait(again)
    assert pool.take(10) is None, "there would be room, but somebody else came first"
    pool.give(first)
    assert len(served) == 1
    assert pool.take(10) is not None


def test_a_buffer_that_comes_back_while_the_line_is_served() -> None:
    """A peer that is let go on may finish at once, and give its buffer back at once."""
    pool = BufferPool(100)
    first = pool.take(100)
    assert first is not None
    served = []

    def again() -> bool:
        buffer = pool.take(100)
        if buffer is None:
            return False
        served.append(buffer)
        pool.give(buffer)
        return True

    for _ in range(3):
        pool.wait(again)
    pool.give(first)
    assert len(served) == 3
    assert pool.waiting == pool.out == 0


def test_a_buffer_given_by_another_thread_wakes_the_line() -> None:
    pool = BufferPool(100)
    woken: list[bool] = []
    pool.wake = lambda: woken.append(True)
    first = pool.take(100)
    assert first is not None
    del first
    served: list[Any] = []

    def again() -> bool:
        buffer = pool.take(80)
        if buffer is not None:
            served.append(buffer)
        return buffer is not None

    second = pool.take(1)
    assert second is None
    pool.wait(again)
    pool.give_threadsafe(BufferPool(100).take(100))  # type: ignore[arg-type]
    assert woken, "there is a line, so the pool asks to be looked at"
    assert not served, "from whichever thread: nothing is done here"
    pool.settle()
    assert served
    woken.clear()
    pool.give_threadsafe(served.pop())
    assert not woken, "the line is empty"


def test_a_buffer_that_comes_back_before_there_is_a_line_is_looked_for() -> None:
    """Another thread returns it between the request that finds none and the wait for it."""
    pool = BufferPool(100)
    woken: list[int] = []
    pool.wake = lambda: woken.append(1)
    first = pool.take(100)
    assert first is not None
    assert pool.take(1) is None
    pool.give_threadsafe(first)
    assert not woken, "the line is empty"
    pool.wait(lambda: True)
    assert woken
