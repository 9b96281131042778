"""Measure a push on the servers that have its portions, for the filters of their lead.

Filters look at some values of a gradient, and of the version that it meets
(`aiops.filters.sample`). Each server reads those in its part of the model, and the lead joins them
in the order of the servers: they are to the bit what one server reads, so its filters decide the
same.

A follower reads a portion when it has come, and a version when it is computed, and says so in the
reports that it sends in any case. What these lack the lead asks for before it decides, which takes
a round trip: the values at other positions, once those have been drawn; a portion that came coded;
what was told to an earlier start of the lead.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from aiops.filters.arithmetic import Values
from aiops.filters.sample import Sample, SampleReader, seed_number
from aiops.filters.screen import FIRST_SEED, PushScreen
from aiops.model.arena import aligned
from aiops.model.layout import Ints, Layout
from aiops.model.placement import Placement, empty_cover
from aiops.shards.gathering import Gathering
from aiops.shards.reports import check_largest, check_read_gradient, check_read_params
from aiops.store.gradient import Gradient
from aiops.store.parameters import MeasureJob, Store
from aiops.store.snapshots import Version

PLAN = "sampled"
"""The key of `LoadShard.plan`: whether the lead's filters look at values of the parameters, beside
those of gradients; absent: it has no filters."""

SAMPLE = "sample"
"""The key of work in `RunUpdate`: the seed of the positions at which to read a portion."""

PARAMS = "params"
"""The key there for reading the version, too."""

SAMPLES = 16 << 20
"""Bytes of what followers have read of pushes that is kept. The rest the lead asks for again."""

_SAMPLE = 512
"""Those of the objects that hold what one follower has read of one push."""


class Measuring:
    """Joins what the servers have measured, for the filters of their lead.

    Parameters
    ----------
    placement
        The model's.
    gathering
        Of the pushes whose portions are arriving.
    screen
        The lead's filters, which say where values are read; None: it has none.

    Attributes
    ----------
    kept
        Bytes of what has been read of pushes, at most `SAMPLES`.
    """

    def __init__(
        self, placement: Placement, gathering: Gathering, screen: PushScreen | None
    ) -> None:
        self._placement, self._gathering, self._screen = placement, gathering, screen
        self._seed, self._counts = b"", list[int]()  # of the positions on each shard
        self._versions: dict[int, tuple[int, bytes]] = {}  # by shard: number, and values
        self._samples: dict[int, dict[int, bytes]] = {}  # values, by the push's number and shard
        self.kept = 0
        self._follow()

    def _follow(self) -> None:
        """Have the screen's positions; values at others are of no use any more."""
        if self._screen is None or self._screen.seed == self._seed:
            return
        sample, self._seed = self._screen.sample, self._screen.seed
        self._counts = [sample.of(layout).size for layout in self._placement.layouts]
        self._versions.clear()
        self._samples.clear()
        self.kept = 0

    def arrived(self, number: int, shard: int, seed: bytes, values: bytes) -> None:
        """Keep what a follower has read of a portion that is awaited, if it is of use.

        Raises
        ------
        RemoteProtocolError
            When the values make no sense.
        """
        read = self._values(shard, seed, values)
        if read is None:
            return
        check_read_gradient(read, shard)
        room = self.kept + len(values) + _SAMPLE <= SAMPLES
        if room and self._gathering.awaits(number, shard):
            self._samples.setdefault(number, {})[shard] = values
            self.kept += len(values) + _SAMPLE

    def finished(self, number: int) -> None:
        """Drop what was read of a push: the filters have seen it, or will not."""
        for values in self._samples.pop(number, {}).values():
            self.kept -= len(values) + _SAMPLE

    def computed(self, shard: int, version: int, seed: bytes, values: bytes) -> None:
        """Take what a follower has read of a version that it has computed.

        Raises
        ------
        RemoteProtocolError
            When the values make no sense.
        """
        read = self._values(shard, seed, values)
        if read is not None:
            check_read_params(read, shard)
            self._versions[shard] = version, values

    def known(self, job: MeasureJob) -> dict[int, Ints]:
        """Return what followers have measured already, by shard, as `MeasureJob.run` returns it."""
        self._follow()
        found = {}
        for shard in self._placement.used[1:]:
            numbers = self._gradient(job, shard)
            if numbers is not None and job.params is not None:
                params = self._version(job, shard)
                numbers = None if params is None else np.concatenate([numbers, params])
            if numbers is not None:
                found[shard] = numbers.view(np.int64)
        return found

    def work(self, job: MeasureJob, shard: int) -> tuple[int, dict[str, Any]]:
        """Return what a follower is asked: the number of the push (0: none), and the work."""
        has = shard in self._gathering.portions(job.gradient.number)
        return job.gradient.number * has, {SAMPLE: self._seed, PARAMS: job.params is not None}

    def length(self, job: MeasureJob, shard: int) -> int:
        """Return how many numbers a follower that is asked answers."""
        return 1 + self._counts[shard] * (1 if job.params is None else 2)

    def check(self, sums: Ints, shard: int) -> None:
        """Check a follower's answer.

        Raises
        ------
        RemoteProtocolError
            When the values make no sense.
        """
        gradient, params = np.split(sums.view(np.float64), [1 + self._counts[shard]])
        check_largest(float(gradient[0]), shard)
        check_read_gradient(gradient[1:], shard)
        check_read_params(params, shard)

    def joined(self, job: MeasureJob, sums: Sequence[Ints]) -> Ints:
        """Return the numbers of the whole model from those of all shards, in their order."""
        used = [
            (sums[shard].view(np.float64), self._counts[shard]) for shard in self._placement.used
        ]
        largest = max(float(numbers[0]) for numbers, _count in used)
        gradient = [numbers[1 : 1 + count] for numbers, count in used]
        params = [numbers[1 + count :] for numbers, count in used]
        return np.concatenate([[largest], *gradient, *params]).view(np.int64)

    def _gradient(self, job: MeasureJob, shard: int) -> Values | None:
        """Return a portion's largest magnitude and its values; None: they are not known."""
        number = job.gradient.number
        if shard not in self._gathering.portions(number):
            return np.zeros(1 + self._counts[shard])
        largest = self._gathering.largest(number).get(shard)
        values = self._values(shard, self._seed, self._samples.get(number, {}).get(shard, b""))
        return None if values is None or largest is None else np.append(largest, values)

    def _version(self, job: MeasureJob, shard: int) -> Values | None:
        """Return the values of the current version; None: they are not known."""
        number, read = self._versions.get(shard, (-1, b""))
        return self._values(shard, self._seed, read) if number == job.store.version else None

    def _values(self, shard: int, seed: bytes, read: bytes) -> Values | None:
        if not self._seed or seed != self._seed or len(read) != 8 * self._counts[shard]:
            return None
        return np.frombuffer(read, "<f8").astype(np.float64)


class PartSampler:
    """Reads what the lead's filters look at, in a follower's part of the model.

    Parameters
    ----------
    whole, held
        The model, and the pieces that are here.
    compares
        Whether the filters look at values of the parameters, too.

    Raises
    ------
    ValueError
        When that is neither true nor false.
    """

    def __init__(self, whole: Layout, held: Layout, compares: object) -> None:
        if not isinstance(compares, bool):
            raise ValueError(f"load_shard.plan.{PLAN}: true or false was expected")
        self._whole, self._held, self._compares = whole, held, compares
        self._seed, self._reader = FIRST_SEED, self._reads(FIRST_SEED)

    def _reads(self, seed: bytes) -> SampleReader:
        return Sample(self._whole, seed_number(seed)).of(self._held)

    def of_portion(self, gradient: Gradient) -> tuple[bytes, bytes]:
        """Return the seed, and the values of a portion; nothing if it is coded."""
        if gradient.parts:
            return b"", b""
        return self._seed, _packed(self._reader.of_gradient(gradient.data, gradient.cover))

    def of_version(self, version: Version) -> tuple[bytes, bytes]:
        """Return the seed, and the values of a version; nothing if they are not of use."""
        if not self._compares or self._seed == FIRST_SEED:
            return b"", b""
        return self._seed, _packed(self._reader.read(version.arena.data))

    def job(
        self,
        store: Store,
        work: Mapping[str, Any],
        gradient: Gradient | None,
        largest: float | None,
    ) -> MeasureJob:
        """Return the job that a lead asks for; from here on the positions are those of its seed.

        Parameters
        ----------
        store, gradient
            The shard's, and the portion; None: the push has none here.
        work
            As `Measuring.work` returned it.
        largest
            The portion's largest magnitude, if it is known.

        Raises
        ------
        ValueError
            When the work makes no sense.
        """
        seed, reads = work[SAMPLE], work.get(PARAMS, False)
        if not isinstance(seed, bytes) or len(seed) != len(FIRST_SEED) or type(reads) is not bool:
            raise ValueError("run_update.work.sample: a seed of 8 bytes was expected")
        if seed != self._seed:
            self._seed, self._reader = seed, self._reads(seed)
        if gradient is None:
            gradient, largest = Gradient(aligned(0), empty_cover()), 0.0
        reader = self._reader
        params = reader.read if reads else None
        return MeasureJob(store, gradient, reader.of_gradient, largest, params)


def _packed(values: Values) -> bytes:
    return values.astype("<f8").tobytes()
