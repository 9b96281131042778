"""Lay out the tensors of a model in an arena: one flat run of bytes without padding.

Tensors are ordered by item size (8, 4, 2 bytes), then by dtype, then as the model was defined. So
every tensor is aligned to its items, all tensors of a dtype are one run (a `Section`), and a whole
model is one range of bytes.
"""

from __future__ import annotations

import hashlib
import math
from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import pairwise
from typing import Any, NamedTuple
from weakref import WeakValueDictionary

import msgpack
import numpy as np
import numpy.typing as npt

from aiops.errors import BadPush, UsageError, nearest
from aiops.model.parts import LARGEST, Part, Parts

Ints = npt.NDArray[np.int64]
Array = npt.NDArray[Any]
Bytes = npt.NDArray[np.uint8]

DTYPES = ("float64", "float32", "bfloat16", "float16")
"""The dtypes of tensors. The server trains the 16-bit ones with float32 master copies."""

MAX_PART = 1 << 30
"""The largest payload in bytes; a larger range is sent as several parts."""

MAX_TENSORS = 1 << 16
"""The largest number of parts of a message: every tensor may have a version of its own."""

MAX_BYTES = LARGEST
"""Of a model: the bytes of its arena are numbered on the wire."""


def dtype_named(name: str, tensor: str = "") -> np.dtype[Any]:
    """Return the NumPy dtype of that name (``bfloat16`` comes from the ml_dtypes package).

    ``tensor``: of which tensor it is, for the error.

    Raises
    ------
    UsageError
        When tensors cannot have it, or ml_dtypes is not installed.
    """
    if name not in DTYPES:
        of = f" of {tensor!r}" * bool(tensor)
        # Of what is a dtype the nearest name says nothing: int64 is not float64 misspelt.
        can = f"{', '.join(DTYPES)} can" if name in np.sctypeDict else nearest(name, DTYPES)
        raise UsageError(f"dtype {name!r}{of} cannot be trained; {can}")
    if name != "bfloat16":
        return np.dtype(name)
    try:
        import ml_dtypes
    except ImportError:
        raise UsageError("bfloat16 needs the ml_dtypes package: pip install ml_dtypes") from None
    bfloat16: np.dtype[Any] = np.dtype(ml_dtypes.bfloat16)
    return bfloat16


def compute_dtype(dtype: np.dtype[Any]) -> np.dtype[Any]:
    """Return the dtype of the arithmetic: float32 for the 16-bit dtypes, else the same."""
    return dtype if dtype.itemsize >= 4 else np.dtype(np.float32)


@dataclass(frozen=True, slots=True)
class Tensor:
    """A registered tensor, at bytes [offset, offset + nbytes) of the arena."""

    name: str
    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    offset: int

    @property
    def size(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Number of bytes."""
        return self.size * self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class Section:
    """All tensors of one dtype: bytes [start, stop) of the arena, tensors [first, last)."""

    dtype: np.dtype[Any]
    start: int
    stop: int
    first: int
    last: int


class Cover(NamedTuple):
    """The tensors that a push covers.

    Attributes
    ----------
    tensors
        Their indices, int64[n], rising.
    starts
        int64[n], the first byte of each in the receive buffer, in which payloads are contiguous.
    whole
        Whether these are all tensors of the model.
    level
        The base version that all tensors of a whole push share (the usual case), else None.
    each
        int64[n], the base version of each, or None when there is a level.
    """

    tensors: Ints
    starts: Ints
    whole: bool
    level: int | None
    each: Ints | None

    @property
    def bases(self) -> Ints:
        """The base version of each tensor, int64[n]."""
        each = self.each
        return np.full(len(self.tensors), self.level, np.int64) if each is None else each


_cover = partial(tuple.__new__, Cover)  # what Cover(*item) does, in a third of the time


class Layout:
    """The tensors of a model in arena order.

    Parameters
    ----------
    tensors
        Name, dtype and shape of each, in any order.
    empty
        Whether there may be no tensors, because the model has tables.
    within
        The larger model of which these are pieces, and the first of its bytes that is theirs.

    Raises
    ------
    UsageError
        When there are too many tensors or bytes, none, or two of one name; the text names the
        tensor.
    """

    def __init__(
        self,
        tensors: Iterable[tuple[str, str, Sequence[int]]],
        *,
        empty: bool = False,
        within: tuple[Layout, int] | None = None,
    ) -> None:
        self.within = within
        self.begin: int = within[1] if within is not None else 0
        rows = [
            (str(name), dtype_named(dtype, str(name)), tuple(shape))
            for name, dtype, shape in tensors
        ]
        if len(rows) > MAX_TENSORS or not (rows or empty):
            raise UsageError(f"a model has 1 to {MAX_TENSORS} tensors, not {len(rows)}")
        rows.sort(key=lambda row: (-row[1].itemsize, row[1].name))  # stable: keeps the given order
        placed: list[Tensor] = []
        offset = 0
        for name, dtype, shape in rows:
            placed.append(Tensor(name, dtype, shape, offset))
            offset += placed[-1].nbytes
            # NumPy computes the bytes of an empty tensor as if its empty axes had length 1.
            if offset + dtype.itemsize * math.prod(size or 1 for size in shape) > MAX_BYTES:
                raise UsageError(f"{name!r} of shape {list(shape)} is larger than any memory")
        self.tensors: tuple[Tensor, ...] = tuple(placed)
        self.nbytes = offset
        self.index: dict[str, int] = {tensor.name: index for index, tensor in enumerate(placed)}
        if len(self.index) < len(placed):
            twice, _count = Counter(tensor.name for tensor in placed).most_common(1)[0]
            raise UsageError(f"two tensors are called {twice!r}; names must differ")
        if not offset and (rows or not empty) and within is None:
            raise UsageError("the model has no parameters: every tensor is empty")
        self.sections: tuple[Section, ...] = tuple(self._sections())
        # What is a multiple of the largest items is one of all: sizes are powers of two.
        self._grain = self.sections[0].dtype.itemsize - 1 if self.sections else 0
        self.starts: Ints = np.array([tensor.offset for tensor in placed], np.int64)
        self.sizes: Ints = np.array([tensor.size for tensor in placed], np.int64)
        self.nbytes_each: Ints = np.array([tensor.nbytes for tensor in placed], np.int64)

    @classmethod
    def shared(
        cls, tensors: Iterable[tuple[str, str, Sequence[int]]], *, empty: bool = False
    ) -> Layout:
        """Return a layout of these tensors, the same object as long as one is in use."""
        rows = tuple((name, dtype, tuple(shape)) for name, dtype, shape in tensors)
        found = _SHARED.get((rows, empty))
        if found is None:
            found = _SHARED[rows, empty] = cls(rows, empty=empty)
        return found

    @classmethod
    def of(cls, arrays: Mapping[str, Array], *, empty: bool = False) -> Layout:
        """Return the layout of arrays by name."""
        return cls(((name, a.dtype.name, a.shape) for name, a in arrays.items()), empty=empty)

    def _sections(self) -> Iterable[Section]:
        first = 0
        for index, tensor in enumerate(self.tensors):
            last = index + 1
            if last == len(self.tensors) or self.tensors[last].dtype != tensor.dtype:
                end = tensor.offset + tensor.nbytes
                yield Section(tensor.dtype, self.tensors[first].offset, end, first, last)
                first = last

    @cached_property
    def rows(self) -> tuple[tuple[str, str, tuple[int, ...], int], ...]:
        """Name, dtype, shape and offset of each tensor, as sent in a handshake."""
        return tuple((t.name, t.dtype.name, t.shape, t.offset) for t in self.tensors)

    @cached_property
    def digest(self) -> bytes:
        """SHA-256 of the MessagePack of `rows`; equal models have equal digests."""
        return hashlib.sha256(msgpack.packb(self.rows)).digest()

    @cached_property
    def whole(self) -> tuple[tuple[Ints, Ints], ...]:
        """Per section, (lo, hi), int64[n] each: the range of elements of each tensor in it."""
        found = []
        for s in self.sections:
            lo = (self.starts[s.first : s.last] - s.start) // s.dtype.itemsize
            found.append((lo, lo + self.sizes[s.first : s.last]))
        return tuple(found)

    def ranges(self, index: int, tensors: Ints) -> tuple[Ints, Ints]:
        """Return (lo, hi) of `whole` for tensors, by their indices, of section ``index``."""
        lo, hi = self.whole[index]
        rows = tensors - self.sections[index].first
        return lo[rows], hi[rows]

    @cached_property
    def parameters(self) -> int:
        """Number of elements of all tensors."""
        return int(self.sizes.sum())

    def difference(self, other: Layout) -> str | None:
        """Return how another model differs from this one, as a clause for an error, or None.

        The order of the tensors may differ, since a client uses the offsets of this layout.
        """
        if other is self:
            return None
        mine = {t.name: t for t in self.tensors}
        theirs = {t.name: t for t in other.tensors}
        for name, tensor in theirs.items():
            if name not in mine:
                return f"it has no tensor {name!r} ({nearest(name, mine)})"
            if mine[name].shape != tensor.shape:
                return f"its {name!r} has shape {mine[name].shape}, not {tensor.shape}"
            if mine[name].dtype != tensor.dtype:
                return f"its {name!r} is {mine[name].dtype.name}, not {tensor.dtype.name}"
        missing = [name for name in mine if name not in theirs]
        if missing:
            return f"its {missing[0]!r} is missing here"
        return None

    def parts(self, versions: Ints, codec: str = "raw") -> Parts:
        """Return the parts of a whole model whose tensors have these versions, int64[n].

        There is a part per run of tensors of equal version, none longer than `MAX_PART`.
        """
        level = level_of(versions)
        if level is not None:
            return tuple(split(0, self.nbytes, codec, level))
        breaks = (np.flatnonzero(versions[1:] != versions[:-1]) + 1).tolist()
        edges = [0, *breaks, len(self.tensors)]
        found: list[Part] = []
        for first, last in pairwise(edges):
            start = self.tensors[first].offset
            stop = self.tensors[last].offset if last < len(self.tensors) else self.nbytes
            found.extend(split(start, stop, codec, int(versions[first])))
        return tuple(found)

    def covered(self, parts: Parts) -> Cover:
        """Return the tensors that these parts cover.

        Raises
        ------
        BadPush
            When the ranges do not make up whole tensors in order, a part's length is not that of
            its range, it is cut inside an element, or there is no part.
        """
        if len(parts) == 1 and parts[0].start == 0 and parts[0].stop == self.nbytes:
            if parts[0].nbytes != self.nbytes or parts[0].codec != "raw":
                self._check_length(parts[0])
            return _cover((self.all, self.starts, True, parts[0].version, None))
        if not parts:
            raise BadPush("the push holds no tensor: push at least one")
        tensors: list[Ints] = []
        bases_of: list[Ints] = []
        starts: list[Ints] = []
        filled, reached = 0, -1
        for start, stop, version in self._ranges(parts):
            first = self.first_from(start)
            last = len(self.tensors)  # the last byte includes empty tensors at the end
            if stop < self.nbytes:
                last = self.first_from(stop)
            end = self.nbytes if last == len(self.tensors) else int(self.starts[last])
            begin = -1 if first == len(self.tensors) else int(self.starts[first])
            if begin != start or end != stop:
                whose = self.tensors[self.tensor_at(start)].name
                raise BadPush(
                    f"a part covers bytes {start} to {stop}, which is not whole tensors"
                    f" (it begins in {whose!r}): push whole tensors",
                    tensor=whose,
                )
            if first < reached:
                whose = self.tensors[self.tensor_at(start)].name
                raise BadPush(f"{whose!r} comes twice or out of order", tensor=whose)
            tensors.append(np.arange(first, last, dtype=np.int64))
            bases_of.append(np.full(last - first, version, np.int64))
            starts.append(self.starts[first:last] - start + filled)
            filled, reached = filled + stop - start, last
        joined = np.concatenate(tensors)
        whole = len(joined) == len(self.tensors)
        tensors_covered = self.all if whole else joined
        return Cover(tensors_covered, np.concatenate(starts), whole, None, np.concatenate(bases_of))

    def _ranges(self, parts: Parts) -> Iterable[tuple[int, int, int]]:
        """Yield (start, stop, version) of runs of parts: a large tensor is sent as several."""
        start, stop, version = -1, -1, -1
        for part in parts:
            self._check_length(part)
            if (part.start | part.stop) & self._grain:
                self._check_cut(part)
            if part.start == stop and part.version == version:
                stop = part.stop
                continue
            if stop >= 0:
                yield start, stop, version
            start, stop, version = part.start, part.stop, part.version
        yield start, stop, version

    def _check_length(self, part: Part) -> None:
        if part.stop > self.nbytes:
            raise BadPush(
                f"a part ends at byte {part.stop}, but the model has {self.nbytes} bytes:"
                " was it made for another model?"
            )
        if part.codec != "raw":
            self._check_coded(part)
        elif part.nbytes != part.stop - part.start:
            whose = self.tensors[self.tensor_at(part.start)].name
            raise BadPush(
                f"{whose!r}: {part.nbytes} bytes were sent for a range of"
                f" {part.stop - part.start}: check the dtype",
                tensor=whose,
            )

    def _check_cut(self, part: Part) -> None:
        """A part begins and ends between elements: its payload is looked over by itself."""
        for edge, inside in ((part.start, part.start), (part.stop, part.stop - 1)):
            tensor = self.tensors[self.tensor_at(inside)]
            if (edge - tensor.offset) % tensor.dtype.itemsize:
                raise BadPush(
                    f"{tensor.name!r}: a part of bytes {self.begin + part.start} to"
                    f" {self.begin + part.stop} is cut inside one of its elements, of"
                    f" {tensor.dtype.itemsize} bytes each: cut between elements",
                    tensor=tensor.name,
                )

    def _check_coded(self, part: Part) -> None:
        """Refuse a coded part that is not one tensor, or is longer than the tensor would be raw."""
        tensor = self.tensors[self.tensor_at(part.start)]
        if (part.start, part.stop) != (tensor.offset, tensor.offset + tensor.nbytes):
            raise BadPush(
                f"{tensor.name!r}: a part in the codec {part.codec!r} covers bytes {part.start} to"
                f" {part.stop}, which is not this one tensor: send tensor by tensor",
                tensor=tensor.name,
            )
        if part.nbytes > tensor.nbytes:
            raise BadPush(
                f"{tensor.name!r}: {part.nbytes} bytes of {part.codec!r} for a tensor of"
                f" {tensor.nbytes}: send it raw",
                tensor=tensor.name,
            )

    def tensor_at(self, offset: int) -> int:
        """Return the index of the tensor with elements that holds the byte at ``offset``."""
        return bisect_right(self._offsets, offset) - 1

    def first_from(self, offset: int) -> int:
        """Return the index of the first tensor that begins at ``offset`` or behind it, or n."""
        return bisect_left(self._offsets, offset)

    @cached_property
    def _offsets(self) -> list[int]:
        """`starts` as a list: to search it takes a tenth of the time, for one offset."""
        found: list[int] = self.starts.tolist()
        return found

    @cached_property
    def all(self) -> Ints:
        """The indices of all tensors, int64[n]; always the same array."""
        return np.arange(len(self.tensors), dtype=np.int64)


_SHARED: WeakValueDictionary[tuple[object, bool], Layout] = WeakValueDictionary()
"""The layouts in use, shared because a process may have thousands of clients of one model."""


def level_of(versions: Ints) -> int | None:
    """Return the version that all tensors share, or None when they differ or there is none."""
    data = versions.tobytes()  # comparing bytes is faster than comparing the numbers
    return versions.item(0) if data and data == data[:8] * len(versions) else None


def split(start: int, stop: int, codec: str, version: int) -> list[Part]:
    """Return the parts of a range of the arena, none longer than `MAX_PART`."""
    if 0 < stop - start <= MAX_PART:
        return [Part(start, stop, codec, stop - start, version)]
    cuts = [*range(start, stop, MAX_PART), stop]
    return [Part(a, b, codec, b - a, version) for a, b in pairwise(cuts)]
