"""Have clients that have not shown that they send what they announce share few receive buffers.

A push has its receive buffer from its header on, and the buffers are few. A crowd that announces
pushes and sends them slowly would hold all of them, and those of honest workers would wait. So a
connection is a newcomer to pushes that are larger than any it has sent whole, and newcomers have
half of the memory for buffers, as long as there are others. Where newcomers wait,
the first whose bytes have come goes first: one that has only announced its push lets it pass.
"""

from __future__ import annotations

from collections.abc import Callable

from aiops.net.socket_options import readable
from aiops.net.transport import MessageTransport
from aiops.wire.connection import SMALL

_THERE = SMALL
"""Bytes in a socket that show that its peer sends."""


class Newcomers:
    """The connections of one server that are to show that they send what they announce.

    Parameters
    ----------
    bound
        Returns the bytes that the receive buffers of pushes may have.
    wait
        Has a connection wait for a buffer, given what to call when there may be one.
    """

    def __init__(
        self, bound: Callable[[], int], wait: Callable[[Callable[[], bool]], None]
    ) -> None:
        self._bound, self._wait = bound, wait
        self._shown: dict[int, int] = {}  # the largest push that a connection has sent, in bytes
        self._sending: dict[int, int] = {}  # bytes of the pushes that newcomers send
        self._line: dict[int, MessageTransport] = {}  # in the order in which they came
        self._refused = 0  # the connection that was refused last

    @property
    def waiting(self) -> int:
        """The number of those that wait for another to end."""
        return len(self._line)

    def is_sending(self, number: int) -> bool:
        """Return whether a connection is a newcomer that sends now."""
        return number in self._sending

    def admits(self, number: int, nbytes: int) -> bool:
        """Return whether a connection may have a buffer for a push now; else call `waits`."""
        if nbytes <= SMALL or nbytes <= self._shown.get(number, 0) or number in self._sending:
            return True
        if self._sending and sum(self._sending.values()) + nbytes > self._share:
            self._refused = number
            return False
        self._sending[number] = nbytes
        return True

    def waits(self, link: MessageTransport) -> bool:
        """Have a connection that was just refused wait; return False if it was not."""
        if self._refused != link.number:
            return False
        self._refused = 0
        self._line[link.number] = link
        return True

    def sent(self, number: int, nbytes: int) -> bool:
        """Note that a push has come whole; return whether others may go on: call `go_on`."""
        if nbytes > max(SMALL, self._shown.get(number, 0)):
            self._shown[number] = nbytes
        return self._left(number)

    def gone(self, number: int) -> bool:
        """Forget a connection; return as `sent` does."""
        self._line.pop(number, None)
        last = self._shown.pop(number, None) is not None and not self._shown
        return self._left(number) or (last and bool(self._line))

    def _left(self, number: int) -> bool:
        """Return whether a connection leaves room for others that wait.

        Most leave none, and `go_on` looks at all that wait: a crowd may be cut off at once.
        """
        return self._sending.pop(number, None) is not None and bool(self._line)

    def go_on(self) -> None:
        """Let those that wait have the buffers that others have left."""
        while self._line:
            number = next(filter(self._is_there, self._line), None) or next(iter(self._line))
            link, self._refused = self._line.pop(number), 0
            if link.resume():
                continue
            if self._refused == number:  # there is no room for it yet: it stays the first
                self._line = {number: link, **self._line}
                return
            self._wait(link.resume)

    @property
    def _share(self) -> int:
        return self._bound() // 2 if self._shown else self._bound()

    def _is_there(self, number: int) -> bool:
        transport = self._line[number].transport
        sock = None if transport is None else transport.get_extra_info("socket")
        there = None if sock is None else readable(sock)
        return there is None or there >= _THERE
