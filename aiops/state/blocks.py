"""One plain value with a checksum: a small file, or the head of a large one.

::

    block := magic (8 bytes) | u32 format | u32 length H | H bytes MessagePack | u32 crc

Little endian. The checksum is the CRC-32 of zlib, over all bytes of the block before it.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable
from struct import Struct
from typing import TypeAlias

import numpy as np

from aiops.errors import DamagedState, UsageError
from aiops.model.layout import Array
from aiops.state.plain import Plain, pack, unpack

Buffer: TypeAlias = bytes | bytearray | memoryview

Read: TypeAlias = Callable[[int, memoryview], int]
"""Reads from an offset on into all of a writable buffer; returns the bytes read, fewer at the end.

It must be possible to call it on several threads.
"""

FORMAT = 1
"""The version of the format of all files of a state."""

MAX_BLOCK = 1 << 28
"""Bytes of a block's value, at most."""

SNAPSHOT, IDENTITY, GENERATION = b"aiopsSS\n", b"aiopsID\n", b"aiopsGN\n"
"""The magics of blocks, by what they are the head of."""

_HEAD = Struct("<8sII")
_CRC = Struct("<I")


def pack_block(magic: bytes, value: Plain) -> bytes:
    """Return a block of a plain value.

    Raises
    ------
    UsageError
        When the value is not plain, or too large for a block.
    """
    data = pack(value)
    if len(data) > MAX_BLOCK:
        raise UsageError(
            f"the state's plain values take {len(data):,} bytes, more than the {MAX_BLOCK:,} that"
            " a block holds"
        )
    head = _HEAD.pack(magic, FORMAT, len(data))
    return b"".join((head, data, _CRC.pack(zlib.crc32(data, zlib.crc32(head)))))


def read_block(read: Read, length: int, magic: bytes, name: str) -> tuple[Plain, int, int]:
    """Read the block that a file begins with.

    Parameters
    ----------
    read, length
        The file's bytes, and how many there are.
    magic
        That of the kind of block that is expected.
    name
        The file's name, for errors.

    Returns
    -------
    tuple
        Its value, the offset of the first byte behind it, its checksum.

    Raises
    ------
    DamagedState
        When it is not such a block, whole.
    UsageError
        When another release wrote it, in a newer format.
    """
    if length < _HEAD.size + _CRC.size:
        raise DamagedState(f"{name} is damaged: it has {length} bytes, less than a head", file=name)
    head = read_exactly(read, 0, _HEAD.size, name)
    found, version, nbytes = _HEAD.unpack(head)
    if found != magic:
        raise DamagedState(f"{name} is damaged: it does not begin with {magic!r}", file=name)
    if nbytes > min(MAX_BLOCK, length - _HEAD.size - _CRC.size):
        raise DamagedState(
            f"{name} is damaged: it announces {nbytes:,} bytes and has {length:,}", file=name
        )
    rest = read_exactly(read, _HEAD.size, nbytes + _CRC.size, name)
    data = rest[:nbytes]
    (crc,) = _CRC.unpack(rest[nbytes:])
    if zlib.crc32(data, zlib.crc32(head)) != crc:
        raise DamagedState(f"{name} is damaged: the checksum of its head is wrong", file=name)
    check_format(version, name)  # now that the number is known to be what was written
    return unpack(data, name), _HEAD.size + nbytes + _CRC.size, crc


def whole_block(data: Buffer, magic: bytes, name: str) -> Plain:
    """Return the value of a file that is one block and nothing else.

    Raises
    ------
    DamagedState, UsageError
        As `read_block`, and when bytes follow the block.
    """
    value, end, _crc = read_block(reader(data), len(data), magic, name)
    if end != len(data):
        raise DamagedState(f"{name} is damaged: {len(data) - end} bytes follow its end", file=name)
    return value


def check_format(version: int, name: str) -> None:
    """See that this release reads a file's format.

    Raises
    ------
    UsageError
        When it is a newer one.
    DamagedState
        When there was never such a format.
    """
    if version > FORMAT:
        raise UsageError(
            f"{name} was written in format {version}, and this release reads format {FORMAT}: go on"
            " with the release that wrote it, or a later one"
        )
    if version < 1:
        raise DamagedState(f"{name} is damaged: there is no format {version}", file=name)


def read_exactly(read: Read, offset: int, nbytes: int, name: str) -> memoryview:
    """Return bytes of a file.

    Raises
    ------
    DamagedState
        When the file ends before.
    """
    into = memoryview(bytearray(nbytes))
    if read(offset, into) != nbytes:
        raise DamagedState(f"{name} is damaged: it ends before byte {offset + nbytes}", file=name)
    return into


def reader(data: Buffer) -> Read:
    """Return the function that reads from bytes in memory."""
    view = memoryview(data).cast("B")

    def read(offset: int, into: memoryview) -> int:
        piece = view[offset : offset + len(into)]
        into[: len(piece)] = piece
        return len(piece)

    return read


def bytes_of(array: Array) -> memoryview:
    """Return the memory of a contiguous array as bytes (bfloat16 has no buffer of its own)."""
    return array.reshape(-1).view(np.uint8).data
