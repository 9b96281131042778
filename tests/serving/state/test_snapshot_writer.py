"""Snapshots are written over those that are not needed any more, and remove what they cover."""

from __future__ import annotations

import errno
import os
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from aiops.engine.capture import Capture
from aiops.net.disk import SystemDisk, _SystemFile
from aiops.serving.state import snapshot_writer
from aiops.serving.state.segment_files import SegmentFiles
from aiops.serving.state.snapshot_writer import SnapshotWriter
from aiops.state.directory import journal_name, snapshot_name
from aiops.state.snapshot_file import SnapshotFile, SnapshotHeader

LARGE = 5 << 20  # bytes


class CountingDisk(SystemDisk):
    """Notes the files that it makes."""

    def __init__(self) -> None:
        self.made: list[str] = []

    def create(self, path: Path, nbytes: int = 0) -> Any:
        """Make a file, and note its name."""
        self.made.append(path.name)
        return super().create(path, nbytes)


def write(writer: SnapshotWriter, row: int, size: int, queue: Any = (), noted: int = 0) -> None:
    """Write a snapshot whose array holds its row."""
    owners = {"noted": list(range(noted)), "queue": list(queue)}
    found = Capture(row, {})
    found.arrays["params"] = np.full(size, row % 251, np.uint8)
    writer.write(found, SnapshotHeader(row, 1, "run", [row], {}, {}, owners))
    assert not writer.why


def rows(disk: SystemDisk, folder: Path) -> dict[int, int]:
    """The snapshots of a folder, all of them whole, and the first byte of each's array."""
    found = {}
    for path in sorted(folder.glob("snapshot-*")):
        file = disk.open(path)

        def read(file: Any, at: int, into: memoryview) -> int:
            return int(file.read(into, at))

        snapshot = SnapshotFile(partial(read, file), file.size(), path.name)
        snapshot.verify()
        found[snapshot.header.row] = int(snapshot.array("params")[0])
        file.close()
    return found


def test_a_large_one_is_written_over_one_that_is_not_needed(tmp_path: Path) -> None:
    """Headers that differ a little do not matter."""
    disk = CountingDisk()
    writer = SnapshotWriter(disk, tmp_path, SegmentFiles(disk, tmp_path))
    for row in range(1, 12):
        write(writer, row, LARGE, noted=row * 400)
    assert rows(disk, tmp_path) == {10: 10, 11: 11}
    assert len(disk.made) == 3
    assert len(list(tmp_path.iterdir())) == 3
    writer.end()
    assert len(list(tmp_path.iterdir())) == 2


@pytest.mark.parametrize("size", [LARGE, 100])
def test_one_of_another_length_is_a_new_file(size: int, tmp_path: Path) -> None:
    disk = CountingDisk()
    writer = SnapshotWriter(disk, tmp_path, SegmentFiles(disk, tmp_path))
    for row in range(1, 9):
        write(writer, row, size + row * (1 << 16))
    assert rows(disk, tmp_path) == {7: 7, 8: 8}
    assert len(disk.made) == 8
    writer.end()
    assert len(list(tmp_path.iterdir())) == 2


def test_the_rows_of_queued_pushes_stay(tmp_path: Path) -> None:
    """A snapshot of an earlier server, too, may refer to rows before it."""
    disk = CountingDisk()
    for first in (1, 11, 21, 31):
        (tmp_path / journal_name(first)).write_bytes(bytes(100))
    queue = [["push", [15, 1, 1]], ["decision", True, 1], ["snapshot", 19]]
    write(SnapshotWriter(disk, tmp_path, SegmentFiles(disk, tmp_path)), 25, 100, queue)
    writer = SnapshotWriter(disk, tmp_path, SegmentFiles(disk, tmp_path))
    write(writer, 30, 100)
    kept = {path.name for path in tmp_path.glob("journal-*")}
    assert kept == {journal_name(first) for first in (11, 21, 31)}
    write(writer, 31, 100)
    kept = {path.name for path in tmp_path.glob("journal-*")}
    assert kept == {journal_name(31)}
    assert rows(disk, tmp_path).keys() == {30, 31}
    assert not (tmp_path / snapshot_name(25)).exists()


def test_an_error_that_is_repeated_is_logged_once_a_minute(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Snapshots are tried again every ten seconds, or more often, for as long as a disk is full."""
    disk, now, number = SystemDisk(), [0.0], [errno.ENOSPC]
    writer = SnapshotWriter(disk, tmp_path, SegmentFiles(disk, tmp_path), now=lambda: now[0])
    header = SnapshotHeader(7, 1, "run", [7], {}, {}, {})

    def said(seconds: float) -> list[str]:
        now[0] = seconds
        caplog.clear()
        writer.write(Capture(7, {}), header)
        return [record.getMessage() for record in caplog.records]

    def refused(*_given: object) -> None:
        raise OSError(number[0], os.strerror(number[0]))

    with monkeypatch.context() as patch:
        patch.setattr(SystemDisk, "create", refused)
        [first] = said(100.0)
        assert first.endswith(
            "No space left on device; training goes on, and the next one is tried as usual"
        )
        assert [said(100.0 + after) for after in (10, 30, 59)] == [[], [], []]
        assert writer.why
        [again] = said(160.0)
        assert again.endswith(" (3 more like the last one have not been logged)")
        number[0] = errno.EIO
        [other] = said(161.0)
        assert "Input/output error" in other
    assert said(170.0) == []
    assert not writer.why
    monkeypatch.setattr(SystemDisk, "create", refused)
    assert len(said(171.0)) == 1, "it had succeeded"


@pytest.mark.parametrize(("paced", "size", "rests"), [(True, LARGE, 1), (False, LARGE, 0)])
def test_a_paced_one_leaves_training_the_memory_between_its_pieces(
    paced: bool, size: int, rests: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Until it is waited for: an endless pause is over then."""
    monkeypatch.setattr(snapshot_writer, "_LARGE", size)
    monkeypatch.setattr(snapshot_writer, "_REST", 1e9)
    monkeypatch.setattr(_SystemFile, "bypass", lambda file: True)
    disk = SystemDisk()
    writer = SnapshotWriter(disk, tmp_path, SegmentFiles(disk, tmp_path))
    hurry, waits = writer._hurry, list[float]()
    wait = hurry.wait

    def counted(seconds: float) -> bool:
        waits.append(seconds)
        return wait(seconds)

    monkeypatch.setattr(hurry, "wait", counted)
    found = Capture(7, {})
    found.arrays["params"] = np.full(size, 7, np.uint8)
    header = SnapshotHeader(7, 1, "run", [7], {}, {}, {"noted": [], "queue": []})
    writer.begin(found, header, lambda nbytes: None, paced=paced)
    writer.wait()
    assert len(waits) == rests
    assert not writer.why
    assert rows(disk, tmp_path) == {7: 7}
