"""Where the parts of a model lie, and how messages are divided among them."""

from __future__ import annotations

import random

import numpy as np
import pytest

from aiops.errors import BadPush, UsageError
from aiops.model.layout import Layout
from aiops.model.parts import Part
from aiops.model.placement import Placement
from tests.rows import each_row

LAYOUT = Layout(
    [
        ("d", "float64", (5, 2)),
        ("w", "float32", (100, 3)),
        ("none", "float32", (0, 3)),
        ("s", "float32", ()),
        ("h", "float16", (7, 2, 2)),
        ("last", "float16", (0,)),
    ]
)


@each_row("shards", range(1, 12))
def test_even(shards: int) -> None:
    placement = Placement.even(LAYOUT, shards)
    assert len(placement) == shards
    assert sum(layout.nbytes for layout in placement.layouts) == LAYOUT.nbytes
    even = LAYOUT.nbytes / shards
    for low, high in zip(placement.edges, placement.edges[1:], strict=False):
        assert abs(high - low - even) <= 16, "a row of the widest"
    seen = [t.name for layout in placement.layouts for t in layout.tensors]
    assert [name for n, name in enumerate(seen) if name not in seen[:n]] == [
        tensor.name for tensor in LAYOUT.tensors
    ]
    for number, layout in enumerate(placement.layouts):
        assert layout.within == (LAYOUT, placement.edges[number])
        first, last = placement.firsts[number], placement.lasts[number]
        assert [t.name for t in layout.tensors] == [t.name for t in LAYOUT.tensors[first:last]]


def test_more_shards_than_rows() -> None:
    layout = Layout([("w", "float32", (2, 3))])
    placement = Placement.even(layout, 7)
    assert sorted(held.nbytes for held in placement.layouts) == [0] * 5 + [12, 12]


@each_row(
    ("rows", "least", "used"), [(1, 100, 1), (49, 100, 1), (50, 100, 2), (74, 100, 2), (99, 100, 3)]
)
def test_a_small_model_lies_on_few_shards(rows: int, least: int, used: int) -> None:
    layout = Layout([("w", "float32", (rows,))])
    placement = Placement.even(layout, 3, least)
    assert len(placement) == 3
    assert placement.used == list(range(used))
    held = [each.nbytes for each in placement.layouts]
    assert held[used:] == [0] * (3 - used)
    assert min(held[:used]) >= min(least, layout.nbytes)


@each_row("starts", [[4], [0, 30, 20], [0, 4], [0, 90], [0, 1 << 20], []])
def test_cuts_that_cannot_be(starts: list[int]) -> None:
    with pytest.raises(UsageError):
        Placement(LAYOUT, starts)


@each_row("seed", range(20))
def test_what_is_divided_makes_up_the_whole(seed: int) -> None:
    rng = random.Random(seed)
    placement = Placement.even(LAYOUT, rng.randint(1, 9))
    data = np.random.default_rng(seed).integers(0, 256, LAYOUT.nbytes).astype(np.uint8)
    sized = [t for t in LAYOUT.tensors if t.nbytes]
    chosen = [t for t in sized if rng.random() < 0.7] or sized
    parts, payloads = [], []
    for tensor in chosen:
        stop = tensor.offset + tensor.nbytes
        parts.append(Part(tensor.offset, stop, "raw", tensor.nbytes, rng.randint(0, 1)))
        cut = rng.randint(tensor.offset, stop)
        payloads.append([data[tensor.offset : cut].data, data[cut:stop].data])
    out = np.zeros_like(data)
    pieces = placement.divide(tuple(parts), payloads)
    for shard, (theirs, views) in enumerate(pieces):
        for part, view in zip(theirs, views, strict=True):
            assert placement.edges[shard] <= part.start < part.stop <= placement.edges[shard + 1]
            joined = b"".join(view)
            assert len(joined) == part.nbytes == part.stop - part.start
            out[part.start : part.stop] = np.frombuffer(joined, np.uint8)
    for tensor in chosen:
        mine = slice(tensor.offset, tensor.offset + tensor.nbytes)
        np.testing.assert_array_equal(out[mine], data[mine])
    announced = placement.announced([theirs for theirs, _views in pieces])
    assert placement.announced_pieces(announced) == [theirs for theirs, _views in pieces]
    cover, expected = (
        placement.cover(placement.announced_pieces(announced)),
        LAYOUT.covered(tuple(parts)),
    )
    np.testing.assert_array_equal(cover.tensors, expected.tensors)
    np.testing.assert_array_equal(cover.bases, expected.bases)
    for shard, (theirs, _views) in enumerate(pieces):
        if theirs:
            held = placement.layouts[shard]
            moved = tuple(Part(p.start - held.begin, p.stop - held.begin, *p[2:]) for p in theirs)
            local = held.covered(moved)
            rows = placement.rows(shard, cover.tensors)
            np.testing.assert_array_equal(
                local.tensors + placement.firsts[shard], cover.tensors[rows]
            )


def test_sums_add_up() -> None:
    placement = Placement.even(LAYOUT, 4)
    touched = np.array([0, 1, 4])
    sums = [np.arange(1, 1 + len(touched[placement.rows(n, touched)])) for n in range(4)]
    total = placement.sums(touched, sums)
    assert int(total.sum()) == sum(int(mine.sum()) for mine in sums)


def test_a_part_that_crosses_a_cut_is_refused() -> None:
    placement = Placement(LAYOUT, [0, 80])
    with pytest.raises(BadPush, match=r"cut at \[80\]"):
        placement.announced_pieces((Part(0, 96, "raw", 96, 0),))
