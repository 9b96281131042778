"""Ring all-reduce, sans-I/O: one worker's part in averaging a model with others, without a server.

The k workers of a round form a ring, by rank, and each sends only to the next. The model is cut
into k segments. Segment s starts at worker s; every worker that it reaches adds its own values to
the mean, and after k − 1 hops the last one has the mean of all. That mean travels another k − 1
hops. So each worker sends 2(k − 1)/k times the model (reduce-scatter and all-gather; Patarasuk &
Yuan 2009, *Bandwidth optimal all-reduce algorithms*). A segment travels in chunks, so that sending,
receiving and adding overlap.

A driver does only this::

    ring = Ring(rank, counts, flat)
    for piece in ring.begin(): send(piece)             # to the next worker
    view = ring.room(start, stop, hop)                 # fill it with a chunk of the last worker
    piece = ring.received(start, hop)                  # ... and send the result on, if any
    ... until ring.done; then flat holds the mean

The mean is a running one, m ← m + (x − m)/n, as each worker's x joins n − 1 others:

* equal models give exactly that model back (x − m is 0; a sum divided by n is not always x);
* a sum cannot overflow;
* each segment's mean is computed in one order, once, so all workers end with the same bits.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from aiops.errors import RemoteProtocolError
from aiops.model.arena import Arena, aligned
from aiops.model.layout import Array, Layout, compute_dtype

CHUNK = 256 * 1024
"""The most bytes of a chunk: it is still in the cache when it is added and sent on."""

LIMIT = 1e18
"""The bound on the magnitude of a value, as in a push."""


class Piece(NamedTuple):
    """A chunk to send: the bytes [start, stop) of a `Flat`, and the hops it will have made."""

    start: int
    stop: int
    hop: int
    view: memoryview


class Flat:
    """A model's values in the dtypes that means are taken in: float32 for the 16-bit ones.

    Attributes
    ----------
    data
        All of it as bytes: first what is float64, then what is float32.
    sections
        One flat array per section of the layout, in the layout's order.
    runs
        The same bytes as one flat array per dtype.
    """

    def __init__(self, layout: Layout) -> None:
        dtypes = [compute_dtype(section.dtype) for section in layout.sections]
        sizes = [(s.stop - s.start) // s.dtype.itemsize for s in layout.sections]
        lengths = (size * t.itemsize for size, t in zip(sizes, dtypes, strict=True))
        edges = list(accumulate(lengths, initial=0))
        self.layout, self.data = layout, aligned(edges[-1])
        self.sections: tuple[Array, ...] = tuple(
            self.data[start:stop].view(dtype)
            for (start, stop), dtype in zip(pairwise(edges), dtypes, strict=True)
        )
        wide = sum(a.nbytes for a in self.sections if a.itemsize == 8)
        halves = (self.data[:wide].view(np.float64), self.data[wide:].view(np.float32))
        self.runs: tuple[Array, ...] = tuple(run for run in halves if run.size)

    def load(self, arena: Arena) -> None:
        """Copy the values of a model."""
        for mine, given in zip(self.sections, arena.sections, strict=True):
            np.copyto(mine, given, casting="unsafe")  # from narrower to wider: nothing is lost

    @property
    def views(self) -> Iterator[tuple[str, Array]]:
        """Each tensor's name and its values, flat."""
        for section, values in zip(self.layout.sections, self.sections, strict=True):
            at = 0
            for tensor in self.layout.tensors[section.first : section.last]:
                yield tensor.name, values[at : at + tensor.size]
                at += tensor.size


def fit(values: Array) -> bool:
    """Return whether all values are finite and below `LIMIT` in magnitude."""
    if not values.size:
        return True
    low, high = values.min(), values.max()  # NaN propagates through both
    return bool(low > -LIMIT and high < LIMIT)


@dataclass(slots=True)
class _Chunk:
    """The state of one chunk: the bytes [start, stop), their segment, and their next hop."""

    start: int
    stop: int
    segment: int
    values: Array
    expects: int  # the hops that it will have made when it comes next; 0: it does not come again


class Ring:
    """One worker's part in one round.

    Parameters
    ----------
    rank
        This worker's place in the ring, from 0.
    counts
        Per worker, in ring order, whether its model counts. One that does not (a newcomer's)
        receives the mean of the others.
    flat
        This worker's values, and the mean once `done`. Do not change them meanwhile.
    chunk
        The most bytes of a chunk; the same on all workers.

    Attributes
    ----------
    done
        True once all of the mean has come.
    to_send
        The number of chunks that this worker sends in all.
    """

    def __init__(self, rank: int, counts: Sequence[bool], flat: Flat, chunk: int = CHUNK) -> None:
        assert 0 <= rank < len(counts), "a worker of the ring"
        assert any(counts), "at least one model counts"
        self.rank, self._counts, self._data = rank, tuple(counts), flat.data.data
        size = len(counts)
        self._last = 2 * (size - 1)  # the hops after which a chunk stays where it is
        self._chunks: dict[int, _Chunk] = {}
        at = 0
        for run in flat.runs:
            for segment in range(size):
                begin, end = (run.size * n // size for n in (segment, segment + 1))
                step = max(1, chunk // run.itemsize)
                for low in range(begin, end, step):
                    values = run[low : min(low + step, end)]
                    start = at + low * run.itemsize
                    self._chunks[start] = _Chunk(
                        start, start + values.nbytes, segment, values, self._first_hop(segment)
                    )
            at += run.nbytes
        longest = max((c.stop - c.start for c in self._chunks.values()), default=0)
        self._scratch: npt.NDArray[np.uint8] = aligned(longest)
        self._missing = sum(c.expects > 0 for c in self._chunks.values())
        self.to_send = sum(self._sends(c.segment) for c in self._chunks.values())

    @property
    def done(self) -> bool:
        """True once all of the mean has come."""
        return not self._missing

    def begin(self) -> list[Piece]:
        """Return the first chunks to send: those of this worker's own segment."""
        if self._last == 0:
            return []
        return [
            self._piece(chunk, 1) for chunk in self._chunks.values() if chunk.segment == self.rank
        ]

    def room(self, start: int, stop: int, hop: int) -> memoryview:
        """Return the buffer of a chunk that is coming.

        Raises
        ------
        RemoteProtocolError
            When no such chunk is expected now; the round cannot go on.
        """
        chunk = self._chunks.get(start)
        if chunk is None or chunk.stop != stop or chunk.expects != hop:
            raise RemoteProtocolError(
                f"the bytes {start} to {stop} after {hop} hops are not what is expected next:"
                " the workers of a round must have the same model and version of aiops"
            )
        if hop < len(self._counts):
            return self._scratch.data[: stop - start]
        return self._data[start:stop]

    def received(self, start: int, hop: int) -> Piece | None:
        """Process the chunk that has filled its `room`; return the chunk to send on, if any.

        Raises
        ------
        RemoteProtocolError
            When it holds a value that is not finite or too large; the round cannot go on.
        """
        chunk, size = self._chunks[start], len(self._counts)
        assert chunk.expects == hop, "room() was asked first"
        came = chunk.values
        if hop < size:
            came = self._scratch[: chunk.stop - start].view(chunk.values.dtype)
        if not fit(came):
            raise RemoteProtocolError(
                f"the bytes {start} to {chunk.stop} hold a value that is not finite or not below"
                f" {LIMIT:g}: this round is void"
            )
        if hop < size:
            self._join(chunk, came, hop)
        chunk.expects = hop + size if hop < size - 1 else 0
        self._missing -= not chunk.expects
        return self._piece(chunk, hop + 1) if hop < self._last else None

    # ------------------------------------------------------------ inside

    def _join(self, chunk: _Chunk, mean: Array, hop: int) -> None:
        """Update the mean of the ``hop`` workers before this one with its values."""
        own, size = chunk.values, len(self._counts)
        before = sum(self._counts[(chunk.segment + n) % size] for n in range(hop))
        if not self._counts[self.rank]:
            own[:] = mean
        elif before:
            own -= mean
            own *= own.dtype.type(1 / (before + 1))
            own += mean

    def _first_hop(self, segment: int) -> int:
        """Return the number of hops after which a segment's chunks first come here."""
        size = len(self._counts)
        if size == 1:
            return 0
        return (self.rank - segment) % size or size

    def _sends(self, segment: int) -> int:
        """Return the number of times that this worker sends a chunk of a segment."""
        size = len(self._counts)
        place = (self.rank - segment) % size
        return (size > 1) + (place + size < self._last)

    def _piece(self, chunk: _Chunk, hop: int) -> Piece:
        return Piece(chunk.start, chunk.stop, hop, self._data[chunk.start : chunk.stop])
