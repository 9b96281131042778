"""A delta replica: the parameters as clients of coded fetches hold them, S ← S + C(θ − S).

The replica S follows the parameters θ by coded increments. The error of one increment is part of
the next difference, so the replica follows the parameters with any codec and needs no error
feedback of its own. All clients hold some version of the same replica, so nothing is kept per
client: a client with S at model version h is sent the increments since h, or the tensor itself
where that is shorter. The increments kept are bounded by the bytes of the model and by the number
of parts that an answer may have.

If the model is placed on several shards, each has the replica of its own pieces, and codes them.
The followers report the length of each increment to the lead, which chooses for all shards the
increments that a reader is sent. All pieces of a tensor are sent in the same way.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any, NamedTuple, Protocol, TypeAlias

import numpy as np

from aiops.codecs import Codec, Encoder, NotFinite, raw
from aiops.codecs.choice import CodecChoice
from aiops.kernels.parallel import ParallelMap, serial_map
from aiops.model.arena import Arena
from aiops.model.layout import MAX_PART, MAX_TENSORS, Array, Bytes, Ints, Tensor, split
from aiops.model.parts import Part, Parts, Ranges
from aiops.model.placement import Pieces, Placement
from aiops.store.snapshots import Lease, SnapshotPool, Version
from aiops.store.wanted import Wanted

UNTOUCHED, WHOLE = -2, -1
"""Reported for a piece instead of its payload's bytes: no increment; sent whole."""

_MOST = 256
"""Increments kept: a client further behind fetches too seldom for raw tensors to matter."""

_DESCRIBED = 32
"""Bytes that a part takes beside its payload, roughly: its row in the header, and a prefix."""


class Coded(NamedTuple):
    """One piece of an increment: its codec, its bytes, and the payload if this shard has it."""

    codec: str
    nbytes: int
    payload: Bytes | None


Places: TypeAlias = Sequence[tuple[int, str, int, int]]
"""Where the payloads of a `region` lie: each with its piece, its codec, and its begin and bytes."""


class Increment:
    """One step of the replica.

    Attributes
    ----------
    number
        The model version that it leads to.
    nbytes
        The bytes of its payloads.
    coded
        The coded pieces.
    region
        The payloads of all pieces that have codecs, one after the other; None: it has not all, or
        they lie elsewhere.
    """

    __slots__ = ("_coded", "_places", "nbytes", "number", "region")

    def __init__(
        self,
        number: int,
        coded: Mapping[int, Coded] | None,
        nbytes: int,
        region: bytes | None = None,
        places: Places = (),
    ) -> None:
        self.number, self.nbytes, self.region = number, nbytes, region
        self._coded, self._places = coded, places

    @property
    def coded(self) -> Mapping[int, Coded]:
        """As above."""
        if self._coded is None:
            self._coded = cut_up(self.region or b"", self._places)
        return self._coded


class WholeSteps(Protocol):
    """Steps of the replica of which every piece is touched, in compiled code."""

    @property
    def complete(self) -> bool:
        """True if every difference of the last step could be encoded."""

    def step(self, model: Bytes, replica: Bytes, results: Ints, behind: Any, /) -> bytes:
        """Take a step in place, as `DeltaReplica.encode` does; return the `Increment.region`.

        ``results``, ``behind``: of each piece, to be written: what `ReplicaJob.run` returns, and
        `ReplicaJob.behind`.
        """


class DeltaReplica:
    """The delta replica of one model.

    Parameters
    ----------
    current
        The version to begin with: the replica's values are equal to it.
    choice
        The codec of each tensor; only float32 tensors are coded.
    backend
        The kernels that encode: ``"auto"``, ``"numba"`` or ``"numpy"``.
    lag
        Versions that the replica may be behind when it is sent; 0: half of those between two
        fetches of a worker, so that a fetch finds about two increments.
    live
        Bound on its versions alive (`aiops.store.snapshots.SnapshotPool`).
    placement, shard
        The model's placement on shards, if there are several, and the number of this one. On a
        follower (from 1) the version is of its own pieces, and increments are kept until the lead
        has them dropped.
    parallel_map
        Shares the encoding of large tensors among threads.

    Attributes
    ----------
    steps
        Takes usual steps, if they are to be taken by compiled code.
    places
        Where payloads lie in the regions of its increments.
    snapshots
        Its versions.
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
        self.snapshots = SnapshotPool(Version(current.number, arena, *versions, layout), live)
        pieces = Pieces.of(layout) if placement is None else placement.all
        codecs = _codecs(pieces, choice)
        if placement is not None and shard:
            first = sum(len(mine.tensors) for mine in placement.layouts[:shard])
            codecs = codecs[first : first + len(held.tensors)]
            pieces = Pieces.of(layout)
        self._pieces, self._every = pieces, np.unique(pieces.owners)
        self._names = [raw.NAME if codec is None else codec.name for codec in codecs]  # by piece
        self._own = held.tensors  # the first of the pieces, whose bytes are here
        self._encoders: dict[int, Encoder] = {}
        self.steps: WholeSteps | None = None
        for piece, (tensor, codec) in enumerate(zip(self._own, codecs, strict=False)):
            if codec is not None:
                encoder = codec.encoder(tensor.shape, feedback=False, backend=backend)
                encoder.parallel_map = parallel_map
                self._encoders[piece] = encoder
        self.places, at = list[tuple[int, str, int, int]](), 0
        for piece, encoder in self._encoders.items():
            nbytes = encoder.codec.most(encoder.shape)
            self.places.append((piece, self._names[piece], at, nbytes))
            at += nbytes
        self._backend, self._parallel_map = backend, parallel_map
        self._differences = np.empty(
            max((self._own[piece].size for piece in self._encoders), default=0), np.float32
        )
        self._increments: deque[Increment] = deque()
        self._kept = 0  # bytes of them
        # The versions that S has had, from the first whose increments since are all kept; and for
        # each tensor the last version in which it was set and not incremented.
        self._points: dict[int, None] = {current.number: None}  # a set in order
        self._most = max(1, min(_MOST, MAX_TENSORS // max(1, len(pieces.tensors))))
        self._since: Ints = np.full(len(layout.tensors), current.number, np.int64)
        self._coded: Ints = pieces.owners[[name != raw.NAME for name in self._names]]
        self._raw: Ints = pieces.owners[[name == raw.NAME for name in self._names]]
        self._coded_since = current.number  # the greatest of `_since` of tensors that have codecs
        self._behind = np.zeros(len(self._own), bool)  # pieces that differ from the model
        self._gap = 1.0  # model versions between two fetches of a worker, a moving average

    # ------------------------------------------------------------ reading

    @property
    def pieces(self) -> list[tuple[Tensor, Codec | None]]:
        """The pieces that are here, each with its codec; None: it is sent whole."""
        found = {piece: encoder.codec for piece, encoder in self._encoders.items()}
        return [(tensor, found.get(piece)) for piece, tensor in enumerate(self._own)]

    @property
    def current(self) -> Version:
        """The newest version of the replica; its number is the model version that it follows."""
        return self.snapshots.current

    @property
    def oldest(self) -> int:
        """The number of the oldest increment that is kept."""
        return self._increments[0].number if self._increments else self.current.number

    def owns(self, version: Version) -> bool:
        """Return whether a version is one of the replica's, and not the model's."""
        return version in self.snapshots

    @property
    def cut(self) -> int:
        """The number of slow readers that were cut off."""
        return self.snapshots.cut

    @property
    def lag(self) -> int:
        """The number of versions that it may be behind."""
        return self._lag or max(1, round(self._gap / 2))

    def lease(self) -> Lease:
        """Return a lease on its newest version."""
        return self.snapshots.lease()

    def lease_of(self, version: Version) -> Lease:
        """Return a lease on one of its versions that is alive."""
        return self.snapshots.lease_of(version)

    def asked(self, version: int, wanted: Wanted) -> None:
        """Note a fetch at a model version, for the average of `lag`."""
        self.asked_by(version, max([run[2] for run in wanted.wants], default=wanted.have))

    def asked_by(self, version: int, have: int) -> None:
        """Note a fetch of a reader that holds one version of all tensors."""
        if 0 <= have <= version:
            self._gap += 0.05 * (version - have - self._gap)

    def due(self, version: int) -> bool:
        """Return whether it is too far behind the model to be sent."""
        return version - self.snapshots.current.number >= self.lag

    def answer(self, wanted: Wanted) -> tuple[Parts, Lease | None]:
        """Return the parts that bring a reader up to the replica, and a lease on their bytes."""
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
        return tuple(parts), self.snapshots.lease(coded) if parts else None

    def _steps(self, index: int, have: int) -> list[tuple[int, Coded]] | None:
        """Return the increments of a tensor's pieces since a version, each with its piece.

        None: the tensor itself is shorter, or the increments do not lead to it.
        """
        first, last = self._pieces.firsts[index : index + 2]
        if have < self._since[index] or self._names[first] == raw.NAME:
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
        """Return the parts of an answer that are on this shard, as its lead has chosen them.

        Parameters
        ----------
        whole
            The ranges of the arena that are sent raw.
        steps
            The pieces of which increments are sent: start, stop, and the number of newest ones.

        Raises
        ------
        ValueError
            When increments are not kept, or a range is no piece, or of bytes that are not here.
        """
        layout, parts, coded = self.current.arena.layout, list[Part](), dict[int, Bytes]()
        begin = layout.begin
        if not all(begin <= row[0] < row[1] <= begin + layout.nbytes for row in whole):
            raise ValueError("it holds other bytes")
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
        return tuple(parts), self.snapshots.lease(coded)

    def regions_since(self, have: int) -> tuple[bytes, ...] | None:
        """Return the increments of a reader that holds a version of all tensors.

        They are `Increment.region`. None: its answer is another than of these, and of the tensors
        without a codec.
        """
        current, found = self.snapshots.current, list[bytes]()
        if have == current.number:
            return ()
        if have not in self._points or have < self._coded_since or not current.all_changed:
            return None
        for increment in reversed(self._increments):
            if increment.number <= have:
                break
            if increment.region is None:
                return None
            found.append(increment.region)
        return tuple(reversed(found))

    # ------------------------------------------------------------ following the model

    def step(self, model: Version) -> Ints:
        """Bring the replica up to a version of the model, at once.

        Returns what `ReplicaJob.run` returns.
        """
        if self.steps is None or not model.all_changed or self.snapshots.leased:
            job = self.follow(model)
            results = job.run()
            self.followed(job, results)
            self.settle()
            return results
        target, count = self.snapshots.target(), len(self._own)
        results, behind = np.empty(count, np.int64), np.empty(count, bool)
        region = self.steps.step(model.arena.data, target.arena.data, results, behind)
        if not self.steps.complete:
            job = ReplicaJob(self, model, target, np.arange(count))
            coded = cut_up(region, self.places)
            job.payloads = {
                piece: payload
                for piece, (_codec, _nbytes, payload) in coded.items()
                if results[piece] >= 0 and payload is not None
            }
            job.behind = behind
            self.followed(job, results)
        else:  # `followed` in fewer calls
            target.follow_all(model)
            self._behind = behind
            self._since[self._raw] = model.number
            increment = Increment(model.number, None, len(region), region, self.places)
            self._increments.append(increment)
            self._points[model.number] = None
            self._kept += len(region)
        self.settle()
        return results

    def follow(self, model: Version) -> ReplicaJob:
        """Return the job that brings the replica up to a version of the model.

        While it runs, the model does not change and the replica is not read.
        """
        owners = self._pieces.owners[: len(self._own)]
        changed = model.changed[owners] > self.current.number
        behind = np.flatnonzero(self._behind | changed)
        return ReplicaJob(self, model, self.snapshots.target(), behind)

    def followed(self, job: ReplicaJob, results: Ints) -> None:
        """Publish a job's result; ``results`` is what `ReplicaJob.run` returned on all shards."""
        target, model, owners = job.target, job.model, self._pieces.owners
        touched = results != UNTOUCHED
        target.follow(model, self._every if touched.all() else np.unique(owners[touched]))
        self.snapshots.publish(target)
        self._behind = job.behind
        self._since[owners[results == WHOLE]] = model.number
        self._coded_since = int(self._since[self._coded].max(initial=0))
        coded = {}
        for piece in np.flatnonzero(results >= 0).tolist():
            coded[piece] = Coded(self._names[piece], int(results[piece]), job.payloads.get(piece))
        nbytes = int(results[results > 0].sum())
        self._increments.append(Increment(model.number, coded, nbytes))
        self._points[model.number] = None
        self._kept += nbytes

    def settle(self) -> None:
        """Drop the oldest increments while they exceed their bounds."""
        while self._kept > self.layout.nbytes or len(self._increments) > self._most:
            self._drop()

    def forget(self, oldest: int) -> None:
        """Drop the increments before that of a model version."""
        while self._increments and self._increments[0].number < oldest:
            self._drop()

    def _drop(self) -> None:
        self._kept -= self._increments.popleft().nbytes
        del self._points[next(iter(self._points))]

    def encode(self, job: ReplicaJob) -> Ints:
        """Encode the differences and add what they decode to (on any thread).

        Returns the result for each piece that is here, as `ReplicaJob.run` does.
        """
        base, target = self.current.arena, job.target.arena
        if target is not base:
            target.data[:] = base.data
        results: Ints = np.full(len(self._own), UNTOUCHED, np.int64)
        for piece in job.pieces.tolist():
            name = self._own[piece].name
            held = target.views[name].reshape(-1)
            model = job.model.arena.views[name].reshape(-1)
            payload = self._encoded(piece, model, held)
            if payload is None:
                results[piece], held[:] = WHOLE, model
                continue
            results[piece], job.payloads[piece] = len(payload), payload
            job.behind[piece] = not np.array_equal(held, model)
        return results

    def _encoded(self, piece: int, model: Array, held: Array) -> Bytes | None:
        """Encode a piece's difference, and add what that decodes to; None: it is sent whole."""
        encoder = self._encoders.get(piece)
        if encoder is None:
            return None
        difference = self._differences[: len(model)]
        with np.errstate(invalid="ignore", over="ignore"):
            np.subtract(model, held, out=difference)
        try:
            payload = np.frombuffer(encoder.encode(difference), np.uint8).copy()
        except NotFinite:  # the model has diverged: its values are sent raw
            return None
        codec = encoder.codec
        coded = payload, encoder.shape, held
        self._parallel_map(codec.pieces(*coded, add=True, backend=self._backend))
        return payload

    # ------------------------------------------------------------ state

    def state(self) -> dict[str, Any]:
        """Return everything but versions and arrays as plain values, for `restore`."""
        return {
            "increments": [
                [step.number, step.nbytes, [[at, *each[:2]] for at, each in step.coded.items()]]
                for step in self._increments
            ],
            "points": list(self._points),
            "since": self._since.copy(),
            "behind": self._behind.copy(),
            "gap": self._gap,
        }

    def payloads(self) -> list[Bytes]:
        """Return the increments' payloads that are here, in order; they do not change."""
        coded = (each for step in self._increments for each in step.coded.values())
        return [each.payload for each in coded if each.payload is not None]

    def encoder_arrays(self) -> list[Array]:
        """Return the arrays on which later payloads depend, in order; a step changes them."""
        encoders = self._encoders.values()
        return [array for encoder in encoders for array in encoder.state().values()]

    def payload_bytes(self, state: Mapping[str, Any]) -> int:
        """Return the bytes of `payloads` when `state` was returned."""
        rows = (row for _number, _nbytes, rows in state["increments"] for row in rows)
        return sum(nbytes for piece, _codec, nbytes in rows if piece < len(self._own))

    def restore_versions(self, current: Version, older: Sequence[Version]) -> None:
        """Continue with these versions, as `SnapshotPool.restore` does."""
        self.snapshots.restore(current, older)

    def restore(self, state: Mapping[str, Any], payloads: Bytes, arrays: Bytes) -> None:
        """Continue from what `state` returned.

        ``payloads``, ``arrays``: the bytes that `payloads` and `encoder_arrays` returned, one array
        after the other.
        """
        self._increments.clear()
        begin = 0
        for number, nbytes, rows in state["increments"]:
            coded = {}
            for piece, codec, length in rows:
                if piece >= len(self._own):  # another shard has it
                    coded[piece] = Coded(codec, length, None)
                    continue
                coded[piece] = Coded(codec, length, payloads[begin : begin + length])
                begin += length
            self._increments.append(Increment(number, coded, nbytes))
        self._kept = sum(step.nbytes for step in self._increments)
        self._points = dict.fromkeys(state["points"])
        self._since = state["since"].copy()
        self._coded_since = int(self._since[self._coded].max(initial=0))
        self._behind = state["behind"].copy()
        self._gap = state["gap"]
        begin = 0
        for encoder in self._encoders.values():
            found = {}
            for name, array in encoder.state().items():
                each = arrays[begin : begin + array.nbytes].view(array.dtype)
                found[name], begin = each.reshape(array.shape), begin + array.nbytes
            encoder.restore(found)

    def report(self) -> dict[str, int | float]:
        """Return the replica's row of the statistics."""
        return {
            "version": self.current.number,
            "lag": self.lag,
            "increments": len(self._increments),
            "increment_bytes": self._kept,
        }


class ReplicaJob:
    """One step of the replica, queued like an update of the model."""

    def __init__(
        self, replica: DeltaReplica, model: Version, target: Version, pieces: Ints
    ) -> None:
        self.replica = replica
        self.model, self.target, self.pieces = model, target, pieces
        self.payloads: dict[int, Bytes] = {}
        self.behind = np.zeros(len(target.arena.layout.tensors), bool)

    @property
    def cost(self) -> int:
        """Bytes read and written, roughly."""
        return 4 * self.target.arena.layout.nbytes

    def run(self) -> Ints:
        """Run the step; return for each piece its payload's bytes, -1 (whole) or -2 (untouched)."""
        return self.replica.encode(self)


def cut_up(region: bytes, places: Places) -> dict[int, Coded]:
    """Return the payloads of an `Increment.region`, by piece."""
    data = np.frombuffer(region, np.uint8)
    return {
        piece: Coded(codec, nbytes, data[begin : begin + nbytes])
        for piece, codec, begin, nbytes in places
    }


def _codecs(pieces: Pieces, choice: CodecChoice) -> list[Codec | None]:
    """Return the codec of each piece: the same for all pieces of a tensor, or None."""
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
    """Add an increment to the parts of an answer, and its payload, if it is here, to ``coded``."""
    if step.payload is not None:
        coded[len(parts)] = step.payload
    parts.append(Part(*range, step.codec, step.nbytes, version))


def _joined(before: list[Part], parts: list[Part]) -> list[Part]:
    """Return the parts to append to ``before``; one that continues its last is joined to it."""
    if before and len(parts) == 1:
        last, part = before[-1], parts[0]
        nbytes = last.nbytes + part.nbytes
        fits = (last.stop, last.codec, last.version) == (part.start, part.codec, part.version)
        if fits and nbytes <= MAX_PART:
            before.pop()
            return [Part(last.start, part.stop, last.codec, nbytes, part.version)]
    return parts
