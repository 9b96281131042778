"""Place the bytes of the arena on shards: even runs, cut between the rows of large tensors.

A tensor that is cut has a *piece* on each side. Each shard holds its pieces as a model of its own,
whose `Layout` has the pieces as tensors, in the order of the arena, and the bytes of the whole that
they are (`Layout.within`).

In the header of a message to or from the lead, a part in the codec ``shard`` has no bytes, because
they are sent between the client and the shard that holds them. In a reply, ``shard:int8`` means
that they are an increment in the codec ``int8``.
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
"""The codec of parts whose bytes are sent over another connection; see the top of the module."""

RAW = "raw"

Views: TypeAlias = Sequence[memoryview]


class Pieces:
    """The pieces of a model, each of which is coded by itself: whole tensors, or parts of them.

    Parameters
    ----------
    layout
        The model.
    tensors
        The pieces, in the order of the arena, with their offsets there.
    owners
        The index of the tensor of each piece.
    """

    layout: Layout
    tensors: list[Tensor]

    def __init__(self, layout: Layout, tensors: Sequence[Tensor], owners: Sequence[int]) -> None:
        self.layout, self.tensors = layout, list(tensors)
        self.owners: Ints = np.asarray(owners, np.int64)
        self.firsts: list[int] = np.searchsorted(
            self.owners, np.arange(len(layout.tensors) + 1)
        ).tolist()
        self._numbers = {(t.offset, t.offset + t.nbytes): n for n, t in enumerate(self.tensors)}

    @classmethod
    def of(cls, layout: Layout) -> Pieces:
        """Return the pieces of a model that is not cut: its tensors."""
        return cls(layout, layout.tensors, range(len(layout.tensors)))

    def number(self, start: int, stop: int) -> int:
        """Return the index of the piece at bytes [start, stop), or -1."""
        return self._numbers.get((start, stop), -1)


class Placement:
    """The placement of one model on shards.

    Parameters
    ----------
    layout
        The whole model.
    starts
        The first byte on each shard, rising from 0; the bytes of a shard end where the next begin.

    Attributes
    ----------
    edges
        ``starts``, and the end of the arena.
    layouts
        The pieces of each shard as a model.
    all
        The pieces of all shards.
    used
        The indices of the shards that hold any bytes, and of the lead.
    firsts, lasts
        Per shard, the range of tensors of which it has pieces, [first, last).

    Raises
    ------
    UsageError
        When a cut is out of order, or not between the rows of a tensor.
    """

    def __init__(self, layout: Layout, starts: Sequence[int]) -> None:
        self.layout = layout
        self.edges: list[int] = [*starts, layout.nbytes]
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
        self.used: list[int] = [
            shard
            for shard, (low, high) in enumerate(pairwise(self.edges))
            if not shard or low < high
        ]
        self.all: Pieces = Pieces(
            layout, [piece for piece, _ in found], [owner for _, owner in found]
        )

    @classmethod
    def even(cls, layout: Layout, shards: int, least: int = 1) -> Placement:
        """Return the placement that gives each shard about the same number of bytes.

        Fewer than ``least`` bytes are not worth their messages. Of a small model only the first
        shards hold bytes, as many as get ``least`` each, and at least the lead.
        """
        used = min(shards, max(1, layout.nbytes // least))
        starts = [0]
        for shard in range(1, used):
            starts.append(max(starts[-1], _cut(layout, layout.nbytes * shard // used)))
        return cls(layout, [*starts, *[layout.nbytes] * (shards - used)])

    @property
    def starts(self) -> list[int]:
        """The first byte on each shard."""
        return self.edges[:-1]

    def __len__(self) -> int:
        return len(self.layouts)

    def shard_at(self, start: int, stop: int) -> int:
        """Return the index of the shard that holds bytes [start, stop).

        Raises
        ------
        BadPush
            When they are not all on one shard.
        """
        shard = int(np.searchsorted(self.edges[1:-1], start, side="right"))
        if not start < stop <= self.edges[shard + 1]:
            raise BadPush(
                f"a part covers bytes {start} to {stop}, but the parts of the model are cut at"
                f" {self.edges[1:-1]}: cut the part there too"
            )
        return shard

    def pieces(self, tensor: Tensor) -> list[Tensor]:
        """Return the pieces of one of the model's tensors, with their offsets in the arena."""
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
        """Divide the parts of a message, and the views of their payloads, between the shards.

        A part that crosses a cut must be raw. Returns (parts, payloads) for each shard.
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
        """Return the parts in the header of a message of the lead: its own, then the others apart.

        ``pieces``: the parts of each shard. ``increments``: coded parts are increments, which are
        announced with their codec.
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
        """Return the parts of each shard from the parts of a lead's header; those apart as if raw.

        With ``increments``, those apart may be increments, several per piece. They are returned in
        their codecs and with 0 bytes, because the header does not tell their lengths.

        Raises
        ------
        BadPush
            When a part is not on one shard, or is announced on the wrong one.
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
        """Return the tensors of the whole model that the pieces of a push make up.

        Raises
        ------
        BadPush
            When they are not whole tensors.
        """
        return self.layout.covered(tuple(as_raw(part) for theirs in pieces for part in theirs))

    # ------------------------------------------------------------ numbers by tensor

    def rows(self, shard: int, tensors: Ints) -> slice:
        """Return the slice of rising tensor indices of which a shard has pieces."""
        first, last = np.searchsorted(tensors, (self.firsts[shard], self.lasts[shard])).tolist()
        return slice(first, last)

    def sizes(self, shard: int, tensors: Ints) -> Ints:
        """Return the elements that a shard has of each of these rising tensors, of its `rows`."""
        held = tensors[self.rows(shard, tensors)] - self.firsts[shard]
        return self.layouts[shard].sizes[held]

    def sums(self, touched: Ints, sums: Sequence[Ints]) -> Ints:
        """Return the exact sums over whole tensors, int64[n], of the shards' sums over pieces."""
        total = np.zeros(len(touched), np.int64)
        for shard, mine in enumerate(sums):
            total[self.rows(shard, touched)] += mine
        return total


def as_raw(part: Part) -> Part:
    """Return the raw part of the same range of bytes."""
    return Part(part.start, part.stop, RAW, part.stop - part.start, part.version)


def ranges_of(parts: Sequence[Part]) -> Ranges:
    """Return the ranges of parts, (start, stop, version) each."""
    return tuple((part.start, part.stop, part.version) for part in parts)


def moved(parts: Sequence[Part], by: int) -> Parts:
    """Return the parts with their ranges moved by ``by`` bytes."""
    return tuple(Part(p.start + by, p.stop + by, p.codec, p.nbytes, p.version) for p in parts)


def empty_cover() -> Cover:
    """Return the cover of a push without tensors."""
    nothing = np.empty(0, np.int64)
    return Cover(nothing, nothing, False, None, nothing)


def _taken(views: list[memoryview], size: int) -> tuple[list[memoryview], list[memoryview]]:
    """Return the views of the first ``size`` bytes, and those of the rest."""
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
    """Return name, dtype and shape of the piece of a tensor in bytes [low, high)."""
    begin, end = max(low, tensor.offset), min(high, tensor.offset + tensor.nbytes)
    if end - begin == tensor.nbytes:
        return tensor.name, tensor.dtype.name, tensor.shape
    row = _row(tensor)
    if (begin - tensor.offset) % row or (end - tensor.offset) % row:
        raise UsageError(f"a cut lies in the middle of a row of {tensor.name!r}")
    return tensor.name, tensor.dtype.name, ((end - begin) // row, *tensor.shape[1:])


def _row(tensor: Tensor) -> int:
    """Return the bytes of a row of a tensor that is not empty."""
    return tensor.nbytes // tensor.shape[0] if tensor.shape else tensor.nbytes


def _cut(layout: Layout, place: int) -> int:
    """Return the place between rows that is nearest to a byte of the arena."""
    if not layout.nbytes or place <= 0:
        return 0
    tensor = layout.tensors[layout.tensor_at(place)]
    if place >= layout.nbytes or not tensor.nbytes:
        return min(place, layout.nbytes)
    row = _row(tensor)
    return tensor.offset + (place - tensor.offset + row // 2) // row * row
