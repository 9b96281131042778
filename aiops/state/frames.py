"""Segments of the journal: a head, and a frame for each row.

::

    segment := head frame*                             little endian; all begins at multiples of 8
    head (64 bytes):
        8s "aiopsJL\\n" | u32 format | u32 salt | u64 first row | u64 generation | 16s run
        | u32 shard | u32 shards | u32 zero | u32 crc of the 60 bytes before
    frame := head (48 bytes) | row (R bytes) | zeros | payload (P bytes) | zeros
        u32 crc of the salt and the 44 bytes that follow
        u32 R | u64 P | u64 number of the row | f64 time
        u32 crc of the row | u32 crc of the payload | u32 unsynced | u8 kind | u8 flags | u16 zero

Rows are numbered from 1, one after the other, over all segments of a run. The lengths have a
checksum of their own, so that no length is followed that was not written. The payload's checksum
does not depend on the row, so that it can be taken before the row is known.

A segment may lie on the bytes of an older one (it is recycled) and is longer than its frames (it is
preallocated). Salt and row numbers keep old frames from being read as new ones. ``unsynced`` is
the number of the row less that of the newest row that was known to be on the disk when the frame
was made. That tells damage from a torn end: of the newest rows any may be missing after a loss of
power, in any segment, but none that a later frame calls synced.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator
from functools import lru_cache
from struct import Struct
from typing import NamedTuple

import numpy as np

from aiops.common.frozen import value
from aiops.errors import DamagedState, UsageError
from aiops.kernels.checksum import LARGE, crc32
from aiops.state.blocks import FORMAT, Buffer, check_format
from aiops.state.file_bytes import FileBytes

MAGIC = b"aiopsJL\n"
HEAD, FRAME = 64, 48
"""Bytes of a segment's head, and of a frame's."""

UNKNOWN = 0xFFFFFFFF
"""``unsynced`` of a frame that says nothing about earlier rows."""

END = bytes(8)
"""Zeros behind the last frame of a write, where there is room: the next frame overwrites them.

They tell a clean end from one that is torn, on a recycled segment too. Nothing depends on them.
"""

MAX_RUN = 16
"""Longest run, in ASCII characters."""

_HEAD = Struct("<8sIIQQ16sIIII")
_FRAME = Struct("<IQQdIIIBBH")  # without its checksum
_U32 = Struct("<I")
_crc32 = zlib.crc32
_ZEROS = tuple(bytes(count) for count in range(8))
_CHUNK = 1 << 17
"""Positions at which frames are looked for at a time, behind a bad one."""


@value
class SegmentHead:
    """The head of a segment.

    Attributes
    ----------
    first
        The number of its first row.
    generation
        The server's, when the segment was begun.
    run
        The id of the state: ASCII, at most 16 characters.
    salt
        Drawn for each segment, 0 to 2³² − 1.
    shard, shards
        The server's place among those that hold the model.
    """

    first: int
    generation: int
    run: str
    salt: int
    shard: int = 0
    shards: int = 1

    @property
    def origin(self) -> tuple[str, int, int]:
        """The run, the number of the shard and that of all shards."""
        return self.run, self.shard, self.shards

    def pack(self) -> bytes:
        """Return the 64 bytes.

        Raises
        ------
        UsageError
            When the run is too long or is not ASCII.
        """
        if len(self.run) > MAX_RUN or not self.run.isascii() or "\0" in self.run:
            raise UsageError(f"{self.run!r:.60} is no id of a run: at most 16 characters of ASCII")
        run = self.run.encode()
        numbers = self.salt, self.first, self.generation, run, self.shard, self.shards, 0, 0
        head = _HEAD.pack(MAGIC, FORMAT, *numbers)[:-4]
        return head + _U32.pack(zlib.crc32(head))

    @classmethod
    def unpack(cls, data: Buffer, name: str) -> SegmentHead:
        """Return the head of a segment.

        Raises
        ------
        DamagedState
            When these bytes do not begin with a head.
        UsageError
            When a newer release wrote it.
        """
        if len(data) < HEAD:
            raise DamagedState(f"{name} is damaged: it has {len(data)} bytes, less than a head")
        found = _HEAD.unpack_from(data)
        magic, version, salt, first, generation, run, shard, shards, _zero, crc = found
        if magic != MAGIC:
            raise DamagedState(f"{name} is damaged: it is no segment of a journal", file=name)
        if zlib.crc32(memoryview(data)[: HEAD - 4]) != crc:
            raise DamagedState(f"{name} is damaged: the checksum of its head is wrong", file=name)
        check_format(version, name)
        text = run.rstrip(b"\0").decode("ascii", "replace")
        return cls(first, generation, text, salt, shard, shards)


@value
class JournalFrame:
    """A row of the journal.

    Attributes
    ----------
    number
        Of the row, from 1.
    kind
        A `RowKind`, or one that this release does not know.
    time
        The engine's, in seconds.
    flags
        Bit 0: the current version had readers (`Store.freeze`).
    row
        Its fields: `aiops.state.row_kinds`.
    payload
        A view of the segment's bytes, at a multiple of 8.
    unsynced
        See above.
    at, end
        Offsets of the frame and of the next one in the segment.
    """

    number: int
    kind: int
    time: float
    flags: int
    row: bytes
    payload: memoryview
    unsynced: int
    at: int
    end: int


class _Found(NamedTuple):
    """The head of a frame whose checksum is right."""

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


def frame(
    number: int,
    kind: int,
    time: float,
    flags: int,
    row: bytes,
    payload: int = 0,
    crc: int = 0,
    *,
    salt: int,
    unsynced: int = UNKNOWN,
) -> tuple[bytes, bytes]:
    """Return the bytes before a frame's payload, and the zeros after it.

    Parameters
    ----------
    number, kind, time, flags, row
        As in `JournalFrame`.
    payload, crc
        Length of the payload in bytes, and its CRC-32 (0 if there is none).
    salt
        The segment's.
    unsynced
        The number less that of the newest row known to be synced. The newest such row is 0 at
        first.
    """
    length = len(row)
    fields = _FRAME.pack(
        length,
        payload,
        number,
        time,
        zlib.crc32(row),
        crc,
        unsynced if unsynced < UNKNOWN else UNKNOWN,
        kind,
        flags,
        0,
    )
    check = _U32.pack(zlib.crc32(fields, _salted(salt)))
    return check + fields + row + _ZEROS[-length % 8], _ZEROS[-payload % 8]


class FixedFrames:
    """Makes the frames of one kind of row, all of one length, where they are to lie.

    Parameters
    ----------
    kind
        A `RowKind`.
    row
        Of the fields of a row.
    payload
        Length of a payload in bytes.
    rest
        Bytes of each row behind its fields.

    Attributes
    ----------
    kind, payload, rest
        As given.
    nbytes
        Bytes that a frame takes; `END` follows it.
    """

    __slots__ = (
        *("_before", "_end", "_length", "_pack", "_zeros", "kind", "nbytes", "payload", "rest"),
    )

    def __init__(self, kind: int, row: Struct, payload: int, rest: bytes = b"") -> None:
        self.kind, self._pack, self._length = kind, row.pack, row.size + len(rest)
        self.payload, self.nbytes = payload, frame_bytes(self._length, payload)
        self.rest, self._zeros = rest, _ZEROS[-self._length % 8]
        self._before = frame_bytes(self._length, 0)
        self._end = _ZEROS[-payload % 8] + END

    def store(
        self,
        into: memoryview,
        at: int,
        number: int,
        time: float,
        flags: int,
        fields: tuple[int, ...],
        payload: memoryview,
        salt: int,
        unsynced: int,
    ) -> None:
        """Store a frame into memory, from an offset on, and `END` behind it.

        ``fields`` are the row's; all else is as of `frame`.
        """
        row, nbytes = self._pack(*fields) + self.rest, self.payload
        crc = _crc32(payload) if nbytes < LARGE else crc32(payload)
        head = _FRAME.pack(
            *(self._length, nbytes, number, time, _crc32(row), crc),
            unsynced if unsynced < UNKNOWN else UNKNOWN,
            self.kind,
            flags,
            0,
        )
        begin = at + self._before
        into[at:begin] = _U32.pack(_crc32(head, _salted(salt))) + head + row + self._zeros
        end = begin + nbytes
        into[begin:end] = payload
        into[end : end + len(self._end)] = self._end


@lru_cache(8)
def _salted(salt: int) -> int:
    """Return the checksum of a segment's salt, with which those of its heads begin."""
    return zlib.crc32(_U32.pack(salt))


def frame_bytes(row: int, payload: int) -> int:
    """Return the bytes of a frame whose row and payload have these lengths."""
    return FRAME + row + -row % 8 + payload + -payload % 8


class SegmentScan:
    """Reads a segment's frames, in order, up to its end.

    Parameters
    ----------
    data
        The segment; frames hold views of its bytes.
    name
        Its file's name, for errors.
    first
        The number that its first row must have (its name says it), if that is known.
    until
        The first row of the next segment, or None for the last segment.
    called_synced
        Returns the number of a frame of a later segment that calls a row synced, or None
        (`calls_synced`); without it none does.
    payloads
        Whether payloads are compared with their checksums.
    passed
        Rows up to this one have no payload here: theirs are not looked at.

    Attributes
    ----------
    head
        The segment's head.
    row, end
        After the last frame: the number that the next row would have, and its offset.
    torn
        After the last frame: bytes of the frame that follows and is not whole, as far as that is
        known; 0 at a clean end.
    short
        After the last frame: whether another segment follows, and rows before it are missing. They
        were not synced, so they are the journal's end, and what follows them is void.

    Raises
    ------
    DamagedState
        When a frame is not what was written, although it must have been on the disk. Its details
        have ``file``, ``row``, ``at``, and ``later``, the row that tells. Constructing the object
        raises for a bad head; all other damage is raised by the iteration.
    UsageError
        When a newer release wrote the segment.
    """

    def __init__(
        self,
        data: Buffer | FileBytes,
        name: str,
        *,
        first: int | None = None,
        until: int | None = None,
        called_synced: Callable[[int], int | None] = lambda row: None,
        payloads: bool = True,
        passed: int = 0,
    ) -> None:
        self._data = data if isinstance(data, FileBytes) else memoryview(data).cast("B")
        self._name, self._passed = name, passed
        self._until, self._called_synced = until, called_synced
        self._payloads = payloads
        self.head = SegmentHead.unpack(self._data[:HEAD], name)
        if first is not None and self.head.first != first:
            raise DamagedState(
                f"{name} is damaged: it begins with row {self.head.first:,}, and its name says"
                f" {first:,}",
                file=name,
            )
        self._salted = _salted(self.head.salt)
        self.row = self.head.first
        self.end = HEAD
        self.torn = 0
        self.short = False

    def __iter__(self) -> Iterator[JournalFrame]:
        while self._until is None or self.row < self._until:
            found = self._head_at(self.end)
            if found is None or found.number != self.row:
                self._ended(None)
                return
            made = self._whole(found)
            if made is None:
                self._ended(found)
                return
            self.row += 1
            self.end = made.end
            yield made

    def _head_at(self, at: int) -> _Found | None:
        """Return the head of a frame, or None when its checksum is wrong."""
        if at + FRAME > len(self._data):
            return None
        head = self._data[at : at + FRAME]
        (crc,) = _U32.unpack_from(head)
        if zlib.crc32(head[4:], self._salted) != crc:
            return None
        return _Found(*_FRAME.unpack_from(head, 4))

    def _whole(self, found: _Found) -> JournalFrame | None:
        """Return the frame at the end, or None when its row or its payload is not whole."""
        at = self.end
        start = at + FRAME + found.row + -found.row % 8
        end = at + frame_bytes(found.row, found.payload)
        if end > len(self._data):
            return None
        row = bytes(self._data[at + FRAME : at + FRAME + found.row])
        if zlib.crc32(row) != found.row_crc:
            return None
        passed = found.number <= self._passed
        payload = self._data[start : start + (0 if passed else found.payload)]
        if self._payloads and not passed and crc32(payload) != found.payload_crc:
            return None
        fixed = found.number, found.kind, found.time, found.flags
        return JournalFrame(*fixed, row, payload, found.unsynced, at, end)

    def _ended(self, found: _Found | None) -> None:
        """Tell the end of the journal from damage, where no whole frame follows.

        ``found``: the head of the frame there, if only its row or its payload is not whole.
        """
        nbytes = FRAME if found is None else frame_bytes(found.row, found.payload)
        row = max(self.row, self._passed + 1)  # those before it are in a snapshot
        later = self._later(self.end + (0 if found is None else nbytes), row)
        if later is None and self._until is not None:
            later = self._called_synced(row)
        if later is not None:
            raise self._damage(later)
        rest = len(self._data) - self.end
        clean = found is None and not any(self._data[self.end : self.end + len(END)])
        self.torn = 0 if clean else min(nbytes, rest)
        self.short = self._until is not None

    def _damage(self, later: int) -> DamagedState:
        return DamagedState(
            f"{self._name} is damaged at row {self.row:,} (byte {self.end:,}), which had been"
            f" synced when row {later:,} was written: put back a copy, or export the model at row"
            f" {self.row - 1:,}",
            file=self._name,
            row=self.row,
            at=self.end,
            later=later,
        )

    def calls_synced(self, row: int) -> int | None:
        """Return the number of a frame of this segment that calls an earlier row synced, or None.

        ``row``: of an earlier segment. The frames before it need not be whole.
        """
        return self._later(HEAD, row)

    def _later(self, start: int, row: int) -> int | None:
        """Return the number of a frame from ``start`` on that calls a row synced, or None.

        Only the heads of frames are looked at: their checksum has the salt, and their fixed length
        bounds the work, whatever the bytes are.
        """
        most = max(row, self.row) + (len(self._data) - HEAD) // FRAME
        begin, end, size = start, len(self._data), len(self._data)
        while begin <= size - FRAME:
            if isinstance(self._data, FileBytes):
                at, end = self._data.written(begin)
                if at >= size:
                    break
                begin += max(0, at - FRAME - begin) // 8 * 8  # a head may begin with zeros
            stop = min(end, begin + 8 * _CHUNK + FRAME - 8)
            data = self._data[begin:stop]
            if stop == end < size:  # a head may end with zeros, too, which are not there to be read
                data = memoryview(bytes(data) + bytes(min(FRAME, size - stop)))
            words = np.frombuffer(data, "<u8", len(data) // 8)
            numbers = words[2:-3]  # the third word of a frame; `unsynced` is half of the sixth
            unsynced = words[5:] & np.uint64(UNKNOWN)
            found = (numbers > row) & (numbers <= most) & (unsynced != UNKNOWN)
            found &= numbers >= unsynced + np.uint64(row)
            for index in np.flatnonzero(found).tolist():
                head = self._head_at(begin + 8 * index)
                if head is not None and head.number - head.unsynced >= row:
                    return head.number
            begin += max(8, (len(data) - FRAME) // 8 * 8 + 8)
        return None


def never_reached(data: Buffer | FileBytes, first: int) -> bool:
    """Return whether a segment's head is not on the disk, as after a loss of power.

    Then its file is as it was before, new or that of an older segment, or the head is half written:
    it is torn. A head that is one flipped bit from a right one is damaged.

    Parameters
    ----------
    data
        The segment.
    first
        The number of its first row, of which the name of the file tells.
    """
    head = bytes(data[:HEAD])
    if not any(head) or len(head) < HEAD:
        return not any(head)
    if _is_head(head):
        return bool(_HEAD.unpack(head)[3] < first)
    number = int.from_bytes(head, "little")
    flipped = (number ^ 1 << bit for bit in range(8 * HEAD))
    return not any(_is_head(each.to_bytes(HEAD, "little")) for each in flipped)


def _is_head(head: bytes) -> bool:
    return zlib.crc32(head[:-4]) == int.from_bytes(head[-4:], "little")
