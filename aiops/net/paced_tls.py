"""Pace a server's TLS connections below TLS: the bytes that are counted are those that cross.

Event loops offer TLS above a transport that reads ahead and buffers what it sends, so that what
crosses, and when, would be theirs to decide. So here the bytes go through `ssl.MemoryBIO`. What was
granted is read from the socket, and then decrypted into the connection's buffers; what is to be
sent is encrypted one record at a time, when bytes have been granted for its beginning. The rest of
that record waits for the next grant. So a version of the parameters is let go as it is sent, as
without TLS, and the handshake is counted and paced like everything else.
"""

from __future__ import annotations

import asyncio
import contextlib
import ssl
from typing import cast

from aiops.net.paced_transport import PACED, PacedTransport, Pacer
from aiops.net.tls import explained
from aiops.net.transport import MessageTransport, TransportOwner
from aiops.wire.connection import Connection, SinkFor

_RECEIVE = 32 << 10  # encrypted bytes that are received at once
_RECORD = 16 << 10  # bytes in one record, at most
_OVERHEAD = 22  # bytes that a record has beside them: its header, type and tag


class PacedTlsTransport(PacedTransport):
    """The server's side of a TLS connection that moves what a `Pacer` grants it.

    The owner hears of it when the handshake is through.

    Parameters
    ----------
    wire, owner, number, sink_for, pacer
        As for every `PacedTransport`.
    context
        The server's certificates.

    Attributes
    ----------
    secured
        Done when the handshake is through; the error of one that failed. To be awaited.
    """

    def __init__(
        self,
        wire: Connection,
        owner: TransportOwner,
        number: int,
        sink_for: SinkFor,
        pacer: Pacer,
        context: ssl.SSLContext,
    ) -> None:
        super().__init__(wire, owner, number, sink_for, pacer)
        self._in, self._encrypted = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._tls = context.wrap_bio(self._in, self._encrypted, server_side=True)
        self._received_bytes = memoryview(bytearray(_RECEIVE))
        self._sealed = memoryview(b"")  # encrypted, and to be sent
        self._is_secure = False
        self._starved = True  # all that has come is decrypted, up to an incomplete record
        self._parting = False  # the end of the connection has been announced
        self.secured: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        # Retrieved even if the wait for it was cancelled: asyncio would log it otherwise.
        self.secured.add_done_callback(lambda done: done.cancelled() or done.exception())

    # ------------------------------------------------------------ the handshake

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Set the socket's options, and wait for the client to begin."""
        self._set_up(cast(asyncio.Transport, transport))

    def _handshake(self) -> None:
        try:
            self._tls.do_handshake()
        except ssl.SSLWantReadError:
            self._flush()
            return
        except ssl.SSLError as error:
            self._end_handshake(error)
            if self.transport is not None:
                self.transport.abort()
            return
        self._is_secure = True
        self._flush()
        self._end_handshake(None)
        self._owner.link_made(self)

    def _end_handshake(self, error: Exception | None) -> None:
        if self.secured.done():
            return
        if error is None:
            self.secured.set_result(None)
        else:
            self.secured.set_exception(error)

    def connection_lost(self, exc: Exception | None) -> None:
        """Let go of everything."""
        super().connection_lost(exc)
        self._end_handshake(exc or ConnectionResetError())

    # ------------------------------------------------------------ receiving

    def _room(self) -> memoryview:
        return self._received_bytes

    def _take(self, nbytes: int) -> None:
        self._in.write(self._received_bytes[:nbytes])
        self._starved = False
        if not self._is_secure:
            self._handshake()
        if self._is_secure:
            self._decrypt()

    def _decrypt(self) -> None:
        """Pass on what has come, until something but the budget stops the reading."""
        while not self._starved and not self._unread - {PACED}:
            transport = self.transport
            if transport is None or transport.is_closing():
                return
            buffer, count, ended = self.wire.next_buffer(), 0, False
            try:
                while count < len(buffer) and not ended:
                    several = int(self._tls.read(len(buffer) - count, buffer[count:]))
                    count += several
                    ended = not several
            except ssl.SSLWantReadError:
                self._starved = True
            except ssl.SSLZeroReturnError:
                ended = True
            except ssl.SSLError as error:
                self.fault(explained(self.peer_name, error))
                return
            if count:
                MessageTransport.buffer_updated(self, count)
            if ended:
                transport.close()
                return
        self._flush()

    def _go_on_reading(self, why: str) -> None:
        super()._go_on_reading(why)
        if not self._starved and not self._unread - {PACED}:
            # Later: this may run while an event is being handled.
            asyncio.get_running_loop().call_soon(self._decrypt)

    @property
    def _midway(self) -> bool:
        """True: a record has more bytes than the one by which it is noticed."""
        return True

    # ------------------------------------------------------------ sending

    def _next_piece(self, most: int) -> memoryview | None:
        if not self._sealed:
            view = super()._next_piece(_RECORD)
            if view is None:
                return None
            self._tls.write(view)
            self._sealed = memoryview(self._encrypted.read())
        piece, self._sealed = self._sealed[:most], self._sealed[most:]
        return piece

    @property
    def _waiting(self) -> int:
        """Bytes that wait to be sent, as they cross, or a few more: what is granted is put back."""
        records = len(self._out) + self._unsent // _RECORD
        return len(self._sealed) + self._unsent + _OVERHEAD * records

    @property
    def unsent(self) -> int:
        """Bytes that are not in the socket yet."""
        return super().unsent + len(self._sealed)

    def _flush(self) -> None:
        """Send what TLS has to say by itself."""
        if self._encrypted.pending:
            self._sealed = memoryview(bytes(self._sealed) + self._encrypted.read())
            self._pump()

    def _drop_unsent(self) -> None:
        super()._drop_unsent()
        self._sealed = memoryview(b"")

    def _close_if_sent(self) -> None:
        """Announce the end when all is sent, and close when that is sent too."""
        if self._out or self._sealed:
            return
        if not self._parting:
            self._parting = True
            with contextlib.suppress(ssl.SSLError):  # it asks for the other side's announcement
                self._tls.unwrap()
            self._flush()
        if not self._sealed:
            super()._close_if_sent()
