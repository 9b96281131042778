"""Handle signals as calls in an event loop."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager


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
    with each_handled(handlers):
        yield


@contextmanager
def each_handled(handlers: Mapping[signal.Signals, Callable[[int], None]]) -> Iterator[None]:
    """Have each of these signals call its handler, with its number, in the running event loop.

    A SIGTERM that was ignored when the process began stays so: as ``nohup`` does with SIGHUP, its
    parent keeps it from a signal that is sent to all processes of a job, and ends it otherwise.

    The handlers are removed at the end: uvloop's loop, when it ends, would leave the process
    without any.
    """
    loop = asyncio.get_running_loop()
    ignored = signal.getsignal(signal.SIGTERM) == signal.SIG_IGN
    for number, called in handlers.items():
        # A handler that does nothing, and not SIG_IGN, which child processes would inherit.
        does = _nothing if ignored and number == signal.SIGTERM else called
        loop.add_signal_handler(number, does, number)
    try:
        yield
    finally:
        for number in handlers:
            loop.remove_signal_handler(number)


def _nothing(number: int) -> None:
    pass
