"""Short writes into the system's cache of a file are writes, and errors are errors."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from aiops.net import mapped_file
from aiops.net.disk import SystemDisk
from aiops.net.mapped_file import MappedFile

SIZE = 1 << 20

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="it needs a call of Linux")


@pytest.fixture
def path(tmp_path: Path) -> Path:
    SystemDisk().create(tmp_path / "a", SIZE).close()
    return tmp_path / "a"


def test_what_is_written_is_in_the_file(path: Path) -> None:
    """Across the ends of windows, with long writes between, and without a sync."""
    file, whole, at = SystemDisk().open(path), bytearray(SIZE), 0
    file.map()
    for number in range(60):
        pieces = [bytes([number + 1]) * length for length in (48, 4099 * number, 0, 7)]
        data = b"".join(pieces)
        if at + len(data) > SIZE:
            break
        file.write([pieces[0], memoryview(pieces[1]), *pieces[2:]], at)
        whole[at : at + len(data)] = data
        assert path.read_bytes() == whole
        at += len(data) - 5  # over the end of the last one
    assert at > SIZE // 2
    file.write([b"before"], 3)
    whole[3:9] = b"before"
    file.close()
    file.close()
    assert path.read_bytes() == whole


def test_a_short_write_takes_no_call(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = SystemDisk().open(path)
    file.map()
    with monkeypatch.context() as patched:
        patched.delattr(os, "pwritev")
        file.write([b"row", bytes(4096)], 100)
    file.close()
    assert path.read_bytes()[100:103] == b"row"


def test_pages_that_cannot_be_had_are_left_to_a_call(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To store into them would end the process."""
    descriptor = os.open(path, os.O_RDWR)
    mapped = MappedFile(descriptor)
    os.ftruncate(descriptor, SIZE // 2)
    assert not mapped.write([b"lost"], SIZE - 100)
    assert mapped.write([b"kept"], 0)
    monkeypatch.setattr(mapped_file, "monotonic", lambda: 1e12)  # it may have changed since
    os.ftruncate(descriptor, 0)
    assert not mapped.write([b"lost"], 0)
    mapped.close()
    os.close(descriptor)


def test_a_file_that_cannot_be_mapped_is_written_all_the_same(tmp_path: Path) -> None:
    file = SystemDisk().create(tmp_path / "empty")
    file.map()
    file.write([b"row"], 0)
    file.close()
    assert (tmp_path / "empty").read_bytes() == b"row"
