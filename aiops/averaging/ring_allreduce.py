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

With a codec float32 chunks travel encoded. Each worker that encodes a mean keeps what that leaves
out, times the number of models in it, in `Ring.left_out`, and adds it to its own model; so the sum
of the models is kept as without a codec, and nothing else has to be remembered. The last mean of a
segment is encoded once and passed on as it is, so all workers decode the same bits.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from aiops.codecs.block_codec import BlockCodec
from aiops.errors import RemoteProtocolError
from aiops.model.arena import Arena, aligned
from aiops.model.layout import Array, Bytes, Layout, compute_dtype

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
    codec: str = "raw"


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

    data: Bytes
    layout: Layout

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

    def subtract(self, other: Flat) -> None:
        """Subtract the values of another one of the same layout."""
        for mine, given in zip(self.runs, other.runs, strict=True):
            mine -= given

    def add(self, other: Flat) -> None:
        """Add the values of another one of the same layout."""
        for mine, given in zip(self.runs, other.runs, strict=True):
            mine += given

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
    codec: BlockCodec | None = None
    left_out: Array | None = None  # where what its payloads leave out is kept


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
        The most bytes of a chunk before it is encoded; the same on all workers.
    codec
        Of float32 chunks; None: they travel as they are.

    Attributes
    ----------
    left_out
        With a codec: what this worker's payloads left out, as float32, in the places of the
        float32 values; to be added to its own model.
    done
        True once all of the mean has come.
    to_send
        The number of chunks that this worker sends in all.
    """

    rank: int

    def __init__(
        self,
        rank: int,
        counts: Sequence[bool],
        flat: Flat,
        chunk: int = CHUNK,
        codec: BlockCodec | None = None,
    ) -> None:
        assert 0 <= rank < len(counts), "a worker of the ring"
        assert any(counts), "at least one model counts"
        self.rank, self._counts, self._data = rank, tuple(counts), flat.data.data
        size = len(counts)
        self._last = 2 * (size - 1)  # the hops after which a chunk stays where it is
        self._chunks: dict[int, _Chunk] = {}
        at = 0
        self.left_out: Array | None = None
        for run in flat.runs:
            coded = codec if run.dtype == np.float32 else None
            left_out = None if coded is None else np.zeros(run.size, np.float32)
            self.left_out = left_out
            for segment in range(size):
                begin, end = (run.size * n // size for n in (segment, segment + 1))
                step = max(1, chunk // run.itemsize)
                for low in range(begin, end, step):
                    values = run[low : min(low + step, end)]
                    start = at + low * run.itemsize
                    self._chunks[start] = _Chunk(
                        *(start, start + values.nbytes, segment, values, self._first_hop(segment)),
                        codec=coded,
                        left_out=None if left_out is None else left_out[low : low + values.size],
                    )
            at += run.nbytes
        longest = max((_room_of(chunk) for chunk in self._chunks.values()), default=0)
        self._scratch: npt.NDArray[np.uint8] = aligned(longest)
        self._missing = sum(c.expects > 0 for c in self._chunks.values())
        self.to_send: int = sum(self._sends(c.segment) for c in self._chunks.values())

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

    def room(
        self, start: int, stop: int, hop: int, codec: str = "raw", nbytes: int | None = None
    ) -> memoryview:
        """Return the buffer of a chunk that is coming, in a codec and of a number of bytes.

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
        wanted, length = "raw", stop - start
        if chunk.codec is not None:
            wanted, length = chunk.codec.name, chunk.codec.length(chunk.values.size)
        if codec != wanted or (length if nbytes is None else nbytes) != length:
            raise RemoteProtocolError(
                f"a chunk of {length} bytes in the codec {wanted!r} is expected, and comes as"
                f" {nbytes} bytes in {codec!r}"
            )
        if hop < len(self._counts) or chunk.codec is not None:
            return self._scratch.data[:length]
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
        came, payload = chunk.values, b""
        if chunk.codec is not None:
            payload = bytes(self._scratch.data[: chunk.codec.length(chunk.values.size)])
            came = _decoded(chunk.codec, payload, chunk.values.size)
        elif hop < size:
            came = self._scratch[: chunk.stop - start].view(chunk.values.dtype)
        if not fit(came):
            raise RemoteProtocolError(
                f"the bytes {start} to {chunk.stop} hold a value that is not finite or not below"
                f" {LIMIT:g}: this round is void"
            )
        if hop < size:
            self._join(chunk, came, hop)
        elif chunk.codec is not None:
            chunk.values[:] = came
        chunk.expects = hop + size if hop < size - 1 else 0
        self._missing -= not chunk.expects
        if hop == self._last:
            return None
        if hop >= size and chunk.codec is not None:  # the mean of all, as it was encoded once
            return Piece(chunk.start, chunk.stop, hop + 1, memoryview(payload), chunk.codec.name)
        return self._piece(chunk, hop + 1)

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
        """Return a chunk to send, with this worker's part of the mean in it."""
        if chunk.codec is not None:
            return self._coded(chunk, chunk.codec, hop)
        return Piece(chunk.start, chunk.stop, hop, self._data[chunk.start : chunk.stop])

    def _coded(self, chunk: _Chunk, codec: BlockCodec, hop: int) -> Piece:
        """Encode a mean, and keep what that leaves out of the sum of the models in it."""
        payload = bytes(codec.encoder(chunk.values.shape, feedback=False).encode(chunk.values))
        decoded = _decoded(codec, payload, chunk.values.size)
        size = len(self._counts)
        models = sum(self._counts[(chunk.segment + n) % size] for n in range(hop))
        assert chunk.left_out is not None, "a chunk with a codec has room for it"
        chunk.left_out += (chunk.values - decoded) * np.float32(models)
        if hop == size:  # the mean of all: what the others decode is this worker's too
            chunk.values[:] = decoded
        return Piece(chunk.start, chunk.stop, hop, memoryview(payload), codec.name)


def _room_of(chunk: _Chunk) -> int:
    """Return the bytes that a chunk needs, encoded or as it is."""
    coded = 0 if chunk.codec is None else chunk.codec.length(chunk.values.size)
    return max(chunk.stop - chunk.start, coded)


def _decoded(codec: BlockCodec, payload: bytes, size: int) -> Array:
    """Return the values of a payload of the right length.

    Raises
    ------
    RemoteProtocolError
        When it holds a value that cannot be; the round cannot go on.
    """
    data = np.frombuffer(payload, np.uint8)
    fault = codec.check(data, (size,))
    if fault is not None:
        raise RemoteProtocolError(
            f"a chunk in the codec {codec.name!r} {fault}: this round is void"
        )
    values = np.empty(size, np.float32)
    codec.decode(data, (size,), values)
    return values
