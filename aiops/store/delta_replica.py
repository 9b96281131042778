"""The parameters as clients of coded fetches hold them: one shadow for all, S ← S + C(θ − S).

What a codec leaves out of one increment is in the next difference, so that the shadow follows the
parameters whatever the codec (error feedback comes by itself), and because all clients hold some
version of the same shadow, nothing is kept per client: who holds S at model version h is sent the
increments since h, or the tensor itself where that is shorter. The increments kept are never longer
than the model, nor so many that an answer could have more parts than a message may.

Where the model lies on several shards, each has the shadow of its own pieces, and codes them. The
lead hears how long each increment is, and so says for all shards which of them a reader is sent; a
tensor that is cut travels one way, all of it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from aiops.codecs import Codec, Encoder, NotFinite, raw
from aiops.codecs.choice import CodecChoice
from aiops.kernels.parallel import ParallelMap, serial_map
from aiops.model.arena import Arena
from aiops.model.layout import MAX_PART, MAX_TENSORS, Array, Bytes, Ints, split
from aiops.model.parts import Part, Parts, Ranges
from aiops.model.placement import Pieces, Placement
from aiops.store.snapshots import Lease, SnapshotPool, Version, Wanted

UNTOUCHED, WHOLE = -2, -1
"""What a job tells of a piece in place of its payload's bytes: it has none; it is sent whole."""

_MOST = 256
"""Increments kept: who is further behind fetches so seldom that raw tensors are no burden."""

_DESCRIBED = 32
"""Bytes that a part takes beside its payload, roughly: its row in the header, and a prefix."""


class Coded(NamedTuple):
    """What codes one piece: the codec, how many bytes, and these if they are here."""

    codec: str
    nbytes: int
    payload: Bytes | None


@dataclass(frozen=True, slots=True)
class Increment:
    """One step of the shadow: to which model version it leads, and what codes each piece."""

    number: int
    coded: Mapping[int, Coded]
    nbytes: int


class DeltaReplica:
    """One model's shadow.

    Parameters
    ----------
    current
        The model's version to begin with: its values, and those of the shadow, are the same.
    choice
        Which codec each tensor travels in; only float32 tensors travel coded.
    backend
        Whose kernels encode.
    lag
        Versions that the shadow may be behind when it is asked for; 0: half of what lies between
        two fetches of a worker, so that one finds about two increments.
    live
        At most so many of its versions are alive (`aiops.store.snapshots.SnapshotPool`).
    placement, shard
        Where the model lies, if not on one server, and which of the shards this is: of a follower
        (from 1) the version is of its pieces, and it keeps its increments until it is told.
    parallel_map
        Who shares in encoding large tensors.
    """

    def __init__(
        self,
        current: Version,
        choice: CodecChoice,
        backend: str = "auto",
        lag: int = 0,
        live: int = 4,
        placement: Placement | None = None,
        shard: int = 0,
        parallel_map: ParallelMap = serial_map,
    ) -> None:
        layout, held = current.layout, current.arena.layout
        self.layout, self._lag = layout, lag
        arena = Arena(held)
        arena.data[:] = current.arena.data
        versions = current.tensor_versions, current.level, current.changed.copy()
        self._snapshots = SnapshotPool(Version(current.number, arena, *versions, layout), live)
        pieces = Pieces.of(layout) if placement is None else placement.all
        self._codecs = _codecs(pieces, choice)
        if placement is not None and shard:
            first = sum(len(mine.tensors) for mine in placement.layouts[:shard])
            self._codecs = self._codecs[first : first + len(held.tensors)]
            pieces = Pieces.of(layout)
        self._pieces = pieces
        self._own = held.tensors  # the first of the pieces, whose bytes are here
        self._encoders: dict[int, Encoder] = {}
        for piece, (tensor, codec) in enumerate(zip(self._own, self._codecs, strict=False)):
            if codec is not None:
                encoder = codec.encoder(tensor.shape, feedback=False, backend=backend)
                encoder.parallel_map = parallel_map
                self._encoders[piece] = encoder
        self._backend, self._parallel_map = backend, parallel_map
        self._differences = np.empty(
            max((self._own[piece].size for piece in self._encoders), default=0), np.float32
        )
        self._increments: deque[Increment] = deque()
        self._kept = 0  # bytes of them
        # The versions that S has had, from the first whose increments since are all there; and for
        # each tensor the one since which it has only been incremented.
        self._points: dict[int, None] = {current.number: None}  # a set in order
        self._most = max(1, min(_MOST, MAX_TENSORS // max(1, len(pieces.tensors))))
        self._since: Ints = np.full(len(layout.tensors), current.number, np.int64)
        self._behind = np.zeros(len(self._own), bool)  # where it is not what it follows
        self._gap = 1.0  # model versions between two fetches of a worker, a moving average

    # ------------------------------------------------------------ reading

    @property
    def current(self) -> Version:
        """The newest version of the shadow; its number is that of the model that it follows."""
        return self._snapshots.current

    @property
    def oldest(self) -> int:
        """The number of the oldest increment that is kept."""
        return self._increments[0].number if self._increments else self.current.number

    def owns(self, version: Version) -> bool:
        """Say whether a version is one of the shadow's, and not the model's."""
        return version in self._snapshots

    @property
    def copies(self) -> int:
        """How many slow readers were given a copy."""
        return self._snapshots.copies

    @property
    def lag(self) -> int:
        """How many versions it may be behind."""
        return self._lag or max(1, round(self._gap / 2))

    def lease(self) -> Lease:
        """Take hold of its newest version."""
        return self._snapshots.lease()

    def asked(self, version: int, wanted: Wanted) -> None:
        """Take note of a fetch at a model version."""
        have = max([run[2] for run in wanted.wants], default=wanted.have)
        if 0 <= have <= version:
            self._gap += 0.05 * (version - have - self._gap)

    def due(self, version: int) -> bool:
        """Say whether it is too far behind the model to be sent."""
        return version - self.current.number >= self.lag

    def answer(self, wanted: Wanted) -> tuple[Parts, Lease | None]:
        """Return the parts that bring a reader up to the shadow, and a hold on their bytes."""
        current = self.current
        if not wanted.wants and wanted.have == current.number:
            return (), None
        mask = wanted.mask(current.changed)
        held = wanted.held(len(mask))
        parts: list[Part] = []
        coded: dict[int, Bytes] = {}
        for index in np.flatnonzero(mask).tolist():
            have = int(held[index])
            steps = self._steps(index, have) if have in self._points else None
            version = int(current.tensor_versions[index])
            if steps is None:
                tensor = self.layout.tensors[index]
                whole = split(tensor.offset, tensor.offset + tensor.nbytes, raw.NAME, version)
                parts += _joined(parts, whole)
                continue
            for piece, step in steps:
                _add(parts, coded, self._range(piece), step, version)
        return tuple(parts), self._snapshots.lease(coded) if parts else None

    def _steps(self, index: int, have: int) -> list[tuple[int, Coded]] | None:
        """Return the increments of a tensor's pieces since a version, each with its piece.

        None: the tensor itself is shorter, or needed.
        """
        first, last = self._pieces.firsts[index : index + 2]
        if have < self._since[index] or self._codecs[first] is None:
            return None
        found = [
            (piece, increment.coded[piece])
            for piece in range(first, last)
            for increment in self._increments
            if increment.number > have and piece in increment.coded
        ]
        if sum(step.nbytes + _DESCRIBED for _piece, step in found) >= (
            self.layout.tensors[index].nbytes
        ):
            return None
        return found

    def _range(self, piece: int) -> tuple[int, int]:
        tensor = self._pieces.tensors[piece]
        return tensor.offset, tensor.offset + tensor.nbytes

    def portion(self, whole: Ranges, steps: Ranges) -> tuple[Parts, Lease]:
        """Return the parts of an answer that lie on this shard, as its lead has chosen them.

        Parameters
        ----------
        whole
            The ranges of the arena that are sent as they are.
        steps
            The pieces of which increments are sent: start, stop, and how many of the newest.

        Raises
        ------
        ValueError
            When they are not kept, or of no piece.
        """
        begin, parts, coded = self.current.arena.layout.begin, list[Part](), dict[int, Bytes]()
        chosen = [(row, False) for row in whole] + [(row, True) for row in steps]
        for (start, stop, number), by_steps in sorted(chosen):
            if not by_steps:
                parts.append(Part(start, stop, raw.NAME, stop - start, number))
                continue
            piece = self._pieces.number(start - begin, stop - begin)
            found = [each.coded[piece] for each in self._increments if piece in each.coded]
            if not 0 < number <= len(found):
                raise ValueError(f"bytes {start} to {stop} have {len(found)} increments")
            version = int(self.current.tensor_versions[piece])
            for step in found[-number:]:
                _add(parts, coded, (start, stop), step, version)
        return tuple(parts), self._snapshots.lease(coded)

    # ------------------------------------------------------------ following the model

    def follow(self, model: Version) -> ReplicaJob:
        """Return the work that brings the shadow up to a version of the model.

        The model may not change while it is done, and nobody may read the shadow.
        """
        owners = self._pieces.owners[: len(self._own)]
        changed = model.changed[owners] > self.current.number
        behind = np.flatnonzero(self._behind | changed)
        return ReplicaJob(self, model, self._snapshots.target(), behind)

    def followed(self, job: ReplicaJob, told: Ints) -> None:
        """Publish what the work has done; ``told`` is what it returned, on all shards."""
        target, model, owners = job.target, job.model, self._pieces.owners
        target.follow(model, np.unique(owners[told != UNTOUCHED]))
        self._snapshots.publish(target)
        self._behind = job.behind
        self._since[owners[told == WHOLE]] = model.number
        coded = {}
        for piece in np.flatnonzero(told >= 0).tolist():
            codec = self._codecs[piece]
            assert codec is not None
            coded[piece] = Coded(codec.name, int(told[piece]), job.payloads.get(piece))
        nbytes = int(told[told > 0].sum())
        self._increments.append(Increment(model.number, coded, nbytes))
        self._points[model.number] = None
        self._kept += nbytes

    def settle(self) -> None:
        """Let go of increments, if they have become too many."""
        while self._kept > self.layout.nbytes or len(self._increments) > self._most:
            self._drop()

    def forget(self, oldest: int) -> None:
        """Let go of increments before that of a model version."""
        while self._increments and self._increments[0].number < oldest:
            self._drop()

    def _drop(self) -> None:
        self._kept -= self._increments.popleft().nbytes
        del self._points[next(iter(self._points))]

    def encode(self, job: ReplicaJob) -> Ints:
        """Do the work (on any thread): encode the differences, and add what they decode to.

        Returns what there is to be told of each piece that is here (`ReplicaJob.run`).
        """
        base, target = self.current.arena, job.target.arena
        if target is not base:
            target.data[:] = base.data
        told: Ints = np.full(len(self._own), UNTOUCHED, np.int64)
        for piece in job.pieces.tolist():
            name = self._own[piece].name
            shadow, model = target.views[name].reshape(-1), job.model.arena.views[name].reshape(-1)
            payload = self._encoded(piece, model, shadow)
            if payload is None:
                told[piece], shadow[:] = WHOLE, model
                continue
            told[piece], job.payloads[piece] = len(payload), payload
            job.behind[piece] = not np.array_equal(shadow, model)
        return told

    def _encoded(self, piece: int, model: Array, shadow: Array) -> Bytes | None:
        encoder = self._encoders.get(piece)
        if encoder is None:
            return None
        difference = self._differences[: len(model)]
        with np.errstate(invalid="ignore", over="ignore"):
            np.subtract(model, shadow, out=difference)
        try:
            payload = np.frombuffer(encoder.encode(difference), np.uint8).copy()
        except NotFinite:  # the model has run away; what it is now is sent as it is
            return None
        codec = encoder.codec
        how = payload, encoder.shape, shadow
        self._parallel_map(codec.pieces(*how, add=True, backend=self._backend))
        return payload

    def report(self) -> dict[str, int | float]:
        """Return its line of the statistics."""
        return {
            "version": self.current.number,
            "lag": self.lag,
            "increments": len(self._increments),
            "increment_bytes": self._kept,
        }


class ReplicaJob:
    """The shadow's work, which takes its turn among the updates."""

    def __init__(self, shadow: DeltaReplica, model: Version, target: Version, pieces: Ints) -> None:
        self.shadow = shadow
        self.model, self.target, self.pieces = model, target, pieces
        self.payloads: dict[int, Bytes] = {}
        self.behind = np.zeros(len(target.arena.layout.tensors), bool)

    @property
    def cost(self) -> int:
        """Bytes read and written, roughly."""
        return 4 * self.target.arena.layout.nbytes

    def run(self) -> Ints:
        """Do it; return for each piece its payload's bytes, -1 (sent whole) or -2 (untouched)."""
        return self.shadow.encode(self)


def _codecs(pieces: Pieces, choice: CodecChoice) -> list[Codec | None]:
    """Return which codec each piece travels in: for all pieces of a tensor the same, or none."""
    found: list[Codec | None] = []
    for tensor, (first, last) in zip(pieces.layout.tensors, pairwise(pieces.firsts), strict=True):
        codec, mine = choice.codec(tensor), pieces.tensors[first:last]
        fits = codec is not None and tensor.dtype == np.float32
        fits = fits and all(codec.most(piece.shape) < piece.nbytes for piece in mine)  # type: ignore[union-attr]
        found += [codec if fits else None] * len(mine)
    return found


def _add(
    parts: list[Part], coded: dict[int, Bytes], range: tuple[int, int], step: Coded, version: int
) -> None:
    """Add an increment to the parts of an answer, and its payload, if it is here, to theirs."""
    if step.payload is not None:
        coded[len(parts)] = step.payload
    parts.append(Part(*range, step.codec, step.nbytes, version))


def _joined(before: list[Part], parts: list[Part]) -> list[Part]:
    """Return what follows some parts; one that continues the last is joined to it."""
    if before and len(parts) == 1:
        last, part = before[-1], parts[0]
        nbytes = last.nbytes + part.nbytes
        fits = (last.stop, last.codec, last.version) == (part.start, part.codec, part.version)
        if fits and nbytes <= MAX_PART:
            before.pop()
            return [Part(last.start, part.stop, last.codec, nbytes, part.version)]
    return parts
