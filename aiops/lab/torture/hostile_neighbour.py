"""The common part of hostile processes on a server's machine: they connect there, and pass memory.

A connection within a machine is a Unix socket with a side channel, on which descriptors travel. A
hostile process may pass any.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import socket
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Mapping
from random import Random

from aiops.common import urls
from aiops.lab.torture.frame_templates import message_frame
from aiops.net import unix_socket
from aiops.wire.messages import PROTOCOL, Hello

_PUNCH = 3  # FALLOC_FL_KEEP_SIZE | FALLOC_FL_PUNCH_HOLE
_WAIT = 10.0  # seconds for a server's first bytes


def memory(nbytes: int, *seals: str) -> int:
    """Return the descriptor of new memory with these seals of its size: ``GROW``, ``SHRINK``."""
    fd = os.memfd_create("aiops-hostile", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, nbytes)
    for seal in seals:
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, getattr(fcntl, f"F_SEAL_{seal}"))  # as on Linux alone
    return fd


def _sealed(nbytes: int) -> int:
    return memory(nbytes, "SHRINK", "GROW")


def _pipe(_nbytes: int) -> int:
    ours, theirs = os.pipe()
    os.close(theirs)
    return ours


def _file(name: str) -> Callable[[int], int]:
    return lambda nbytes: os.open(name, os.O_RDONLY)


KINDS: Mapping[str, Callable[[int], int]] = {
    "memory": _sealed,
    "memory that grows": lambda nbytes: memory(nbytes, "SHRINK"),
    "memory that shrinks": lambda nbytes: memory(nbytes, "GROW"),
    "memory without seals": memory,
    "memory of a byte less": lambda nbytes: _sealed(nbytes - 1),
    "no memory": lambda nbytes: _sealed(0),
    "very much memory": lambda nbytes: _sealed(1 << 45),
    "a device": _file("/dev/zero"),
    "a folder": _file("/"),
    "a file": _file(__file__),
    "a pipe": _pipe,
    "a socket": lambda nbytes: socket.socket(socket.AF_UNIX).detach(),
}
"""Makes what a descriptor can be of, given the bytes that it should have."""


def punch(fd: int, nbytes: int) -> None:
    """Make a hole of the first bytes of a file, if it may have one."""
    import ctypes

    libc = ctypes.CDLL(None, use_errno=True)
    libc.fallocate(fd, _PUNCH, ctypes.c_long(0), ctypes.c_long(nbytes))


class HostileNeighbour(ABC):
    """One hostile connection after another.

    Parameters
    ----------
    rng
        Decides everything.
    url
        The server's.

    Attributes
    ----------
    acts
        What was done, by kind.
    connections
        Those that were made.
    """

    def __init__(self, rng: Random, url: str) -> None:
        self.rng, self._address = rng, urls.parse(url)
        self.acts, self.connections = Counter[str](), 0
        self._deck = list[str]()

    def connect_once(self, most: int) -> None:
        """Connect, do at most so much harm as ``most`` messages do, and leave."""
        sock = unix_socket.reach(*self._address)
        if sock is None:
            raise OSError("no server listens beside this address")
        self.connections += 1
        with sock, contextlib.suppress(ConnectionError, TimeoutError, BlockingIOError):
            sock.settimeout(_WAIT)
            side = unix_socket.welcomed(sock)
            if side is None:
                return
            with contextlib.closing(side):
                client, nonce = self.rng.randbytes(8).hex(), self.rng.randbytes(16)
                hello = Hello(0, PROTOCOL, client, 1, "hostile", "worker", False, nonce, "")
                sock.sendall(message_frame(hello))
                if sock.recv(1 << 16):
                    self.harm(sock, side, self.rng.randrange(1, most))

    @abstractmethod
    def harm(self, sock: socket.socket, side: unix_socket.UnixSide, count: int) -> None:
        """Do so much harm on a connection that was welcomed."""

    def drawn(self, kinds: list[str]) -> str:
        """Draw one of the kinds not drawn yet: all are, however soon a server hangs up."""
        if not self._deck:
            self._deck = kinds
            self.rng.shuffle(self._deck)
        return self._deck.pop()
