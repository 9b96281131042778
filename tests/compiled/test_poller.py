"""Each condition of the poller: where one does not hold, the transport has what comes.

`tests/net/test_socket_poller.py` has what peers see of it.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from aiops.compiled.loading import core
from aiops.net.transport import MessageTransport
from aiops.serving.server import Server
from aiops.wire import messages
from aiops.wire.connection import Connection
from tests.net.test_socket_poller import Line, Served, link_of
from tests.peers import frame

pytestmark = pytest.mark.skipif(
    core() is None or core().Poller is None,  # type: ignore[union-attr]
    reason="compiled code reads no sockets here",
)


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    with Served(None) as server:
        yield server


@pytest.fixture
def line(served: Served) -> Iterator[Line]:
    with Line(served.url) as found:
        found.polled()
        yield found


class Turn:
    """What one turn of the poller does with a push of the newest connection."""

    def __init__(self, server: Server, line: Line) -> None:
        self.link, found = link_of(server), server.connections.poller._poller
        assert found is not None
        self.poller, self.line = found, line
        self.asked: list[bool] = []  # calls of the transport, and whether it was to try itself
        self.failures: list[Exception] = []
        self.link.buffer_updated = self._updated  # type: ignore[method-assign]
        self.link.broken = self.failures.append  # type: ignore[method-assign]

    def _updated(self, nbytes: int, short: bool = True) -> None:
        self.asked.append(short)

    def take(self, data: bytes | None = None) -> int:
        """Have bytes come; return the number of pushes that were answered by the poller itself."""
        before = self.poller.served
        self.line.send(self.line.next() if data is None else data)
        self.poller.ready()
        return self.poller.served - before


def turn(
    served: Served, line: Line, arrange: Callable[[MessageTransport, Connection], Any]
) -> tuple[int, list[bool]]:
    """Return the pushes that the poller answers then, and what it asks of the transport."""

    def run(server: Server) -> tuple[int, list[bool]]:
        found = Turn(server, line)
        arrange(found.link, found.link.wire)
        count = found.take()
        assert not found.failures
        found.link.fault(ConnectionError("it is over"))  # type: ignore[arg-type]
        return count, found.asked

    answered: tuple[int, list[bool]] = served.call(run)
    return answered


def test_of_itself_it_answers(served: Served, line: Line) -> None:
    """And counts the bytes of the answer as handed over."""
    before: list[int] = []
    link: list[MessageTransport] = []

    def note(each: MessageTransport, wire: Connection) -> None:
        link.append(each)
        before.extend((each.pumped, wire.traffic.bytes_out))

    assert turn(served, line, note) == (1, [])
    (each,) = link
    sent = each.wire.traffic.bytes_out - before[1]
    assert each.pumped - before[0] == sent > 4096


def set_of(owner: str, name: str, value: Any) -> Callable[[MessageTransport, Connection], None]:
    def arrange(link: MessageTransport, wire: Connection) -> None:
        setattr(link if owner == "link" else wire, name, value)

    return arrange


def another_wire(link: MessageTransport, wire: Connection) -> None:
    link.wire = Connection("server")
    link.wire.expected = wire.expected


def begun(link: MessageTransport, wire: Connection) -> None:
    wire._begin, wire._end = wire._rest + 1, wire._rest + 2


def ends_before_it_begins(link: MessageTransport, wire: Connection) -> None:
    wire._rest = wire._begin = 8
    wire._end = 7


ELSEWHERE: dict[str, Callable[[MessageTransport, Connection], None]] = {
    "no shortcut": set_of("link", "shortcut", None),
    "another shortcut": set_of("link", "shortcut", lambda nbytes: None),
    "another wire": another_wire,
    "a payload in progress": set_of("wire", "missing", 5),
    "nothing expected": set_of("wire", "expected", None),
    "a message under way": set_of("wire", "_message", object()),
    "a message that has begun": begun,
    "an end before the beginning": ends_before_it_begins,
    "a place before the buffer": set_of("wire", "_rest", -1),
}
"""Where these hold, bytes are received where the transport says."""


@pytest.mark.parametrize("name", ELSEWHERE)
def test_bytes_that_go_where_the_transport_says(name: str, served: Served, line: Line) -> None:
    """It tries the short way itself, too."""
    assert turn(served, line, ELSEWHERE[name]) == (0, [True])


def waiting(link: MessageTransport, wire: Connection) -> None:
    link._out.append((memoryview(b"unsent"), None))


UNANSWERED: dict[str, Callable[[MessageTransport, Connection], None]] = {
    "bytes wait to be sent": waiting,
    "the transport is full": set_of("link", "_full", True),
    "it is not to be read from": set_of("link", "_unread", {"held"}),
    "messages wait": set_of("link", "_received", deque([(messages.Ping(1), None)])),
    "it ends": set_of("link", "_closing", True),
}
"""Where these hold, no push is answered at once."""


@pytest.mark.parametrize("name", UNANSWERED)
def test_a_push_that_takes_its_turn(name: str, served: Served, line: Line) -> None:
    """The transport need not try the short way again."""
    assert turn(served, line, UNANSWERED[name]) == (0, [False])


def test_where_nothing_is_unread_the_buffer_is_used_from_its_place_on(
    served: Served, line: Line
) -> None:
    """Messages that were read have left their places."""

    def read(link: MessageTransport, wire: Connection) -> None:
        wire._begin = wire._end = wire._rest + 7

    assert turn(served, line, read) == (1, [])


def test_no_byte_is_written_behind_the_buffer(served: Served, line: Line) -> None:
    """There is no such state; then there is no room, and the loop finds out."""

    def run(server: Server) -> tuple[int, list[bool], bool]:
        found = Turn(server, line)
        wire = found.link.wire
        wire._begin, wire._end = wire._rest, len(wire.head) + 5
        count = found.take()
        polled = found.link._poller is not None
        found.link.fault(ConnectionError("it is over"))  # type: ignore[arg-type]
        return count, found.asked, polled

    assert served.call(run) == (0, [], False)


def test_a_shortcut_of_python_is_the_transports(served: Served, line: Line) -> None:
    def again(link: MessageTransport, wire: Connection) -> None:
        poller = link._poller
        assert poller is not None
        link.shortcut = lambda nbytes: None
        link.poll(poller)

    assert turn(served, line, again) == (0, [True])


class Stub:
    """A transport that says what a test has it say."""

    def __init__(self, *, waiting: int = 0, closing: bool = False) -> None:
        self.waiting, self.closing, self.written = waiting, closing, list[bytes]()

    def is_closing(self) -> bool:
        return self.closing

    def get_write_buffer_size(self) -> int:
        return self.waiting

    def write(self, data: bytes) -> None:
        self.written.append(data)


def with_stub(
    served: Served, line: Line, stub: Stub | None
) -> tuple[int, list[bool], list[Exception]]:
    """Return what a turn does with this transport."""

    def run(server: Server) -> tuple[int, list[bool], list[Exception]]:
        found = Turn(server, line)
        kept, found.link.transport = found.link.transport, stub  # type: ignore[assignment]
        try:
            count = found.take()
        finally:
            found.link.transport = kept
        found.link.fault(ConnectionError("it is over"))  # type: ignore[arg-type]
        return count, found.asked, found.failures

    done: tuple[int, list[bool], list[Exception]] = served.call(run)
    return done


def test_an_answer_is_sent_behind_what_waits(served: Served, line: Line) -> None:
    stub = Stub(waiting=1)
    assert with_stub(served, line, stub) == (1, [], [])
    assert [len(data) > 4096 for data in stub.written] == [True]
    none_waits = Stub()
    with Line(served.url) as other:
        other.polled()
        assert with_stub(served, other, none_waits) == (1, [], [])
    assert none_waits.written == []


@pytest.mark.parametrize("stub", [None, Stub(closing=True)])
def test_a_transport_that_has_ended_is_not_read_from(
    stub: Stub | None, served: Served, line: Line
) -> None:
    """The descriptor may be another file's already."""
    assert with_stub(served, line, stub) == (0, [], [])


def test_a_transport_that_says_nonsense_ends_its_connection(served: Served, line: Line) -> None:
    count, asked, failures = with_stub(served, line, Stub(waiting=-1))
    assert (count, asked) == (0, [])
    assert [str(error) for error in failures] == ["a transport says less than nothing"]


def test_an_interrupt_is_the_loops(served: Served, line: Line) -> None:
    """It ends no connection, and is not kept from what runs the loop."""

    def run(server: Server) -> list[Exception]:
        found = Turn(server, line)

        def interrupted(nbytes: int, short: bool = True) -> None:
            raise KeyboardInterrupt

        found.link.buffer_updated = interrupted  # type: ignore[method-assign]
        with pytest.raises(KeyboardInterrupt):
            found.take(frame(messages.Ping(1)))
        found.link.fault(ConnectionError("it is over"))  # type: ignore[arg-type]
        return found.failures

    assert served.call(run) == []


def test_it_polls_connections_alone_and_none_once_it_is_closed(served: Served, line: Line) -> None:
    def run(server: Server) -> None:
        poller, link = core().Poller(), link_of(server)  # type: ignore[union-attr]
        fd = link.plain_descriptor()
        with pytest.raises(ValueError, match="cannot be polled"):
            poller.add(object(), fd, None)
        with pytest.raises(OverflowError):
            poller.add(link, 1 << 40, None)
        with pytest.raises(OSError, match="Bad file descriptor"):
            poller.add(link, -1, None)
        assert poller.add(link, fd, None) == 0
        with pytest.raises(FileExistsError):
            poller.add(link, fd, None)
        poller.remove(7)
        poller.remove(0)
        assert poller.add(link, fd, None) == 0
        poller.close()
        with pytest.raises(ValueError, match="cannot be polled"):
            poller.add(link, fd, None)

    served.call(run)


class TestSeveral:
    """Connections that are ready at once."""

    @pytest.fixture
    def lines(self, served: Served) -> Iterator[list[Line]]:
        found = [Line(served.url) for _ in range(3)]
        for line in found:
            line.polled()
        yield found
        for line in found:
            line.close()

    @staticmethod
    def counts(server: Server, lines: list[Line]) -> list[int]:
        """Return the pushes that are answered in each turn."""
        poller = server.connections.poller._poller
        assert poller is not None
        before, found = poller.served, list[int]()
        for line in lines:
            line.send(line.next())
        while poller.served < before + len(lines):
            already = poller.served
            poller.ready()
            found.append(poller.served - already)
        return found

    def test_they_are_answered_in_one_turn(self, served: Served, lines: list[Line]) -> None:
        """Unless that takes a millisecond, as it may on a busy machine."""
        for _ in range(200):
            found = served.call(lambda server: self.counts(server, lines))
            for line in lines:
                line.heard()
            if found == [3]:
                return
        pytest.fail(f"the last was {found}")

    def test_a_turn_ends_after_a_millisecond(self, served: Served, lines: list[Line]) -> None:
        def slowly(server: Server) -> list[int]:
            training = server.engine.training
            assert training is not None
            pace = training.updates.pace
            due, pace.due = pace.due, 0.0

            def take_long(now: float, version: int) -> None:
                until = time.perf_counter() + 2e-3
                while time.perf_counter() < until:
                    pass

            pace.note = take_long  # type: ignore[method-assign]
            try:
                return self.counts(server, lines)
            finally:
                del pace.note  # type: ignore[method-assign]
                pace.due = due

        assert served.call(slowly) == [1, 1, 1]

    @pytest.mark.parametrize(("count", "turns"), [(3, [2]), (1, [1, 1])])
    def test_what_comes_meanwhile(
        self, count: int, turns: list[int], served: Served, lines: list[Line]
    ) -> None:
        """It has the same turn, unless the connection is alone: which is not looked at again."""
        for line in lines[count:]:
            line.close()
        first, second = lines[0], lines[count - 1]

        def run(server: Server) -> list[int]:
            poller, training = server.connections.poller._poller, server.engine.training
            assert poller is not None
            assert training is not None
            pace = training.updates.pace
            due, pace.due = pace.due, 0.0

            def send(now: float, version: int) -> None:
                pace.due = due
                second.send(second.next())

            pace.note = send  # type: ignore[method-assign]
            found = list[int]()
            try:
                first.send(first.next())
                while sum(found) < 2:
                    before = poller.served
                    poller.ready()
                    found.append(poller.served - before)
                return found
            finally:
                del pace.note  # type: ignore[method-assign]

        while len(served.call(lambda server: [*server.connections.peers])) > count:
            pass  # until the others are gone
        for _ in range(200):  # a turn may take a millisecond on a busy machine
            found = served.call(run)
            for _answer in range(2 if count == 1 else 1):
                first.heard()
            if count > 1:
                second.heard()
            if found == turns:
                return
        pytest.fail(f"the last was {found}")
