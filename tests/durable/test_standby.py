"""Feeding a standby, without sockets and disks."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from aiops.algorithms.asgd import ASGD
from aiops.durable.commit_gate import Acks
from aiops.durable.standby import (
    BytesSink,
    StandbyDesk,
    StandbyPosition,
    generations_of,
    goes_on,
    rows_in,
    starts_of,
)
from aiops.durable.standby_feed import (
    AHEAD,
    BATCH,
    Replication,
    RowBatch,
    RowFeed,
    RowsGone,
    StandbyProgress,
    agree,
)
from aiops.engine.engine import Engine
from aiops.engine.events import Drop, Joined, Received, Reply
from aiops.errors import RemoteProtocolError
from aiops.model.parts import Part
from aiops.state.directory import (
    GenerationFile,
    GenerationStart,
    StateListing,
    TakenPlace,
    journal_name,
)
from aiops.state.frames import END, HEAD, SegmentHead, frame
from aiops.wire.messages import Error, Fetch, Hello, Ping, Pong, Report, Stats, Welcome
from aiops.wire.standby_messages import (
    JournalRows,
    Promote,
    RowsKept,
    SnapshotPart,
    StandbyWelcome,
)
from tests.seeds import examples

RUN = "8c2f"
ORIGIN = RUN, 0, 1


class Journal:
    """A journal in memory, whose segments have a fixed length."""

    def __init__(self, size: int = 4096) -> None:
        self.size, self.newest = size, 0
        self.segments: dict[int, bytearray] = {}
        self.removed: set[int] = set()
        self._at = size

    def append(self, nbytes: int = 20, *, roll: bool = False) -> None:
        """Append a row with a payload of some bytes."""
        number, payload = self.newest + 1, bytes([self.newest % 251]) * nbytes
        row = f"row {number}".encode()
        before, after = frame(
            *(number, 9, float(number), 0, row, nbytes, zlib.crc32(payload)),
            salt=self._salt(number, roll),
            unsynced=1,
        )
        data = before + payload + after
        segment = self.segments[max(self.segments)]
        if self._at + len(data) + len(END) > len(segment):
            segment.extend(bytes(self._at + len(data) + len(END) - len(segment)))
        segment[self._at : self._at + len(data)] = data
        self._at += len(data)
        self.newest = number

    def _salt(self, number: int, roll: bool) -> int:
        if roll or self._at + 200 > self.size:
            salt = 1000 + number
            segment = bytearray(self.size)
            segment[:HEAD] = SegmentHead(number, 3, RUN, salt).pack()
            self.segments[number], self._at = segment, HEAD
        return 1000 + max(self.segments)

    def listing(self) -> StateListing:
        return StateListing(map(journal_name, {*self.segments} - self.removed))

    def read(self, first: int, at: int, into: memoryview) -> int:
        data = self.segments[first][at : at + len(into)]
        into[: len(data)] = data
        return len(data)


def message(batch: RowBatch, newest: int | None = None) -> JournalRows:
    return JournalRows(0, batch.first, batch.last, newest or batch.last, whole(len(batch.data)))


def whole(nbytes: int, start: int = 0) -> tuple[Part, ...]:
    return (Part(start, start + nbytes, "raw", nbytes, 0),)


def read_all(feed: RowFeed, row: int) -> int:
    """Read what there is, and take it as a standby does; return the last row."""
    while (batch := feed.read()) is not None:
        frames = rows_in(message(batch), batch.data, ORIGIN, row)
        for found in frames:
            row += 1
            assert found.number == row
            assert found.row == f"row {row}".encode()
            assert bytes(found.payload) == bytes([(row - 1) % 251]) * len(found.payload)
    return row


class TestFeed:
    @settings(max_examples=examples(60), deadline=None)
    @given(
        st.lists(st.tuples(st.integers(0, 900), st.booleans()), min_size=1, max_size=60), st.data()
    )
    def test_from_any_row_while_others_are_written(
        self, rows: Sequence[tuple[int, bool]], data: st.DataObject
    ) -> None:
        journal = Journal()
        first = data.draw(st.integers(1, len(rows)))
        for nbytes, roll in rows[:first]:
            journal.append(nbytes, roll=roll)
        after = data.draw(st.integers(0, first))
        feed, row = RowFeed(journal, after), after
        for nbytes, roll in rows[first:]:
            if data.draw(st.booleans()):
                row = read_all(feed, row)
            journal.append(nbytes, roll=roll)
        assert read_all(feed, row) == len(rows)
        assert feed.read() is None

    def test_no_row_after_the_last_that_is_synced_is_read(self) -> None:
        journal = Journal()
        for number in range(1, 9):
            journal.append(20, roll=number in (4, 6))
        feed, found = RowFeed(journal, 2), []
        for last in (0, 2, 3, 3, 4, 4, 7, 8, 9):
            read = 0
            while (batch := feed.read(last)) is not None:
                read += batch.last - batch.first + 1
                rows = rows_in(message(batch), batch.data, ORIGIN, batch.first - 1)
                assert [row.number for row in rows] == [*range(batch.first, batch.last + 1)]
            found.append(read)
        assert found == [0, 0, 1, 0, 1, 0, 3, 1, 0]

    def test_a_row_that_is_longer_than_a_batch(self) -> None:
        journal = Journal(8 * BATCH)
        journal.append(20)
        journal.append(3 * BATCH)
        journal.append(20)
        assert read_all(RowFeed(journal, 0), 0) == 3

    @pytest.mark.parametrize("written", [0, 4, 47, 48, 60])
    def test_a_row_that_is_being_written_is_waited_for(self, written: int) -> None:
        journal = Journal()
        journal.append(40)
        at = journal._at
        feed = RowFeed(journal, 0)
        assert read_all(feed, 0) == 1
        journal.append(40)
        [first] = journal.segments
        data = bytes(journal.segments[first])
        journal.segments[first][at + written :] = bytes(len(data) - at - written)
        assert feed.read() is None
        journal.segments[first][:] = data
        assert read_all(feed, 1) == 2

    def test_rows_that_were_removed(self) -> None:
        journal = Journal()
        for _ in range(4):
            journal.append(roll=True)
        del journal.segments[1]
        with pytest.raises(RowsGone):
            RowFeed(journal, 0).read()
        assert read_all(RowFeed(journal, 1), 1) == 4

    def test_a_segment_that_is_removed_or_used_again_while_it_is_read(self) -> None:
        journal = Journal()
        for _ in range(3):
            journal.append(roll=True)
        feed = RowFeed(journal, 0)
        assert feed.read() is not None
        journal.segments[1] = journal.segments.pop(3)  # its file is open, and has other rows now
        journal.removed = {1}
        with pytest.raises(RowsGone):
            feed.read()

    @pytest.mark.parametrize("before", [0, 1, 2])
    def test_rows_that_were_undone_are_not_read(self, before: int) -> None:
        """They lie whole behind the last one that stays, and others have their numbers now."""
        journal = Journal()
        for _ in range(5):
            journal.append(7)
        feed = RowFeed(journal, 0)
        assert (batch := feed.read(before)) is None or batch.last == before
        journal.newest = 2  # the server has gone back
        for _ in range(5):
            journal.append(20, roll=journal.newest == 2)
        frames = []
        while (batch := feed.read()) is not None:
            frames += rows_in(message(batch), batch.data, ORIGIN, batch.first - 1)
        assert [frame.number for frame in frames] == [*range(before + 1, 8)]
        assert [len(frame.payload) for frame in frames] == ([7, 7] + [20] * 5)[before:]

    def test_a_gap_is_no_journal(self) -> None:
        journal = Journal()
        for _ in range(3):
            journal.append(roll=True)
        del journal.segments[2]
        feed = RowFeed(journal, 0)
        assert feed.read() is not None
        assert feed.read() is None  # it may be on its way
        with pytest.raises(RowsGone, match="2 to 2"):
            feed.read()


@pytest.fixture
def batch() -> RowBatch:
    journal = Journal()
    for nbytes in (0, 5, 16):
        journal.append(nbytes)
    found = RowFeed(journal, 0).read()
    assert found is not None
    return found


class TestRows:
    def test_every_flipped_byte_is_refused(self, batch: RowBatch) -> None:
        """Zeros that fill up are not looked at; no row is another."""
        right = [*map(shown, rows_in(message(batch), batch.data, ORIGIN, 0))]
        refused = 0
        for at in range(len(batch.data)):
            data = bytearray(batch.data)
            data[at] ^= 0x10
            try:
                assert [*map(shown, rows_in(message(batch), memoryview(data), ORIGIN, 0))] == right
            except RemoteProtocolError:
                refused += 1
        assert refused > 0.9 * len(batch.data)

    def test_every_length_is_refused(self, batch: RowBatch) -> None:
        for end in range(len(batch.data)):
            with pytest.raises(RemoteProtocolError):
                rows_in(message(batch), batch.data[:end], ORIGIN, 0)
        longer = memoryview(bytes(batch.data) + bytes(8))
        with pytest.raises(RemoteProtocolError, match="8 bytes behind"):
            rows_in(message(batch), longer, ORIGIN, 0)

    @pytest.mark.parametrize(
        "changes",
        [{"first": 2}, {"last": 0}, {"last": 4}, {"newest": 2}, {"first": 0}, {"last": 2**53 - 1}],
    )
    def test_other_numbers_are_refused(self, batch: RowBatch, changes: dict[str, int]) -> None:
        with pytest.raises(RemoteProtocolError):
            rows_in(replace(message(batch), **changes), batch.data, ORIGIN, 0)

    def test_other_rows_are_refused(self, batch: RowBatch) -> None:
        with pytest.raises(RemoteProtocolError):
            rows_in(message(batch), batch.data, ORIGIN, 1)
        with pytest.raises(RemoteProtocolError, match="is of run 8c2f, and not of run ffff"):
            rows_in(message(batch), batch.data, ("ffff", 0, 1), 0)

    def test_the_rows_of_another_shard_are_refused(self, batch: RowBatch) -> None:
        """Followers of one run have rows of the same numbers and kinds."""
        with pytest.raises(RemoteProtocolError, match="of run 8c2f, and not of shard 2 of 3 of"):
            rows_in(message(batch), batch.data, (RUN, 2, 3), 0)


def shown(found: Any) -> tuple[Any, ...]:
    return found.number, found.kind, found.time, found.flags, found.row, bytes(found.payload)


class TestSink:
    def test_parts_lie_behind_each_other(self) -> None:
        found = BytesSink(JournalRows(0, 1, 1, 1, (*whole(3), *whole(2, 3))), 5)
        found.view(0, 0)[:3] = b"abc"
        found.view(1, 1)[:1] = b"e"
        found.view(1, 0)[:1] = b"d"
        assert bytes(found.data) == b"abcde"

    @pytest.mark.parametrize(
        "parts",
        [
            whole(6),
            (*whole(3), *whole(2, 4)),
            whole(3, 1),
            (Part(0, 3, "int8", 3, 0),),
            (Part(0, 3, "raw", 2**32 - 1, 0),),
            (Part(0, 2**53 - 1, "raw", 3, 0),),
        ],
    )
    def test_other_parts_are_refused_before_there_is_memory(self, parts: Any) -> None:
        with pytest.raises(RemoteProtocolError):
            BytesSink(JournalRows(0, 1, 1, 1, parts), 5)
        with pytest.raises(RemoteProtocolError):
            BytesSink(SnapshotPart(0, parts), 5)


STARTS = [
    GenerationStart(1, 0, (0,)),
    GenerationStart(2, 40, (19,)),
    GenerationStart(3, 90, (44,)),
]


@pytest.mark.parametrize(
    ("generation", "row", "agrees"),
    [
        (3, 100, True),
        (3, 90, True),
        (3, 101, False),  # rows that the server does not have
        (2, 90, True),
        (2, 91, False),  # rows of the second generation that the third did not find
        (1, 40, True),
        (1, 41, False),
        (4, 10, False),
        (0, 0, False),
        (65536, 50, False),
    ],
)
def test_the_rows_that_are_the_primarys(generation: int, row: int, agrees: bool) -> None:
    assert agree(STARTS, 100, generation, row) is agrees


def welcome(**changes: Any) -> StandbyWelcome:
    starts = starts_of(GenerationFile(3, STARTS), 0)
    found = StandbyWelcome(0, 3, b"", RUN, 3, 100, 0, starts)
    return replace(found, **changes)


class TestWelcome:
    def test_what_a_standby_does_with_it(self) -> None:
        held = StandbyPosition(RUN, 3, 100)
        assert goes_on(held, welcome(), "a")
        assert not goes_on(held, welcome(row=0), "a")
        assert not goes_on(held, welcome(snapshot=4096), "a")
        assert not goes_on(StandbyPosition(), welcome(row=0), "a")
        with pytest.raises(RemoteProtocolError, match="of run 8c2f"):
            goes_on(held, welcome(run="ffff"), "a")
        with pytest.raises(RemoteProtocolError, match="was superseded"):
            goes_on(held, welcome(generation=2), "a")

    def test_generations(self) -> None:
        assert generations_of(welcome()) == GenerationFile(3, STARTS)
        assert generations_of(welcome(starts={})) == GenerationFile(3, [])

    @pytest.mark.parametrize(
        "start",
        [1, (), (1, 2), (1, 2, 3), (1, 2, (-1,)), ("1", 2, ()), (1, 2, (True,)), (-1, 0, ())],
    )
    def test_generations_that_are_none(self, start: Any) -> None:
        with pytest.raises(RemoteProtocolError):
            generations_of(welcome(starts={"starts": (start,)}))

    def test_the_places_of_a_leads_followers(self) -> None:
        """The standby of the lead has their numbers: their addresses are those of its own site."""
        taken = TakenPlace(1, 4, "b", 7171), TakenPlace(2, 1, "c", 7172)
        file = GenerationFile(3, STARTS, places=taken)
        found = generations_of(welcome(starts=starts_of(file, 0), shards=3))
        assert found.places == (TakenPlace(1, 4), TakenPlace(2, 1))
        assert not generations_of(welcome(starts=starts_of(file, 1), shards=3)).places

    @pytest.mark.parametrize(
        "place", [1, (), (1,), (1, 2, "b", 1), (0, 1), (1, 0), (3, 1), ("1", 1)]
    )
    def test_places_that_are_none(self, place: Any) -> None:
        with pytest.raises(RemoteProtocolError):
            generations_of(welcome(starts={"places": (place,)}, shards=3))


def progress(sent: int, **numbers: int) -> StandbyProgress:
    return StandbyProgress("b", sent, **numbers)


class TestProgress:
    def test_it_is_sent_as_much_as_it_may_be_behind(self) -> None:
        found = progress(0)
        assert found.has_room(10 * AHEAD)  # one message, however long
        found.note_sent(RowBatch(1, 5, memoryview(bytes(AHEAD - 10))))
        assert found.has_room(10)
        assert not found.has_room(11)
        found.note_kept(RowsKept(0, 4, 0, 0))
        assert not found.has_room(11)
        found.note_kept(RowsKept(0, 5, 0, 0))
        assert found.has_room(11)
        assert found.ahead == 0

    @pytest.mark.parametrize(
        "kept", [(6, 0, 0), (5, 6, 0), (3, 0, 0), (4, 1, 0), (5, 2, 6), (2**53 - 1, 2, 2)]
    )
    def test_what_it_cannot_have_is_refused(self, kept: tuple[int, int, int]) -> None:
        found = progress(5, written=4, synced=2, applied=1)
        with pytest.raises(RemoteProtocolError):
            found.note_kept(RowsKept(0, *kept))


class TestReplication:
    def test_a_row_is_committed_when_both_have_it(self) -> None:
        found = Replication(Acks.REPLICATED, 10.0, 0.0, 0, 0)
        found.standbys[1] = progress(9)
        assert found.synced_here(5) == 0
        assert found.kept(1, RowsKept(0, 9, 3, 0), 0.1) == 3
        assert found.kept(1, RowsKept(0, 9, 9, 0), 0.2) == 5
        assert found.synced_here(9) == 9

    @pytest.mark.parametrize("acks", [Acks.WRITTEN, Acks.DURABLE])
    def test_nothing_waits_for_a_standby_otherwise(self, acks: Acks) -> None:
        found = Replication(acks, 10.0, 0.0, 0, 0)
        found.standbys[1] = progress(9)
        assert found.synced_here(5) == 5
        assert not found.tick(100.0, 9)
        assert found.level is acks

    def test_one_of_two_is_enough(self) -> None:
        found = Replication(Acks.REPLICATED, 10.0, 0.0, 0, 0)
        found.standbys.update({1: progress(9), 2: progress(9)})
        found.synced_here(9)
        assert found.kept(2, RowsKept(0, 9, 7, 0), 0.1) == 7
        assert found.kept(1, RowsKept(0, 9, 2, 0), 0.2) == 7

    def test_it_falls_when_no_standby_is_there_and_comes_back(self) -> None:
        found = Replication(Acks.REPLICATED, 10.0, 0.0, 0, 0)
        assert not found.tick(9.0, 3)
        found.synced_here(3)
        assert found.committed == 0
        assert "no standby is connected" in found.tick(10.5, 3)
        assert found.level is Acks.DURABLE
        assert found.committed == 3
        assert not found.tick(30.0, 4)  # said once
        assert found.synced_here(4) == 4
        found.standbys[1] = progress(4)
        found.kept(1, RowsKept(0, 4, 3, 3), 31.0)
        assert found.level is Acks.DURABLE
        found.kept(1, RowsKept(0, 4, 4, 4), 31.1)
        assert found.level is Acks.REPLICATED
        assert not found.tick(31.2, 4)
        assert not found.tick(60.0, 4)  # nothing waits

    def test_it_falls_when_a_row_waits_for_too_long(self) -> None:
        found = Replication(Acks.REPLICATED, 10.0, 0.0, 0, 0)
        found.standbys[1] = progress(100)
        for second in range(1, 30):  # always a row behind, and never late
            found.synced_here(second)
            found.kept(1, RowsKept(0, second, second - 1, 0), float(second))
            assert not found.tick(float(second), second)
        assert "no standby keeps up" in found.tick(41.0, 30)
        assert found.committed == 29

    def test_what_is_committed_stays_committed(self) -> None:
        found = Replication(Acks.REPLICATED, 10.0, 0.0, 0, 0)
        found.standbys[1] = progress(9)
        found.synced_here(9)
        assert found.kept(1, RowsKept(0, 9, 9, 0), 0.1) == 9
        del found.standbys[1]
        assert found.committed == 9

    def test_seconds_behind(self) -> None:
        found = Replication(Acks.WRITTEN, 10.0, 0.0, 0, 0)
        for second, row in ((1.0, 10), (2.0, 20), (3.0, 20), (4.0, 30)):
            found.tick(second, row)
        assert found.seconds_behind(30, 5.0) == 0
        assert found.seconds_behind(20, 5.0) == 1.0
        assert found.seconds_behind(12, 5.0) == 3.0
        assert found.seconds_behind(3, 5.0) == 4.0

    def test_bytes_behind(self) -> None:
        """Those of the rows that a standby lacks, whether it was sent them or not."""
        found = Replication(Acks.WRITTEN, 10.0, 0.0, 10, 10)
        for second, row, nbytes in ((1.0, 10, 0), (2.0, 20, 700), (3.0, 20, 700), (4.0, 30, 900)):
            found.tick(second, row, nbytes)
        assert found.bytes_behind(30) == 0
        assert found.bytes_behind(20) == 200
        assert found.bytes_behind(12) == 900  # or less: between two marks
        assert found.bytes_behind(3) == 900  # and rows before the first mark
        found.note(5.0, 40, 100)  # of another journal
        assert found.bytes_behind(30) == 0
        found.note(6.0, 41, 150)
        assert found.bytes_behind(40) == 50


def hello(role: str) -> Hello:
    return Hello(0, 3, "5f0c", 1, "w", role, False, bytes(16), "test")


class TestDesk:
    def made(self) -> tuple[StandbyDesk, list[tuple[int, int]]]:
        asked: list[tuple[int, int]] = []
        engine = Engine(ASGD())
        promote = lambda peer, id: asked.append((peer, id))  # noqa: E731
        return StandbyDesk(lambda: engine, engine.report, "aiops://a", promote), asked

    def test_a_worker_is_sent_to_the_primary(self) -> None:
        desk, _asked = self.made()
        reply, drop = desk.handle(Joined(0.0, 1, hello("worker")))
        assert isinstance(reply, Reply)
        assert isinstance(reply.message, Error)
        assert reply.message.code == "standby"
        assert reply.message.fatal
        assert reply.message.details == {"primary": "aiops://a"}
        assert isinstance(drop, Drop)

    def test_an_observer_may_look_and_promote(self) -> None:
        desk, asked = self.made()
        [reply] = desk.handle(Joined(0.0, 1, hello("observer")))
        assert isinstance(reply, Reply)
        assert isinstance(reply.message, Welcome)
        for request, answer in ((Ping(1), Pong), (Stats(2), Report), (Fetch(3, -1), Error)):
            [reply] = desk.handle(Received(0.0, 1, request))
            assert isinstance(reply, Reply)
            assert type(reply.message) is answer
            assert reply.message.id == request.id
        assert desk.handle(Received(0.0, 1, Promote(4))) == []
        assert asked == [(1, 4)]
        assert desk.handle(Received(0.0, 1, Pong(0))) == []
