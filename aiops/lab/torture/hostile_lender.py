"""A hostile process on a server's machine: it lends memory that is wrong, over a real Unix socket.

`HostileLender` connects as a worker does, greets, and then shows segments and pushes gradients that
lie in them: descriptors of other things, none or several, memory that may shrink or that shrinks,
has holes or is written to while it is read, sizes, numbers and places at which sums break. The
messages about segments are right or changed (`aiops.lab.torture.frame_templates`).
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import socket
import struct
from collections import Counter
from collections.abc import Callable, Mapping
from random import Random

import msgpack

from aiops.common import urls
from aiops.lab.torture.frame_templates import FrameTemplate, Mutator
from aiops.lab.torture.hostile_messages import NUMBERS
from aiops.net import unix_socket
from aiops.wire.messages import PROTOCOL

_PUNCH = 3  # FALLOC_FL_KEEP_SIZE | FALLOC_FL_PUNCH_HOLE
_PLACE = struct.Struct(">BIBQBQ")
_WAIT = 10.0  # seconds for a server's first bytes
_SOON = 0.02  # seconds for its answers


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


class HostileLender:
    """One hostile connection after another.

    Parameters
    ----------
    rng
        Decides everything.
    url
        The server's.
    nbytes
        Those of its model, one tensor of float32.

    Attributes
    ----------
    said
        What was done, by kind.
    """

    def __init__(self, rng: Random, url: str, nbytes: int) -> None:
        self._rng, self._address, self._nbytes = rng, urls.parse(url), nbytes
        self.said, self._deck = Counter[str](), list[str]()
        self._share = FrameTemplate.of(
            ({"kind": "share", "id": 0, "segment": 1, "nbytes": nbytes}, [])
        )
        self._mutator = Mutator(rng, [self._share])
        self._seq = 0

    def connect_once(self, most: int = 12) -> None:
        """Connect, do at most so much harm as ``most`` messages do, and leave."""
        sock = unix_socket.reach(*self._address)
        if sock is None:
            raise OSError("no server listens beside this address")
        with sock, contextlib.suppress(ConnectionError, TimeoutError):
            sock.settimeout(_WAIT)
            side = unix_socket.welcomed(sock)
            if side is None:
                return
            try:
                self._greet(sock)
                self._harm(sock, side, self._rng.randrange(1, most))
            finally:
                side.close()

    def _greet(self, sock: socket.socket) -> None:
        rng = self._rng
        header = {
            "kind": "hello",
            "id": 0,
            "protocol": PROTOCOL,
            "client": rng.randbytes(8).hex(),
            "epoch": 1,
            "name": "hostile",
            "role": "worker",
            "pongs": False,
            "nonce": rng.randbytes(16),
            "agent": "",
            "run": "",
            "generation": 0,
            "acked": 0,
            "generation_proof": b"",
        }
        sock.sendall(FrameTemplate.of((header, [])).right)
        sock.recv(1 << 16)

    def _harm(self, sock: socket.socket, side: unix_socket.UnixSide, count: int) -> None:
        """Show segments, and push what lies in them."""
        rng, mine = self._rng, list[int]()
        sock.settimeout(_SOON)
        try:
            for _ in range(count):
                if not mine or rng.random() < 0.5:
                    kind = self._next_kind()
                    mine.append(KINDS[kind](self._nbytes))
                    self.said[kind] += 1
                    self._show(sock, side, mine[-1])
                else:
                    self._use(sock, rng.choice(mine))
                with contextlib.suppress(TimeoutError):
                    if rng.random() < 0.3 and not sock.recv(1 << 16):
                        return
        finally:
            for fd in mine:
                os.close(fd)

    def _next_kind(self) -> str:
        """Draw one of the kinds not drawn yet: all are, however soon a server hangs up."""
        if not self._deck:
            self._deck = [*("memory",) * 10, *KINDS]
            self._rng.shuffle(self._deck)
        return self._deck.pop()

    def _show(self, sock: socket.socket, side: unix_socket.UnixSide, fd: int) -> None:
        """Show a segment."""
        rng = self._rng
        for _ in range(rng.choice((0, *(1,) * 17, 2, 5))):
            with contextlib.suppress(OSError):  # it has too many of them already
                socket.send_fds(side._sock, [b"\0"], [fd] * rng.choice((1, 1, 1, 3)))
        frame = self._share
        lot = rng.random()
        if lot < 0.1:
            header, _none = self._mutator.mutated(frame)
            frame = frame._replace(header=header)
        elif lot < 0.2:
            number = rng.choice((0, 1, 2, 255, 256, 257, rng.choice(NUMBERS)))
            nbytes = rng.choice((self._nbytes, 0, 1, self._nbytes + 1, rng.choice(NUMBERS)))
            values = {"kind": "share", "id": 0, "segment": number, "nbytes": nbytes}
            frame = frame._replace(header=msgpack.packb(values))
        sock.sendall(frame.right)
        self.said["share"] += 1

    def _use(self, sock: socket.socket, fd: int) -> None:
        """Push a gradient in a segment, which changes meanwhile; or give back what was not lent."""
        rng, nbytes = self._rng, self._nbytes
        if rng.random() < 0.1:
            header = {"kind": "release", "id": rng.choice((0, 1, 5, rng.choice(NUMBERS)))}
            sock.sendall(FrameTemplate.of((header, [])).right)
            self.said["release"] += 1
            return
        self._seq += 1
        part = [0, nbytes, "raw", nbytes, 0]
        push = {
            "kind": "push",
            "id": self._seq,
            "seq": self._seq,
            "fetch": rng.random() < 0.5,
            "have": -1,
            "parts": [part],
            "wants": [],
            "coded": False,
            "count": 1,
        }
        data = FrameTemplate.of((push, [])).right
        segment = 1 if rng.random() < 0.8 else rng.choice((0, 2, 256, rng.choice(NUMBERS)))
        offset = 0 if rng.random() < 0.8 else rng.choice((1, 4, nbytes, rng.choice(NUMBERS)))
        place = _PLACE.pack(0xDD, 2, 0xCF, segment % (1 << 64), 0xCF, offset % (1 << 64))
        if rng.random() < 0.1:
            at = rng.randrange(len(place))
            place = place[:at] + rng.randbytes(1) + place[at + 1 :]
        with contextlib.suppress(OSError):
            os.pwrite(fd, struct.pack("<f", rng.choice((0.0, 1e18, float("nan")))) * 4, 0)
        sock.sendall(data + place)
        self.said["push"] += 1
        self._change(fd)

    def _change(self, fd: int) -> None:
        """Try to shrink memory that is being read, to make holes, or to write to it."""
        for change in (
            lambda: os.ftruncate(fd, 0),
            lambda: os.pwrite(fd, bytes(64), 0),
            lambda: punch(fd, self._nbytes // 2),
        ):
            with contextlib.suppress(OSError):
                if self._rng.random() < 0.3:
                    change()


def punch(fd: int, nbytes: int) -> None:
    """Make a hole of the first bytes of a file, if it may have one."""
    import ctypes

    libc = ctypes.CDLL(None, use_errno=True)
    libc.fallocate(fd, _PUNCH, ctypes.c_long(0), ctypes.c_long(nbytes))
