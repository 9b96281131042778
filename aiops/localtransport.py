"""asyncio's transport over a Unix socket that segments of memory can be passed through."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
from collections import deque
from collections.abc import Iterable, Sequence
from typing import Any

from aiops.layout import Bytes
from aiops.lending import Passing, viewed
from aiops.samehost import peer_process
from aiops.segments import attached
from aiops.wire import Buffer

_HIGH = 64 * 1024  # bytes: asyncio's own mark above which a writer is to pause
_DESCRIPTORS = 4  # taken at once; a writer passes one with each message
_UNUSED = 64  # descriptors that may have come before their messages
_VECTORS = 64  # buffers given to one sendmsg


class Descriptors:
    """File descriptors that came beside messages, in the order in which they came."""

    def __init__(self) -> None:
        self._came: deque[int] = deque()

    def received(self, sock: socket.socket, buffer: memoryview, flags: int = 0) -> int:
        """Receive bytes into a buffer, and keep the descriptors beside them.

        Raises
        ------
        OSError
            As `socket.recv_into` does, and when there are more than anybody can want.
        """
        room = socket.CMSG_SPACE(4 * _DESCRIPTORS)
        flags |= socket.MSG_CMSG_CLOEXEC
        count, ancillary, _flags, _address = sock.recvmsg_into([buffer], room, flags)
        for level, kind, data in ancillary:
            if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
                whole = len(data) // 4
                self._came.extend(
                    int.from_bytes(data[4 * n : 4 * n + 4], "little") for n in range(whole)
                )
        if len(self._came) > _UNUSED:
            raise OSError(f"more than {_UNUSED} descriptors came that no message is about")
        return count

    def attach(self, nbytes: int, *, private: bool) -> Bytes:
        """Map the next of them, as `aiops.segments.attached` does."""
        if not self._came:
            raise ValueError("no file descriptor came with it")
        return attached(self._came.popleft(), nbytes, private=private)

    def close(self) -> None:
        """Close those that nobody wanted."""
        while self._came:
            os.close(self._came.popleft())


def send_with_segments(sock: socket.socket, views: Sequence[Buffer], flags: int = 0) -> int:
    """Send as many bytes of some buffers as go out at once, and descriptors with theirs.

    Returns how many bytes went out; a `Passing` goes out whole or not at all (it is short).
    """
    first = views[0]
    if isinstance(first, Passing):
        return socket.send_fds(sock, [first], [first.segment.fd], flags)
    plain = next((n for n, view in enumerate(views) if isinstance(view, Passing)), len(views))
    return sock.sendmsg(views[: min(plain, _VECTORS)], [], flags)


class LocalTransport(asyncio.Transport):
    """One end of a connection over a Unix socket.

    What is written stays in the writer's memory until it has gone out: do not change it before.

    Parameters
    ----------
    loop
        The event loop.
    sock
        The connected socket, its own from here on.
    protocol
        Told of what happens.
    descriptors
        Keeps what comes beside the bytes.
    sockname
        What to say of this end's address.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        sock: socket.socket,
        protocol: asyncio.BufferedProtocol,
        descriptors: Descriptors,
        sockname: tuple[str, int] | None = None,
    ) -> None:
        peer = f"process {peer_process(sock)} on this machine"
        super().__init__({"socket": sock, "peername": peer, "sockname": sockname})
        sock.setblocking(False)
        self._loop, self._sock, self._protocol = loop, sock, protocol
        self._descriptors = descriptors
        self._out: deque[Any] = deque()  # memoryviews, and what descriptors go with
        self._unsent = 0
        self._high, self._low = _HIGH, _HIGH // 4
        self._reading = self._pausing = self._closing = self._lost = False
        self._made = self._sending = self._full = False  # about to send; waiting for the socket
        loop.call_soon(self._begin)

    def _begin(self) -> None:
        self._made = True
        self._protocol.connection_made(self)
        if not self._lost:
            self.resume_reading()

    # ------------------------------------------------------------ asyncio's side

    def get_protocol(self) -> asyncio.BaseProtocol:
        """Return the protocol."""
        return self._protocol

    def is_closing(self) -> bool:
        """Return whether it is closed, or about to be."""
        return self._closing

    def is_reading(self) -> bool:
        """Return whether what comes is handed on."""
        return self._reading

    def pause_reading(self) -> None:
        """Hand nothing on until `resume_reading`."""
        if self._reading:
            self._reading = False
            self._loop.remove_reader(self._sock)

    def resume_reading(self) -> None:
        """Hand on what comes."""
        if not (self._reading or self._closing):
            self._reading = True
            self._loop.add_reader(self._sock, self._readable)

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        """Set when the protocol is to pause writing, and to go on."""
        self._high = _HIGH if high is None else high
        self._low = self._high // 4 if low is None else low

    def get_write_buffer_limits(self) -> tuple[int, int]:
        """Return when the protocol is to go on, and to pause."""
        return self._low, self._high

    def get_write_buffer_size(self) -> int:
        """Return how many bytes have not gone out yet."""
        return self._unsent

    def can_write_eof(self) -> bool:
        """Return False: this end is closed as a whole."""
        return False

    def write(self, data: bytes | bytearray | memoryview[Any]) -> None:
        """Send bytes when the loop comes round, with all that is written until then."""
        if self._closing:
            return
        view = viewed(data)
        self._out.append(view)
        self._unsent += len(view)
        if not (self._sending or self._full):
            if self._unsent > self._high:
                self._send_now()
            else:
                self._sending = True
                self._loop.call_soon(self._send_now)
        if self._unsent > self._high and not self._pausing:
            self._pausing = True
            self._protocol.pause_writing()

    def writelines(self, list_of_data: Iterable[bytes | bytearray | memoryview[Any]]) -> None:
        """Send several buffers, in order."""
        for data in list_of_data:
            self.write(data)

    def close(self) -> None:
        """End it when all has gone out."""
        if self._closing:
            return
        self.pause_reading()
        self._closing = True
        if not self._out:
            self._loop.call_soon(self._end, None)

    def abort(self) -> None:
        """End it at once."""
        self._fail(None)

    # ------------------------------------------------------------ inside

    def _readable(self) -> None:
        buffer = self._protocol.get_buffer(-1)
        try:
            count = self._descriptors.received(self._sock, memoryview(buffer))
        except (BlockingIOError, InterruptedError):
            return
        except OSError as error:
            self._fail(error)
            return
        if count:
            self._protocol.buffer_updated(count)
        elif not self._protocol.eof_received():
            self.close()

    def _send_now(self) -> None:
        self._sending = False
        self._send()
        if self._out and not (self._lost or self._full):
            self._full = True
            self._loop.add_writer(self._sock, self._writable)
        elif not self._out and self._closing and not self._lost:
            self._end(None)

    def _writable(self) -> None:
        self._send()
        if not self._out and not self._lost:
            self._full = False
            self._loop.remove_writer(self._sock)
            if self._closing:
                self._loop.call_soon(self._end, None)
        if self._pausing and self._unsent <= self._low:
            self._pausing = False
            self._protocol.resume_writing()

    def _send(self) -> None:
        """Send what the socket takes."""
        out = self._out
        while out:
            try:
                sent = send_with_segments(self._sock, list(out)[:_VECTORS])
            except (BlockingIOError, InterruptedError):
                return
            except OSError as error:
                self._fail(error)
                return
            self._unsent -= sent
            while out and sent >= len(out[0]):
                sent -= len(out.popleft())
            if sent:
                out[0] = out[0][sent:]

    def _fail(self, error: OSError | None) -> None:
        if self._lost:
            return
        self.pause_reading()
        self._closing = self._lost = True
        if self._full:
            self._full = False
            self._loop.remove_writer(self._sock)
        self._out.clear()
        self._unsent = 0
        self._loop.call_soon(self._end, error)

    def _end(self, error: OSError | None) -> None:
        if self._sock.fileno() < 0:
            return
        self._lost = True
        if self._made:
            with contextlib.suppress(ValueError):
                self._loop.remove_reader(self._sock)
        try:
            if self._made:
                self._protocol.connection_lost(error)
        finally:
            self._descriptors.close()
            self._sock.close()
