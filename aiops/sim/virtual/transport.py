"""asyncio's transports over a simulated network: one for each end of a connection."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterable
from contextvars import Context, copy_context
from typing import Any, TypeVar

from aiops.sim.virtual.host import Host
from aiops.sim.virtual.listener import VirtualListener
from aiops.sim.virtual.stream import ByteStream, Medium

P = TypeVar("P", bound=asyncio.BaseProtocol)

_HIGH = 64 * 1024  # bytes: asyncio's own mark above which a writer is to pause
_ONE_READ = 256 * 1024  # bytes that a plain protocol is given at once, as asyncio does


class MemoryTransport(asyncio.Transport):
    """One end of a connection.

    What is written stays in the writer's memory until it arrives: do not change it before. (A
    ``bytearray`` is copied.)
    """

    def __init__(
        self, medium: Medium, host: Host, protocol: asyncio.BaseProtocol, out: ByteStream
    ) -> None:
        super().__init__()
        self.host = host
        self.peer: MemoryTransport
        self.unread = 0
        self.reading = True
        self._medium, self._out = medium, out
        self._into: ByteStream  # the bytes that come
        self._context: Context = copy_context()
        self._incoming: deque[memoryview] = deque()
        self._names: dict[str, Any] = {}
        self._paused = False  # reading, by the protocol
        self.pausing = False  # the protocol's writing, by this transport
        self._high, self._low = _HIGH, _HIGH // 4
        self.closing = self._lost = False
        self._eof_sent = self._eof_received = self._eof_delivered = False
        self._delivering = self._begun = False
        self.set_protocol(protocol)

    # ------------------------------------------------------------ asyncio's side

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        """Return ``peername``, ``sockname`` and ``unheard``; there is no socket."""
        return self._names.get(name, default)

    def set_protocol(self, protocol: asyncio.BaseProtocol) -> None:
        """Replace the protocol."""
        self._protocol: Any = protocol
        self._buffered = isinstance(protocol, asyncio.BufferedProtocol)

    def get_protocol(self) -> asyncio.BaseProtocol:
        """Return the protocol."""
        found: asyncio.BaseProtocol = self._protocol
        return found

    def is_closing(self) -> bool:
        """Return whether it is closed, or about to be."""
        return self.closing

    def is_reading(self) -> bool:
        """Return whether the protocol is given the bytes that come."""
        return not self._paused and not self.closing

    def pause_reading(self) -> None:
        """Keep the bytes that come until `resume_reading`."""
        if not self.closing:
            self._paused, self.reading = True, False

    def resume_reading(self) -> None:
        """Give the protocol the bytes that have come, and those that come."""
        if self.closing or not self._paused:
            return
        self._paused, self.reading = False, True
        if self._incoming or self._eof_received:
            self._medium.loop.call_soon(self._deliver, context=self._context)
        self._into.ready()

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        """Set the queued bytes above which the protocol pauses writing, and at which it resumes."""
        if high is None:
            high = _HIGH if low is None else 4 * low
        if low is None:
            low = high // 4
        if not 0 <= low <= high:
            raise ValueError(f"high ({high!r}) must be >= low ({low!r}) must be >= 0")
        self._high, self._low = high, low
        self._look_at_buffer()

    def get_write_buffer_limits(self) -> tuple[int, int]:
        """Return both limits, in bytes, the lower first."""
        return self._low, self._high

    def get_write_buffer_size(self) -> int:
        """Return the number of bytes that have not arrived yet."""
        return self._out.unsent

    def write(self, data: Any) -> None:
        """Send bytes."""
        if self._eof_sent:
            raise RuntimeError("Cannot call write() after write_eof()")
        if self.closing or not len(data):
            return
        view = memoryview(bytes(data) if isinstance(data, bytearray) else data)
        if view.format != "B" or view.ndim != 1:
            view = view.cast("B")
        self._out.write(view)
        if self._out.queued > self._high and not self.pausing:
            self.pausing = True
            self._protocol.pause_writing()

    def writelines(self, list_of_data: Iterable[Any]) -> None:
        """Send several buffers."""
        for data in list_of_data:
            self.write(data)

    def can_write_eof(self) -> bool:
        """Return True: one direction of a connection can be closed alone."""
        return True

    def write_eof(self) -> None:
        """Close this direction when everything is sent."""
        if not self.closing and not self._eof_sent:
            self._eof_sent = True
            self._out.end()

    def close(self) -> None:
        """Close when everything is sent; nothing more is read."""
        if self.closing:
            return
        self._discard()
        self._out.end()
        if not self._out.queued:
            self._lose(None)

    def abort(self) -> None:
        """Close at once; bytes that have not been sent are discarded."""
        if self._lost:
            return
        self._discard()
        self._out.drop()
        self._out.end()
        self._lose(None)

    def _discard(self) -> None:
        """Discard the bytes that have come and those that will."""
        self.closing, self.reading = True, True
        if not self._delivering:
            self._incoming.clear()
        self.unread = 0

    # ------------------------------------------------------------ the network's side

    def made(self, peer: MemoryTransport, port: int, peer_port: int) -> None:
        """Set the other end, and the ports of both."""
        self.peer, self._into = peer, peer._out
        self._names = {
            "peername": (peer.host.name, peer_port),
            "sockname": (self.host.name, port),
            "unheard": self._unheard,
        }
        self.host.ends[self] = None

    def _unheard(self) -> float:
        """Return the seconds for which nothing has come from the other end's host."""
        since = [host.silent_since for host in (self.host, self.peer.host) if host.silent]
        return self._medium.loop.time() - min(since) if since else 0.0

    def begin(self) -> None:
        """Tell the protocol that it is connected."""
        if not self._lost:
            self._begun = True
            self._context.run(self._protocol.connection_made, self)

    def reset(self) -> None:
        """Break the connection; both ends are told."""
        for end in (self, self.peer):
            if not end._lost:
                end._discard()
                end._out.break_off()
                end._lose(ConnectionResetError(104, "Connection reset by peer"))

    def crossed(self) -> None:
        """Resume writing or end the close, now that fewer bytes are queued."""
        if self.pausing:
            self._look_at_buffer()
        if self.closing and not self._out.queued and not self._lost:
            self._lose(None)

    def _look_at_buffer(self) -> None:
        queued = self._out.queued
        if self.pausing and queued <= self._low:
            self.pausing = False
            if not self._lost:
                self._context.run(self._protocol.resume_writing)
        elif not self.pausing and queued > self._high:
            self.pausing = True
            self._context.run(self._protocol.pause_writing)

    def arrived(self, views: list[memoryview]) -> None:
        """Take bytes; an end that is closed answers them with a reset."""
        if self._lost:
            latency = self._out.delay()
            self._medium.loop.call_later(latency, self.peer.reset)
        if self.closing:
            return
        for view in views:
            self.unread += len(view)
            self._incoming.append(view)
        if not self._paused:
            self._context.run(self._deliver)

    def ended(self) -> None:
        """Note that the other side sends no more."""
        self._eof_received = True
        if not self._paused and not self.closing:
            self._context.run(self._deliver)

    def _deliver(self) -> None:
        """Give the protocol the bytes that have come, for as long as it reads."""
        if self._delivering:
            return
        self._delivering = True
        incoming, medium = self._incoming, self._medium
        try:
            while incoming and not self._paused and not self.closing:
                protocol, view = self._protocol, incoming[0]
                size = count = len(view)
                if medium.pieces is not None:
                    count = min(size, medium.random.randint(1, medium.pieces))
                if self._buffered:
                    room = protocol.get_buffer(count)
                    count = min(len(room), count)
                    if not count:
                        raise RuntimeError("get_buffer() returned an empty buffer")
                    room[:count] = view if count == size else view[:count]
                    protocol.buffer_updated(count)
                else:
                    count = min(count, _ONE_READ)
                    protocol.data_received(bytes(view[:count]))
                self.unread -= count
                if count == size:
                    incoming.popleft()
                else:
                    incoming[0] = view[count:]
        finally:
            self._delivering = False
        if self.closing:
            self.unread = 0
            incoming.clear()
        elif self._eof_received and not incoming and not self._paused and not self._eof_delivered:
            self._eof_delivered = True
            if not self._protocol.eof_received():
                self.close()

    def _lose(self, error: Exception | None) -> None:
        self._lost = True
        self.host.ends.pop(self, None)
        self._medium.loop.call_soon(self._report_lost, error, context=self._context)

    def _report_lost(self, error: Exception | None) -> None:
        if self._begun:
            self._protocol.connection_lost(error)


def connect_ends(
    medium: Medium,
    here: Host,
    listener: VirtualListener,
    factory: Callable[[], P],
    port: int,
    latency: float,
) -> tuple[asyncio.Transport, P]:
    """Make both ends of a connection; the far one is told ``latency`` seconds from now."""
    there = listener.host
    out, back = ByteStream(medium, here, there), ByteStream(medium, there, here)
    protocol = factory()
    near = MemoryTransport(medium, here, protocol, out)
    far = listener.context.run(_accept, medium, listener, back)
    near.made(far, port, listener.port)
    far.made(near, listener.port, port)
    now = medium.loop.time()
    out.join(near, far, now + latency)
    back.join(far, near, now)
    # A dialler that crashes meanwhile has no timers any more, and what it has sent arrives.
    medium.loop.call_at(now + latency, far.begin, context=listener.context)
    near.begin()
    return near, protocol


def _accept(medium: Medium, listener: VirtualListener, out: ByteStream) -> MemoryTransport:
    return MemoryTransport(medium, listener.host, listener.factory(), out)
