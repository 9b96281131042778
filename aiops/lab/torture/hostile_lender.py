"""A hostile process on a server's machine: it lends memory that is wrong, over a real Unix socket.

`HostileLender` connects as a worker does, greets, and then shows segments and pushes gradients that
lie in them: descriptors of other things, none or several, memory that may shrink or that shrinks,
has holes or is written to while it is read, sizes, numbers and places at which sums break. The
messages about segments are right or changed (`aiops.lab.torture.frame_templates`).
"""

from __future__ import annotations

import contextlib
import os
import socket
import struct
from random import Random

import msgpack

from aiops.lab.torture.frame_templates import FrameTemplate, Mutator
from aiops.lab.torture.hostile_messages import NUMBERS
from aiops.lab.torture.hostile_neighbour import KINDS, HostileNeighbour, punch
from aiops.net import unix_socket

_PLACE = struct.Struct(">BIBQBQ")
_SOON = 0.02  # seconds for its answers


class HostileLender(HostileNeighbour):
    """One hostile connection after another.

    Parameters
    ----------
    rng, url
        As of `HostileNeighbour`.
    nbytes
        Those of the server's model, one tensor of float32.
    """

    def __init__(self, rng: Random, url: str, nbytes: int) -> None:
        super().__init__(rng, url)
        self._nbytes, self._seq = nbytes, 0
        self._share = FrameTemplate.of(
            ({"kind": "share", "id": 0, "segment": 1, "nbytes": nbytes}, [])
        )
        self._mutator = Mutator(rng, [self._share])

    def harm(self, sock: socket.socket, side: unix_socket.UnixSide, count: int) -> None:
        """Show segments, and push what lies in them."""
        rng, mine = self.rng, list[int]()
        sock.settimeout(_SOON)
        try:
            for _ in range(count):
                if not mine or rng.random() < 0.5:
                    kind = self.drawn([*("memory",) * 10, *KINDS])
                    mine.append(KINDS[kind](self._nbytes))
                    self.acts[kind] += 1
                    self._show(sock, side, mine[-1])
                else:
                    self._use(sock, rng.choice(mine))
                with contextlib.suppress(TimeoutError):
                    if rng.random() < 0.3 and not sock.recv(1 << 16):
                        return
        finally:
            for fd in mine:
                os.close(fd)

    def _show(self, sock: socket.socket, side: unix_socket.UnixSide, fd: int) -> None:
        """Show a segment."""
        rng = self.rng
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
        self.acts["share"] += 1

    def _use(self, sock: socket.socket, fd: int) -> None:
        """Push a gradient in a segment, which changes meanwhile; or give back what was not lent."""
        rng, nbytes = self.rng, self._nbytes
        if rng.random() < 0.1:
            header = {"kind": "release", "id": rng.choice((0, 1, 5, rng.choice(NUMBERS)))}
            sock.sendall(FrameTemplate.of((header, [])).right)
            self.acts["release"] += 1
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
        self.acts["push"] += 1
        self._change(fd)

    def _change(self, fd: int) -> None:
        """Try to shrink memory that is being read, to make holes, or to write to it."""
        for change in (
            lambda: os.ftruncate(fd, 0),
            lambda: os.pwrite(fd, bytes(64), 0),
            lambda: punch(fd, self._nbytes // 2),
        ):
            with contextlib.suppress(OSError):
                if self.rng.random() < 0.3:
                    change()
