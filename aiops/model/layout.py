"""Where each tensor of a model lies in the arena: one flat run of bytes, no padding.

The order is by size of item (8, 4, 2 bytes), then by dtype, then as the model was defined; so every
tensor is aligned to its own items, all tensors of a dtype are one run (a `Section`), and a whole
model is one range of bytes whatever its dtypes.
"""

from __future__ import annotations

import hashlib
import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Any
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
"""What a tensor may be made of. The 16-bit ones are trained with float32 masters on the server."""

MAX_PART = 1 << 30
"""A payload's longest length in bytes; a larger range travels as several parts."""

MAX_TENSORS = 1 << 16
"""As many as a message has parts: in the worst case every tensor has a version of its own."""

MAX_BYTES = LARGEST
"""Of a model: the bytes of its arena are numbered on the wire."""


def dtype_named(name: str) -> np.dtype[Any]:
    """Return the NumPy dtype of that name (``bfloat16`` comes from the ml_dtypes package).

    Raises
    ------
    UsageError
        When no model can be made of it, or ml_dtypes is not installed.
    """
    if name not in DTYPES:
        raise UsageError(f"dtype {name!r} cannot be trained; {nearest(name, DTYPES)}")
    if name != "bfloat16":
        return np.dtype(name)
    try:
        import ml_dtypes
    except ImportError:
        raise UsageError("bfloat16 needs the ml_dtypes package: pip install ml_dtypes") from None
    bfloat16: np.dtype[Any] = np.dtype(ml_dtypes.bfloat16)
    return bfloat16


def compute_dtype(dtype: np.dtype[Any]) -> np.dtype[Any]:
    """Return the dtype that the mathematics is done in: float32 for the 16-bit ones."""
    return dtype if dtype.itemsize >= 4 else np.dtype(np.float32)


@dataclass(frozen=True, slots=True)
class Tensor:
    """A registered tensor: ``offset`` and ``nbytes`` say where it lies in the arena."""

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


@dataclass(slots=True)
class Cover:
    """Which tensors a push covers: their indices, their base versions, and whether that is all.

    ``starts`` is where each tensor's first byte lies in the received buffer, in which the
    payloads follow each other without a gap. ``level`` is the base version when all tensors of a
    whole push share it (the usual case, which is worth being quick in), else None.
    """

    tensors: Ints
    starts: Ints
    whole: bool
    level: int | None
    each: Ints | None  # base versions, one per tensor covered; None when there is a level

    @property
    def bases(self) -> Ints:
        """The base version of each tensor covered."""
        if self.each is None:
            self.each = np.full(len(self.tensors), self.level, np.int64)
        return self.each


class Layout:
    """The tensors of a model in arena order.

    ``empty``: there may be no tensors at all, since the model has tables. ``within``: of which
    larger model these are pieces, and at which of its bytes they begin.

    Raises
    ------
    UsageError
        When the tensors cannot make a model; the text names the tensor.
    """

    def __init__(
        self,
        tensors: Iterable[tuple[str, str, Sequence[int]]],
        *,
        empty: bool = False,
        within: tuple[Layout, int] | None = None,
    ) -> None:
        self.within = within
        self.begin = within[1] if within is not None else 0
        rows = [(str(name), dtype_named(dtype), tuple(shape)) for name, dtype, shape in tensors]
        if len(rows) > MAX_TENSORS or not (rows or empty):
            raise UsageError(f"a model has 1 to {MAX_TENSORS} tensors, not {len(rows)}")
        rows.sort(key=lambda row: (-row[1].itemsize, row[1].name))  # stable: keeps the given order
        placed: list[Tensor] = []
        offset = 0
        for name, dtype, shape in rows:
            placed.append(Tensor(name, dtype, shape, offset))
            offset += placed[-1].nbytes
            # NumPy counts the bytes of an empty tensor as if no axis of it were empty.
            if offset + dtype.itemsize * math.prod(size or 1 for size in shape) > MAX_BYTES:
                raise UsageError(f"{name!r} of shape {list(shape)} is larger than any memory")
        self.tensors: tuple[Tensor, ...] = tuple(placed)
        self.nbytes = offset
        self.index = {tensor.name: index for index, tensor in enumerate(placed)}
        if len(self.index) < len(placed):
            twice, _count = Counter(tensor.name for tensor in placed).most_common(1)[0]
            raise UsageError(f"two tensors are called {twice!r}; names must differ")
        if not offset and (rows or not empty) and within is None:
            raise UsageError("the model has no parameters: every tensor is empty")
        self.sections = tuple(self._sections())
        # What is a multiple of the largest items is one of all: sizes are powers of two.
        self._grain = self.sections[0].dtype.itemsize - 1 if self.sections else 0
        self.starts: Ints = np.array([tensor.offset for tensor in placed], np.int64)
        self.sizes: Ints = np.array([tensor.size for tensor in placed], np.int64)
        self.nbytes_each: Ints = np.array([tensor.nbytes for tensor in placed], np.int64)

    @classmethod
    def shared(
        cls, tensors: Iterable[tuple[str, str, Sequence[int]]], *, empty: bool = False
    ) -> Layout:
        """Return a layout of these tensors; the same object while there is one of the same."""
        rows = tuple((name, dtype, tuple(shape)) for name, dtype, shape in tensors)
        found = _SHARED.get((rows, empty))
        if found is None:
            found = _SHARED[rows, empty] = cls(rows, empty=empty)
        return found

    @classmethod
    def of(cls, arrays: Mapping[str, Array], *, empty: bool = False) -> Layout:
        """Return the layout of a mapping of arrays."""
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
        """The model as it is announced: (name, dtype, shape, offset) per tensor."""
        return tuple((t.name, t.dtype.name, t.shape, t.offset) for t in self.tensors)

    @cached_property
    def digest(self) -> bytes:
        """SHA-256 of the MessagePack of `rows`: equal models have equal ones."""
        return hashlib.sha256(msgpack.packb(self.rows)).digest()

    @cached_property
    def whole(self) -> tuple[tuple[Ints, Ints], ...]:
        """Per section, where each tensor begins and ends, in elements of the section."""
        found = []
        for s in self.sections:
            lo = (self.starts[s.first : s.last] - s.start) // s.dtype.itemsize
            found.append((lo, lo + self.sizes[s.first : s.last]))
        return tuple(found)

    @cached_property
    def parameters(self) -> int:
        """Number of elements of all tensors."""
        return int(self.sizes.sum())

    def difference(self, other: Layout) -> str | None:
        """Say in half a sentence how another model differs from this one, or return None.

        The order of the tensors may differ: whoever learns this layout goes by its offsets.
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
        """Return the parts that a whole model of these versions travels as.

        One part per run of tensors of equal version, none longer than `MAX_PART`.
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
        """Return which tensors these parts cover.

        Raises
        ------
        BadPush
            When the ranges do not make up whole tensors in order, a part's length is not that of
            its range, it is cut inside an element, or there is no part.
        """
        if len(parts) == 1 and parts[0].start == 0 and parts[0].stop == self.nbytes:
            self._check_length(parts[0])
            return Cover(self.all, self.starts, True, parts[0].version, None)
        if not parts:
            raise BadPush("the push holds no tensor: push at least one")
        tensors: list[Ints] = []
        bases_of: list[Ints] = []
        starts: list[Ints] = []
        filled, reached = 0, -1
        for start, stop, version in self._ranges(parts):
            first = int(np.searchsorted(self.starts, start, side="left"))
            last = len(self.tensors)  # empty tensors at the end come with the last byte
            if stop < self.nbytes:
                last = int(np.searchsorted(self.starts, stop, side="left"))
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
        """Join parts that continue each other: a large tensor travels as several."""
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
        """A coded part is one tensor, and shorter than it would be raw."""
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
        return int(np.searchsorted(self.starts, offset, side="right")) - 1

    @cached_property
    def all(self) -> Ints:
        """The indices of all tensors; always this one array."""
        return np.arange(len(self.tensors), dtype=np.int64)


_SHARED: WeakValueDictionary[tuple[object, bool], Layout] = WeakValueDictionary()
"""Layouts in use: thousands of clients in a process may have the same."""


def level_of(versions: Ints) -> int | None:
    """Return the version that all tensors have, or None when they differ (or there is none)."""
    data = versions.tobytes()  # to compare these is quicker than to compare the numbers
    return versions.item(0) if data and data == data[:8] * len(versions) else None


def split(start: int, stop: int, codec: str, version: int) -> list[Part]:
    """Return the raw parts for a range of the arena, none longer than `MAX_PART`."""
    if 0 < stop - start <= MAX_PART:
        return [Part(start, stop, codec, stop - start, version)]
    cuts = [*range(start, stop, MAX_PART), stop]
    return [Part(a, b, codec, b - a, version) for a, b in pairwise(cuts)]
