"""The parameters of one model: versions, optimiser state, and the updates that change them.

A reader holds a `Lease` on one `Version` and so sees exactly that version without a copy. The next
version is computed in place if the current one has no lease, otherwise into a spare arena
(`aiops.store.snapshots`). `Store.begin` returns the target of an update, `Store.commit` publishes
it.

In relaxed mode leases are not counted and every update is in place: a reply may then mix versions,
as in ElasticDL's asynchronous design (lock-free reads).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from functools import partial

import numpy as np

from aiops import kernels
from aiops.errors import UsageError
from aiops.kernels.parallel import LARGE
from aiops.kernels.rule import Rule
from aiops.kernels.trimmed_mean import NO_TRIM, Trim
from aiops.model.arena import Arena
from aiops.model.layout import Array, Bytes, Cover, Ints, Layout
from aiops.store.backends import ComputeBackend, HostBackend
from aiops.store.finite_guard import LIMIT, FiniteGuard, refusal
from aiops.store.gradient import Gradient
from aiops.store.resources import Resources
from aiops.store.snapshots import Lease, SnapshotPool, Version
from aiops.store.updater import NONE, Update, Updater

_F4 = np.dtype("<f4")
_LARGEST = {
    "float64": (1e300, 1e300),
    "float32": (1e38, 1e38),
    "bfloat16": (1e38, 1e38),
    "float16": (65_000.0, 1e38),  # its masters and state are float32
}
"""By dtype, the largest magnitude of parameters and of state for which a proof is sought."""


class UpdateRound(StrEnum):
    """The part of an update that a job carries out.

    ``ALONE`` is all of it, on a server that holds all of the model: the step, unless the result
    would not be finite. Several servers take several rounds (`aiops.shards.updating`), each of them
    on all or some: they ``MEASURE`` the gradient's squares, for its norm; ``REHEARSE`` the step,
    which changes nothing; and take the ``STEP``, whose result is known to be finite on all.
    """

    ALONE = "alone"
    MEASURE = "measure"
    REHEARSE = "rehearse"
    STEP = "step"


_BEFORE = (UpdateRound.MEASURE, UpdateRound.REHEARSE)
"""The rounds before a step, which change nothing but the sum in progress."""


@dataclass(slots=True)
class UpdateJob(Update):
    """One update of a store, fixed when it is issued; `run` may be called on another thread.

    It first adds the gradient to the accumulator if it has ``weights``, and then takes a step if it
    has a ``target``.

    Attributes
    ----------
    store
        Its current version stays the same until the job is done.
    cost
        Bytes read and written, at most.
    target
        The version that the step makes, as `Store.begin` returned it; None: it takes no step.
    pushed
        int64, the tensors that the gradient covers, on whichever shard.
    begins_sum
        Whether the gradient is the first of a sum: what the accumulator has is dropped.
    round
        The part of the update that it carries out.
    """

    store: Store
    cost: int
    target: Version | None = None
    pushed: Ints = field(default_factory=NONE.copy)
    begins_sum: bool = False
    round: UpdateRound = UpdateRound.ALONE

    def run(self) -> Ints:
        """Run the update; return the statistic's fixed-point sums of the tensors of the step.

        If a result is not finite, nothing is changed but the sum in progress, which is dropped, and
        it returns a `refusal`. A round of measuring returns the sum of squares of each group of
        `Update.clip`, float64 as their bits. A rehearsal returns the first tensor of those held
        here whose result would not be finite, or −1.
        """
        store, gradient, target, round = self.store, self.gradient, self.target, self.round
        updater = store.updater
        direct = gradient is not None and self.weights is None
        finite = target is None or round is not UpdateRound.ALONE
        if direct and not finite:
            proven = self.sent is None and store.guard.covers(self.steps, self.scalars, LIMIT)
            finite = proven or store.is_finite(self)
        if gradient is not None:
            looks = round in _BEFORE
            alone = direct and finite and self.clip is None and not looks
            if (
                (alone and gradient.cover.whole and not gradient.parts and store.whole_at_once)
                and (target is not None and self.sent is None)
                and (self.factor == 1.0 and self.scales is None)
            ):
                # The usual case: what the rest does for it, with fewer calls.
                data = gradient.data
                sections = list[Array]()
                for s in updater.layout.sections:
                    sections.append(data[s.start : s.stop].view(s.dtype))
                return updater.whole(store.current, target, sections, self.steps, self.scalars)
            self.gradient = gradient = updater.prepared(gradient, alone=alone)
        if self.begins_sum:
            updater.drop_sum()
        if gradient is not None and self.weights is not None:
            mine = self.weights[: len(gradient.cover.tensors)]
            updater.accumulator.fold(gradient, mine)
        if not direct and (target is not None or round in _BEFORE):
            updater.direct_sum()
        if round is UpdateRound.MEASURE:
            return np.array(store.squares(self)).view(np.int64)
        if round is UpdateRound.REHEARSE:
            return np.array([store.rehearse(self)])
        if target is None:
            return NONE
        return store.step(self, target, finite=finite or (not direct and store.is_finite(self)))


@dataclass(slots=True)
class MeasureJob:
    """Decode a gradient and measure it, and change nothing; `run` as for `UpdateJob`.

    Of a gradient on several servers each measures its part (`aiops.shards.measuring`).

    Attributes
    ----------
    measure
        Takes the gradient's bytes and its cover, and returns values of it.
    largest
        The gradient's largest magnitude, if that is known.
    params
        Takes the bytes of the current version, and returns values of it; None: none are wanted.
    """

    store: Store
    gradient: Gradient
    measure: Callable[[Bytes, Cover], Array]
    largest: float | None = None
    params: Callable[[Bytes], Array] | None = None

    @property
    def cost(self) -> int:
        """Bytes read."""
        return 0 if self.largest is not None else len(self.gradient.data)

    def run(self) -> Ints:
        """Return the largest magnitude, and then the values, float64 as their bits."""
        store = self.store
        dense = store.updater.compute.decoded(self.gradient)
        largest = store.updater.magnitude(dense) if self.largest is None else self.largest
        found = [np.array([largest]), self.measure(dense.data, dense.cover)]
        if self.params is not None:
            found.append(self.params(store.current.arena.data))
        return np.concatenate(found).view(np.int64)


class Store:
    """The versions of one model, its optimiser state, and the kernels that update them.

    Parameters
    ----------
    layout
        The tensors.
    rule
        The mathematics of an update.
    backend
        ``"auto"``, ``"numba"`` or ``"numpy"``.
    live
        Bound on the versions that are sent at once; beyond it the slowest readers are cut off.
    relaxed
        True if reads may mix versions.
    arena
        The initial parameters (may also be given by `set`).
    machine
        Makes the arenas of further versions, runs and shares updates, and measures them.
    held
        The pieces of the model that are held here, if other shards hold the rest: the first of its
        tensors, of which the last may be cut. Versions and sums are those of the whole model.
    trim, momentum
        As of `Updater`.

    Attributes
    ----------
    current
        The newest version.
    sums
        int64[tensors], the statistic v summed over each tensor, in units of `STATISTIC_SCALE`.
    total
        The sum of those.
    cost
        Bytes that an update reads and writes, at most.
    guard
        Proves that updates have finite results.
    snapshots
        The versions that are alive.
    units
        float64[tensors], the units of `sums` in a tensor's mean of 1.
    requested
        The backend as given.
    whole_at_once
        True if an update of all tensors is one call of a kernel per section, on one thread.
    """

    # Those that compiled code reads: `aiops.compiled`.
    __slots__ = (
        *("__dict__", "__weakref__", "_leased", "_making", "busy", "current", "sums", "total"),
    )

    def __init__(
        self,
        layout: Layout,
        rule: Rule,
        *,
        backend: str = "auto",
        live: int = 8,
        relaxed: bool = False,
        arena: Arena | None = None,
        machine: Resources | None = None,
        held: Layout | None = None,
        trim: Trim = NO_TRIM,
        momentum: float | None = None,
    ) -> None:
        machine = machine or Resources()
        self.layout, self.rule, self.relaxed = layout, rule, relaxed
        self.held = held = layout if held is None else held
        device = machine.device
        compute: ComputeBackend = HostBackend(held, backend, machine)
        if device is not None:
            from aiops.store.cuda_backend import CudaBackend

            compute = CudaBackend(device, held, backend, machine)
        self.updater = Updater(held, rule, compute, trim, momentum)
        levels = np.zeros(len(layout.tensors), np.int64)
        self.current = Version(0, arena or Arena(held), levels, 0, layout=layout)
        self.snapshots = SnapshotPool(self.current, live, machine.memory)
        self._remote = device is not None
        if arena is not None:
            self.updater.load(arena)
        self._cut_to_held: tuple[Array, Array | None, Array, Array | None] | None = None
        self.requested = backend
        self._read = -1  # the version that was leased last
        self._read_soon = False  # the version in the making will be read before long
        ends = [_LARGEST[section.dtype.name] for section in held.sections]
        self.guard = FiniteGuard(rule, ends)
        self.cost = held.nbytes * (3 + len(rule.state))
        self.whole_at_once = device is None and held is layout and held.nbytes < LARGE
        self.busy = False  # the current version is being overwritten in place
        self._making = False  # a version is being made, in place or not
        self._leased = False  # the current version was found leased by `freeze`
        self.sums = self._first_sums()
        self.units = kernels.STATISTIC_SCALE * np.maximum(layout.sizes, 1)  # of a tensor's mean
        self.total = int(self.sums.sum())
        self._parameters = max(layout.parameters, 1)

    # ------------------------------------------------------------ reading

    @property
    def version(self) -> int:
        """The number of updates applied so far (the papers' timestamp)."""
        return self.current.number

    @property
    def readable(self) -> bool:
        """True if the current version may be read now."""
        return self.relaxed or not self.busy

    @property
    def alive(self) -> int:
        """The number of versions alive."""
        return self.snapshots.alive

    @property
    def spare(self) -> int:
        """The number of arenas kept for versions to come."""
        return self.snapshots.spare

    @property
    def cut(self) -> int:
        """The number of slow readers that were cut off."""
        return self.snapshots.cut

    @property
    def backend(self) -> str:
        """The kernels in use: ``"numba"``, ``"numpy"`` or ``"cuda"``."""
        return self.updater.compute.backend

    @property
    def state(self) -> list[tuple[Array, ...]]:
        """The optimiser's arrays by section, to be read."""
        on_host = self.updater.compute.on_host
        return [tuple(on_host(array) for array in arrays) for arrays in self.updater.state]

    @property
    def masters(self) -> list[Array | None]:
        """The float32 masters by section, to be read; None for sections without."""
        on_host = self.updater.compute.on_host
        return [None if array is None else on_host(array) for array in self.updater.masters]

    def lease(self) -> Lease:
        """Return a lease on the current version; in relaxed mode it holds nothing."""
        assert self.relaxed or not self.busy, "the current version is being overwritten"
        self._read = self.current.number
        return Lease(self.current, None if self.relaxed else self.snapshots)

    def lease_of(self, version: Version) -> Lease:
        """Return a lease on a version that is alive."""
        return self.snapshots.lease_of(version)

    def freeze(self, leased: bool | None = None) -> bool:
        """Fix whether the current version has readers, until there is a newer one.

        Leases may end at any time, on any thread. An update that is begun while this is fixed as
        True is not done in place, even if the last lease has ended since.

        Parameters
        ----------
        leased
            What was recorded; None: find it now.

        Returns
        -------
        bool
            What is fixed. False while a version is being made: the next one is made of that.
        """
        if leased is None:
            leased = not self._making and self.snapshots.leased
        self._leased = leased
        return leased

    # ------------------------------------------------------------ writing

    def restore(self, current: Version, older: Sequence[Version]) -> None:
        """Continue with these versions.

        ``current`` has the arena that the store was made with; ``older`` as for
        `SnapshotPool.restore`. The optimiser's state is not among them (`Updater.restore`).
        """
        self.snapshots.restore(current, older)
        self.current = current

    def restore_sums(self, sums: Ints) -> None:
        """Continue with these sums of the statistic, int64[tensors]."""
        self.sums = sums.copy()
        self.total = int(sums.sum())

    def set(self, arrays: Mapping[str, Array]) -> None:
        """Fill the current version with these arrays and make the masters follow.

        Raises
        ------
        UsageError
            When a tensor is missing, unknown, or of another shape or dtype.
        """
        difference = self.layout.difference(Layout.of(arrays))
        if difference:
            raise UsageError(f"these parameters do not fit the model: {difference}")
        for name, view in self.current.arena.views.items():
            np.copyto(view, arrays[name])
        self.updater.load(self.current.arena)

    def read_packed(self, codecs: Iterable[str]) -> None:
        """Have updates read payloads in these codecs directly, where there is a kernel for it."""
        self.updater.read_packed(codecs)

    def warm(self) -> None:
        """Compile the kernels now, so that the first push need not wait for it."""
        for step in self.warming():
            step()

    def warming(self) -> list[Callable[[], object]]:
        """Return the calls that `warm` makes, in order."""
        dtypes = dict.fromkeys(section.dtype.name for section in self.held.sections)
        surveys = [partial(kernels.warm_survey, name, self.requested) for name in dtypes]
        return [*surveys, *self.updater.warming()]

    def begin(self, spare: bool = False) -> Version:
        """Return where the next version is to be written: in place, or in a spare arena.

        ``spare``: not in place, even if the current version has no lease here.
        """
        assert not self.busy, "one update at a time"
        self._read_soon = self.relaxed or self._read == self.current.number
        if self.relaxed:
            self.busy = True
            return self.current
        target = self.snapshots.target(spare or self._leased)
        self.busy, self._making = target is self.current, True
        if not self.busy and self.current.fill is not None:  # on a device: its leases outlast it
            self.current.arena  # noqa: B018
        return target

    def commit(self, target: Version, touched: Ints, sums: Ints) -> None:
        """Publish what was written: ``touched`` tensors have one more update."""
        self.busy = self._making = False
        if self._remote:
            target.fill = self.updater.compute.pending_copy(target)
        target.advance(self.current.number + 1, touched)
        if target is not self.current:
            self.snapshots.publish(target)
            self.current, self._leased = target, False
        if self.rule.statistic is not None:
            if touched is self.layout.all:
                self.sums = sums
            else:
                self.sums[touched] = sums
            self.total = int(np.add.reduce(self.sums))

    def update(self, gradient: Sequence[Array], steps: Array, scalars: Array | None) -> Ints:
        """Take a step of all tensors on the calling thread, and publish the new version.

        Only for a model that is held whole, on the host, and a rule without `Rule.reads`.

        Parameters
        ----------
        gradient
            The gradient of each section, as one flat array.
        steps
            float64[tensors], the learning rate of each.
        scalars
            float64[tensors, the rule's scalars], None without any.

        Returns
        -------
        Ints
            As `step` does.
        """
        base = self.current
        target = self.snapshots.target(self._leased)
        self.busy = target is base
        sums = self.updater.whole(base, target, gradient, steps, scalars)
        self.commit(target, self.layout.all, sums)
        return sums

    def abandon(self, target: Version) -> None:
        """Publish nothing: the update that `begin` returned this target for was refused."""
        self.busy = self._making = False
        self.snapshots.abandon(target)

    def step(self, job: UpdateJob, target: Version, *, finite: bool) -> Ints:
        """Run the rule for a job and write the new version (on any thread; one at a time).

        ``finite``: the results are proven to be finite (`is_finite`).
        """
        if self.held is not self.layout:
            job = self._of_held(job)
        if not finite:
            bad = self.updater.rehearse(job, self.current, target)
            if bad is not None:
                self.updater.drop_sum()
                return refusal(bad)
        return self.updater.step(job, self.current, target, self._read_soon)

    def rehearse(self, job: UpdateJob) -> int:
        """Return the first tensor, of those held here, whose result would not be finite, or −1.

        A new proof is sought, and changes nothing else.
        """
        if self.held is not self.layout:
            job = self._of_held(job)
        self.guard.forget()
        if self.is_finite(job):
            return -1
        bad = self.updater.rehearse(job, self.current, self.current)
        return -1 if bad is None else bad

    def is_finite(self, job: UpdateJob) -> bool:
        """Return whether a job's results are proven to be finite; a new proof may be sought."""
        guard, sent = self.guard, job.sent
        known = sent is None or sent in self.snapshots
        largest = self._magnitude(job, exact=guard.narrow)
        if known and guard.covers(job.steps, job.scalars, largest):
            return True
        others = [] if not self.rule.reads else [*self.snapshots.versions, *filter(None, [sent])]
        guard.renew(
            partial(self.updater.intervals, self.current, others),
            *(job.steps, job.scalars),
            partial(self._magnitude, job, exact=True),
        )
        return guard.covers(job.steps, job.scalars, self._magnitude(job, exact=guard.narrow))

    def _magnitude(self, job: UpdateJob, *, exact: bool) -> float:
        """Return the largest magnitude of a job's gradient, or a bound of it."""
        gradient, factor = job.gradient if job.weights is None else None, job.largest_factor()
        if gradient is None:
            found = self.updater.sum_bound
            if exact or found * factor > LIMIT:  # no proof would be for that
                found = self.updater.magnitude(None)
        else:
            raw = exact and not gradient.parts
            found = self.updater.magnitude(gradient) if raw else LIMIT
        return found * factor

    def squares(self, job: UpdateJob) -> list[float]:
        """Return the sums of squares of a job's groups, of the tensors held here.

        The job's factor is not included.
        """
        if self.held is not self.layout:
            job = self._of_held(job)
        assert job.clip is not None, "a job without limits is not measured"
        return self.updater.squares(job, job.clip)

    def _of_held(self, job: UpdateJob) -> UpdateJob:
        """Return a job cut to the tensors held here, the first ones of the model."""
        count = int(np.searchsorted(job.touched, len(self.held.tensors)))
        whole = count == len(self.held.tensors)
        known = self._cut_to_held
        if known is None or known[0] is not job.steps or known[1] is not job.scalars:
            scalars = None if job.scalars is None else job.scalars[:count]
            known = self._cut_to_held = (job.steps, job.scalars, job.steps[:count], scalars)
        touched = self.held.all if whole else job.touched[:count]
        cut = replace(job, touched=touched, steps=known[2], scalars=known[3])
        cut.scales = None if job.scales is None else job.scales[:count]
        cut.clip = None if job.clip is None else job.clip.of(slice(count))
        return cut

    # ------------------------------------------------------------ the statistic

    def statistic(self) -> tuple[float | None, bytes]:
        """Return `vbar` and `vbars`: the statistic's mean over the model, and per tensor."""
        if self.rule.statistic is None:
            return None, b""
        vbar = self.total / kernels.STATISTIC_SCALE / self._parameters
        return vbar, (self.sums / self.units).astype(_F4).tobytes()

    def vbar(self) -> float | None:
        """Return the mean of the rule's statistic over all parameters, or None without one."""
        if self.rule.statistic is None:
            return None
        return self.total / kernels.STATISTIC_SCALE / self._parameters

    def vbars(self) -> bytes:
        """Return the statistic's mean per tensor, float32 little endian (empty without one)."""
        if self.rule.statistic is None:
            return b""
        return (self.sums / self.units).astype(_F4).tobytes()

    def _first_sums(self) -> Ints:
        if self.rule.statistic is None:
            return np.zeros(len(self.layout.tensors), np.int64)
        first = self.rule.state[self.rule.statistic]
        each = int(min(first * kernels.STATISTIC_SCALE, kernels.STATISTIC_CAP))
        return self.layout.sizes * each
