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
from collections.abc import Callable, Mapping
from itertools import chain
from multiprocessing.connection import Connection
from random import Random
from typing import NamedTuple

import numpy as np

from aiops.lab.torture.hostile_messages import NUMBERS, Target
from aiops.lab.torture.hostile_neighbour import KINDS, HostileNeighbour, memory, punch
from aiops.lab.torture.posting_connection import (
    ANSWER_AT,
    ANSWERED_AT,
    OPEN_AT,
    PAYLOAD_AT,
    POSTED,
    POSTED_AT,
    PUSH_AT,
    RETURNED_AT,
    SOON,
    WITHDRAWN,
    WORDS,
    PostingConnection,
)
from aiops.lab.torture.steady_pushes import PushForm, changed_push
from aiops.model.mailbox import Mailbox, size_of
from aiops.net import unix_socket
from aiops.wire.messages import Fetch, Ping, Release, Share

_FINITE = (0.0, -0.0, 1.0, -1.0, 9e17, -9e17, 1e-45)


class _Harm(PostingConnection):
    """The acts on one connection.

    Parameters
    ----------
    forms
        Those of its pushes, of which one is drawn.
    given
        As of `PostingConnection`, without the form.
    """

    def __init__(
        self,
        forms: list[PushForm],
        rng: Random,
        sock: socket.socket,
        side: unix_socket.UnixSide,
        nbytes: int,
    ) -> None:
        super().__init__(rng, sock, side, rng.choice(forms), nbytes)
        self._forms = forms

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
        self.place(changed_push(self.rng, self.form, frame) or frame.right)
        self.post()
        self.settle()

    def change_while_it_is_read(self) -> None:
        """Write over a push, and over words, while the server reads them, and a little longer."""
        rng = self.rng
        self.place(self.next().right)
        self.post()
        values = self.mailbox.data[PAYLOAD_AT : PAYLOAD_AT + self.nbytes].view(np.float32)
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
            until = time.monotonic() + SOON
            while self.word(POSTED_AT) & 3 == POSTED and time.monotonic() < until:
                os.sched_yield()
        for _ in range(rng.choice((1, 1, 500))):
            self.write(POSTED_AT, self.number << 2 | WITHDRAWN)
            self.write(POSTED_AT, self.number << 2 | rng.choice((POSTED, WITHDRAWN)))
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
                self.say(Release(max(0, self.id - rng.randrange(4))))

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
        self.send(data[:cut])
        self.post()
        self.send(data[cut:])
        self.settle()

    def push_in_another_form(self) -> None:
        """Push on the socket in another form, or fetch, and post in the form that was learnt."""
        rng, mine = self.rng, self.form
        if rng.random() < 0.3:
            self.id += 1
            self.say(Fetch(self.id, -1))
        for _ in range(rng.randrange(1, 4)):
            self.form = rng.choice(self._forms)
            self.send(self.next().right)
        self.form = mine
        self.place(self.next().right)
        self.post()
        self.settle()

    def use_a_number_again(self) -> None:
        """Post a push that the server has had, or one whose id it still lends an answer to."""
        if self.rng.random() < 0.5:
            self.seq = max(0, self.seq - self.rng.randrange(1, 4))
        self.id = max(0, self.id - self.rng.randrange(1, 4))
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
        punch(self.memory, len(self.mailbox.data) // 2)
        with contextlib.suppress(OSError):
            os.ftruncate(self.memory, 4096)
        self.replace()

    def announce_without_a_bell(self) -> None:
        """Announce sound memory, and as its bell another descriptor."""
        wrong = self.rng.choice(_BELLS)()
        mailbox, memory = Mailbox.make(self.nbytes)
        try:
            self.announce(mailbox, memory, bell=wrong)
            self.say(Ping(3))
            self.listen()
        finally:
            os.close(wrong)
            os.close(memory)
        self.replace()

    def announce_what_is_none(self) -> None:
        """Announce as a mailbox what is none, or one of another size; then one."""
        rng = self.rng
        nbytes = rng.choice((0, 1, 4096, self.nbytes + 4096, self.nbytes))
        wrong = [KINDS[rng.choice([*KINDS])](size_of(nbytes)) for _ in range(rng.choice((1, 1, 3)))]
        try:
            if rng.random() < 0.8:
                self.pass_on(*wrong, self.mailbox.bell)
            self.say(Share(0, 0, rng.choice((size_of(nbytes), rng.choice(NUMBERS) % (1 << 53)))))
        finally:
            for fd in wrong:
                os.close(fd)
        self.say(Ping(2))
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


_HARM: Mapping[str, Callable[[_Harm], None]] = {
    "push": _Harm.push,
    "changed push": _Harm.push_what_is_changed,
    "push that changes": _Harm.change_while_it_is_read,
    "push taken back": _Harm.take_back,
    "push beside one on the socket": _Harm.push_both_ways,
    "push of another form": _Harm.push_in_another_form,
    "number used again": _Harm.use_a_number_again,
    "words": _Harm.write_words,
    "answers given back": _Harm.give_back,
    "answers kept": _Harm.keep,
    "bell": _Harm.ring_in_vain,
    "holes": _Harm.make_holes,
    "other mailbox": _Harm.replace,
    "no bell": _Harm.announce_without_a_bell,
    "no mailbox": _Harm.announce_what_is_none,
}

KINDS_OF_HARM = tuple(_HARM)
"""By which `HostilePoster.acts` counts."""


class HostilePoster(HostileNeighbour):
    """One hostile connection after another, each with a mailbox.

    Parameters
    ----------
    rng, url
        As of `HostileNeighbour`.
    target
        The server's model, which has one tensor of float32.
    opens
        Seconds for a mailbox to be opened.

    Attributes
    ----------
    opened
        Connections on which the server has opened a mailbox.
    answered, sent
        As of `PostingConnection`, on all of them.
    """

    def __init__(self, rng: Random, url: str, target: Target, opens: float) -> None:
        super().__init__(rng, url)
        self._target, self._opens = target, opens
        self._forms = [PushForm.drawn(rng, target, raw=True) for _ in range(4)]
        self.opened = self.answered = self.sent = 0

    def harm(self, sock: socket.socket, side: unix_socket.UnixSide, count: int) -> None:
        """Have a mailbox opened, and write there."""
        with contextlib.closing(
            _Harm(self._forms, self.rng, sock, side, self._target.nbytes)
        ) as connection:
            try:
                connection.open(self._opens)
                self.opened += 1
                for _ in range(count):
                    kind = self.drawn([*_HARM, *("push",) * len(_HARM)])
                    self.acts[kind] += 1
                    _HARM[kind](connection)
                    connection.listen()
            finally:
                self.answered += connection.answered
                self.sent += connection.sent


class Deeds(NamedTuple):
    """The deeds of a `HostilePoster` so far: its attributes."""

    acts: Counter[str]
    connections: int
    opened: int
    answered: int
    sent: int


def post_on(pipe: Connection) -> None:
    """Do what the pipe says: harm, as a process of its own; tell of it after each connection.

    An order is a seed, a server, its model, the seconds for a mailbox to be opened, a number of
    connections, and the most acts of one.
    """
    seed, url, target, opens, connections, most = pipe.recv()
    poster = HostilePoster(Random(seed), url, target, opens)
    for _ in range(connections):
        poster.connect_once(most)
        counts = poster.connections, poster.opened, poster.answered, poster.sent
        pipe.send(Deeds(Counter(poster.acts), *counts))
    with contextlib.suppress(EOFError):
        pipe.recv()  # until it is ended
