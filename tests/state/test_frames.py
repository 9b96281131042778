"""Any rows come back from a segment's bytes; damage is told from a torn end, and is never a row."""

from __future__ import annotations

import time
import zlib
from struct import Struct
from typing import Any, NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aiops.errors import DamagedState, UsageError
from aiops.state import frames
from aiops.state.frames import (
    END,
    FRAME,
    HEAD,
    UNKNOWN,
    FixedFrames,
    JournalFrame,
    SegmentHead,
    SegmentScan,
    frame,
    frame_bytes,
    never_reached,
)
from tests.rows import each_row

SALT, OTHER_SALT = 0x1234ABCD, 0x77777777


class Row(NamedTuple):
    """A row as it is given to `frame`."""

    row: bytes
    payload: bytes
    kind: int = 6
    time: float = 1.5
    flags: int = 0


rows = st.builds(
    Row,
    st.binary(max_size=40),
    st.binary(max_size=60),
    st.integers(0, 255),
    st.floats(allow_nan=False),
    st.integers(0, 255),
)


def segment(
    written: list[Row], first: int = 1, salt: int = SALT, marks: dict[int, int] | None = None
) -> tuple[bytes, list[int]]:
    """A segment of these rows, and where each ends.

    ``marks``: by the number of a row, the newest row that was known to be synced then.
    """
    data = SegmentHead(first, 4, "8c2f", salt).pack()
    ends = []
    for number, row in enumerate(written, first):
        unsynced = number - marks[number] if marks and number in marks else UNKNOWN
        before, after = frame(
            number,
            row.kind,
            row.time,
            row.flags,
            row.row,
            len(row.payload),
            zlib.crc32(row.payload),
            salt=salt,
            unsynced=unsynced,
        )
        assert len(data) % 8 == 0
        data += before + row.payload + after
        ends.append(len(data))
    return data, ends


def plain(found: list[JournalFrame]) -> list[Row]:
    return [Row(f.row, bytes(f.payload), f.kind, f.time, f.flags) for f in found]


def read(data: bytes, **settings: Any) -> tuple[list[JournalFrame], SegmentScan]:
    scan = SegmentScan(data, "journal-1", **settings)
    return list(scan), scan


ROWS = [Row(b"one", b"payload", 7, 0.5, 1), Row(b"", b""), Row(b"three rows", bytes(range(50)))]


@given(st.lists(rows), st.integers(1, 1 << 62), st.integers(0, (1 << 32) - 1))
def test_round_trip(written: list[Row], first: int, salt: int) -> None:
    data, ends = segment(written, first, salt)
    found, scan = read(data, first=first)
    assert plain(found) == written
    assert [f.number for f in found] == list(range(first, first + len(written)))
    assert [f.end for f in found] == ends
    assert [f.end - f.at for f in found] == [
        frame_bytes(len(r.row), len(r.payload)) for r in written
    ]
    assert (scan.head, scan.torn) == (SegmentHead(first, 4, "8c2f", salt), 0)
    assert (scan.row, scan.end) == (first + len(written), len(data))


@given(st.lists(rows, max_size=4), st.data())
def test_every_prefix_is_a_prefix_of_the_rows(written: list[Row], data: st.DataObject) -> None:
    whole, ends = segment(written)
    length = data.draw(st.integers(HEAD, len(whole)))
    found, scan = read(whole[:length])
    count = sum(end <= length for end in ends)
    assert plain(found) == written[:count]
    assert scan.row == 1 + count
    assert (scan.torn > 0) == any(whole[scan.end : min(length, scan.end + 8)])
    assert scan.torn <= length - scan.end


def test_every_truncation() -> None:
    whole, ends = segment(ROWS)
    for length in range(HEAD, len(whole)):
        found, scan = read(whole[:length])
        assert plain(found) == ROWS[: sum(end <= length for end in ends)]
        assert (scan.torn > 0) == (length not in (HEAD, *ends))
    for length in range(HEAD):
        with pytest.raises(DamagedState, match="less than a head"):
            read(whole[:length])


def flipped(data: bytes, bit: int) -> bytes:
    made = bytearray(data)
    made[bit // 8] ^= 1 << bit % 8
    return bytes(made)


def test_every_flipped_bit_is_torn_or_is_in_the_padding() -> None:
    whole, ends = segment(ROWS)
    starts = [HEAD, *ends[:-1]]
    for bit in range(8 * HEAD, 8 * len(whole)):
        found, scan = read(flipped(whole, bit))
        where = sum(start <= bit // 8 for start in starts) - 1
        if len(found) == len(ROWS):
            row = ROWS[where]
            at = bit // 8 - starts[where] - FRAME
            padded = len(row.row) + -len(row.row) % 8
            assert len(row.row) <= at < padded or at >= padded + len(row.payload)
        else:
            assert len(found) == where
            assert scan.torn
        assert plain(found) == ROWS[: len(found)]


def test_every_flipped_bit_of_the_head_is_refused() -> None:
    whole, _ends = segment(ROWS)
    for bit in range(8 * HEAD):
        with pytest.raises(DamagedState, match="journal-1 is damaged"):
            read(flipped(whole, bit))


@given(st.lists(rows, min_size=1, max_size=5), st.data())
def test_a_flipped_bit_is_never_another_row(written: list[Row], data: st.DataObject) -> None:
    whole, _ends = segment(written)
    bit = data.draw(st.integers(8 * HEAD, 8 * len(whole) - 1))
    found, _scan = read(flipped(whole, bit))
    assert plain(found) == written[: len(found)]


class TestSynced:
    """Damage that a later frame tells from a torn end."""

    @each_row("synced", [0, 1, 2])
    def test_marks(self, synced: int) -> None:
        whole, ends = segment([*ROWS, *ROWS], marks={6: synced})
        for bad in range(1, 6):
            start = HEAD if bad == 1 else ends[bad - 2]
            data = flipped(whole, 8 * (start + 5))
            if bad > synced:
                found, scan = read(data)
                assert [f.number for f in found] == list(range(1, bad))
                assert scan.torn
                continue
            with pytest.raises(DamagedState, match=f"row {bad} ") as caught:
                read(data)
            assert caught.value.details == {
                "file": "journal-1",
                "row": bad,
                "at": start,
                "later": 6,
            }
            assert "synced when row 6 was written" in str(caught.value)
            assert f"export the model at row {bad - 1}" in str(caught.value)

    def test_every_flipped_bit_of_a_synced_row_is_damage(self) -> None:
        whole, ends = segment([*ROWS, Row(b"last", b"")], marks={4: 3})
        for bit in range(8 * HEAD, 8 * ends[2]):
            try:
                found, _scan = read(flipped(whole, bit))
            except DamagedState:
                continue
            assert plain(found) == [*ROWS, Row(b"last", b"")], "a bit of the padding"

    def test_a_damaged_payload_is_damage_too(self) -> None:
        whole, ends = segment(ROWS, marks={3: 2})
        at = whole.index(b"payload")
        with pytest.raises(DamagedState, match=r"row 1 \(byte 64\), which had been synced"):
            read(flipped(whole, 8 * at))
        found, _scan = read(flipped(whole, 8 * at), payloads=False)
        assert len(found) == 3, "payloads were not looked at"
        assert ends

    def test_a_payload_that_looks_like_a_later_frame(self) -> None:
        """What a torn payload holds is not taken for the journal's, though it has the salt."""
        later, _after = frame(2, 6, 0.0, 0, b"", salt=SALT, unsynced=0)
        whole, _ends = segment([Row(b"rowrow..", bytes(8) + later)])
        found, scan = read(flipped(whole, 8 * (HEAD + FRAME)))
        assert found == []
        assert scan.torn == len(whole) - HEAD

    def test_frames_that_say_nothing(self) -> None:
        whole, ends = segment([*ROWS, *ROWS])
        found, scan = read(flipped(whole, 8 * (ends[0] + 5)))
        assert len(found) == 1
        assert scan.torn

    def test_an_unsynced_that_is_too_large_says_nothing(self) -> None:
        first = 1 << 40
        data, _ends = segment(ROWS, first, marks={first + 2: 0})
        found, _scan = read(flipped(data, 8 * (HEAD + 5)))
        assert found == []

    def test_all_before_the_next_segment_must_be_there(self) -> None:
        whole, ends = segment(ROWS)
        found, scan = read(whole, until=3)
        assert ([f.number for f in found], scan.end) == ([1, 2], ends[1])
        found, _scan = read(flipped(whole, 8 * (ends[1] + 5)), until=3)
        assert len(found) == 2, "what follows is not the journal's"
        for data in (whole[:-1], flipped(whole, 8 * (ends[0] + 5)), whole[:HEAD]):
            found, scan = read(data, until=4)
            assert scan.short, "of rows that were not synced any may be missing"
            assert scan.row == len(found) + 1 < 4
            with pytest.raises(DamagedState, match="which had been synced when row 9 was written"):
                read(data, until=4, called_synced=lambda row: 9)

    def test_a_later_segment_tells_too(self) -> None:
        later, _ends = segment(ROWS, 4, OTHER_SALT, {4: 0, 5: 2})
        scan = SegmentScan(later, "journal-4", first=4)
        assert [scan.calls_synced(row) for row in (1, 2, 3)] == [5, 5, None]
        for hole in (HEAD, HEAD + 20):  # the frames before it need not be whole
            assert SegmentScan(flipped(later, 8 * hole), "it").calls_synced(2) == 5

    def test_a_head_that_never_reached_the_disk(self) -> None:
        later, _ends = segment(ROWS, 4)
        older, _ends = segment(ROWS, 1)
        assert not never_reached(later, 4)
        assert never_reached(older, 4)
        assert never_reached(bytes(200), 4)
        assert never_reached(b"", 4)
        for bit in (0, 70, 8 * HEAD - 1):
            assert not never_reached(flipped(older, bit), 4), "this is damage"
            assert not never_reached(flipped(later, bit), 4)
        for cut in range(1, HEAD - 3):  # the bytes behind it are those that were there before
            assert never_reached(later[:cut] + bytes(200), 4)
            assert never_reached(later[:cut] + older[cut:], 4)

    def test_a_later_frame_far_behind(self) -> None:
        """Beyond one chunk of the search."""
        gap = 3 * 8 * frames._CHUNK
        whole, ends = segment([ROWS[0], Row(b"", bytes(gap)), ROWS[2]], marks={3: 1})
        bad = bytearray(whole)
        bad[HEAD + 4] ^= 1
        with pytest.raises(DamagedState, match="when row 3 was written"):
            read(bytes(bad))
        assert ends[1] > gap

    @each_row("shift", range(-120, 32, 8))
    def test_a_later_frame_at_the_edge_of_a_chunk(self, shift: int) -> None:
        whole, ends = segment([Row(b"", b""), Row(b"", bytes(8 * frames._CHUNK + shift)), ROWS[2]])
        marked, _after = frame(3, 6, 0.0, 0, b"", salt=SALT, unsynced=2)
        with pytest.raises(DamagedState, match="when row 3 was written"):
            read(flipped(whole[: ends[1]] + marked, 8 * (HEAD + 4)))


class TestRecycled:
    """A segment written over an older one, or over zeros."""

    @given(st.lists(rows, max_size=4), st.lists(rows, max_size=8), st.integers(1, 9))
    def test_old_frames_are_not_read(self, new: list[Row], old: list[Row], first: int) -> None:
        before, _ends = segment(old, first, OTHER_SALT, {first + len(old) - 1: first})
        data, _ends = segment(new, 5)
        found, scan = read(data + before[len(data) :])
        assert plain(found) == new
        assert scan.row == 5 + len(new)

    @given(st.lists(rows, max_size=4), st.integers(0, 200))
    def test_preallocated(self, written: list[Row], zeros: int) -> None:
        data, _ends = segment(written)
        found, scan = read(data + bytes(zeros))
        assert (plain(found), scan.torn, scan.end) == (written, 0, len(data))

    def test_zeros_behind_the_last_frame_tell_a_clean_end(self) -> None:
        old, _ends = segment(ROWS * 3, 100, OTHER_SALT)
        data, _ends = segment(ROWS[:2])
        clean = data + END
        assert read(clean + old[len(clean) :])[1].torn == 0
        assert read(data + old[len(data) :])[1].torn == FRAME, "perhaps a frame was begun"

    def test_a_row_is_missing(self) -> None:
        first, _after = frame(1, 6, 0.0, 0, b"", salt=SALT)
        third, _after = frame(3, 6, 0.0, 0, b"", salt=SALT)
        found, scan = read(SegmentHead(1, 1, "", SALT).pack() + first + third)
        assert [f.number for f in found] == [1]
        assert scan.torn == FRAME

    def test_the_same_salt_and_older_rows(self) -> None:
        old, _ends = segment(ROWS, 1)
        data, _ends = segment([ROWS[1]], 9)
        found, _scan = read(data + old[len(data) :])
        assert [f.number for f in found] == [9]


class TestHostile:
    def test_lengths_beyond_the_segment(self) -> None:
        """A length that is not there is never followed, even with a right checksum."""
        for row, payload in ((1 << 31, 0), (0, 1 << 63), ((1 << 32) - 1, (1 << 64) - 1), (49, 0)):
            fields = frames._FRAME.pack(row, payload, 1, 0.0, 0, 0, UNKNOWN, 6, 0, 0)
            crc = zlib.crc32(fields, zlib.crc32(SALT.to_bytes(4, "little")))
            data = SegmentHead(1, 1, "8c2f", SALT).pack() + crc.to_bytes(4, "little") + fields
            found, scan = read(data + bytes(48))
            assert found == []
            assert 0 < scan.torn <= 96

    def test_bytes_that_look_like_frames_everywhere(self) -> None:
        """16 MiB of plausible numbers: each costs the checksum of a head, and no more."""
        data = SegmentHead(1, 1, "8c2f", SALT).pack() + (2).to_bytes(8, "little") * (1 << 18)
        began = time.process_time()
        found, scan = read(data)
        assert (found, scan.torn) == ([], FRAME)
        assert time.process_time() - began < 20

    def test_the_largest_numbers(self) -> None:
        most = (1 << 64) - 1
        data, _ends = segment([], most)
        one, _after = frame(most, 6, 0.0, 0, b"", salt=SALT)
        found, scan = read(data + one)
        assert ([f.number for f in found], scan.row) == ([most], 1 << 64)
        assert read(data + bytes(4) + one)[0] == []

    @given(st.binary(max_size=300))
    def test_any_bytes_behind_a_head(self, junk: bytes) -> None:
        data, _ends = segment([])
        found, scan = read(data + junk)
        assert found == []
        assert scan.end == HEAD


class TestHead:
    @given(
        st.integers(0, (1 << 64) - 1),
        st.integers(0, (1 << 64) - 1),
        st.text("0123456789abcdef", max_size=16),
        st.integers(0, (1 << 32) - 1),
    )
    def test_round_trip(self, first: int, generation: int, run: str, salt: int) -> None:
        head = SegmentHead(first, generation, run, salt, 2, 3)
        assert len(head.pack()) == HEAD
        assert SegmentHead.unpack(head.pack(), "it") == head

    @each_row("run", ["17 characters ...", "ü", "a\0b"])
    def test_a_run_that_has_no_place(self, run: str) -> None:
        with pytest.raises(UsageError, match="no id of a run"):
            SegmentHead(1, 1, run, 1).pack()

    def test_a_name_that_says_another_row(self) -> None:
        data, _ends = segment(ROWS, 7)
        with pytest.raises(DamagedState, match="begins with row 7, and its name says 8"):
            read(data, first=8)

    def test_a_newer_format(self) -> None:
        data = bytearray(SegmentHead(1, 1, "", 1).pack())
        data[8] = 2
        data[-4:] = zlib.crc32(data[:-4]).to_bytes(4, "little")
        with pytest.raises(UsageError, match="was written in format 2"):
            read(bytes(data))

    def test_another_file(self) -> None:
        with pytest.raises(DamagedState, match="no segment of a journal"):
            read(b"\x93NUMPY" + bytes(100))


def test_payloads_lie_at_multiples_of_8() -> None:
    data, _ends = segment([Row(bytes(n), bytes(n)) for n in range(20)])
    for found in read(data)[0]:
        offset = found.end - frame_bytes(0, len(found.payload)) + FRAME
        assert offset % 8 == 0
        assert bytes(data[offset : offset + len(found.payload)]) == bytes(found.payload)


def test_a_payload_of_more_than_4_gib() -> None:
    """Its length is in the frame whole; the payload itself is not made here."""
    length = (4 << 30) + 64
    before, _after = frame(2, 3, 1.0, 0, b"row", length, 7, salt=5, unsynced=2)
    assert int.from_bytes(before[8:16], "little") == length
    assert frame_bytes(3, length) == 48 + 8 + length


@given(
    st.integers(0, 2**32 - 1),
    st.integers(0, 2**64 - 1),
    st.binary(max_size=40),
    st.sampled_from([0, 3, 8, 4096, 8192, 20_000]),
    st.integers(1, 2**64 - 1),
    st.integers(0, 2**40),
    st.integers(0, 2**32 - 1),
)
def test_frames_that_are_made_in_place_are_the_same(
    peer: int, id: int, first: bytes, length: int, number: int, unsynced: int, salt: int
) -> None:
    fields, row = Struct("<IQ"), Struct("<IQ").pack(peer, id)
    payload = memoryview((first + bytes(length))[:length])
    made = FixedFrames(9, fields, length)
    before, after = frame(
        *(number, 9, 2.5, 1, row, length, zlib.crc32(payload)), salt=salt, unsynced=unsynced
    )
    memory = bytearray(b"\xff" * (made.nbytes + 24))
    made.store(memoryview(memory), 8, number, 2.5, 1, (peer, id), payload, salt, unsynced)
    assert made.nbytes == frame_bytes(len(row), length)
    frames_end = bytes(before) + bytes(payload) + after + END
    assert memory == b"\xff" * 8 + frames_end + b"\xff" * 8
