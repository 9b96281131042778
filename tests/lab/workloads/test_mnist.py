from __future__ import annotations

import gzip
import hashlib
import os
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from aiops.lab.workloads import MLP, DamagedData, DataUnavailable, batches, load, mnist
from tests.lab.workloads.conftest import Site

REAL_DATA = os.environ.get("AIOPS_DATA", "")


def idx(array: NDArray[Any]) -> bytes:
    shape = struct.pack(f">{array.ndim}I", *array.shape)
    return bytes([0, 0, 8, array.ndim]) + shape + array.astype(np.uint8).tobytes()


@pytest.fixture
def tiny(monkeypatch: pytest.MonkeyPatch) -> dict[str, bytes]:
    """Four files in MNIST's format, unpacked, whose checksums now count as MNIST's."""
    rng = np.random.default_rng(7)
    arrays = [
        rng.integers(256, size=(6, 28, 28)),
        np.array([0, 9, 1, 8, 2, 7]),
        rng.integers(256, size=(3, 28, 28)),
        np.array([3, 6, 4]),
    ]
    content = {name: idx(array) for name, array in zip(mnist.SHA256, arrays, strict=True)}
    sums = {name: hashlib.sha256(data).hexdigest() for name, data in content.items()}
    monkeypatch.setattr(mnist, "SHA256", sums)
    return content


def write(folder: Path, content: dict[str, bytes], level: int = 9) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, data in content.items():
        (folder / f"{name}.gz").write_bytes(gzip.compress(data, level))


@pytest.mark.parametrize("level", [1, 9])
def test_loads_from_the_shared_folder_however_it_was_compressed(
    tiny: dict[str, bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, level: int
) -> None:
    write(tmp_path / "shared" / "mnist", tiny, level)
    monkeypatch.setenv("AIOPS_DATA", str(tmp_path / "shared"))
    data = load("mnist", download=False)
    assert (data.train_x.shape, data.test_x.shape) == ((6, 28, 28), (3, 28, 28))
    assert (data.train_x.dtype, data.train_y.dtype) == (np.float32, np.int64)
    assert data.train_y.tolist() == [0, 9, 1, 8, 2, 7]
    assert data.test_y.tolist() == [3, 6, 4]
    pixels = np.frombuffer(tiny["t10k-images-idx3-ubyte"], np.uint8, offset=16)
    np.testing.assert_array_equal(data.flat().test_x.ravel() * np.float32(255), pixels)


def test_missing_files_are_downloaded_into_the_cache_once(
    tiny: dict[str, bytes],
    site: Site,
    tmp_path: Path,
    default_cache: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    images, *rest = tiny
    write(tmp_path / "shared" / "mnist", {images: tiny[images]})
    monkeypatch.setenv("AIOPS_DATA", str(tmp_path / "shared"))
    monkeypatch.setattr(mnist, "MIRRORS", (f"{site.url}/broken/", f"{site.url}/mnist/"))
    for name in rest:
        site.pages[f"/broken/{name}.gz"] = gzip.compress(b"not MNIST")
        site.pages[f"/mnist/{name}.gz"] = gzip.compress(tiny[name])
    first = load("mnist")
    assert len(site.asked) == 6
    kept = {path.name for path in (default_cache / "mnist").iterdir()}
    assert kept == {f"{name}.gz" for name in rest}
    second = load("mnist", download=False)
    assert len(site.asked) == 6
    np.testing.assert_array_equal(first.train_x, second.train_x)


def test_the_cache_can_be_chosen(tiny: dict[str, bytes], tmp_path: Path) -> None:
    write(tmp_path / "mine" / "mnist", tiny)
    assert len(load("mnist", cache=tmp_path / "mine", download=False).train_x) == 6


def test_without_download_the_error_says_so(default_cache: Path) -> None:
    with pytest.raises(DataUnavailable, match="download=False") as caught:
        load("mnist", download=False)
    assert f"train-images-idx3-ubyte.gz is not in {default_cache / 'mnist'}" in str(caught.value)


def test_damage_is_named_and_not_hidden_by_a_download(
    tiny: dict[str, bytes], site: Site, default_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = default_cache / "mnist"
    monkeypatch.setattr(mnist, "MIRRORS", (site.url,))
    write(folder, tiny)
    victim = folder / "train-labels-idx1-ubyte.gz"
    whole = victim.read_bytes()
    other = gzip.compress(tiny["t10k-labels-idx1-ubyte"])
    flipped = whole[:12] + bytes([whole[12] ^ 0xFF]) + whole[13:]
    for bad in (whole[:-9], whole[:5], flipped, b"", b"<html>404</html>", other):
        victim.write_bytes(bad)
        with pytest.raises(DamagedData, match=r"is damaged: .*; delete it") as caught:
            load("mnist")
        assert caught.value.details["path"] == str(victim)
    assert site.asked == []


def test_a_wrong_checksum_is_told_with_both_sums(
    tiny: dict[str, bytes], default_cache: Path
) -> None:
    tiny["train-labels-idx1-ubyte"] += b"!"
    write(default_cache / "mnist", tiny)
    found = hashlib.sha256(tiny["train-labels-idx1-ubyte"]).hexdigest()
    wanted = mnist.SHA256["train-labels-idx1-ubyte"]
    with pytest.raises(DamagedData, match=f"SHA-256 is {found} instead of {wanted}"):
        load("mnist", download=False)


@given(shape=st.lists(st.integers(0, 5), max_size=4), seed=st.integers(0, 99))
def test_idx_round_trip(shape: list[int], seed: int) -> None:
    array = np.random.default_rng(seed).integers(256, size=shape).astype(np.uint8)
    parsed = mnist.parse_idx(idx(array))
    np.testing.assert_array_equal(parsed, array)
    assert parsed.shape == tuple(shape)


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"", "begins with ''"),
        (b"\0\0\x08", "begins with '00 00 08'"),
        (b"\x1f\x8b\x08\x01", "begins with '1f 8b 08 01'"),
        (b"\0\0\x0d\x01\0\0\0\0", "not as an IDX file of bytes"),
        (b"\0\0\x08\x02\0\0\0\x01", "ends within its 12-byte header"),
        (b"\0\0\x08\x01\0\0\0\x02!", "has 1 elements, but its shape"),
        (b"\0\0\x08\x01\0\0\0\x01!!", "has 2 elements, but its shape"),
        (b"\0\0\x08\x04" + b"\xff" * 16, f"needs {0xFFFFFFFF**4}"),
        (b"\0\0\x08\x04" + b"\x80\0\0\0" * 4, f"needs {2**124}"),
    ],
)
def test_what_is_not_idx_is_refused(content: bytes, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        mnist.parse_idx(content)


if Path(REAL_DATA, "mnist").is_dir() and REAL_DATA:

    @pytest.mark.slow
    def test_the_real_mnist(monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("AIOPS_DATA", REAL_DATA)
        data = load("mnist", download=False).flat()
        assert (data.train_x.shape, data.test_x.shape) == ((60_000, 784), (10_000, 784))
        counts = [980, 1135, 1032, 1010, 982, 892, 958, 1028, 974, 1009]
        assert np.bincount(data.test_y).tolist() == counts
        assert (float(data.train_x.min()), float(data.train_x.max())) == (0, 1)
        model = MLP((784, 200, 10))
        params = model.init(seed=0)
        stream = batches(data, batch_size=32, seed=0)
        for _ in range(400):
            _, grads = model.gradients(params, *next(stream))
            for name, grad in grads.items():
                params[name] -= 0.1 * grad
        assert model.accuracy(params, data.test_x, data.test_y) > 0.85
