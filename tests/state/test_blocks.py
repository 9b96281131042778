"""A block is read as it was written, or refused."""

from __future__ import annotations

import zlib

import pytest
from hypothesis import given

from aiops.errors import DamagedState, UsageError
from aiops.state import blocks
from aiops.state.blocks import GENERATION, IDENTITY, pack_block, read_block, reader, whole_block
from tests.state.test_plain import typed, values

BLOCK = pack_block(IDENTITY, {"run": "8c2f", "shards": [1, 2.5]})


@given(values)
def test_round_trip(value: object) -> None:
    data = pack_block(IDENTITY, value)
    assert typed(whole_block(data, IDENTITY, "identity")) == typed(value)
    found, end, crc = read_block(reader(data + b"more"), len(data) + 4, IDENTITY, "identity")
    assert pack_block(IDENTITY, found) == data
    assert (end, crc) == (len(data), int.from_bytes(data[-4:], "little"))


def test_every_truncation_is_refused() -> None:
    for length in range(len(BLOCK)):
        with pytest.raises(DamagedState, match="identity is damaged"):
            whole_block(BLOCK[:length], IDENTITY, "identity")


def test_every_flipped_bit_is_refused() -> None:
    for bit in range(8 * len(BLOCK)):
        data = bytearray(BLOCK)
        data[bit // 8] ^= 1 << bit % 8
        with pytest.raises(DamagedState, match="identity is damaged"):
            whole_block(data, IDENTITY, "identity")


def test_bytes_behind_it() -> None:
    with pytest.raises(DamagedState, match="identity is damaged: 1 bytes follow its end"):
        whole_block(BLOCK + b"\0", IDENTITY, "identity")


def test_another_kind_of_block() -> None:
    with pytest.raises(DamagedState, match="does not begin with b'aiopsGN"):
        whole_block(BLOCK, GENERATION, "generation")


def test_a_newer_format() -> None:
    data = BLOCK[:8] + (2).to_bytes(4, "little") + BLOCK[12:-4]
    data += zlib.crc32(data).to_bytes(4, "little")
    with pytest.raises(
        UsageError, match="identity was written in format 2, and this release reads"
    ):
        whole_block(data, IDENTITY, "identity")


def test_an_announced_length_is_compared_with_the_files() -> None:
    for length in (len(BLOCK), 1 << 31, (1 << 32) - 1):
        data = BLOCK[:12] + length.to_bytes(4, "little") + BLOCK[16:]
        with pytest.raises(DamagedState, match="announces"):
            read_block(reader(data), 1 << 30 if length > len(BLOCK) else len(data), IDENTITY, "x")


def test_a_file_that_ends_before_its_length() -> None:
    with pytest.raises(DamagedState, match="it ends before byte"):
        read_block(reader(BLOCK[:-5]), len(BLOCK), IDENTITY, "identity")


def test_a_value_that_is_too_large(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blocks, "MAX_BLOCK", 64)
    with pytest.raises(UsageError, match="more than the 64 that a block holds"):
        pack_block(IDENTITY, bytes(65))
