"""The connection of an async client: asyncio's protocol around the session."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
from typing import cast

from aiops.client.asyncio.short_way import AsyncShortWay
from aiops.client.session import Session
from aiops.client.shard_channel import ShardChannel
from aiops.common import forks
from aiops.common.failure_waits import FailureWaits
from aiops.errors import AiopsError, ConnectionLost
from aiops.net.path_watch import PathWatch, cut_off
from aiops.net.socket_options import tune
from aiops.net.tls import explained
from aiops.net.unix_socket import UnixSide
from aiops.wire.shared_payloads import SharedPayloads

_CHUNK = 1 << 20  # bytes handed to the transport at once
_GOODBYE = 1.0  # seconds that a last message may take to go out


class AsyncConnection(asyncio.BufferedProtocol):
    """One connection; when it is lost, its client makes another.

    The connections to the shards of a model are ended together.

    Parameters
    ----------
    session
        The session, or the channel of one, whose bytes it carries.
    shared
        The segments of both sides, if the connection is within one machine.
    side
        Its side channel.
    host
        The address at which the server was found there.
    near
        The socket of that connection.

    Attributes
    ----------
    channels
        The connections to the other shards.
    ended
        The error that ended it, once it has ended.
    short
        The short way of steady exchanges; None: it leads to a further shard.
    progress
        Set when something was received, or it ended.
    """

    progress: asyncio.Event

    def __init__(
        self,
        session: Session | ShardChannel,
        shared: SharedPayloads | None = None,
        side: UnixSide | None = None,
        host: str = "",
        near: socket.socket | None = None,
    ) -> None:
        self._session, self._shared, self._side, self._near = session, shared, side, near
        self.host = host
        self._lead = self
        self.channels: list[AsyncConnection] = []
        self.transport: asyncio.Transport | None = None
        self._loop = asyncio.get_running_loop()
        self.ended: asyncio.Future[AiopsError] = self._loop.create_future()
        self.progress = asyncio.Event()
        self._views: list[memoryview] = []
        self._full = self._paused = False
        self.short: AsyncShortWay | None = None
        if isinstance(session, Session):
            self.short = AsyncShortWay(session, self._go_on, self.end)
        self._watch: PathWatch | None = None

    def following(self, lead: AsyncConnection) -> AsyncConnection:
        """Be ended together with the connection to the lead of the shards; return this one."""
        self._lead = lead
        lead.channels.append(self)
        return self

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Set the socket up, and send the hello."""
        transport = cast(asyncio.Transport, transport)  # uvloop's derives from nothing of asyncio's
        self.transport = transport
        forks.note(self)
        sock = transport.get_extra_info("socket")
        if sock is not None and self._shared is None:
            tune(sock)
        transport.set_write_buffer_limits(high=_CHUNK // 2)
        if self.short is not None:
            self.short.connected(transport)
        self._watch = PathWatch(transport, self._unheard, self._cut_off)
        self._views = [memoryview(buffer) for buffer in self._session.connected(self._shared)]
        self.flush()

    def _unheard(self) -> float:
        """Return how long the server's machine may be unheard."""
        session = self._lead._session
        waits = session.info.waits if isinstance(session, Session) else FailureWaits()
        return waits.unheard

    def _cut_off(self, seconds: float) -> None:
        self.end(cut_off(self._session.server, seconds))

    def server_moved(self, error: ConnectionLost) -> None:
        """End it, as the server is at another address now; called on any thread."""
        with contextlib.suppress(RuntimeError):  # the loop is closed
            self._loop.call_soon_threadsafe(self.end, error)

    def get_buffer(self, sizehint: int) -> memoryview:
        """Return the buffer for the next bytes: the session's, or the steady exchange's."""
        short = self.short
        if short is None or short.steady is None:
            return self._session.next_buffer()
        steady, came = short.steady, short.came
        rest = None if came < len(steady.room) else steady.rest(came)
        return steady.room[came:] if rest is None else rest

    def buffer_updated(self, nbytes: int) -> None:
        """Process what was received; send what follows from it."""
        short = self.short
        if short is not None and short.steady is not None:
            short.received(short.steady, nbytes)
            return
        try:
            self._session.received(nbytes)
        except AiopsError as error:
            self.end(error)
            return
        self._lead.progress.set()
        self._lead.flush()

    def hand_over(self) -> None:
        """Have a steady exchange that is under way go on as a request."""
        if self.short is not None:
            self.short.hand_over()

    def _go_on(self) -> None:
        self.progress.set()
        self.flush()

    def eof_received(self) -> bool:
        """Close when the server does."""
        return False

    def connection_lost(self, exc: Exception | None) -> None:
        """Note that it has ended."""
        why = f": {exc}" if exc else ""
        self._leave_socket()
        if exc is not None and not self.ended.done():
            self.hand_over()
            self._receive_reason()
        if isinstance(exc, ssl.SSLError):
            self.end(explained(self._session.server, exc))
        self.end(ConnectionLost(f"{self._session.server} closed the connection{why}"))
        if self._near is not None:
            # The loop closes the descriptor next. If it is lost in `connection_made`, uvloop does
            # not tell the socket, which would close the descriptor's next owner as well.
            asyncio.get_running_loop().call_soon(self._near.detach)

    def _receive_reason(self) -> None:
        """Process what a server within this machine sent before it closed the connection.

        It may have refused this client before it heard a hello. The transport does not read that
        after an attempt to send has failed.
        """
        session = self._session
        with contextlib.suppress(OSError):
            while self._near is not None and not self.ended.done():
                room = session.next_buffer()
                try:
                    session.received(self._near.recv_into(room, 0, socket.MSG_DONTWAIT))
                except AiopsError as error:
                    self.end(error)

    def pause_writing(self) -> None:
        """Stop writing: the transport is full."""
        self._full = True
        if self.short is not None:
            self.short.full = True

    def resume_writing(self) -> None:
        """Go on writing."""
        self._full = False
        if self.short is not None:
            self.short.full = False
        self.flush()

    def flush(self) -> None:
        """Send what the session has to send, as fast as the transport takes it."""
        self._flush()
        for channel in self.channels:
            channel._flush()

    def _flush(self) -> None:
        if self.transport is not None and self._paused != self._session.waiting:
            self._paused = self._session.waiting
            if not self.transport.is_closing():
                (self.transport.pause_reading if self._paused else self.transport.resume_reading)()
        self._views.extend(memoryview(buffer) for buffer in self._session.outgoing())
        views = self._views
        while views and not self._full and self.transport is not None:
            if self.transport.is_closing():
                return
            view = views[0]
            if len(view) > _CHUNK:
                views[0] = view[_CHUNK:]
                view = view[:_CHUNK]
            else:
                views.pop(0)
            self.transport.write(view)

    @property
    def unsent(self) -> bool:
        """True while something is still to be sent."""
        waiting = self.transport is not None and self.transport.get_write_buffer_size() > 0
        return bool(self._views) or waiting or any(channel.unsent for channel in self.channels)

    async def leave(self) -> None:
        """Leave the server and close, unless a message is cut: the leave would be a part of it."""
        if self.transport is None or self.unsent:
            return
        for buffer in self._session.leave():
            self.transport.write(buffer)
        self._leave_socket()
        self.transport.close()
        await asyncio.wait([self.ended], timeout=_GOODBYE)

    def _leave_socket(self) -> None:
        if self.short is not None:
            self.short.left()

    def forked(self) -> None:
        """Blank the descriptor in a fork, without the event loop: its epoll is the parent's too."""
        self._leave_socket()
        sock = self.transport.get_extra_info("socket") if self.transport is not None else None
        if sock is not None:
            forks.blank(sock.fileno())

    def end(self, error: AiopsError) -> None:
        """End the connection at once; what is unsent is thrown away."""
        self._end(error)
        if self._lead is not self:
            self._lead.end(error)
        for channel in self.channels:
            channel._end(error)

    def _end(self, error: AiopsError) -> None:
        if not self.ended.done():
            self.ended.set_result(error)
            self.hand_over()
        self._leave_socket()
        self._views = []
        if self._side is not None:
            self._side.close()
        if self._watch is not None:
            self._watch.stop()
        if self.transport is not None:
            self.transport.abort()
        self.progress.set()
