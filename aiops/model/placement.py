"""Which bytes of the arena lie on which shard: even runs, cut between the rows of large tensors.

A tensor that is cut is *pieces*, one on each side. Each shard holds its pieces as a model of its
own: their layout is a `Layout` whose tensors are the pieces, in the order of the arena, and which
knows of which bytes of the whole it is (`Layout.within`).

In the header of a message to or from the lead, a part in the codec ``shard`` has no bytes: they
travel between the client and the shard that holds them; ``shard:int8`` says of an answer that they
are an increment, in the codec ``int8``.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import TypeAlias

import numpy as np

from aiops.errors import BadPush, UsageError
from aiops.model.layout import Cover, Ints, Layout, Tensor
from aiops.model.parts import Part, Parts, Ranges

SHARD = "shard"
"""The codec of parts whose bytes travel by another connection; of increments with theirs behind."""

RAW = "raw"

Views: TypeAlias = Sequence[memoryview]


class Pieces:
    """A model's tensors as they are coded: each as a whole, or in pieces where it is cut.

    Parameters
    ----------
    layout
        The model.
    tensors
        Its pieces, in the order of the arena and at their places there.
    owners
        Which tensor each is of.
    """

    def __init__(self, layout: Layout, tensors: Sequence[Tensor], owners: Sequence[int]) -> None:
        self.layout, self.tensors = layout, list(tensors)
        self.owners: Ints = np.asarray(owners, np.int64)
        self.firsts: list[int] = np.searchsorted(
            self.owners, np.arange(len(layout.tensors) + 1)
        ).tolist()
        self._numbers = {(t.offset, t.offset + t.nbytes): n for n, t in enumerate(self.tensors)}

    @classmethod
    def of(cls, layout: Layout) -> Pieces:
        """Return those of a model that is not cut: its tensors."""
        return cls(layout, layout.tensors, range(len(layout.tensors)))

    def number(self, start: int, stop: int) -> int:
        """Return which piece a range of bytes is, or -1."""
        return self._numbers.get((start, stop), -1)


class Placement:
    """Where the parts of one model lie.

    Parameters
    ----------
    layout
        The whole model.
    starts
        The first byte of each shard's part, rising from 0; each part ends where the next begins.

    Attributes
    ----------
    edges
        The same, and the end of the arena.
    layouts
        Each shard's pieces, as a model of its own.
    all
        The pieces of all shards.
    used
        The shards that hold any bytes, and the lead.
    firsts, lasts
        Which tensors each shard has pieces of: from the first up to the last (not included).

    Raises
    ------
    UsageError
        When a cut is out of order, or not between the rows of a tensor.
    """

    def __init__(self, layout: Layout, starts: Sequence[int]) -> None:
        self.layout = layout
        self.edges = [*starts, layout.nbytes]
        if not starts or starts[0] != 0 or self.edges != sorted(self.edges):
            raise UsageError(f"the parts of a model begin at {list(starts)}, which is out of order")
        self.layouts: list[Layout] = []
        self.firsts: list[int] = []
        self.lasts: list[int] = []
        for shard in range(len(starts)):
            low, high = self.edges[shard], self.edges[shard + 1]
            end = shard == len(starts) - 1
            inside = [
                index
                for index, t in enumerate(layout.tensors)
                if max(low, t.offset) < min(high, t.offset + t.nbytes)
                or (not t.nbytes and (low <= t.offset < high or (end and t.offset == high)))
            ]
            self.firsts.append(inside[0] if inside else 0)
            self.lasts.append(inside[-1] + 1 if inside else 0)
            rows = [_piece(layout.tensors[index], low, high) for index in inside]
            self.layouts.append(Layout(rows, empty=True, within=(layout, low)))
        found = [
            (Tensor(t.name, t.dtype, t.shape, t.offset + mine.begin), first + number)
            for mine, first in zip(self.layouts, self.firsts, strict=True)
            for number, t in enumerate(mine.tensors)
        ]
        self.used = [
            shard
            for shard, (low, high) in enumerate(pairwise(self.edges))
            if not shard or low < high
        ]
        self.all = Pieces(layout, [piece for piece, _ in found], [owner for _, owner in found])

    @classmethod
    def even(cls, layout: Layout, shards: int, least: int = 1) -> Placement:
        """Return the placement that gives each shard about as many bytes.

        A part of fewer than ``least`` bytes is not worth its messages: where parts would be, only
        the first shards, as many as come to that, hold any; the lead alone, if need be.
        """
        used = min(shards, max(1, layout.nbytes // least))
        starts = [0]
        for shard in range(1, used):
            starts.append(max(starts[-1], _cut(layout, layout.nbytes * shard // used)))
        return cls(layout, [*starts, *[layout.nbytes] * (shards - used)])

    @property
    def starts(self) -> list[int]:
        """The first byte of each shard's part."""
        return self.edges[:-1]

    def __len__(self) -> int:
        return len(self.layouts)

    def shard_at(self, start: int, stop: int) -> int:
        """Return which shard holds a range of bytes.

        Raises
        ------
        BadPush
            When it goes beyond one.
        """
        shard = int(np.searchsorted(self.edges[1:-1], start, side="right"))
        if not start < stop <= self.edges[shard + 1]:
            raise BadPush(
                f"a part covers bytes {start} to {stop}, but the parts of the model are cut at"
                f" {self.edges[1:-1]}: cut the part there too"
            )
        return shard

    def pieces(self, tensor: Tensor) -> list[Tensor]:
        """Return the pieces of one of the model's tensors, at their places in the arena."""
        found = []
        for low, high in pairwise(self.edges):
            begin, end = max(low, tensor.offset), min(high, tensor.offset + tensor.nbytes)
            if begin < end:
                name, _dtype, shape = _piece(tensor, low, high)
                found.append(Tensor(name, tensor.dtype, shape, begin))
        return found or [tensor]

    # ------------------------------------------------------------ messages

    def divide(
        self, parts: Parts, payloads: Sequence[Views] = ()
    ) -> list[tuple[list[Part], list[list[memoryview]]]]:
        """Return each shard's pieces of a message's parts, and of the views of their payloads.

        A part that crosses a cut must be raw.
        """
        found: list[tuple[list[Part], list[list[memoryview]]]] = [([], []) for _ in self.layouts]
        for number, part in enumerate(parts):
            views = list(payloads[number]) if payloads else []
            shard = int(np.searchsorted(self.edges[1:-1], part.start, side="right"))
            start = part.start
            while start < part.stop:
                stop = min(part.stop, self.edges[shard + 1])
                mine = (start, stop) == (part.start, part.stop)
                assert mine or part.codec == RAW
                size = part.nbytes if mine else stop - start
                taken, views = _taken(views, size)
                if stop > start:
                    found[shard][0].append(Part(start, stop, part.codec, size, part.version))
                    found[shard][1].append(taken)
                start, shard = stop, shard + 1
        return found

    def announced(self, pieces: Sequence[Parts | list[Part]], *, increments: bool = False) -> Parts:
        """Return what the lead's header says of a message: its own pieces, and the others apart.

        ``increments``: what is coded are increments, which are announced with their codec.
        """
        apart = [
            Part(
                part.start,
                part.stop,
                SHARD if part.codec == RAW or not increments else f"{SHARD}:{part.codec}",
                0,
                part.version,
            )
            for theirs in pieces[1:]
            for part in theirs
        ]
        return (*pieces[0], *apart)

    def announced_pieces(self, parts: Parts, *, increments: bool = False) -> list[list[Part]]:
        """Return what a lead's header says of each shard's pieces (those apart as if raw).

        With ``increments`` those apart may be increments, several of a piece; they are returned in
        their codecs, and without bytes, of which the header says nothing.

        Raises
        ------
        BadPush
            When a part goes beyond a shard, or is announced on the wrong one.
        """
        found: list[list[Part]] = [[] for _ in self.layouts]
        reached = 0
        for part in parts:
            shard = self.shard_at(part.start, part.stop)
            again = increments and found[shard] and found[shard][-1][:2] == part[:2]
            if part.start < reached and not (again and part.codec not in (SHARD, RAW)):
                raise BadPush(f"the part from byte {part.start} on comes out of order")
            reached = part.stop
            apart, _colon, codec = part.codec.partition(":")
            if increments and codec and apart == SHARD and shard and not part.nbytes:
                found[shard].append(part._replace(codec=codec))
                continue
            if (part.codec == SHARD) != (shard > 0) or (part.codec == SHARD and part.nbytes):
                raise BadPush(
                    f"bytes {part.start} to {part.stop} belong on shard {shard}, and were sent to"
                    f" another: the parts of the model are cut at {self.edges[1:-1]}"
                )
            found[shard].append(as_raw(part) if shard else part)
        return found

    def cover(self, pieces: Sequence[Sequence[Part]]) -> Cover:
        """Return which tensors of the whole model the pieces of a push make up.

        Raises
        ------
        BadPush
            When they do not make up tensors.
        """
        return self.layout.covered(tuple(as_raw(part) for theirs in pieces for part in theirs))

    # ------------------------------------------------------------ numbers by tensor

    def rows(self, shard: int, tensors: Ints) -> slice:
        """Return which rows of a rising list of tensors a shard has pieces of."""
        first, last = np.searchsorted(tensors, (self.firsts[shard], self.lasts[shard])).tolist()
        return slice(first, last)

    def sums(self, touched: Ints, sums: Sequence[Ints]) -> Ints:
        """Return the sums over whole tensors, given each shard's over its pieces: exact."""
        total = np.zeros(len(touched), np.int64)
        for shard, mine in enumerate(sums):
            total[self.rows(shard, touched)] += mine
        return total


def as_raw(part: Part) -> Part:
    """Return a part of the same bytes as if it were raw, and here."""
    return Part(part.start, part.stop, RAW, part.stop - part.start, part.version)


def ranges_of(parts: Sequence[Part]) -> Ranges:
    """Return the bytes that parts are of, each run with its version."""
    return tuple((part.start, part.stop, part.version) for part in parts)


def moved(parts: Sequence[Part], by: int) -> Parts:
    """Return parts whose bytes lie elsewhere."""
    return tuple(Part(p.start + by, p.stop + by, p.codec, p.nbytes, p.version) for p in parts)


def empty_cover() -> Cover:
    """Return the cover of a push that has nothing here."""
    nothing = np.empty(0, np.int64)
    return Cover(nothing, nothing, False, None, nothing)


def _taken(views: list[memoryview], size: int) -> tuple[list[memoryview], list[memoryview]]:
    """Return the views of the first so many bytes, and those of the rest."""
    taken: list[memoryview] = []
    for number, view in enumerate(views):
        if size <= 0:
            return taken, views[number:]
        taken.append(view[:size])
        if len(view) > size:
            return taken, [view[size:], *views[number + 1 :]]
        size -= len(view)
    return taken, []


def _piece(tensor: Tensor, low: int, high: int) -> tuple[str, str, tuple[int, ...]]:
    """Return the piece of a tensor that lies in a range of bytes."""
    begin, end = max(low, tensor.offset), min(high, tensor.offset + tensor.nbytes)
    if end - begin == tensor.nbytes:
        return tensor.name, tensor.dtype.name, tensor.shape
    row = _row(tensor)
    if (begin - tensor.offset) % row or (end - tensor.offset) % row:
        raise UsageError(f"a cut lies in the middle of a row of {tensor.name!r}")
    return tensor.name, tensor.dtype.name, ((end - begin) // row, *tensor.shape[1:])


def _row(tensor: Tensor) -> int:
    """Return how many bytes a row of a tensor has that is not empty."""
    return tensor.nbytes // tensor.shape[0] if tensor.shape else tensor.nbytes


def _cut(layout: Layout, place: int) -> int:
    """Return the cut that is nearest to a byte of the arena."""
    if not layout.nbytes or place <= 0:
        return 0
    tensor = layout.tensors[layout.tensor_at(place)]
    if place >= layout.nbytes or not tensor.nbytes:
        return min(place, layout.nbytes)
    row = _row(tensor)
    return tensor.offset + (place - tensor.offset + row // 2) // row * row
