"""``mnist``: 70,000 handwritten digits as 28×28 images, in the IDX format (LeCun et al., 1998).

Four files, ``<split>-images-idx3-ubyte.gz`` and ``<split>-labels-idx1-ubyte.gz``. Checksums are of
what is inside the gzip wrapper: copies that were compressed again are as good as the original ones.
"""

from __future__ import annotations

import gzip
import hashlib
import math
import struct
import zlib
from functools import partial
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from aiops.lab.workloads.dataset import Dataset, unit_range
from aiops.lab.workloads.files import DamagedData, RemoteFile, download, folders, unavailable

__all__ = ["MIRRORS", "SHA256", "load_mnist", "parse_idx"]

MIRRORS = (
    "https://storage.googleapis.com/cvdf-datasets/mnist/",
    "https://ossci-datasets.s3.amazonaws.com/mnist/",
)

SHA256 = {
    "train-images-idx3-ubyte": "ba891046e6505d7aadcbbe25680a0738ad16aec93bde7f9b65e87a2fc25776db",
    "train-labels-idx1-ubyte": "65a50cbbf4e906d70832878ad85ccda5333a97f0f4c3dd2ef09a8a9eef7101c5",
    "t10k-images-idx3-ubyte": "0fa7898d509279e482958e8ce81c8e77db3f2f8254e26661ceb7762c4d494ce7",
    "t10k-labels-idx1-ubyte": "ff7bcfd416de33731a308c3f266cc351222c34898ecbeaf847f06e48f7ec33f2",
}
"""SHA-256 of each file, unpacked."""

_LIMIT = 16 << 20
_UNSIGNED_BYTES = 0x08


def load_mnist(*, cache: Path | None = None, download: bool = True) -> Dataset:
    """Return MNIST: 60,000 images to train on and 10,000 to test with, shape (28, 28).

    Raises:
        DataUnavailable: a file is in none of the folders (see :func:`files.folders`) and was not
            to be, or could not be, downloaded.
        DamagedData: a file is corrupt, or is not MNIST's.
    """
    parts = [_obtain(name, cache, download) for name in SHA256]
    train_x, train_y, test_x, test_y = parts
    return Dataset(
        "mnist",
        unit_range(train_x),
        train_y.astype(np.int64),
        unit_range(test_x),
        test_y.astype(np.int64),
        classes=10,
    )


def parse_idx(content: bytes) -> NDArray[np.uint8]:
    """Return the array in an unpacked IDX file of unsigned bytes, as a read-only view of it.

    The format: two zero bytes, the element type (8: unsigned byte), the number of dimensions, each
    dimension as a big-endian uint32, then the elements in C order.

    Raises:
        ValueError: it is not such a file, or has too few or too many elements.
    """
    if len(content) < 4 or content[:2] != b"\0\0" or content[2] != _UNSIGNED_BYTES:
        raise ValueError(f"it begins with {content[:4].hex(' ')!r}, not as an IDX file of bytes")
    dimensions = content[3]
    start = 4 + 4 * dimensions
    if len(content) < start:
        raise ValueError(f"it ends within its {start}-byte header")
    shape = struct.unpack_from(f">{dimensions}I", content, 4)
    array = np.frombuffer(content, dtype=np.uint8, offset=start)
    wanted = math.prod(shape)  # not NumPy's: a hostile shape must not wrap around
    if array.size != wanted:
        raise ValueError(f"it has {array.size} elements, but its shape {shape} needs {wanted}")
    return array.reshape(shape)


def _obtain(name: str, cache: Path | None, may_download: bool) -> NDArray[np.uint8]:
    read = partial(_read, sha256=SHA256[name])
    remote = RemoteFile("mnist", f"{name}.gz", MIRRORS, _LIMIT)
    places = folders(remote.dataset, cache)
    for place in places:
        path = place / remote.name
        if path.is_file():
            return read(path)
    if not may_download:
        raise unavailable(remote, places, "it was not to be downloaded (download=False)")
    return download(remote, read, places)


def _read(path: Path, sha256: str) -> NDArray[np.uint8]:
    packed = path.read_bytes()
    try:
        content = gzip.decompress(packed)
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise DamagedData(path, f"it does not unpack ({error})") from error
    found = hashlib.sha256(content).hexdigest()
    if found != sha256:
        raise DamagedData(path, f"unpacked, its SHA-256 is {found} instead of {sha256}")
    return parse_idx(content)
