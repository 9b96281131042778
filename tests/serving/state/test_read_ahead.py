"""The files of a state are read before a start asks for them."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from aiops.serving.state.read_ahead import files_of_a_start, read_ahead
from aiops.state.directory import StateListing, journal_name, snapshot_name
from tests.rows import each_row


@each_row(
    ("snapshots", "segments"),
    [([], []), ([], [1, 9]), ([5], [1, 4, 6, 8]), ([3, 7], [4, 8]), ([3, 7], [4, 9]), ([3], [])],
)
def test_they_are_those_that_a_start_reads(snapshots: list[int], segments: list[int]) -> None:
    names = [*map(snapshot_name, snapshots), *map(journal_name, segments)]
    others = ["LOCK", "identity", "spare-1", "snapshot.part", f"{snapshot_name(99)}.part"]
    found = files_of_a_start([*reversed(names), *others])
    base = max(snapshots, default=0)
    expected = [*map(snapshot_name, snapshots[-1:])]
    if not segments or segments[0] <= base + 1:
        rows = StateListing(names).segments_after(base)
        expected += map(journal_name, rows)
    assert found == expected


@pytest.mark.skipif(not hasattr(os, "posix_fadvise"), reason="the system cannot be asked to")
def test_they_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read = list[tuple[str, int, int]]()

    def advise(file: int, at: int, nbytes: int, advice: int) -> None:
        assert advice == os.POSIX_FADV_WILLNEED
        read.append((os.readlink(f"/proc/self/fd/{file}"), at, nbytes))

    monkeypatch.setattr(os, "posix_fadvise", advise)
    for name in (snapshot_name(3), journal_name(4)):
        (tmp_path / name).write_bytes(b"abc")
    thread = read_ahead(tmp_path)
    assert thread is not None
    thread.join(10)
    assert [name for name, at, _nbytes in read if not at] == [
        str(tmp_path / snapshot_name(3)),
        str(tmp_path / journal_name(4)),
    ]


def test_a_folder_that_is_not_there(tmp_path: Path) -> None:
    thread = read_ahead(tmp_path / "none")
    if thread is not None:
        thread.join(10)
        assert not thread.is_alive()
