"""Record an engine's events in a file, and replay it.

A journal is one MessagePack stream: a map of the policy, its settings and the options; then one
list per event, followed by the payload as a bin if the event has one. A list begins with the time,
the kind of event, and 1 if the current version had readers then (`Engine.handle`). `replay` feeds
the events to a fresh engine; since engine and kernels are deterministic, it ends with the same
version and the same parameters to the last bit. A journal cut short (a server killed mid-write)
replays up to the cut.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, BinaryIO

import msgpack
import numpy as np

from aiops.algorithms import find
from aiops.engine.engine import Engine
from aiops.engine.events import (
    Applied,
    Apply,
    BudgetTick,
    Effect,
    Event,
    Initialised,
    Joined,
    Left,
    Options,
    Received,
    Reply,
    Stopping,
    Tick,
)
from aiops.engine.receive import PushSink, RawIncoming
from aiops.errors import UsageError, refusal
from aiops.model.arena import Arena, aligned
from aiops.model.layout import Ints
from aiops.model.parts import Part
from aiops.wire import messages
from aiops.wire.decoding import decode
from aiops.wire.encoding import encode
from aiops.wire.messages import Message, Push
from aiops.wire.sinks import Discard, Sink

FORMAT = 2

_KINDS: Mapping[type[Any], str] = {
    Initialised: "initialised",
    Joined: "joined",
    Received: "received",
    Left: "left",
    Tick: "tick",
    Applied: "applied",
    Stopping: "stopping",
    BudgetTick: "paced",
}


class Journal:
    """Writes events, and flushes each to the file before the server handles it.

    So the journal of a server that was killed has all pushes that were acknowledged.

    Parameters
    ----------
    file
        Open for writing bytes; the caller closes it. Its exceptions are passed on: the record then
        ends with the event before.
    policy
        The policy's name, by which `replay` finds it.
    engine
        The engine that handles the events.
    """

    def __init__(self, file: BinaryIO, policy: str, engine: Engine) -> None:
        options, settings = engine.options, engine.algorithm.settings()
        if options.relaxed:
            raise UsageError(
                "relaxed reads cannot be recorded: which versions they mix depends on the moment;"
                " drop --record or --consistency relaxed"
            )
        self._file, self._engine = file, engine
        self._pack = msgpack.Packer().pack
        run = options.deciding()
        head = {"aiops-journal": FORMAT, "policy": policy, "settings": settings, "options": run}
        self._file.write(self._pack(head))
        self._file.flush()

    def note(self, event: Event) -> bool:
        """Write one event; return whether the current version has readers, for `Engine.handle`."""
        leased = self._engine.freeze()
        self._write(event, leased)
        return leased

    def exchanged(
        self,
        time: float,
        leased: bool,
        peer: int,
        numbers: tuple[int, ...],
        gradient: Arena,
        ticket: int,
        sums: Ints,
    ) -> None:
        """Write a steady exchange as the events that it stands for.

        Parameters as of `aiops.engine.steady.ExchangeRecord.exchanged`.
        """
        (id, seq, have, base), nbytes = numbers, len(gradient.data)
        push = Push(id, seq, True, have, (Part(0, nbytes, "raw", nbytes, base),))
        layout = gradient.layout
        cover = layout.covered(push.parts)
        sink = RawIncoming(gradient.data, [nbytes], layout, cover, None, ())
        self._write(Received(time, peer, push, sink), leased)
        self._write(Applied(time, ticket, sums), False)

    def _write(self, event: Event, leased: bool) -> None:
        self._file.write(self._pack(_row(event, leased)))
        payload = _payload(event)
        if payload is not None:
            view = payload.data  # its bin 32 is written here: `pack` would copy the payload
            self._file.write(b"\xc6" + len(view).to_bytes(4, "big"))
            self._file.write(view)
        self._file.flush()

    def end(self, time: float) -> None:
        """Mark the record as complete, with the digest of the parameters if the engine is idle."""
        engine = self._engine
        self._file.write(self._pack([time, "end", digest(engine) if engine.idle else ""]))
        self._file.flush()


def digest(engine: Engine) -> str:
    """Return the SHA-256 of the parameters' bytes, one tensor after the other.

    Without a model it is the digest of no bytes. Each table adds the digest of its rows. The order
    is the arena's, which is the order of the tensors in a model file or a fetch.
    """
    total = hashlib.sha256()
    if engine.store is not None:
        total.update(memoryview(engine.store.current.arena.data))  # type: ignore[arg-type]
    for table in engine.tables:
        total.update(table.digest())
    return total.hexdigest()


def _payload(event: Event) -> np.ndarray[Any, np.dtype[np.uint8]] | None:
    if isinstance(event, Initialised):
        return event.data
    if isinstance(event, Received) and isinstance(event.sink, PushSink):
        return event.sink.buffer if event.sink.fault is None else None
    return None


def _row(event: Event, leased: bool) -> list[Any]:
    """Return an event's list; its last item is True if the payload follows, and only then."""
    head = [event.time, _KINDS[type(event)], int(leased)]
    match event:
        case Initialised():
            return [*head, event.rows, event.tables, True]
        case Joined():
            return [*head, event.peer, encode(event.hello), event.proof]
        case Received():
            kept = _payload(event) is not None
            return [*head, event.peer, encode(event.message), _problem(event.sink), kept]
        case Left():
            return [*head, event.peer]
        case Applied():
            return [*head, event.ticket, event.sums.astype("<i8").tobytes()]
        case BudgetTick():
            counts = event.nbytes, event.second, event.peak, event.backlog, event.busy
            return [*head, *counts, int(event.limited)]
        case Stopping():
            return [*head, int(event.kept)]
    return head


def _problem(sink: Sink | None) -> tuple[str, str, dict[str, Any], bool] | None:
    """Return a sink's fault: its code, text, details, and whether payloads had been taken."""
    fault = getattr(sink, "fault", None)
    if fault is None:
        return None
    return fault.code, str(fault), fault.details, isinstance(sink, PushSink)


@dataclass(frozen=True, slots=True)
class Replayed:
    """The result of a replay: its engine, its number of events, and if the record is complete."""

    engine: Engine
    events: int
    complete: bool


def replay(file: BinaryIO, backend: str = "auto") -> Replayed:
    """Handle a journal's events with a fresh engine, and check its updates against the record.

    Parameters
    ----------
    file
        Open for reading bytes.
    backend
        The kernels to use; all give the same bits.

    Returns
    -------
    Replayed
        The engine at the end of the record; not `complete` if the record was cut short.

    Raises
    ------
    UsageError
        When the file is not a journal of this version, is damaged, or the replay does not follow
        the record (it was made by other code: another algorithm of the same name, say).
    """
    objects = _objects(file)
    engine = _engine(next(objects, None), backend)
    outstanding: Apply | None = None
    events = 0
    for row in objects:
        try:
            if row[1] == "end":
                _check_end(engine, row[2])
                return Replayed(engine, events, True)
            payload = next(objects, None) if row[-1] is True else None
            if row[-1] is True and payload is None:
                break
            event = _event(engine, row, payload)
            if isinstance(event, Applied):
                _check(outstanding, event)
                outstanding = None
            outstanding = _issued(engine.handle(event, bool(row[2]))) or outstanding
        except UsageError as error:
            raise UsageError(f"event {events} of the journal: {error}") from None
        except Exception as error:  # a damaged row may raise anything
            what = f"{type(error).__name__}: {error}"
            raise UsageError(f"event {events} of the journal is damaged ({what})") from error
        events += 1
    return Replayed(engine, events, False)


def _engine(head: Any, backend: str) -> Engine:
    """Return a new engine, made as the journal's first entry describes."""
    if not isinstance(head, dict) or head.get("aiops-journal") != FORMAT:
        raise UsageError("this file is not a journal of aiops, or one of another version")
    try:
        policy, settings, options = head["policy"], head["settings"], head["options"]
        return Engine(find(policy).make(settings), Options(**options, backend=backend))
    except (AttributeError, KeyError, TypeError) as error:
        raise UsageError(f"the journal's first entry is damaged: {error!r}") from None


def _check(outstanding: Apply | None, event: Applied) -> None:
    """Run the update whose `Applied` was recorded, and compare the sums."""
    if outstanding is None or outstanding.ticket != event.ticket:
        raise UsageError("the record applies what the replay did not issue")
    if not np.array_equal(outstanding.run(), event.sums):
        raise UsageError(f"update {event.ticket} gives other numbers than the recorded ones")


def _check_end(engine: Engine, recorded: str) -> None:
    """Compare the replay's final digest with the recorded one."""
    if recorded and digest(engine) != recorded:
        raise UsageError(
            f"the replay's parameters at version {engine.version} are not those that"
            " the recorded run ended with: the record was changed, or made by other code"
        )


def _objects(file: BinaryIO) -> Iterator[Any]:
    """Yield the stream's objects, up to where it ends or was cut."""
    try:
        yield from msgpack.Unpacker(file, use_list=False, max_buffer_size=0, max_bin_len=1 << 32)
    except (ValueError, msgpack.UnpackException) as error:
        raise UsageError(f"the journal is damaged: {error}") from None


def _issued(effects: list[Effect]) -> Apply | None:
    """Return the `Apply` among some effects, if any; release the leases and rows of replies."""
    found = None
    for effect in effects:
        if isinstance(effect, Apply):
            found = effect
        elif isinstance(effect, Reply) and effect.lease is not None:
            effect.lease.release()
        elif isinstance(effect, Reply) and effect.rows is not None:
            effect.rows.free()
    return found


def _event(engine: Engine, row: Any, payload: bytes | None) -> Event:
    """Return the event that a row records."""
    time, kind, _leased, *rest = row
    match kind:
        case "initialised":
            if payload is None:
                raise UsageError("its parameters are missing")
            data = aligned(len(payload))
            data[:] = np.frombuffer(payload, np.uint8)
            return Initialised(time, rest[0], data, rest[1])
        case "joined":
            peer, encoded, proof = rest
            hello = decode(encoded)
            assert isinstance(hello, messages.Hello)
            return Joined(time, peer, hello, proof)
        case "received":
            peer, encoded, problem, _kept = rest
            message = decode(encoded)
            return Received(time, peer, message, _sink(engine, message, problem, payload))
        case "left":
            return Left(time, rest[0])
        case "applied":
            ticket, sums = rest
            return Applied(time, ticket, np.frombuffer(sums, "<i8").astype(np.int64))  # a copy
        case "paced":
            nbytes, second, peak, backlog, busy, limited = rest
            return BudgetTick(time, nbytes, second, peak, backlog, busy, bool(limited))
        case "stopping":
            return Stopping(time, bool(rest[0]))
        case "tick":
            return Tick(time)
    raise UsageError(f"{kind!r} is no event")


def _sink(engine: Engine, message: Message, problem: Any, payload: bytes | None) -> Sink | None:
    """Return the sink of a recorded payload, filled and surveyed as on the server."""
    if problem is not None:
        code, text, details, taken = problem
        if not taken:
            return Discard(refusal(code, text, details))
        faulty = _filled(engine, message)
        faulty.fault = refusal(code, text, details)
        return faulty
    if not getattr(message, "parts", ()):
        return None
    if payload is None:
        return Discard()
    sink = _filled(engine, message)
    sink.view(0, 0)[:] = payload
    sink.filled(0, 0, len(payload))
    return sink


def _filled(engine: Engine, message: Message) -> PushSink:
    """Return the sink that the server took a message's payloads with."""
    for pool in engine.admission.pools:  # on the server it had room; here buffers' history differs
        pool.bound = 1 << 62
    sink = engine.admission.sink_for(message)
    assert isinstance(sink, PushSink), "the record holds a payload that the replay would not take"
    return sink
