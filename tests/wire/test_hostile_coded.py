"""Coded pushes that lie: a clear error, a connection that lives, and a model that is untouched."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from aiops.client import Client, Worker
from aiops.client.params import Params
from aiops.codecs import find
from aiops.codecs.choice import CodecChoice
from aiops.model.layout import Array, Layout
from aiops.model.parts import LARGEST, Part
from aiops.wire import messages
from aiops.wire.messages import Ack, Error, Fetch, Pong, Push, Reapply
from tests.inline import Inline
from tests.peers import Peer
from tests.rows import each_row
from tests.support import ServerThread

START: dict[str, Array] = {
    "w": np.zeros((40, 25), np.float32),
    "h": np.zeros(600, np.float16),
    "b": np.zeros(3, np.float32),
}
LAYOUT = Layout.of(START)
CODECS = (
    "bf16",
    "fp16",
    "int8",
    "topk:0.05",
    "topk:fraction=0.05,values=bf16",
    "onebit",
    "lowrank:2",
)


def part(name: str, codec: str, nbytes: int, **changes: Any) -> Part:
    """A part of one tensor."""
    tensor = LAYOUT.tensors[LAYOUT.index[name]]
    described = Part(tensor.offset, tensor.offset + tensor.nbytes, codec, nbytes, 0)
    return described._replace(**changes)


def push(*parts: Part, seq: int = 1) -> Push:
    return Push(seq, seq, False, -1, parts)


def coded(spec: str, name: str = "w", value: float = 1.0) -> bytes:
    """An honest payload."""
    shape = START[name].shape
    values = np.random.default_rng(0).normal(size=int(np.prod(shape))).astype(np.float32) * value
    encoder = find(spec).encoder(shape, feedback=False, backend="numpy")
    return bytes(encoder.encode(values.astype(np.float32)))


def float32s(value: float, count: int = 1) -> bytes:
    return struct.pack("<f", value) * count


def topk(entries: int, values: bytes, gaps: bytes, form: int = 1) -> bytes:
    """A payload of top-k with bf16 values, or (form 0) int8."""
    return struct.pack("<II", entries, form) + values + gaps


ONE = b"\x80\x3f"  # in bf16
FORMS = {"int8": 0, "bf16": 1}


def hostile() -> dict[str, tuple[Push, tuple[bytes, ...]]]:
    """Pushes that must be refused, by what is wrong with them."""
    found: dict[str, tuple[Push, tuple[bytes, ...]]] = {}

    def add(what: str, codec: str, payload: bytes, name: str = "w") -> None:
        found[what] = (push(part(name, codec, len(payload))), (payload,))

    for spec in CODECS:
        codec, payload = find(spec).name, coded(spec)
        add(f"{spec} cut short", codec, payload[:-1])
        add(f"{spec} cut to its head", codec, payload[:8])
        add(f"{spec} one byte", codec, b"\0")
        add(f"{spec} nothing", codec, b"")
        if len(payload) < 4000:
            add(f"{spec} with something behind", codec, payload + b"\0")
    for spec in ("bf16", "fp16"):
        nan = b"\xc0\x7f" if spec == "bf16" else b"\x00\x7e"
        add(f"{spec} nan", spec, coded(spec)[:-2] + nan)
    for value in (float("nan"), float("inf"), -1.0, 1e30):
        for spec in ("int8", "onebit"):
            add(f"{spec} scale {value}", spec, float32s(value) + coded(spec)[4:])
    add("topk index out of range", "topk", topk(2, ONE * 2, b"\x00\xe7\x07"))
    add("topk endless gap", "topk", topk(1, ONE, b"\xff" * 5 + b"\x00"))
    add("topk gap of nothing", "topk", topk(1, ONE, b"\xff"))
    add("topk more entries than elements", "topk", topk(1001, ONE * 1001, b"\x00" * 1001))
    add("topk four billion entries", "topk", topk(0xFFFFFFFF, ONE, b"\x00"))
    add("topk unknown form", "topk", topk(1, ONE, b"\x00", form=7))
    add("topk nan", "topk", topk(1, b"\xc0\x7f", b"\x00"))
    add("lowrank rank of a billion", "lowrank", struct.pack("<II", 1 << 30, 0) + bytes(100))
    add("unknown codec", "zip", bytes(100))
    add("codec of no name", "", bytes(100))
    whole = len(coded("int8"))
    found["half a tensor"] = (
        push(part("w", "int8", whole)._replace(stop=2000)),
        (coded("int8"),),
    )
    found["two tensors in one"] = (
        push(Part(0, LAYOUT.nbytes, "int8", whole, 0)),
        (coded("int8"),),
    )
    found["beyond the model"] = (
        push(part("w", "int8", whole, start=LAYOUT.nbytes, stop=LAYOUT.nbytes + 4000)),
        (coded("int8"),),
    )
    found["the same tensor twice"] = (
        push(part("w", "int8", whole), part("w", "int8", whole)),
        (coded("int8"),) * 2,
    )
    found["longer than raw"] = (push(part("w", "topk", 4001)), (bytes(4001),))
    found["from the future"] = (
        push(part("w", "int8", whole, version=1 << 40)),
        (coded("int8"),),
    )
    nan = np.full(3, np.nan, np.float32).tobytes()
    found["a raw nan beside a good one"] = (
        push(*sorted((part("w", "int8", whole), part("b", "raw", 12)))),
        _in_order(("w", coded("int8")), ("b", nan)),
    )
    found["a bad one behind a good one"] = (
        push(*sorted((part("w", "int8", whole), part("h", "int8", 5)))),
        _in_order(("w", coded("int8")), ("h", bytes(5))),
    )
    return found


def _in_order(*payloads: tuple[str, bytes]) -> tuple[bytes, ...]:
    ordered = sorted(payloads, key=lambda pair: LAYOUT.tensors[LAYOUT.index[pair[0]]].offset)
    return tuple(payload for _name, payload in ordered)


HOSTILE = hostile()


@pytest.fixture(scope="module", params=["numpy", "numba"])
def server(request: pytest.FixtureRequest) -> Iterator[ServerThread]:
    with (
        ServerThread(policy="asgd", set={"lr": 1}, kernels=request.param) as running,
        Client(running.url, role="worker") as client,
    ):
        client.define(START)
        yield running


def untouched(server: ServerThread) -> bool:
    """Whether the model is what it was, and nobody holds a buffer."""

    def look(running: Any) -> bool:
        engine = running.engine
        data = engine.store.current.arena.data
        return not data.any() and engine.store.version == 0 and engine.admission.pool.out == 0

    return bool(server.call(look))


class TestPushes:
    @each_row("what", HOSTILE)
    def test_are_refused_whole(self, server: ServerThread, what: str) -> None:
        message, payloads = HOSTILE[what]
        with Peer(server.url) as peer:
            answer = peer.ask(message, *payloads)
            assert isinstance(answer, Error), answer
            assert (answer.code, answer.fatal) == ("bad-push", False)
            assert len(answer.text) < 400
            assert isinstance(peer.ask(messages.Ping(2)), Pong)
        assert untouched(server)

    @each_row("beside", ["raw", "int8"])
    @each_row(("name", "cut", "size"), [("b", 6, 4), ("b", 1, 4), ("b", 11, 4), ("h", 601, 2)])
    def test_a_raw_tensor_is_cut_between_elements(
        self, server: ServerThread, name: str, cut: int, size: int, beside: str
    ) -> None:
        """Alike whether the tensor beside it is coded or raw."""
        whole = START["w"].nbytes
        first = coded("int8") if beside == "int8" else bytes(whole)
        tensor = LAYOUT.tensors[LAYOUT.index[name]]
        for at, fits in ((cut, False), (cut // size * size, cut >= size)):
            cuts = [(0, at), (at, tensor.nbytes)] if at else [(0, 1), (1, tensor.nbytes)]
            begin = tensor.offset
            raws = [Part(begin + a, begin + b, "raw", b - a, 0) for a, b in cuts]
            message = push(part("w", beside, len(first)), *raws)
            with Peer(server.url) as peer:
                if not fits:
                    answer = peer.ask(message, first, *(bytes(b - a) for a, b in cuts))
                    assert isinstance(answer, Error)
                    assert (answer.code, answer.details["tensor"]) == ("bad-push", name)
                    assert f"{name!r}: a part of bytes " in answer.text
                    assert f"cut inside one of its elements, of {size} bytes each" in answer.text
                else:  # and what is taken is looked over: the last part is not a number
                    nan = bytes(cuts[1][1] - cuts[1][0] - 2) + b"\xff\xff"
                    answer = peer.ask(message, first, bytes(cuts[0][1]), nan)
                    assert isinstance(answer, Error)
                    assert f"{name!r} holds nan" in answer.text
                assert isinstance(peer.ask(messages.Ping(2)), Pong)
        assert untouched(server)

    def test_an_offer_is_cut_between_elements(self) -> None:
        rows = tuple((t.name, t.dtype.name, t.shape) for t in LAYOUT.tensors)
        cut, end = LAYOUT.nbytes - 3, LAYOUT.nbytes
        parts = (Part(0, cut, "raw", cut, 0), Part(cut, end, "raw", end - cut, 0))
        inline = Inline("asgd", backend="numpy")
        inline.join(1)
        answer = inline.receive(1, messages.Define(1, rows, parts), bytes(end))
        assert isinstance(answer, Error)
        assert "'h': a part of bytes" in answer.text
        assert "is cut inside one of its elements" in answer.text

    @pytest.mark.parametrize("spec", CODECS)
    def test_any_byte_may_be_another(self, spec: str) -> None:
        """Whatever is taken gives finite parameters; whatever is not, a clear error."""
        rng, payload = np.random.default_rng(1), coded(spec)
        inline = Inline("asgd", {"lr": 1.0}, backend="numpy")
        inline.define(START)
        inline.join(1)
        codec, kinds = find(spec).name, set()
        for seq in range(1, 150):
            damaged = bytearray(payload)
            for place in rng.integers(0, min(len(damaged), rng.choice([12, 4000])), 2):
                damaged[place] = rng.integers(256)
            answer = inline.receive(
                1, push(part("w", codec, len(damaged)), seq=seq), bytes(damaged)
            )
            assert isinstance(answer, Ack | Error)
            kinds.add(type(answer))
            if isinstance(answer, Error):
                assert answer.code == "bad-push"
                assert f"its payload is no {codec} of this tensor" in answer.text
        assert Ack in kinds
        assert all(np.isfinite(values).all() for values in inline.params().values())
        assert inline.engine.admission.pool.out == 0

    def test_what_float16_cannot_hold(self) -> None:
        """An honest codec's value, below 1e18, is an infinity to float16."""
        inline = Inline("asgd", {"lr": 1e-6}, backend="numpy")
        inline.define(START)
        inline.join(1)
        payload = topk(1, b"\x80\x5c", b"\x05")  # 2.9e17 at element 5
        answer = inline.receive(1, push(part("h", "topk", len(payload))), payload)
        assert isinstance(answer, Ack)
        h = inline.params()["h"]
        assert h[5] == np.float16(-0.0655)
        assert np.count_nonzero(h) == 1

    def test_payloads_need_not_be_aligned(self) -> None:
        """Behind top-k's odd lengths others begin anywhere."""
        results = []
        for backend in ("numpy", "numba"):
            inline = Inline("asgd", {"lr": 1.0}, backend=backend)
            inline.define(START)
            inline.join(1)
            payloads = _in_order(
                ("w", coded("topk:0.0371")), ("h", coded("int8", "h")), ("b", float32s(2, 3))
            )
            parts = sorted(
                [
                    part("w", "topk", len(coded("topk:0.0371"))),
                    part("h", "int8", len(coded("int8", "h"))),
                    part("b", "raw", 12),
                ]
            )
            answer = inline.receive(1, push(*parts), b"".join(payloads))
            assert isinstance(answer, Ack), answer
            np.testing.assert_array_equal(inline.params()["b"], -2)
            results.append({name: array.tobytes() for name, array in inline.params().items()})
        assert results[0] == results[1]


class TestRequests:
    def test_gradients_that_were_never_pushed(self, server: ServerThread) -> None:
        """To have the last one applied again without one is no error, and does nothing."""
        with Peer(server.url) as peer:
            answer = peer.ask(Reapply(1, 1, False, -1))
            assert isinstance(answer, Ack)
            assert (answer.used, answer.version) == (False, 0)
        with Peer(server.url, "observer") as peer:
            answer = peer.ask(Reapply(1, 1, False, -1))
            assert isinstance(answer, Error)
            assert "an observer may not push" in answer.text
        assert untouched(server)

    @each_row("wants", [((0, 9, -1),), ((0, 1, 0), (2, 1 << 40, 0))])
    def test_tensors_that_there_are_not(self, server: ServerThread, wants: Any) -> None:
        with Peer(server.url) as peer:
            payload = coded("int8")
            asked: list[tuple[Any, tuple[bytes, ...]]] = [
                (Fetch(1, -1, wants, True), ()),
                (Reapply(2, 1, True, -1, wants, True), ()),
                (Push(3, 2, True, -1, (part("w", "int8", len(payload)),), wants, True), (payload,)),
            ]
            for message, payloads in asked:
                answer = peer.ask(message, *payloads)
                assert isinstance(answer, Error), message
                assert answer.code == "bad-push"
                assert "was it made for another model?" in answer.text
        assert untouched(server)

    def test_increments_of_what_nobody_holds(self) -> None:
        """Claims of any version, true or not: what comes back brings the reader to the replica."""
        with (
            ServerThread(policy="asgd", fetch_codec="int8", kernels="numpy") as running,
            Worker(running.url, START) as worker,
            Peer(running.url) as peer,
        ):
            for _ in range(5):
                worker.step({name: np.ones_like(array) for name, array in START.items()})
            replica = worker.params.arena.data.tobytes()
            for id, have in enumerate((-1, 0, 3, 6, LARGEST), 1):
                answer = peer.ask(Fetch(id, have, (), True))
                assert isinstance(answer, messages.FetchedParams)
                assert answer.version == 5
                raw = {p.codec for p in answer.parts} == {"raw"}
                assert raw == (have in (-1, 0, 6, LARGEST)), have
                if raw:
                    assert b"".join(map(bytes, peer.payloads)) == replica


class TestPlans:
    """A client takes what a server announces with a pinch of salt."""

    @each_row(
        "rows",
        [
            5,
            None,
            [["*", "zip", ""]],
            [["*"]],
            [["*", "topk", "fraction=9"]],
            [["*", "topk", 7]],
            [["*", 7, ""]],
            "topk",
        ],
    )
    def test_codecs_that_cannot_be(self, rows: Any) -> None:
        """What is not known is not used: raw tensors are taken at any time."""
        assert CodecChoice.from_announced(rows) is None

    def test_a_choice_is_told_as_it_was_made(self) -> None:
        specs = ("topk:0.01", "int8@w*", "raw@b", "lowrank:rank=2,values=float32@deep.*")
        choice = CodecChoice.of(specs)
        assert CodecChoice.from_announced(choice.announced) == choice

    def test_small_tensors_and_those_that_would_not_get_shorter_travel_raw(self) -> None:
        params = Params(Layout([("small", "float32", (255,)), ("half", "float16", (1000,))]))
        small, half = (params.layout.tensors[params.layout.index[n]] for n in ("small", "half"))
        assert CodecChoice.of(("int8",)).codec(small) is None
        assert CodecChoice.of(("fp16",)).codec(half) is None
        assert CodecChoice.of(("int8",)).codec(half) == find("int8")
