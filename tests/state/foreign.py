"""A reader of a state written from docs/state.md alone.

It imports nothing of ours, and is strict where the page is.
"""

from __future__ import annotations

import struct
import zlib
from typing import Any, NamedTuple

# ---------------------------------------------------------------- MessagePack


_COUNTS = {
    **dict.fromkeys((0xC4, 0xD9), ">B"),
    **dict.fromkeys((0xC5, 0xDA, 0xDC, 0xDE), ">H"),
    **dict.fromkeys((0xC6, 0xDB, 0xDD, 0xDF), ">I"),
}
_NUMBERS = dict(zip(range(0xCA, 0xD4), (">f", ">d", *(f">{c}" for c in "BHIQbhiq")), strict=True))
_EXTENSIONS = {0xC7: ">B", 0xC8: ">H", 0xC9: ">I"}


class Small(NamedTuple):
    """An array among plain values."""

    dtype: str
    shape: list[int]
    data: bytes


def unpack(data: bytes, at: int = 0) -> tuple[Any, int]:
    """Read the value at a position; return it, and where the next one begins."""
    mark, at = data[at], at + 1
    if mark < 0x80 or mark >= 0xE0:
        return mark if mark < 0x80 else mark - 256, at
    if mark in (0xC0, 0xC2, 0xC3):
        return {0xC0: None, 0xC2: False, 0xC3: True}[mark], at
    if mark in _NUMBERS:
        form = _NUMBERS[mark]
        return struct.unpack_from(form, data, at)[0], at + struct.calcsize(form)
    if mark in _EXTENSIONS or 0xD4 <= mark <= 0xD8:
        if mark not in _EXTENSIONS:
            count = 1 << mark - 0xD4
        else:
            count = struct.unpack_from(_EXTENSIONS[mark], data, at)[0]
            at += struct.calcsize(_EXTENSIONS[mark])
        return extended(data[at], data[at + 1 : at + 1 + count]), at + 1 + count
    if mark in _COUNTS:
        count = struct.unpack_from(_COUNTS[mark], data, at)[0]
        at += struct.calcsize(_COUNTS[mark])
    else:
        count = mark & (31 if mark >= 0xA0 else 15)
    if mark in (0xC4, 0xC5, 0xC6):
        return data[at : at + count], at + count
    if 0xA0 <= mark < 0xC0 or mark in (0xD9, 0xDA, 0xDB):
        return data[at : at + count].decode(), at + count
    is_map = 0x80 <= mark < 0x90 or mark in (0xDE, 0xDF)
    items = []
    for _ in range(2 * count if is_map else count):
        item, at = unpack(data, at)
        items.append(item)
    return (dict(zip(items[::2], items[1::2], strict=True)) if is_map else items), at


def extended(code: int, data: bytes) -> Any:
    if code == 5:
        return int(data)
    makers: dict[int, Any] = {1: tuple, 2: set, 3: frozenset, 4: lambda items: Small(*items)}
    return makers[code](value(data))


def value(data: bytes) -> Any:
    found, end = unpack(data)
    assert end == len(data)
    return found


# ---------------------------------------------------------------- files


class Damaged(Exception):
    """The file is not what was written."""


def block(data: bytes, magic: bytes) -> tuple[Any, int]:
    """The value of a block, and where it ends."""
    found, version, count = struct.unpack_from("<8sII", data)
    end = 16 + count
    if found != magic or version != 1 or end + 4 > len(data):
        raise Damaged("head")
    if struct.unpack_from("<I", data, end)[0] != zlib.crc32(data[:end]):
        raise Damaged("crc")
    return value(data[16:end]), end + 4


class Row(NamedTuple):
    number: int
    kind: int
    time: float
    flags: int
    row: bytes
    payload: bytes


class Frame(NamedTuple):
    """The 48 bytes of a frame whose checksum is right."""

    row: int
    payload: int
    number: int
    time: float
    row_crc: int
    payload_crc: int
    unsynced: int
    kind: int
    flags: int
    zero: int


def filled(count: int) -> int:
    return (count + 7) // 8 * 8


def frame_at(data: bytes, at: int, salt: bytes) -> Frame | None:
    if at + 48 > len(data) or zlib.crc32(salt + data[at + 4 : at + 48]) != int.from_bytes(
        data[at : at + 4], "little"
    ):
        return None
    return Frame(*struct.unpack_from("<IQQdIIIBBH", data, at + 4))


def calls_synced(data: bytes, row: int, start: int, salt: bytes) -> bool:
    """Whether a later frame from a place on says that a row was synced."""
    for place in range(start, len(data) - 47, 8):
        later = frame_at(data, place, salt)
        if later is None or later.number <= row or later.unsynced == 0xFFFFFFFF:
            continue
        if later.number - later.unsynced >= row:
            return True
    return False


def without_head(data: bytes, first: int) -> bool:
    """Whether a segment's head never reached the disk."""

    def right(head: int) -> bool:
        data = head.to_bytes(64, "little")
        return zlib.crc32(data[:60]).to_bytes(4, "little") == data[60:]

    head = int.from_bytes(data[:64], "little")
    if right(head):
        return bool(struct.unpack_from("<Q", data, 16)[0] < first)
    return not head or not any(right(head ^ 1 << bit) for bit in range(512))


def segment(
    data: bytes, until: int | None = None, behind: list[tuple[int, bytes]] | None = None
) -> tuple[list[Row], bool]:
    """The rows of a segment, and if its end is torn.

    ``until``: the next one's first row. ``behind``: first rows and bytes of all later ones.
    """
    magic, version, salt, number, _generation, _run, _shard, _shards, _zero, crc = struct.unpack(
        "<8s I 4s Q Q 16s I I I I", data[:64]
    )
    if magic != b"aiopsJL\n" or version != 1 or crc != zlib.crc32(data[:60]):
        raise Damaged("head")
    rows: list[Row] = []
    at = 64
    while True:
        if number == until:
            return rows, False
        frame = frame_at(data, at, salt)
        if frame is None:
            break
        start = at + 48 + filled(frame.row)
        end = start + filled(frame.payload)
        row, payload = data[at + 48 : at + 48 + frame.row], data[start : start + frame.payload]
        crcs = zlib.crc32(row), zlib.crc32(payload)
        if end > len(data) or crcs != (frame.row_crc, frame.payload_crc) or frame.number != number:
            break
        rows.append(Row(number, frame.kind, frame.time, frame.flags, row, payload))
        at, number = end, number + 1
    next_at = at
    if frame is not None and frame.number == number:
        next_at = at + 48 + filled(frame.row) + filled(frame.payload)
    if calls_synced(data, number, next_at, salt):
        raise Damaged(f"row {number}: synced")
    check_later(number, behind or [])
    return rows, any(data[at : at + 8])


def check_later(row: int, behind: list[tuple[int, bytes]]) -> None:
    for first, data in reversed(behind):
        if without_head(data, first):
            continue
        if zlib.crc32(data[:60]).to_bytes(4, "little") != data[60:64]:
            raise Damaged("head")
        if calls_synced(data, row, 64, data[12:16]):
            raise Damaged(f"row {row}: synced when segment {first} was written")


def journal(segments: list[tuple[int, bytes]], *, snapshot: bool = False) -> tuple[list[Row], int]:
    """The rows of segments, and the number of those that are void."""
    rows: list[Row] = []
    for at, (first, data) in enumerate(segments):
        behind = segments[at + 1 :]
        if (at or snapshot) and without_head(data, first):
            check_later(first, behind)
            return rows, len(behind) + 1
        until = behind[0][0] if behind else None
        found, _torn = segment(data, until, behind)
        rows += found
        if until is not None and first + len(found) < until:
            return rows, len(behind)
    return rows, 0


def snapshot(data: bytes) -> tuple[dict[str, Any], dict[str, bytes]]:
    """The header of a snapshot, and the bytes of its arrays by name."""
    header, end = block(data, b"aiopsSS\n")
    crc = data[end - 4 : end]
    start = (end + 4095) // 4096 * 4096
    length, count, check, magic = struct.unpack("<QII8s", data[-24:])
    footer = data[-24 - 4 * count :]
    if magic != b"aiopsEND" or length != len(data) or any(data[end:start]):
        raise Damaged("footer")
    if check != zlib.crc32(crc + footer[:-12]):
        raise Damaged("footer's crc")
    area = data[start : -24 - 4 * count]
    crcs = [zlib.crc32(area[at : at + (1 << 20)]) for at in range(0, len(area), 1 << 20)]
    if crcs != list(struct.unpack(f"<{count}I", footer[: 4 * count])):
        raise Damaged("arrays")
    arrays = header["arrays"]
    return header, {row[0]: area[row[3] : row[3] + row[4]] for row in arrays}
