"""Short writes into the system's cache of a file are writes, and errors are errors."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from aiops.net import mapped_file
from aiops.net.disk import SystemDisk
from aiops.net.mapped_file import MappedFile

SIZE = 1 << 20

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="it needs a call of Linux")


@pytest.fixture(autouse=True)
def any_file_system(monkeypatch: pytest.MonkeyPatch) -> None:
    """The folder of the tests may be in one of which the system is not sure."""
    monkeypatch.setattr(mapped_file, "_is_safe", lambda kind, options: True)


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


@pytest.mark.parametrize(
    ("kind", "options", "mapped"),
    [
        ("ext4", "rw,errors=remount-ro", True),
        ("tmpfs", "rw,size=24683656k", True),
        ("ext4", "rw,data=journal", False),
        *[(kind, "rw", False) for kind in ("btrfs", "xfs", "overlay", "nfs4", "fuse", "zfs", "")],
    ],
)
def test_a_file_is_mapped_where_its_pages_stay_writable(
    kind: str, options: str, mapped: bool, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.undo()
    monkeypatch.setattr(mapped_file, "_mount_of", lambda descriptor: (kind, options))
    file = SystemDisk().open(path)
    file.map()
    assert (file._mapped is not None) is mapped  # type: ignore[attr-defined]
    file.write([b"row"], 0)
    file.close()
    assert path.read_bytes()[:3] == b"row"


def test_the_file_system_of_a_file_is_known() -> None:
    with tempfile.TemporaryFile(dir="/dev/shm") as file:
        assert mapped_file._mount_of(file.fileno())[0] == "tmpfs"
    with open("/proc/self/stat", encoding="ascii") as file:
        assert mapped_file._mount_of(file.fileno())[0] == "proc"


FULL = """
import os, sys
from pathlib import Path
from aiops.net import mapped_file
from aiops.net.disk import SystemDisk

mapped_file._FRESH = 60.0  # as if all of this were done in that while
folder = Path(sys.argv[1])
file = SystemDisk().create(folder / "segment", 1 << 20)
file.map()
file.write([b"first" * 800], 0)
assert file._mapped is not None
os.sync()
other = os.open(folder / "other", os.O_WRONLY | os.O_CREAT)
try:
    while True:
        os.write(other, bytes(4096))
except OSError as error:
    print(error.strerror)
os.sync()
file.write([b"second"], 8)
for at in range(4096, 1 << 20, 4096):
    file.write([b"row"], at)
print((folder / "segment").read_bytes()[:14].decode())
"""


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["tmpfs", "ext4"])
def test_a_disk_that_is_full_ends_no_process(kind: str, tmp_path: Path) -> None:
    """A real one; who may mount none skips it."""
    folder, options = tmp_path / "disk", ["-t", kind, "-o", "size=8m", kind]
    folder.mkdir()
    if kind == "ext4":
        image = tmp_path / "image"
        with image.open("wb") as file:
            file.truncate(16 << 20)
        if shutil.which("mkfs.ext4") is None:
            pytest.skip("there is no mkfs.ext4")
        subprocess.run(["mkfs.ext4", "-q", image], check=True)
        options = ["-o", "loop", str(image)]
    if subprocess.run(["mount", *options, folder], capture_output=True).returncode:
        pytest.skip("this user may not mount")
    try:
        words = [sys.executable, "-c", FULL, str(folder)]
        run = subprocess.run(words, capture_output=True, text=True)
    finally:
        subprocess.run(["umount", folder], check=True)
    assert (run.returncode, run.stderr) == (0, "")
    assert run.stdout.split("\n") == ["No space left on device", "firstfirsecond", ""]


def test_a_file_that_cannot_be_mapped_is_written_all_the_same(tmp_path: Path) -> None:
    file = SystemDisk().create(tmp_path / "empty")
    file.map()
    file.write([b"row"], 0)
    file.close()
    assert (tmp_path / "empty").read_bytes() == b"row"
