"""A socket on which a blocking client sends and receives at once, and one of several shards."""

from __future__ import annotations

import select
import socket
from collections.abc import Sequence
from typing import Protocol

from aiops.net.tls_socket import StreamSocket, read_ahead
from aiops.net.unix_socket import UnixSide
from aiops.wire.connection import Buffer

SEND, RECEIVE = 1 << 20, 512 << 10
"""Bytes sent and received by one system call, at most.

On loopback 16 MiB take 4.5 GB/s so, and 3.3 GB/s by one call on each side: what the receiver copies
is still in the cache, and the sender lets go of the socket between calls, for acknowledgements.
"""

GLANCE: int = getattr(socket, "MSG_DONTWAIT", 0)
"""The flag of a call that does not wait."""

_VECTORS = 512  # buffers given to one sendmsg (the limit is 1,024)


class ByteReceiver(Protocol):
    """The receiver of a socket's bytes: a session, or a branch of one."""

    @property
    def waiting(self) -> bool:
        """True while the socket is not to be read from."""

    def next_buffer(self) -> memoryview:
        """Return where the next received bytes belong."""

    def received(self, nbytes: int) -> None:
        """Take note of received bytes."""

    def outgoing(self) -> list[Buffer]:
        """Return what is to be sent now, and forget it."""


class ShardSocket:
    """One socket.

    Parameters
    ----------
    sock
        Connected.
    receiver
        The session or branch whose bytes it carries.
    side
        The side channel of a connection within this machine, which is closed with it.
    """

    receiver: ByteReceiver
    socket: StreamSocket

    def __init__(
        self, sock: StreamSocket, receiver: ByteReceiver, side: UnixSide | None = None
    ) -> None:
        self.socket, self.receiver, self._side = sock, receiver, side
        self._out: list[Buffer] = []

    def queue(self, buffers: Sequence[Buffer]) -> None:
        """Append to what is to be sent."""
        self._out.extend(memoryview(buffer) for buffer in buffers)

    def rest(self) -> list[Buffer]:
        """Return what has not been sent, and forget it."""
        rest, self._out = self._out, []
        return rest

    def close(self) -> None:
        """Close the socket, and its side channel."""
        self.socket.close()
        if self._side is not None:
            self._side.close()

    @property
    def events(self) -> int:
        """The events to wait for, as `select.poll` names them; what can be sent at once is sent."""
        reading = 0 if self.receiver.waiting else select.POLLIN
        return reading | (select.POLLOUT if self.unsent else 0)

    @property
    def unsent(self) -> bool:
        """True if something is to be sent and does not go out at once; what does is sent."""
        self.queue(self.receiver.outgoing())
        if self._out:
            self.send()
        return bool(self._out)

    def send(self) -> None:
        """Send what goes out at once."""
        while self._out:
            try:
                send_some(self.socket, self._out, GLANCE)
            except (BlockingIOError, InterruptedError):
                return

    def receive(self) -> bool:
        """Take in what is there; return whether there was anything."""
        try:
            count = self.socket.recv_into(self.receiver.next_buffer()[:RECEIVE], 0, GLANCE)
        except (BlockingIOError, InterruptedError):
            return False
        self.receiver.received(count)
        return True


def move(sockets: Sequence[ShardSocket], seconds: float, wake: int = -1) -> bool:
    """Send and receive on all sockets at once; return whether anything came.

    Waits at most ``seconds`` until one of them is ready, or the descriptor ``wake`` is readable,
    which counts as something that came.

    Raises
    ------
    ConnectionLost, OSError
        When one of them is gone.
    """
    poll, by_number, received = select.poll(), {}, False
    for shard in sockets:
        events = shard.events
        if events & select.POLLIN and read_ahead(shard.socket):
            received = shard.receive() or received
        if events:
            poll.register(shard.socket, events)
            by_number[shard.socket.fileno()] = shard
    if wake >= 0:
        poll.register(wake, select.POLLIN)
    for number, event in poll.poll(0 if received else max(0, int(seconds * 1000))):
        if number == wake:
            received = True
            continue
        shard = by_number[number]
        if event & select.POLLOUT:
            shard.send()
        if event & (select.POLLIN | select.POLLHUP | select.POLLERR):
            received = shard.receive() or received
    return received


def send_some(sock: StreamSocket, buffers: list[Buffer], flags: int = 0) -> None:
    """Send some of what there is by one system call; what has gone out is taken off the list."""
    sent = sock.sendmsg(_up_to(SEND, buffers), [], flags)
    first = 0
    while first < len(buffers) and sent >= len(buffers[first]):
        sent -= len(buffers[first])
        first += 1
    del buffers[:first]
    if sent:
        buffers[0] = buffers[0][sent:]


def _up_to(most: int, views: Sequence[Buffer]) -> list[Buffer]:
    """Return the first bytes of these views, at most ``most``."""
    found: list[Buffer] = []
    for view in views[:_VECTORS]:
        if len(view) >= most:
            return [*found, view[:most]]
        found.append(view)
        most -= len(view)
    return found
