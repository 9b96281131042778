"""Where tensors lie: aligned, without gaps, and the same ranges there and back."""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from aiops.errors import BadPush, UsageError
from aiops.model.layout import (
    DTYPES,
    MAX_PART,
    MAX_TENSORS,
    Layout,
    compute_dtype,
    dtype_named,
    split,
)
from aiops.model.parts import Part, Parts
from tests.rows import each_row
from tests.strategies import DETERMINISTIC, dtype

small_shape = st.lists(st.integers(0, 4), max_size=3).map(tuple)


@st.composite
def models(draw: st.DrawFn) -> list[tuple[str, str, tuple[int, ...]]]:
    """Tensors of any dtype and shape, empty ones and scalars among them."""
    count = draw(st.integers(1, 8))
    found = [(f"t{i}", draw(dtype), draw(small_shape)) for i in range(count)]
    assume(any(math.prod(shape) for _name, _dtype, shape in found))
    return found


layouts = models().map(Layout)


def versions_for(draw: st.DrawFn, layout: Layout, most: int = 2) -> np.ndarray[Any, Any]:
    count = len(layout.tensors)
    return np.array(draw(st.lists(st.integers(0, most), min_size=count, max_size=count)), np.int64)


@st.composite
def pushes(draw: st.DrawFn) -> tuple[Layout, list[int], np.ndarray[Any, Any], Parts]:
    """Some tensors of a layout, their versions, and parts that cover just these.

    Neighbours of equal version may share a part, and any part may be cut between elements.
    """
    layout = draw(layouts)
    versions = versions_for(draw, layout)
    full = [i for i, tensor in enumerate(layout.tensors) if tensor.size]
    chosen = draw(st.lists(st.sampled_from(full), min_size=1, unique=True).map(sorted))
    ranges: list[tuple[int, int, int]] = []
    for index in chosen:
        tensor, version = layout.tensors[index], int(versions[index])
        start, stop = tensor.offset, tensor.offset + tensor.nbytes
        if ranges and ranges[-1][1:] == (start, version) and draw(st.booleans()):
            ranges[-1] = (ranges[-1][0], stop, version)
        else:
            ranges.append((start, stop, version))
    parts = []
    for start, stop, version in ranges:
        inside = draw(st.lists(st.integers(start, stop), max_size=2, unique=True))
        edges = {between_elements(layout, edge) for edge in inside}
        for a, b in pairwise(sorted({start, *edges, stop})):
            parts.append(Part(a, b, "raw", b - a, version))
    return layout, chosen, versions, tuple(parts)


def between_elements(layout: Layout, place: int) -> int:
    """Return where the element begins that a byte is in."""
    if place == layout.nbytes:
        return place
    tensor = layout.tensors[layout.tensor_at(place)]
    return place - (place - tensor.offset) % tensor.dtype.itemsize


class TestOrder:
    @DETERMINISTIC
    @given(models())
    def test_tensors_lie_side_by_side_and_aligned(self, rows: Any) -> None:
        layout = Layout(rows)
        offset = 0
        for tensor in layout.tensors:
            assert tensor.offset == offset
            if tensor.size:
                assert offset % tensor.dtype.itemsize == 0
            offset += tensor.nbytes
        assert layout.nbytes == offset
        assert {(t.name, t.dtype.name, t.shape) for t in layout.tensors} == set(rows)
        assert layout.parameters == sum(math.prod(shape) for _n, _d, shape in rows)

    @DETERMINISTIC
    @given(models())
    def test_the_order_is_by_size_of_item_then_dtype_then_as_given(self, rows: Any) -> None:
        given_at = {name: index for index, (name, _dtype, _shape) in enumerate(rows)}
        keys = [(-t.dtype.itemsize, t.dtype.name, given_at[t.name]) for t in Layout(rows).tensors]
        assert keys == sorted(keys)

    @DETERMINISTIC
    @given(models())
    def test_a_section_is_all_of_a_dtype(self, rows: Any) -> None:
        layout = Layout(rows)
        assert [t.dtype for s in layout.sections for t in layout.tensors[s.first : s.last]] == [
            t.dtype for t in layout.tensors
        ]
        assert [s.start for s in layout.sections] == [0, *(s.stop for s in layout.sections)][:-1]
        assert layout.sections[-1].stop == layout.nbytes
        assert len({s.dtype for s in layout.sections}) == len(layout.sections)
        for section, (lo, hi) in zip(layout.sections, layout.whole, strict=True):
            tensors = layout.tensors[section.first : section.last]
            assert (hi - lo).tolist() == [t.size for t in tensors]
            starts = (lo * section.dtype.itemsize + section.start).tolist()
            assert starts == [t.offset for t in tensors]

    def test_what_the_page_says_about_dtypes(self) -> None:
        assert list(DTYPES) == sorted(DTYPES, key=lambda n: (-dtype_named(n).itemsize, n))
        assert dtype_named("bfloat16") == ml_dtypes.bfloat16
        wide = [compute_dtype(dtype_named(name)).name for name in DTYPES]
        assert wide == ["float64", "float32", "float32", "float32"]

    def test_of_arrays(self) -> None:
        arrays = {
            "b": np.zeros(3, np.float16),
            "w": np.zeros((2, 2)),
            "s": np.float32(1).reshape(()),
        }
        layout = Layout.of(arrays)
        assert layout.rows == (
            ("w", "float64", (2, 2), 0),
            ("s", "float32", (), 32),
            ("b", "float16", (3,), 36),
        )


class TestRefusals:
    @each_row(
        ("rows", "why"),
        [
            ((), "1 to 65536 tensors, not 0"),
            ((("w", "float32", (0,)), ("v", "float64", (3, 0))), "every tensor is empty"),
            (
                (("w", "int32", (1,)),),
                "dtype 'int32' of 'w' cannot be trained; float64, float32, bfloat16, float16 can",
            ),
            ((("w", "float23", (1,)),), "did you mean 'float32'"),
            (
                (("a", "float32", (1,)), ("b", "float32", (1,)), ("a", "float16", (1,))),
                "'a'; names",
            ),
            ((("w", "float32", (2**62,)),), "'w' of shape .* is larger than any memory"),
            ((("w", "float32", (2**62, 2**62)),), "larger than any memory"),
            ((("w", "float64", (2**63 - 1,) * 32),), "larger than any memory"),
            ((("v", "float32", (1,)), ("w", "float32", (2**62, 0, 2**62))), "'w' of shape"),
            ((("v", "float32", (2**49,)), ("w", "float32", (2**50,))), "'w' of shape"),
        ],
    )
    def test_what_makes_no_model_is_refused(self, rows: Any, why: str) -> None:
        with pytest.raises(UsageError, match=why):
            Layout(rows)

    @pytest.mark.slow
    def test_the_most_tensors(self) -> None:
        rows = [(str(i), "float32", ()) for i in range(MAX_TENSORS)]
        assert len(Layout(rows).tensors) == MAX_TENSORS
        with pytest.raises(UsageError, match="1 to 65536 tensors, not 65537"):
            Layout([*rows, ("one more", "float32", ())])

    @pytest.mark.slow
    def test_a_name_given_twice_is_found_among_many(self) -> None:
        rows = [(str(i), "float32", ()) for i in range(60_000)]
        with pytest.raises(UsageError, match="two tensors are called '59999'"):
            Layout([*rows, ("59999", "float32", ())])

    @DETERMINISTIC
    @given(models(), st.data())
    def test_differences_are_named(self, rows: Any, data: st.DataObject) -> None:
        layout = Layout(rows)
        assert layout.difference(Layout(data.draw(st.permutations(rows)))) is None
        index = data.draw(st.integers(0, len(rows) - 1))
        name, kind, shape = rows[index]
        for other in (
            ("another", kind, shape),
            (name, "float64" if kind == "float32" else "float32", shape),
            (name, kind, (*shape, 2)),
        ):
            changed = [*rows[:index], other, *rows[index + 1 :]]
            if any(math.prod(row[2]) for row in changed):
                assert repr(other[0]) in (layout.difference(Layout(changed)) or "")
        fewer = [*rows[:index], *rows[index + 1 :]]
        if any(math.prod(row[2]) for row in fewer):
            assert layout.difference(Layout(fewer)) == f"its {name!r} is missing here"


class TestCover:
    @DETERMINISTIC
    @given(layouts, st.data())
    def test_the_parts_of_a_model_cover_it(self, layout: Layout, data: st.DataObject) -> None:
        versions = versions_for(data.draw, layout)
        parts = layout.parts(versions)
        assert [p.start for p in parts] == [0, *(p.stop for p in parts)][:-1]
        assert parts[-1].stop == layout.nbytes
        cover = layout.covered(parts)
        full = layout.sizes > 0
        assert cover.whole
        assert cover.tensors is layout.all
        assert cover.bases[full].tolist() == versions[full].tolist()
        assert cover.starts.tolist() == layout.starts.tolist()
        if len(set(versions.tolist())) == 1:
            assert len(parts) == 1

    @DETERMINISTIC
    @given(pushes())
    def test_covered_is_the_inverse_however_the_parts_are_cut(self, push: Any) -> None:
        layout, chosen, versions, parts = push
        cover = layout.covered(parts)
        found = dict(zip(cover.tensors.tolist(), cover.starts.tolist(), strict=True))
        full = [index for index in found if layout.tensors[index].size]
        assert full == chosen
        assert cover.tensors.tolist() == sorted(found)
        bases = dict(zip(cover.tensors.tolist(), cover.bases.tolist(), strict=True))
        assert [bases[index] for index in chosen] == [int(versions[index]) for index in chosen]
        filled = 0
        for index in chosen:
            assert found[index] == filled
            assert filled % layout.tensors[index].dtype.itemsize == 0
            filled += layout.tensors[index].nbytes
        everything = [i for i, tensor in enumerate(layout.tensors) if tensor.size]
        assert cover.whole == (chosen == everything)

    def test_empty_tensors_come_with_their_neighbours(self) -> None:
        rows = [("e0", (0,)), ("a", (1,)), ("e1", (0,)), ("b", (2,)), ("e2", (0, 3)), ("e3", (0,))]
        layout = Layout((name, "float32", shape) for name, shape in rows)
        assert layout.covered((Part(0, 12, "raw", 12, 1),)).whole
        assert layout.covered((Part(0, 4, "raw", 4, 1), Part(4, 12, "raw", 8, 1))).whole
        assert layout.covered((Part(0, 4, "raw", 4, 1), Part(4, 12, "raw", 8, 2))).whole
        assert layout.covered((Part(0, 4, "raw", 4, 1),)).tensors.tolist() == [0, 1]
        assert layout.covered((Part(4, 12, "raw", 8, 1),)).tensors.tolist() == [2, 3, 4, 5]

    @DETERMINISTIC
    @given(
        layouts, st.lists(st.tuples(st.integers(0, 80), st.integers(1, 40)), min_size=1, max_size=4)
    )
    def test_any_parts_cover_whole_tensors_or_are_refused(self, layout: Layout, raw: Any) -> None:
        parts = tuple(Part(start, start + length, "raw", length, 0) for start, length in raw)
        try:
            cover = layout.covered(parts)
        except BadPush:
            return
        tensors = [layout.tensors[i] for i in cover.tensors.tolist()]
        assert sum(t.nbytes for t in tensors) == sum(part.nbytes for part in parts)
        wanted = sorted(byte for p in parts for byte in range(p.start, p.stop))
        got = [byte for t in tensors for byte in range(t.offset, t.offset + t.nbytes)]
        assert got == wanted == sorted(set(wanted))

    LAYOUT = Layout((("a", "float32", (2,)), ("b", "float32", (1,)), ("c", "float16", (3,))))

    @each_row(
        ("ranges", "why", "tensor"),
        [
            ((), "holds no tensor", None),
            (((0, 4),), "a part covers bytes 0 to 4, which is not whole tensors .*'a'", "a"),
            (((4, 8),), "bytes 4 to 8, which is not whole tensors", "a"),
            (((4, 12),), "bytes 4 to 12, which is not whole tensors", "a"),
            (((0, 8), (8, 14)), "bytes 0 to 14, which is not whole tensors", "a"),
            (((0, 5), (5, 8)), "'a': a part of bytes 0 to 5 is cut inside one .* 4 bytes", "a"),
            (((0, 8), (8, 11)), "'b': a part of bytes 8 to 11 is cut inside", "b"),
            (((0, 6), (6, 12)), "'a': a part of bytes 0 to 6 is cut inside", "a"),
            (((8, 12), (12, 13), (13, 18)), "'c': .* 12 to 13 is cut .* of 2 bytes", "c"),
            (((13, 18),), "'c': a part of bytes 13 to 18 is cut inside", "c"),
            (((0, 8), (14, 18)), "bytes 14 to 18, which is not whole tensors", "c"),
            (((16, 18),), "bytes 16 to 18, which is not whole tensors", "c"),
            (((12, 20),), "ends at byte 20, but the model has 18", None),
            (((0, 2**62),), "ends at byte .*, but the model has 18", None),
            (((0, 8), (0, 8)), "'a' comes twice or out of order", "a"),
            (((8, 12), (0, 8)), "'a' comes twice or out of order", "a"),
            (((0, 12), (8, 18)), "'b' comes twice or out of order", "b"),
            (((12, 18), (12, 18)), "'c' comes twice or out of order", "c"),
        ],
    )
    def test_what_is_not_whole_tensors_in_order(
        self, ranges: Any, why: str, tensor: str | None
    ) -> None:
        parts = tuple(Part(start, stop, "raw", stop - start, 0) for start, stop in ranges)
        with pytest.raises(BadPush, match=why) as caught:
            self.LAYOUT.covered(parts)
        assert caught.value.details.get("tensor") == tensor

    @each_row("cut", [4, 10, 14, 16])
    def test_a_part_may_be_cut_between_any_two_elements(self, cut: int) -> None:
        parts = (Part(0, cut, "raw", cut, 0), Part(cut, 18, "raw", 18 - cut, 0))
        if cut == 10:
            with pytest.raises(BadPush, match=r"'b': .* cut inside"):
                self.LAYOUT.covered(parts)
        else:
            assert self.LAYOUT.covered(parts).whole

    @each_row("nbytes", [0, 7, 9, 2**32 - 1])
    def test_a_wrong_length_is_told_with_its_tensor(self, nbytes: int) -> None:
        for parts in (
            (Part(0, 18, "raw", nbytes, 0),),
            (Part(0, 8, "raw", nbytes, 0),),
            (Part(8, 12, "raw", 4, 0), Part(12, 18, "raw", nbytes, 0)),
        ):
            with pytest.raises(BadPush, match=f"{nbytes} bytes were sent for a range of"):
                self.LAYOUT.covered(parts)

    def test_parts_of_two_versions_inside_a_tensor(self) -> None:
        parts = (Part(0, 4, "raw", 4, 1), Part(4, 8, "raw", 4, 2))
        with pytest.raises(BadPush, match="bytes 0 to 4, which is not whole tensors"):
            self.LAYOUT.covered(parts)


class TestSplit:
    @each_row(
        "length", [1, 1000, MAX_PART - 1, MAX_PART, MAX_PART + 1, 3 * MAX_PART, 3 * MAX_PART + 5]
    )
    def test_no_part_is_longer_than_allowed(self, length: int) -> None:
        parts = split(16, 16 + length, "raw", 7)
        assert [p.start for p in parts] == [16, *(p.stop for p in parts)][:-1]
        assert parts[-1].stop == 16 + length
        assert all(0 < p.nbytes == p.stop - p.start <= MAX_PART for p in parts)
        assert len(parts) == -(-length // MAX_PART)

    def test_nothing_is_no_part(self) -> None:
        assert split(8, 8, "raw", 0) == []

    def test_a_model_larger_than_a_part_is_covered_by_several(self) -> None:
        layout = Layout((("a", "float32", (MAX_PART // 4 + 1,)), ("b", "float16", (5,))))
        parts = layout.parts(np.zeros(2, np.int64))
        assert [p.nbytes for p in parts] == [MAX_PART, 14]
        assert layout.covered(parts).whole
