"""Connect clients and servers on one machine by a Unix socket beside the TCP port.

Both belong to one user, and neither is confined in a way that the other is not
(`aiops.net.confinement`).

Its name consists of the user, the address and the port, in Linux's abstract namespace. There is no
file to be left behind, and the name is valid as far as the loopback interface (a container has its
own).
"""

from __future__ import annotations

import contextlib
import ipaddress
import os
import socket
import stat

from aiops.common import forks
from aiops.model.layout import Bytes
from aiops.model.mailbox import Mailbox
from aiops.model.shared_memory import Segment, attached, available
from aiops.net.confinement import difference

_WAITING = 1024


def wanted() -> bool:
    """Return whether this process may use it: the system can, and AIOPS_NO_SHM is not set."""
    forbidden = os.environ.get("AIOPS_NO_SHM", "").lower() not in ("", "0", "false", "no", "off")
    return available() and not forbidden


def listen(host: str, port: int) -> socket.socket | None:
    """Listen beside a TCP server at this address; None where the system cannot."""
    if not available():
        return None
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        sock.bind(_name(host, port))
        sock.listen(_WAITING)
        sock.setblocking(False)
    except OSError:
        sock.close()
        return None
    return sock


class UnixSide:
    """The side channel of a connection: a socket that carries the file descriptors of segments.

    A segment is sent on it just before the message that announces it, so that the receiver of the
    message finds the descriptor there.
    """

    def __init__(self, sock: socket.socket) -> None:
        sock.setblocking(False)
        self._sock = sock
        forks.note(self)

    def pass_on(self, segment: Segment) -> bool:
        """Send a segment's descriptor; return whether the other side takes it."""
        try:
            socket.send_fds(self._sock, [b"\0"], [segment.fd])
        except OSError:
            return False
        return True

    def attach(self, nbytes: int, *, private: bool) -> Bytes:
        """Map the next segment that was sent, as `aiops.model.shared_memory.attached` does."""
        try:
            _byte, came, _flags, _address = socket.recv_fds(self._sock, 1, 1)
        except OSError:
            came = []
        if not came:
            raise ValueError("no file descriptor came with it")
        return attached(came[0], nbytes, private=private)

    def pass_mailbox(self, mailbox: Mailbox, memory: int) -> bool:
        """Send a mailbox, of which ``memory`` is the descriptor; return whether it is taken."""
        try:
            socket.send_fds(self._sock, [b"\0"], [memory, mailbox.bell])
        except OSError:
            return False
        return True

    def take_mailbox(self, nbytes: int) -> Mailbox | None:
        """Map the mailbox that was sent next, as `Mailbox.take` does."""
        try:
            _byte, came, _flags, _address = socket.recv_fds(self._sock, 1, 2)
        except OSError:
            return None
        return Mailbox.take(came, nbytes)

    def close(self) -> None:
        """End it; may be called twice."""
        self._sock.close()

    def forked(self) -> None:
        """Let go of it in a fork."""
        forks.blank(self._sock.fileno())


def welcome(sock: socket.socket) -> UnixSide | None:
    """Begin an accepted connection: send its side channel.

    None: the client is gone, or no descriptors are left.
    """
    try:
        ours, theirs = socket.socketpair()
    except OSError:
        return None
    with theirs:
        try:
            socket.send_fds(sock, [b"\0"], [theirs.fileno()])
        except OSError:
            ours.close()
            return None
    return UnixSide(ours)


def welcomed(sock: socket.socket) -> UnixSide | None:
    """Begin a connection to a server: receive its side channel, the first thing sent.

    None: the server has closed the connection; it shares no memory with this process, or has ended.

    Raises
    ------
    OSError
        When something else came, or nothing within the socket's timeout.
    """
    byte, came, _flags, _address = socket.recv_fds(sock, 1, 1)
    if not byte:
        return None
    if not came:
        raise ConnectionResetError("the server sent no side channel")
    [side] = came
    if not stat.S_ISSOCK(os.fstat(side).st_mode):
        os.close(side)
        raise ConnectionResetError("the server sent no side channel")
    return UnixSide(socket.socket(fileno=side))


def reach(host: str, port: int) -> socket.socket | None:
    """Return a socket connected to this user's server at this address; None if there is none.

    None, too, if the server is confined in another way.

    It does not block; call `welcomed` next. A server that listens on all addresses is found at
    each.
    """
    if not wanted():
        return None
    everywhere = "::" if ":" in host else "0.0.0.0"
    for name in dict.fromkeys((host, everywhere, "::")):
        if name != host and not _is_ours(host):
            return None
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        sock.setblocking(False)  # it accepts at once, or TCP is used instead
        with contextlib.suppress(OSError):
            sock.connect(_name(name, port))
            if not difference(sock):
                return sock
        sock.close()
    return None


def _name(host: str, port: int) -> str:
    return f"\0aiops/{os.geteuid()}/{host}/{port}"


def _is_ours(host: str) -> bool:
    """Return whether an address is this machine's own, one that can be bound."""
    if ipaddress.ip_address(host).is_loopback:
        return True
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as sock:
        try:
            sock.bind((host, 0))
        except OSError:
            return False
    return True
