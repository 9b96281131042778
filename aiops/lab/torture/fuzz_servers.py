"""Targets for a fuzzer that are servers, or workers, which a partner sends any bytes.

Each is made for one input, in one memory and without a network: a lead and what its follower says,
amid a push, an update or a collection; a follower and its lead's orders; a standby and its feed; a
worker of a ring and the chunks of the one before it. The wire is real. What is refused by a
documented error is right, and so is what is taken, if parameters stay finite.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence

import numpy as np

from aiops.algorithms import find
from aiops.averaging.ring_allreduce import Flat, Ring
from aiops.client.ring_transport import ChunkLanding
from aiops.codecs import find as find_codec
from aiops.codecs.block_codec import BlockCodec
from aiops.durable.standby import (
    BytesSink,
    StandbyPosition,
    generations_of,
    goes_on,
    longest,
    rows_in,
)
from aiops.engine.events import Applied, Apply, Effect, Lost, Options, Received, Reply, Reported
from aiops.engine.receive import PushSink
from aiops.errors import AiopsError, RemoteProtocolError
from aiops.lab.torture.sharded_engine import LEAD, ShardedEngine
from aiops.model.layout import Layout
from aiops.model.parts import Part
from aiops.model.placement import Placement
from aiops.shards.follower import Follower
from aiops.shards.lead import Lead
from aiops.shards.reports import check_state
from aiops.wire.connection import Connection, Limits, with_sinks
from aiops.wire.messages import Message, Push, Stats
from aiops.wire.ring_messages import RingChunk
from aiops.wire.server_messages import PushArrived, ShardState
from aiops.wire.sinks import Discard, Sink
from aiops.wire.standby_messages import JournalRows, SnapshotPart, StandbyWelcome

_ROWS = (("w", "float32", (40,)), ("b", "float32", (7,)))
_POLICIES: tuple[tuple[str, dict[str, float]], ...] = (
    ("asgd", {}),
    ("fasgd", {}),
    ("asgd", {"clip": 0.5}),
    ("easgd", {}),
)
_RUN, _WORKER, _PIECE = "8c2f", 1, 64


def _fed(
    connection: Connection, data: bytes, sink_for: Callable[[Message], Sink]
) -> Iterator[tuple[Message, Sink | None]]:
    """Yield the messages that a connection receives, a few bytes at a time."""
    while data:
        room = connection.next_buffer()
        count = min(len(room), len(data), _PIECE)
        room[:count] = data[:count]
        data = data[count:]
        yield from with_sinks(connection, connection.received(count), sink_for)


def _engine(policy: int, shards: int) -> ShardedEngine:
    """Return servers with a model and a worker."""
    name, settings = _POLICIES[policy % len(_POLICIES)]
    algorithm = find(name).make(settings)
    options = Options(backend="numpy", shards=shards, shard_bytes=1, run=_RUN)
    made = ShardedEngine(algorithm, options, random.Random(policy))
    made.define(_ROWS, np.zeros(Layout(_ROWS).nbytes, np.uint8))
    made.join(_WORKER)
    return made


def _carried_out(handle: Callable[[Applied], list[Effect]], effects: Sequence[Effect]) -> None:
    """Do the updates among some effects, and those that follow; let go of what is answered."""
    waiting = [*effects]
    while waiting:
        effect = waiting.pop(0)
        if isinstance(effect, Apply):
            waiting += handle(Applied(0.0, effect.ticket, effect.run()))
        elif isinstance(effect, Reply) and effect.lease is not None:
            effect.lease.release()


def _finite(store_data: np.ndarray, what: str) -> None:
    """Check that parameters are finite."""
    values = store_data[: len(store_data) // 4 * 4].view(np.float32)
    if not np.isfinite(values).all():
        raise AssertionError(f"parameters of {what} are not finite")


def of_lead(data: bytes) -> None:
    """Have a lead hear a follower: amid a push, an update, a collection, or statistics."""
    if not data:
        return
    made = _engine(data[0] & 3, 2)
    lead = made.lead
    assert isinstance(lead, Lead)
    _begun(lead, made.layout, data[0] >> 2)
    connection = Connection("client")
    connection.state = "lead open"
    try:
        for message, sink in _fed(connection, data[1:], lambda m: lead.sink_for_follower(1, m)):
            if isinstance(message, ShardState):
                check_state(message)
                if error := lead.readmission.refusal(1, message):
                    raise error
            _carried_out(lead.handle, lead.handle(Reported(0.0, 1, message, sink)))
    except AiopsError as error:
        _carried_out(lead.handle, lead.handle(Lost(0.0, 1, str(error))))
    connection.lost()
    _finite(made.arenas[0], "the lead")


def _begun(lead: Lead, layout: Layout, scene: int) -> None:
    """Have a lead wait for its follower."""
    if scene % 4 == 3:
        lead.handle(Received(0.0, _WORKER, Stats(8), None))
        return
    if scene % 4 == 2:
        lead.collect()
        return
    whole = Part(0, layout.nbytes, "raw", layout.nbytes, lead.engine.version)
    placement = Placement.even(layout, 2, 1)
    pieces = [theirs for theirs, _views in placement.divide((whole,))]
    push = Push(7, 1, False, -1, placement.announced(pieces))
    sink, _orders = lead.sink_for(_WORKER, push)
    assert isinstance(sink, PushSink)
    for number, part in enumerate(pieces[0]):
        sink.view(number, 0)[: part.nbytes] = np.ones(part.nbytes // 4, np.float32).tobytes()
        sink.filled(number, 0, part.nbytes)
    _carried_out(lead.handle, lead.handle(Received(0.0, _WORKER, push, sink)))
    if scene % 4 == 1:
        arrived = Reported(0.0, 1, PushArrived(1, {}, 1.0), None)
        _carried_out(lead.handle, lead.handle(arrived))


def of_follower(data: bytes) -> None:
    """Have a follower take orders: with a model and a client, or with neither yet."""
    if not data:
        return
    made = _engine(data[0] & 3, 2)
    follower: Follower = made.followers[0]
    connection = Connection("server")
    connection.state = "lead open"

    def sink_for(message: Message) -> Sink:
        return follower.sink_for(LEAD, message) or Discard()

    try:
        for message, sink in _fed(connection, data[1:], sink_for):
            _carried_out(follower.handle, follower.handle(Received(0.0, LEAD, message, sink)))
    finally:
        connection.lost()
    if follower.shard is not None:
        _finite(follower.shard.newest.arena.data, "the follower")


def of_standby(data: bytes) -> None:
    """Have a standby hear a primary, from its welcome on."""
    if not data:
        return
    held = StandbyPosition(_RUN, 1, 5) if data[0] & 1 else StandbyPosition()
    connection, row = Connection("client"), 0
    connection.state = "standby greeted" if data[0] & 2 else "standby open"

    def sink_for(message: Message) -> Sink:
        if isinstance(message, JournalRows):
            return BytesSink(message, longest(1 << 20))
        if isinstance(message, SnapshotPart):
            return BytesSink(message, longest(1 << 20), message.parts[0].start)
        raise RemoteProtocolError(f"{message.kind!r} is not for a standby")

    for message, sink in _fed(connection, data[1:], sink_for):
        if isinstance(message, StandbyWelcome):
            goes_on(held, message, "a primary")
            generations_of(message)
            row = message.row
        elif isinstance(message, JournalRows) and isinstance(sink, BytesSink):
            for frame in rows_in(message, sink.data, (_RUN, 0, 1), row):
                row = frame.number
    connection.lost()


def of_ring(data: bytes) -> None:
    """Have a worker average with one that sends chunks, with a codec or without."""
    if not data:
        return
    flat = Flat(Layout(_ROWS))
    flat.data[:] = 0
    codec = find_codec("int8") if data[0] & 1 else None
    assert codec is None or isinstance(codec, BlockCodec)
    size = 2 + (data[0] >> 1) % 3
    ring = Ring((data[0] >> 3) % size, (True,) * size, flat, _PIECE, codec)
    ring.begin()
    connection = Connection("server", Limits(header=4 << 10, parts=1))
    connection.state = "ring open"

    def sink_for(message: Message) -> Sink:
        assert isinstance(message, RingChunk), "the wire's table lets nothing else through"
        return ChunkLanding(ring, message, lambda piece: None, None)

    try:
        for _message in _fed(connection, data[1:], sink_for):
            if ring.done:
                break
    finally:
        connection.lost()
    _finite(flat.data, "a worker of a ring")
