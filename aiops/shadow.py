"""The parameters as clients of coded fetches hold them: one shadow for all, S ← S + C(θ − S).

What a codec leaves out of one increment is in the next difference, so that the shadow follows the
parameters whatever the codec (error feedback comes by itself), and because all clients hold some
version of the same shadow, nothing is kept per client: who holds S at model version h is sent the
increments since h, or the tensor itself where that is shorter. The increments kept are never longer
than the model, nor so many that an answer could have more parts than a message may.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from aiops.arena import Arena
from aiops.codecs import Encoder, NotFinite, raw
from aiops.codecs.choice import Choice
from aiops.layout import MAX_PART, MAX_TENSORS, Array, Bytes, Ints, split
from aiops.messages import Part, Parts
from aiops.versions import Lease, Shelf, Version, Wanted

_MOST = 256
"""Increments kept: who is further behind fetches so seldom that raw tensors are no burden."""

_DESCRIBED = 32
"""Bytes that a part takes beside its payload, roughly: its row in the header, and a prefix."""


@dataclass(frozen=True, slots=True)
class Increment:
    """One step of the shadow: to which model version it leads, and each coded tensor's payload."""

    number: int
    payloads: Mapping[int, tuple[str, Bytes]]
    nbytes: int


class Shadow:
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
        At most so many of its versions are alive (`aiops.versions.Shelf`).
    """

    def __init__(
        self, current: Version, choice: Choice, backend: str = "auto", lag: int = 0, live: int = 4
    ) -> None:
        layout = current.arena.layout
        self.layout, self._lag = layout, lag
        arena = Arena(layout)
        arena.data[:] = current.arena.data
        first = Version(
            current.number, arena, current.tensor_versions, current.level, current.changed.copy()
        )
        self._shelf = Shelf(first, live)
        self._encoders: dict[int, Encoder] = {}
        for index, tensor in enumerate(layout.tensors):
            codec = choice.codec(tensor)
            if codec is not None and tensor.dtype == np.float32:
                encoder = codec.encoder(tensor.shape, feedback=False, backend=backend)
                self._encoders[index] = encoder
        self._backend = backend
        self._differences = np.empty(
            max((layout.tensors[index].nbytes // 4 for index in self._encoders), default=0),
            np.float32,
        )
        self._increments: deque[Increment] = deque()
        self._kept = 0  # bytes of them
        # The versions that S has had, from the first whose increments since are all there; and for
        # each tensor the one since which it has only been incremented.
        self._points: dict[int, None] = {first.number: None}  # a set in order
        self._most = max(1, min(_MOST, MAX_TENSORS // max(1, len(layout.tensors))))
        self._since: Ints = np.full(len(layout.tensors), first.number, np.int64)
        self._behind = np.zeros(len(layout.tensors), bool)  # where it is not what it follows
        self._gap = 1.0  # model versions between two fetches of a worker, a moving average

    # ------------------------------------------------------------ reading

    @property
    def current(self) -> Version:
        """The newest version of the shadow; its number is that of the model that it follows."""
        return self._shelf.current

    @property
    def copies(self) -> int:
        """How many slow readers were given a copy."""
        return self._shelf.copies

    @property
    def lag(self) -> int:
        """How many versions it may be behind."""
        return self._lag or max(1, round(self._gap / 2))

    def lease(self) -> Lease:
        """Take hold of its newest version."""
        return self._shelf.lease()

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
            tensor, version = self.layout.tensors[index], int(current.tensor_versions[index])
            start, stop = tensor.offset, tensor.offset + tensor.nbytes
            if steps is None:
                parts += _joined(parts, split(start, stop, raw.NAME, version))
                continue
            for name, payload in steps:
                coded[len(parts)] = payload
                parts.append(Part(start, stop, name, len(payload), version))
        return tuple(parts), self._shelf.lease(coded) if parts else None

    def _steps(self, index: int, have: int) -> list[tuple[str, Bytes]] | None:
        """Return a tensor's increments since a version; None: it is shorter, or needed, whole."""
        if have < self._since[index] or index not in self._encoders:
            return None
        found, nbytes = [], 0
        for increment in reversed(self._increments):
            if increment.number <= have:
                break
            payload = increment.payloads.get(index)
            if payload is not None:
                found.append(payload)
                nbytes += len(payload[1]) + _DESCRIBED
        if nbytes >= self.layout.tensors[index].nbytes:
            return None
        return found[::-1]

    # ------------------------------------------------------------ following the model

    def follow(self, model: Version) -> ShadowJob:
        """Return the work that brings the shadow up to a version of the model.

        The model may not change while it is done, and nobody may read the shadow.
        """
        behind = np.flatnonzero(self._behind | (model.changed > self.current.number))
        return ShadowJob(self, model, self._shelf.target(), behind)

    def followed(self, job: ShadowJob) -> None:
        """Publish what the work has done."""
        target, model = job.target, job.model
        target.follow(model, job.tensors)
        self._shelf.publish(target)
        self._behind = job.behind
        whole = [index for index in job.tensors.tolist() if index not in job.payloads]
        self._since[whole] = model.number
        nbytes = sum(len(payload) for _name, payload in job.payloads.values())
        self._increments.append(Increment(model.number, job.payloads, nbytes))
        self._points[model.number] = None
        self._kept += nbytes
        while self._kept > self.layout.nbytes or len(self._increments) > self._most:
            self._kept -= self._increments.popleft().nbytes
            del self._points[next(iter(self._points))]

    def encode(self, job: ShadowJob) -> None:
        """Do the work (on any thread): encode the differences, and add what they decode to."""
        base, target = self.current.arena, job.target.arena
        if target is not base:
            target.data[:] = base.data
        for index in job.tensors.tolist():
            name = self.layout.tensors[index].name
            shadow, model = target.views[name].reshape(-1), job.model.arena.views[name].reshape(-1)
            payload = self._encoded(index, model, shadow)
            if payload is None:
                shadow[:] = model
            else:
                job.payloads[index] = payload
            job.behind[index] = payload is not None and not np.array_equal(shadow, model)

    def _encoded(self, index: int, model: Array, shadow: Array) -> tuple[str, Bytes] | None:
        encoder = self._encoders.get(index)
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
        codec.decode(payload, encoder.shape, shadow, add=True, backend=self._backend)
        return codec.name, payload

    def report(self) -> dict[str, int | float]:
        """Return its line of the statistics."""
        return {
            "version": self.current.number,
            "lag": self.lag,
            "increments": len(self._increments),
            "increment_bytes": self._kept,
        }


class ShadowJob:
    """The shadow's work, which takes its turn among the updates."""

    def __init__(self, shadow: Shadow, model: Version, target: Version, tensors: Ints) -> None:
        self._shadow = shadow
        self.model, self.target, self.tensors = model, target, tensors
        self.payloads: dict[int, tuple[str, Bytes]] = {}
        self.behind = np.zeros(len(shadow.layout.tensors), bool)

    @property
    def cost(self) -> int:
        """Bytes read and written, roughly."""
        return 4 * self._shadow.layout.nbytes

    def run(self) -> Ints:
        """Do it; there are no numbers to return."""
        self._shadow.encode(self)
        return np.empty(0, np.int64)


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
