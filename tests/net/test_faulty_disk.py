"""A disk with faults: each fault is what it says, and only then."""

from __future__ import annotations

import doctest
import errno
from pathlib import Path

import pytest

from aiops.net import faulty_disk
from aiops.net.faulty_disk import FaultyDisk, points
from aiops.sim.virtual.disk import VirtualDisk
from tests.rows import each_row

FOLDER = Path("state")
ROW = [b"a row of the journal", b"its payload"]


def test_what_the_docstrings_show() -> None:
    failed, run = doctest.testmod(faulty_disk)
    assert run
    assert not failed


def journal(disk: FaultyDisk) -> None:
    """Do what a server does to a new folder, a journal of three rows, and a snapshot."""
    for name in ("identity", "generation", "journal-1"):
        file = disk.create(FOLDER / f"{name}.part", 64)
        file.write([b"head"], 0)
        file.sync()
        disk.rename(FOLDER / f"{name}.part", FOLDER / name)
    for row in range(3):
        file.write(ROW, 100 * row)
        file.sync()
    snapshot = disk.create(FOLDER / "snapshot-3.part")
    for piece in range(2):
        snapshot.write([b"piece"], 5 * piece)
        snapshot.sync()
    disk.rename(FOLDER / "snapshot-3.part", FOLDER / "snapshot-3")
    disk.remove(FOLDER / "journal-1")


def test_every_point_is_reached() -> None:
    disk = FaultyDisk(VirtualDisk())
    journal(disk)
    assert disk.reached == {
        "identity.named": 1,
        "generation.named": 1,
        "segment.named": 1,
        "journal.torn": 3,
        "journal.written": 3,
        "journal.synced": 3,
        "snapshot.written": 2,
        "snapshot.synced": 2,
        "snapshot.named": 1,
        "covered.removed": 1,
    }
    assert list(disk.reached) == list(points())


@each_row("point", points())
def test_a_crash_ends_everything(point: str) -> None:
    machine = VirtualDisk()
    disk, ended = FaultyDisk(machine), list[str]()
    disk.crash_at(point, 2 if point.startswith("journal") else 1, lambda: ended.append(point))
    lock = disk.lock(FOLDER / "LOCK", "the server")
    assert not isinstance(lock, str)
    with pytest.raises(OSError, match="the machine is off"):
        journal(disk)
    assert ended == [point]
    names = machine.names(FOLDER)
    for call in (disk.free, disk.names, disk.open, disk.remove, disk.make_folder, disk.create):
        with pytest.raises(OSError, match="the machine is off"):
            call(FOLDER / "identity")
    assert machine.names(FOLDER) == names
    assert not isinstance(machine.lock(FOLDER / "LOCK", "its successor"), str)


def test_a_torn_row_is_its_first_half() -> None:
    machine = VirtualDisk()
    disk = FaultyDisk(machine)
    disk.crash_at("journal.torn", 2, lambda: None)
    with pytest.raises(OSError, match="off"):
        journal(disk)
    data = bytearray(300)
    machine.open(FOLDER / "journal-1").read(memoryview(data), 0)
    row = b"".join(ROW)
    assert data[: len(row)] == row
    assert data[100:].rstrip(b"\0") == row[: len(row) // 2]


def test_it_is_full_until_there_is_room(tmp_path: Path) -> None:
    disk = FaultyDisk(full_at=200)
    kept = disk.create(tmp_path / "kept", 100)
    other = disk.create(tmp_path / "other")
    other.write([b"x" * 60], 0)
    assert disk.free(tmp_path) == 40
    kept.write([b"room that it has already"], 0)
    for call in (lambda: other.write([b"y" * 41], 60), lambda: disk.create(tmp_path / "new", 41)):
        with pytest.raises(OSError, match="No space") as caught:
            call()
        assert caught.value.errno == errno.ENOSPC
    assert not (tmp_path / "new").exists()
    disk.remove(tmp_path / "kept")
    other.write([b"y" * 41], 60)
    disk.full_at = None
    disk.create(tmp_path / "new", 1000).close()


def test_a_sync_fails_and_then_all_do(tmp_path: Path) -> None:
    disk = FaultyDisk(sync_fails_at=2)
    file = disk.create(tmp_path / "a")
    file.sync()
    for _ in range(2):
        with pytest.raises(OSError, match="Input/output"):
            file.sync()
    file.write([b"a write does not fail"], 0)


def test_it_is_slow() -> None:
    waited = list[float]()
    disk = FaultyDisk(VirtualDisk(), slow=0.25, pause=waited.append)
    journal(disk)
    assert waited == [0.25] * 8


def test_a_loss_of_power_loses_what_was_not_synced(tmp_path: Path) -> None:
    found = set()
    for seed in range(40):
        disk = FaultyDisk(seed=seed, lose_unsynced=True)
        path = tmp_path / f"journal-{seed}.part"
        file = disk.create(path, 2000)
        file.write([b"1" * 1500], 0)
        file.sync()
        disk.rename(path, path.with_suffix(""))
        file.write([b"2" * 1400], 100)
        disk.cut_power()
        disk.cut_power()
        data = path.with_suffix("").read_bytes()
        assert data[:100] == b"1" * 100
        assert len(data) == 2000
        found.add(chr(data[100]) + chr(data[1499]))
        with pytest.raises(OSError, match="off"):
            file.write([b"3"], 0)
    assert found == {"11", "12", "21", "22"}


def test_a_loss_of_power_flips_a_bit(tmp_path: Path) -> None:
    disk = FaultyDisk(flip=1.0)
    file = disk.create(tmp_path / "a")
    file.write([b"abc"], 0)
    file.sync()
    disk.cut_power()
    data = (tmp_path / "a").read_bytes()
    assert sum((x ^ y).bit_count() for x, y in zip(data, b"abc", strict=True)) == 1
