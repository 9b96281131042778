"""Drive one `aiops.wire.connection.Connection` under asyncio, for servers and `AsyncClient`.

Bytes are received straight into the buffers that the connection offers. Messages are sent in chunks
as the peer takes them, so that the bytes unsent to a slow peer are counted, and a version of the
parameters that it holds up can be let go (`aiops.store.snapshots.Sender`).
"""

from __future__ import annotations

import asyncio
import socket
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol, cast

from aiops.common import forks
from aiops.common.failure_waits import FailureWaits
from aiops.errors import AiopsError, ConnectionLost, RemoteProtocolError, Unavailable
from aiops.net.path_watch import PathWatch, cut_off
from aiops.net.socket_options import tune, unacknowledged
from aiops.net.unix_socket import UnixSide
from aiops.store.snapshots import Lease
from aiops.wire.checked_connection import checked_instead
from aiops.wire.connection import Buffer, Connection, SinkFor
from aiops.wire.messages import Message
from aiops.wire.sinks import Sink

if TYPE_CHECKING:
    from aiops.compiled._core import Poller

_CHUNK = 1 << 20  # handed to the transport at once
_BEHIND = 4 << 20  # bytes: a peer with more unsent, of more than one message, is not read from
_HELD = "held"  # the reason for which a peer is not read from: its owner says so
_SHORTEST = 0.001  # seconds: what event loops' timers can tell apart


class TransportOwner(Protocol):
    """The object that a `MessageTransport` reports to."""

    def link_made(self, link: MessageTransport) -> None:
        """Called when the connection is made."""

    def link_received(self, link: MessageTransport, message: Message, sink: Sink | None) -> None:
        """Called with each whole message, and the sink of its payloads."""

    def link_waits(self, link: MessageTransport) -> None:
        """Called when a payload has no room: call `MessageTransport.resume` when it may have."""

    def link_lost(self, link: MessageTransport, error: AiopsError) -> None:
        """Called when the connection is lost, with the reason."""


class MessageTransport(asyncio.BufferedProtocol):
    """One connection. `aiops.net.paced_transport.PacedTransport` is one under a bandwidth budget.

    Parameters
    ----------
    wire
        The sans-I/O connection; it may be replaced while none is open.
    owner
        Receives all that happens.
    number
        The owner's number for this connection.
    sink_for
        Returns the sink of a message with payloads; None: there is no room now.

    Attributes
    ----------
    shortcut
        Called first when bytes have come and neither side has anything else under way. Returns the
        answer if they are a request that is answered at once, or ``b""`` if they begin one. None:
        they are parsed by the connection as usual.
    waits
        How long the peer's machine may be unheard; to be set before the connection is made.
    on_queued
        Called with their number when bytes that are no version's begin to wait for the peer.
    """

    # Those that compiled code reads: `aiops.compiled`.
    __slots__ = (
        *("__dict__", "__weakref__", "_closing", "_full", "_out", "_received", "_unread"),
        *("pumped", "shortcut", "transport", "wire"),
    )

    paced = False  # True: each byte waits for a grant, so no `shortcut` may write an answer
    _at_once = _CHUNK  # bytes: a smaller message is written without being queued

    def __init__(
        self, wire: Connection, owner: TransportOwner, number: int, sink_for: SinkFor
    ) -> None:
        self.wire, self._owner, self.number, self._sink_for = wire, owner, number, sink_for
        self.transport: asyncio.Transport | None = None
        self.peer_name = "a peer"
        self.side: UnixSide | None = None  # receives segments, on a connection within one machine
        self._out: deque[tuple[memoryview, Lease | None]] = deque()
        self._unsent = 0  # bytes in _out
        self._newest = 0  # bytes of the message that was queued last
        self._waits = 0.0, 0  # when _out was last empty, and the value of `pumped` then
        self._full = False  # the transport takes no more now
        self._unread: set[str] = set()  # the reasons for which this peer is not read from
        self._closing = False
        self._error: AiopsError | None = None
        self.pumped = 0  # bytes handed to the transport
        self.shortcut: Callable[[int], bytes | memoryview | None] | None = None
        self.on_queued: Callable[[int], None] | None = None
        self._received: deque[tuple[Message, Sink | None]] = deque()  # complete, not passed on yet
        self.waits = FailureWaits()
        self._watch: PathWatch | None = None
        self._poller: Poller | None = None  # reads from it, in place of the event loop
        self._polled = -1  # its number there; below 0: it is not read from now
        self._failure: Exception | None = None  # with which it ended while that read

    def hand_over(self, owner: TransportOwner, sink_for: SinkFor) -> None:
        """Report to another owner from here on, which gives the sinks."""
        self._owner, self._sink_for = owner, sink_for

    # ------------------------------------------------------------ asyncio's side

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Set the socket's options, and report the connection."""
        self._set_up(cast(asyncio.Transport, transport))  # uvloop's derives from nothing of asyncio
        self._owner.link_made(self)

    def _set_up(self, transport: asyncio.Transport) -> None:
        self.transport = transport
        sock: socket.socket | None = transport.get_extra_info("socket")
        if sock is not None and sock.family in (socket.AF_INET, socket.AF_INET6):
            tune(sock, self.waits)
        address = transport.get_extra_info("peername")
        if isinstance(address, tuple) and len(address) >= 2:
            self.peer_name = f"{address[0]}:{address[1]}"
        transport.set_write_buffer_limits(high=_CHUNK // 2)
        self._watch = PathWatch(transport, lambda: self.waits.unheard, self._cut_off)

    def _cut_off(self, seconds: float) -> None:
        self.fault(cut_off(self.peer_name, seconds))

    def get_buffer(self, sizehint: int) -> memoryview:
        """Offer the connection's buffer."""
        return self.wire.next_buffer()

    def buffer_updated(self, nbytes: int, short: bool = True) -> None:
        """Parse received bytes; answer at once, if `shortcut` does.

        ``short``: whether to ask that; False: it does not.
        """
        shortcut = self.shortcut
        if (
            shortcut is not None
            and short
            and not (self._out or self._full or self._unread or self._received or self._closing)
        ):
            answer = shortcut(nbytes)
            if answer is not None:
                if answer:
                    self.pumped += len(answer)
                    self.transport.write(answer)  # type: ignore[union-attr]
                return
        wire = self.wire
        try:
            messages = wire.received(nbytes)
            while True:
                for message, sink in messages:
                    if self._received or (self._unread and not self._passes):
                        self._received.append((message, sink))
                    else:
                        self._owner.link_received(self, message, sink)
                if wire.pending is None or "no room" in self._unread:  # then `resume` goes on
                    return
                room = self._sink_for(wire.pending)
                if room is None:
                    break
                messages = wire.fill(room)
        except RemoteProtocolError as error:
            checked = checked_instead(wire)
            if checked is None:
                self.fault(error)
                return
            self.wire = checked
            # Of this class: they have come already, and a derived one would count them again.
            MessageTransport.buffer_updated(self, len(wire.unread()))
            return
        self._stop_reading("no room")
        self._owner.link_waits(self)

    def eof_received(self) -> bool:
        """Close when the peer does."""
        return False

    def connection_lost(self, exc: Exception | None) -> None:
        """Let go of everything."""
        self._leave()
        exc = exc or self._failure
        self.wire.lost()
        if self._watch is not None:
            self._watch.stop()
        if self.side is not None:
            self.side.close()
        self._drop_unsent()
        for _message, sink in self._received:
            if sink is not None:
                sink.abandoned()
        self._received.clear()
        error = self._error
        if error is None:
            why = f"{self.peer_name} closed the connection"
            error = ConnectionLost(f"{why}: {exc}" if exc else why)
        self._owner.link_lost(self, error)

    def pause_writing(self) -> None:
        """The transport is full."""
        self._full = True

    def resume_writing(self) -> None:
        """The transport takes more."""
        self._full = False
        self._pump()

    # ------------------------------------------------------------ receiving

    def resume(self) -> bool:
        """Request room for a payload again; return whether there was, or it is needed no longer.

        A peer that had room, and whose next payload has none, waits at the end of the queue.
        """
        wire = self.wire
        if self._closing or self.transport is None:
            return True
        had_room = False
        try:
            while wire.pending is not None:
                room = self._sink_for(wire.pending)
                if room is None:
                    if had_room:
                        self._owner.link_waits(self)
                    return had_room
                had_room = True
                self._received.extend(wire.fill(room))
                self._pass_on()
        except RemoteProtocolError as error:
            self.fault(error)
            return True
        self._go_on_reading("no room")
        return True

    def _pass_on(self) -> None:
        """Pass messages on, one by one, while the peer reads its answers.

        A few bytes can request many models. A peer that does not read its answers gets no more.
        """
        while self._received and self._passes:
            self._owner.link_received(self, *self._received.popleft())

    @property
    def reading(self) -> bool:
        """True if this peer is read from."""
        return not self._unread

    @property
    def _passes(self) -> bool:
        """True if messages are passed on as they come."""
        return not self._unread or not ("behind" in self._unread or _HELD in self._unread)

    def hold(self) -> None:
        """Read nothing from this peer, and pass on nothing that it has sent, until `release`."""
        self._stop_reading(_HELD)

    def release(self) -> None:
        """Read from this peer again."""
        self._go_on_reading(_HELD)
        if not self._closing:
            self._pass_on()

    def held(self, now: float) -> float:
        """Return the seconds so far for which a bandwidth budget, not the peer, held it up."""
        return 0.0

    def _stop_reading(self, why: str) -> None:
        if not self._unread and self.transport is not None and not self.transport.is_closing():
            if self._poller is None:
                self.transport.pause_reading()
            else:
                self._leave()
        self._unread.add(why)

    def _go_on_reading(self, why: str) -> None:
        if why in self._unread:
            self._unread.discard(why)
            if not self._unread and self.transport is not None and not self.transport.is_closing():
                if self._poller is None:
                    self.transport.resume_reading()
                else:
                    self._join(self._poller)

    # ------------------------------------------------------------ a poller's side

    def plain_descriptor(self) -> int:
        """Return the descriptor of the socket that it reads from itself; below 0: it has none."""
        transport = self.transport
        if transport is None or transport.get_extra_info("sslcontext") is not None:
            return -1
        sock: socket.socket | None = transport.get_extra_info("socket")
        return -1 if sock is None else sock.fileno()

    def poll(self, poller: Poller) -> None:
        """Have a poller read from this connection, with the `shortcut` that it has now."""
        transport = self.transport
        if self._closing or transport is None or transport.is_closing():
            return
        if self._poller is None and not self._unread:
            transport.pause_reading()
        self._leave()
        self._poller = poller
        if not self._unread:
            self._join(poller)

    def _join(self, poller: Poller) -> None:
        try:
            self._polled = poller.add(self, self.plain_descriptor(), self.shortcut)
        except OSError:  # there is no memory for one more, say
            self.give_back()

    def _leave(self) -> None:
        """Have the poller leave the socket alone, whose number may soon be another file's."""
        if self._polled >= 0 and self._poller is not None:
            self._poller.remove(self._polled)
        self._polled = -1

    def give_back(self) -> None:
        """Have the event loop read from it again: there is an end of the stream, say."""
        if self._poller is None:
            return
        self._leave()
        self._poller, transport = None, self.transport
        if not self._unread and transport is not None and not transport.is_closing():
            transport.resume_reading()

    def broken(self, error: Exception) -> None:
        """End the connection because of an error that came while the poller read from it."""
        self._failure = error
        if not isinstance(error, OSError):
            text = "a connection ends: its bytes could not be taken"
            context = {"message": text, "exception": error, "protocol": self}
            asyncio.get_running_loop().call_exception_handler(context)
        self._closing = True
        self._leave()
        if self.transport is not None:
            self.transport.abort()

    # ------------------------------------------------------------ sending

    @property
    def unsent(self) -> int:
        """Bytes that are not in the socket yet."""
        waiting = self.transport.get_write_buffer_size() if self.transport is not None else 0
        return self._unsent + waiting

    @property
    def sent(self) -> int:
        """Bytes that the peer's system has acknowledged, as far as this one can tell."""
        if self.transport is None:
            return self.pumped
        waiting = self.transport.get_write_buffer_size()
        sock = self.transport.get_extra_info("socket")
        return self.pumped - waiting - (0 if sock is None else unacknowledged(sock))

    @property
    def queued(self) -> int:
        """Bytes that wait to be sent, without those of versions of the parameters."""
        return sum(len(view) for view, lease in self._out if lease is None)

    def pace(self) -> float:
        """Return the bytes per second at which the peer has read, since bytes wait for it."""
        since, before = self._waits
        elapsed = max(asyncio.get_running_loop().time() - since, _SHORTEST)
        return max(self.sent - before, 0) / elapsed

    def send(self, buffers: list[Buffer], lease: Lease | None = None) -> None:
        """Send these buffers, in order; the views of a lease are dropped as they are sent."""
        if self.transport is None or self.transport.is_closing():
            return
        if (
            not self._out
            and not self._full
            and len(buffers) == 1
            and len(buffers[0]) <= self._at_once
        ):
            self.pumped += len(buffers[0])
            self.transport.write(buffers[0])
            return
        if not self._out:
            self._waits = asyncio.get_running_loop().time(), self.sent
        before = self._unsent
        for buffer in buffers:
            view = memoryview(buffer)
            self._out.append((view, lease))
            self._unsent += len(view)
        self._newest = self._unsent - before
        if lease is not None:
            lease.sender = self
        self._pump()
        if lease is None and self._out and self.on_queued is not None:
            self.on_queued(self._unsent - before)
        if self._behind:
            self._stop_reading("behind")

    @property
    def _behind(self) -> bool:
        """True if so much is unsent that this peer is not read from.

        One message may be, however long: the next push comes in while the answer to the last goes
        out, so that both directions of a link are in use.
        """
        return self._unsent > max(_BEHIND, self._newest)

    @property
    def answering(self) -> bool:
        """True if so much is unsent that the peer may be busy with reading it."""
        return self._unsent > _BEHIND

    def _pump(self) -> None:
        transport = self.transport
        while self._out and not self._full and transport is not None:
            if transport.is_closing():
                return
            view, lease = self._out.popleft()
            if len(view) > _CHUNK:
                self._out.appendleft((view[_CHUNK:], lease))
                view = view[:_CHUNK]
            self._unsent -= len(view)
            self.pumped += len(view)
            transport.write(view)
        self._pumped()

    def _pumped(self) -> None:
        """Read on from a peer that has caught up; close if all is sent and it is time."""
        if "behind" in self._unread and not self._behind:
            self._go_on_reading("behind")
            if self._received:  # later: this may run while an event is being handled
                asyncio.get_running_loop().call_soon(self._pass_on)
        if self._closing:
            self._close_if_sent()

    def _close_if_sent(self) -> None:
        """End the connection if all is sent."""
        if self.transport is not None and not self._out:
            self._leave()
            self.transport.close()

    def dismiss(self, why: str) -> None:
        """End the connection, as its peer reads too slowly, and drop the views that are unsent."""
        self._drop_unsent()
        self.fault(Unavailable(why))

    def _drop_unsent(self) -> None:
        """Drop what is unsent."""
        for _view, lease in self._out:
            if lease is not None:
                lease.sender = None
        self._out.clear()
        self._unsent = 0

    # ------------------------------------------------------------ ending

    def forked(self) -> None:
        """Close it in a fork, without the event loop, which shares state with the parent's."""
        sock = self.transport.get_extra_info("socket") if self.transport is not None else None
        if sock is not None:
            forks.blank(sock.fileno())

    def fault(self, error: AiopsError) -> None:
        """End the connection at once because of an error."""
        self._error = self._error or error
        if self.transport is not None:
            self._closing = True
            self._leave()
            self.transport.abort()

    def close(self) -> None:
        """End the connection when all is sent."""
        self._closing = True
        self._close_if_sent()


async def until_readable(sock: socket.socket) -> None:
    """Wait until there is something to be read from a socket that no transport has."""
    loop = asyncio.get_running_loop()
    ready = asyncio.Event()
    loop.add_reader(sock, ready.set)
    try:
        await ready.wait()
    finally:
        loop.remove_reader(sock)
