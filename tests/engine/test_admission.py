"""What a payload must pass before it may touch anything, and the room that it is given."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any

import ml_dtypes
import msgpack
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from aiops.engine.admission import Admission, OfferSink
from aiops.engine.receive import PushSink
from aiops.errors import BadPush, NotReady, Refused, RemoteProtocolError
from aiops.model.layout import Layout
from aiops.model.parts import Part
from aiops.wire import messages
from aiops.wire.messages import Define, Fetch, Message, Ping, Push
from aiops.wire.sinks import Discard, Sink
from tests.driven import Driven
from tests.model.test_layout import pushes
from tests.rows import each_row
from tests.strategies import DETERMINISTIC, cut
from tests.wire.test_connection import feed, frame

LAYOUT = Layout((("w", "float32", (2, 3)), ("b", "float16", (3,)), ("d", "float64", ())))


def wired(intake: Admission) -> Driven:
    """A server's end of an open connection."""
    wire = Driven("server", intake.sink_for)
    wire.state = "open"
    return wire


def intake_with(layout: Layout | None = LAYOUT, **changes: int) -> Admission:
    intake = Admission(max_model=1 << 20)
    if layout is not None:
        intake.defined(layout)
    for name, value in changes.items():
        setattr(intake.pool, name, value)
    return intake


def whole_push(layout: Layout = LAYOUT, version: int = 0, seq: int = 1) -> Push:
    return Push(1, seq, False, -1, (Part(0, layout.nbytes, "raw", layout.nbytes, version),))


def offer(layout: Layout = LAYOUT, *parts: Part) -> Define:
    rows = tuple((t.name, t.dtype.name, t.shape) for t in layout.tensors)
    return Define(1, rows, parts or (Part(0, layout.nbytes, "raw", layout.nbytes, 0),))


def receive(
    intake: Admission, message: Message, data: bytes, sizes: list[int] | None = None
) -> Sink | None:
    """Have a message arrive, its payloads' bytes in ``data``; return its sink."""
    payloads, at = [], 0
    for part in message.parts:  # type: ignore[attr-defined]
        payloads.append(data[at : at + part.nbytes])
        at += part.nbytes
    assert at == len(data)
    heard = []
    wire = wired(intake)
    for chunk in cut(frame("client", message, *payloads), sizes or []):
        heard += feed(wire, chunk)
    assert [said for said, _sink in heard] == [message]
    return heard[0][1]


def fault_of(sink: Sink | None) -> Refused:
    assert isinstance(sink, Discard | PushSink)
    assert isinstance(sink.fault, Refused)
    return sink.fault


def bad_values(dtype: np.dtype[Any]) -> list[float]:
    """What no model survives, as far as the dtype can hold it."""
    found = [float("nan"), float("inf"), float("-inf")]
    return found if dtype == np.float16 else [*found, 1e18, -1e18, 3e38]


def good_values(dtype: np.dtype[Any]) -> list[float]:
    found = [0.0, -0.0, 1.0, -2.5, 6e-8, float(ml_dtypes.finfo(dtype).tiny)]
    return [*found, 65504.0] if dtype == np.float16 else [*found, 9.9e17, -9.9e17]


class TestSurvey:
    @pytest.mark.slow
    @DETERMINISTIC
    @given(pushes(), st.lists(st.integers(1, 33), max_size=4), st.data())
    def test_a_bad_value_is_found_where_it_is(
        self, push: Any, sizes: list[int], data: st.DataObject
    ) -> None:
        layout, chosen, _versions, parts = push
        rng = np.random.default_rng(data.draw(st.integers(0, 999)))
        arrays = []
        for index in chosen:
            tensor = layout.tensors[index]
            values = rng.choice(good_values(tensor.dtype), tensor.shape)
            arrays.append(np.asarray(values).astype(tensor.dtype))
        where = data.draw(st.none() | st.integers(0, len(chosen) - 1))
        tensor = place = value = None
        if where is not None:
            tensor = layout.tensors[chosen[where]]
            place = data.draw(st.tuples(*(st.integers(0, n - 1) for n in tensor.shape)))
            value = data.draw(st.sampled_from(bad_values(tensor.dtype)))
            arrays[where][place] = value
        payload = b"".join(array.tobytes() for array in arrays)
        intake = intake_with(layout)
        sink = receive(intake, Push(1, 1, False, -1, parts), payload, sizes)
        assert isinstance(sink, PushSink)
        assert sink.take().data.tobytes() == payload
        if tensor is None or place is None:
            assert sink.fault is None
        else:
            fault = fault_of(sink)
            assert isinstance(fault, BadPush)
            assert f"{tensor.name!r} holds " in str(fault)
            assert f" at {list(place)}: every value must be finite" in str(fault)
            assert fault.details["tensor"] == tensor.name
            found = float(fault.details["value"])
            assert np.isnan(found) if np.isnan(value) else found == np.array(value, tensor.dtype)
        sink.free()
        assert intake.pool.out == 0

    @each_row("dtype", ["float64", "float32", "bfloat16", "float16"])
    @each_row("size", [300_000, 4096, 65_537, 1 << 20])
    def test_a_bad_value_is_found_at_the_edges_of_what_is_surveyed(
        self, dtype: str, size: int
    ) -> None:
        """Chunks are surveyed in blocks of 256 KiB; nothing may fall between two of them."""
        layout = Layout((("a", "float64", (3,)), ("w", dtype, (400_000,)), ("z", "float16", ())))
        tensor = layout.tensors[layout.index["w"]]
        item = tensor.dtype.itemsize
        block = (256 << 10) // item
        for index in (0, 1, block - 1, block, block + 1, 399_999):
            data = np.zeros(layout.nbytes, np.uint8)
            view = data[tensor.offset : tensor.offset + tensor.nbytes].view(tensor.dtype)
            view[index] = np.inf
            view[index + 7 :] = np.nan  # the first is what is told
            sink = receive(intake_with(layout), whole_push(layout), data.tobytes(), [size])
            assert str(fault_of(sink)).startswith(f"'w' holds inf at [{index}]:")

    @pytest.mark.parametrize(
        ("dtype", "largest"),
        [("float64", np.nextafter(1e18, 0)), ("float32", np.nextafter(np.float32(1e18), 0))],
    )
    def test_the_bound_is_1e18(self, dtype: str, largest: float) -> None:
        layout = Layout((("w", dtype, (2,)),))
        for value, bad in ((largest, False), (-largest, False), (1e18, True), (-1e18, True)):
            sink = receive(
                intake_with(layout), whole_push(layout), np.array([0, value], dtype).tobytes()
            )
            assert isinstance(sink, PushSink)
            assert (sink.fault is not None) == bad

    def test_an_offered_model_is_surveyed_too(self) -> None:
        data = np.zeros(LAYOUT.nbytes, np.uint8)
        data[8:32].view(np.float32)[4] = np.nan
        sink = receive(intake_with(None), offer(), data.tobytes(), [5])
        assert isinstance(sink, OfferSink)
        assert str(fault_of(sink)).startswith("'w' holds nan at [1, 1]:")

    def test_the_place_in_a_scalar(self) -> None:
        data = np.full(LAYOUT.nbytes, 0xFF, np.uint8)
        sink = receive(intake_with(), whole_push(), data.tobytes())
        assert str(fault_of(sink)).startswith("'d' holds nan at []:")


class TestPushes:
    def test_parts_that_are_not_whole_tensors(self) -> None:
        """The layout's tests have all the ways; here: it is drained, refused, and holds no room."""
        intake = intake_with()
        parts = (Part(0, 8, "raw", 8, 0), Part(8, 20, "raw", 12, 0))
        message = Push(1, 1, False, -1, parts)
        fault = fault_of(receive(intake, message, bytes(20), [3]))
        assert isinstance(fault, BadPush)
        assert "bytes 0 to 20, which is not whole tensors" in str(fault)
        assert intake.pool.out == intake.pool.peak == 0

    @each_row(
        ("parts", "why"),
        [
            ((Part(8, 32, "raw", 24, 0), Part(0, 8, "raw", 8, 0)), "'d' comes twice or out of"),
            ((Part(0, 8, "raw", 8, 0), Part(0, 8, "raw", 8, 0)), "'d' comes twice or out of"),
            ((Part(0, 8, "raw", 9, 0),), "'d': 9 bytes were sent for a range of 8"),
            ((Part(0, 8, "raw", 0, 0),), "'d': 0 bytes were sent for a range of 8"),
            ((Part(0, 99, "raw", 99, 0),), "ends at byte 99, but the model has 38"),
            ((Part(0, 38, "zip", 38, 0),), "codec 'zip' is not known here"),
            ((Part(0, 8, "raw", 8, 0), Part(8, 32, "rae", 24, 0)), "did you mean 'raw'?"),
        ],
    )
    def test_what_does_not_fit_is_read_and_refused(self, parts: Any, why: str) -> None:
        intake = intake_with()
        data = bytes(sum(part.nbytes for part in parts))
        sink = receive(intake, Push(1, 1, False, -1, parts), data, [7])
        assert isinstance(sink, Discard)
        assert why in str(fault_of(sink))
        assert intake.pool.peak == 0

    def test_some_tensors(self) -> None:
        intake = intake_with()
        parts = (Part(0, 8, "raw", 8, 3), Part(32, 38, "raw", 6, 4))
        sink = receive(intake, Push(1, 1, False, -1, parts), bytes(14), [1])
        assert isinstance(sink, PushSink)
        assert [LAYOUT.tensors[i].name for i in sink.cover.tensors] == ["d", "b"]
        assert sink.cover.bases.tolist() == [3, 4]
        assert sink.cover.starts.tolist() == [0, 8]
        assert not sink.cover.whole
        assert intake.pool.out == 14

    def test_before_there_is_a_model(self) -> None:
        sink = receive(intake_with(None), whole_push(), bytes(LAYOUT.nbytes))
        assert isinstance(fault_of(sink), NotReady)

    def test_payloads_of_something_else_are_refused(self) -> None:
        sink = intake_with().sink_for(Fetch(1, -1))
        assert isinstance(fault_of(sink), BadPush)


class TestOffers:
    def test_an_offer_fills_an_arena_of_its_own(self) -> None:
        intake = intake_with(None)
        data = np.random.default_rng(0).integers(0, 60, LAYOUT.nbytes, np.uint8)
        sink = receive(intake, offer(), data.tobytes(), [11])
        assert isinstance(sink, OfferSink)
        assert sink.fault is None
        assert sink.buffer.tobytes() == data.tobytes()
        assert sink.layout.rows == LAYOUT.rows
        assert intake.pool.out == 0

    @each_row(
        ("rows", "parts", "why"),
        [
            (
                (("w", "float32", (1 << 19,)),),
                ((0, 1 << 21),),
                "a model of 2097152 bytes is larger",
            ),
            ((("w", "float32", (2**62, 2**62)),), ((0, 8),), "larger than any memory"),
            ((("w", "int8", (2,)),), ((0, 2),), "dtype 'int8' of 'w' cannot be trained"),
            ((("w", "float32", (2,)), ("w", "float32", (1,))), ((0, 12),), "two tensors"),
            ((("w", "float32", (2,)), ("v", "float32", (1,))), ((0, 8),), "lacks the values"),
            ((("w", "float32", (2,)), ("v", "float32", (1,))), ((0, 16),), "ends at byte 16"),
        ],
    )
    def test_what_makes_no_model_is_refused(self, rows: Any, parts: Any, why: str) -> None:
        intake = intake_with(None)
        message = Define(1, rows, tuple(Part(a, b, "raw", b - a, 0) for a, b in parts))
        sink = intake.sink_for(message)
        assert isinstance(sink, Discard)
        assert why in str(fault_of(sink))
        assert isinstance(intake.sink_for(offer()), OfferSink), "the next offer may come"

    def test_one_is_received_at_a_time(self) -> None:
        intake = intake_with(None)
        first = intake.sink_for(offer())
        assert isinstance(first, OfferSink)
        assert intake.sink_for(offer()) is None
        served = []
        intake.pool.wait(lambda: served.append(intake.sink_for(offer())) or True)
        first.abandoned()
        assert [type(sink) for sink in served] == [OfferSink], (
            "the first was lost, the next may come"
        )
        first.free()
        assert intake.sink_for(offer()) is None, "what is freed twice is freed once"

    def test_later_offers_are_only_compared(self) -> None:
        sink = intake_with().sink_for(offer())
        assert isinstance(sink, Discard)
        assert sink.fault is None


class TestPeersWithoutRoom:
    @pytest.mark.slow
    @DETERMINISTIC
    @given(st.integers(0, 2**32), st.integers(1, 4), st.integers(2, 6))
    def test_all_get_through_whatever_the_order(self, seed: int, room: int, peers: int) -> None:
        rng = random.Random(seed)
        intake = intake_with(bound=room * LAYOUT.nbytes)
        wires = [wired(intake) for _ in range(peers)]
        queued: list[PushSink] = []
        heard = [0] * peers

        def take(index: int, whole: Any) -> None:
            for _message, sink in whole:
                heard[index] += 1
                assert isinstance(sink, PushSink)
                assert sink.take().data.tobytes() == bytes([index]) * LAYOUT.nbytes
                queued.append(sink)

        def resume(index: int) -> Callable[[], bool]:
            def again() -> bool:
                take(index, wires[index].resume())
                return not wires[index].waiting

            return again

        pushes_each = 3
        rest = [
            frame("client", whole_push(), bytes([index]) * LAYOUT.nbytes) * pushes_each
            for index in range(peers)
        ]
        for _ in range(10_000):
            able = [i for i in range(peers) if rest[i] and not wires[i].waiting]
            if able and (not queued or rng.random() < 0.7):
                index = rng.choice(able)
                count = rng.randint(1, 60)
                chunk, rest[index] = rest[index][:count], rest[index][count:]
                take(index, feed(wires[index], chunk))
                if wires[index].waiting:
                    intake.pool.wait(resume(index))
            elif queued:
                queued.pop(0).free()
            else:
                break
        assert heard == [pushes_each] * peers
        assert intake.pool.out == intake.pool.waiting == 0
        assert intake.pool.peak <= room * LAYOUT.nbytes


# ---------------------------------------------------------------- a hostile peer


def seeds() -> list[bytes]:
    """Honest frames, to be spoilt."""
    half = (Part(0, 8, "raw", 8, 0), Part(32, 38, "raw", 6, 1))
    pieces = (Part(0, 8, "raw", 8, 2), Part(8, 20, "raw", 12, 0), Part(20, 38, "raw", 18, 0))
    return [
        frame("client", whole_push(), bytes(38)),
        frame("client", Push(2, 2, True, 5, half), bytes(8), bytes(6)),
        frame("client", Push(3, 3, False, -1, pieces), bytes(8), bytes(12), bytes(18)),
        frame("client", offer(), bytes(38)),
        frame("client", Ping(4)) + frame("client", Fetch(5, 0)) + frame("client", Ping(6)),
        frame(
            "client",
            messages.Hello(0, messages.PROTOCOL, "c", 1, "n", "worker", True, b"n" * 16, "a"),
        ),
    ]


NASTY = (
    -1,
    0,
    1,
    7,
    8,
    9,
    31,
    38,
    39,
    255,
    2**31,
    2**32 - 1,
    2**32,
    2**53 - 1,
    2**53,
    2**62,
    2**63 - 1,
    2**63,
    2**64 - 1,
)
OTHERS: tuple[Any, ...] = (None, True, 0.5, float("nan"), "", "raw", b"", (), ((),), {}, {"a": ()})


def spoil_bytes(rng: random.Random, data: bytes) -> bytes:
    """Change a frame as a line might, or somebody who does not look at what it means."""
    poisoned = bytearray(data)
    for _ in range(rng.randint(1, 4)):
        at = rng.randrange(len(poisoned) or 1)
        what = rng.randrange(6)
        if what == 0 and poisoned:
            poisoned[at % len(poisoned)] = rng.randrange(256)
        elif what == 1 and poisoned:
            poisoned[at % len(poisoned)] ^= 1 << rng.randrange(8)
        elif what == 2:
            del poisoned[at : at + rng.randint(1, 9)]
        elif what == 3:
            poisoned[at:at] = rng.randbytes(rng.randint(1, 9))
        elif what == 4:
            start = rng.randrange(len(poisoned) or 1)
            poisoned[at:at] = poisoned[start : start + rng.randint(1, 30)]
        else:
            del poisoned[at:]
    return bytes(poisoned)


def spoil_value(rng: random.Random, value: Any) -> Any:
    """Change something in a header, and leave it well formed."""
    if isinstance(value, dict) and value and rng.random() < 0.9:
        key = rng.choice(list(value))
        return {**value, key: spoil_value(rng, value[key])}
    if isinstance(value, tuple) and value and rng.random() < 0.9:
        at = rng.randrange(len(value))
        what = rng.randrange(5)
        if what == 0:
            return (*value[:at], *value[at + 1 :])
        if what == 1:
            return (*value[:at], value[at], *value[at:])
        return (*value[:at], spoil_value(rng, value[at]), *value[at + 1 :])
    if isinstance(value, int) and rng.random() < 0.5:
        return max(-(2**63), min(value + rng.choice((-8, -4, -1, 1, 4, 8)), 2**64 - 1))
    return rng.choice(NASTY) if rng.random() < 0.7 else rng.choice(OTHERS)


def spoil_header(rng: random.Random, data: bytes) -> bytes:
    """Change a frame's header as somebody might who knows the wire."""
    length = int.from_bytes(data[1:5], "big")
    fields = msgpack.unpackb(data[5 : 5 + length], use_list=False)
    for _ in range(rng.randint(1, 3)):
        fields = spoil_value(rng, fields)
    header: bytes = msgpack.packb(fields)
    payloads = data[5 + length :]
    if rng.random() < 0.5 and isinstance(fields, dict):  # payloads as the header now wants them
        parts = fields.get("parts", ())
        sizes = [row[3] for row in parts if len(row) == 5] if _rows_of_five(parts) else []
        small = [size for size in sizes if isinstance(size, int) and 0 <= size < 4096]
        payloads = b"".join(b"\xc6" + n.to_bytes(4, "big") + rng.randbytes(n) for n in small)
    return b"\xce" + len(header).to_bytes(4, "big") + header + payloads


def _rows_of_five(parts: Any) -> bool:
    return isinstance(parts, tuple) and all(isinstance(row, tuple) for row in parts)


def arrive(wire: Driven, stream: bytes, size: int) -> Iterator[tuple[Message, Sink | None]]:
    """Have bytes arrive in chunks, and yield what is heard as soon as it is."""
    while stream and not wire.waiting:
        room = wire.next_buffer()
        count = min(len(room), size, len(stream))
        room[:count], stream = stream[:count], stream[count:]
        yield from wire.take(count)


class TestHostilePeer:
    @pytest.mark.slow
    @pytest.mark.parametrize("defined", [True, False])
    def test_whatever_is_sent_is_taken_refused_or_a_broken_rule(self, defined: bool) -> None:
        """50,000 spoilt frames: no other exception, no room kept, nothing larger than allowed."""
        rng = random.Random(f"spoilt frames {defined}")
        corpus = seeds()
        intake = intake_with(LAYOUT if defined else None)
        outcomes = {"taken": 0, "refused": 0, "broken": 0, "midway": 0}
        for turn in range(50_000):
            spoil = spoil_bytes if turn % 2 else spoil_header
            seed = rng.choice(corpus)
            stream = spoil(rng, seed) + rng.choice((b"", seed))
            wire = wired(intake)
            if rng.random() < 0.1:
                wire.state = rng.choice(("start", "greeted", "challenged", "left"))
            try:
                for _message, sink in arrive(wire, stream, rng.randint(1, 200)):
                    fault = getattr(sink, "fault", None)
                    assert fault is None or isinstance(fault, Refused)
                    outcomes["refused" if fault else "taken"] += 1
                    if isinstance(sink, PushSink):
                        sink.free()
            except RemoteProtocolError:
                outcomes["broken"] += 1
            else:
                outcomes["midway"] += wire.midway
            wire.lost()
            assert intake.pool.out == 0
            assert intake.pool.waiting == 0
        assert intake.pool.peak <= max(len(seed) for seed in corpus) * 4
        assert min(outcomes.values()) > 400, f"the frames were not spoilt evenly: {outcomes}"
        honest = offer() if not defined else whole_push()
        assert isinstance(receive(intake, honest, bytes(38)), PushSink), "the next is served"
