"""Segments: memory that others can be shown, and cannot lose under their hands."""

from __future__ import annotations

import ctypes
import errno
import fcntl
import gc
import mmap
import os
import tempfile

import numpy as np
import pytest

from aiops.model.layout import Layout
from aiops.model.shared_memory import Memory, Segment, SharedMemory, attached

LAYOUT = Layout((("w", "float32", (1 << 12,)),))


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def held() -> int:
    """Bytes of anonymous shared memory that this process has mapped."""
    with open("/proc/self/maps") as maps:
        rows = [row.split() for row in maps if "/memfd:aiops" in row]
    return sum(int(row[0].split("-")[1], 16) - int(row[0].split("-")[0], 16) for row in rows)


def punch(fd: int) -> int:
    """Replace the first page by a hole, which reads as zeros; return the error's number."""
    libc = ctypes.CDLL(None, use_errno=True)
    keep_size, punch_hole = 1, 2
    done = libc.fallocate(fd, keep_size | punch_hole, ctypes.c_long(0), ctypes.c_long(4096))
    return ctypes.get_errno() if done else 0


class TestSegment:
    def test_what_is_written_is_seen(self) -> None:
        segment = Segment(1 << 16)
        assert not segment.data.any()
        other = attached(os.dup(segment.fd), 1 << 16, private=False)
        segment.data[:3] = 1, 2, 3
        assert list(other[:4]) == [1, 2, 3, 0]

    def test_others_may_only_read(self) -> None:
        segment = Segment(1 << 12)
        other = attached(os.dup(segment.fd), 1 << 12, private=False)
        assert not other.flags.writeable
        with pytest.raises(OSError, match=r"not permitted|Bad file"):
            os.pwrite(segment.fd, b"x", 0)

    def test_a_descriptor_that_was_reopened_cannot_write_either(self) -> None:
        """As the same user may reopen it, through /proc (Linux 5.1 and newer)."""
        segment = Segment(1 << 12)
        segment.data[:] = 7
        again = os.open(f"/proc/self/fd/{segment.fd}", os.O_RDWR)
        try:
            with pytest.raises(PermissionError):
                os.pwrite(again, b"x", 0)
            with pytest.raises(PermissionError):
                mmap.mmap(again, 1 << 12)
            with pytest.raises(PermissionError):
                fcntl.fcntl(again, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE)
            assert punch(again) == errno.EPERM
        finally:
            os.close(again)
        segment.data[0] = 8
        assert list(segment.data[:2]) == [8, 7], "its own process still writes"

    def test_what_is_written_privately_stays_private(self) -> None:
        segment = Segment(1 << 12)
        segment.data[:] = 7
        other = attached(os.dup(segment.fd), 1 << 12, private=True)
        assert other.flags.writeable, "kernels are compiled for such arrays"
        other[0] = 9
        assert segment.data[0] == 7
        assert other[1] == 7

    def test_it_cannot_shrink_or_grow(self) -> None:
        segment = Segment(1 << 12)
        for flags in (os.O_RDWR,):
            again = os.open(f"/proc/self/fd/{segment.fd}", flags)
            for size in (0, 1 << 13):
                with pytest.raises(PermissionError):
                    os.ftruncate(again, size)
            os.close(again)

    def test_nothing_is_left(self) -> None:
        gc.collect()
        before = descriptors(), held()
        segment = Segment(1 << 20)
        other = attached(os.dup(segment.fd), 1 << 20, private=False)
        part = other[5:9]
        assert (descriptors(), held()) != before
        del segment, other
        gc.collect()
        assert held() == before[1] + (1 << 20), "a view keeps what it shows"
        assert list(part) == [0] * 4
        del part
        gc.collect()
        assert (descriptors(), held()) == before

    def test_more_than_there_is(self) -> None:
        with pytest.raises(MemoryError, match="no shared memory of 4611686018427387904 bytes"):
            Segment(1 << 62)


class TestAttached:
    """Whatever a stranger passes, it is refused, and its descriptor is closed."""

    @pytest.fixture(autouse=True)
    def closed(self) -> object:
        before = descriptors()
        yield
        gc.collect()
        assert descriptors() == before

    def test_a_file(self) -> None:
        with tempfile.TemporaryFile() as file:
            file.write(bytes(1 << 12))
            with pytest.raises(ValueError, match=r"not one of sealed memory|not sealed"):
                attached(os.dup(file.fileno()), 1 << 12, private=False)

    def test_a_pipe(self) -> None:
        one, other = os.pipe()
        os.close(other)
        with pytest.raises(ValueError, match="not one of sealed memory"):
            attached(one, 1 << 12, private=True)

    def test_memory_that_may_shrink(self) -> None:
        fd = os.memfd_create("mean", os.MFD_ALLOW_SEALING)
        os.ftruncate(fd, 1 << 12)
        with pytest.raises(ValueError, match="may shrink"):
            attached(fd, 1 << 12, private=False)

    @pytest.mark.parametrize("nbytes", [0, (1 << 12) + 1, 1 << 62])
    def test_other_memory_than_is_said(self, nbytes: int) -> None:
        segment = Segment(1 << 12)
        with pytest.raises(ValueError, match=f"has 4096 bytes, not {nbytes}"):
            attached(os.dup(segment.fd), nbytes, private=False)


class TestRooms:
    def test_a_room_makes_arenas_of_its_own_memory(self) -> None:
        assert Memory().arena(LAYOUT).segment is None
        data = np.arange(LAYOUT.nbytes).astype(np.uint8)
        assert Memory().holding(LAYOUT, data).data is data

    def test_a_shared_room_makes_them_of_segments(self) -> None:
        data = np.arange(LAYOUT.nbytes).astype(np.uint8)
        arena = SharedMemory().holding(LAYOUT, data)
        assert isinstance(arena.segment, Segment)
        assert np.array_equal(arena.segment.data, data)
        assert arena.data.ctypes.data % 64 == 0
        arena.views["w"][:] = 1
        assert data[0] == 0, "it is a copy"

    def test_a_version_is_made_of_memory_that_was_made_for_it(self) -> None:
        memory = SharedMemory()
        data, other = memory.room(LAYOUT.nbytes), memory.arena(LAYOUT).data
        data[:] = 1
        made = memory.holding(LAYOUT, data)
        assert made.data is data
        assert isinstance(made.segment, Segment)
        assert memory.holding(LAYOUT, data).data is not data  # it is another version's
        assert memory.holding(LAYOUT, other).data is not other
        assert isinstance(Memory().room(10), np.ndarray)

    def test_small_models_are_not_worth_it(self) -> None:
        small = Layout((("w", "float32", (8,)),))
        data = np.zeros(32, np.uint8)
        assert SharedMemory().arena(small).segment is None
        assert SharedMemory().holding(small, data).data is data
