"""The fast checksum is zlib's, for all lengths and addresses."""

from __future__ import annotations

import zlib

import numpy as np
import pytest

from aiops.kernels import checksum
from aiops.kernels.checksum import LARGE, crc32, warm_crc32
from tests.rows import each_row

DATA = np.random.default_rng(1).integers(0, 256, 4 * LARGE, np.uint8).tobytes()


@pytest.fixture(params=["numpy", "numba"], autouse=True)
def backend(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checksum, "_ready", [])
    warm_crc32(request.param)


@each_row("offset", [0, 1, 8, 63])
@each_row("length", [0, 1, LARGE - 1, LARGE, LARGE + 1, LARGE + 64, 3 * LARGE + 77])
def test_it_is_the_checksum_of_zlib(length: int, offset: int) -> None:
    data = memoryview(DATA)[offset : offset + length]
    assert crc32(data) == zlib.crc32(data)


def test_every_byte_counts() -> None:
    changed = bytearray(DATA[:LARGE])
    for place in range(0, LARGE, 509):
        changed[place] ^= 1 << place % 8
        assert crc32(changed) == zlib.crc32(changed)


def test_it_reads_no_further_than_its_bytes_and_takes_any_of_them() -> None:
    for data in (
        bytes(LARGE),
        b"\xff" * LARGE,
        bytearray(DATA),
        memoryview(np.arange(LARGE, dtype=np.uint8)),
    ):
        assert crc32(data) == zlib.crc32(data)
