"""The lock that is had in the order in which it was asked for."""

from __future__ import annotations

import asyncio
import threading

import pytest

from aiops.client.fair_lock import FairLock
from tests.support import PATIENCE


def test_one_at_a_time_and_handed_on_in_order() -> None:
    lock, order = FairLock(), []
    for name in "abc":
        lock.request(lambda name=name: order.append(name))  # type: ignore[misc]
    assert order == ["a"]
    lock.release()
    assert order == ["a", "b"]
    lock.release()
    lock.release()
    assert order == ["a", "b", "c"]
    assert not lock.held


def test_who_lets_go_only_to_take_it_again_comes_after_who_waits() -> None:
    lock, had = FairLock(), []
    with lock:
        lock.request(lambda: had.append("waiting"))
    assert had == ["waiting"]
    assert not lock.acquire(timeout=0)
    lock.release()
    with lock:
        assert lock.mine
    assert not lock.mine


def test_a_request_taken_back_is_passed_over() -> None:
    lock, had = FairLock(), []

    def first() -> None:
        had.append("first")

    with lock:
        lock.request(first)
        lock.request(lambda: had.append("second"))
        lock.cancel(first)
    assert had == ["second"]


def test_a_request_taken_back_too_late_lets_go() -> None:
    lock = FairLock()

    def granted() -> None:
        pass

    lock.request(granted)
    assert lock.held
    lock.cancel(granted)
    assert not lock.held


def test_a_wait_has_an_end() -> None:
    lock = FairLock()
    lock.request(lambda: None)
    assert not lock.acquire(timeout=0.01)
    lock.release()
    assert not lock.held, "who gave up is not handed it"


def test_no_thread_waits_for_itself() -> None:
    lock = FairLock()
    with lock, pytest.raises(RuntimeError, match="has the lock already"):
        lock.acquire()
    assert not lock.held


async def test_a_task_waits_for_it_without_blocking_its_loop() -> None:
    lock, order = FairLock(), []

    async def hold(name: str) -> None:
        async with lock.awaited():
            order.append(name)

    lock.request(lambda: None)
    waiting = asyncio.create_task(hold("first"))
    given_up = asyncio.create_task(hold("given up"))
    last = asyncio.create_task(hold("last"))
    await asyncio.sleep(0)  # they stand in line
    given_up.cancel()
    await asyncio.wait([given_up])
    assert order == []
    lock.release()
    await asyncio.wait([waiting, last])
    assert order == ["first", "last"]
    assert not lock.held


def test_in_a_fork_it_is_free_of_who_is_not_there() -> None:
    lock, had = FairLock(), []
    lock.request(lambda: had.append("a thread of the parent's"))
    lock.request(lambda: had.append("another"))
    lock._guard.acquire()
    lock.forked()
    with lock:
        assert lock.mine
        lock.forked()
        assert lock.mine  # the thread that forked goes on
    assert not lock.held
    lock.release()  # by a task that had it, and that the fork goes on with
    assert had == ["a thread of the parent's"]


def test_threads_exclude_each_other() -> None:
    lock, seen, inside = FairLock(), [], [0]

    def run() -> None:
        for _ in range(500):
            with lock:
                inside[0] += 1
                seen.append(inside[0])
                inside[0] -= 1

    threads = [threading.Thread(target=run) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE)
    assert seen == [1] * 2000
