"""The wire: bytes in, messages out, whatever the chunks; limits, order, waiting and losing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgpack
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from aiops.errors import LocalProtocolError, RemoteProtocolError
from aiops.model.parts import Part
from aiops.wire import messages
from aiops.wire.connection import SMALL, Limits
from aiops.wire.decoding import decode
from aiops.wire.encoding import KINDS
from aiops.wire.messages import Error, Fetch, Hello, Message, Ping, Pong, Push, Welcome
from aiops.wire.shared_payloads import SharedPayloads
from aiops.wire.sinks import Discard, Sink
from aiops.wire.state_machine import HANDSHAKE, Side
from tests.driven import Driven, no_sink
from tests.headers import header
from tests.rows import each_row
from tests.strategies import DETERMINISTIC, cut, said_by, with_payloads

HELLO = Hello(0, 1, "c", 1, "w", "worker", False, b"n" * 16, "test")
WELCOME = Welcome(0, 1, "", b"", "asgd", {}, {}, 0, (), 0)
SIDES: tuple[Side, Side] = ("client", "server")
OTHER: dict[Side, Side] = {"client": "server", "server": "client"}


class Landing(Sink):
    """A sink with memory of its own, which checks that it is filled in order.

    ``step`` is the most that it offers at once.
    """

    def __init__(self, message: Message, step: int = 1 << 30) -> None:
        self.memory = [np.zeros(part.nbytes, np.uint8) for part in message.parts]  # type: ignore[attr-defined]
        self.step = step
        self.reached = [0] * len(self.memory)
        self.gone = 0

    def view(self, part: int, offset: int) -> memoryview:
        assert offset == self.reached[part] < len(self.memory[part])
        return self.memory[part].data[offset : offset + self.step]

    def filled(self, part: int, offset: int, nbytes: int) -> None:
        assert offset == self.reached[part]
        self.reached[part] += nbytes

    def abandoned(self) -> None:
        self.gone += 1

    @property
    def payloads(self) -> tuple[bytes, ...]:
        assert self.reached == [len(memory) for memory in self.memory]
        return tuple(memory.tobytes() for memory in self.memory)


def landing() -> tuple[Driven, list[Landing]]:
    """Return a server's open wire, and the list of the sinks it comes to ask for."""
    sinks: list[Landing] = []

    def sink_for(said: Message) -> Sink:
        sinks.append(Landing(said))
        return sinks[-1]

    return opened("server", sink_for), sinks


def feed(wire: Driven, data: bytes) -> list[tuple[Message, Sink | None]]:
    """Have bytes arrive as a driver does it."""
    whole = []
    while data:
        room = wire.next_buffer()
        assert type(room) is memoryview, "asyncio's TLS corrupts data in a bytearray"
        assert len(room) > 0, "asyncio takes an empty buffer for an error"
        assert not room.readonly
        count = min(len(room), len(data))
        room[:count] = data[:count]
        data = data[count:]
        whole += wire.take(count)
    return whole


def opened(
    side: Side, sink_for: Callable[[Message], Sink | None] = no_sink, **limits: int
) -> Driven:
    """A wire that has the handshake behind it, and the counts of none."""
    wire = Driven(side, sink_for, Limits(**limits))
    if side == "server":
        feed(wire, frame("client", HELLO))
        wire.send(WELCOME)
    else:
        wire.send(HELLO)
        feed(wire, frame("server", WELCOME))
    assert wire.state == "open"
    wire.traffic.bytes_in = wire.traffic.bytes_out = 0
    wire.traffic.messages_in = wire.traffic.messages_out = 0
    return wire


def frame(sender: Side, message: Message, *payloads: bytes) -> bytes:
    """The bytes of a message that its sender may say in some state."""
    wire = Driven(sender, no_sink)
    wire.state = next(s for s, says in HANDSHAKE.items() if message.kind in says[sender])
    return b"".join(wire.send(message, [[memoryview(payload)] for payload in payloads]))


def raw_frame(**fields: Any) -> bytes:
    """The bytes of a header that no sender would write."""
    data: bytes = msgpack.packb(fields)
    return b"\xce" + len(data).to_bytes(4, "big") + data


def push(*sizes: int) -> Push:
    """A push with parts of these sizes."""
    edges = np.cumsum((0, *(max(size, 1) for size in sizes))).tolist()
    parts = [Part(a, b, "raw", n, 0) for a, b, n in zip(edges, edges[1:], sizes, strict=False)]
    return Push(1, 1, False, -1, tuple(parts))


def data_for(message: Push) -> list[bytes]:
    """Payloads for it, each byte another than its neighbours."""
    return [bytes((17 * i + k) % 251 for i in range(p.nbytes)) for k, p in enumerate(message.parts)]


conversation = st.sampled_from(SIDES).flatmap(
    lambda sender: st.tuples(
        st.just(sender), st.lists(with_payloads(said_by(sender)), min_size=1, max_size=5)
    )
)
chunk_sizes = st.lists(st.integers(1, 70), max_size=4)


class TestChunks:
    @pytest.mark.slow
    @DETERMINISTIC
    @given(conversation, chunk_sizes, st.integers(1, 9) | st.just(1 << 30))
    def test_any_chunks_give_the_same_messages(
        self, said: Any, sizes: list[int], step: int
    ) -> None:
        sender, exchange = said
        speaker = opened(sender)
        listener = opened(OTHER[sender], lambda message: Landing(message, step))
        stream = b"".join(
            chunk
            for message, payloads in exchange
            for chunk in speaker.send(message, [[memoryview(p)] for p in payloads])
        )
        heard = [pair for chunk in cut(stream, sizes) for pair in feed(listener, chunk)]
        assert [message for message, _sink in heard] == [message for message, _p in exchange]
        for (_message, sink), (_same, payloads) in zip(heard, exchange, strict=True):
            assert (sink.payloads if isinstance(sink, Landing) else ()) == payloads
        assert not listener.midway
        assert speaker.traffic.bytes_out == listener.traffic.bytes_in == len(stream)
        assert speaker.traffic.messages_out == listener.traffic.messages_in == len(exchange)

    @each_row("size", [1, 2, 3, 5, 7, 16_383, 16_384, 16_385, 1 << 20])
    def test_payloads_larger_than_what_is_read_ahead(self, size: int) -> None:
        message = push(40_000, 1, 0, 20_000)
        payloads = data_for(message)
        stream = frame("client", message, *payloads) + frame("client", Ping(2))
        wire = opened("server", Landing)
        heard = [pair for chunk in cut(stream, [size]) for pair in feed(wire, chunk)]
        assert [said for said, _sink in heard] == [message, Ping(2)]
        sink = heard[0][1]
        assert isinstance(sink, Landing)
        assert sink.payloads == tuple(payloads)

    def test_a_payload_is_received_into_the_sinks_own_memory(self) -> None:
        message = push(100_000, 50_000)
        wire, sinks = landing()
        stream = frame("client", message, *data_for(message))
        header_end = len(stream) - 150_000 - 10
        feed(wire, stream[: header_end + 5])
        for part in range(2):
            memory = sinks[0].memory[part]
            room = wire.next_buffer()
            assert np.shares_memory(np.frombuffer(room, np.uint8), memory)
            assert len(room) == wire.missing == len(memory)
            room[:1000] = b"\7" * 1000
            assert wire.take(1000) == []
            assert memory[:1000].tolist() == [7] * 1000, "what the socket wrote is there already"
            assert wire.missing == len(memory) - 1000
            wire.next_buffer()[:] = bytes(len(memory) - 1000)
            whole = wire.take(len(memory) - 1000)
            if part == 0:
                assert whole == []
                feed(wire, stream[header_end + 5 + 100_000 :][:5])
        assert whole == [(message, sinks[0])]
        assert wire.missing == 0

    def test_what_follows_a_payload_is_not_read_into_it(self) -> None:
        message = push(64)
        wire = opened("server", Landing)
        stream = frame("client", message, *data_for(message))
        feed(wire, stream[:-10])
        assert len(wire.next_buffer()) == 10

    def test_room_does_not_stay_large_after_one_long_header(self) -> None:
        wire = opened("client", no_sink)
        usual = len(wire.next_buffer())
        long = raw_frame(kind="report", id=1, report={"a": "x" * 1_000_000})
        assert len(feed(wire, long + frame("server", Pong(2)))) == 2
        assert len(wire.next_buffer()) == usual

    @DETERMINISTIC
    @given(st.integers(0, 40_000), st.integers(0, 40_000), chunk_sizes)
    def test_long_headers_and_what_is_read_ahead_of_them(
        self, first: int, second: int, sizes: list[int]
    ) -> None:
        wire = opened("client", no_sink)
        reports = [messages.Report(i, {"a": "x" * n}) for i, n in enumerate((first, second))]
        stream = b"".join(frame("server", report) for report in reports)
        sizes = [997 * size for size in sizes]
        heard = [message for chunk in cut(stream, sizes) for message, _ in feed(wire, chunk)]
        assert heard == reports


class TestSending:
    def test_a_small_message_is_one_buffer(self) -> None:
        message = push(SMALL - 200)
        buffers = opened("client").send(message, [[memoryview(data_for(message)[0])]])
        assert len(buffers) == 1
        assert type(buffers[0]) is bytes

    def test_a_large_payload_is_sent_from_where_it_lies(self) -> None:
        message = push(SMALL, 3)
        arrays = [np.arange(SMALL, dtype=np.uint8), np.arange(3, dtype=np.uint8)]
        views = [[arrays[0].data[:9], arrays[0].data[9:]], [arrays[1].data]]
        wire = opened("client")
        buffers = wire.send(message, views)
        sent = [b for b in buffers if isinstance(b, memoryview)]
        assert len(sent) == 3
        for view, array in zip(sent, (arrays[0], arrays[0], arrays[1]), strict=True):
            assert np.shares_memory(np.frombuffer(view, np.uint8), array)
        stream = b"".join(buffers)
        assert stream == frame("client", message, *(array.tobytes() for array in arrays))
        assert wire.traffic.bytes_out == len(stream)

    def test_as_many_payloads_as_parts(self) -> None:
        with pytest.raises(ValueError, match="zip"):
            opened("client").send(push(3, 3), [[memoryview(b"abc")]])


class TestLimits:
    def test_a_long_greeting_is_refused_before_it_is_read(self) -> None:
        wire = Driven("server", no_sink)
        room = len(wire.next_buffer())
        with pytest.raises(RemoteProtocolError, match="4097 bytes announced, at most 4096"):
            feed(wire, b"\xce\0\0\x10\x01")
        assert Driven("server", no_sink).limits.greeting == 4096
        assert len(wire.next_buffer()) <= room

    @pytest.mark.parametrize("side", SIDES)
    def test_a_long_header_is_refused_before_it_is_read(self, side: Side) -> None:
        wire = opened(side)
        room = len(wire.next_buffer())
        with pytest.raises(RemoteProtocolError, match="4194305 bytes announced, at most 4194304"):
            feed(wire, b"\xce" + (4194305).to_bytes(4, "big"))
        assert len(wire.next_buffer()) <= room

    def test_the_limits_are_the_longest_that_is_taken(self) -> None:
        hello = frame("client", HELLO)
        length = len(hello) - 5
        assert feed(Driven("server", no_sink, Limits(greeting=length)), hello)
        with pytest.raises(RemoteProtocolError):
            feed(Driven("server", no_sink, Limits(greeting=length - 1)), hello)
        fetch = frame("client", Fetch(1, -1))
        assert feed(opened("server", header=len(fetch) - 5), fetch)
        with pytest.raises(RemoteProtocolError):
            feed(opened("server", header=len(fetch) - 6), fetch)

    def test_the_greeting_limit_holds_until_the_welcome(self) -> None:
        wire = Driven("server", no_sink, Limits(greeting=200))
        feed(wire, frame("client", HELLO))
        wire.send(messages.Challenge(0, b"n" * 16))
        with pytest.raises(RemoteProtocolError, match="at most 200"):
            feed(wire, b"\xce\0\0\0\xc9")

    def test_a_client_takes_a_long_welcome(self) -> None:
        rows = tuple((f"tensor {i}", "float32", (), 4 * i) for i in range(1000))
        welcome = Welcome(0, 1, "", b"", "asgd", {}, {}, 0, rows, 0)
        wire = Driven("client", no_sink)
        wire.send(HELLO)
        assert feed(wire, frame("server", welcome)) == [(welcome, None)]

    def test_too_many_parts_are_refused_before_anybody_makes_room(self) -> None:
        three, four = push(1, 1, 1), push(1, 1, 1, 1)
        assert feed(opened("server", Landing, parts=3), frame("client", three, *data_for(three)))
        with pytest.raises(RemoteProtocolError, match=r"push.parts: 4 parts, at most 3 allowed"):
            feed(opened("server", parts=3), frame("client", four, *data_for(four)))

    @each_row("wrong", [0, 63, 65, 2**32 - 1])
    def test_a_payload_is_as_long_as_its_part_says(self, wrong: int) -> None:
        wire = opened("server", Landing)
        stream = frame("client", push(64), bytes(64))[:-68]
        with pytest.raises(RemoteProtocolError, match=f"{wrong} bytes announced, but 64 in the h"):
            feed(wire, stream + wrong.to_bytes(4, "big"))

    @each_row("mark", [0x00, 0x05, 0xC4, 0xC6, 0xCC, 0xCD, 0xCF, 0x47])
    def test_a_message_begins_with_five_bytes(self, mark: int) -> None:
        with pytest.raises(RemoteProtocolError, match=rf"^message: .* not {mark:#04x};"):
            feed(opened("server"), bytes([mark]) + b"ET / ")

    @each_row("mark", [0xC4, 0xC5, 0xCE, 0xD9, 0x00])
    def test_a_payload_begins_with_five_bytes(self, mark: int) -> None:
        stream = frame("client", push(64), bytes(64))[:-69]
        with pytest.raises(RemoteProtocolError, match=rf"^payload: .* not {mark:#04x};"):
            feed(opened("server", Landing), stream + bytes([mark]) + bytes(4))

    def test_what_a_header_lacks_is_said_with_its_path(self) -> None:
        with pytest.raises(RemoteProtocolError, match=r"^fetch\.have: an integer .*, not 'x'$"):
            feed(opened("server"), raw_frame(kind="fetch", id=1, have="x"))


class TestOrder:
    @each_row("sender", SIDES)
    @each_row("state", HANDSHAKE)
    def test_the_table_holds_at_both_ends(self, state: str, sender: Side) -> None:
        for kind in KINDS:
            self._holds(state, sender, kind)

    def _holds(self, state: str, sender: Side, kind: str) -> None:
        changes = {"parts": (), "fatal": False}
        fields = {name: changes.get(name, value) for name, value in header(kind).items()}
        message = decode(msgpack.packb(fields))
        speaker, listener = Driven(sender, no_sink), Driven(OTHER[sender], no_sink)
        speaker.state = listener.state = state
        listener.shared = SharedPayloads(lambda nbytes: np.zeros(nbytes, np.uint8))
        following = HANDSHAKE[state][sender].get(kind)
        if following is not None:
            assert feed(listener, b"".join(speaker.send(message))) == [(message, None)]
            assert speaker.state == listener.state == following
            return
        with pytest.raises(
            LocalProtocolError, match=f"{sender} may not send '{kind}' .* '{state}'"
        ):
            speaker.send(message)
        with pytest.raises(
            RemoteProtocolError, match=f"{sender} may not send '{kind}' .* '{state}'"
        ):
            feed(listener, raw_frame(**fields))
        assert speaker.state == listener.state == state
        assert speaker.traffic.messages_out == speaker.traffic.bytes_out == 0

    @each_row("state", [s for s in HANDSHAKE if "error" in HANDSHAKE[s]["server"]])
    def test_a_fatal_error_closes_from_any_state(self, state: str) -> None:
        speaker, listener = Driven("server", no_sink), Driven("client", no_sink)
        speaker.state = listener.state = state
        error = Error(1, "refused", "no", {}, True)
        assert feed(listener, b"".join(speaker.send(error))) == [(error, None)]
        assert speaker.state == listener.state == "closed"

    def test_the_table_is_complete(self) -> None:
        said = {kind for says in HANDSHAKE.values() for side in SIDES for kind in says[side]}
        assert said == set(KINDS)
        reached = {s for says in HANDSHAKE.values() for side in SIDES for s in says[side].values()}
        assert reached | {"start"} == set(HANDSHAKE)
        assert HANDSHAKE["closed"] == {"client": {}, "server": {}}

    def test_nothing_may_follow_a_greeting_before_it_is_answered(self) -> None:
        wire = Driven("server", no_sink)
        with pytest.raises(RemoteProtocolError, match="'fetch' when 'greeted'"):
            feed(wire, frame("client", HELLO) + frame("client", Fetch(1, -1)))


class Doors:
    """A place that is full the first few times it is asked."""

    def __init__(self, full: int) -> None:
        self.full = full
        self.asked = 0

    def sink_for(self, message: Message) -> Sink | None:
        self.asked += 1
        if self.full:
            self.full -= 1
            return None
        return Landing(message)


class TestWaiting:
    @DETERMINISTIC
    @given(
        st.lists(with_payloads(said_by("client")), min_size=1, max_size=5),
        chunk_sizes,
        st.integers(1, 4),
    )
    def test_no_room_for_a_while_changes_nothing(
        self, exchange: Any, sizes: list[int], full: int
    ) -> None:
        stream = b"".join(frame("client", m, *payloads) for m, payloads in exchange)
        doors = Doors(full)
        wire = opened("server", doors.sink_for)
        heard, waited = [], 0
        for chunk in cut(stream, sizes):
            while wire.waiting:  # the driver reads no more until there is room
                waited += 1
                assert wire.midway
                assert wire.missing == 0
                heard += wire.resume()
            heard += feed(wire, chunk)
        while wire.waiting:
            waited += 1
            heard += wire.resume()
        assert [message for message, _sink in heard] == [message for message, _p in exchange]
        for (_message, sink), (_same, payloads) in zip(heard, exchange, strict=True):
            assert (sink.payloads if isinstance(sink, Landing) else ()) == payloads
        with_parts = sum(bool(payloads) for _message, payloads in exchange)
        assert waited == (full if with_parts else 0)
        assert doors.asked == waited + with_parts
        assert wire.traffic.bytes_in == len(stream)

    def test_bytes_that_were_under_way_are_kept(self) -> None:
        message = push(64)
        payload = data_for(message)[0]
        stream = frame("client", message, payload) + frame("client", Ping(2))
        wire = opened("server", Doors(1).sink_for)
        assert feed(wire, stream[:-80]) == []
        assert wire.waiting
        assert feed(wire, stream[-80:]) == [], "nothing is looked at until there is room"
        heard = wire.resume()
        assert [said for said, _sink in heard] == [message, Ping(2)]
        assert isinstance(heard[0][1], Landing)
        assert heard[0][1].payloads == (payload,)

    def test_one_wait_may_follow_another(self) -> None:
        message = push(8)
        stream = frame("client", message, *data_for(message))
        turns = iter([None, Landing(message), None, Landing(message)])
        wire = opened("server", lambda said: next(turns))
        assert feed(wire, stream * 2) == []
        assert [said for said, _sink in wire.resume()] == [message]
        assert wire.waiting
        assert [said for said, _sink in wire.resume()] == [message]
        assert not wire.waiting

    def test_lost_while_waiting(self) -> None:
        message = push(8)
        wire = opened("server", Doors(1).sink_for)
        feed(wire, frame("client", message, *data_for(message)))
        wire.lost()
        assert not wire.waiting
        assert not wire.midway
        assert wire.resume() == []


class TestLosing:
    def test_a_half_filled_sink_is_let_go_once(self) -> None:
        message = push(64)
        sink = Landing(message)
        wire = opened("server", lambda said: sink)
        feed(wire, frame("client", message, *data_for(message))[:-1])
        wire.lost()
        wire.lost()
        assert sink.gone == 1
        assert wire.state == "closed"
        assert not wire.midway

    def test_a_delivered_sink_is_its_receivers(self) -> None:
        message = push(64)
        sink = Landing(message)
        wire = opened("server", lambda said: sink)
        assert feed(wire, frame("client", message, *data_for(message))) == [(message, sink)]
        wire.lost()
        assert sink.gone == 0

    def test_sinks_that_were_filled_before_a_fault_are_let_go(self) -> None:
        """The fault comes with the bytes that completed them: nobody else will hear of them."""
        message = push(64)
        wire, sinks = landing()
        stream = frame("client", message, *data_for(message))
        with pytest.raises(RemoteProtocolError):
            feed(wire, stream + stream + b"GET / HTTP/1.1")
        wire.lost()
        assert [sink.gone for sink in sinks] == [1, 1]

    def test_nothing_is_heard_after_the_end(self) -> None:
        wire = opened("server")
        feed(wire, frame("client", Ping(1))[:7])
        assert wire.midway
        wire.lost()
        with pytest.raises(RemoteProtocolError, match="when 'closed'"):
            feed(wire, frame("client", Ping(2)))

    def test_discarding(self) -> None:
        """A payload nobody wants is read to its end, however long, in memory that all share."""
        message = push(300_000, 7)
        fault = ValueError("unwanted")
        wire = opened("server", lambda said: Discard(fault))
        stream = frame("client", message, *data_for(message)) + frame("client", Ping(2))
        heard = [pair for chunk in cut(stream, [65_536]) for pair in feed(wire, chunk)]
        assert [said for said, _sink in heard] == [message, Ping(2)]
        assert isinstance(heard[0][1], Discard)
        assert heard[0][1].fault is fault
        wire.lost()
