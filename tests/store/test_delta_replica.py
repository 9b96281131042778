"""The replica: it follows the model whatever the codec, and all its readers hold the same bits."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from aiops.client.params import Params
from aiops.client.receive_params import ParameterSink, wants_of
from aiops.codecs.choice import CodecChoice
from aiops.model.arena import Arena
from aiops.model.layout import Array, Ints, Layout
from aiops.model.parts import Parts
from aiops.store import delta_replica as module
from aiops.store.delta_replica import DeltaReplica
from aiops.store.snapshots import Lease, Version
from aiops.store.wanted import Wanted
from tests.rows import each_row

BACKENDS = ("numpy", "numba")
CODECS = ("fp16", "bf16", "int8", "topk:0.05", "onebit", "lowrank:2")
LAYOUT = Layout(
    [
        ("big", "float32", (40, 50)),
        ("small", "float32", (7,)),
        ("exact", "float64", (300,)),
        ("narrow", "float16", (600,)),
        ("tall", "float32", (90, 6)),
    ]
)
TENSORS = len(LAYOUT.tensors)
CODED = {LAYOUT.index["big"], LAYOUT.index["tall"]}


class Model:
    """A model that moves as a test says, and its replica."""

    def __init__(self, *codecs: str, backend: str = "numpy", layout: Layout = LAYOUT) -> None:
        self.rng = np.random.default_rng(0)
        arena = Arena(layout)
        for view in arena.views.values():
            view[...] = self.rng.normal(size=view.shape)
        self.layout = layout
        self.version = Version(0, arena, np.zeros(len(layout.tensors), np.int64), 0)
        self.replica = DeltaReplica(self.version, CodecChoice.of(codecs), backend)

    def move(self, touched: Ints | None = None, scale: float = 0.01) -> None:
        """Make an update: noise on some tensors."""
        touched = self.layout.all if touched is None else touched
        for tensor in touched.tolist():
            view = self.version.arena.views[self.layout.tensors[tensor].name]
            view[...] += (scale * self.rng.normal(size=view.shape)).astype(view.dtype)
        self.version.advance(self.version.number + 1, touched)

    def follow(self) -> None:
        """Bring the replica up to it."""
        job = self.replica.follow(self.version)
        self.replica.followed(job, job.run())
        self.replica.settle()

    def held(self) -> Array:
        """The replica's bytes."""
        return self.replica.current.arena.data

    def distance(self, name: str) -> float:
        """How far the replica is from the model."""
        theirs, ours = self.replica.current.arena.views[name], self.version.arena.views[name]
        return float(np.linalg.norm(theirs.astype(np.float64) - ours))

    def read(
        self,
        params: Params,
        wanted: Ints | None = None,
        payloads: Callable[[Lease, Parts], Any] = Lease.borrowed_views,
    ) -> Parts:
        """Have a reader fetch; return what it was sent."""
        have, wants = wants_of(params, wanted)
        parts, lease = self.replica.answer(Wanted(have, wants))
        if parts:
            assert lease is not None
            deliver(params, parts, payloads(lease, parts), have, wants)
            lease.release()
        params.now_at(self.replica.current.number, wants)
        return parts


def deliver(params: Params, parts: Parts, payloads: Any, have: int, wants: Any = ()) -> None:
    """Have the payloads of an answer arrive."""
    sink = ParameterSink(params, parts, have, wants, "the server")
    for number, views in enumerate(payloads):
        data = b"".join(views)
        assert len(data) == parts[number].nbytes
        sink.view(number, 0)[: len(data)] = data
        sink.filled(number, 0, len(data))
    sink.finish()


class TestFollowing:
    @each_row("backend", BACKENDS)
    @each_row("codec", CODECS)
    def test_it_comes_to_a_model_that_stands_still(self, codec: str, backend: str) -> None:
        """What a codec leaves out of one increment is in the next difference."""
        model = Model(codec, backend=backend)
        model.move(scale=1.0)
        model.follow()
        far = {name: model.distance(name) for name in ("big", "tall")}
        for _ in range(120):
            model.version.advance(model.version.number + 1, LAYOUT.all[:0])
            model.follow()
        for name in far:
            assert model.distance(name) < max(0.2 * far[name], 1e-4), name
        for name in ("small", "exact", "narrow"):
            assert model.distance(name) == 0

    @pytest.mark.parametrize("codec", CODECS)
    def test_it_stays_near_a_model_that_moves(self, codec: str) -> None:
        model = Model(codec)
        steps = []
        for _ in range(200):
            model.move()
            model.follow()
            steps.append(model.distance("big"))
        alone = 0.01 * np.sqrt(200 * 2000)  # where a replica that stood still would be
        assert max(steps) < 0.9 * alone
        assert np.mean(steps[-50:]) < 2 * np.mean(steps[50:100]) + 1e-9, "it does not drift"

    @each_row("codec", CODECS)
    def test_backends_agree_to_the_bit(self, codec: str) -> None:
        seen = set()
        for backend in BACKENDS:
            model = Model(codec, backend=backend)
            for _ in range(10):
                model.move()
                model.follow()
            seen.add(model.held().tobytes())
        assert len(seen) == 1

    def test_only_what_has_changed_or_lags_is_looked_at(self) -> None:
        model = Model("topk:0.05")
        big, tall = LAYOUT.index["big"], LAYOUT.index["tall"]
        model.move(np.array([tall]))
        job = model.replica.follow(model.version)
        assert job.pieces.tolist() == [tall]
        model.replica.followed(job, job.run())
        model.move(np.array([big]))
        assert model.replica.follow(model.version).pieces.tolist() == sorted([big, tall])

    @each_row("bad", [np.nan, np.inf, -np.inf, 3e38])
    def test_a_model_that_runs_away_is_sent_as_it_is(self, bad: float) -> None:
        model = Model("int8")
        params = Params(LAYOUT)
        model.read(params)
        model.move()
        model.version.arena.views["big"][3, 4] = bad
        model.follow()
        assert {part.codec for part in model.read(params)} == {"raw", "int8"}
        np.testing.assert_array_equal(params["big"], model.version.arena.views["big"])
        model.move()
        model.version.arena.views["big"][...] = 1.0
        model.follow()
        model.read(params)
        np.testing.assert_array_equal(params["big"], 1.0)
        model.move()
        model.follow()
        assert {part.codec for part in model.read(params)} == {"raw", "int8"}
        assert params.arena.data.tobytes() == model.held().tobytes()


class TestReading:
    @pytest.mark.parametrize("backend", BACKENDS)
    @pytest.mark.parametrize("codec", CODECS)
    def test_readers_have_its_bits_whatever_they_missed(self, codec: str, backend: str) -> None:
        """Every so often, of some tensors or of all: never a bit beside the replica's."""
        model, rng = Model(codec, backend=backend), np.random.default_rng(7)
        readers = [Params(LAYOUT) for _ in range(4)]
        for step in range(120):
            model.move(np.flatnonzero(rng.random(TENSORS) < 0.7))
            if rng.random() < 0.7:
                model.follow()
            for every, params in zip((1, 2, 7, 40), readers, strict=True):
                if step % every:
                    continue
                some = np.flatnonzero(rng.random(TENSORS) < 0.6)
                wanted = some if len(some) and rng.random() < 0.5 else None
                model.read(params, wanted)
                for tensor in LAYOUT.all.tolist() if wanted is None else wanted.tolist():
                    name = LAYOUT.tensors[tensor].name
                    theirs = model.replica.current.arena.views[name]
                    assert params[name].tobytes() == theirs.tobytes(), (step, every, name)
                    assert params.held[tensor] == model.replica.current.number
                    expected = model.replica.current.tensor_versions[tensor]
                    assert params.versions[tensor] == expected

    def test_a_reader_is_sent_increments_of_what_is_coded(self) -> None:
        model, params = Model("int8"), Params(LAYOUT)
        assert {part.codec for part in model.read(params)} == {"raw"}
        for _ in range(2):
            model.move()
            model.follow()
        sent = [(LAYOUT.tensor_at(part.start), part.codec) for part in model.read(params)]
        assert [codec for tensor, codec in sent if tensor in CODED] == ["int8"] * 4
        assert all(codec == "raw" for tensor, codec in sent if tensor not in CODED)
        assert model.read(params) == (), "nothing is new"

    def test_raw_when_that_is_shorter(self) -> None:
        model, params = Model("int8"), Params(LAYOUT)
        model.read(params)
        for _ in range(4):  # four increments of a byte an element and more
            model.move()
            model.follow()
        parts = model.read(params)
        assert {part.codec for part in parts} == {"raw"}
        assert sum(part.nbytes for part in parts) == LAYOUT.nbytes

    def test_never_longer_than_the_model(self) -> None:
        for every in range(1, 12):
            model, params = Model("topk:0.1"), Params(LAYOUT)
            model.read(params)
            for _ in range(every):
                model.move()
                model.follow()
            assert sum(part.nbytes for part in model.read(params)) <= LAYOUT.nbytes

    def test_a_version_that_never_was_the_shadows(self) -> None:
        """A number between two of its versions: everything that changed since is sent raw."""
        model, params = Model("int8"), Params(LAYOUT)
        for _ in range(3):
            model.move()
        model.follow()
        params.now_at(2)
        params.arena.data[:] = 0
        assert {part.codec for part in model.read(params)} == {"raw"}
        assert params.arena.data.tobytes() == model.held().tobytes()

    def test_a_slow_reader_has_the_version_it_was_promised(self) -> None:
        """What is still being sent does not change while the replica goes on."""
        model, params = Model("int8"), Params(LAYOUT)
        model.move()
        model.follow()
        parts, lease = model.replica.answer(Wanted(-1))
        assert lease is not None
        views = lease.payloads(parts)
        lease.release()
        promised = model.held().copy()
        for _ in range(5):
            model.move()
            model.follow()
        deliver(params, parts, views, -1)
        assert params.arena.data.tobytes() == promised.tobytes()
        assert model.held().tobytes() != promised.tobytes()

    def test_slow_readers_of_increments_hold_no_version(self) -> None:
        layout = Layout([("big", "float32", (4000,))])
        model, params = Model("int8", layout=layout), Params(layout)
        model.read(params)
        model.move()
        model.follow()
        parts, lease = model.replica.answer(Wanted(0))
        assert lease is not None
        views = lease.payloads(parts)
        lease.release()
        arena, promised = model.replica.current.arena, model.held().copy()
        for _ in range(5):
            model.move()
            model.follow()
        assert model.replica.current.arena is arena, "it was written in place"
        deliver(params, parts, views, 0)
        assert params.arena.data.tobytes() == promised.tobytes()

    def test_the_slowest_readers_are_cut_off(self) -> None:
        model = Model("int8")
        cut: list[int] = []
        for pace in range(8):
            model.move()
            model.follow()
            _parts, lease = model.replica.answer(Wanted(-1))
            assert lease is not None
            lease.sender = Sender(lease, pace, cut)
        assert cut == [0, 1, 2, 3]
        assert model.replica.cut == 4


class Sender:
    """Sends an answer at a pace, until it is cut off."""

    def __init__(self, lease: Lease, pace: int, cut: list[int]) -> None:
        self._lease, self._pace, self._cut = lease, pace, cut

    def pace(self) -> float:
        return self._pace

    def dismiss(self, why: str) -> None:
        self._cut.append(self._pace)
        self._lease.release()


class TestBounds:
    def test_increments_are_never_longer_than_the_model(self) -> None:
        model = Model("int8")
        for _ in range(50):
            model.move()
            model.follow()
            assert model.replica.report()["increment_bytes"] <= LAYOUT.nbytes
        assert model.replica.report()["increments"] < 10

    def test_increments_of_nothing_do_not_pile_up(self) -> None:
        """No tensor here is large enough to be coded."""
        layout = Layout([("w", "float32", (10,))])
        model, params = Model("int8", layout=layout), Params(layout)
        for _ in range(1000):
            model.move()
            model.follow()
        assert model.replica.report()["increments"] <= 256
        model.read(params)
        assert params.arena.data.tobytes() == model.held().tobytes()

    def test_an_answer_has_no_more_parts_than_a_message_may(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(module, "MAX_TENSORS", 64)
        layout = Layout([(f"t{index}", "float32", (2000,)) for index in range(10)])
        model, params = Model("topk:0.0005", layout=layout), Params(layout)
        model.read(params)
        for _ in range(40):
            model.move()
            model.follow()
        assert len(model.read(params)) <= 64
        assert params.arena.data.tobytes() == model.held().tobytes()
        for _ in range(6):
            model.move()
            model.follow()
        parts = model.read(params)
        assert (len(parts), {part.codec for part in parts}) == (60, {"topk"})
        assert params.arena.data.tobytes() == model.held().tobytes()

    def test_raw_neighbours_share_parts_that_are_not_too_long(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        layout = Layout([(f"t{index}", "float32", (100,)) for index in range(10)])
        monkeypatch.setattr(module, "MAX_PART", 1000)
        model = Model("int8", layout=layout)
        parts, _lease = model.replica.answer(Wanted(-1))
        assert [part.nbytes for part in parts] == [800] * 5


class TestLag:
    def test_one_fetch_finds_about_two_increments(self) -> None:
        model = Model("int8")
        assert model.replica.lag == 1
        for version in range(0, 2000, 10):
            model.replica.asked(version + 10, Wanted(version))
        assert model.replica.lag == 5

    def test_readers_that_are_new_or_lie_do_not_count(self) -> None:
        model = Model("int8")
        for have in (-1, 1 << 40):
            for _ in range(100):
                model.replica.asked(1000, Wanted(have))
        assert model.replica.lag == 1

    def test_runs_of_tensors_count_by_the_newest(self) -> None:
        model = Model("int8")
        for _ in range(200):
            model.replica.asked(100, Wanted(0, ((0, 1, 20), (1, 2, 80))))
        assert model.replica.lag == 10

    def test_a_lag_that_is_set_stays(self) -> None:
        model = Model("int8")
        replica = DeltaReplica(model.version, CodecChoice.of(("int8",)), "numpy", lag=7)
        replica.asked(100, Wanted(0))
        assert replica.lag == 7
        assert [replica.due(version) for version in (6, 7)] == [False, True]


@each_row("run", [(0, 1 << 20), (LAYOUT.nbytes, LAYOUT.nbytes + 4), (8, 8)])
def test_bytes_that_are_not_on_a_shard_are_not_sent(run: tuple[int, int]) -> None:
    """The header of the answer had them, and its payload was shorter: a client lost its place."""
    replica = Model("int8").replica
    with pytest.raises(ValueError, match="it holds other bytes"):
        replica.portion(((*run, 0),), ())
    parts, lease = replica.portion(((0, LAYOUT.nbytes, 0),), ())
    assert [part.nbytes for part in parts] == [LAYOUT.nbytes]
    lease.release()
