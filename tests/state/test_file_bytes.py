"""The bytes of a file, read when they are looked at."""

from __future__ import annotations

import random
import zlib
from typing import Any

import numpy as np
import pytest

from aiops.errors import DamagedState
from aiops.model.arena import aligned
from aiops.state import file_bytes
from aiops.state.file_bytes import FileBytes, OwnMemory, Room
from aiops.state.frames import SegmentHead, SegmentScan, frame


class File:
    """A file in memory that notes what is read of it."""

    def __init__(self, data: bytes) -> None:
        self.data = data
        self.read: list[tuple[int, int]] = []

    def __call__(self, at: int, into: memoryview) -> int:
        found = self.data[at : at + len(into)]
        into[: len(found)] = found
        self.read.append((at, len(found)))
        return len(found)


def test_slices_are_those_of_the_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(file_bytes, "_PIECE", 64)
    rng = random.Random(1)
    data = rng.randbytes(1000)
    found = FileBytes(File(data), len(data))
    assert len(found) == 1000
    kept = []
    for _ in range(500):
        begin = rng.randrange(1001)
        stop = min(begin + rng.choice((0, 1, 8, 48, 63, 64, 65, 300)), 1000)
        kept.append((found[begin:stop], data[begin:stop]))
    assert all(bytes(view) == expected for view, expected in kept)  # each has memory of its own


def address(data: Any) -> int:
    """Where some bytes begin."""
    found: int = np.frombuffer(data, np.uint8).ctypes.data
    return found


def test_memory_that_was_given_back_is_read_into_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """And no other: while a slice is used, others are read."""
    monkeypatch.setattr(file_bytes, "_PIECE", 64)
    data, room = bytes(range(250)), Room()
    found = FileBytes(File(data), len(data), room)
    slices = [found[0:100], found[100:200], found[50:150]]
    small = found[200:210]
    room.free(small)  # it shares its memory with others
    places = [address(each) for each in slices]
    for each in slices[:2]:
        room.free(each)
    again = [found[100:180], found[20:120], found[0:90]]
    assert {address(each) for each in again[:2]} == set(places[:2])
    assert address(again[2]) not in places
    assert bytes(slices[2]) == data[50:150]
    assert bytes(small) == data[200:210]
    assert [*map(bytes, again)] == [data[100:180], data[20:120], data[:90]]
    room.free(again[0])
    assert address(found[0:150]) != address(again[0])  # it is too short
    assert bytes(found[0:150]) == data[:150]


def test_memory_that_was_exchanged_is_not_read_into_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only that of a whole slice, for memory of as many bytes."""
    monkeypatch.setattr(file_bytes, "_PIECE", 64)
    data, room = bytes(range(250)), Room()
    found = FileBytes(File(data), len(data), room)
    first, other = found[0:100], aligned(100)
    assert room.exchange(first, aligned(99)) is None
    kept = room.exchange(first, other)
    assert kept is not None
    assert kept.tobytes() == data[:100]
    assert kept.ctypes.data % 64 == 0
    assert address(found[100:200]) == other.ctypes.data
    assert address(found[100:200]) not in (other.ctypes.data, kept.ctypes.data)
    assert kept.tobytes() == data[:100]


def test_memory_of_its_own_is_given_away(monkeypatch: pytest.MonkeyPatch) -> None:
    """But not that which shorter slices share."""
    monkeypatch.setattr(file_bytes, "_PIECE", 64)
    data = bytes(range(250))
    found = FileBytes(File(data), len(data))
    large, small = found[0:100], found[100:110]
    kept = OwnMemory().exchange(large, aligned(100))
    assert kept is not None
    assert kept.tobytes() == data[:100]
    assert kept.flags.writeable
    assert OwnMemory().exchange(large, aligned(99)) is None
    assert OwnMemory().exchange(large[3:], aligned(97)) is None  # it is not aligned
    assert OwnMemory().exchange(small, aligned(10)) is None


def test_a_file_that_is_shorter_than_it_was_reads_as_zeros() -> None:
    assert bytes(FileBytes(File(b"abc"), 6)[1:6]) == b"bc\0\0\0"


def segment(payloads: list[bytes]) -> bytes:
    """A segment with these rows."""
    data = SegmentHead(1, 1, "run", 7).pack()
    for number, payload in enumerate(payloads, 1):
        crc = zlib.crc32(payload)
        before, after = frame(number, 6, 0.5, 0, b"row", len(payload), crc, salt=7)
        data += before + payload + after
    return data


def test_payloads_that_are_passed_over_are_not_read() -> None:
    payloads = [bytes([n]) * (3 << 20) for n in range(4)]
    data = segment(payloads)
    file = File(data)
    found = [*SegmentScan(FileBytes(file, len(data)), "journal-1", first=1, passed=2)]
    assert [bytes(each.payload) for each in found] == [b"", b"", *payloads[2:]]
    assert sum(nbytes for _at, nbytes in file.read) < (6 << 20) + (6 << 20)
    whole = [*SegmentScan(data, "journal-1", first=1)]
    assert [(each.number, each.at, each.end) for each in found] == [
        (each.number, each.at, each.end) for each in whole
    ]


def test_damage_is_found_as_in_memory() -> None:
    data = bytearray(segment([b"a" * 100, b"b" * 100, b"c" * 100]))
    head = SegmentHead(1, 1, "run", 7).pack()
    data[len(head) + 60] ^= 1
    for bad in (bytes(data), FileBytes(File(bytes(data)), len(data))):
        assert not [*SegmentScan(bad, "journal-1", first=1)]
    data[20] ^= 1
    for bad in (bytes(data), FileBytes(File(bytes(data)), len(data))):
        with pytest.raises(DamagedState, match="its head"):
            SegmentScan(bad, "journal-1", first=1)


def test_files_share_a_room() -> None:
    """The memory of the first large slice is that of the next file's."""
    room, size = Room(), 1 << 20
    one = FileBytes(File(b"a" * size), size, room)[0:size]
    assert set(bytes(one)) == {ord("a")}
    room.free(one)
    other = FileBytes(File(b"b" * size), size, room)[0:size]
    assert set(bytes(other)) == {ord("b")}
    assert address(one) == address(other)


@pytest.mark.parametrize("later", [False, True])
def test_room_that_was_never_written_is_not_read(later: bool) -> None:
    """A row behind it that calls the missing one synced is found all the same."""
    room = 64 << 20
    rows = segment([b"a" * 100, b"b" * 100])
    hole = (len(rows) + 4095) // 4096 * 4096, room - 4096
    before, after = frame(9, 6, 0.5, 0, b"row", 3, zlib.crc32(b"abc"), salt=7, unsynced=2)
    last = (before + b"abc" + after) if later else b""
    at = hole[1] + 8

    def read(begin: int, into: memoryview) -> int:
        seen.append(len(into))
        into[:] = bytes(len(into))
        for where, data in ((0, rows), (at, last)):
            low, high = max(begin, where), min(begin + len(into), where + len(data))
            if low < high:
                into[low - begin : high - begin] = data[low - where : high - where]
        return len(into)

    def written(begin: int) -> tuple[int, int]:
        if begin < hole[0]:
            return begin, hole[0]
        return max(begin, hole[1]), room

    seen: list[int] = []
    data = FileBytes(read, room, Room(), written)
    scan = SegmentScan(data, "journal-1", first=1)
    if later:
        with pytest.raises(DamagedState, match="synced"):
            list(scan)
    else:
        assert len(list(scan)) == 2
        assert sum(seen) < 4 << 20
