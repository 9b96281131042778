"""Threads that help: all pieces are done, once, whoever comes."""

from __future__ import annotations

import subprocess
import sys
import threading

import pytest

from aiops.net.cpu_count import usable
from aiops.net.thread_pool import DEFAULT_POOL, MOST, ThreadPool, pool_of
from tests.rows import each_row
from tests.support import PATIENCE


@each_row("helpers", [0, 1, 3])
@each_row("count", [0, 1, 2, 50])
def test_every_piece_is_done_once(helpers: int, count: int) -> None:
    hands, done = ThreadPool(helpers), [0] * count
    assert hands.count == 1 + helpers

    def piece(number: int) -> None:
        done[number] += 1

    for _ in range(20):
        hands.all([lambda number=number: piece(number) for number in range(count)])
    assert done == [20] * count


def test_as_many_as_there_are_processors_or_as_one_says() -> None:
    assert DEFAULT_POOL.count == min(MOST, usable())
    assert [pool_of(threads).count for threads in (1, 2, 9)] == [1, 2, 9]
    assert pool_of(2) is pool_of(2)


def test_helpers_do_help() -> None:
    both = threading.Barrier(2)
    ThreadPool(1).all([lambda: both.wait(PATIENCE)] * 2)  # neither is done alone


def test_nobody_waits_for_helpers_that_do_not_come() -> None:
    hands, busy, done = ThreadPool(1), threading.Event(), []
    begun = threading.Event()

    def occupy() -> None:
        if threading.current_thread().name == "aiops-helper":
            begun.set()
            busy.wait(PATIENCE)
        else:
            begun.wait(PATIENCE)

    first = threading.Thread(target=hands.all, args=([occupy, occupy],))
    first.start()
    begun.wait(PATIENCE)
    hands.all([lambda: done.append(1)] * 5)
    assert len(done) == 5, "the caller has done them all"
    busy.set()
    first.join(PATIENCE)
    assert not first.is_alive()


def test_what_goes_wrong_is_told_when_all_is_done() -> None:
    done: list[int] = []

    def wrong() -> None:
        raise ValueError("wrong")

    with pytest.raises(ValueError, match="wrong"):
        ThreadPool(1).all([wrong, *[lambda: done.append(1)] * 9])
    assert len(done) == 9


def test_several_may_ask_at_once() -> None:
    hands, lock, done = ThreadPool(2), threading.Lock(), []

    def ask() -> None:
        def piece() -> None:
            with lock:
                done.append(1)

        for _ in range(50):
            hands.all([piece] * 5)

    threads = [threading.Thread(target=ask) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE)
    assert len(done) == 4 * 50 * 5


def test_in_a_fork_a_lock_of_its_parent_is_not_waited_for() -> None:
    hands = ThreadPool(1)
    hands._lock.acquire()
    hands.forked()
    both = threading.Barrier(2)
    hands.all([lambda: both.wait(PATIENCE)] * 2)


def test_a_fork_starts_its_own() -> None:
    code = """
import os, threading
from aiops.net.thread_pool import ThreadPool
hands = ThreadPool(1)
hands.all([lambda: None] * 4)
child = os.fork()
if child:
    raise SystemExit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
both = threading.Barrier(2)
hands.all([lambda: both.wait(10)] * 2)
os._exit(0)
"""
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
