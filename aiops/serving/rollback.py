"""Servers that are to go back to an earlier moment: each begins again from its state, in its place.

A server of a sharded model ends with `RolledBack` when another has lost rows that it relies on.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

from aiops.errors import RolledBack
from aiops.serving.server import Server

_log = logging.getLogger("aiops.server")


async def start(
    make: Callable[[], Server],
    ending: Callable[[], bool] = lambda: False,
    *,
    next_term: bool,
    alone: bool = False,
) -> Server:
    """Return a server that has started, in the next term if it was a standby.

    Parameters
    ----------
    make
        Makes it, each time that it begins.
    ending
        Returns True if it is to end, and not to begin again.
    next_term, alone
        As of `Server.start`.

    Raises
    ------
    RolledBack
        When it is to go back, and to end as well.
    Exception
        As of `Server` and `Server.start`.
    """
    while True:
        server = make()
        try:
            await server.start(next_term=next_term, alone=alone)
            return server
        except RolledBack as why:
            if ending():
                raise
            _log.error("%s; it begins again", why)


async def serve(
    server: Server,
    make: Callable[[], Server],
    present: Callable[[Server], None],
    ending: Callable[[], bool] = lambda: False,
) -> None:
    """Run a server that has started, and those that take its place, to the end of the last.

    Parameters
    ----------
    server
        The first.
    make, ending
        As of `start`.
    present
        Called with each server that has taken the place of another, when it has started.
    """
    while True:
        try:
            await server.serve()
            return
        except RolledBack as why:
            if ending():
                raise
            _log.error("%s; it begins again", why)
        server = await start(make, ending, next_term=False, alone=server.run_state.alone)
        present(server)
