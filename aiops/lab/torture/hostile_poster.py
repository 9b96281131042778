"""A hostile process on a server's machine: it posts in a mailbox what no worker would.

`HostilePoster` connects as a worker does, makes exchanges until the server answers in its mailbox,
and then writes there, while the server reads: pushes of which something is changed, pushes that
change while they are answered, words at random, answers given back that it never had, pushes on the
socket beside the posted one. It replaces its mailbox by another, or by what is none, and leaves at
any moment. A value that it changes while the server reads stays a finite one: without filters a
worker is trusted with that.
"""

from __future__ import annotations

import contextlib
import os
import socket
import time
from collections import Counter
from collections.abc import Callable, Mapping
from multiprocessing.connection import Connection
from random import Random

import numpy as np

from aiops.common import urls
from aiops.lab.torture.frame_templates import FrameTemplate
from aiops.lab.torture.hostile_lender import KINDS, punch
from aiops.lab.torture.hostile_messages import NUMBERS, Target
from aiops.lab.torture.steady_pushes import PushForm, changed_push
from aiops.model.mailbox import Mailbox, size_of
from aiops.net import unix_socket
from aiops.wire.encoding import encode
from aiops.wire.messages import PROTOCOL, Hello, Message, Ping, Release, Share

POSTED_AT, ANSWERED_AT, OPEN_AT, RETURNED_AT = 0, 128, 512, 640
WORDS = POSTED_AT, ANSWERED_AT, 256, 384, OPEN_AT, RETURNED_AT, 768, 772, 776
"""Where words lie in a mailbox (``aiops/compiled/mailbox.h``)."""

PUSH_AT, ANSWER_AT, PAYLOAD_AT = 4096, 2 * 4096, 3 * 4096
_POSTED, _TAKEN, _WITHDRAWN = 1, 2, 3

_WAIT = 10.0  # seconds for a mailbox to be opened
_SOON = 0.02  # seconds for an answer
_FINITE = (0.0, -0.0, 1.0, -1.0, 9e17, -9e17, 1e-45)


class HungUp(Exception):
    """The server has closed the connection."""


class HostilePoster:
    """One hostile connection after another.

    Parameters
    ----------
    rng
        Decides everything.
    url
        The server's.
    target
        Its model, which has one tensor of float32.

    Attributes
    ----------
    said
        What was done, by kind.
    opened
        Connections on which the server has opened a mailbox.
    sent
        Bytes that were posted and sent.
    """

    def __init__(self, rng: Random, url: str, target: Target) -> None:
        self._rng, self._address, self._target = rng, urls.parse(url), target
        self.said, self.opened, self.sent = Counter[str](), 0, 0
        self._deck = list[str]()
        self._forms = [PushForm.drawn(rng, target, raw=True) for _ in range(4)]

    def connect_once(self, most: int) -> None:
        """Connect, do at most so much harm as ``most`` exchanges do, and leave."""
        sock = unix_socket.reach(*self._address)
        if sock is None:
            raise OSError("no server listens beside this address")
        with sock, contextlib.suppress(ConnectionError, TimeoutError, BlockingIOError, HungUp):
            sock.settimeout(_WAIT)
            side = unix_socket.welcomed(sock)
            if side is None:
                return
            with contextlib.closing(side):
                _Visit(self, sock, side).carry_out(self._rng.randrange(1, most))

    def next_kind(self) -> str:
        """Draw one of the kinds not drawn yet: all are, however soon a server hangs up."""
        if not self._deck:
            self._deck = [*_HARM, *("push",) * len(_HARM)]
            self._rng.shuffle(self._deck)
        return self._deck.pop()


class _Visit:
    """A hostile connection.

    Parameters
    ----------
    poster
        Whose it is.
    sock, side
        The connection.
    """

    def __init__(
        self, poster: HostilePoster, sock: socket.socket, side: unix_socket.UnixSide
    ) -> None:
        self._poster, self._sock, self._side = poster, sock, side
        self.rng, self._target = poster._rng, poster._target
        self._form = self.rng.choice(poster._forms)
        self._id = self._seq = 0
        self.number = 0  # of the push that was posted last
        self.mailbox, self._memory = Mailbox.make(self._target.nbytes)

    def carry_out(self, count: int) -> None:
        """Have a mailbox opened, and do harm."""
        try:
            nonce = self.rng.randbytes(16)
            client = self.rng.randbytes(16).hex()
            self._say(Hello(0, PROTOCOL, client, 1, "hostile", "worker", False, nonce, "steady"))
            if not self._sock.recv(1 << 16):
                return
            self._begin()
            self._poster.opened += 1
            for _ in range(count):
                kind = self._poster.next_kind()
                self._poster.said[kind] += 1
                _HARM[kind](self)
                self.listen()
        finally:
            os.close(self._memory)

    def _begin(self) -> None:
        """Push on the socket until the server answers in the mailbox."""
        self._announce(self.mailbox, self._memory)
        until = time.monotonic() + _WAIT
        while self.word(OPEN_AT) != 1:
            self._send(self.next().right)
            time.sleep(0.001)
            self.listen()
            if time.monotonic() > until:
                raise TimeoutError

    def _announce(self, mailbox: Mailbox, *memory: int) -> None:
        """Announce a mailbox, with these descriptors and its bell."""
        with contextlib.suppress(OSError):  # it has too many of them already
            socket.send_fds(self._side._sock, [b"\0"], [*memory, mailbox.bell])
        self._say(Share(0, 0, len(mailbox.data)))

    # ------------------------------------------------------------ the socket

    def _say(self, message: Message) -> None:
        header = encode(message)
        self._send(b"\xce" + len(header).to_bytes(4, "big") + header)

    def _send(self, data: bytes) -> None:
        """Send bytes; what the socket does not take within a moment is not sent."""
        self._sock.settimeout(1.0)
        self._sock.sendall(data)
        self._poster.sent += len(data)

    def listen(self) -> None:
        """Read what the server has said: it holds a reader back that does not."""
        self._sock.setblocking(False)
        with contextlib.suppress(BlockingIOError):
            while True:
                if not self._sock.recv(1 << 20):
                    raise HungUp
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
        self._id += 1
        self._seq += 1
        return self._form.filled((self._id, self._seq, 0, 0), self.rng.choice(self._form.gradients))

    def place(self, data: bytes) -> None:
        """Write a push where it belongs."""
        head = len(data) - self._target.nbytes
        self.put(PUSH_AT, data[:head])
        self.put(PAYLOAD_AT, data[head:])
        self._poster.sent += len(data)

    def post(self, state: int = _POSTED) -> None:
        """Post what is there, and ring."""
        found = self.word(POSTED_AT)
        if found & 3 == _TAKEN:  # the server has believed a word that was written at random
            self.number = found >> 2
        self.number = (self.number + 1) % (1 << 30)
        self.write(POSTED_AT, self.number << 2 | state)
        self.ring()

    def ring(self, value: int = 1) -> None:
        """Add to the count of the bell, unless it is full."""
        with contextlib.suppress(BlockingIOError):
            os.write(self.mailbox.bell, value.to_bytes(8, "little"))

    def settle(self) -> None:
        """Wait for the answer, if there is one soon; give it back, mostly."""
        until = time.monotonic() + _SOON
        while self.word(ANSWERED_AT) >> 2 != self.number and time.monotonic() < until:
            os.sched_yield()
        if self.rng.random() < 0.9:
            self.write(RETURNED_AT, self.number)

    # ------------------------------------------------------------ harm

    def push(self) -> None:
        """Make an exchange as it should be, in a mailbox that is open."""
        if self.word(OPEN_AT) != 1:
            self.replace()
        self.place(self.next().right)
        self.post()
        self.settle()

    def push_what_is_changed(self) -> None:
        """Post a push of which one thing is changed."""
        frame = self.next()
        self.place(changed_push(self.rng, self._form, frame) or frame.right)
        self.post()
        self.settle()

    def change_while_it_is_read(self) -> None:
        """Write over a push, and over words, that the server may be reading."""
        rng = self.rng
        self.place(self.next().right)
        self.post()
        values = self.mailbox.data[PAYLOAD_AT : PAYLOAD_AT + self._target.nbytes].view(np.float32)
        for _ in range(rng.randrange(1, 60)):
            at = rng.randrange(len(values))
            values[at : at + rng.randrange(1, 2000)] = rng.choice(_FINITE)
            if rng.random() < 0.02:  # which ends the connection, mostly
                self.put(PUSH_AT + rng.randrange(600), rng.randbytes(rng.randrange(1, 9)))
            if rng.random() < 0.1:
                self.put(ANSWER_AT + rng.randrange(600), rng.randbytes(rng.randrange(1, 9)))
        self.settle()

    def take_back(self) -> None:
        """Post a push, and take it back at once, whether or not it was taken."""
        self.place(self.next().right)
        self.post()
        self.write(POSTED_AT, self.number << 2 | _WITHDRAWN)
        if self.rng.random() < 0.5:
            self.number -= 1

    def write_words(self) -> None:
        """Write words at random, mostly where there are some, and bytes of any offset."""
        rng = self.rng
        for _ in range(rng.randrange(1, 12)):
            near = (self.number + rng.randrange(-2, 3)) << 2 | rng.randrange(4)
            value = rng.choice((near, near, 0, 1, rng.choice(NUMBERS), rng.getrandbits(32)))
            self.write(rng.choice((*WORDS, 4 * rng.randrange(1024))), value)
        self.ring()
        if rng.random() < 0.9:  # or it is left alone from now on
            self.write(OPEN_AT, 1)

    def give_back(self) -> None:
        """Give answers back that it does not have, or has not had."""
        rng = self.rng
        for _ in range(rng.randrange(1, 6)):
            number = self.number + rng.choice((-3, -1, 0, 1, 2, 1 << 29, rng.getrandbits(30)))
            self.write(RETURNED_AT, number)
            if rng.random() < 0.3:
                self._say(Release(max(0, self._id - rng.randrange(4))))

    def keep(self) -> None:
        """Make exchanges, and give none of the answers back."""
        for _ in range(6):
            self.place(self.next().right)
            self.post()
            until = time.monotonic() + _SOON
            while self.word(ANSWERED_AT) >> 2 != self.number and time.monotonic() < until:
                os.sched_yield()
            self.listen()

    def push_both_ways(self) -> None:
        """Push on the socket, whole or in part, while another one is posted."""
        rng = self.rng
        data = self.next().right
        self.place(self.next().right)
        cut = rng.choice((len(data), rng.randrange(len(data))))
        self._send(data[:cut])
        self.post()
        self._send(data[cut:])
        self.settle()

    def use_a_number_again(self) -> None:
        """Post a push that the server has had, or one whose id it still lends an answer to."""
        if self.rng.random() < 0.5:
            self._seq = max(0, self._seq - self.rng.randrange(1, 4))
        self._id = max(0, self._id - self.rng.randrange(1, 4))
        self.push()

    def ring_in_vain(self) -> None:
        """Ring, though nothing is posted, or until the bell is full."""
        self.ring((1 << 64) - 2 if self.rng.random() < 0.3 else 1)
        with contextlib.suppress(BlockingIOError):
            if self.rng.random() < 0.5:
                os.read(self.mailbox.bell, 8)

    def make_holes(self) -> None:
        """Punch holes into the mailbox, and try to shrink it."""
        self.place(self.next().right)
        self.post()
        punch(self._memory, len(self.mailbox.data) // 2)
        with contextlib.suppress(OSError):
            os.ftruncate(self._memory, 4096)
        self.number = 0
        self.replace()

    def replace(self) -> None:
        """Announce another mailbox."""
        os.close(self._memory)
        self.mailbox, self._memory = Mailbox.make(self._target.nbytes)
        self.number = 0
        self._announce(self.mailbox, self._memory)
        self._say(Ping(1))
        self._wait_until_open()

    def announce_what_is_none(self) -> None:
        """Announce as a mailbox what is none, or one of another size; then one."""
        rng = self.rng
        nbytes = rng.choice((0, 1, 4096, self._target.nbytes + 4096, self._target.nbytes))
        wrong = KINDS[rng.choice([*KINDS])](size_of(nbytes))
        try:
            ours = os.pipe() if rng.random() < 0.3 else ()
            sent = [wrong, *ours][: rng.randrange(1, 4)]
            with contextlib.suppress(OSError):
                if rng.random() < 0.8:
                    socket.send_fds(self._side._sock, [b"\0"], [*sent, self.mailbox.bell])
            self._say(Share(0, 0, rng.choice((size_of(nbytes), rng.choice(NUMBERS) % (1 << 63)))))
            for fd in ours:
                os.close(fd)
        finally:
            os.close(wrong)
        self._say(Ping(2))
        self.listen()
        self.replace()

    def _wait_until_open(self) -> None:
        until = time.monotonic() + _SOON
        while self.word(OPEN_AT) != 1 and time.monotonic() < until:
            self.listen()
            time.sleep(0.0005)


_HARM: Mapping[str, Callable[[_Visit], None]] = {
    "push": _Visit.push,
    "changed push": _Visit.push_what_is_changed,
    "push that changes": _Visit.change_while_it_is_read,
    "push taken back": _Visit.take_back,
    "push beside one on the socket": _Visit.push_both_ways,
    "number used again": _Visit.use_a_number_again,
    "words": _Visit.write_words,
    "answers given back": _Visit.give_back,
    "answers kept": _Visit.keep,
    "bell": _Visit.ring_in_vain,
    "holes": _Visit.make_holes,
    "other mailbox": _Visit.replace,
    "no mailbox": _Visit.announce_what_is_none,
}

KINDS_OF_HARM = tuple(_HARM)
"""By which `HostilePoster.said` counts."""


def post_on(pipe: Connection) -> None:
    """Do what the pipe says: harm, as a process of its own; tell what was done.

    An order is a seed, a server, its model, a number of connections, and the most exchanges of one.
    """
    seed, url, target, connections, most = pipe.recv()
    poster = HostilePoster(Random(seed), url, target)
    for _ in range(connections):
        poster.connect_once(most)
    pipe.send((poster.said, poster.opened, poster.sent))
    pipe.recv()  # until it is ended
