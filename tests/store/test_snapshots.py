"""Fetches of some tensors, against a model too simple to be wrong."""

from __future__ import annotations

import numpy as np
import pytest

from aiops.client.params import Params
from aiops.client.receive_params import ParameterSink, wants_of
from aiops.errors import BadPush, RemoteProtocolError
from aiops.model.arena import Arena
from aiops.model.layout import Ints, Layout
from aiops.model.parts import Part, Wants
from aiops.store.snapshots import SnapshotPool, Version
from aiops.store.wanted import Wanted
from tests.rows import each_row

LAYOUT = Layout(
    [
        ("a", "float32", (3,)),
        ("empty", "float32", (0, 4)),
        ("b", "float32", (2, 2)),
        ("scalar", "float32", ()),
        ("c", "float16", (5,)),
        ("nothing", "float16", (0,)),
        ("d", "float64", (2,)),
        ("last", "float16", (1, 0)),
    ]
)
TENSORS = len(LAYOUT.tensors)


class Naive:
    """What the server has, as a list of updates."""

    def __init__(self) -> None:
        self.updates: list[Ints] = []

    def number(self, tensor: int) -> int:
        """Updates of a tensor so far: also the value of all its elements."""
        return sum(tensor in touched.tolist() for touched in self.updates)


class Server:
    """The versions as the store makes them, with readers who hold on to some."""

    def __init__(self) -> None:
        arena = Arena(LAYOUT)
        arena.data[:] = 0
        self.shelf = SnapshotPool(Version(0, arena, np.zeros(TENSORS, np.int64), 0), live=4)

    def update(self, touched: Ints) -> None:
        target, base = self.shelf.target(), self.shelf.current
        target.arena.data[:] = base.arena.data
        for tensor in touched.tolist():
            target.arena.views[LAYOUT.tensors[tensor].name][...] += 1
        target.advance(base.number + 1, touched)
        self.shelf.publish(target)

    def answer(self, params: Params, have: int, wants: Wants) -> None:
        """Have a reader receive what it asked for."""
        version = self.shelf.current
        wanted = Wanted(have, wants).known(version.number, TENSORS)
        parts = version.parts_for(wanted)
        if parts:
            sink = ParameterSink(params, parts, have, wants, "the server")
            for number, (part, views) in enumerate(
                zip(parts, self.shelf.lease().borrowed_views(parts), strict=True)
            ):
                assert sum(map(len, views)) == part.nbytes == part.stop - part.start > 0
                sink.view(number, 0)[: part.nbytes] = b"".join(views)
                sink.filled(number, 0, part.nbytes)
            sink.finish()
        params.now_at(version.number, wants)


def touched_by(rng: np.random.Generator) -> Ints:
    """All tensors (as the very array that says so), some, or one."""
    if rng.random() < 0.2:
        return LAYOUT.all
    return np.flatnonzero(rng.random(TENSORS) < rng.choice([0.1, 0.5, 0.9]))


@each_row("seed", range(20))
def test_readers_of_some_tensors_have_what_they_asked_for(seed: int) -> None:
    """Random partial updates and random wants: values and versions are always right."""
    rng = np.random.default_rng(seed)
    server, naive = Server(), Naive()
    readers = [Params(LAYOUT) for _ in range(3)]
    known = [np.full(TENSORS, -1) for _ in readers]  # each tensor's updates, as last received
    for _ in range(80):
        if rng.random() < 0.6:
            touched = touched_by(rng)
            if len(touched):
                server.update(touched)
                naive.updates.append(touched)
            continue
        index = int(rng.integers(len(readers)))
        params = readers[index]
        if rng.random() < 0.1:  # a fetch was cut midway
            tensors = rng.random(TENSORS) < 0.3
            params.held[tensors] = -1
            for tensor in np.flatnonzero(tensors).tolist():
                params[LAYOUT.tensors[tensor].name][...] = 99
        wanted = None if rng.random() < 0.4 else np.flatnonzero(rng.random(TENSORS) < 0.5)
        if wanted is not None and not len(wanted):
            continue
        server.answer(params, *wants_of(params, wanted))
        for tensor in range(TENSORS) if wanted is None else wanted.tolist():
            known[index][tensor] = naive.number(tensor)
            assert params.held[tensor] == len(naive.updates)
        for tensor in np.flatnonzero(params.held >= 0).tolist():
            described = LAYOUT.tensors[tensor]
            assert (params[described.name] == known[index][tensor]).all(), described.name
            if described.size:
                assert params.versions[tensor] == known[index][tensor], described.name


def test_nothing_travels_twice() -> None:
    """What a reader has already is not sent, and neighbours of one version share a part."""
    server, params = Server(), Params(LAYOUT)
    have, wants = wants_of(params, None)
    assert (have, wants) == (-1, ())
    assert [part[:2] for part in server.shelf.current.parts_for(Wanted(have))] == [
        (0, LAYOUT.nbytes)
    ]
    server.answer(params, have, wants)
    assert server.shelf.current.parts_for(Wanted(*wants_of(params, None))) == ()
    b = LAYOUT.index["b"]
    server.update(np.array([b]))
    (part,) = server.shelf.current.parts_for(Wanted(0))
    tensor = LAYOUT.tensors[b]
    assert part == Part(tensor.offset, tensor.offset + tensor.nbytes, "raw", tensor.nbytes, 1)
    others = tuple((i, i + 1, 0) for i in range(TENSORS) if i != b)
    assert server.shelf.current.parts_for(Wanted(0, others)) == ()


def test_claims_to_hold_the_future_count_for_nothing() -> None:
    server = Server()
    server.update(LAYOUT.all)
    assert Wanted(7).known(1, TENSORS).have == -1
    runs = ((0, 2, 1), (3, 4, 9))
    assert Wanted(0, runs).known(1, TENSORS).wants == ((0, 2, 1), (3, 4, -1))
    same = Wanted(1, ((0, 2, 1),))
    assert same.known(1, TENSORS) is same


def test_tensors_that_the_model_does_not_have() -> None:
    with pytest.raises(BadPush, match=f"tensors up to number {TENSORS + 1} are asked for"):
        Wanted(0, ((0, TENSORS + 1, 0),)).known(5, TENSORS)


class TestAnswersThatAreWrong:
    """A reader takes what it asked for, all of it, and nothing else."""

    def reader(self) -> Params:
        params = Params(LAYOUT)
        params.arena.data[:] = 0
        params.version = 3
        return params

    def part(self, name: str, codec: str = "raw", nbytes: int = -1) -> Part:
        tensor = LAYOUT.tensors[LAYOUT.index[name]]
        nbytes = tensor.nbytes if nbytes < 0 else nbytes
        return Part(tensor.offset, tensor.offset + tensor.nbytes, codec, nbytes, 4)

    @each_row(
        ("name", "codec", "nbytes", "words"),
        [
            ("b", "raw", -1, "do not make up the tensors that were asked for"),
            ("b", "int8", 8, "do not make up the tensors that were asked for"),
            ("a", "zip", 8, "in the codec 'zip', which is not known here"),
            ("a", "int8", 1000, "an increment of no tensor"),
            ("c", "int8", 8, "an increment of no tensor"),
        ],
    )
    def test_other_tensors(self, name: str, codec: str, nbytes: int, words: str) -> None:
        params, a = self.reader(), LAYOUT.index["a"]
        with pytest.raises(RemoteProtocolError, match=words):
            ParameterSink(
                params, (self.part(name, codec, nbytes),), 3, ((a, a + 1, 3),), "the server"
            )
        assert (params.held == 3).all()

    def test_half_a_tensor(self) -> None:
        whole = self.part("a")
        for part in (whole._replace(stop=whole.stop - 4, nbytes=8), whole._replace(start=4)):
            with pytest.raises(RemoteProtocolError):
                ParameterSink(self.reader(), (part,), 3, (), "the server")
        half = whole._replace(codec="int8", stop=whole.stop - 4, nbytes=8)
        with pytest.raises(RemoteProtocolError, match="an increment of no tensor"):
            ParameterSink(self.reader(), (half,), 3, (), "the server")

    def test_something_lacking(self) -> None:
        params, a, b = self.reader(), LAYOUT.index["a"], LAYOUT.index["b"]
        params.held[b] = -1
        wants = ((a, a + 1, 3), (b, b + 1, -1))
        with pytest.raises(RemoteProtocolError, match="do not make up the tensors"):
            ParameterSink(params, (self.part("a"),), 3, wants, "the server")

    def test_an_increment_of_what_is_not_held(self) -> None:
        params, a = self.reader(), LAYOUT.index["a"]
        params.held[a] = -1
        with pytest.raises(RemoteProtocolError, match="of 'a', which is not held here"):
            ParameterSink(params, (self.part("a", "int8", 7),), 3, ((a, a + 1, -1),), "the server")

    def test_an_increment_that_is_none(self) -> None:
        """Another, good one before it is not added either."""
        params = self.reader()
        parts = (self.part("a", "bf16", 6), self.part("b", "bf16", 7))
        sink = ParameterSink(params, parts, 3, (), "the server")
        sink.view(0, 0)[:] = np.array([0x3F80] * 3, "<u2").tobytes()  # ones
        sink.view(1, 0)[:] = bytes(7)
        with pytest.raises(RemoteProtocolError, match="an increment of 'b' that is no bf16"):
            sink.finish()
        assert not params.arena.data.any()
        assert (params.held == 3).all()
