"""Meeting on the same machine: a Unix socket beside the TCP port, for the same user only.

Its name is made of the user, the address and the port, in Linux's abstract namespace: there is no
file, so nothing is left behind, and it reaches as far as the loopback interface does (a container
has its own).
"""

from __future__ import annotations

import contextlib
import ipaddress
import os
import socket
import struct

from aiops.segments import available

_WAITING = 1024
_CREDENTIALS = struct.Struct("3i")  # process, user, group


def _wanted() -> bool:
    """Return whether this process may use it: the system can, and AIOPS_NO_SHM is not set."""
    forbidden = os.environ.get("AIOPS_NO_SHM", "").lower() not in ("", "0", "false", "no", "off")
    return available() and not forbidden


def listen(host: str, port: int) -> socket.socket | None:
    """Listen beside a TCP server at this address; None where that cannot be."""
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


def reach(host: str, port: int) -> socket.socket | None:
    """Return a socket connected to the same user's server at this address, if there is.

    A server that listens on all addresses is found at each.
    """
    if not _wanted():
        return None
    everywhere = "::" if ":" in host else "0.0.0.0"
    for name in dict.fromkeys((host, everywhere, "::")):
        if name != host and not _is_ours(host):
            return None
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        sock.setblocking(False)  # either it is there, and takes who comes, or TCP will do
        with contextlib.suppress(OSError):
            sock.connect(_name(name, port))
            if same_user(sock):
                return sock
        sock.close()
    return None


def same_user(sock: socket.socket) -> bool:
    """Return whether the process at the other end is run by this process's user."""
    return _credentials(sock)[1] == os.geteuid()


def peer_process(sock: socket.socket) -> int:
    """Return the id of the process at the other end (0: one that cannot be seen from here)."""
    return _credentials(sock)[0]


def _credentials(sock: socket.socket) -> tuple[int, int]:
    said = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    process, user, _group = _CREDENTIALS.unpack(said)
    return process, user


def _name(host: str, port: int) -> str:
    return f"\0aiops/{os.geteuid()}/{host}/{port}"


def _is_ours(host: str) -> bool:
    """Return whether an address is this machine's own: whether one can listen there."""
    if ipaddress.ip_address(host).is_loopback:
        return True
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as sock:
        try:
            sock.bind((host, 0))
        except OSError:
            return False
    return True
