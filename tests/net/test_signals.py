"""Ctrl-C and a request to end, handled in an event loop."""

from __future__ import annotations

import asyncio
import signal
import threading
from collections.abc import Callable

import pytest
import uvloop

from aiops.net import signals
from tests.rows import each_row

LOOPS = [asyncio.new_event_loop, uvloop.new_event_loop]


@each_row("loop", LOOPS, ids=["asyncio", "uvloop"])
@each_row("number", [signal.SIGINT, signal.SIGTERM])
def test_handled(number: int, loop: Callable[[], asyncio.AbstractEventLoop]) -> None:
    async def main() -> int:
        came = asyncio.get_running_loop().create_future()
        with signals.handled(came.set_result):
            signal.raise_signal(number)
            return int(await came)

    with asyncio.Runner(loop_factory=loop) as runner:
        assert runner.run(main()) == number


@pytest.mark.parametrize("loop", LOOPS, ids=["asyncio", "uvloop"])
def test_ctrl_c_interrupts_again_afterwards(loop: Callable[[], asyncio.AbstractEventLoop]) -> None:
    """Whatever ended the block; the rest of a program is not to be deaf."""

    async def main() -> None:
        with signals.handled(lambda _number: None):
            raise ValueError("ended")

    with asyncio.Runner(loop_factory=loop) as runner, pytest.raises(ValueError, match="ended"):
        runner.run(main())
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


@pytest.mark.parametrize("loop", LOOPS, ids=["asyncio", "uvloop"])
def test_a_sigterm_that_was_ignored_stays_so(loop: Callable[[], asyncio.AbstractEventLoop]) -> None:
    """Child processes do not inherit that."""

    async def main() -> None:
        came = asyncio.get_running_loop().create_future()
        with signals.handled(came.set_result):
            signal.raise_signal(signal.SIGTERM)
            signal.raise_signal(signal.SIGINT)
            assert await came == signal.SIGINT
            assert signal.getsignal(signal.SIGTERM) != signal.SIG_IGN

    before = signal.signal(signal.SIGTERM, signal.SIG_IGN)
    try:
        with asyncio.Runner(loop_factory=loop) as runner:
            runner.run(main())
    finally:
        signal.signal(signal.SIGTERM, before)


@each_row("loop", LOOPS, ids=["asyncio", "uvloop"])
@each_row("number", [signal.SIGINT, signal.SIGTERM])
def test_heeded(number: int, loop: Callable[[], asyncio.AbstractEventLoop]) -> None:
    """Work that keeps the loop waiting ends at once; behind it signals go to the loop again."""

    async def main() -> None:
        came = asyncio.get_running_loop().create_future()
        with signals.handled(lambda number: came.done() or came.set_result(number)):
            with signals.heeded() as check:
                check()
                signal.raise_signal(number)
                with pytest.raises(signals.Ended, match=signal.Signals(number).name):
                    check()
            signal.raise_signal(number)
            assert await came == number

    with asyncio.Runner(loop_factory=loop) as runner:
        runner.run(main())


@pytest.mark.parametrize("loop", LOOPS, ids=["asyncio", "uvloop"])
def test_an_ignored_sigterm_ends_no_work(loop: Callable[[], asyncio.AbstractEventLoop]) -> None:
    async def main() -> None:
        with signals.handled(lambda _number: None), signals.heeded() as check:
            signal.raise_signal(signal.SIGTERM)
            check()

    before = signal.signal(signal.SIGTERM, signal.SIG_IGN)
    try:
        with asyncio.Runner(loop_factory=loop) as runner:
            runner.run(main())
    finally:
        signal.signal(signal.SIGTERM, before)


def test_signals_that_nobody_handed_to_a_loop_are_left_alone() -> None:
    """A program that embeds a server has its own; so has what is done on another thread."""
    with signals.heeded():
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler

    async def main() -> None:
        with signals.handled(lambda _number: None):
            before, during = signal.getsignal(signal.SIGINT), list[object]()

            def look() -> None:
                with signals.heeded():
                    during.append(signal.getsignal(signal.SIGINT))

            thread = threading.Thread(target=look)
            thread.start()
            thread.join()
            assert during == [before]

    asyncio.run(main())
