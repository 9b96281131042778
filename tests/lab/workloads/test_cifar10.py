from __future__ import annotations

import hashlib
import io
import os
import sys
import tarfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from PIL import Image

from aiops.lab.workloads import DamagedData, DataUnavailable, cifar10, load
from tests.lab.workloads.conftest import Site

REAL_DATA = os.environ.get("AIOPS_DATA", "")

NAMES = [f"data_batch_{i}.bin" for i in range(1, 6)] + ["test_batch.bin"]


def archive(batches: dict[str, bytes]) -> bytes:
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w:gz") as tar:
        for name, content in {"readme.html": b"<p>hello</p>", **batches}.items():
            member = tarfile.TarInfo(f"cifar-10-batches-bin/{name}")
            member.size = len(content)
            tar.addfile(member, io.BytesIO(content))
    return packed.getvalue()


def records(images: NDArray[np.uint8], labels: list[int]) -> bytes:
    """Images of shape (n, 32, 32, 3) in the archive's form."""
    planes = images.transpose(0, 3, 1, 2)
    return b"".join(
        bytes([label]) + plane.tobytes() for label, plane in zip(labels, planes, strict=True)
    )


@pytest.fixture
def images() -> NDArray[np.uint8]:
    return np.random.default_rng(3).integers(256, size=(12, 32, 32, 3), dtype=np.uint8)


@pytest.fixture
def packed(images: NDArray[np.uint8], monkeypatch: pytest.MonkeyPatch) -> bytes:
    """A whole archive with two images in each file, whose checksum now counts as CIFAR-10's."""
    content = {name: records(images[2 * i : 2 * i + 2], [i, 9 - i]) for i, name in enumerate(NAMES)}
    shuffled = dict(sorted(content.items(), reverse=True))  # as in the original, not in order
    data = archive(shuffled)
    monkeypatch.setattr(cifar10, "MD5", hashlib.md5(data).hexdigest())
    return data


def write_archive(root: Path, data: bytes) -> Path:
    path = root / "cifar10" / cifar10.ARCHIVE
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)
    return path


def write_jpegs(root: Path, split: str, files: list[bytes], **changes: Any) -> Path:
    arrays: dict[str, Any] = {
        "jpeg": np.frombuffer(b"".join(files), np.uint8),
        "offsets": np.cumsum([0, *map(len, files)]),
        "labels": np.arange(len(files), dtype=np.uint8),
        "classes": np.array(["airplane", "truck"]),
    }
    arrays |= changes
    path = root / "cifar10" / f"{split}.npz"
    path.parent.mkdir(parents=True, exist_ok=True)
    np.savez(path, **{name: array for name, array in arrays.items() if array is not None})
    return path


def jpeg(pixels: NDArray[np.uint8]) -> bytes:
    packed = io.BytesIO()
    Image.fromarray(pixels).save(packed, format="JPEG", quality=95)
    return packed.getvalue()


def plain(red: int, green: int, blue: int) -> NDArray[np.uint8]:
    return np.full((32, 32, 3), (red, green, blue), dtype=np.uint8)


def test_the_archive_becomes_images_with_the_colour_last(
    packed: bytes, images: NDArray[np.uint8], default_cache: Path
) -> None:
    write_archive(default_cache, packed)
    data = load("cifar10", download=False)
    assert data.train_y.tolist() == [0, 9, 1, 8, 2, 7, 3, 6, 4, 5]
    assert data.test_y.tolist() == [5, 4]
    assert data.shape == (32, 32, 3)
    assert (data.train_x.dtype, data.train_y.dtype) == (np.float32, np.int64)
    np.testing.assert_array_equal(data.train_x * np.float32(255), images[:10])
    np.testing.assert_array_equal(data.test_x * np.float32(255), images[10:])


def test_the_archive_is_downloaded_when_missing(
    packed: bytes, site: Site, default_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    site.pages[f"/{cifar10.ARCHIVE}"] = packed
    monkeypatch.setattr(cifar10, "MIRRORS", (f"{site.url}/none/", f"{site.url}/"))
    assert len(load("cifar10").train_x) == 10
    assert (default_cache / "cifar10" / cifar10.ARCHIVE).read_bytes() == packed
    assert len(load("cifar10", download=False).train_x) == 10


def test_a_wrong_checksum_names_the_file(packed: bytes, default_cache: Path) -> None:
    path = write_archive(default_cache, packed[:-1])
    with pytest.raises(DamagedData, match=r"its MD5 is .* instead of") as caught:
        load("cifar10")
    assert caught.value.details["path"] == str(path)


def test_an_archive_of_something_else_is_damaged(
    default_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = {name: bytes(3073) for name in NAMES}
    part = {name: whole[name] for name in NAMES[1:]}
    odd = whole | {NAMES[0]: bytes(3072)}
    for data in (archive(part), archive(odd), archive(whole)[:-20], b"no archive at all"):
        monkeypatch.setattr(cifar10, "MD5", hashlib.md5(data).hexdigest())
        write_archive(default_cache, data)
        with pytest.raises(DamagedData, match="does not unpack to CIFAR-10's files"):
            load("cifar10", download=False)


def test_jpegs_are_decoded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    colours = [plain(255, 0, 0), plain(0, 255, 0), plain(0, 0, 255)]
    write_jpegs(tmp_path, "train", [jpeg(colour) for colour in colours])
    write_jpegs(tmp_path, "test", [jpeg(plain(255, 255, 255))])
    monkeypatch.setenv("AIOPS_DATA", str(tmp_path))
    data = load("cifar10", download=False)
    assert data.train_y.tolist() == [0, 1, 2]
    np.testing.assert_allclose(data.train_x, np.array(colours) / 255, atol=2 / 255)
    np.testing.assert_array_equal(data.test_x, np.ones((1, 32, 32, 3)))


def test_the_archive_goes_before_lossy_jpegs(packed: bytes, default_cache: Path) -> None:
    for split in ("train", "test"):
        write_jpegs(default_cache, split, [jpeg(plain(0, 0, 0))])
    write_archive(default_cache, packed)
    assert len(load("cifar10", download=False).train_x) == 10


def test_half_a_pair_of_jpeg_files_is_not_enough(default_cache: Path) -> None:
    write_jpegs(default_cache, "train", [jpeg(plain(0, 0, 0))])
    with pytest.raises(DataUnavailable, match=r"nor are train\.npz and test\.npz"):
        load("cifar10", download=False)


def test_without_pillow_the_error_says_what_to_install(
    default_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for split in ("train", "test"):
        write_jpegs(default_cache, split, [jpeg(plain(0, 0, 0))])
    monkeypatch.setitem(sys.modules, "PIL", None)
    with pytest.raises(DataUnavailable, match="pip install pillow"):
        load("cifar10", download=False)


GREY = np.zeros((32, 32), dtype=np.uint8)
WIDE = np.zeros((32, 33, 3), dtype=np.uint8)


@pytest.mark.parametrize(
    ("files", "changes", "reason"),
    [
        ([jpeg(GREY)], {}, "image 0 is not a colour JPEG"),
        ([jpeg(plain(1, 2, 3)), jpeg(WIDE)], {}, r"image 1 is not .*size \(33, 32\)"),
        ([jpeg(plain(1, 2, 3))[:100]], {}, "image 0 is not"),
        ([b"GIF89a"], {}, "image 0 is not"),
        ([jpeg(GREY)], {"offsets": None}, "does not load as arrays"),
        ([jpeg(GREY)], {"labels": np.array([object()])}, "does not load as arrays"),
        ([jpeg(GREY)], {"labels": np.arange(2)}, "offsets do not cut"),
        ([jpeg(GREY)], {"offsets": np.array([0, 5])}, "offsets do not cut"),
        ([jpeg(GREY)], {"offsets": np.array([1, len(jpeg(GREY))])}, "offsets do not cut"),
        ([b"ab", b"cd"], {"offsets": np.array([0, 5, 4])}, "offsets do not cut"),
        ([b"ab"], {"jpeg": np.zeros(2, dtype=np.int64)}, "offsets do not cut"),
    ],
)
def test_damaged_jpeg_files_are_named(
    default_cache: Path, files: list[bytes], changes: dict[str, Any], reason: str
) -> None:
    path = write_jpegs(default_cache, "train", files, **changes)
    write_jpegs(default_cache, "test", [jpeg(plain(0, 0, 0))])
    with pytest.raises(DamagedData, match=reason) as caught:
        load("cifar10", download=False)
    assert caught.value.details["path"] == str(path)


def npy() -> bytes:
    packed = io.BytesIO()
    np.save(packed, np.arange(3))
    return packed.getvalue()


@pytest.mark.parametrize("content", [b"", b"PK", b"hello", b"PK\x03\x04" + bytes(100), npy()])
def test_files_that_are_no_npz_are_damaged(default_cache: Path, content: bytes) -> None:
    path = write_jpegs(default_cache, "train", [jpeg(plain(0, 0, 0))])
    write_jpegs(default_cache, "test", [jpeg(plain(0, 0, 0))])
    path.write_bytes(content)
    with pytest.raises(DamagedData, match="does not load as arrays"):
        load("cifar10", download=False)


def test_an_npz_cut_short_is_damaged(default_cache: Path) -> None:
    write_jpegs(default_cache, "train", [jpeg(plain(0, 0, 0))])
    path = write_jpegs(default_cache, "test", [jpeg(plain(0, 0, 0))])
    path.write_bytes(path.read_bytes()[:-30])
    with pytest.raises(DamagedData, match="does not load as arrays"):
        load("cifar10", download=False)


if Path(REAL_DATA, "cifar10").is_dir() and REAL_DATA:

    @pytest.mark.slow
    def test_the_real_cifar10(monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("AIOPS_DATA", REAL_DATA)
        data = load("cifar10", download=False)
        assert (data.train_x.shape, data.test_x.shape) == ((50_000, 32, 32, 3), (10_000, 32, 32, 3))
        assert np.bincount(data.train_y).tolist() == [5000] * 10
        assert np.bincount(data.test_y).tolist() == [1000] * 10
        colours = data.train_x.reshape(-1, 3)[::101].mean(axis=0, dtype=np.float64)
        np.testing.assert_allclose(colours, [0.4914, 0.4822, 0.4465], atol=0.005)
