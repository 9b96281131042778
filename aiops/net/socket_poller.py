"""Read connections by compiled code: one reader of the event loop for all of them.

A connection whose pushes are answered by compiled code is read by it, too
(`aiops.compiled._core.Poller`): Python is not called from a socket that is ready to the answer that
is sent. What is no such push comes to the connection's `MessageTransport`, as the loop would bring
it.
"""

from __future__ import annotations

import asyncio
import logging
from functools import cache
from typing import TYPE_CHECKING, Any

from aiops.common import forks
from aiops.compiled.loading import core
from aiops.net.transport import MessageTransport

if TYPE_CHECKING:
    from aiops.compiled._core import Poller

_log = logging.getLogger("aiops.server")


class SocketPoller:
    """The connections of one server that compiled code reads.

    It begins with the first of them. Where it cannot, because there are no more descriptors, say,
    the event loop reads all.
    """

    def __init__(self) -> None:
        self._poller: Poller | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._tried = False

    @property
    def served(self) -> int:
        """Exchanges that were answered without the event loop's transports."""
        return 0 if self._poller is None else self._poller.served

    def take(self, link: MessageTransport) -> None:
        """Read a connection from here on, with the shortcut that it has now, if that can be.

        It can on a plain socket of Linux.
        """
        if link.plain_descriptor() < 0:
            return
        if not self._tried:
            self._begin()
        if self._poller is not None:
            link.poll(self._poller)

    def _begin(self) -> None:
        library, self._tried = core(), True
        if library is None or library.Poller is None:
            return
        _learn(library)
        loop = asyncio.get_running_loop()
        try:
            poller = library.Poller()
            loop.add_reader(poller.fd, poller.ready)
        except (NotImplementedError, OSError) as error:
            _log.warning("connections are read by Python: compiled code cannot: %s", error)
            return
        self._poller, self._loop = poller, loop

    def close(self) -> None:
        """Read none any more; those that are open have been given back, or end."""
        poller, self._poller = self._poller, None
        if poller is not None and self._loop is not None:
            if not self._loop.is_closed():
                self._loop.remove_reader(poller.fd)
            poller.close()

    def forked(self) -> None:
        """Let go of it in a fork."""
        if self._poller is not None:
            forks.blank(self._poller.fd)


@cache
def _learn(library: Any) -> None:
    """Have compiled code find the fields that it reads of a transport."""
    library.learn_fields({MessageTransport.__name__: MessageTransport})
