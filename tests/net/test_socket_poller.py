"""Connections that compiled code reads: what they say and hear is what the event loop's would."""

from __future__ import annotations

import asyncio
import select
import socket
import ssl
import struct
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import aiops
from aiops.cli.state_folder import StateFolder
from aiops.cli.state_replay import frames_of
from aiops.codecs import block_codec
from aiops.codecs.int8 import Int8
from aiops.compiled.loading import COMPILED, core
from aiops.model.parts import Part
from aiops.net import disk
from aiops.net.transport import MessageTransport
from aiops.serving.server import Server
from aiops.state.row_kinds import RowKind
from aiops.wire import messages
from tests.certificates import ours
from tests.peers import Peer, define, eventually, frame
from tests.support import PATIENCE, ServerThread

pytestmark = pytest.mark.skipif(
    core() is None or core().Poller is None,  # type: ignore[union-attr]
    reason="compiled code reads no sockets here",
)

SIZE = 1024
MODEL = {"w": np.zeros(SIZE, np.float32)}


class Served(ServerThread):
    """A server on one kind of event loop."""

    def __init__(self, loop: Callable[[], Any] | None, **settings: Any) -> None:
        super().__init__(policy="asgd", **{"kernels": "numpy", **settings})
        self._factory = loop

    def _run(self) -> None:
        try:
            with asyncio.Runner(loop_factory=self._factory) as runner:
                runner.run(self._main())
        except BaseException as error:
            self._error = error
        finally:
            self._started.set()

    @property
    def served(self) -> int:
        """The exchanges that were answered without the loop's transports."""
        found: int = self.call(lambda server: server.connections.poller.served)
        return found


@pytest.fixture(params=["asyncio", "uvloop"])
def served(request: pytest.FixtureRequest) -> Iterator[Served]:
    factory = None
    if request.param == "uvloop":
        factory = pytest.importorskip("uvloop").new_event_loop
    with Served(factory) as server:
        yield server


class Line(Peer):
    """A worker that pushes."""

    size = SIZE
    dtype: type = np.float32

    def __init__(self, url: str, **given: Any) -> None:
        super().__init__(url, **given)
        self.seq = 0
        self.send(define({"w": np.zeros(self.size, self.dtype)}, id=1 << 20))
        assert isinstance(self.receive(), messages.Model)

    def next(self) -> bytes:
        """Return the bytes of its next push."""
        self.seq += 1
        data = np.full(self.size, self.seq / 8, self.dtype).tobytes()
        return pushed(self.seq, data)

    def heard(self) -> bytes:
        """Return the parameters of the next answer, which is of the last push but for others."""
        answer = self.receive()
        assert isinstance(answer, messages.Ack), answer
        return bytes(self.payloads[0])

    def exchange(self) -> bytes:
        """Push, and return the parameters of the answer."""
        self.send(self.next())
        return self.heard()

    def polled(self) -> None:
        """Push until the connection is read by compiled code."""
        for _ in range(2):
            self.exchange()


def pushed(seq: int, data: bytes) -> bytes:
    """Return the bytes of a push, computed on the first version."""
    part = Part(0, len(data), "raw", len(data), 0)
    return frame(messages.Push(seq, seq, True, 0, (part,)), data)


class CodedLine(Line):
    """One that fetches coded parameters, and holds the version before the newest."""

    have = 0

    def next(self) -> bytes:
        self.seq += 1
        data = np.full(SIZE, self.seq / 8, np.float32).tobytes()
        part = Part(0, 4 * SIZE, "raw", 4 * SIZE, 0)
        return frame(messages.Push(self.seq, self.seq, True, self.have, (part,), coded=True), data)

    def heard(self) -> bytes:
        answer = self.receive()
        assert isinstance(answer, messages.Ack), answer
        self.have = answer.current
        return b"".join(bytes(payload) for payload in self.payloads)


def test_the_bytes_of_coded_answers_are_counted_as_handed_over() -> None:
    """By these a slow reader is known: an increment is shorter than the model."""
    pytest.importorskip("numba")
    settings = {"fetch_codec": ["int8"], "fetch_lag": 1}
    with Served(None, **settings, kernels="numba") as served, CodedLine(served.url) as line:
        eventually(lambda: bool(served.call(lambda server: server.warm)), "it is warm")

        def counted(server: Server) -> list[tuple[int, int]]:
            links = [peer.link for peer in server.connections.peers.values()]
            return [(link.pumped, link.wire.traffic.bytes_out) for link in links]

        line.polled()
        ((pumped, sent),) = served.call(counted)
        before = served.served
        for _ in range(5):
            assert 0 < len(line.exchange()) < 2 * SIZE
        assert served.served == before + 5
        ((pumped_then, sent_then),) = served.call(counted)
        assert pumped_then - pumped == sent_then - sent


def test_a_worker_that_fetches_coded_may_come_early(monkeypatch: pytest.MonkeyPatch) -> None:
    """While the server compiles the codec; from then on compiled code answers it."""
    pytest.importorskip("numba")
    go_on, warm = threading.Event(), Int8.warm

    def late(_codec: Int8) -> None:
        assert go_on.wait(PATIENCE)
        warm()

    monkeypatch.setattr(block_codec, "_entries", {})
    monkeypatch.setattr(Int8, "warm", late)
    settings = {"fetch_codec": ["int8"], "fetch_lag": 1}
    with Served(None, **settings, kernels="numba") as served, CodedLine(served.url) as line:
        for _ in range(3):
            line.exchange()
        go_on.set()
        eventually(lambda: bool(served.call(lambda server: server.warm)), "it is warm")
        line.polled()
        before = served.served
        line.exchange()
        assert served.served == before + 1


def link_of(server: Server, number: int = -1) -> MessageTransport:
    """Return the transport of a connection: by default of the newest."""
    return [*server.connections.peers.values()][number].link


def course(line: Line) -> list[bytes]:
    """Push whole, in pieces, several at a time, and between other messages; return what is said."""
    said = [line.exchange() for _ in range(4)]
    for most in (1, 60, 100, 1000, 4000):  # the header is cut, or the payload
        data = line.next()
        for at in range(0, min(len(data), 4 * most), most):
            line.send(data[at : at + most])
        line.send(data[4 * most :])
        said.append(line.heard())
    line.send(line.next() + line.next() + line.next()[:-1])
    said += [line.heard(), line.heard()]
    line.send(line.next()[-1:])  # of the same values: only its header is another
    line.seq -= 1
    said.append(line.heard())
    said.append(line.exchange())
    line.send(frame(messages.Ping(7)) + line.next())
    assert isinstance(line.receive(), messages.Pong)
    said.append(line.heard())
    assert isinstance(line.ask(messages.Fetch(8, -1)), messages.FetchedParams)
    said.append(bytes(line.payloads[0]))
    data = np.full(SIZE, np.nan, np.float32).tobytes()  # refused, and used up
    line.seq += 1
    line.send(pushed(line.seq, data))
    assert isinstance(line.receive(), messages.Error)
    return [*said, line.exchange()]


def test_a_course_is_as_without_it(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    with Line(served.url) as line:
        found = course(line)
    assert served.served >= 6  # how many come in pieces depends on the system
    monkeypatch.setenv(COMPILED, "0")
    with Served(None) as other, Line(other.url) as line:
        assert course(line) == found
        assert other.served == 0


class EncryptedLine(Line):
    """One by TLS."""

    def greet(self, *given: Any) -> None:
        context = ssl.create_default_context(cafile=str(ours().ca))
        self.sock = context.wrap_socket(self.sock, server_hostname="127.0.0.1")
        super().greet(*given)


@pytest.mark.parametrize("loop", ["asyncio", "uvloop"])
def test_bytes_that_are_encrypted_are_the_loops(loop: str) -> None:
    """Their transports decrypt them."""
    factory = None if loop == "asyncio" else pytest.importorskip("uvloop").new_event_loop
    with Served(factory, **ours().settings(mutual=False)) as served:
        with EncryptedLine(served.url) as line:
            line.polled()
            assert line.exchange() == line_parameters(served)
            assert served.call(lambda server: link_of(server).shortcut is not None)
            assert served.call(lambda server: link_of(server)._poller is None)
        assert served.served == 0


@pytest.mark.parametrize("settings", [{"bandwidth_budget": "1GB/s"}, {"profile": "profile.json"}])
def test_bytes_that_are_counted_or_timed_are_the_loops(
    settings: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a budget each waits for its grant; a profile has the parts of an exchange."""
    monkeypatch.chdir(tmp_path)
    with Served(None, **settings) as served, Line(served.url) as line:
        line.polled()
        line.exchange()
        assert served.served == 0
        (peer,) = served.call(lambda server: list(server.connections.peers.values()))
        assert peer.steady is None or peer.steady.compiled is None
        assert (peer.link.shortcut is None) == ("profile" not in settings)
        assert peer.link._poller is None


def test_bytes_with_checksums_have_no_shortcut(served: Served) -> None:
    """Its header would lie behind others that an exchange does not know."""
    pytest.importorskip("xxhash")
    with aiops.Client(served.url, role="worker", checksums=True, timeout=PATIENCE) as client:
        params = client.define(MODEL)
        for _ in range(4):
            client.exchange(params, {"w": np.ones(SIZE, np.float32)})
        (peer,) = served.call(lambda server: list(server.connections.peers.values()))
        assert peer.link.wire.checked
        assert peer.steady is None
        assert peer.link.shortcut is None


def test_workers_take_turns(served: Served) -> None:
    lines = [Line(served.url) for _ in range(5)]
    for line in lines:
        line.polled()
    for _ in range(20):
        for line in lines:
            line.send(line.next())
        for line in lines:
            line.heard()
    assert served.call(lambda server: server.engine.version) == 5 * 22
    assert served.served >= 6  # how many come in pieces depends on the system0
    for line in lines:
        line.close()


def why_gone(served: Served, end: Callable[[Line], None]) -> str:
    """Return the reason for which the server takes a connection to be gone."""
    said: list[str] = []
    with Line(served.url) as line:
        line.polled()

        def watch(server: Server) -> None:
            lost = server.connections.link_lost

            def noted(link: MessageTransport, error: Exception) -> None:
                said.append(str(error).replace(link.peer_name, "it"))
                lost(link, error)  # type: ignore[arg-type]

            server.connections.link_lost = noted  # type: ignore[method-assign,assignment]

        served.call(watch)
        end(line)
        with Peer(served.url) as other:  # by then the loop has turned
            while not said:
                other.ask(messages.Ping(1))
    return said[0]


def reset(line: Line) -> None:
    line.sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    line.close()


def garbage(line: Line) -> None:
    line.send(b"\x93" * 20)
    line.dropped()


@pytest.mark.parametrize("end", [Line.close, reset, garbage])
def test_an_end_has_the_reason_that_the_loop_would_give(
    end: Callable[[Line], None], served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = why_gone(served, end)
    monkeypatch.setenv(COMPILED, "0")
    with Served(None) as other:
        assert why_gone(other, end) == found
    assert ("Errno" in found) == (end is reset)


def test_answers_that_are_not_read_wait(served: Served) -> None:
    """What the socket does not take at once goes to the transport, in its order."""
    with Line(served.url, receive_buffer=4096) as line:
        line.polled()
        served.call(
            lambda server: (
                link_of(server)
                .transport.get_extra_info("socket")  # type: ignore[union-attr]
                .setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
            )
        )
        for _ in range(8):
            for _ in range(12):
                line.send(line.next())
            last = [line.heard() for _ in range(12)][-1]
        assert last == line_parameters(served)


def line_parameters(served: Served) -> bytes:
    """Return the server's parameters."""
    found: bytes = served.call(lambda server: server.engine.store.current.arena.data.tobytes())
    return found


def test_a_connection_that_is_held_is_not_read_from(served: Served) -> None:
    with Line(served.url) as line, Peer(served.url) as other:
        line.polled()
        served.call(lambda server: link_of(server, 0).hold())
        before = line_parameters(served)
        line.send(line.next())
        for number in range(3):
            other.ask(messages.Ping(number))
        assert line_parameters(served) == before
        served.call(lambda server: link_of(server, 0).release())
        assert line.heard() == line_parameters(served)
        before_count = served.served
        line.exchange()
        assert served.served == before_count + 1


def test_one_that_is_held_while_it_begins_is_read_later(served: Served) -> None:
    with Line(served.url) as line:
        line.polled()

        def again(server: Server) -> None:
            link = link_of(server)
            link.hold()
            server.connections.poller.take(link)
            link.release()

        served.call(again)
        line.exchange()


def test_one_whose_shortcut_is_pythons_is_the_loops(served: Served) -> None:
    """As it is once a worker asks for rows, too: then each message is one for Python."""
    with Line(served.url) as line:
        line.polled()

        def both(server: Server) -> bool:
            (peer,) = server.connections.peers.values()
            rows = SimpleNamespace(exchange=lambda nbytes, now: None, cost=0)
            peer.steady_rows = rows  # type: ignore[assignment]
            server.connections._take_shortcut(peer)
            return peer.link._poller is None

        assert served.call(both)
        before = served.served
        line.exchange()
        assert served.served == before


def test_an_error_ends_one_connection_alone(served: Served) -> None:
    told: list[str] = []
    with Line(served.url) as line, Line(served.url) as other:
        line.polled()
        other.polled()

        def arrange(server: Server) -> None:
            asyncio.get_running_loop().set_exception_handler(
                lambda loop, context: told.append(str(context["exception"]))
            )
            owner, first = server.connections, link_of(server, 0)
            received = owner.link_received

            def fails(link: MessageTransport, *given: Any) -> None:
                if link is first:
                    raise ValueError("a bug")
                received(link, *given)

            owner.link_received = fails  # type: ignore[method-assign]

        served.call(arrange)
        line.send(frame(messages.Ping(1)))
        line.dropped()
        other.exchange()
        assert told == ["a bug"]


def test_one_that_another_ends_is_not_read_from(served: Served) -> None:
    """Its descriptor may be another file's already."""
    with Line(served.url) as line, Line(served.url) as other:
        line.polled()
        other.polled()

        def arrange(server: Server) -> list[int]:
            first, second = link_of(server, 0), link_of(server, 1)
            received, seen = server.connections.link_received, list[int]()

            def ends(link: MessageTransport, *given: Any) -> None:
                seen.append(link.number)
                (second if link is first else first).close()
                received(link, *given)

            server.connections.link_received = ends  # type: ignore[method-assign]
            for each in (line, other):  # both are ready when the loop looks again
                each.send(frame(messages.Ping(1)))
            return seen

        seen = served.call(arrange)
        with Peer(served.url, greet=False) as third:
            third.sock.settimeout(PATIENCE)
        answered = [each for each in (line, other) if heard(each)]
        assert len(answered) == len(seen) == 1


def heard(line: Line) -> bool:
    """Return whether a connection answers, and is not ended."""
    try:
        return isinstance(line.receive(), messages.Pong)
    except ConnectionError:
        return False


def test_one_that_ends_when_all_is_sent_is_read_from_until_then(served: Served) -> None:
    """As the loop would: else it would be ready again at once, and keep the loop busy."""
    with Line(served.url) as line:
        line.polled()

        def ends(server: Server) -> tuple[bool, bool]:
            link, poller = link_of(server), server.connections.poller._poller
            assert poller is not None
            link.pause_writing()  # the peer reads slowly
            link.send([b"\xce", b"\0"])
            link.close()
            line.send(frame(messages.Ping(1))[:-1])
            poller.ready()
            ready = select.select([poller.fd], [], [], 0)[0]
            return bool(ready), link.wire.midway

        assert served.call(ends) == (False, True)


def test_other_messages_come_one_a_turn(served: Served) -> None:
    """How long they take is not known: the loop has its turn between any two."""
    lines = [Line(served.url) for _ in range(4)]
    for line in lines:
        line.polled()

    def arrange(server: Server) -> tuple[int, list[int]]:
        poller, seen = server.connections.poller._poller, list[int]()
        assert poller is not None
        received = server.connections.link_received

        def noted(link: MessageTransport, *given: Any) -> None:
            seen.append(link.number)
            received(link, *given)

        server.connections.link_received = noted  # type: ignore[method-assign]
        for each in lines:
            each.send(frame(messages.Ping(1)))
        counts = []
        for _ in range(4):
            poller.ready()
            counts.append(len(seen))
        assert counts == [1, 2, 3, 4]
        return len(set(seen)), counts

    assert served.call(arrange)[0] == 4
    for line in lines:
        line.close()


def test_without_a_descriptor_the_loop_reads(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def none_left() -> None:
        raise OSError(24, "Too many open files")

    monkeypatch.setattr(core(), "Poller", none_left)
    with Served(None) as served, Line(served.url) as line:
        line.polled()
        line.exchange()
        assert served.served == 0
    assert "compiled code cannot: [Errno 24] Too many open files" in caplog.text


def test_a_table_that_cannot_grow_leaves_a_connection_to_the_loop(served: Served) -> None:
    with Line(served.url) as line:
        line.polled()

        def broken(server: Server) -> None:
            class Full:
                def add(self, *_given: Any) -> int:
                    raise OSError(12, "Cannot allocate memory")

                def remove(self, _number: int) -> None:
                    pass

            link = link_of(server)
            link.give_back()
            link.poll(Full())  # type: ignore[arg-type]

        served.call(broken)
        before = served.served
        line.exchange()
        assert served.served == before


class SlowDisk:
    """Has syncs of files wait, once `block` is called, until `go` is set."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.go, self._sync = threading.Event(), disk._SystemFile.sync
        self._monkeypatch = monkeypatch

    def block(self) -> None:
        def sync(file: Any) -> None:
            assert self.go.wait(PATIENCE)
            self._sync(file)

        self._monkeypatch.setattr(disk._SystemFile, "sync", sync)


def answered(server: Server) -> int:
    """Return the exchanges that compiled code has answered."""
    ways = [peer.steady for peer in server.connections.peers.values()]
    return sum(way.compiled.answered for way in ways if way is not None and way.compiled)


def test_an_answer_waits_for_its_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    slow = SlowDisk(monkeypatch)
    with Served(None, state=tmp_path / "s", acks="durable") as served:
        line = Line(served.url)
        line.polled()
        before = served.call(answered)
        slow.block()
        line.send(line.next())
        eventually(lambda: served.call(answered) == before + 1, "it is applied")
        assert served.call(lambda server: server.run_state.holds)
        assert not select.select([line.sock], [], [], 0)[0], "it was answered before its row"
        slow.go.set()
        assert line.heard()
        assert served.served == 0
        line.close()


def test_rows_are_written_before_their_answers(tmp_path: Path) -> None:
    with Served(None, state=tmp_path / "s", keep_journal=True) as served:
        line = Line(served.url)
        line.polled()
        for count in range(1, 20):
            said = line.exchange()
            rows = [*frames_of(StateFolder(tmp_path / "s"), 1)]  # while the server runs
            assert sum(row.kind == RowKind.STEADY for row in rows) >= count
            assert said == served.call(
                lambda server: server.engine.store.current.arena.data.tobytes()
            )
        assert served.served >= 19
        line.close()


def test_it_is_closed_with_its_server() -> None:
    with Served(None) as served:
        with Line(served.url) as line:
            line.polled()
        poller = served.call(lambda server: server.connections.poller._poller)
        assert poller.fd >= 0
    assert poller.fd == -1
    poller.ready()
    with pytest.raises(ValueError, match="cannot be polled"):
        poller.add(object(), 0, None)
