"""The short way of a blocking client's exchanges: over its socket, without messages between."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from aiops.client.compiled_forms import CompiledExchange
from aiops.client.params import Params
from aiops.client.posting import Posting
from aiops.client.request_kinds import Receipt, Request, RowsRequest
from aiops.client.session import Session
from aiops.client.steady import SteadyExchange
from aiops.client.steady_rows import RowsExchange
from aiops.client.sync.compiled_exchange import compiled_exchange, pass_mailbox, takes_mailboxes
from aiops.client.sync.rows_exchange import carry_rows
from aiops.client.sync.shard_socket import RECEIVE
from aiops.errors import ConnectionLost
from aiops.model.layout import Array
from aiops.net.busy_poll import Spin
from aiops.net.timed_socket import plain
from aiops.net.tls_socket import StreamSocket, read_poll
from aiops.net.unix_socket import UnixSide
from aiops.wire.connection import Buffer

_MAILBOXES = 4
"""Mailboxes that a connection may make, one for each form of its exchanges."""


class Handed(NamedTuple):
    """A steady exchange that was handed over: its begin at the latest, and what became of it.

    ``servers``: of each, the lead first, the unsent bytes and the bytes received. ``fault``: why
    the connection is gone, if it is.
    """

    request: Request
    began: float
    servers: list[tuple[list[Buffer], list[memoryview]]]
    fault: Exception | None


class ShortWay:
    """Exchanges that one function makes from the gradient to the receipt, on one socket.

    What does not go as usual is handed over to the connection's general path, which finishes it.

    Parameters
    ----------
    session
        The session.
    hang_up
        Ends the connection.
    send_rest
        Sends what the session has to send beside requests: that parameters are given back, say.

    Attributes
    ----------
    steady
        The next push may be one of this form; None: it may not.
    compiled, compiled_from
        Makes it by compiled code, on the present socket, if that may be; and the form that it was
        made for, or tried for.
    handed
        An exchange that the general path is to finish.
    socket, poll
        The present socket, and what polls it where a system has that.
    spin
        Whether it pays to poll for a moment before a wait.
    """

    def __init__(
        self, session: Session, hang_up: Callable[[], None], send_rest: Callable[[], None]
    ) -> None:
        self._session, self._hang_up, self._send_rest = session, hang_up, send_rest
        self.steady: SteadyExchange | None = None
        self.compiled: CompiledExchange | None = None
        self.handed: Handed | None = None
        self.socket: StreamSocket | None = None
        self._bare: socket.socket | None = None  # if it has calls that receive into two places
        self.poll: Any = None
        self.spin = Spin()
        self.compiled_from: SteadyExchange | None = None
        self._near: UnixSide | None = None  # on a connection within this machine
        self._mailboxes = 0  # that may still be made for the present connection
        self._beat = 0.0  # seconds that one call of the socket may wait

    def connected(self, sock: StreamSocket, near: UnixSide | None, beat: float) -> None:
        """Take a socket that has just been connected.

        ``near``: of a connection within this machine. ``beat``: the seconds that one call waits.
        """
        self.take(sock)
        self._near, self._beat, self.poll = near, beat, read_poll(sock)
        self._mailboxes = _MAILBOXES if takes_mailboxes() else 0
        self._session.mailboxes = self._mailboxes > 0

    def take(self, sock: StreamSocket) -> None:
        """Exchange on this socket from here on: the one before, or what has become of it."""
        self.socket, self._bare = sock, plain(sock)

    def end(self) -> None:
        """Have compiled code leave the socket alone, also where another thread is in it.

        Its number may soon be another file's.
        """
        compiled, self.compiled, self.compiled_from = self.compiled, None, None
        if compiled is not None:
            compiled.fd = -1

    def left(self) -> None:
        """Let go of the socket, which is closed."""
        self.end()
        self.steady = self.handed = None
        self.socket = self._bare = self._near = self.poll = None

    # ------------------------------------------------------------ exchanges

    def exchange(self, params: Params, gradients: Mapping[str, Array]) -> Receipt | Request | None:
        """Push gradients computed at ``params``, and bring these up to date, by a steady exchange.

        Returns
        -------
        The receipt. None: nothing has been done, since this is no such push. A request: the push is
        under way, and is to be carried further by `BlockingConnection.carry`.
        """
        steady, sock = self.steady, self.socket
        if steady is None or sock is None or self._session.info.examples:
            return None
        if self.compiled is not None:
            return self._exchange_compiled(steady, self.compiled, params, gradients)
        if steady.lends:
            return None
        buffers = steady.begin(params, gradients)
        if buffers is None:
            return None
        self.steady, sent, received, fault = None, 0, 0, None
        try:
            sent = sock.sendmsg(buffers)
            if sent == steady.push_size:
                spin = self.spin
                if spin.resting:  # `Spin.look` in line
                    spin.resting -= 1
                elif self.poll is not None:
                    spin.look(self.poll.poll)
                received = sock.recv_into(steady.room)
                if received != steady.answer_size:
                    received, fault = self._receive_rest(sock, steady, received)
                receipt = steady.finish(received)
                if receipt is not None:
                    self.steady = steady
                    return receipt
        except BlockingIOError:
            pass  # a beat has passed: the general path looks at the clock
        except OSError as error:
            fault = error
        except BaseException:  # such as Ctrl-C: a message may be cut
            self._break_off(steady, params, sent, received)
            raise
        return self._hand_over(steady, sent, received, fault)

    def _exchange_compiled(
        self,
        steady: SteadyExchange,
        compiled: CompiledExchange,
        params: Params,
        gradients: Mapping[str, Array],
    ) -> Receipt | Request | None:
        """Do by compiled code what `exchange` says."""
        spin, look = self.spin, 0
        if spin.resting:
            spin.resting -= 1
        else:
            look = spin.budget
        self.steady = None
        try:
            receipt: Receipt | None = compiled.carry(steady, params, gradients, look)
            if receipt is NotImplemented:
                receipt = steady.carry(compiled, params, gradients, look)
        except BaseException:  # such as Ctrl-C: a message may be cut
            self._break_off(steady, params, compiled.sent, compiled.received)
            if compiled.received:  # it may have copied them, and not been able to say so
                params.now_at(-1)
            raise
        if receipt is None and not steady.under_way:
            self.steady = steady
            return None
        if compiled.missed:
            spin.missed()
        elif look and compiled.received:  # and not where the push itself was held up
            spin.found()
        if receipt is not None:
            self.steady = steady
            if self._session.back:
                self._send_rest()
            return receipt
        fault: Exception | None = None
        if compiled.fault < 0:
            fault = ConnectionLost(f"{self._session.server} closed the connection")
        elif compiled.fault:
            fault = OSError(compiled.fault, os.strerror(compiled.fault))
        return self._hand_over(steady, compiled.sent, compiled.received, fault)

    def _hand_over(
        self, steady: SteadyExchange, sent: int, received: int, fault: Exception | None
    ) -> Request:
        """Have the general path go on with a steady exchange; return its request."""
        request, unsent, views = self._session.hand_over(steady, sent, received)
        self.handed = Handed(request, time.monotonic() - self._beat, [(unsent, views)], fault)
        return request

    def _break_off(self, steady: SteadyExchange, params: Params, sent: int, received: int) -> None:
        """End a steady exchange, and the connection with it."""
        if steady.under_way:
            self._session.abandon(self._session.hand_over(steady, sent, received)[0])
            if received and steady.direct:  # more may have been received than was counted
                params.now_at(-1)
        self._hang_up()

    def exchange_rows(self, request: RowsRequest, several: Sequence[StreamSocket]) -> bool:
        """Carry a request about rows, which was not asked yet.

        ``several``: the sockets to all servers, if there are several.

        Returns whether it is done; if not, it has been asked, and is to be carried further by
        `BlockingConnection.carry`.
        """
        session, exchange = self._session, None
        fault: Exception | None = None
        # A TLS socket has no call that receives into two places.
        found = map(plain, several) if several else (self._bare,)
        bare = [sock for sock in found if sock is not None]
        alike = len(bare) == (len(several) or 1) == 1 + len(session.shards.channels)
        if alike and self.handed is None and not session.wire.checked:
            exchange = RowsExchange.begun(session, request)
        if exchange is None:
            session.ask(request)
            return False
        began, self.steady = time.monotonic(), None
        try:
            if carry_rows(exchange, bare, self._glance):
                return True
        except (ConnectionLost, OSError) as error:
            fault = error
        except BaseException:  # such as Ctrl-C: a message may be cut
            session.abandon(request)
            self._hang_up()
            raise
        self.handed = Handed(request, began, exchange.hand_over(), fault)
        return False

    @property
    def takes_rows(self) -> bool:
        """True if a request about rows may go by `exchange_rows`: the model is known."""
        return self.socket is not None and self._session.info.layout is not None

    def _glance(self) -> None:
        """Poll for an answer of the only server for a moment, if that pays."""
        if self.poll is not None:
            self.spin.look(self.poll.poll)

    def _receive_rest(
        self, sock: StreamSocket, steady: SteadyExchange, received: int
    ) -> tuple[int, Exception | None]:
        """Receive the rest of an answer; return how much has come, and what went wrong."""
        if not received:
            return 0, ConnectionLost(f"{self._session.server} closed the connection")
        rest = steady.rest(received)
        while rest:
            wanted = rest[:RECEIVE]
            try:
                count = sock.recv_into(wanted, 0, socket.MSG_WAITALL)
            except BlockingIOError:
                break
            except OSError as error:
                return received, error
            if not count:
                return received, ConnectionLost(f"{self._session.server} closed the connection")
            received += count
            if count < len(wanted):
                break  # it took a beat
            rest = rest[count:]
        return received, None

    def settled(self) -> bool:
        """Have the next push be a steady exchange, if it may, on a connection to one server.

        Returns whether the session has something to send.
        """
        session = self._session
        if session.steady is None or not session.idle:
            return False
        self.steady = session.steady
        return self.steady is not self.compiled_from and self._compile(self.steady)

    # ------------------------------------------------------------ compiled code

    def _compile(self, steady: SteadyExchange) -> bool:
        """Have exchanges of this form made by compiled code, if that may be.

        Returns whether the session has something to send.
        """
        self.compiled_from, self.compiled = steady, None
        if self.socket is not None:
            self.compiled = compiled_exchange(steady.forms, self.socket)
            if (self.compiled is not None and self._near is not None) and not steady.forms.answers:
                return self._make_mailbox(steady, self.compiled, self._near)
        return False

    def _make_mailbox(
        self, steady: SteadyExchange, compiled: CompiledExchange, side: UnixSide
    ) -> bool:
        """Have exchanges go by a mailbox, once a server on this machine has opened it.

        Returns whether it has been announced to the session.
        """
        mailbox = None
        if self._mailboxes:
            self._mailboxes -= 1
            mailbox = pass_mailbox(compiled, side, steady.forms.nbytes, steady.lends)
        if mailbox is not None:
            shared = self._session.wire.shared
            if steady.lends and shared is not None:
                layout = self._session.info.known_layout
                steady.posting = Posting(compiled, mailbox, layout, shared)
            self._session.announce_mailbox(len(mailbox.data))
        elif steady.lends:
            self.compiled = None
        return mailbox is not None
