"""Processor time by thread."""

from __future__ import annotations

import sys
import threading
import time

import pytest

from aiops.net.thread_times import OTHERS, ThreadShares


def work(seconds: float) -> None:
    until = time.thread_time() + seconds
    while time.thread_time() < until:
        pass


@pytest.mark.skipif(sys.platform != "linux", reason="Linux tells the time of threads")
def test_the_time_of_each_thread_is_its_own() -> None:
    begun, go_on, over = threading.Event(), threading.Event(), threading.Event()

    def run() -> None:
        begun.set()
        go_on.wait()
        work(0.1)
        over.set()
        end.wait()

    end = threading.Event()
    clock = [0.0]
    thread = threading.Thread(target=run, name="aiops-update-1", daemon=True)
    thread.start()
    begun.wait()
    shares = ThreadShares({"aiops-update": "updates"}, "main", lambda: clock[0])
    go_on.set()
    over.wait()
    work(0.05)
    clock[0] = 2.0
    found = shares.take()
    end.set()
    thread.join()
    assert found["updates"] == pytest.approx(0.1 / 2, rel=0.5)
    assert found["main"] >= 0.05 / 2 * 0.9
    assert set(found) == {"main", "updates", OTHERS}
    assert shares.take() == {}, "no time has passed"
