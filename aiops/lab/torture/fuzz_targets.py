"""The parsers of what comes from elsewhere, each as a function of any bytes, for a fuzzer.

A target returns if the bytes are right, or are refused by a documented error (`AiopsError`). It
raises anything else if they broke the parser: that is a finding. Where a checksum stands before a
parser, the target makes it right, so that a fuzzer gets past it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from typing import TypeAlias

import numpy as np

from aiops.client.session import Session
from aiops.codecs import BUILT_IN, codec_named
from aiops.errors import AiopsError
from aiops.lab.torture import fuzz_servers
from aiops.state.blocks import GENERATION, IDENTITY, SNAPSHOT, pack_block, reader
from aiops.state.directory import GenerationFile, StateIdentity
from aiops.state.frames import SegmentHead, SegmentScan
from aiops.state.plain import unpack
from aiops.state.row_kinds import RowKind, row_fields
from aiops.state.snapshot_file import SnapshotFile
from aiops.wire.checked_connection import PREAMBLE, CheckedConnection
from aiops.wire.connection import Connection, with_sinks
from aiops.wire.decoding import decode
from aiops.wire.handshake import Admitted, ServerHandshake
from aiops.wire.messages import Message
from aiops.wire.sinks import Discard
from aiops.wire.state_machine import HANDSHAKE, Side
from aiops.wire.token_keys import only

Target: TypeAlias = Callable[[bytes], None]

_STATES = tuple(sorted(HANDSHAKE))
_SHAPES = ((), (0,), (1,), (40,), (300,), (20, 17), (1030,))
_CODECS = tuple(sorted(BUILT_IN))
_GUARD = 64
_TOKEN = "honest"
_SALT = 437918234  # that of the golden state


def _wire(side: Side, data: bytes) -> None:
    """Have one side of a connection, in any state, read bytes in pieces."""
    if len(data) < 2:
        return
    connection = Connection(side)
    connection.state = _STATES[data[0] % len(_STATES)]
    _feed(connection, data[2:], 1 + data[1], lambda message: None)
    connection.lost()


def _feed(connection: Connection, data: bytes, piece: int, each: Callable[[Message], None]) -> None:
    """Have a connection receive bytes, a few at a time, and hand each message on."""
    while data:
        room = connection.next_buffer()
        count = min(len(room), len(data), piece * piece)
        room[:count] = data[:count]
        data = data[count:]
        received = with_sinks(connection, connection.received(count), lambda message: Discard())
        for message, _sink in received:
            each(message)


def _checked(data: bytes) -> None:
    """Have a server read bytes behind those that ask for checksums."""
    connection = CheckedConnection("server")
    _feed(connection, PREAMBLE + data, 255, lambda message: None)
    connection.lost()


def _handshake(data: bytes) -> None:
    """Have a server with a token greet a client."""
    connection = Connection("server")
    handshake = ServerHandshake(only(_TOKEN), bytes(16))

    def answer(message: Message) -> None:
        if handshake.admitted is None:
            found = handshake.receive(message)
            if isinstance(found, Admitted):
                raise AssertionError("it was admitted without the token")
            connection.send(found)

    _feed(connection, data, 255, answer)


def _client(data: bytes) -> None:
    """Have a client connect to a server that says these bytes."""
    if not data:
        return
    token = _TOKEN if data[0] % 2 else None
    session = Session(
        "aiops://fuzzed",
        client="fuzz",
        name="fuzz",
        role="worker" if data[0] & 2 else "observer",
        token=token,
        nonce=lambda: bytes(16),
        pongs=True,
    )
    session.connected()
    rest = data[1:]
    try:
        while rest:
            room = session.next_buffer()
            count = min(len(room), len(rest))
            room[:count] = rest[:count]
            rest = rest[count:]
            session.received(count)
            session.outgoing()
    finally:
        session.lost()
    if token is not None and session.ready:
        raise AssertionError("it took a server for one that knows the token")


def _codec(data: bytes) -> None:
    """Check a payload; what passes is decoded within bounds, to finite values."""
    if len(data) < 2:
        return
    kind = codec_named(_CODECS[data[0] % len(_CODECS)])
    assert kind is not None
    shape, payload = _SHAPES[data[1] % len(_SHAPES)], np.frombuffer(data, np.uint8)[2:]
    if kind.check(payload, shape, "numpy") is not None:
        return
    size = int(np.prod(shape, dtype=np.int64))
    room = np.full(size + 2 * _GUARD, 7.25, np.float32)
    kind.decode(payload, shape, room[_GUARD : _GUARD + size], backend="numpy")
    if (room[:_GUARD] != 7.25).any() or (room[_GUARD + size :] != 7.25).any():
        raise AssertionError("it wrote beyond the tensor")
    if not (np.abs(room) < 1e18).all():
        raise AssertionError("a value is not finite, or too large")


def _plain(data: bytes) -> None:
    """Read a block of plain values as each file of a state that is one."""
    value = unpack(data, "fuzzed")
    for magic, file in ((IDENTITY, StateIdentity), (GENERATION, GenerationFile)):
        with contextlib.suppress(AiopsError):
            file.unpack(pack_block(magic, value))
    block = pack_block(SNAPSHOT, value)
    SnapshotFile(reader(block), len(block), "fuzzed")


def _row(data: bytes) -> None:
    """Read a row of a journal."""
    if data:
        row_fields(data[0] % (1 + max(RowKind)), data[1:], "fuzzed")


def _segment(data: bytes) -> None:
    """Read the frames of a journal's segment, behind a head that is right."""
    head = SegmentHead(1, 1, "8c2f", _SALT, 0, 1).pack()
    for frame in SegmentScan(head + data, "fuzzed", first=1, until=None):
        row_fields(frame.kind, frame.row, "fuzzed")


def _snapshot(data: bytes) -> None:
    """Read a snapshot."""
    SnapshotFile(reader(data), len(data), "fuzzed").verify()


def _refusing(target: Target) -> Target:
    """Return a target that takes documented errors for an answer."""

    def refusing(data: bytes) -> None:
        with contextlib.suppress(AiopsError):
            target(data)

    return refusing


TARGETS: Mapping[str, Target] = {
    "server": _refusing(lambda data: _wire("server", data)),
    "client": _refusing(lambda data: _wire("client", data)),
    "checked": _refusing(_checked),
    "header": _refusing(lambda data: (decode(data), None)[1]),
    "handshake": _refusing(_handshake),
    "session": _refusing(_client),
    "codec": _codec,
    "plain": _refusing(_plain),
    "row": _refusing(_row),
    "segment": _refusing(_segment),
    "snapshot": _refusing(_snapshot),
    "lead": _refusing(fuzz_servers.of_lead),
    "follower": _refusing(fuzz_servers.of_follower),
    "standby": _refusing(fuzz_servers.of_standby),
    "ring": _refusing(fuzz_servers.of_ring),
}
"""By name."""
