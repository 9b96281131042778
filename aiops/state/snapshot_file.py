"""Snapshot files: a header of plain values, then arrays, with a checksum for each MiB.

::

    file := block (`aiops.state.blocks`) | zeros to a multiple of 4096 | arrays | footer
    arrays: each begins at a multiple of 4096, its elements in C order, little endian; zeros between
        them and behind the last one, to a multiple of 4096
    footer := u32 crc of each MiB of the arrays, counted from the first | u64 length of the file
        | u32 count of these checksums | u32 crc of the block's checksum and of the footer so far
        | 8s "aiopsEND"

The key ``arrays`` of the header lists [name, dtype, shape, offset, nbytes], in the order of their
offsets, which are counted from the first array. The other keys are those of `SnapshotHeader`, and
``filler``: zeros that make the blocks of large snapshots equally long, for the most part, so that a
new one has the length of one that is not needed, and can be written over it.
"""

from __future__ import annotations

import sys
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import fields
from functools import partial
from struct import Struct
from typing import Any, Protocol

import numpy as np

from aiops.common.frozen import value
from aiops.errors import DamagedState, UsageError
from aiops.kernels.checksum import crc32
from aiops.kernels.parallel import ParallelMap, serial_map
from aiops.model.layout import Array
from aiops.state.blocks import (
    SNAPSHOT,
    Buffer,
    Read,
    bytes_of,
    pack_block,
    read_block,
    read_exactly,
)
from aiops.state.plain import DTYPES, Plain, dtype_of, field, nbytes_of

PAGE = 4096
"""Arrays begin at its multiples."""

CHECKED = 1 << 20
"""Bytes of the arrays to a checksum."""

PIECE = 8 << 20
"""Bytes that are written at a time."""

MAX_BUFFERS = 512
"""Buffers that are written at a time: a system call takes 1,024."""

END = b"aiopsEND"

_COUNTS, _TAIL = Struct("<QI"), Struct("<QII8s")


_LARGE, _BLOCK = 4 << 20, 1 << 16
"""Bytes of arrays from which a snapshot is large, and of which its block is a multiple then."""

_FILLER_HEAD = 8  # bytes by which the filler's own length may make the block longer


@value
class SnapshotHeader:
    """The plain values of a snapshot.

    Attributes
    ----------
    row
        The number of the newest row whose effects are in it; 0 before the first.
    generation
        The server's.
    run
        The id of the state.
    versions
        Of the model, and of each table.
    settings
        Those that decide the future: a server resumes with equal ones.
    wrote
        The software that wrote it, for people: ``aiops``, ``numpy``, ``byteorder``.
    owners
        By the name of a part of the engine, its plain state.
    shard, shards
        The server's place among those that hold the model.
    kind
        ``server``, or ``simulation`` for a checkpoint of the simulator's.
    """

    row: int
    generation: int
    run: str
    versions: Sequence[int]
    settings: Mapping[str, Plain]
    wrote: Mapping[str, Plain]
    owners: Mapping[str, Plain]
    shard: int = 0
    shards: int = 1
    kind: str = "server"

    @property
    def origin(self) -> tuple[str, int, int]:
        """The run, the number of the shard and that of all shards."""
        return self.run, self.shard, self.shards

    def plain(self) -> dict[str, Plain]:
        """Return it as a map."""
        found = {each.name: getattr(self, each.name) for each in fields(self)}
        return found | {"versions": list(self.versions)}

    @classmethod
    def of(cls, found: Plain, name: str) -> SnapshotHeader:
        """Return the header of a map that was read, whose other keys are left.

        Raises
        ------
        DamagedState
            When a value is missing or has another type.
        """
        if type(found) is not dict:
            raise DamagedState(f"{name} is damaged: its header is no map", file=name)
        kinds: dict[str, Any] = dict.fromkeys(("row", "generation", "shard", "shards"), int)
        kinds |= dict.fromkeys(("settings", "wrote", "owners"), dict)
        kinds |= {"run": str, "kind": str, "versions": list}
        header = cls(**{key: field(found, key, kind, name) for key, kind in kinds.items()})
        numbers = [header.row, header.generation, header.shard, header.shards, *header.versions]
        if any(type(number) is not int or number < 0 for number in numbers):
            raise DamagedState(f"{name} is damaged: its header has a negative number", file=name)
        return header


@value
class ArrayEntry:
    """The place of an array in a snapshot: its offset is counted from the first array."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int
    nbytes: int


class ArrayStream(Protocol):
    """An array that is not in memory as one: it is read in order while it is written."""

    @property
    def dtype(self) -> np.dtype[Any]:
        """Its dtype."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Its shape."""

    @property
    def nbytes(self) -> int:
        """Its bytes."""

    @property
    def pieces(self) -> Callable[[], Iterator[Array]]:
        """Yields its elements in C order: arrays that are contiguous, and do not change."""


class SnapshotPlan:
    """The place of everything in a snapshot file, known before anything is written.

    Parameters
    ----------
    header
        Its plain values; they are packed here.
    arrays
        Arrays by name, C-contiguous. They are not copied, and must not change until they are
        written. Streams are read when they are written, in the order of the names.

    Attributes
    ----------
    length
        Bytes of the file.

    Raises
    ------
    UsageError
        When a value is not plain, or an array cannot be written.
    """

    def __init__(self, header: SnapshotHeader, arrays: Mapping[str, Array | ArrayStream]) -> None:
        if sys.byteorder != "little":
            raise UsageError("a state is little endian, and this machine is not")
        entries = []
        offset = 0
        for name, array in arrays.items():
            known = array.dtype.name in DTYPES and array.dtype.isnative
            if not (known and (not isinstance(array, np.ndarray) or array.flags.c_contiguous)):
                raise UsageError(
                    f"the state's array {name!r} cannot be written: it is {array.dtype!r},"
                    " or not contiguous"
                )
            entries.append([name, array.dtype.name, list(array.shape), offset, array.nbytes])
            offset = _paged(offset + array.nbytes)
        block = _padded_block(header.plain() | {"arrays": entries}, offset)
        self._block_crc = block[-4:]
        self._start = block + bytes(-len(block) % PAGE)
        self._arrays = list(arrays.values())
        count = -(-offset // CHECKED)
        self.length = len(self._start) + offset + 4 * count + _TAIL.size

    def pieces(self, nbytes: int = PIECE) -> Iterator[tuple[int, list[Buffer]]]:
        """Yield the whole file: offsets, and the buffers to be written there.

        Checksums are taken as the pieces pass. A piece has at most ``nbytes`` bytes, or one buffer.
        """
        sums = _Checksums()
        offset, held, waiting = 0, 0, list[Buffer]()
        for buffer in self._buffers(sums, nbytes):
            if waiting and (held + len(buffer) > nbytes or len(waiting) == MAX_BUFFERS):
                yield offset, waiting
                offset, held, waiting = offset + held, 0, []
            waiting.append(buffer)
            held += len(buffer)
        yield offset, waiting

    def _buffers(self, sums: _Checksums, nbytes: int) -> Iterator[Buffer]:
        yield self._start
        for array in self._arrays:
            for piece in [array] if isinstance(array, np.ndarray) else array.pieces():
                view, at = bytes_of(piece), 0
                while at < len(view):
                    end = at + nbytes - sums.filled % nbytes  # where a checksum ends, too
                    yield sums.passed(view[at:end])
                    at = end
            if array.nbytes % PAGE:
                yield sums.passed(memoryview(bytes(-array.nbytes % PAGE)))
        found = sums.all()
        footer = found.tobytes() + _COUNTS.pack(self.length, len(found))
        yield footer + zlib.crc32(self._block_crc + footer).to_bytes(4, "little") + END


class _Checksums:
    """Takes the checksum of each MiB of the bytes that pass.

    Attributes
    ----------
    filled
        Bytes of the present MiB.
    """

    def __init__(self) -> None:
        self._found: list[int] = []
        self._crc = self.filled = 0

    def passed(self, view: memoryview) -> memoryview:
        """Count these bytes, and return them."""
        at = 0
        while at < len(view):
            piece = view[at : at + CHECKED - self.filled]
            self._crc = zlib.crc32(piece, self._crc) if self.filled else crc32(piece)
            self.filled += len(piece)
            at += len(piece)
            if self.filled == CHECKED:
                self._found.append(self._crc)
                self._crc = self.filled = 0
        return view

    def all(self) -> np.ndarray[Any, np.dtype[np.uint32]]:
        """Return all checksums, the last one perhaps of fewer bytes."""
        rest = [self._crc] if self.filled else []
        return np.array([*self._found, *rest], "<u4")


class SnapshotFile:
    """Reads a snapshot file: its header at once, its arrays on demand.

    Parameters
    ----------
    read, length
        The file's bytes, and how many there are.
    name
        The file's name, for errors.

    Attributes
    ----------
    header
        Its plain values.
    arrays
        The places of the arrays, by name.

    Raises
    ------
    DamagedState
        When header or footer are not what was written, or the file is not whole.
    UsageError
        When a newer release wrote it.
    """

    def __init__(self, read: Read, length: int, name: str) -> None:
        self._read, self._length, self._name = read, length, name
        found, end, crc = read_block(read, length, SNAPSHOT, name)
        self.header = SnapshotHeader.of(found, name)
        self.arrays, self._nbytes = self._entries(field(found, "arrays", list, name))
        self._start = _paged(end)
        count = -(-self._nbytes // CHECKED)
        if length != self._start + self._nbytes + 4 * count + _TAIL.size:
            raise self._damage(f"it has {length:,} bytes, not those of its arrays")
        if any(read_exactly(read, end, self._start - end, name)):
            raise self._damage("there are bytes between its header and its arrays")
        footer = read_exactly(
            read, self._start + self._nbytes, length - self._start - self._nbytes, name
        )
        told, entries, check, magic = _TAIL.unpack_from(footer, 4 * count)
        wanted = zlib.crc32(footer[:-12], zlib.crc32(crc.to_bytes(4, "little")))
        if (told, entries, check, magic) != (length, count, wanted, END):
            raise self._damage("its footer is not the one of its header")
        self._sums = np.frombuffer(footer, "<u4", count)
        self._edge: tuple[int, memoryview] = (-1, memoryview(b""))
        self._verified = False

    def _entries(self, rows: list[Plain]) -> tuple[dict[str, ArrayEntry], int]:
        """Return the arrays by name, and the bytes that they take with the zeros between them."""
        found: dict[str, ArrayEntry] = {}
        reached = 0
        for row in rows:
            if type(row) is not list or list(map(type, row)) != [str, str, list, int, int]:
                raise self._damage("an array is [name, dtype, shape, offset, nbytes]")
            name, dtype, shape, offset, nbytes = row
            try:
                size = nbytes_of(dtype_of(dtype), shape)
            except ValueError as error:
                raise self._damage(f"of its array {name!r:.60}: {error}") from None
            if (offset, nbytes) != (reached, size) or nbytes > self._length or name in found:
                raise self._damage(f"its array {name!r:.60} is not where it should be")
            found[name] = ArrayEntry(name, dtype, tuple(shape), offset, nbytes)
            reached = _paged(offset + nbytes)
        return found, reached

    def array(
        self, name: str, into: Array | None = None, parallel_map: ParallelMap = serial_map
    ) -> Array:
        """Read an array, and compare all of its bytes with their checksums, if `verify` has not.

        Parameters
        ----------
        name
            One of `arrays`.
        into
            A contiguous array of its dtype and as many elements; by default a new one.
        parallel_map
            Reads and checks MiB by MiB on several threads.

        Returns
        -------
        Array
            ``into``.

        Raises
        ------
        DamagedState
            When there is no such array, or its bytes are not those that were written; ``into`` then
            holds anything.
        UsageError
            When ``into`` does not fit.
        """
        entry = self.arrays.get(name)
        if entry is None:
            raise self._damage(f"it has no array {name!r:.60}")
        if into is None:
            into = np.empty(entry.shape, dtype_of(entry.dtype))
        fits = into.dtype.isnative and into.dtype.name == entry.dtype
        if not fits or into.nbytes != entry.nbytes:
            raise UsageError(
                f"{self._name}: {name!r} is {entry.dtype} of {entry.nbytes:,} bytes, and does not"
                f" fit into {into.dtype.name} of {into.nbytes:,}"
            )
        if not (into.flags.c_contiguous and into.flags.writeable):
            raise UsageError(
                f"{self._name}: {name!r} cannot be read into an array with gaps, or a read-only one"
            )
        view = bytes_of(into)
        stop = entry.offset + entry.nbytes
        whole = []
        for index in range(entry.offset // CHECKED, -(-stop // CHECKED)):
            begin, end = self._bounds(index)
            if begin >= entry.offset and end <= stop:
                target = view[begin - entry.offset : end - entry.offset]
                whole.append(partial(self._check, index, target))
                continue
            block = self._edge_block(index)
            low, high = max(begin, entry.offset), min(end, stop)
            view[low - entry.offset : high - entry.offset] = block[low - begin : high - begin]
        parallel_map(whole)
        return into

    def verify(self, parallel_map: ParallelMap = serial_map) -> None:
        """Compare all bytes of all arrays with their checksums; `array` does not do it again.

        Raises
        ------
        DamagedState
            At the first MiB that is not what was written.
        """
        free = list[memoryview]()
        parallel_map([partial(self._verify, index, free) for index in range(len(self._sums))])
        self._verified = True

    def _verify(self, index: int, free: list[memoryview]) -> None:
        """Verify a MiB in memory of ``free``, which a processor's cache still has, or new."""
        begin, end = self._bounds(index)
        try:
            room = free.pop()
        except IndexError:
            room = memoryview(bytearray(CHECKED))
        self._check(index, room[: end - begin])
        free.append(room)

    def _bounds(self, index: int) -> tuple[int, int]:
        """Return the range of bytes, from the first array on, of a checksum."""
        return index * CHECKED, min((index + 1) * CHECKED, self._nbytes)

    def _block(self, index: int) -> memoryview:
        begin, end = self._bounds(index)
        block = memoryview(bytearray(end - begin))
        self._check(index, block)
        return block

    def _edge_block(self, index: int) -> memoryview:
        """Return a MiB that several arrays share; small arrays are read in order, many in one."""
        if self._edge[0] != index:
            self._edge = index, self._block(index)
        return self._edge[1]

    def _check(self, index: int, into: memoryview) -> None:
        begin = self._start + index * CHECKED
        if self._read(begin, into) != len(into):
            raise self._damage(f"it ends before byte {begin + len(into):,}")
        if not self._verified and crc32(into) != int(self._sums[index]):
            whose = [e.name for e in self.arrays.values() if e.offset < (index + 1) * CHECKED]
            raise self._damage(
                f"bytes {begin:,} to {begin + len(into):,} are not those that were written"
                f" (of {whose[-1]!r} and before)",
                at=begin,
            )

    def _damage(self, why: str, **details: Any) -> DamagedState:
        return DamagedState(f"{self._name} is damaged: {why}", file=self._name, **details)


def _padded_block(found: dict[str, Plain], nbytes: int) -> bytes:
    """Return the block of a snapshot, with a filler if its arrays have many bytes."""
    if nbytes < _LARGE:
        return pack_block(SNAPSHOT, found)
    length = len(pack_block(SNAPSHOT, found | {"filler": b""}))
    filler = max(-length % _BLOCK - _FILLER_HEAD, 0)
    return pack_block(SNAPSHOT, found | {"filler": bytes(filler)})


def _paged(offset: int) -> int:
    """Return the next multiple of a page."""
    return offset + -offset % PAGE
