"""Carry a message about rows to all servers at once, and the answers back, on blocking sockets."""

from __future__ import annotations

import select
import socket
from collections.abc import Callable, Sequence
from contextlib import suppress

from aiops.client.steady_rows import RowsExchange, ShareRoundTrip
from aiops.client.sync.shard_socket import GLANCE
from aiops.errors import ConnectionLost

_BEAT = 500  # milliseconds to wait for one thing; the general path looks at deadlines


def carry_rows(
    exchange: RowsExchange, sockets: Sequence[socket.socket], look: Callable[[], object]
) -> bool:
    """Send every server its share, and receive the answers; return whether they are all there.

    False: an answer is another one than was expected, or late. Nothing is sent twice: how far each
    server has come stands in its share.

    Parameters
    ----------
    exchange
        The exchange, of which nothing has been sent.
    sockets
        Connected to the servers, the lead first.
    look
        Polls for the answer of a single server for a moment, while that pays.

    Raises
    ------
    OSError
        When a connection is gone.
    """
    shares = exchange.shares
    for share, sock in zip(shares, sockets, strict=True):
        _send(share, sock)
    for share, sock in zip(shares, sockets, strict=True):
        while share.sent < share.size:  # the rest of what was too much for a socket
            if not _wait(sock, select.POLLOUT):
                return False
            _send(share, sock)
    if len(shares) == 1:
        look()
    for share, sock in zip(shares, sockets, strict=True):
        while share.lacks:
            waits = share.fits and not _receive(share, sock, exchange.id)
            if not share.fits or (waits and not _wait(sock, select.POLLIN)):
                return False
    exchange.finish()
    return True


def _send(share: ShareRoundTrip, sock: socket.socket) -> None:
    """Send what goes out at once."""
    with suppress(BlockingIOError):
        share.sent += sock.sendmsg(share.unsent, [], GLANCE)


def _receive(share: ShareRoundTrip, sock: socket.socket, id: int) -> bool:
    """Receive what is there; return whether there was any."""
    try:
        count = sock.recvmsg_into(share.room, 0, GLANCE)[0]
    except BlockingIOError:
        return False
    if not count:
        raise ConnectionLost("the server closed the connection")
    share.took(count, id)
    return True


def _wait(sock: socket.socket, event: int) -> bool:
    """Wait until a socket is ready; return False if that takes more than a beat."""
    poll = select.poll()
    poll.register(sock, event)
    return bool(poll.poll(_BEAT))
