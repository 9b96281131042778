"""The thread of updates, where its event loop is a program's own."""

from __future__ import annotations

import asyncio
import threading

import pytest

from aiops.net.update_thread import UpdateThread
from tests.support import PATIENCE


@pytest.mark.parametrize("fails", [False, True])
def test_a_loop_that_is_closed_is_told_nothing(fails: bool) -> None:
    """A program has cancelled its server, and ended; the thread ends without a word."""
    loop, gate, heard = asyncio.new_event_loop(), threading.Event(), list[object]()

    def run() -> None:
        assert gate.wait(PATIENCE)
        if fails:
            raise ZeroDivisionError

    thread = UpdateThread(loop, heard.append)
    thread.submit(run, 0, heard.append)
    loop.close()
    gate.set()
    thread.close()  # an error of a thread fails the test
    assert heard == []
