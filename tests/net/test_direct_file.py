"""Writes past the system's cache are the same writes."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from aiops.model.arena import aligned
from aiops.net import direct_file
from aiops.net.disk import SystemDisk

PAGE = 4096


def pieces(monkeypatch: pytest.MonkeyPatch) -> list[bytes | memoryview]:
    """Return buffers of whole pages, aligned or not, and a short one behind them."""
    monkeypatch.setattr(direct_file, "_ROOM", 2 * PAGE)
    at_page, beside = aligned(5 * PAGE, PAGE), aligned(7 * PAGE + 8, PAGE)[8:]
    at_page[:], beside[:] = 1, 2
    beside[::PAGE] = 3
    return [at_page.data, beside.data, bytes(PAGE), b"end"]


def test_what_is_written_is_in_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whole pages past the cache, the rest through it; also over what is in the cache."""
    buffers = pieces(monkeypatch)
    whole = b"".join(buffers)
    file = SystemDisk().create(tmp_path / "a", 2 * len(whole))
    file.write([b"old" * 9000], 0)
    file.bypass()
    file.write(buffers, 0)
    file.write([b"behind"], len(whole))
    file.sync()
    file.close()
    assert (tmp_path / "a").read_bytes()[: len(whole) + 6] == whole + b"behind"


def test_whole_pages_take_no_room_in_the_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    buffers = pieces(monkeypatch)
    file = SystemDisk().create(tmp_path / "a", 20 * PAGE)
    if not file.bypass():
        pytest.skip("this file system has no such writes")
    cached = list[int]()
    system = os.pwritev

    def pwritev(descriptor: int, buffers: list[bytes], at: int) -> int:
        cached.append(at)
        return system(descriptor, buffers, at)

    monkeypatch.setattr(os, "pwritev", pwritev)
    file.write(buffers[:3], 0)
    file.write(buffers, 0)
    file.close()
    assert cached == [13 * PAGE]  # b"end"


@pytest.mark.parametrize("refusal", [errno.EINVAL, errno.ENOSPC])
def test_a_disk_that_refuses(refusal: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file system without such writes may say so only now; other errors are the disk's."""
    buffers = pieces(monkeypatch)
    file = SystemDisk().create(tmp_path / "a", 20 * PAGE)
    if not file.bypass():
        pytest.skip("this file system has no such writes")

    def pwrite(*_given: object) -> int:
        raise OSError(refusal, os.strerror(refusal))

    monkeypatch.setattr(os, "pwrite", pwrite)
    if refusal == errno.EINVAL:
        file.write(buffers, 0)
        assert (tmp_path / "a").read_bytes().startswith(b"".join(buffers))
    else:
        with pytest.raises(OSError, match="space"):
            file.write(buffers, 0)
    file.close()
