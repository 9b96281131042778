"""The connection of a blocking client: a plain socket, every wait on which has a deadline."""

from __future__ import annotations

import select
import socket
import struct
import time
from collections.abc import Callable, Sequence
from functools import partial
from math import inf
from typing import Any, Protocol

from aiops.client.backoff import Attempts, Repetitions, overdue, reason
from aiops.client.handover import Receiver, process, without
from aiops.client.pending import given_up
from aiops.client.request_kinds import Request, RowsRequest
from aiops.client.session import Session
from aiops.client.shard_channel import ShardChannel
from aiops.client.sync.dialling import Dialler, shut_down
from aiops.client.sync.shard_socket import GLANCE, RECEIVE, SEND, ShardSocket, send_some
from aiops.client.sync.shard_socket import move as move_all
from aiops.client.sync.short_way import Handed, ShortWay
from aiops.common.urls import ServerAddress
from aiops.errors import AiopsError, ConnectionLost, DeadlineExceeded, Unavailable, Untrusted
from aiops.net.environment import CURRENT_ENVIRONMENT
from aiops.net.moved_servers import gone
from aiops.net.path_watch import cut_off, unheard
from aiops.net.timed_socket import SocketTimes, timed
from aiops.net.tls import TlsClient
from aiops.net.tls_socket import StreamSocket, read_ahead
from aiops.net.unix_socket import UnixSide
from aiops.wire.connection import Buffer
from aiops.wire.shared_payloads import SharedPayloads

_MOMENT = 0.001
"""Seconds between two requests within which what can wait (a pong, say) waits for the second."""

_BEAT = 0.5  # seconds between looks, at the clock and at the network, in a call that waits
_ASIDE = 1.0  # seconds that messages may take that no call waits for: a pong, a leave


class MoreRequests(Protocol):
    """The requests that are to be sent while the answer to another is waited for."""

    def fileno(self) -> int:
        """Return a descriptor that is readable when there are some."""

    def ask(self) -> None:
        """Have the session ask them."""


class BlockingConnection:
    """The sockets of a session, which are made again when they were lost.

    One thread uses it at a time, except for `interrupt`. Deadlines (``until``) are times of
    `time.monotonic`.

    Parameters
    ----------
    session
        The session.
    servers
        The server's address, and those of its alternatives.
    tls
        Connects to them by TLS; None: they speak plain TCP.

    Attributes
    ----------
    times
        When something was sent and received last on a plain socket, once that is noted.
    short
        The short way of an exchange, which has the socket.
    both_ways
        Whether it sends and receives at once, as with several shards; for `MoreRequests`.
    """

    dialler: Dialler

    def __init__(
        self, session: Session, servers: Sequence[ServerAddress], tls: TlsClient | None = None
    ) -> None:
        self._session = session
        self.dialler = Dialler(session.url, self._left, tls, near=not session.wire.checked)
        below = CURRENT_ENVIRONMENT.get().randbelow
        self._attempts = Attempts(servers, below, 0.0)
        self._repetitions = Repetitions(below)
        self._told: Unavailable | None = None  # why the server ended the connection meanwhile
        self._server = servers[0]  # that it leads to, and the address at which that was
        self._place = servers[0].host, servers[0].port
        self._near: UnixSide | None = None  # on a connection within this machine
        self.short = ShortWay(session, self.hang_up, self._send_the_rest)
        self._sockets: list[ShardSocket] = []  # to all shards, where there are several
        self._last = 0.0  # when the last request was answered
        self.both_ways = False
        self.times: SocketTimes | None = None  # of the socket, if they are noted
        self._more: MoreRequests | None = None  # of the present `carry`

    def exchange_rows(self, request: RowsRequest) -> bool:
        """Carry a request about rows, which was not asked yet, in the short way.

        Returns whether it is done; if not, it has been asked, and is to be carried further by
        `carry`.
        """
        done = self.short.exchange_rows(request, [shard.socket for shard in self._sockets])
        if done and self._session.steady is not None:
            self._settled()
        return done

    def _go_on(self, handed: Handed, until: float) -> bool:
        """Finish a steady exchange on the general path; return whether anything had come."""
        receivers: list[Receiver] = [self._session, *self._session.shards.channels]
        anything = False
        for number, (unsent, received) in enumerate(handed.servers):
            if handed.fault is None and self._sockets:
                self._sockets[number].queue(unsent)
            elif handed.fault is None:
                self._send(unsent, until)
            anything = process(receivers[number], received) or anything
        if handed.fault is not None:
            raise handed.fault
        return anything

    def _settled(self) -> None:
        """Have the next push be a steady exchange, if it may."""
        if not self._sockets and self.short.settled():
            self._send_the_rest(time.monotonic() + _ASIDE)

    def carry(
        self,
        request: Request | None,
        timeout: float,
        attempting: float,
        more: MoreRequests | None = None,
    ) -> Any:
        """Move bytes until a request is answered; return its result.

        A connection that is lost meanwhile is made again, with longer and longer pauses, and a
        request that the server could not take is sent again.

        Parameters
        ----------
        request
            None: wait until the session is ready.
        timeout
            Seconds that it may take in all.
        attempting
            Seconds that connecting again may take, and waiting for a server that is full or ends.
        more
            Other requests, which are sent meanwhile. Their answers are waited for by calls of their
            own. Only where `both_ways` is set.

        Raises
        ------
        DeadlineExceeded
            When the answer has not come in time.
        ConnectionLost
            When the server cannot be reached.
        Unavailable
            When it could not take this client, or the request, until the time was up.
        AiopsError
            The refusal of the request, or the end of the session.
        """
        session, now, self.short.steady = self._session, time.monotonic(), None
        handed, self._more = self.short.handed, more
        until = timeout + (handed.began if handed and handed.request is request else now)
        hurried = now - self._last < _MOMENT  # the next is then soon, too, and takes releases along
        attempts, trying, lost = self._attempts, now + min(timeout, attempting), False
        if not session.ready:
            attempts.restart(trying)
            attempts.said, self._told = self._told, None
        try:
            while not (request.done if request is not None else session.ready):
                if self.dialler.interrupted:
                    self.dialler.check()
                ready = session.ready
                try:
                    self._move(until if ready else trying, attempting / 4)
                    if session.ready is not ready:
                        attempts.made(time.monotonic(), session.answered)
                    refusal = None if request is None or request.done else request.refusal
                    if refusal is not None and session.ready:  # else it is of a server that is left
                        self._repeat(refusal, attempting)
                except (ConnectionLost, Unavailable, OSError) as error:
                    now = time.monotonic()
                    if ready and isinstance(error, DeadlineExceeded) and now >= until:
                        raise
                    self.hang_up()
                    self.dialler.check()
                    if ready:  # it was there until now
                        before, lost = trying if lost else inf, True
                        trying = min(until, now + attempting)
                        trying = attempts.lost(now, session.answered, trying, error, before)
                    self.dialler.wait(attempts.pause(now, error))
        except BaseException as error:  # such as Ctrl-C: a message may be cut
            outcome = error
            if request is not None:
                session.abandon(request)
                if isinstance(error, AiopsError):
                    outcome = given_up(request, error)
            self.hang_up()
            if outcome is error:
                raise
            raise outcome from error
        more_follows = more is not None and session.pending.by_id  # the next call sends the rest
        soon = not hurried or session.steady is not None  # the next may not take the socket
        rest = session.shards.channels or session.out or (session.back and soon)
        if rest and not more_follows:
            self._send_the_rest(until)
        self._last, attempts.said = time.monotonic(), None
        if session.steady is not None and session.idle and not self._sockets:  # `_settled`, in line
            self.short.steady = session.steady
            if session.steady is not self.short.compiled_from:
                self._settled()
        if request is None:
            return None
        if request.error is not None:
            raise request.error
        return request.result

    def _repeat(self, refusal: Unavailable, timeout: float) -> None:
        """Ask again after a pause for what the server could not take, or have that fail.

        Raises
        ------
        Unavailable
            The refusal, if another server may take it.
        ConnectionLost, OSError
            When the server has closed the connection meanwhile.
        """
        if self._attempts.several:
            raise refusal
        try:
            self.dialler.wait(self._repetitions.pause(time.monotonic(), refusal, timeout))
        except Unavailable as final:
            self._session.pending.reject_refused(final)
            return
        self._attempts.said = refusal
        if self.short.socket is not None:  # a server that shuts down may have closed the connection
            self._take_in(self.short.socket)
        self._session.ask_refused()

    def _move(self, until: float, beat: float) -> None:
        """Connect if need be, send what there is to send, and wait for something to come.

        ``beat``: seconds between two looks at the clock, at most, on a connection that is made.

        Raises
        ------
        DeadlineExceeded
            When the deadline has passed, or the server leaves the client waiting for its welcome.
        ConnectionLost, Unavailable, OSError
            When the connection is gone or cannot be made; `hang_up` is then due.
        """
        handed, self.short.handed = self.short.handed, None
        try:
            if self.short.socket is None:
                self._connect(until, min(_BEAT, beat))  # a server may refuse before the hello
            if not self._session.ready:
                until = min(until, time.monotonic() + self._attempts.patience)
            if handed is not None and self._go_on(handed, until):
                return
            if self._session.shards.channels or (self.both_ways and self._session.ready):
                self._move_all(until)
                return
            if self._sockets:  # the model turned out to lie on the lead alone
                self._send(self._sockets[0].rest(), until)
                self._keep_sockets([])
                self._sockets.clear()
            self._send(self._session.outgoing(), until)
        except OSError:
            self._receive_reason()
            raise
        self._receive(until)

    def _receive_reason(self) -> None:
        """Process what the server sent before it closed the connection: an error says why.

        Raises
        ------
        Refused, Untrusted
            That error. Without it the client would try to reach a server that has ended.
        ConnectionLost
            When there is none.
        """
        sock, session = self.short.socket, self._session
        if self._session.shards.channels:
            return  # of several servers each has its own receiver
        try:
            while sock is not None:
                session.received(sock.recv_into(session.next_buffer(), 0, GLANCE))
        except Untrusted:
            raise
        except OSError:
            return

    def _send_the_rest(self, until: float | None = None) -> None:
        """Send what is left to send (a pong, say); if that fails, the next call connects again.

        ``until``: the time by which, by default soon.
        """
        until = time.monotonic() + _BEAT if until is None else until
        if self._sockets and (self.both_ways or self._session.shards.channels):
            try:
                while any(shard.unsent for shard in self._sockets):
                    move_all(self._sockets, min(_BEAT, self._left(until)))
            except (AiopsError, OSError):
                self.hang_up()
            return
        out = self._session.outgoing()
        if out and self.short.socket is not None:
            try:
                self._send(out, until)
            except (AiopsError, OSError):
                self.hang_up()

    def _move_all(self, until: float) -> None:
        """Send and receive on the connections to all shards of the model at once."""
        lead = self.short.socket
        if lead is None:
            raise self._unconnected()
        if not self._sockets:
            self._sockets = [ShardSocket(lead, self._session)]
        channels = self._session.shards.channels
        if len(channels) < len(self._sockets) - 1:
            self._keep_sockets(channels)
        for channel in channels[len(self._sockets) - 1 :]:
            connected, side = self.dialler.connect_to_shard(channel, until)
            shard = ShardSocket(connected, channel, side)
            shard.queue(channel.connected(_shared_by(side)))
            self._sockets.append(shard)
        wake = -1
        if self._more is not None:
            self._more.ask()
            wake = self._more.fileno()
        while not move_all(self._sockets, min(_BEAT, self._left(until)), wake):
            for shard in self._sockets:
                self._check_path(shard.socket)

    def attend(self) -> None:
        """Take in and answer what the server sent unasked; does not wait.

        Raises
        ------
        ConnectionLost
            When the connection is gone.
        """
        sock = self.short.socket
        if sock is None or self.short.handed is not None:
            return
        try:
            self._take_in(sock)
            self._check_path(sock)
            self._session.log(time.monotonic())
            self._send_the_rest(time.monotonic() + _ASIDE)
            self._settled()
        except (AiopsError, OSError) as error:
            self._told = error if isinstance(error, Unavailable) else None
            self.hang_up()
            raise ConnectionLost(f"{self._session.server}: {reason(error)}") from error

    def _take_in(self, sock: StreamSocket) -> None:
        """Receive what has come; does not wait."""
        while self._sockets and move_all(self._sockets, 0):
            pass
        while not self._sockets and (read_ahead(sock) or self._has_come(sock, 0.0)):
            self.short.steady = None
            self._receive(time.monotonic() + _ASIDE)

    # ------------------------------------------------------------ ending

    def hang_up(self) -> None:
        """End the connection at once; the next `carry` makes another."""
        sock = self.short.socket
        self.short.left()
        if sock is not None:
            sock.close()
        if self._near is not None:
            self._near.close()
            self._near = None
        self._close_sockets()
        self._session.lost()

    def _keep_sockets(self, channels: Sequence[ShardChannel]) -> None:
        """Close the connections to shards that hold nothing of the model."""
        others = [shard for shard in self._sockets[1:] if shard.receiver not in channels]
        for shard in others:
            shard.close()
            self._sockets.remove(shard)

    def _close_sockets(self) -> None:
        for shard in self._sockets:
            shard.close()
        self._sockets = []

    def close(self) -> None:
        """Leave the server, and end the connection; none is made afterwards."""
        self.dialler.interrupt()  # another thread may be in a call, and would connect again
        sock = self.short.socket
        self.short.left()
        if sock is None:
            return
        try:
            sock.settimeout(_ASIDE)
            midway = any(shard.unsent for shard in self._sockets)
            for buffer in self._session.leave() if not midway else ():
                sock.sendall(buffer)
        except OSError:
            pass  # the connection is gone already
        finally:
            sock.close()
            self.hang_up()

    def interrupt(self) -> None:
        """End the call that another thread waits in; no connection is made afterwards."""
        self.dialler.interrupt()
        shut_down(self.short.socket)

    def forked(self) -> None:
        """Close this process's descriptors in a fork, also in the midst of a call."""
        self.short.steady = None
        self.short.end()
        self.dialler.forked()
        for sock in (self.short.socket, *(shard.socket for shard in self._sockets)):
            if sock is not None:
                sock.close()  # this process's descriptor: the connection stays as it is

    def note_times(self, now: Callable[[], int]) -> None:
        """Note from here on when something is sent and received, by this clock."""
        self.short.end()  # which notes none
        self.times = times = SocketTimes(now)
        if self.short.socket is not None:
            self.short.take(timed(self.short.socket, times))

    def _unconnected(self) -> ConnectionLost:
        return ConnectionLost(f"{self._session.server}: there is no connection")

    # ------------------------------------------------------------ the socket

    def _connect(self, until: float, beat: float) -> None:
        server, patience = self._attempts.server, self._attempts.patience
        self._server, self._place = server, self.dialler.present_address(server)
        self._session.towards(server, self._place)
        sock, self._near = self.dialler.connect_to_server(server, until, patience)
        sock = sock if self.times is None else timed(sock, self.times)
        self.short.connected(sock, self._near, beat)
        self.dialler.check()  # an interruption that received too early to find this socket
        sock.settimeout(None)
        for option in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
            seconds = struct.pack("ll", int(beat), int(beat % 1 * 1e6) or 1)
            sock.setsockopt(socket.SOL_SOCKET, option, seconds)
        try:
            self._send(self._session.connected(_shared_by(self._near)), until)
        except OSError:
            self._receive_reason()
            raise

    # The kernel itself wakes a call that waits for more than _BEAT (SO_RCVTIMEO, SO_SNDTIMEO), so
    # that a transfer of any size is one system call, and a deadline is still seen to.

    def _send(self, buffers: list[Buffer], until: float) -> None:
        sock = self.short.socket
        if sock is None:
            raise self._unconnected()
        total, sent = sum(map(len, buffers)), 0
        if total <= SEND:  # nearly always by one call
            try:
                sent = sock.sendmsg(buffers) if buffers else 0
            except BlockingIOError:
                self._look(sock, until)
        if sent == total:
            return
        views = without(buffers, sent)
        while views:
            try:
                send_some(sock, views)
            except BlockingIOError:
                self._look(sock, until)

    def _receive(self, until: float) -> None:
        sock, wire = self.short.socket, self._session.wire
        if sock is None:
            raise self._unconnected()
        # Of a payload all is waited for that is taken; of anything else what is there is taken.
        flags = socket.MSG_WAITALL if wire.missing else 0
        buffer = wire.next_buffer()[:RECEIVE]
        if not self._session.ready:
            self._wait_for_welcome(sock, until)
        elif not flags and self.short.poll is not None:
            # Glances that are in vain are many, and raise nothing: an error takes longer to make.
            self.short.spin.look(self.short.poll.poll)
        while True:
            try:
                count = sock.recv_into(buffer, 0, flags)
                break
            except BlockingIOError:
                self._look(sock, until)
        self._session.received(count)

    def _wait_for_welcome(self, sock: StreamSocket, until: float) -> None:
        """Wait until there is something to receive: the deadline may be sooner than a beat."""
        self._has_come(sock, self._left(until))
        self._left(until)

    def _has_come(self, sock: StreamSocket, seconds: float) -> bool:
        """Wait until there is something to receive, or so long; return whether there is."""
        if self.short.poll is not None:
            return bool(self.short.poll.poll(1e3 * seconds))
        return bool(select.select([sock], [], [], seconds)[0])  # descriptors up to 1023

    def _look(self, sock: StreamSocket, until: float) -> None:
        """Look after a beat whether there is time left, and the server is still heard of."""
        self._left(until)
        self._check_path(sock)

    def _check_path(self, sock: StreamSocket) -> None:
        silence = unheard(sock)
        if silence >= self._session.info.waits.unheard:
            raise cut_off(self._session.server, silence)
        if self._place != self.dialler.present_address(self._server):
            raise gone((self._server.host, self._server.port))

    def _left(self, until: float) -> float:
        left = until - time.monotonic()
        if left <= 0:
            raise overdue(self._session.server, self._session.waiting_for, "in time")
        return left


def _shared_by(side: UnixSide | None) -> SharedPayloads | None:
    """Return the segments of both sides of a connection with this side channel."""
    if side is None:
        return None
    return SharedPayloads(partial(side.attach, private=False), side.pass_on)
