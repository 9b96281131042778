"""``cifar10``: 60,000 colour photographs of 32×32 pixels in ten classes (A. Krizhevsky, 2009).

Two forms are read. The original is the binary archive, ``cifar-10-binary.tar.gz``: records of one
label byte and 3,072 pixel bytes, all red, then all green, then all blue (its Python twin is a
pickle, which should not have to be opened). The other is a pair ``train.npz`` and ``test.npz`` of
JPEG files, a third of the size and slightly lossy: ``jpeg`` (uint8, the files end to end),
``offsets`` (n + 1 integers, where each begins, and the end) and ``labels`` (n integers).
"""

from __future__ import annotations

import hashlib
import io
import itertools
import tarfile
import zipfile
import zlib
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from aiops.lab.workloads.dataset import Dataset, unit_range
from aiops.lab.workloads.files import (
    DamagedData,
    DataUnavailable,
    RemoteFile,
    download,
    folders,
    unavailable,
)

if TYPE_CHECKING:
    from types import ModuleType

__all__ = ["ARCHIVE", "MD5", "MIRRORS", "load_cifar10"]

ARCHIVE = "cifar-10-binary.tar.gz"
MD5 = "c32a1d4ab5d03f1284b67883e8d87530"
"""The archive's checksum as its author publishes it: https://www.cs.toronto.edu/~kriz/cifar.html."""

MIRRORS = ("https://www.cs.toronto.edu/~kriz/", "https://cave.cs.toronto.edu/kriz/")

_LIMIT = 180 << 20
_SIDE = 32
_RECORD = 1 + 3 * _SIDE * _SIDE
_TRAIN = tuple(f"cifar-10-batches-bin/data_batch_{i}.bin" for i in range(1, 6))
_TEST = ("cifar-10-batches-bin/test_batch.bin",)

Examples = tuple[NDArray[np.uint8], NDArray[np.int64]]
"""Pixels, shape (n, 32, 32, 3), and labels, shape (n,)."""


def load_cifar10(*, cache: Path | None = None, download: bool = True) -> Dataset:
    """Return CIFAR-10: 50,000 images to train on and 10,000 to test with, shape (32, 32, 3).

    As float32 it takes 740 MB. The JPEG form needs Pillow.

    Raises:
        DataUnavailable: the files are in none of the folders (see :func:`files.folders`) and were
            not to be, or could not be, downloaded; or Pillow is needed and missing.
        DamagedData: a file is corrupt, or is not CIFAR-10's.
    """
    train, test = _obtain(cache, download)
    return Dataset(
        "cifar10", unit_range(train[0]), train[1], unit_range(test[0]), test[1], classes=10
    )


def _obtain(cache: Path | None, may_download: bool) -> tuple[Examples, Examples]:
    remote = RemoteFile("cifar10", ARCHIVE, MIRRORS, _LIMIT)
    places = folders(remote.dataset, cache)
    for place in places:
        archive, train, test = (place / name for name in (ARCHIVE, "train.npz", "test.npz"))
        if archive.is_file():
            return _read_archive(archive)
        if train.is_file() and test.is_file():
            return _read_jpegs(train), _read_jpegs(test)
    if not may_download:
        reason = "nor are train.npz and test.npz, and it was not to be downloaded (download=False)"
        raise unavailable(remote, places, reason)
    return download(remote, _read_archive, places)


def _read_archive(path: Path) -> tuple[Examples, Examples]:
    with path.open("rb") as file:
        found = hashlib.file_digest(file, lambda: hashlib.md5(usedforsecurity=False)).hexdigest()
        if found != MD5:
            raise DamagedData(path, f"its MD5 is {found} instead of {MD5}")
        file.seek(0)
        try:
            with tarfile.open(fileobj=file, mode="r:gz") as archive:
                wanted = {*_TRAIN, *_TEST}
                content = {  # one pass: seeking back in a gzip stream means unpacking it again
                    member.name: stream.read()
                    for member in archive
                    if member.name in wanted and (stream := archive.extractfile(member))
                }
            return _parse_records(content, _TRAIN), _parse_records(content, _TEST)
        except (tarfile.TarError, EOFError, zlib.error, KeyError, ValueError) as error:
            raise DamagedData(path, f"it does not unpack to CIFAR-10's files ({error})") from error


def _parse_records(content: dict[str, bytes], names: tuple[str, ...]) -> Examples:
    joined = b"".join(content[name] for name in names)
    records = np.frombuffer(joined, dtype=np.uint8).reshape(-1, _RECORD)
    planes = records[:, 1:].reshape(-1, 3, _SIDE, _SIDE)
    return np.ascontiguousarray(planes.transpose(0, 2, 3, 1)), records[:, 0].astype(np.int64)


def _read_jpegs(path: Path) -> Examples:
    image = _pillow(path)
    try:
        # np.load would leave a file open that it opened itself and found damaged.
        with path.open("rb") as file, np.load(file, allow_pickle=False) as npz:
            jpeg, offsets, labels = (npz[key] for key in ("jpeg", "offsets", "labels"))
    except (zipfile.BadZipFile, EOFError, KeyError, TypeError, ValueError, zlib.error) as error:
        raise DamagedData(path, f"it does not load as arrays ({error})") from error
    whole = (
        jpeg.dtype == np.uint8
        and offsets.shape == (len(labels) + 1,)
        and offsets[0] == 0
        and offsets[-1] == jpeg.size
        and bool((np.diff(offsets) > 0).all())
    )
    if not whole:
        raise DamagedData(path, "its offsets do not cut its bytes into one JPEG for each label")
    return _decode(image, path, jpeg.tobytes(), offsets), labels.astype(np.int64)


def _decode(image: Any, path: Path, jpeg: bytes, offsets: NDArray[Any]) -> NDArray[np.uint8]:
    """Decode JPEG files that lie end to end; ``image`` is Pillow's module of that name."""
    decoded = []
    for i, (start, end) in enumerate(itertools.pairwise(offsets.tolist())):
        try:
            with image.open(io.BytesIO(jpeg[start:end]), formats=("JPEG",)) as picture:
                pixels = picture.tobytes()  # a third faster than going through an array
                if (picture.mode, picture.size) != ("RGB", (_SIDE, _SIDE)):
                    raise ValueError(f"mode {picture.mode}, size {picture.size}")
        except (OSError, SyntaxError, ValueError) as error:
            raise DamagedData(
                path, f"image {i} is not a colour JPEG of 32×32 pixels ({error})"
            ) from error
        decoded.append(pixels)
    return np.frombuffer(b"".join(decoded), dtype=np.uint8).reshape(-1, _SIDE, _SIDE, 3)


def _pillow(path: Path) -> ModuleType:
    try:
        from PIL import Image
    except ImportError as error:
        text = (
            f"{path} holds JPEG images, and Pillow, which decodes them, is not installed; "
            f"run `pip install pillow`, or put {ARCHIVE} in its place"
        )
        raise DataUnavailable(text, dataset="cifar10", file=str(path)) from error
    return Image
