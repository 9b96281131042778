"""The fast checksum is zlib's, for all lengths and addresses."""

from __future__ import annotations

import zlib

import numpy as np
import pytest

from aiops.kernels import checksum
from aiops.kernels.checksum import LARGE, crc32, seal, warm_crc32
from aiops.state.frames import END, frame, frame_into

DATA = np.random.default_rng(1).integers(0, 256, 4 * LARGE, np.uint8).tobytes()


@pytest.fixture(params=["numpy", "numba"], autouse=True)
def backend(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checksum, "_ready", [])
    monkeypatch.setattr(checksum, "_sealing", [])
    warm_crc32(request.param)


@pytest.mark.parametrize("offset", [0, 1, 8, 63])
@pytest.mark.parametrize("length", [0, 1, LARGE - 1, LARGE, LARGE + 1, LARGE + 64, 3 * LARGE + 77])
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


@pytest.mark.parametrize("length", [0, 1, 15, 16, 17, 64, 255, 256, 257, 4096, 4099, LARGE + 77])
@pytest.mark.parametrize("row", [0, 1, 8, 15, 16, 31, 40, 57])
def test_a_frame_is_sealed_as_it_is_made_at_once(row: int, length: int) -> None:
    """Also on old bytes, and behind another frame."""
    into, at, salt = np.full(2 * LARGE + 1000, 7, np.uint8), 8 * (length % 3), b"\x07\0\0\x09"
    numbers = 5, 7, 1.5, 1
    payload, text = np.frombuffer(DATA, np.uint8, length, 3), DATA[100 : 100 + row]
    frame_into(into.data, at, *numbers, text, length, unsynced=4)
    end = seal(into, at, row, payload, zlib.crc32(salt))
    before, after = frame(
        *(*numbers, text, length, zlib.crc32(payload)),
        salt=int.from_bytes(salt, "little"),
        unsynced=4,
    )
    whole = before + payload.tobytes() + after
    assert end == at + len(whole)
    assert into[at:end].tobytes() == whole
    assert into[end : end + len(END)].tobytes() == END
    assert (into[:at] == 7).all()
    assert (into[end + len(END) :] == 7).all()
