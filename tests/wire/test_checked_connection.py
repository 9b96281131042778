"""A connection with checksums: the same messages in any pieces, and no flipped bit is accepted."""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator

import numpy as np
import pytest

from aiops.errors import Corrupted, RemoteProtocolError, UsageError
from aiops.model.parts import Part
from aiops.wire import checked_connection
from aiops.wire.checked_connection import PREAMBLE, CheckedConnection, checked_instead
from aiops.wire.connection import Connection, Messages, with_sinks
from aiops.wire.messages import Ack, Fetch, Hello, Message, Ping, Push, Welcome
from tests.wire.test_connection import Landing

HELLO = Hello(0, 1, "c", 1, "w", "worker", False, b"n" * 16, "test")
WELCOME = Welcome(0, 1, "", b"", "asgd", {}, {}, 0, (), 0)
LARGE = 100_000


@pytest.fixture(autouse=True)
def known_anew() -> Iterator[None]:
    yield
    checked_connection._maker.cache_clear()


def without_xxhash(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "xxhash", None)
    checked_connection._maker.cache_clear()


def payload(nbytes: int, seed: int = 0) -> bytes:
    return random.Random(seed).randbytes(nbytes)


def pair() -> tuple[CheckedConnection, CheckedConnection]:
    return CheckedConnection("client"), CheckedConnection("server")


def joined(buffers: list[bytes | memoryview]) -> bytes:
    return b"".join(map(bytes, buffers))


def feed(wire: Connection, data: bytes, piece: int = 1 << 20) -> Messages:
    found: Messages = []
    while data:
        room = wire.next_buffer()
        count = min(len(room), len(data), piece)
        room[:count] = data[:count]
        data = data[count:]
        found += with_sinks(wire, wire.received(count), Landing)
    return found


def said(found: Messages) -> list[tuple[Message, tuple[bytes, ...]]]:
    return [
        (message, sink.payloads if isinstance(sink, Landing) else ()) for message, sink in found
    ]


def conversation(large: int) -> list[tuple[Message, tuple[bytes, ...]]]:
    """What a client says once it is welcomed."""
    parts = Part(0, large, "raw", large, 0), Part(large, large + 8, "raw", 8, 0)
    return [
        (Ping(1), ()),
        (Push(2, 1, False, -1, (Part(0, 40, "raw", 40, 0),)), (payload(40),)),
        (Push(3, 2, False, -1, parts), (payload(large, 1), payload(8, 2))),
        (Ping(4), ()),
    ]


def opened() -> tuple[CheckedConnection, CheckedConnection, bytes]:
    """Return both ends after the handshake, and the greeting's bytes."""
    client, server = pair()
    hello = joined(client.send(HELLO))
    assert [message for message, _sink in feed(server, hello)] == [HELLO]
    assert [message for message, _sink in feed(client, joined(server.send(WELCOME)))] == [WELCOME]
    return client, server, hello


@pytest.mark.parametrize("piece", [1, 7, 100, 1 << 20])
def test_the_same_messages_in_any_pieces(piece: int) -> None:
    client, server, _hello = opened()
    told = conversation(1000 if piece < 100 else LARGE)
    data = b"".join(
        joined(client.send(message, [[memoryview(each)] for each in payloads]))
        for message, payloads in told
    )
    assert said(feed(server, data, piece)) == told
    assert not server.midway
    for end, other in ((client, server), (server, client)):
        assert end.traffic.bytes_out == other.traffic.bytes_in
        counted = sum(kind.overhead + kind.payload for kind in other.traffic.kinds_in.values())
        assert counted == other.traffic.bytes_in
        counted = sum(kind.overhead + kind.payload for kind in end.traffic.kinds_out.values())
        assert counted == end.traffic.bytes_out


def test_no_flipped_bit_is_accepted() -> None:
    """Each bit of a greeting and of a push: the connection ends before the message is returned."""
    told = Push(2, 1, False, -1, (Part(0, 40, "raw", 40, 0),))
    for bit in range(8 * len(joined(pair()[0].send(HELLO)))):
        client, server = pair()
        data = bytearray(joined(client.send(HELLO)))
        data[bit // 8] ^= 1 << bit % 8
        with pytest.raises(Corrupted):
            feed(server, bytes(data))
    client, _server, _hello = opened()
    data = bytearray(joined(client.send(told, [[memoryview(payload(40))]])))
    for bit in range(8 * len(data)):
        _client, server, _hello = opened()
        data[bit // 8] ^= 1 << bit % 8
        with pytest.raises(Corrupted):
            feed(server, bytes(data))
        data[bit // 8] ^= 1 << bit % 8


@pytest.mark.parametrize("how", ["repeated", "left out", "in another order"])
def test_messages_that_were_moved_are_noticed(how: str) -> None:
    client, server, _hello = opened()
    one, two = joined(client.send(Ping(1))), joined(client.send(Fetch(2, -1)))
    data = {"repeated": one + one, "left out": two, "in another order": two + one}[how]
    with pytest.raises(Corrupted):
        feed(server, data)


def test_a_large_payload_is_not_copied() -> None:
    client, _server, _hello = opened()
    large = np.zeros(LARGE, np.uint8)
    sent = client.send(Push(1, 1, False, -1, (Part(0, LARGE, "raw", LARGE, 0),)), [[large.data]])
    assert any(isinstance(each, memoryview) and each.obj is large for each in sent)


def test_a_server_turns_to_checks_when_the_first_byte_asks_for_them() -> None:
    plain, client = Connection("server"), CheckedConnection("client")
    hello = joined(client.send(HELLO))
    room = plain.next_buffer()
    room[:20] = hello[:20]
    with pytest.raises(RemoteProtocolError):
        plain.received(20)
    checked = checked_instead(plain)
    assert checked is not None
    assert checked.received(20) == []
    assert [message for message, _sink in feed(checked, hello[20:])] == [HELLO]
    assert checked.traffic.bytes_in == len(hello)
    assert checked_instead(checked) is None


@pytest.mark.parametrize("first", [b"\xce", b"\x00", PREAMBLE[:1]])
def test_no_other_first_byte_does(first: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    if first == PREAMBLE[:1]:  # then it is the package that is missing
        without_xxhash(monkeypatch)
    plain = Connection("server")
    plain.next_buffer()[:9] = first + bytes(8)
    with pytest.raises(RemoteProtocolError):
        plain.received(9)
    assert checked_instead(plain) is None


def test_what_to_do_without_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    without_xxhash(monkeypatch)
    with pytest.raises(UsageError, match=r"pip install 'aiops-ps\[checksums\]'"):
        checked_connection.xxh3(0)


def test_limits_hold() -> None:
    client, server = pair()
    long = Hello(0, 1, "c", 1, "w" * 4000, "worker", False, b"n" * 16, "x" * 4000)
    with pytest.raises(RemoteProtocolError, match="at most 4096"):
        feed(server, joined(client.send(long)))


def test_an_answer_comes_with_checks_too() -> None:
    client, server, _hello = opened()
    part = Part(0, LARGE, "raw", LARGE, 0)
    values = payload(LARGE)
    ack = Ack(1, 1, 0, True, 1, 0.0, None, b"", (part,))
    data = joined(server.send(ack, [[memoryview(values)]]))
    assert said(feed(client, data, 5000)) == [(ack, (values,))]
