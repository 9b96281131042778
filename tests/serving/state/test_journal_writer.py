"""Rows are in the segments' files as soon as they are appended; files are ready and used again."""

from __future__ import annotations

import errno
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from aiops.durable.commit_gate import Acks
from aiops.durable.recorder import AppendRow
from aiops.durable.rows import JournalRow
from aiops.engine.events import Committed, Event, JournalEnded
from aiops.engine.steady import Recorded
from aiops.net.disk import SystemDisk
from aiops.net.faulty_disk import FaultyDisk, FaultyFile
from aiops.net.mapped_file import SHORT
from aiops.serving.state import journal_writer, segment_files
from aiops.serving.state.journal_writer import JournalWriter
from aiops.serving.state.segment_files import SegmentFiles
from aiops.state.directory import PART, StateListing, journal_name
from aiops.state.frames import HEAD
from aiops.state.journal_scan import JournalScan
from aiops.state.row_kinds import STEADY_ROW, RowKind

SMALL = 1 << 16


@pytest.fixture(autouse=True)
def small_segments(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SystemDisk, "segment", SMALL)


class Journal:
    """A writer, its disk, and what it has posted."""

    def __init__(self, folder: Path, acks: Acks = Acks.WRITTEN, **faults: Any) -> None:
        self.acks = acks
        self.folder, self.disk, self.posted = folder, FaultyDisk(**faults), list[Event]()
        self.files = SegmentFiles(self.disk, folder)
        salts = iter(range(1, 1 << 20))
        self.writer = JournalWriter(
            *(self.disk, folder, "run", 1, 1, acks, lambda: next(salts), self.posted.append),
            *(self.files,),
            synced=0,
        )
        self.next = 1

    def write(self, count: int, payload: bytes = bytes(1000), now: float = 0.0) -> list[Any]:
        """Append rows; return the events that this gave at once."""
        found = []
        for _ in range(count):
            row = JournalRow(RowKind.RECEIVED, now, 0, b"row", np.frombuffer(payload, np.uint8))
            later = self.acks >= Acks.DURABLE
            found.append(self.writer.append(AppendRow(self.next, row, later)))
            self.next += 1
        return [event for event in found if event is not None]

    def listing(self) -> StateListing:
        return StateListing(self.disk.names(self.folder))

    def read(self) -> JournalScan:
        listing = self.listing()

        def data(name: str) -> bytes:
            return (self.folder / name).read_bytes()

        return JournalScan(data, listing, 0, listing.segments, ("run", 0, 1))

    def rows(self) -> list[int]:
        return [frame.number for frame in self.read()]


@pytest.fixture
def journal(tmp_path: Path) -> Iterator[Callable[..., Journal]]:
    made = []

    def make(*given: Any, **faults: Any) -> Journal:
        made.append(Journal(tmp_path, *given, **faults))
        return made[-1]

    yield make
    for each in made:
        if not each.writer._closed:
            each.writer.end()


def eventually(true: Callable[[], object]) -> None:
    until = time.monotonic() + 20
    while not true() and time.monotonic() < until:
        time.sleep(0.005)
    assert true()


@pytest.mark.parametrize("acks", [Acks.WRITTEN, Acks.DURABLE])
def test_rows_go_on_over_segments(acks: Acks, journal: Callable[..., Journal]) -> None:
    made = journal(acks)
    made.write(300)
    eventually(lambda: made.acks is Acks.WRITTEN or made.posted[-1:] == [Committed(0.0, 300)])
    assert made.rows() == [*range(1, 301)]
    assert len(made.listing().segments) > 3


def test_a_row_that_is_longer_than_a_segment(journal: Callable[..., Journal]) -> None:
    made = journal()
    for length in (10, 5 * SMALL, 10, 3 * SMALL, SMALL, 7):
        made.write(1, bytes(length))
    assert [len(frame.payload) for frame in made.read()] == [10, 327680, 10, 196608, 65536, 7]


def test_a_written_row_waits_for_no_sync(journal: Callable[..., Journal]) -> None:
    made = journal(sync_fails_at=2)  # the first is of the first segment's head
    assert made.write(300) == []
    assert made.rows() == [*range(1, 301)]
    assert made.posted == []


def test_segments_that_have_settled_are_synced(journal: Callable[..., Journal]) -> None:
    made = journal()
    made.write(200)
    made.write(100, now=60.0)
    eventually(lambda: made.writer._synced > 0)
    made.write(1, now=60.0)
    *_others, last = made.read()
    assert last.number - last.unsynced > 50


@pytest.mark.parametrize("seed", range(4))
def test_all_that_is_written_is_synced_when_it_is_asked_for(
    seed: int, journal: Callable[..., Journal]
) -> None:
    made, synced = journal(lose_unsynced=True, seed=seed), list[int]()
    made.write(100)
    assert made.writer.synced == 0
    made.writer.sync(0.0, synced.append)
    made.write(200)
    eventually(lambda: synced)
    made.writer.sync(0.0, synced.append)
    eventually(lambda: len(synced) == 2)
    assert 100 <= synced[0] <= 300
    assert synced[1] == made.writer.synced == 300
    made.write(10)  # in the same segment: a scan alone takes no segment whose head is lost
    made.disk.cut_power()
    made.disk = FaultyDisk()
    assert made.rows()[:300] == [*range(1, 301)]


def test_a_segment_that_begins_and_ends_while_names_are_read_is_synced(
    journal: Callable[..., Journal], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has no name among those that were read, and no snapshot has covered it."""
    made, synced = journal(lose_unsynced=True, seed=2), list[int]()
    made.write(10)  # too few for the thread to make a file ready: it does nothing but sync
    names, read, written = made.disk.names, threading.Event(), threading.Event()
    thread = threading.current_thread()

    def names_before(folder: Path) -> list[str]:
        found = names(folder)
        if threading.current_thread() is not thread:
            read.set()
            assert written.wait(20)
        return found

    monkeypatch.setattr(made.disk, "names", names_before)
    made.writer.sync(0.0, synced.append)
    assert read.wait(20)
    made.write(130)
    written.set()
    eventually(lambda: synced)
    made.writer.sync(0.0, synced.append)
    eventually(lambda: len(synced) == 2)
    assert synced[1] == 140
    monkeypatch.undo()
    made.disk.cut_power()
    made.disk = FaultyDisk()
    assert made.rows()[:140] == [*range(1, 141)]


def test_a_sync_that_fails_ends_the_journal(journal: Callable[..., Journal]) -> None:
    made = journal(sync_fails_at=2)
    made.write(200)
    made.write(100, now=60.0)
    eventually(lambda: made.posted)
    [event] = made.posted
    assert isinstance(event, JournalEnded)
    assert "Input/output error" in event.why


def test_a_thread_that_has_no_memory_ends_the_journal(
    journal: Callable[..., Journal], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(effects: object) -> None:
        raise MemoryError

    made = journal(Acks.DURABLE)
    monkeypatch.setattr(made.writer, "_write", fail)
    made.write(1)
    eventually(lambda: made.posted)
    assert made.posted == [
        JournalEnded(0.0, f"the journal in {made.folder} has ended: MemoryError")
    ]


def test_durable_rows_are_told_once_they_are_synced(journal: Callable[..., Journal]) -> None:
    made = journal(Acks.DURABLE)
    made.write(10)
    eventually(lambda: made.posted and made.posted[-1].row == 10)  # type: ignore[union-attr]
    assert all(isinstance(event, Committed) for event in made.posted)
    made.disk.sync_fails_at = 1
    made.write(1)
    eventually(lambda: isinstance(made.posted[-1], JournalEnded))


def test_covered_segments_are_used_again(journal: Callable[..., Journal]) -> None:
    made = journal()
    made.write(400)
    first, second, *_others = made.listing().segments
    files = {(made.folder / journal_name(each)).stat().st_ino for each in (first, second)}
    made.files.retire([first, second])
    assert len(made.listing().spares) >= 2
    made.write(800, now=1.0)
    left = {(made.folder / journal_name(each)).stat().st_ino for each in made.listing().segments}
    assert files & left, "their bytes are overwritten"
    listing = made.listing()
    rows = JournalScan(
        lambda name: (made.folder / name).read_bytes(),
        listing,
        900,
        listing.segments_after(900),
        ("run", 0, 1),
    )
    assert [*rows][-1].number == 1200


def test_a_disk_that_fails_while_segments_are_kept_reserves_none(
    journal: Callable[..., Journal], monkeypatch: pytest.MonkeyPatch
) -> None:
    """They may lack their new names on the disk, so they go; later ones are kept again."""

    def fails(_folder: Path) -> None:
        raise OSError(errno.EIO, "Input/output error")

    made = journal()
    made.write(600)
    covered = made.listing().segments[:-1]
    made.writer.end()  # and its thread, which has a spare ready
    made.files.remove_spares()
    with monkeypatch.context() as patch:
        patch.setattr(made.disk, "sync_names", fails)
        with pytest.raises(OSError, match="Input/output"):
            made.files.retire(covered[:2])
    assert made.listing().spares == ()
    made.files.retire(covered[2:4])
    assert made.listing().spares == (1, 2)


def test_no_more_spares_than_are_of_use(
    journal: Callable[..., Journal], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(segment_files, "MAX_SPARES", 3)
    made = journal()
    made.write(600)
    made.files.retire(made.listing().segments[:-1])
    assert len(made.listing().spares) <= 4, "and one that is ready"


def test_a_disk_that_is_nearly_full_takes_smaller_segments(
    journal: Callable[..., Journal], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(SystemDisk, "segment", 1 << 20)
    made = journal(full_at=(1 << 20) + (1 << 18))
    made.write(1200)
    assert made.rows() == [*range(1, 1201)]
    made.disk.full_at = 0
    [ended] = made.write(1000)
    assert isinstance(ended, JournalEnded)
    assert "No space left on device" in ended.why
    assert made.rows()[-1] < made.next - 1
    assert errno.ENOSPC in segment_files.NO_ROOM


def test_a_segment_that_is_being_filled_is_waited_for_when_there_is_no_room_for_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    entered, go_on = threading.Event(), threading.Event()

    def fill(file: FaultyFile) -> None:
        entered.set()
        assert go_on.wait(20)

    class Full(FaultyDisk):
        def create(self, path: Path, size: int) -> FaultyFile:
            try:
                return super().create(path, size)
            except OSError:
                go_on.set()
                raise

    monkeypatch.setattr(FaultyFile, "fill", fill)
    files = SegmentFiles(Full(full_at=SMALL), tmp_path)
    keeper = threading.Thread(target=files.make_ready, kwargs={"filled": True})
    keeper.start()
    assert entered.wait(20)
    try:
        file, size = files.begin(1, bytes(HEAD), 1000, synced=False)
    finally:
        go_on.set()
        keeper.join()
    assert size == SMALL
    file.close()


def test_segments_that_are_hidden_are_not_called_synced(journal: Callable[..., Journal]) -> None:
    """They have other names on the disk, and no snapshot has covered them."""
    made = journal()
    made.files.hide()
    first = made.folder / journal_name(1)
    first.rename(first.with_name(first.name + PART))
    made.write(200)
    made.write(1, now=1.0)
    eventually(lambda: made.writer._files._ready is not None)
    time.sleep(0.1)
    assert made.writer._synced == 0
    made.write(200, now=60.0)
    eventually(lambda: made.writer._synced > 0)


def test_the_end_is_told_when_no_buffer_is_being_written(
    journal: Callable[..., Journal], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The event gives buffers back, and the next push would be written in a row of this one."""
    made = journal()
    busy, go_on = threading.Event(), threading.Event()
    write, failed = FaultyFile.write, threading.Event()

    def slow(file: FaultyFile, buffers: Any, at: int) -> None:
        if sum(map(len, buffers)) > SMALL:
            busy.set()
            assert go_on.wait(20)
        write(file, buffers, at)

    def fails(*_given: object) -> None:
        failed.set()
        raise OSError(errno.EIO, "Input/output error")

    made.write(30)
    monkeypatch.setattr(FaultyFile, "write", slow)
    monkeypatch.setattr(made.writer, "_sync_old", fails)
    row = JournalRow(RowKind.RECEIVED, 60.0, 0, b"row", np.zeros(2 * SMALL, np.uint8))
    made.writer.append(AppendRow(31, row, later=True))  # in a new segment
    assert busy.wait(20)
    assert failed.wait(20)
    time.sleep(0.05)
    assert made.posted == []
    go_on.set()
    eventually(lambda: any(isinstance(event, JournalEnded) for event in made.posted))


def test_a_segment_that_was_synced_and_closed_needs_no_sync(
    journal: Callable[..., Journal], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A standby's rows are written at once, and synced by the thread."""
    made = journal(Acks.DURABLE)
    row = JournalRow(RowKind.RECEIVED, 0.0, 0, b"row", np.zeros(10, np.uint8))
    made.writer.append(AppendRow(1, row))
    eventually(lambda: made.posted == [Committed(0.0, 1)])
    old = made.writer._file
    made.writer._roll(2, 100, 60.0)
    eventually(lambda: not made.writer._old)
    made.writer._put(journal_writer._Unsynced(old, 1, 60.0))  # it was slow
    eventually(lambda: len(made.posted) == 2)
    assert made.posted[-1] == Committed(60.0, 1)


def test_a_file_that_was_ready_is_a_spare_again(journal: Callable[..., Journal]) -> None:
    made = journal()
    made.write(100)
    eventually(lambda: made.writer._files._ready is not None)
    made.writer.end()  # and its thread, which may make another
    assert made.listing().spares
    assert made.files.remove_spares()
    assert not made.listing().spares


def test_a_segment_has_room_for_the_longest_row_that_is_expected(tmp_path: Path) -> None:
    """And for the short rows with which a start begins; if the disk has less, for fewer."""
    disk, longest = FaultyDisk(), 65 << 20
    files = SegmentFiles(disk, tmp_path)
    files.expect(longest)
    file, size = files.begin(1, bytes(HEAD), 0, synced=False)
    assert longest + (1 << 15) < size < longest + (1 << 17)
    file.close()
    files.expect(100)  # does not make it less
    disk.full_at = size + SMALL
    file, size = files.begin(2, bytes(HEAD), 0, synced=False)
    assert 0 < size <= SMALL
    file.close()


class TestExchanges:
    """Rows of steady exchanges, stored into a segment's memory."""

    def exchange(self, written: Journal, payload: bytes, time: float = 0.0) -> bool:
        """Store a row, or else append the same; return whether it was stored."""
        fields = 1, written.next, written.next, -1, 0, 7
        data = np.frombuffer(payload, np.uint8)
        stored = written.writer.exchange(written.next, time, 0, fields, Recorded(data))
        if not stored:
            row = STEADY_ROW.pack(*fields)
            steady = JournalRow(RowKind.STEADY, time, 0, row, data)
            assert written.writer.append(AppendRow(written.next, steady)) is None
        written.next += 1
        return stored

    @pytest.fixture
    def mapped(self, journal: Callable[..., Journal], monkeypatch: pytest.MonkeyPatch) -> Journal:
        monkeypatch.setattr(FaultyDisk, "create", SystemDisk.create)
        written = journal()
        if written.writer._file.lend(0, 1) is None:
            pytest.skip("this folder's file system lends no memory")
        return written

    def test_they_are_read_with_those_that_are_appended(self, mapped: Journal) -> None:
        payloads, stored = [], 0
        for number in range(300):
            payload = bytes([number % 251]) * (1000 if number % 97 else 504)
            if number % 50 == 49:
                payloads.append(payload)
                mapped.write(1, payload)
            else:
                payloads.append(payload)
                stored += self.exchange(mapped, payload, time=number / 100)
        assert stored > 200, "few rows went the short way"
        mapped.writer.end()
        found = [*mapped.read()]
        assert [each.number for each in found] == [*range(1, 301)]
        assert [bytes(each.payload) for each in found] == payloads
        assert len(mapped.listing().segments) > 1

    def test_what_waits_is_written_before(self, mapped: Journal) -> None:
        assert not self.exchange(mapped, bytes(8))  # the first row of this length
        assert self.exchange(mapped, bytes(8))
        row = JournalRow(RowKind.RECEIVED, 0.0, 0, b"waits", np.zeros(8, np.uint8))
        mapped.writer.append(AppendRow(mapped.next, row, more=True))
        mapped.next += 1
        assert not self.exchange(mapped, bytes(8))
        assert self.exchange(mapped, bytes(8))
        mapped.writer.end()
        assert mapped.rows() == [1, 2, 3, 4, 5]

    def test_a_disk_that_lends_no_memory(self, journal: Callable[..., Journal]) -> None:
        written = journal()
        assert not any(self.exchange(written, bytes(8)) for _ in range(5))
        written.writer.end()
        assert written.rows() == [1, 2, 3, 4, 5]

    def test_segments_of_long_rows_lend_no_memory(self, mapped: Journal) -> None:
        """To map one costs as much as a few rows, and nothing would be stored there."""
        payload = bytes(SHORT + 8)
        for _ in range(3):
            assert not self.exchange(mapped, payload)
        assert mapped.writer._file.lend(0, 1) is None
        for _ in range(3):
            assert not self.exchange(mapped, bytes(8))
        begun = len(mapped.listing().segments)
        while len(mapped.listing().segments) == begun:
            mapped.write(1, payload)
        assert mapped.writer._file.lend(0, 1) is not None  # its rows are short again
        assert self.exchange(mapped, bytes(8))
        mapped.writer.end()
        assert mapped.rows() == [*range(1, mapped.next)]

    def test_none_is_stored_after_the_end(self, mapped: Journal) -> None:
        self.exchange(mapped, bytes(8))
        assert self.exchange(mapped, bytes(8))
        mapped.writer.end()
        assert not mapped.writer.exchange(
            3, 0.0, 0, (1, 3, 3, -1, 0, 7), Recorded(np.zeros(8, np.uint8))
        )
        assert mapped.rows() == [1, 2]
