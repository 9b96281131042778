"""The real disk: what is written is read, in place, and a lock has one holder."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from aiops.net.disk import SystemDisk

DISK = SystemDisk()


def test_buffers_are_written_one_after_the_other(tmp_path: Path) -> None:
    file = DISK.create(tmp_path / "a", 4096)
    assert file.size() == 4096
    pieces = [b"one", b"", memoryview(bytes(range(200))), b"end"]
    file.write(pieces * 300, 8)  # more buffers than one system call takes
    whole = b"".join(map(bytes, pieces)) * 300
    into = bytearray(len(whole))
    assert file.read(memoryview(into), 8) == len(whole)
    assert into == whole
    file.sync()
    file.close()
    file.close()


def test_a_read_ends_with_the_file(tmp_path: Path) -> None:
    file = DISK.create(tmp_path / "a")
    file.write([b"12345"], 0)
    assert file.read(memoryview(bytearray(9)), 2) == 3
    file.close()


def test_a_new_file_is_new_and_its_owners(tmp_path: Path) -> None:
    DISK.create(tmp_path / "a").close()
    assert os.stat(tmp_path / "a").st_mode & 0o777 == 0o600
    with pytest.raises(FileExistsError):
        DISK.create(tmp_path / "a")


def test_no_file_stays_that_had_no_room(tmp_path: Path) -> None:
    with pytest.raises(OSError, match=r"."):
        DISK.create(tmp_path / "a", 1 << 62)
    assert DISK.names(tmp_path) == []


def test_names_change_at_once(tmp_path: Path) -> None:
    for name in ("old", "new"):
        file = DISK.create(tmp_path / name)
        file.write([name.encode()], 0)
        file.close()
    DISK.rename(tmp_path / "new", tmp_path / "old")
    assert DISK.names(tmp_path) == ["old"]
    assert (tmp_path / "old").read_bytes() == b"new"
    DISK.remove(tmp_path / "old")
    DISK.remove(tmp_path / "old")
    assert DISK.free(tmp_path) > 0


def test_a_lock_has_one_holder_and_ends_with_it(tmp_path: Path) -> None:
    code = (
        "import sys; from pathlib import Path; from aiops.net.disk import SystemDisk\n"
        "lock = SystemDisk().lock(Path(sys.argv[1]), 'the other')\n"
        "print('held', flush=True); sys.stdin.read()"
    )
    words = [sys.executable, "-c", code, str(tmp_path / "LOCK")]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == "held\n"
        assert DISK.lock(tmp_path / "LOCK", "this one") == "the other"
        other.kill()
    held = DISK.lock(tmp_path / "LOCK", "this one")
    assert not isinstance(held, str)
    assert DISK.lock(tmp_path / "LOCK", "a third") == "this one"
    held.release()
    again = DISK.lock(tmp_path / "LOCK", "a third")
    assert not isinstance(again, str)
    again.release()
