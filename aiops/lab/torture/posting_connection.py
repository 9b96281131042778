"""A connection with a mailbox whose client writes there what it is told to, right or wrong.

It knows where everything lies (``aiops/compiled/mailbox.h``), numbers its pushes, and waits for an
answer no longer than a moment: there need not be one.
"""

from __future__ import annotations

import contextlib
import os
import socket
import time
from collections.abc import Iterator
from random import Random

import numpy as np

from aiops.lab.torture.frame_templates import FrameTemplate, message_frame
from aiops.lab.torture.steady_pushes import PushForm
from aiops.model.mailbox import Mailbox
from aiops.net import unix_socket
from aiops.wire.messages import Message, Ping, Share

POSTED_AT, ANSWERED_AT, OPEN_AT, RETURNED_AT = 0, 128, 512, 640
WORDS = POSTED_AT, ANSWERED_AT, 256, 384, OPEN_AT, RETURNED_AT, 768, 772, 776
"""Where words lie in a mailbox."""

PUSH_AT, ANSWER_AT, PAYLOAD_AT = 4096, 2 * 4096, 3 * 4096
POSTED, _TAKEN, WITHDRAWN = 1, 2, 3
_HERE, _LENT = 1, 3

SOON = 0.02
"""Seconds for an answer."""


class PostingConnection:
    """A client's half of a connection within a machine, and its mailbox.

    Parameters
    ----------
    rng
        Decides what is left open.
    sock, side
        The connection, which was welcomed.
    form
        That of its pushes.
    nbytes
        Of the model.

    Attributes
    ----------
    rng, form, nbytes
        As above; the form may change.
    mailbox, memory
        The present mailbox, and the descriptor of its memory.
    number
        Of the push that was posted last.
    id, seq
        Those of the last push.
    sent
        Bytes that were posted and sent.
    answered
        Pushes that the server has answered in the mailbox, or with a place in its memory.
    """

    def __init__(
        self,
        rng: Random,
        sock: socket.socket,
        side: unix_socket.UnixSide,
        form: PushForm,
        nbytes: int,
    ) -> None:
        self.rng, self._sock, self._side = rng, sock, side
        self.form, self.nbytes = form, nbytes
        self.number = self.id = self.seq = self.sent = self.answered = 0
        self.mailbox, self.memory = Mailbox.make(nbytes)

    def close(self) -> None:
        """Give its memory back."""
        os.close(self.memory)

    def open(self, seconds: float) -> None:
        """Announce the mailbox, and push on the socket until the server answers there."""
        self.announce(self.mailbox, self.memory, self.mailbox.bell)
        until = time.monotonic() + seconds
        while self.word(OPEN_AT) != 1:
            self.send(self.next().right)
            if not self._sock.recv(1 << 20):
                raise ConnectionResetError
            time.sleep(0.001)
            self.listen()
            if time.monotonic() > until:
                raise TimeoutError

    def pass_on(self, *fds: int) -> None:
        """Send descriptors beside the connection."""
        with contextlib.suppress(OSError):  # the server has too many of them already
            socket.send_fds(self._side._sock, [b"\0"], fds)

    def announce(self, mailbox: Mailbox, memory: int, bell: int) -> None:
        """Announce a mailbox, with these descriptors."""
        self.pass_on(memory, bell)
        self.say(Share(0, 0, len(mailbox.data)))

    def replace(self) -> None:
        """Announce another mailbox, mostly with a bell of its own."""
        before, memory = self.mailbox, self.memory
        self.mailbox, self.memory = Mailbox.make(self.nbytes)
        os.close(memory)
        self.number = 0
        bell = (before if self.rng.random() < 0.2 else self.mailbox).bell
        self.announce(self.mailbox, self.memory, bell)
        self.say(Ping(1))
        until = time.monotonic() + SOON
        while self.word(OPEN_AT) != 1 and time.monotonic() < until:
            self.listen()
            time.sleep(0.0005)

    # ------------------------------------------------------------ the socket

    def say(self, message: Message) -> None:
        """Send a message without payloads."""
        self.send(message_frame(message))

    def send(self, data: bytes) -> None:
        """Send bytes; what the socket does not take within a moment is not sent."""
        self._sock.settimeout(1.0)
        self._sock.sendall(data)
        self.sent += len(data)

    def listen(self) -> None:
        """Read what the server has said: it holds a reader back that does not."""
        self._sock.setblocking(False)
        with contextlib.suppress(BlockingIOError):
            while True:
                if not self._sock.recv(1 << 20):
                    raise ConnectionResetError
        with contextlib.suppress(OSError):  # segments, which are not mapped
            _byte, fds, _flags, _address = socket.recv_fds(
                self._side._sock, 64, 8, socket.MSG_DONTWAIT
            )
            for fd in fds:
                os.close(fd)

    # ------------------------------------------------------------ the mailbox

    def word(self, at: int) -> int:
        """Return a word."""
        return int(self.mailbox.data[at : at + 4].view("<u4")[0])

    def write(self, at: int, value: int) -> None:
        """Write a word."""
        self.mailbox.data[at : at + 4].view("<u4")[0] = value % (1 << 32)

    def put(self, at: int, data: bytes) -> None:
        """Write bytes, as far as there is room."""
        room = self.mailbox.data[at : at + len(data)]
        room[:] = np.frombuffer(data, np.uint8, len(room))

    def next(self) -> FrameTemplate:
        """Return the push that is due."""
        self.id += 1
        self.seq += 1
        return self.form.filled((self.id, self.seq, 0, 0), self.rng.choice(self.form.gradients))

    def place(self, data: bytes) -> None:
        """Write a push where it belongs."""
        head = len(data) - self.nbytes
        self.put(PUSH_AT, data[:head])
        self.put(PAYLOAD_AT, data[head:])
        self.sent += len(data)

    def post(self) -> None:
        """Post what is there, and ring."""
        found = self.word(POSTED_AT)
        if found & 3 == _TAKEN:  # the server has believed a word that was written at random
            self.number = found >> 2
        self.number = (self.number + 1) % (1 << 30)
        self.write(POSTED_AT, self.number << 2 | POSTED)
        self.ring()

    def ring(self, value: int = 1) -> None:
        """Add to the count of the bell, unless it is full."""
        with contextlib.suppress(BlockingIOError):
            os.write(self.mailbox.bell, value.to_bytes(8, "little"))

    def awaits(self, at: int) -> Iterator[None]:
        """Yield until a word has the number of the last push, or a moment has passed."""
        until = time.monotonic() + SOON
        while self.word(at) >> 2 != self.number and time.monotonic() < until:
            yield

    def settle(self) -> None:
        """Wait for the answer, if there is one soon; give it back, mostly."""
        for _ in self.awaits(ANSWERED_AT):
            os.sched_yield()
        found = self.word(ANSWERED_AT)
        self.answered += found >> 2 == self.number and found & 3 in (_HERE, _LENT)
        if found >> 2 != self.number and self.rng.random() < 0.5:
            self.replace()  # numbers are of another mailbox from here on
        elif self.rng.random() < 0.9:
            self.write(RETURNED_AT, self.number)
