"""Encode and decode tensors block by block: the base of the codecs that kernels can read."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from aiops.codecs.base import Bytes, Codec, Encoder, Floats, Shape, elements, length_fault
from aiops.kernels import current_backend
from aiops.kernels.lazy_numba import disjoint, helper
from aiops.kernels.parallel import LARGE, PIECE
from aiops.kernels.payloads import FORMATS

__all__ = [
    "CHUNK",
    "BlockCodec",
    "ChunkEncoder",
    "Entries",
    "EntryLoops",
    "are_fit",
    "differ",
    "difference",
    "parts",
]

CHUNK = 65_536
"""Elements surveyed and then encoded while they are in cache; a multiple of every block."""

_NO_REST: Floats = np.empty(0, np.float32)

_U = np.uint32
_MAGNITUDE, _UNFIT = _U(0x7FFF_FFFF), _U(0x5D5E_0B6B)  # of `aiops.kernels.scan`


class Entries(NamedTuple):
    """The addresses of a codec's loops as C functions, for compiled code.

    Pointers are to float32, and to the items of the payload's sections, of which there are two at
    most; the second may be NULL. They may be at any address.

    Attributes
    ----------
    encode
        ``bool (int64 size, values, rest, before, first, second)``: encode with feedback what
        `Encoder.encode` would, and have a copy of the rest in ``before``. False: a value is not
        fit, and nothing has been written.
    decode
        ``bool (int64 size, first, second, out)``: check a payload and decode it. False: it is none.
    check
        ``bool (int64 size, first, second)``: the check alone.
    add
        ``void (int64 size, first, second, out)``: decode a payload that has been checked, and add
        it to ``out``.
    follow
        ``int64 (int64 size, values, held, room, first, second)``: encode ``values - held``, and add
        what that decodes to to ``held``; ``room`` is for as many floats. 1; 2: ``held`` is equal to
        ``values`` now; 0: a difference is not fit, and what has been written has no meaning.
    """

    encode: int
    decode: int
    check: int
    add: int
    follow: int


EntryLoops: TypeAlias = tuple[
    Callable[..., bool],
    Callable[..., bool],
    Callable[..., bool],
    Callable[..., None],
    Callable[..., int],
]
"""The loops of which `Entries` are made."""

_entries: dict[str, Entries] = {}  # of codecs, by name


class BlockCodec(Codec):
    """A codec of one of `aiops.kernels.payloads.FORMATS`: each block is encoded by itself.

    So its payloads are always of the same length, and chunks of a tensor can be encoded and decoded
    in any order. A derived class has `sections_fault`, `encode_numpy` (the specification) and
    `loops`.
    """

    @classmethod
    def length(cls, size: int) -> int:
        """Return the bytes of a payload of ``size`` elements."""
        return int(FORMATS[cls.name].length(size))

    @classmethod
    def second(cls, size: int) -> int:
        """Return where the second section begins in a payload of ``size`` elements, in bytes."""
        dtype, per = FORMATS[cls.name].sections[0]
        return int(dtype.itemsize * -(-size // per))

    @classmethod
    def sections(cls, payload: Bytes, size: int) -> list[Any]:
        """Return the sections of a payload of ``size`` elements, as typed views of it."""
        return FORMATS[cls.name].views(payload, size)

    @classmethod
    def sections_fault(cls, sections: Sequence[Any], backend: str) -> str | None:
        """Return what is wrong with the sections of a payload of the right length, or None."""
        raise NotImplementedError

    @classmethod
    def encode_numpy(cls, values: Floats, rest: Floats, *sections: Any) -> None:
        """Encode with NumPy, as `encode_sections` does."""
        raise NotImplementedError

    @classmethod
    def loops(cls) -> tuple[Callable[..., None], Callable[..., None]]:
        """Return compiled loops: encode(values, rest, *sections), decode(*sections, out, add)."""
        raise NotImplementedError

    @classmethod
    def entry_loops(cls) -> EntryLoops:
        """Return the plain functions of which `enter` makes `Entries`, in that order."""
        raise NotImplementedError

    @classmethod
    def enter(cls) -> Entries:
        """Compile `Entries`, on any thread; they are kept on disk. Numba must be installed."""
        from numba import types

        from aiops.kernels.numba_jit import entry, pointer_to

        if cls.name not in _entries:
            numbers = pointer_to("float32")
            items = [pointer_to(dtype.name) for dtype, _per in FORMATS[cls.name].sections]
            items += [pointer_to("uint8")] * (2 - len(items))
            encode, decode, check, add, follow = cls.entry_loops()
            size = types.int64
            _entries[cls.name] = Entries(
                entry(encode, types.boolean(size, numbers, numbers, numbers, *items)),
                entry(decode, types.boolean(size, *items, numbers)),
                entry(check, types.boolean(size, *items)),
                entry(add, types.void(size, *items, numbers)),
                entry(follow, types.int64(size, numbers, numbers, numbers, *items)),
            )
        return _entries[cls.name]

    @classmethod
    def entered(cls) -> Entries | None:
        """Return the `Entries`, if they have been compiled."""
        return _entries.get(cls.name)

    @classmethod
    def encode_sections(
        cls, values: Floats, rest: Floats, sections: Sequence[Any], backend: str
    ) -> None:
        """Encode ``values``, float32[n], or with feedback ``values + rest``, into the sections.

        ``rest`` is float32[n] and becomes what the encoding loses; empty without feedback.
        """
        if backend == "numba":
            cls.loops()[0](values, rest, *sections)
        else:
            cls.encode_numpy(values, rest, *sections)

    @classmethod
    def decode_sections(cls, sections: Sequence[Any], out: Floats, add: bool, backend: str) -> None:
        """Decode the sections into ``out``, float32[n], or with ``add`` add them to it."""
        if backend == "numba":
            cls.loops()[1](*sections, out, add)
            return
        form = FORMATS[cls.name]
        for start in range(0, out.size, CHUNK):
            into = out[start : start + CHUNK]
            values = form.values(*form.part(sections, start, start + into.size), into.size)
            np.add(into, values, out=into) if add else np.copyto(into, values)

    # What follows is the interface of `Codec`.

    def most(self, shape: Shape) -> int:
        """Return the length of every payload of a tensor of this shape, in bytes."""
        return self.length(elements(shape))

    def encoder(self, shape: Shape, *, feedback: bool, backend: str = "auto") -> Encoder:
        """Return an encoder that works chunk by chunk."""
        return ChunkEncoder(self, shape, feedback=feedback, backend=backend)

    @classmethod
    def check(cls, payload: Bytes, shape: Shape, backend: str = "auto") -> str | None:
        """Return what is wrong with a payload: its length, or what `sections_fault` finds."""
        size = elements(shape)
        fault = length_fault(payload, cls.length(size))
        return fault or cls.sections_fault(cls.sections(payload, size), backend)

    @classmethod
    def decode(
        cls,
        payload: Bytes,
        shape: Shape,
        out: Floats,
        *,
        add: bool = False,
        backend: str = "auto",
    ) -> None:
        """Decode all chunks by one call: calls of `pieces` take as long as 100 KiB of values."""
        cls.decode_sections(cls.sections(payload, out.size), out, add, current_backend(backend))

    @classmethod
    def pieces(
        cls,
        payload: Bytes,
        shape: Shape,
        out: Floats,
        *,
        add: bool = False,
        backend: str = "auto",
    ) -> Sequence[Callable[[], None]]:
        """Return `decode` in pieces of whole chunks."""
        form, sections = FORMATS[cls.name], cls.sections(payload, out.size)
        backend = current_backend(backend)
        return [
            partial(
                cls.decode_sections, form.part(sections, low, high), out[low:high], add, backend
            )
            for low, high in parts(out.size)
        ]

    @classmethod
    def warm(cls) -> None:
        """Compile the loops, and those for compiled code."""
        cls.loops()
        cls.enter()


@helper()
def are_fit(values: Any) -> Any:
    """Return whether float32s are finite, and below 1e18 in magnitude."""
    largest = _U(0)
    for i in range(values.size):
        magnitude = _U(np.float32(values[i]).view(np.uint32) & _MAGNITUDE)
        largest = magnitude if magnitude > largest else largest
    return largest < _UNFIT


@helper()
def difference(room: Any, values: Any, held: Any) -> Any:
    """Write ``values - held`` into a third array, none overlapping another; return if it is fit."""
    disjoint()
    largest = _U(0)
    for i in range(room.size):
        value = np.float32(values[i] - held[i])
        room[i] = value
        magnitude = _U(value.view(np.uint32) & _MAGNITUDE)
        largest = magnitude if magnitude > largest else largest
    return largest < _UNFIT


@helper()
def differ(held: Any, values: Any) -> Any:
    """Return whether two float32 arrays differ."""
    disjoint()
    count = _U(0)
    for i in range(held.size):
        count = _U(count + (_U(1) if held[i] != values[i] else _U(0)))
    return count > _U(0)


class ChunkEncoder(Encoder):
    """The encoder of a `BlockCodec`: surveys each chunk just before encoding it, while in cache."""

    codec: BlockCodec

    def __init__(self, codec: BlockCodec, shape: Shape, *, feedback: bool, backend: str) -> None:
        super().__init__(codec, shape, feedback=feedback, backend=backend)
        self._format = FORMATS[codec.name]
        self._sections = codec.sections(self.payload, self.size)

    def survey(self, values: Floats) -> None:
        """Survey all values first if there is a rest: an error must not change it."""
        if self.rest is not None:
            super().survey(values)

    def write(self, values: Floats) -> int:
        """Encode chunk after chunk; the payload's length does not depend on the values."""
        unfit: list[tuple[int, int]] = []

        def write(begin: int, end: int) -> None:
            for start in range(begin, end, CHUNK):
                chunk = values[start : start + CHUNK]
                index = self._survey(chunk) if self.rest is None else -1
                if index >= 0:
                    unfit.append((start, index))
                    return
                rest = _NO_REST if self.rest is None else self.rest[start : start + CHUNK]
                sections = self._format.part(self._sections, start, start + chunk.size)
                self.codec.encode_sections(chunk, rest, sections, self.backend)

        if values.nbytes < LARGE:
            write(0, self.size)
        else:
            self.parallel_map([partial(write, *part) for part in parts(self.size)])
        if unfit:
            start, index = min(unfit)
            self._refuse_unfit(values[start:], start, index)
        return len(self.payload)


def parts(size: int) -> Iterator[tuple[int, int]]:
    """Yield the ranges of elements, [start, stop), that a thread takes at a time: whole chunks."""
    each = CHUNK * max(1, PIECE // (4 * CHUNK))
    for start in range(0, size, each):
        yield start, min(start + each, size)
