"""Names of files, which of them are needed, and the two files of one block."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aiops.common.generations import DRAWN, next_start, next_term, term
from aiops.errors import DamagedState
from aiops.state import directory
from aiops.state.blocks import GENERATION, IDENTITY, pack_block
from aiops.state.directory import (
    GenerationFile,
    GenerationStart,
    StateIdentity,
    StateListing,
    TakenPlace,
    journal_name,
    snapshot_name,
    spare_name,
)
from tests.rows import each_row


def listing(snapshots: Any = (), segments: Any = (), *others: str) -> StateListing:
    return StateListing([*map(snapshot_name, snapshots), *map(journal_name, segments), *others])


def test_names() -> None:
    assert snapshot_name(18_220) == "snapshot-00000000000000018220"
    assert journal_name((1 << 64) - 1) == "journal-18446744073709551615"
    others = ("identity", "generation", "LOCK", spare_name(2), "journal-1", "notes.txt")
    found = listing([5, 70], [1, 71, 6], "snapshot-00000000000000000005.part", *others)
    assert (found.snapshots, found.segments, found.spares) == ((70, 5), (1, 6, 71), (2,))
    assert found.parts == ("snapshot-00000000000000000005.part",)
    assert found.foreign == ("journal-1", "notes.txt")


@given(st.sets(st.integers(0, (1 << 64) - 1)), st.sets(st.integers(1, (1 << 64) - 1)))
def test_names_are_in_the_order_of_rows(snapshots: set[int], segments: set[int]) -> None:
    found = listing(snapshots, segments)
    assert found.snapshots == tuple(sorted(snapshots, reverse=True))
    assert found.segments == tuple(sorted(segments))
    names = [journal_name(first) for first in found.segments]
    assert names == sorted(names)


def test_segments_after_a_row() -> None:
    found = listing([10], [1, 5, 11, 20])
    assert found.segments_after(0) == (1, 5, 11, 20)
    assert found.segments_after(4) == (5, 11, 20)
    assert found.segments_after(9) == (5, 11, 20)
    assert found.segments_after(10) == (11, 20)
    assert found.segments_after(1000) == (20,)
    assert listing([10]).segments_after(10) == ()
    with pytest.raises(DamagedState, match="rows from 1 to 4 are missing") as caught:
        listing([], [5]).segments_after(0)
    assert caught.value.details == {"row": 1}


def test_the_segment_of_a_row() -> None:
    found = listing([], [5, 11])
    assert [found.segment_of(row) for row in (4, 5, 10, 11, 99)] == [None, 5, 5, 11, 11]
    assert [found.until(first) for first in (5, 11)] == [11, None]


def test_what_may_go() -> None:
    found = listing([10, 20, 30], [1, 5, 11, 21, 31])
    assert found.removable(1) == directory.Removal((10, 20), (1, 5, 11, 21))
    assert found.removable(2) == directory.Removal((10,), (1, 5, 11))
    assert found.removable(3) == directory.Removal((), (1, 5))
    assert found.removable(4) == directory.Removal((), ())
    assert listing([30], [1, 5]).removable(1) == directory.Removal((), (1,))


@given(st.sets(st.integers(0, 60), max_size=6), st.sets(st.integers(1, 60)), st.integers(1, 4))
def test_each_snapshot_that_stays_has_its_journal(
    snapshots: set[int], firsts: set[int], keep: int
) -> None:
    segments = {1, *firsts}
    found = listing(snapshots, segments)
    gone = found.removable(keep)
    left = listing(snapshots - set(gone.snapshots), segments - set(gone.segments))
    assert len(left.snapshots) == min(keep, len(snapshots))
    assert left.segments, "the last segment stays"
    for row in left.snapshots:
        assert left.segments_after(row) == found.segments_after(row)
    if len(snapshots) >= keep:
        assert left.segments == left.segments_after(left.snapshots[-1]), "and nothing else"


def test_identity() -> None:
    made = StateIdentity("8c2f", 1, 3, 1.5)
    assert StateIdentity.unpack(made.pack()) == made
    with pytest.raises(DamagedState, match="identity is damaged: it holds no map"):
        StateIdentity.unpack(pack_block(IDENTITY, [1]))
    with pytest.raises(DamagedState, match="its 'run' should be str, not NoneType"):
        StateIdentity.unpack(pack_block(IDENTITY, {"shard": 0, "shards": 1}))


class TestGenerations:
    def test_round_trip(self) -> None:
        made = GenerationFile(5, (GenerationStart(4, 100, (7, 1)), GenerationStart(5, 200, (9, 1))))
        assert GenerationFile.unpack(made.pack()) == made
        assert GenerationFile.unpack(GenerationFile(0).pack()) == GenerationFile(0)

    def test_a_successor_is_noted(self) -> None:
        made = GenerationFile(5, (), ((3 << 36) + 8, "aiops://b"))
        assert GenerationFile.unpack(made.pack()) == made
        promoted = made.started(9, [4], 2, promoted=True)
        assert promoted.generation == (4 << 36) + 2
        assert promoted.superseded_by is None

    def test_predecessors_are_those_of_the_last_promotion(self) -> None:
        file = GenerationFile(1).started(9, [4], 2, promoted=True, predecessors=["aiops://a"])
        later = file.started(18, [9], predecessors=["aiops://c"])
        assert later.predecessors == file.predecessors == ("aiops://a",)
        assert GenerationFile.unpack(later.pack()) == later
        assert later.started(20, [9], promoted=True).predecessors == ()

    def test_a_promotion_has_had_no_lead(self) -> None:
        file = GenerationFile(1, led_by=7)
        assert file.started(9, [4], 2).led_by == 7
        assert file.started(9, [4], 2, promoted=True).led_by == 0
        for wrong in ("aiops://a", [1]):
            data = pack_block(GENERATION, {"generation": 1, "starts": [], "predecessors": wrong})
            with pytest.raises(DamagedState, match="predecessor"):
                GenerationFile.unpack(data)

    def test_places_stay_until_a_promotion(self) -> None:
        """One that takes a place alone is promoted with it."""
        first, second = TakenPlace(1, 1, "b", 7171), TakenPlace(2, 1, "c", 7172)
        later = TakenPlace(1, 2, "a", 7171)
        file = GenerationFile(1).with_place(first).with_place(second).with_place(later)
        assert file.places == (second, later)
        assert GenerationFile.unpack(file.pack()) == file
        assert file.started(9, [4], 2).places == file.places
        assert file.started(9, [4], 2, promoted=True).places == ()
        own = [TakenPlace(1, next_term(3 << 36, 0))]
        taken = file.started(9, [4], 2, promoted=True, places=own)
        assert taken.places == tuple(own)
        assert taken.generation == own[0].number + 2
        again = taken.started(9, [4], 5, promoted=True, places=own)  # as a standby that is led
        assert again.generation == next_start(taken.generation, 5) > taken.generation
        assert term(again.generation) == term(taken.generation)

    def test_a_promotion_is_above_a_place_that_it_does_not_know_of(self) -> None:
        file = GenerationFile(1)
        assert file.started(9, [4], 2, promoted=True, above=5 << 36).generation == (6 << 36) + 2
        assert file.started(9, [4], 2, promoted=True, above=0).generation == (1 << 36) + 2
        for wrong in (1, [1, 2], [1, "2", "a", 7171]):
            data = pack_block(GENERATION, {"generation": 1, "starts": [], "places": [wrong]})
            with pytest.raises(DamagedState, match="place"):
                GenerationFile.unpack(data)

    def test_starts_and_promotions(self) -> None:
        file = GenerationFile(0).started(0, []).started(18, [9, 2])
        assert file.generation == 2 * DRAWN
        starts = GenerationStart(DRAWN, 0, ()), GenerationStart(2 * DRAWN, 18, (9, 2))
        assert file.starts == starts
        promoted = file.started(30, [15, 2], promoted=True)
        assert promoted.generation == 1 << 36
        assert promoted.starts[-1] == GenerationStart(1 << 36, 30, (15, 2))
        assert promoted.started(31, [15, 2]).generation == (1 << 36) + DRAWN
        later = file.started(40, [], DRAWN - 1)
        assert later.generation < promoted.generation, "the old one never wins"
        beside = file.started(29, [14, 2], 7, promoted=True)
        assert beside.generation == (1 << 36) + 7, "promoted at the same time, and known apart"
        again = promoted.started(31, []).started(32, [], 3, promoted=True)
        assert again.generation == (2 << 36) + 3

    def test_history_is_bounded(self) -> None:
        file = GenerationFile(0)
        for row in range(100):
            file = file.started(row, [row])
        assert len(file.starts) == directory.MAX_HISTORY
        assert file.starts[-1] == GenerationStart(100 * DRAWN, 99, (99,))

    @each_row(
        "value",
        [
            {"generation": 1, "starts": [[1, 2]]},
            {"generation": 1, "starts": [[1, 2, ["3"]]]},
            {"generation": True, "starts": []},
            {"generation": 1},
            [],
        ],
    )
    def test_damage(self, value: Any) -> None:
        with pytest.raises(DamagedState, match="generation is damaged"):
            GenerationFile.unpack(pack_block(GENERATION, value))
