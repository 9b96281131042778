"""Handle signals as calls in an event loop."""

from __future__ import annotations

import asyncio
import signal
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

_handled = set[signal.Signals]()
"""Those that end the process in good order, once its event loop has its turn."""


class Ended(BaseException):
    """A signal came amid work that keeps the event loop waiting."""


@contextmanager
def handled(
    handler: Callable[[int], None],
    promote: Callable[[int], None] | None = None,
    reload: Callable[[int], None] | None = None,
) -> Iterator[None]:
    """Have SIGINT and SIGTERM call a handler, with their number, in the running event loop.

    ``promote`` is called for SIGUSR1, and ``reload`` for SIGHUP; None: that has no meaning here.
    """
    handlers = {signal.SIGINT: handler, signal.SIGTERM: handler}
    if promote is not None:
        handlers[signal.SIGUSR1] = promote
    if reload is not None:
        handlers[signal.SIGHUP] = reload
    ending = {signal.SIGINT, signal.SIGTERM} - _deaf()
    with each_handled(handlers):
        _handled.update(ending)
        try:
            yield
        finally:
            _handled.clear()


@contextmanager
def heeded() -> Iterator[Callable[[], None]]:
    """Yield a check that raises `Ended` once a signal has come that `handled` gives to the loop.

    For work on the loop's own thread that takes seconds, and changes nothing. On another thread,
    where the loop goes on, and outside of `handled`, the check does nothing.
    """
    came = list[int]()

    def check() -> None:
        if came:
            raise Ended(signal.Signals(came[0]).name)

    if threading.current_thread() is not threading.main_thread():
        yield check
        return
    before = {
        number: signal.signal(number, lambda number, _frame: came.append(number))
        for number in _handled
    }
    try:
        yield check
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def each_handled(handlers: Mapping[signal.Signals, Callable[[int], None]]) -> Iterator[None]:
    """Have each of these signals call its handler, with its number, in the running event loop.

    A SIGTERM that was ignored when the process began stays so: as ``nohup`` does with SIGHUP, its
    parent keeps it from a signal that is sent to all processes of a job, and ends it otherwise.

    The handlers are removed at the end: uvloop's loop, when it ends, would leave the process
    without any.
    """
    loop, deaf = asyncio.get_running_loop(), _deaf()
    for number, called in handlers.items():
        # A handler that does nothing, and not SIG_IGN, which child processes would inherit.
        does = _nothing if number in deaf else called
        loop.add_signal_handler(number, does, number)
    try:
        yield
    finally:
        for number in handlers:
            loop.remove_signal_handler(number)


def ignore_further() -> None:
    """Ignore SIGINT and SIGTERM, in a process that has done its work and is about to exit.

    Launchers send a second one, which would turn an exit status of 0 into that of a signal. It is
    SIG_IGN, as the interpreter's end takes away handlers; child processes, which would inherit it,
    are not started any more.
    """
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)


def _deaf() -> set[signal.Signals]:
    """Return the signals that were ignored when the process began, of those that end it."""
    ignored = signal.getsignal(signal.SIGTERM) == signal.SIG_IGN
    return {signal.SIGTERM} if ignored else set()


def _nothing(number: int) -> None:
    pass
