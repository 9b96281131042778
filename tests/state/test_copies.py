"""Which copy of a state is gone on with, and which can go."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aiops.errors import DamagedState, UsageError
from aiops.state.copies import (
    BegunMark,
    CopyManifest,
    StoreListing,
    begun_name,
    candidates,
    copy_name,
    data_name,
    goes_on_from,
    latest,
    prefers_store,
)
from aiops.state.directory import GenerationFile, GenerationStart, StateIdentity

IDENTITY = StateIdentity("a-run", 0, 1, 0.0)


def generations(*starts: tuple[int, int]) -> GenerationFile:
    """Of generations that began behind these rows."""
    found = tuple(GenerationStart(generation, row, (row,)) for generation, row in starts)
    return GenerationFile(starts[-1][0] if starts else 0, found)


def mark(*starts: tuple[int, int], run: str = "a-run") -> BegunMark:
    return BegunMark(StateIdentity(run, 0, 1, 0.0).pack(), generations(*starts).pack())


def manifest(generation: int, row: int, *starts: tuple[int, int]) -> CopyManifest:
    return CopyManifest(generation, row, row, 100, bytes(32), mark(*(starts or [(generation, 0)])))


def listing(*copies: tuple[int, int], begun: tuple[int, ...] = (), **more: int) -> StoreListing:
    sizes = {copy_name(*each): 300 for each in copies}
    sizes |= {data_name(*each): 100 for each in copies}
    return StoreListing({**sizes, **{begun_name(each): 200 for each in begun}, **more})


class TestObjects:
    def test_they_are_read_as_they_were_written(self) -> None:
        made = manifest(3, 20, (1, 0), (3, 15))
        assert CopyManifest.unpack(made.pack(), copy_name(3, 20)) == made
        assert BegunMark.unpack(made.begun.pack(), "begun") == made.begun
        assert made.begun.file == generations((1, 0), (3, 15))

    def test_none_that_is_cut_or_changed_is_read(self) -> None:
        data, name = manifest(1, 2).pack(), copy_name(1, 2)
        for end in range(len(data)):
            with pytest.raises(DamagedState):
                CopyManifest.unpack(data[:end], name)
        for at in range(len(data)):
            changed = bytearray(data)
            changed[at] ^= 0x10
            with pytest.raises((DamagedState, UsageError)):
                CopyManifest.unpack(changed, name)

    def test_one_under_another_name_is_none(self) -> None:
        with pytest.raises(DamagedState, match="of another copy"):
            CopyManifest.unpack(manifest(1, 2).pack(), copy_name(1, 3))


class TestListing:
    def test_names_of_others_are_passed_over(self) -> None:
        found = listing(
            (1, 5), (2, 3), begun=(2, 1), README=5, **{"copy-1": 1, "begun-" + "0" * 41: 1}
        )
        assert found.copies == ((2, 3), (1, 5))
        assert found.begun == (2, 1)

    def test_a_copy_is_whole_with_all_bytes_of_its_snapshot(self) -> None:
        assert listing((1, 5)).is_whole(manifest(1, 5))
        assert not listing((1, 5), **{data_name(1, 5): 99}).is_whole(manifest(1, 5))
        assert not listing().is_whole(manifest(1, 5))

    def test_what_can_go(self) -> None:
        half_written = {data_name(1, 7): 3, data_name(2, 12): 3}
        found = listing((1, 5), (1, 6), (2, 8), (2, 9), begun=(1, 2), **half_written)
        begun = generations((1, 0), (2, 7))
        assert found.removable(begun, keep=2) == [
            copy_name(1, 5),
            copy_name(1, 6),
            data_name(1, 5),
            data_name(1, 6),
            data_name(1, 7),
            begun_name(1),
        ]
        assert listing((1, 5), begun=(1,)).removable(begun) == []
        assert listing(**half_written).removable(begun) == []

    def test_a_history_that_was_given_up_takes_no_place(self) -> None:
        """The only copy that the next start could go on from would go, for two that it cannot."""
        found = listing((1, 5), (1, 20), (1, 25))
        assert found.removable(generations((1, 0), (2, 5)), keep=2) == [
            *(copy_name(1, 20), copy_name(1, 25)),
            *(data_name(1, 20), data_name(1, 25)),
        ]

    def test_what_a_later_server_has_written_stays(self) -> None:
        found = listing((1, 5), (1, 6), (3, 5), (3, 6), (3, 7))
        assert found.removable(generations((1, 0)), keep=1) == [copy_name(1, 5), data_name(1, 5)]

    @given(
        st.sets(st.tuples(st.integers(1, 3), st.integers(1, 9)), max_size=8),
        st.sets(st.tuples(st.integers(1, 3), st.integers(1, 9)), max_size=4),
        st.tuples(st.integers(0, 9), st.integers(0, 9)),
        st.integers(1, 3),
    )
    def test_at_no_moment_a_manifest_lacks_its_snapshot(
        self,
        copies: set[tuple[int, int]],
        half: set[tuple[int, int]],
        starts: tuple[int, int],
        keep: int,
    ) -> None:
        begun = generations((1, 0), (2, starts[0]), (3, starts[1]))
        sizes = {name(*each): 1 for each in copies for name in (copy_name, data_name)}
        sizes |= {data_name(*each): 1 for each in half}
        names = StoreListing(sizes).removable(begun, keep)
        assert len(set(names)) == len(names)
        for count in range(len(names) + 1):
            left = {name for name in sizes if name not in names[:count]}
            for generation, row in StoreListing(dict.fromkeys(left, 1)).copies:
                assert data_name(generation, row) in left
        kept = StoreListing({name: 1 for name in sizes if name not in names}).copies
        usable = [each for each in copies if goes_on_from(each[1], each[0], begun)]
        assert list(kept) == sorted(usable, reverse=True)[:keep]


class TestTheOneToGoOnWith:
    def test_a_history_that_was_given_up_is_not_gone_on_with(self) -> None:
        """Generation 2 went back to row 10: rows after it, of generation 1, are of no use."""
        begun = generations((1, 0), (2, 10))
        assert goes_on_from(10, 1, begun)
        assert not goes_on_from(11, 1, begun)
        assert goes_on_from(11, 2, begun)

    def test_candidates_are_whole_and_the_newest_comes_first(self) -> None:
        manifests = [manifest(1, 5), manifest(1, 20), manifest(2, 12), manifest(2, 13)]
        found = listing((1, 5), (1, 20), (2, 12), (2, 13), **{data_name(2, 13): 50})
        chosen = candidates(manifests, found, mark((1, 0), (2, 10)))
        assert [(each.generation, each.row) for each in chosen] == [(2, 12), (1, 5)]

    def test_the_later_generation_of_folder_and_store(self) -> None:
        for mine, theirs in itertools.product(range(4), repeat=2):
            local = (IDENTITY, generations((mine, 0))) if mine else None
            there = mark((theirs, 0)) if theirs else None
            assert prefers_store(local, there, "store") is (theirs > mine)

    def test_a_folder_with_no_generation_is_no_match_for_a_store(self) -> None:
        assert prefers_store((IDENTITY, GenerationFile(0)), mark((1, 0)), "store")

    def test_of_two_runs_none_is_chosen(self) -> None:
        with pytest.raises(UsageError, match=r"s3://x has copies of run other, .* holds run a-run"):
            prefers_store((IDENTITY, GenerationFile(1)), mark((9, 0), run="other"), "s3://x")

    def test_the_latest_of_marks(self) -> None:
        marks = [mark((1, 0)), mark((1, 0), (3, 5)), mark((2, 0))]
        assert latest(marks) == marks[1]
        assert latest([]) is None
