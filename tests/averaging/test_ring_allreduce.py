"""The ring: whatever the workers, the sizes and the order of delivery, all end with the mean."""

from __future__ import annotations

import random
from collections.abc import Sequence
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from aiops.averaging.ring_allreduce import LIMIT, Flat, Piece, Ring, fit
from aiops.codecs.block_codec import BlockCodec
from aiops.codecs.half import BF16, FP16
from aiops.codecs.int8 import Int8
from aiops.errors import RemoteProtocolError
from aiops.model.arena import Arena
from aiops.model.layout import Array, Layout, dtype_named
from tests.rows import each_row
from tests.strategies import DETERMINISTIC

DTYPES = ("float64", "float32", "bfloat16", "float16")


def flat_of(arrays: dict[str, Array]) -> Flat:
    arena = Arena(Layout.of(arrays))
    for name, array in arrays.items():
        arena.views[name][...] = array
    flat = Flat(arena.layout)
    flat.load(arena)
    return flat


def deliver(ring: Ring, piece: Piece) -> Piece | None:
    view = ring.room(piece.start, piece.stop, piece.hop)
    view[:] = piece.view
    return ring.received(piece.start, piece.hop)


def run(
    flats: Sequence[Flat], counts: Sequence[bool] | None = None, chunk: int = 24, seed: int = 0
) -> list[int]:
    """Bring a round to its end; whatever is under way comes in any order. Return bytes sent."""
    size, draw = len(flats), random.Random(seed)
    counts = counts or [True] * size
    rings = [Ring(rank, counts, flat, chunk) for rank, flat in enumerate(flats)]
    under_way = [(rank, piece) for rank, ring in enumerate(rings) for piece in ring.begin()]
    sent, pieces = [0] * size, [0] * size
    while under_way:
        rank, piece = under_way.pop(draw.randrange(len(under_way)))
        sent[rank] += piece.stop - piece.start
        pieces[rank] += 1
        assert piece.stop - piece.start <= max(chunk, 8)
        onward = deliver(rings[(rank + 1) % size], piece)
        if onward is not None:
            under_way.append(((rank + 1) % size, onward))
    assert all(ring.done for ring in rings)
    assert pieces == [ring.to_send for ring in rings]
    return sent


def exact_mean(values: Sequence[float]) -> float:
    return float(sum(map(Fraction, values)) / len(values))


@st.composite
def models(draw: st.DrawFn) -> list[dict[str, Array]]:
    """The models of one to seven workers: the same tensors, other values."""
    workers = draw(st.integers(1, 7))
    names = draw(st.lists(st.sampled_from(DTYPES), min_size=1, max_size=4))
    sizes = [draw(st.integers(0, 23)) for _ in names]
    sizes[0] += 1  # not all empty
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    scale = draw(st.sampled_from((1e-3, 1.0, 100.0)))
    return [
        {
            f"t{index}": (rng.normal(size=size) * scale).astype(dtype_named(dtype))
            for index, (dtype, size) in enumerate(zip(names, sizes, strict=True))
        }
        for _ in range(workers)
    ]


chunks = st.sampled_from((1, 8, 24, 1 << 20))
seeds = st.integers(0, 2**16)


class TestMean:
    @DETERMINISTIC
    @given(models(), chunks, seeds)
    def test_all_workers_end_with_the_same_bits_of_the_mean(
        self, given: list[dict[str, Array]], chunk: int, seed: int
    ) -> None:
        flats = [flat_of(arrays) for arrays in given]
        before = [flat.data.copy() for flat in flats]
        run(flats, chunk=chunk, seed=seed)
        assert len({flat.data.tobytes() for flat in flats}) == 1
        for index, run_of in enumerate(flats[0].runs):
            found = [Flat(flats[0].layout) for _ in flats]
            for one, data in zip(found, before, strict=True):
                one.data[:] = data
            for element in range(run_of.size):
                values = [float(one.runs[index][element]) for one in found]
                spread = max(map(abs, values))
                error = abs(float(run_of[element]) - exact_mean(values))
                assert error <= 4 * len(values) * np.finfo(run_of.dtype).eps * spread

    @DETERMINISTIC
    @given(models(), chunks, seeds)
    def test_the_sum_over_the_workers_is_conserved(
        self, given: list[dict[str, Array]], chunk: int, seed: int
    ) -> None:
        flats = [flat_of(arrays) for arrays in given]
        before = [sum(float(r.astype(np.float64).sum()) for r in flat.runs) for flat in flats]
        size = sum(float(np.abs(r).astype(np.float64).sum()) for f in flats for r in f.runs)
        run(flats, chunk=chunk, seed=seed)
        after = [sum(float(r.astype(np.float64).sum()) for r in flat.runs) for flat in flats]
        assert abs(sum(after) - sum(before)) <= 1e-5 * max(size, 1e-9)

    @DETERMINISTIC
    @given(models(), st.integers(2, 9), chunks, seeds)
    def test_equal_models_are_given_back_exactly(
        self, given: list[dict[str, Array]], workers: int, chunk: int, seed: int
    ) -> None:
        flats = [flat_of(given[0]) for _ in range(workers)]
        before = flats[0].data.tobytes()
        run(flats, chunk=chunk, seed=seed)
        assert all(flat.data.tobytes() == before for flat in flats)

    def test_a_sum_divided_would_not_give_equal_models_back(self) -> None:
        """The reason for the running mean: (x + x + x) / 3 loses this value in float32."""
        values = np.random.default_rng(0).normal(size=10_000).astype(np.float32)
        thirds = (values + values + values) / np.float32(3)
        assert (thirds != values).any()
        flats = [flat_of({"w": values}) for _ in range(3)]
        run(flats, chunk=4096)
        np.testing.assert_array_equal(flats[0].runs[0], values)

    @DETERMINISTIC
    @given(models(), st.data())
    def test_a_newcomer_receives_the_mean_of_the_others(
        self, given: list[dict[str, Array]], data: st.DataObject
    ) -> None:
        size = len(given)
        counts = data.draw(st.lists(st.booleans(), min_size=size, max_size=size).filter(any))
        flats = [flat_of(arrays) for arrays in given]
        counted = [flat_of(a) for a, count in zip(given, counts, strict=True) if count]
        run(flats, counts)
        assert len({flat.data.tobytes() for flat in flats}) == 1
        run(counted)
        for got, expected in zip(flats[0].runs, counted[0].runs, strict=True):
            scale = max(float(np.abs(r).max()) for a in given for r in flat_of(a).runs)
            np.testing.assert_allclose(
                got, expected, rtol=0, atol=40 * np.finfo(got.dtype).eps * scale
            )

    def test_a_founder_is_copied_to_the_bit(self) -> None:
        rng = np.random.default_rng(1)
        given = [{"w": rng.normal(size=101).astype(np.float32)} for _ in range(5)]
        flats = [flat_of(arrays) for arrays in given]
        run(flats, [False, False, True, False, False])
        assert all(flat.runs[0].tobytes() == given[2]["w"].tobytes() for flat in flats)

    def test_a_lone_worker_is_its_own_mean(self) -> None:
        flat = flat_of({"w": np.arange(5.0)})
        ring = Ring(0, [True], flat)
        assert ring.done
        assert ring.begin() == []
        assert ring.to_send == 0
        np.testing.assert_array_equal(flat.runs[0], np.arange(5.0))

    def test_large_values_do_not_overflow(self) -> None:
        flats = [flat_of({"w": np.full(4, 9e17, np.float32)}) for _ in range(4)]
        run(flats)
        np.testing.assert_array_equal(flats[0].runs[0], np.float32(9e17))


class TestTraffic:
    @pytest.mark.parametrize("workers", [2, 3, 4, 8, 16])
    def test_each_sends_less_than_twice_the_model_however_many_there_are(
        self, workers: int
    ) -> None:
        flats = [flat_of({"w": np.ones(4800, np.float32)}) for _ in range(workers)]
        sent = run(flats, chunk=64)
        assert sent == [2 * (workers - 1) * 19200 // workers] * workers

    def test_a_model_smaller_than_the_ring(self) -> None:
        flats = [flat_of({"w": np.array([float(rank)])}) for rank in range(6)]
        run(flats)
        np.testing.assert_allclose(flats[3].runs[0], 2.5)


class TestFlat:
    def test_half_precision_is_averaged_in_single(self) -> None:
        given: list[dict[str, Array]] = [
            {"h": np.array([1.0], np.float16), "b": np.array([1], dtype_named("bfloat16"))},
            {
                "h": np.array([1.001], np.float16),
                "b": np.array([1.0078125], dtype_named("bfloat16")),
            },
        ]
        flats = [flat_of(arrays) for arrays in given]
        assert [r.dtype for r in flats[0].runs] == [np.dtype(np.float32)]
        run(flats)
        views = dict(flats[0].views)
        assert views["b"][0] == 1.00390625, "between two neighbouring bfloat16"
        assert views["h"][0] == (1 + float(np.float16(1.001))) / 2

    def test_tensors_by_name(self) -> None:
        given: dict[str, Any] = {
            "z": np.arange(3, dtype=np.float16),
            "a": np.arange(4, dtype=np.float64).reshape(2, 2),
            "e": np.zeros((0, 5), np.float32),
            "m": np.arange(2, dtype=np.float32) + 10,
        }
        flat = flat_of(given)
        assert [r.dtype.name for r in flat.runs] == ["float64", "float32"]
        for name, values in flat.views:
            np.testing.assert_array_equal(values, given[name].reshape(-1))


class TestHostile:
    def ring(self) -> tuple[Ring, Ring]:
        first, second = (flat_of({"w": np.ones(8, np.float32)}) for _ in range(2))
        return Ring(0, [True, True], first), Ring(1, [True, True], second)

    @each_row("change", [{"start": 4}, {"stop": 12}, {"hop": 2}, {"start": 999}])
    def test_what_is_not_expected_is_refused(self, change: dict[str, int]) -> None:
        first, second = self.ring()
        [piece] = first.begin()
        wrong = piece._replace(**change)
        with pytest.raises(RemoteProtocolError, match="not what is expected next"):
            second.room(wrong.start, wrong.stop, wrong.hop)
        deliver(second, piece)
        assert second.to_send == 2

    def test_a_chunk_that_comes_twice_is_refused(self) -> None:
        first, second = self.ring()
        [piece] = first.begin()
        deliver(second, piece)
        with pytest.raises(RemoteProtocolError, match="not what is expected next"):
            deliver(second, piece)

    @each_row("value", [np.nan, np.inf, -np.inf, LIMIT, -LIMIT])
    @each_row("hop", [1, 2])
    def test_what_no_model_survives_is_refused(self, value: float, hop: int) -> None:
        first, second = self.ring()
        [piece], [other] = first.begin(), second.begin()
        if hop == 2:
            back = deliver(first, other)
            assert back is not None
            piece = back
        bad = bytearray(piece.view)
        bad[4:8] = np.float32(value).tobytes()
        with pytest.raises(RemoteProtocolError, match="not finite or not below"):
            deliver(second, piece._replace(view=memoryview(bad)))
        assert not second.done

    def test_fit(self) -> None:
        assert fit(np.zeros(0))
        assert fit(np.array([1e17, -1e17]))
        assert not fit(np.array([0.0, np.nan, 1.0]))


class TestCodec:
    """Encoded chunks: equal bits at all workers, and the sum of the models as without a codec."""

    @staticmethod
    def coded(values: list[Array], codec: BlockCodec, chunk: int = 256) -> list[tuple[Flat, Ring]]:
        flats = [flat_of({"w": array}) for array in values]
        size = len(flats)
        rings = [Ring(n, [True] * size, flat, chunk, codec) for n, flat in enumerate(flats)]
        under_way = [(n, piece) for n, ring in enumerate(rings) for piece in ring.begin()]
        while under_way:
            rank, piece = under_way.pop()
            assert piece.view.nbytes == codec.length((piece.stop - piece.start) // 4)
            ring = rings[(rank + 1) % size]
            place = piece.start, piece.stop, piece.hop, piece.codec, piece.view.nbytes
            ring.room(*place)[:] = piece.view
            onward = ring.received(piece.start, piece.hop)
            if onward is not None:
                under_way.append(((rank + 1) % size, onward))
        assert all(ring.done for ring in rings)
        return list(zip(flats, rings, strict=True))

    @pytest.mark.parametrize("codec", [BF16(), FP16(), Int8()])
    @pytest.mark.parametrize("workers", [2, 3, 5])
    def test_all_have_the_same_bits_and_the_sum_is_kept(
        self, codec: BlockCodec, workers: int
    ) -> None:
        rng = np.random.default_rng(workers)
        values = [rng.normal(size=1000).astype(np.float32) for _ in range(workers)]
        found = self.coded([array.copy() for array in values], codec)
        means = {flat.runs[0].tobytes() for flat, _ring in found}
        assert len(means) == 1
        mean = np.mean(values, axis=0, dtype=np.float64)
        np.testing.assert_allclose(found[0][0].runs[0], mean, atol=0.05)
        assert not np.allclose(found[0][0].runs[0], mean, atol=1e-6), "it is coded"
        total = sum((flat.runs[0] + ring.left_out).astype(np.float64) for flat, ring in found)
        np.testing.assert_allclose(total, sum(v.astype(np.float64) for v in values), atol=2e-5)

    def test_what_is_left_out_comes_with_the_next_round(self) -> None:
        """Differences that a codec rounds away are not lost: models come to the exact mean."""
        rng = np.random.default_rng(0)
        models = [rng.normal(size=500).astype(np.float32) for _ in range(4)]
        exact = np.mean(models, axis=0, dtype=np.float64)
        reference, errors = np.zeros(500, np.float32), []
        for _ in range(6):
            found = self.coded([model - reference for model in models], Int8())
            reference = reference + found[0][0].runs[0]
            models = [reference + ring.left_out for _flat, ring in found]
            errors.append(float(np.abs(reference - exact).max()))
        assert errors[0] > 1e-3
        assert errors[-1] < 1e-6

    @each_row("change", [{"codec": "raw"}, {"codec": "fp16"}, {"nbytes": 7}])
    def test_another_codec_or_length_is_refused(self, change: dict[str, Any]) -> None:
        flats = [flat_of({"w": np.zeros(8, np.float32)}) for _ in range(2)]
        first, second = (Ring(n, [True] * 2, flat, 16, BF16()) for n, flat in enumerate(flats))
        [piece] = first.begin()
        said = {"codec": piece.codec, "nbytes": piece.view.nbytes} | change
        with pytest.raises(RemoteProtocolError, match="is expected, and comes as"):
            second.room(*piece[:3], **said)

    @each_row("codec", [BF16(), FP16(), Int8()])
    def test_a_payload_that_no_model_survives_voids_the_round(self, codec: BlockCodec) -> None:
        flats = [flat_of({"w": np.zeros(8, np.float32)}) for _ in range(2)]
        first, second = (Ring(n, [True] * 2, flat, 16, codec) for n, flat in enumerate(flats))
        [piece] = first.begin()
        room = second.room(*piece[:3], piece.codec, piece.view.nbytes)
        room[:] = b"\xff\x7f" * (len(room) // 2)
        with pytest.raises(RemoteProtocolError, match="void"):
            second.received(piece.start, piece.hop)
