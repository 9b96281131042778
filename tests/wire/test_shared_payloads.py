"""Payloads that are lent: places instead of bytes, checked like everything that comes."""

from __future__ import annotations

import struct
import weakref
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from aiops.client.params import Leased, Params
from aiops.client.receive_params import ParameterSink
from aiops.engine.admission import Admission
from aiops.engine.receive import CodedIncoming, RawIncoming
from aiops.errors import RemoteProtocolError
from aiops.model.layout import Bytes, Layout
from aiops.model.parts import LARGEST, Part
from aiops.model.shared_memory import Segment
from aiops.wire.messages import Ack, Fetch, Message, Push, Release, Share
from aiops.wire.shared_payloads import MOST, LentPayload, SharedPayloads
from aiops.wire.sinks import Sink
from aiops.wire.state_machine import Side
from tests.driven import Driven, no_sink
from tests.rows import each_row
from tests.strategies import cut
from tests.wire.test_connection import Landing, feed, opened

COUNT = 1 << 10
LAYOUT = Layout((("a", "float32", (COUNT // 2,)), ("b", "float32", (COUNT // 2,))))
WHOLE = Part(0, LAYOUT.nbytes, "raw", LAYOUT.nbytes, 0)
HALVES = Part(0, 2048, "raw", 2048, 0), Part(2048, 4096, "raw", 2048, 0)


def near(side: Side, sink_for: object = no_sink) -> tuple[Driven, Bytes, list[int]]:
    """A wire, the memory that its other side shows it (segment 1), and what it gives back."""
    wire = opened(side, sink_for)  # type: ignore[arg-type]
    memory = np.arange(8192).astype(np.uint8)
    memory[: LAYOUT.nbytes].view(np.float32)[:] = np.arange(COUNT)
    back: list[int] = []
    wire.shared = SharedPayloads(lambda nbytes: memory[:nbytes])
    wire.shared.give_back = back.append
    return wire, memory, back


def taking(passed: list[Segment]) -> Callable[[Segment], bool]:
    """What passes segments on to a list."""

    def pass_on(segment: Segment) -> bool:
        passed.append(segment)
        return True

    return pass_on


def share(number: int = 1, nbytes: int = 8192) -> bytes:
    return said("client", Share(0, number, nbytes))


def said(sender: Side, message: Message, *payloads: bytes | tuple[int, int]) -> bytes:
    speaker = opened(sender)
    views = [[memoryview(p)] if isinstance(p, bytes) else [] for p in payloads]
    places = [p if isinstance(p, tuple) else None for p in payloads]
    return b"".join(speaker.send(message, views, places))


def push(*parts: Part) -> Push:
    return Push(5, 1, False, -1, parts)


def intake() -> Admission:
    found = Admission(1 << 20, "numpy")
    found.defined(LAYOUT)
    return found


class TestPlaces:
    def test_a_place_is_23_bytes(self) -> None:
        frame = said("client", push(WHOLE), (3, 64))
        assert frame[-23:] == struct.pack(">BIBQBQ", 0xDD, 2, 0xCF, 3, 0xCF, 64)

    def test_it_counts_as_if_its_bytes_had_travelled(self) -> None:
        lent, sent = opened("client"), opened("client")
        lent.send(push(WHOLE), [[]], [(1, 0)])
        sent.send(push(WHOLE), [[memoryview(bytes(4096))]])
        assert lent.traffic.bytes_out == sent.traffic.bytes_out
        wire, _memory, _back = near("server", Landing)
        feed(wire, share())
        before = wire.traffic.bytes_in
        feed(wire, said("client", push(WHOLE), (1, 0)))
        assert wire.traffic.bytes_in - before == sent.traffic.bytes_out
        kind = wire.traffic.kinds_in["push"]
        assert kind.overhead + kind.payload == sent.traffic.bytes_out

    @given(st.lists(st.integers(1, 300), max_size=4), st.booleans())
    def test_places_and_bytes_may_be_mixed_in_any_chunks(
        self, sizes: list[int], first: bool
    ) -> None:
        wire, memory, back = near("server", Landing)
        plain = bytes(range(256)) * 8
        payloads = [plain, (1, 100)] if first else [(1, 100), plain]
        stream = share() + said("client", push(*HALVES), *payloads) + said("client", Fetch(6, -1))
        heard = [pair for chunk in cut(stream, sizes) for pair in feed(wire, chunk)]
        assert [message.kind for message, _sink in heard] == ["share", "push", "fetch"]
        sink = heard[1][1]
        assert isinstance(sink, Landing)
        there = memory[100 : 100 + 2048].tobytes()
        assert list(sink.payloads) == ([plain, there] if first else [there, plain])
        assert back == [5], "what was copied is given back, once, when all of it is there"

    @each_row(
        ("place", "why"),
        [
            ((2, 0), "segment 2, which was never shared"),
            ((0, 0), "segment 0, which was never shared"),
            ((1, 4097), "bytes 4097 to 8193 of segment 1, which has 8192"),
            ((1, (1 << 64) - 1), "of segment 1, which has 8192"),
        ],
    )
    def test_there_is_no_such_place(self, place: tuple[int, int], why: str) -> None:
        wire, _memory, _back = near("server", Landing)
        feed(wire, share())
        with pytest.raises(RemoteProtocolError, match=why):
            feed(wire, said("client", push(WHOLE), place))

    @each_row("at", [4, 5, 14])
    def test_a_place_has_one_form(self, at: int) -> None:
        wire, _memory, _back = near("server", Landing)
        frame = bytearray(share() + said("client", push(WHOLE), (1, 0)))
        frame[-23 + at] ^= 1
        with pytest.raises(RemoteProtocolError, match="a place is two 64-bit integers"):
            feed(wire, bytes(frame))

    def test_nothing_is_lent_over_a_network(self) -> None:
        with pytest.raises(RemoteProtocolError, match="shared within one machine only"):
            feed(opened("server", Landing), share())
        with pytest.raises(RemoteProtocolError, match="0xc6 was expected, not 0xdd"):
            feed(opened("server", Landing), said("client", push(WHOLE), (1, 0)))


class TestShared:
    @each_row("number", [0, MOST + 1, LARGEST])
    def test_numbers_out_of_range(self, number: int) -> None:
        wire, _memory, _back = near("server")
        with pytest.raises(RemoteProtocolError, match=f"share.segment: 1 to {MOST}, not {number}"):
            feed(wire, share(number))

    def test_what_is_no_memory(self) -> None:
        def attach(nbytes: int) -> Bytes:
            raise ValueError("no file descriptor came with it")

        wire = opened("server")
        wire.shared = SharedPayloads(attach)
        with pytest.raises(RemoteProtocolError, match="share: segment 1: no file descriptor came"):
            feed(wire, share())

    def test_a_number_that_is_shown_again_is_another_segment(self) -> None:
        memories = [np.full(16, n, np.uint8) for n in range(2)]
        shared = SharedPayloads(lambda nbytes: memories.pop(0))
        for wanted in (0, 1):
            shared.map(Share(0, 1, 16))
            assert shared.at(1, 0, 16)[0] == wanted

    def test_they_are_let_go_when_the_connection_is_lost(self) -> None:
        wire = opened("server")
        wire.shared = SharedPayloads(lambda nbytes: np.zeros(nbytes, np.uint8))
        feed(wire, share(1) + share(2))
        reading = wire.shared.at(1, 0, 16)
        kept, gone = (weakref.ref(wire.shared._theirs[number]) for number in (1, 2))
        wire.lost()
        assert gone() is None
        assert kept() is not None, "somebody reads in it"
        del reading
        assert kept() is None

    def test_a_segment_is_shown_once(self) -> None:
        wire, passed = opened("client"), []
        wire.shared = SharedPayloads(lambda nbytes: np.zeros(nbytes, np.uint8), taking(passed))
        one, other = Segment(4096), Segment(8192)
        number, first = wire.shared.show(one)
        assert number == 1
        assert passed == [one]
        assert first == Share(0, 1, 4096)
        assert wire.shared.show(one) == (1, None)
        assert wire.shared.show(other)[0] == 2
        assert passed.pop() is other
        del one, passed[:]
        assert wire.shared.show(Segment(4096))[0] == 1, "the number of one that is gone"

    def test_what_the_other_side_does_not_take_has_no_number(self) -> None:
        wire = opened("client")
        wire.shared = SharedPayloads(
            lambda nbytes: np.zeros(nbytes, np.uint8), lambda segment: False
        )
        assert wire.shared.show(Segment(4096)) == (0, None)
        assert wire.traffic.messages_out == 0

    def test_no_more_are_shown_than_the_other_side_takes(self) -> None:
        wire, _memory, _back = near("client")
        assert wire.shared is not None
        kept = [Segment(4096) for _ in range(MOST + 1)]
        numbers = [wire.shared.show(segment)[0] for segment in kept]
        assert numbers == [*range(1, MOST + 1), 0]


class TestAdopted:
    def adopted(self, wire: Driven, *parts: Part, at: int = 0) -> Sink:
        feed(wire, share())
        [(_message, sink)] = feed(wire, said("client", push(*parts), (1, at)))
        assert sink is not None
        return sink

    def test_a_gradient_is_read_where_it_lies(self) -> None:
        found = intake()
        wire, memory, _back = near("server", found.sink_for)
        sink = self.adopted(wire, WHOLE)
        assert isinstance(sink, RawIncoming)
        assert np.shares_memory(sink.take().data, memory)
        assert found.pool.out == 0, "it takes none of the server's memory"
        kept = sink.keep()
        assert not np.shares_memory(kept.data, memory), "what is kept is a copy"

    def test_it_is_looked_over(self) -> None:
        wire, memory, _back = near("server", intake().sink_for)
        memory[:4096].view(np.float32)[700] = np.nan
        sink = self.adopted(wire, WHOLE)
        assert isinstance(sink, RawIncoming)
        assert "'b' holds nan at [188]" in str(sink.fault)

    def test_what_lies_askew_is_copied(self) -> None:
        found = intake()
        wire, memory, _back = near("server", found.sink_for)
        memory[3 : 3 + 4096] = memory[:4096].copy()
        sink = self.adopted(wire, WHOLE, at=3)
        assert isinstance(sink, RawIncoming)
        assert not np.shares_memory(sink.take().data, memory)
        assert np.array_equal(sink.take().data, memory[3 : 3 + 4096])
        assert found.pool.out == 4096

    def test_what_is_coded_is_copied(self) -> None:
        wire, memory, back = near("server", intake().sink_for)
        feed(wire, share())
        half = Part(0, 2048, "fp16", 1024, 0)
        [(_message, sink)] = feed(wire, said("client", push(half), (1, 4096)))
        assert isinstance(sink, CodedIncoming)
        assert not np.shares_memory(sink.take().data, memory)
        assert back == [5]

    def test_what_nobody_wants_is_not_read(self) -> None:
        wire, _memory, back = near("server", intake().sink_for)
        feed(wire, share())
        wrong = Part(0, 4092, "raw", 4092, 0)
        [(_message, sink)] = feed(wire, said("client", push(wrong), (1, 0)))
        assert type(sink).__name__ == "Discard"
        assert back == [5]

    def test_parameters_are_the_servers_own_if_they_may(self) -> None:
        for params in (Params(LAYOUT), Leased(LAYOUT)):
            sinks: list[ParameterSink] = []

            def sink_for(
                message: Message, params: Params = params, sinks: list[ParameterSink] = sinks
            ) -> ParameterSink:
                sinks.append(ParameterSink(params, (WHOLE,), -1, (), "the server"))
                return sinks[-1]

            wire, memory, back = near("client", sink_for)
            feed(wire, said("server", Share(0, 1, 8192)))
            ack = Ack(9, 1, 1, True, 0, 0.0, None, b"", (WHOLE,))
            feed(wire, said("server", ack, (1, 0)))
            sinks[0].finish()
            assert list(params["b"][:2]) == [512, 513]
            lent = isinstance(params, Leased)
            assert np.shares_memory(params.arena.data, memory) == lent
            assert back == ([] if lent else [9]), "what is read on is not given back yet"
            if isinstance(params, Leased):
                params.release()
                assert back == [9]


def test_lent_is_given_back_by_who_took_it() -> None:
    back: list[str] = []
    lent = LentPayload(np.zeros(4096, np.uint8), lambda: back.append("back"))
    assert lent.arena(LAYOUT).views["a"].shape == (512,)
    lent.give_back()
    assert back == ["back"]


def test_release_is_the_clients_to_say() -> None:
    [(message, _sink)] = feed(opened("server"), said("client", Release(4)))
    assert message == Release(4)
