"""A hostile process on a server's machine: it posts in a mailbox what no worker would.

`HostilePoster` connects as a worker does, makes exchanges until the server answers in its mailbox,
and then writes there, while the server reads: pushes of which something is changed, pushes that
change while they are answered, words at random, answers given back that it never had, pushes on the
socket beside the posted one, and of another form. It replaces its mailbox by another, or by what is
none, and leaves at any moment. A value that it changes while the server reads stays a finite one:
without filters a worker is trusted with that.
"""

from __future__ import annotations

import contextlib
import os
import select
import socket
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from itertools import chain
from multiprocessing.connection import Connection
from random import Random
from typing import NamedTuple

import numpy as np

from aiops.common import urls
from aiops.lab.torture.frame_templates import FrameTemplate
from aiops.lab.torture.hostile_lender import KINDS, memory, punch
from aiops.lab.torture.hostile_messages import NUMBERS, Target
from aiops.lab.torture.steady_pushes import PushForm, changed_push
from aiops.model.mailbox import Mailbox, size_of
from aiops.net import unix_socket
from aiops.wire.encoding import encode
from aiops.wire.messages import PROTOCOL, Fetch, Hello, Message, Ping, Release, Share

POSTED_AT, ANSWERED_AT, OPEN_AT, RETURNED_AT = 0, 128, 512, 640
WORDS = POSTED_AT, ANSWERED_AT, 256, 384, OPEN_AT, RETURNED_AT, 768, 772, 776
"""Where words lie in a mailbox (``aiops/compiled/mailbox.h``)."""

PUSH_AT, ANSWER_AT, PAYLOAD_AT = 4096, 2 * 4096, 3 * 4096
_POSTED, _TAKEN, _WITHDRAWN = 1, 2, 3
_HERE, _LENT = 1, 3

_WAIT = 10.0  # seconds for a server's first bytes
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
    opens
        Seconds for a mailbox to be opened.

    Attributes
    ----------
    said
        What was done, by kind.
    connections, opened
        Those that were made, and those of them on which the server has opened a mailbox.
    answered
        Pushes that it has answered there, or with a place in its memory.
    sent
        Bytes that were posted and sent.
    """

    def __init__(self, rng: Random, url: str, target: Target, opens: float) -> None:
        self.opens = opens
        self._rng, self._address, self._target = rng, urls.parse(url), target
        self.said, self.sent = Counter[str](), 0
        self.connections = self.opened = self.answered = 0
        self._deck = list[str]()
        self._forms = [PushForm.drawn(rng, target, raw=True) for _ in range(4)]

    def connect_once(self, most: int) -> None:
        """Connect, do at most so much harm as ``most`` exchanges do, and leave."""
        sock = unix_socket.reach(*self._address)
        if sock is None:
            raise OSError("no server listens beside this address")
        self.connections += 1
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
        self._announce(self.mailbox, self._memory, self.mailbox.bell)
        until = time.monotonic() + self._poster.opens
        while self.word(OPEN_AT) != 1:
            self._send(self.next().right)
            if not self._sock.recv(1 << 20):
                raise HungUp
            time.sleep(0.001)
            self.listen()
            if time.monotonic() > until:
                raise TimeoutError

    def _announce(self, mailbox: Mailbox, memory: int, bell: int) -> None:
        """Announce a mailbox, with these descriptors."""
        with contextlib.suppress(OSError):  # it has too many of them already
            socket.send_fds(self._side._sock, [b"\0"], [memory, bell])
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

    def awaits(self, at: int) -> Iterator[None]:
        """Yield until a word has the number of the last push, or a moment has passed."""
        until = time.monotonic() + _SOON
        while self.word(at) >> 2 != self.number and time.monotonic() < until:
            yield

    def settle(self) -> None:
        """Wait for the answer, if there is one soon; give it back, mostly."""
        for _ in self.awaits(ANSWERED_AT):
            os.sched_yield()
        found = self.word(ANSWERED_AT)
        self._poster.answered += found >> 2 == self.number and found & 3 in (_HERE, _LENT)
        if found >> 2 != self.number and self.rng.random() < 0.5:
            self.replace()  # numbers are of another mailbox from here on
        elif self.rng.random() < 0.9:
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
        """Write over a push, and over words, while the server reads them, and a little longer."""
        rng = self.rng
        self.place(self.next().right)
        self.post()
        values = self.mailbox.data[PAYLOAD_AT : PAYLOAD_AT + self._target.nbytes].view(np.float32)
        for _ in chain(self.awaits(ANSWERED_AT), range(rng.randrange(5))):
            at = rng.randrange(len(values))
            values[at : at + rng.randrange(1, 2000)] = rng.choice(_FINITE)
            if rng.random() < 0.005:  # which ends the connection, mostly
                self.put(PUSH_AT + rng.randrange(600), rng.randbytes(rng.randrange(1, 9)))
            if rng.random() < 0.1:
                self.put(ANSWER_AT + rng.randrange(600), rng.randbytes(rng.randrange(1, 9)))
        self.settle()

    def take_back(self) -> None:
        """Post a push and take it back, again and again, perhaps when the server has taken it."""
        rng = self.rng
        self.place(self.next().right)
        self.post()
        if rng.random() < 0.5:
            until = time.monotonic() + _SOON
            while self.word(POSTED_AT) & 3 == _POSTED and time.monotonic() < until:
                os.sched_yield()
        for _ in range(rng.choice((1, 1, 500))):
            self.write(POSTED_AT, self.number << 2 | _WITHDRAWN)
            self.write(POSTED_AT, self.number << 2 | rng.choice((_POSTED, _WITHDRAWN)))
        for _ in self.awaits(ANSWERED_AT):
            os.sched_yield()
        if self.word(ANSWERED_AT) >> 2 != self.number:
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
            for _ in self.awaits(ANSWERED_AT):
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

    def push_in_another_form(self) -> None:
        """Push on the socket in another form, or fetch, and post in the form that was learnt."""
        rng, mine = self.rng, self._form
        if rng.random() < 0.3:
            self._id += 1
            self._say(Fetch(self._id, -1))
        for _ in range(rng.randrange(1, 4)):
            self._form = rng.choice(self._poster._forms)
            self._send(self.next().right)
        self._form = mine
        self.place(self.next().right)
        self.post()
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
        self.replace()

    def replace(self) -> None:
        """Announce another mailbox, mostly with a bell of its own."""
        before, memory = self.mailbox, self._memory
        self.mailbox, self._memory = Mailbox.make(self._target.nbytes)
        os.close(memory)
        self.number = 0
        bell = (before if self.rng.random() < 0.2 else self.mailbox).bell
        self._announce(self.mailbox, self._memory, bell)
        self._say(Ping(1))
        until = time.monotonic() + _SOON
        while self.word(OPEN_AT) != 1 and time.monotonic() < until:
            self.listen()
            time.sleep(0.0005)

    def announce_without_a_bell(self) -> None:
        """Announce sound memory, and as its bell another descriptor."""
        wrong = self.rng.choice(_BELLS)()
        mailbox, memory = Mailbox.make(self._target.nbytes)
        try:
            self._announce(mailbox, memory, bell=wrong)
            self._say(Ping(3))
            self.listen()
        finally:
            os.close(wrong)
            os.close(memory)
        self.replace()

    def announce_what_is_none(self) -> None:
        """Announce as a mailbox what is none, or one of another size; then one."""
        rng = self.rng
        nbytes = rng.choice((0, 1, 4096, self._target.nbytes + 4096, self._target.nbytes))
        wrong = [KINDS[rng.choice([*KINDS])](size_of(nbytes)) for _ in range(rng.choice((1, 1, 3)))]
        try:
            with contextlib.suppress(OSError):
                if rng.random() < 0.8:
                    socket.send_fds(self._side._sock, [b"\0"], [*wrong, self.mailbox.bell])
            self._say(Share(0, 0, rng.choice((size_of(nbytes), rng.choice(NUMBERS) % (1 << 53)))))
        finally:
            for fd in wrong:
                os.close(fd)
        self._say(Ping(2))
        self.listen()
        self.replace()


def _semaphore() -> int:
    return os.eventfd(0, os.EFD_SEMAPHORE | os.EFD_CLOEXEC)


def _poller() -> int:
    with select.epoll() as poller:
        return os.dup(poller.fileno())


_BELLS: tuple[Callable[[], int], ...] = (
    *(_semaphore, _poller, lambda: memory(4096), lambda: KINDS["a pipe"](0)),
    *(lambda: KINDS["a socket"](0), lambda: KINDS["a device"](0), lambda: os.eventfd(0)),
)


_HARM: Mapping[str, Callable[[_Visit], None]] = {
    "push": _Visit.push,
    "changed push": _Visit.push_what_is_changed,
    "push that changes": _Visit.change_while_it_is_read,
    "push taken back": _Visit.take_back,
    "push beside one on the socket": _Visit.push_both_ways,
    "push of another form": _Visit.push_in_another_form,
    "number used again": _Visit.use_a_number_again,
    "words": _Visit.write_words,
    "answers given back": _Visit.give_back,
    "answers kept": _Visit.keep,
    "bell": _Visit.ring_in_vain,
    "holes": _Visit.make_holes,
    "other mailbox": _Visit.replace,
    "no bell": _Visit.announce_without_a_bell,
    "no mailbox": _Visit.announce_what_is_none,
}

KINDS_OF_HARM = tuple(_HARM)
"""By which `HostilePoster.said` counts."""


class Deeds(NamedTuple):
    """The deeds of a `HostilePoster` so far: its attributes."""

    said: Counter[str]
    connections: int
    opened: int
    answered: int
    sent: int


def post_on(pipe: Connection) -> None:
    """Do what the pipe says: harm, as a process of its own; tell of it after each connection.

    An order is a seed, a server, its model, the seconds for a mailbox to be opened, a number of
    connections, and the most exchanges of one.
    """
    seed, url, target, opens, connections, most = pipe.recv()
    poster = HostilePoster(Random(seed), url, target, opens)
    for _ in range(connections):
        poster.connect_once(most)
        counts = poster.connections, poster.opened, poster.answered, poster.sent
        pipe.send(Deeds(Counter(poster.said), *counts))
    pipe.recv()  # until it is ended
