"""Mailboxes of a server: what is posted is answered as if it had come by the socket.

The clients are raw: they write into a mailbox what a test tells them to.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import gc
import os
import random
import select
import socket
import struct
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from aiops.cli.state_folder import StateFolder
from aiops.cli.state_replay import frames_of
from aiops.common import urls
from aiops.compiled.loading import COMPILED, core
from aiops.model.mailbox import Mailbox, size_of
from aiops.model.parts import Part
from aiops.net import mailboxes as module
from aiops.net import unix_socket
from aiops.serving.server import Server
from aiops.state.row_kinds import RowKind
from aiops.wire import messages
from tests.model.test_shared_memory import descriptors, held
from tests.net.test_socket_poller import SIZE, Line, SlowDisk, answered, link_of, pushed
from tests.peers import eventually, frame
from tests.rows import each_row
from tests.support import PATIENCE, ServerThread

pytestmark = pytest.mark.skipif(
    core() is None or core().Mailboxes is None,  # type: ignore[union-attr]
    reason="compiled code has no mailboxes here",
)

NBYTES = 4 * SIZE
POSTED_AT, ANSWERED_AT, CLIENT_SLEEPS_AT, SERVER_SLEEPS_AT, OPEN_AT = 0, 128, 256, 384, 512
RETURNED_AT, PLACE_AT = 640, 768
PUSH_AT, ANSWER_AT, PAYLOAD_AT = 4096, 8192, 3 * 4096
POSTED, TAKEN, WITHDRAWN = 1, 2, 3
HERE, ELSEWHERE, LENT = 1, 2, 3


class Served(ServerThread):
    """A server, and the exchanges that it has answered in mailboxes."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**{"policy": "asgd", "kernels": "numpy", **settings})

    def warm(self) -> None:
        """Wait until the kernels of the model are ready: nothing is answered at once before."""
        eventually(lambda: bool(self.call(lambda server: server._runner.at_once > 0)), "it is warm")

    @property
    def served(self) -> int:
        return int(self.call(lambda server: server.connections.mailboxes.served))


@pytest.fixture
def served() -> Iterator[Served]:
    with Served() as server:
        yield server


class Poster(Line):
    """A worker on the server's machine, with a mailbox."""

    def reach(self, url: str, receive_buffer: int | None) -> socket.socket:
        found = unix_socket.reach(*urls.parse(url))
        assert found is not None
        found.settimeout(PATIENCE)
        side = unix_socket.welcomed(found)
        assert side is not None
        self.side, self.number = side, 0
        return found

    def close(self) -> None:
        super().close()
        self.side.close()

    @property
    def nbytes(self) -> int:
        """Bytes of its model."""
        return self.size * np.dtype(self.dtype).itemsize

    @property
    def pushed_nbytes(self) -> int:
        """Bytes of a push's payload."""
        return self.nbytes

    def announce(self) -> None:
        """Make a mailbox, and announce it."""
        self.mailbox, memory = Mailbox.make(self.nbytes)
        assert self.side.pass_mailbox(self.mailbox, memory)
        os.close(memory)
        self.number = 0
        self.send(frame(messages.Share(0, 0, size_of(self.nbytes))))

    def opened(self, served: Served) -> Poster:
        """Have exchanges learnt, and a mailbox opened."""
        self.polled()
        served.warm()
        self.announce()
        assert isinstance(self.ask(messages.Ping(1)), messages.Pong)
        assert self.word(OPEN_AT) == 1
        return self

    def word(self, at: int) -> int:
        """Return a word."""
        return int(self.mailbox.data[at : at + 4].view("<u4")[0])

    def write(self, at: int, value: int) -> None:
        """Write a word."""
        self.mailbox.data[at : at + 4].view("<u4")[0] = value

    def put(self, data: bytes, at: int) -> None:
        """Write bytes."""
        self.mailbox.data[at : at + len(data)] = np.frombuffer(data, np.uint8)

    def place(self, push: bytes) -> None:
        """Write a push where it belongs."""
        self.put(push[: -self.pushed_nbytes], PUSH_AT)
        self.put(push[-self.pushed_nbytes :], PAYLOAD_AT)

    def post(self, push: bytes) -> None:
        """Post a push, and ring."""
        self.place(push)
        self.number += 1
        self.write(POSTED_AT, self.number << 2 | POSTED)
        self.ring()

    def ring(self) -> None:
        os.write(self.mailbox.bell, struct.pack("=Q", 1))

    def answered(self) -> int:
        """Wait until the push is answered; return where."""

        def there() -> bool:
            return self.word(ANSWERED_AT) >> 2 == self.number

        eventually(there, "it is answered")
        return self.word(ANSWERED_AT) & 3

    def told(self) -> bytes:
        """Return the answer in the mailbox, which is one of the same length as the push's."""
        assert self.answered() == HERE
        at = PAYLOAD_AT + self.nbytes  # whole pages
        return bytes(self.mailbox.data[at : at + self.nbytes])

    def settle(self) -> None:
        """Wait until the server has looked at what was posted: it answers twice by the socket."""
        for number in (1, 2):
            assert isinstance(self.ask(messages.Ping(number)), messages.Pong)


def parameters(served: Served) -> bytes:
    found: bytes = served.call(lambda server: server.engine.store.current.arena.data.tobytes())
    return found


def version(served: Served) -> int:
    return int(served.call(lambda server: server.engine.version))


def accounts(served: Served) -> Any:
    """Return what the server has counted of its only connection."""

    def read(server: Server) -> Any:
        (peer,) = server.connections.peers.values()
        traffic = peer.link.wire.traffic
        kinds = [
            {kind: (each.messages, each.overhead, each.payload) for kind, each in kinds.items()}
            for kinds in (traffic.kinds_in, traffic.kinds_out)
        ]
        for each in kinds:
            for kind in ("ping", "pong", "share"):
                each.pop(kind, None)
        (member,) = server.engine.membership
        return kinds, member.pushes, member.last_seq, member.staleness, [*member.answers]

    return served.call(read)


def test_what_is_posted_is_answered_as_by_the_socket(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Poster(served.url) as poster:
        poster.opened(served)
        said = []
        for _ in range(5):
            poster.post(poster.next())
            said.append(poster.told())
        assert served.served == 5
        found = accounts(served)
        assert said[-1] == parameters(served)
    monkeypatch.setenv(COMPILED, "0")
    with Served() as other, Line(other.url) as line:
        line.polled()
        assert [line.exchange() for _ in range(5)] == said
        assert accounts(other) == found
        assert other.served == 0


def test_the_answers_header_is_that_of_the_socket(served: Served) -> None:
    with Poster(served.url) as poster:
        poster.opened(served)
        poster.post(poster.next())
        poster.told()
        seen = bytes(poster.mailbox.data[ANSWER_AT : ANSWER_AT + 512])
        count = int.from_bytes(seen[1:5], "big")
        poster.wire.state = "open"
        buffer = poster.wire.next_buffer()
        whole = seen[: 5 + count] + b"\xc6" + NBYTES.to_bytes(4, "big") + parameters(served)
        assert seen[5 + count : 10 + count] == whole[5 + count : 10 + count]
        buffer[: len(whole)] = whole
        ((ack, _sink),) = poster.wire.take(len(whole))
        assert isinstance(ack, messages.Ack)
        assert (ack.id, ack.version, ack.staleness) == (poster.seq, 3, 2)


def test_both_ways_take_turns(served: Served) -> None:
    with Poster(served.url) as poster:
        poster.opened(served)
        for _ in range(3):
            poster.post(poster.next())
            assert poster.told() == parameters(served)
            assert poster.exchange() == parameters(served)
        assert served.served == 3


def nan(poster: Poster) -> bytes:
    poster.seq += 1
    return pushed(poster.seq, np.full(SIZE, np.nan, np.float32).tobytes())


def old(poster: Poster) -> bytes:
    return pushed(poster.seq, bytes(NBYTES))


@each_row(("push", "kind"), [(nan, messages.Error), (old, messages.Ack)])
def test_what_is_not_answered_at_once_is_answered_by_the_socket(
    served: Served, push: Any, kind: type
) -> None:
    with Served() as server, Poster(server.url) as poster:
        poster.opened(server)
        poster.post(push(poster))
        assert poster.answered() == ELSEWHERE
        assert isinstance(poster.receive(), kind)
        before = version(server)
        poster.post(poster.next())
        assert poster.told() == parameters(server)
        assert version(server) == before + 1


def test_bytes_that_are_no_message_end_their_connection_alone(served: Served) -> None:
    with Poster(served.url) as poster, Poster(served.url) as other:
        poster.opened(served)
        other.opened(served)
        poster.post(b"\x93" * len(poster.next()))
        assert poster.answered() == ELSEWHERE
        assert poster.dropped()
        eventually(lambda: poster.word(OPEN_AT) == 0, "its mailbox is left")
        other.post(other.next())
        assert other.told() == parameters(served)


@each_row(
    "value",
    [
        *(0, POSTED, 1 << 2, 1 << 2 | TAKEN, 1 << 2 | WITHDRAWN),
        *(2 << 2 | POSTED, 5 << 2 | POSTED, 0xFFFFFFFF),
    ],
)
def test_another_word_is_as_if_nothing_were_posted(value: int) -> None:
    with Served() as served, Poster(served.url) as poster:
        poster.opened(served)
        poster.place(poster.next())
        before = version(served)
        poster.write(POSTED_AT, value)
        poster.ring()
        poster.settle()
        assert version(served) == before
        assert poster.word(POSTED_AT) == value
        assert poster.word(ANSWERED_AT) == 0
        poster.write(POSTED_AT, 1 << 2 | POSTED)
        poster.ring()
        poster.number = 1
        assert poster.told() == parameters(served)


def test_a_number_is_taken_once(served: Served) -> None:
    with Poster(served.url) as poster:
        poster.opened(served)
        poster.post(poster.next())
        poster.told()
        before = version(served)
        poster.place(poster.next())
        poster.write(POSTED_AT, 1 << 2 | POSTED)
        poster.ring()
        poster.settle()
        assert version(served) == before


def test_words_that_are_written_at_random_harm_no_one_else(served: Served) -> None:
    """Nor the server: each push that it takes is whole, and every other worker is served."""
    rng = random.Random(3)
    with Poster(served.url) as hostile, Poster(served.url) as poster:
        hostile.opened(served)
        poster.opened(served)
        for _ in range(400):
            for _ in range(rng.randrange(1, 6)):
                at = rng.choice((POSTED_AT, ANSWERED_AT, CLIENT_SLEEPS_AT, SERVER_SLEEPS_AT))
                at = rng.choice((at, OPEN_AT, rng.randrange(0, 4096, 4)))
                number = rng.choice((0, 1, 2, rng.randrange(1 << 30), (1 << 30) - 1))
                hostile.write(at, number << 2 | rng.randrange(4))
            if rng.random() < 0.3:
                hostile.ring()
            poster.post(poster.next())
            assert poster.told() == parameters(served)
        served.call(lambda server: None)


def test_a_gradient_that_changes_is_applied_as_it_was_checked(served: Served) -> None:
    """It is copied first: no NaN gets in, however the worker writes meanwhile."""
    rng = np.random.default_rng(1)
    with Poster(served.url) as poster:
        poster.opened(served)
        payload = poster.mailbox.data[PAYLOAD_AT : PAYLOAD_AT + NBYTES].view(np.float32)
        for _ in range(200):
            poster.post(poster.next())
            for _ in range(int(rng.integers(1, 30))):
                payload[:] = np.nan
                payload[:] = 0.5
            if poster.answered() == ELSEWHERE:
                assert isinstance(poster.receive(), messages.Error)
        assert np.isfinite(np.frombuffer(parameters(served), np.float32)).all()


def test_one_that_is_held_waits(served: Served) -> None:
    with Poster(served.url) as poster, Poster(served.url) as other:
        poster.opened(served)
        served.call(lambda server: link_of(server, 0).hold())
        before = version(served)
        poster.post(poster.next())
        other.settle()
        assert version(served) == before
        assert poster.word(POSTED_AT) & 3 == POSTED
        served.call(lambda server: link_of(server, 0).release())
        poster.ring()
        assert poster.told() == parameters(served)


def test_a_push_in_the_midst_of_another_message_waits(served: Served) -> None:
    with Poster(served.url) as poster:
        poster.opened(served)
        data = frame(messages.Ping(9))
        poster.send(data[:7])
        eventually(lambda: served.call(lambda server: link_of(server).wire.midway), "it has come")
        before = version(served)
        poster.post(poster.next())
        with Poster(served.url) as other:
            other.settle()
        assert version(served) == before
        poster.send(data[7:])
        assert isinstance(poster.receive(), messages.Pong)
        poster.ring()
        assert poster.told() == parameters(served)


@pytest.mark.parametrize(
    ("of", "field", "value"),
    [
        ("link", "_received", [(messages.Ping(1), None)]),
        ("link", "_closing", True),
        ("wire", "missing", 5),
        ("wire", "_message", messages.Ping(1)),
    ],
)
def test_with_something_else_under_way_a_push_waits(
    served: Served, of: str, field: str, value: Any
) -> None:
    with Poster(served.url) as poster:
        poster.opened(served)

        def put(server: Server, value: Any) -> Any:
            link = link_of(server)
            owner = link if of == "link" else link.wire
            before = getattr(owner, field)
            setattr(owner, field, value)
            server.connections.mailboxes._rung()
            return before

        poster.place(poster.next())
        poster.number = 1

        def turn(server: Server) -> int:
            before = put(server, value)
            poster.write(POSTED_AT, 1 << 2 | POSTED)
            server.connections.mailboxes._answer()
            found = poster.word(POSTED_AT)
            put(server, before)
            return found

        assert served.call(turn) == 1 << 2 | POSTED
        poster.ring()
        assert poster.told() == parameters(served)


def test_one_that_is_taken_back_is_not_applied(served: Served) -> None:
    with Poster(served.url) as poster:
        poster.opened(served)
        served.call(lambda server: link_of(server).hold())
        before = version(served)
        poster.post(poster.next())
        poster.write(POSTED_AT, poster.number << 2 | WITHDRAWN)
        served.call(lambda server: link_of(server).release())
        poster.ring()
        poster.settle()
        assert version(served) == before
        poster.seq -= 1
        assert poster.exchange() == parameters(served)
        poster.number -= 1  # that of the one that was taken back is not used up
        poster.post(poster.next())
        assert poster.told() == parameters(served)


def test_a_connection_that_learns_another_form_leaves_it(served: Served) -> None:
    """Its client is told by the mailbox, and goes by the socket."""
    with Poster(served.url) as poster:
        poster.opened(served)

        def again(server: Server) -> None:
            (peer,) = server.connections.peers.values()
            server.connections._take_shortcut(peer)
            peer.link.shortcut = lambda nbytes: None

        served.call(again)
        before = version(served)
        poster.post(poster.next())
        eventually(lambda: poster.word(OPEN_AT) == 0, "it is left")
        assert version(served) == before
        assert poster.word(POSTED_AT) & 3 == POSTED


def test_a_second_one_replaces_the_first(served: Served) -> None:
    with Poster(served.url) as poster:
        poster.opened(served)
        first = poster.mailbox
        poster.announce()
        poster.settle()
        assert int(first.data[OPEN_AT]) == 0
        assert poster.word(OPEN_AT) == 1
        poster.post(poster.next())
        assert poster.told() == parameters(served)
        assert served.call(lambda server: len(server.connections.mailboxes._places)) == 1


def test_it_takes_no_more_memory_than_there_is_room(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Poster(served.url) as poster, Poster(served.url) as other:
        table = served.call(lambda server: server.connections.mailboxes)
        size = size_of(NBYTES)
        table.room = size
        poster.opened(served)
        assert table.room == 0
        other.polled()
        other.announce()
        other.settle()
        assert other.word(OPEN_AT) == 0
        assert other.exchange() == parameters(served)
        poster.close()
        eventually(lambda: table.room == size, "its room is free")
        other.announce()
        other.settle()
        assert other.word(OPEN_AT) == 1


def test_a_connection_that_ends_leaves_nothing(served: Served) -> None:
    with Poster(served.url) as first:
        first.opened(served)
        first.post(first.next())
        first.told()
        before = descriptors(), held()
        for _ in range(5):
            with Poster(served.url) as poster:
                poster.opened(served)
                poster.post(poster.next())
                poster.told()
            del poster
        eventually(lambda: descriptors() <= before[0], "descriptors are closed")
        eventually(lambda: held() <= before[1], "memory is unmapped")


def unsealed(poster: Poster) -> tuple[int, int]:
    fd = os.memfd_create("aiops", os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, size_of(NBYTES))
    return fd, os.eventfd(0)


def short(poster: Poster) -> tuple[int, int]:
    fd = os.memfd_create("aiops", os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, size_of(NBYTES) - 4096)
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK)
    return fd, os.eventfd(0)


def unwritable(poster: Poster) -> tuple[int, int]:
    fd = os.memfd_create("aiops", os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, size_of(NBYTES))
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_WRITE)
    return fd, os.eventfd(0)


def huge_pages(poster: Poster) -> tuple[int, int]:
    try:
        fd = os.memfd_create("aiops", os.MFD_ALLOW_SEALING | os.MFD_HUGETLB)
        os.ftruncate(fd, 2 << 20)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK)
    except OSError:
        pytest.skip("this system has no huge pages")
    return fd, os.eventfd(0)


def not_a_bell(poster: Poster) -> tuple[int, int]:
    _made, memory = Mailbox.make(NBYTES)
    return memory, select.epoll().fileno() and os.dup(memory)


def swapped(poster: Poster) -> tuple[int, int]:
    memory, bell = short(poster)
    return bell, memory


def alone(poster: Poster) -> tuple[int]:
    _made, memory = Mailbox.make(NBYTES)
    return (memory,)


@each_row(
    "make",
    [unsealed, short, unwritable, huge_pages, not_a_bell, swapped, alone, lambda poster: ()],
)
def test_what_is_no_mailbox_is_not_opened(make: Any) -> None:
    with Served() as served, Poster(served.url) as poster:
        poster.polled()
        before = descriptors()
        fds = make(poster)
        if fds:
            socket.send_fds(poster.side._sock, [b"\0"], list(fds))
        for fd in fds:
            os.close(fd)
        poster.send(frame(messages.Share(0, 0, size_of(NBYTES))))
        poster.settle()
        assert served.call(lambda server: server.connections.mailboxes._places) == {}
        assert descriptors() <= before + 1  # of the reader, once
        assert poster.exchange() == parameters(served)


@each_row("nbytes", [0, 1, size_of(NBYTES) - 1, size_of(NBYTES) + 4096, 1 << 40, (1 << 53) - 1])
def test_another_size_is_not_opened(nbytes: int) -> None:
    with Served() as served, Poster(served.url) as poster:
        poster.polled()
        mailbox, memory = Mailbox.make(8 * NBYTES)
        assert poster.side.pass_mailbox(mailbox, memory)
        os.close(memory)
        poster.send(frame(messages.Share(0, 0, nbytes)))
        poster.settle()
        assert int(mailbox.data[OPEN_AT]) == 0
        assert poster.exchange() == parameters(served)


class CodedPoster(Poster):
    """One that fetches coded parameters, and holds those of the first version."""

    def next(self) -> bytes:
        self.seq += 1
        data = np.full(SIZE, self.seq / 8, np.float32).tobytes()
        part = Part(0, NBYTES, "raw", NBYTES, 0)
        return frame(messages.Push(self.seq, self.seq, True, 0, (part,), coded=True), data)


def test_coded_answers_are_not_left_in_one() -> None:
    """Their lengths vary; compiled code answers by the socket."""
    pytest.importorskip("numba")
    settings = {"kernels": "numba", "fetch_codec": ["int8"], "fetch_lag": 1}
    with Served(**settings) as served, CodedPoster(served.url) as poster:
        served.warm()
        poster.polled()
        poster.announce()
        assert isinstance(poster.ask(messages.Ping(1)), messages.Pong)
        before = served.call(answered)
        for _ in range(3):
            poster.exchange()
        assert poster.payloads[0] == parameters(served)  # none of the increments are that old
        assert served.call(answered) == before + 3
        assert poster.word(OPEN_AT) == 0
        assert served.served == 0


def test_one_that_comes_early_is_opened_once_compiled_code_answers(served: Served) -> None:
    """As that of a worker whose gradients are coded, while the server compiles their codec."""
    with Poster(served.url) as poster:
        table = served.call(lambda server: server.connections.mailboxes)
        room = table.room
        poster.announce()
        poster.settle()
        assert poster.word(OPEN_AT) == 0
        assert table.room == room
        poster.polled()
        poster.settle()
        assert poster.word(OPEN_AT) == 1
        poster.post(poster.next())
        assert poster.told() == parameters(served)
        assert table.room == room - size_of(NBYTES)


@pytest.mark.parametrize("how", ["gone", "another", "an observer's"])
def test_one_that_was_not_opened_leaves_nothing(how: str) -> None:
    def observe(server: Any) -> None:
        (peer,) = server.connections.peers.values()
        peer.handshake.admitted.hello.role = "observer"

    with Served() as served, Poster(served.url) as poster:
        table = served.call(lambda server: server.connections.mailboxes)
        room, before = table.room, descriptors()
        if how == "an observer's":
            served.call(observe)
        poster.announce()
        poster.settle()
        if how == "another":
            before = descriptors()
            poster.announce()
            poster.settle()
        elif how == "gone":
            poster.close()
        else:
            before += 2  # of this side: the bell, and the memory
        assert table.room == room
        eventually(lambda: descriptors() <= before, "the server's are closed")


@pytest.mark.parametrize("settings", [{"profile": "profile.json"}, {"set": {"clip": 1.0}}])
def test_where_compiled_code_answers_nothing_none_is_opened(
    settings: dict[str, Any], tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with Served(**settings) as served, Poster(served.url) as poster:
        poster.polled()
        poster.announce()
        poster.settle()
        assert poster.word(OPEN_AT) == 0


def test_over_a_network_there_is_none(served: Served) -> None:
    with Line(served.url) as line:
        line.polled()
        line.send(frame(messages.Share(0, 0, size_of(NBYTES))))
        assert line.dropped()


def test_many_have_their_turns(served: Served) -> None:
    posters = [Poster(served.url).opened(served) for _ in range(12)]
    for _ in range(20):
        for poster in posters:
            poster.post(poster.next())
        for poster in posters:
            poster.answered()
    assert served.served == 240
    for poster in posters:
        poster.close()


def test_a_state_that_is_kept_has_all_that_was_answered(tmp_path: Any) -> None:
    state = str(tmp_path / "state")
    with Served(state=state) as served, Poster(served.url) as poster:
        poster.opened(served)
        for _ in range(5):
            poster.post(poster.next())
            where = poster.answered()
            if where == ELSEWHERE:  # it waited for the journal
                assert isinstance(poster.receive(), messages.Ack)
        last = parameters(served)
    with Served(state=state) as served:
        assert parameters(served) == last


def test_an_answer_waits_for_its_row(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    slow = SlowDisk(monkeypatch)
    with Served(state=tmp_path / "s", acks="durable") as served, Poster(served.url) as poster:
        poster.opened(served)
        before = served.call(answered)
        slow.block()
        poster.put(b"\xaa" * 64, ANSWER_AT)
        poster.post(poster.next())
        eventually(lambda: served.call(answered) == before + 1, "it is applied")
        assert served.call(lambda server: server.run_state.holds)
        assert poster.answered() == ELSEWHERE
        assert bytes(poster.mailbox.data[ANSWER_AT : ANSWER_AT + 64]) == b"\xaa" * 64
        assert not select.select([poster.sock], [], [], 0)[0], "it was answered before its row"
        slow.go.set()
        assert isinstance(poster.receive(), messages.Ack)


def test_rows_are_written_before_their_answers(tmp_path: Any) -> None:
    with (
        Served(state=tmp_path / "s", keep_journal=True) as served,
        Poster(served.url) as poster,
    ):
        poster.opened(served)
        for count in range(1, 20):
            poster.post(poster.next())
            assert poster.told() == parameters(served)
            rows = [*frames_of(StateFolder(tmp_path / "s"), 1)]  # while the server runs
            assert sum(row.kind == RowKind.STEADY for row in rows) >= count
        assert served.served == 19


def test_a_client_that_sleeps_is_woken(served: Served) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    futex = 202 if os.uname().machine == "x86_64" else 98
    most = struct.pack("=qq", int(PATIENCE), 0)
    with Poster(served.url) as poster:
        poster.opened(served)
        served.call(lambda server: link_of(server).hold())
        poster.write(CLIENT_SLEEPS_AT, 1)
        poster.post(poster.next())

        def go_on(server: Server) -> None:
            link_of(server).release()
            server.connections.mailboxes._rung()

        timer = threading.Timer(0.2, served.call, (go_on,))
        timer.start()
        at = ctypes.c_void_p(poster.mailbox.data.ctypes.data + ANSWERED_AT)
        found = libc.syscall(futex, at, 0, 0, most, None, 0)
        assert found == 0 or ctypes.get_errno() != errno.ETIMEDOUT
        timer.join()
        assert poster.told() == parameters(served)


def test_a_fork_of_the_server_leaves_them_alone(served: Served) -> None:
    with Poster(served.url) as poster:
        poster.opened(served)
        pid = os.fork()
        if not pid:
            table = served.server.connections.mailboxes  # type: ignore[union-attr]
            left = table._boxes is None and not table._places
            table.close()
            gc.collect()
            os._exit(0 if left and poster.word(OPEN_AT) == 1 else 1)
        assert os.waitpid(pid, 0)[1] == 0
        poster.post(poster.next())
        assert poster.told() == parameters(served)
        assert poster.word(OPEN_AT) == 1


def test_a_server_that_ends_says_so_in_all_of_them() -> None:
    with Served() as served:
        poster = Poster(served.url).opened(served)
    assert poster.word(OPEN_AT) == 0
    poster.close()


def test_looking_is_left_out_where_it_was_in_vain(served: Served) -> None:
    """`module._LOOK` is not spent on each push of a worker that computes for longer."""
    assert module._LOOK <= 1e-4
    with Poster(served.url) as poster:
        poster.opened(served)
        for _ in range(30):
            poster.post(poster.next())
            poster.told()
            poster.settle()  # the loop sleeps meanwhile
        assert poster.word(SERVER_SLEEPS_AT) == 1


def test_a_part_is_not_a_push(served: Served) -> None:
    """Other messages than pushes of the learnt form go to the connection."""
    with Poster(served.url) as poster:
        poster.opened(served)
        part = Part(0, NBYTES, "raw", NBYTES, 0)
        poster.seq += 1
        other = messages.Push(poster.seq, poster.seq, False, 0, (part,))
        data = frame(other, bytes(NBYTES))
        fits = len(data) == len(poster.next())
        poster.seq -= 1
        assert fits, "or this is no test"
        poster.post(data)
        assert poster.answered() == ELSEWHERE
        assert isinstance(poster.receive(), messages.Ack)
