"""The parameters: one arena per live version, and versions are leases.

A reader holds a `Lease` on one `Version` and so sees exactly that version, whatever happens
meanwhile, without a copy. The next version is computed **in place when nobody holds the current
one, otherwise out of place into a spare arena**: the copy, when one is needed, is the update's own
write. `Store.begin` decides which, `Store.commit` publishes.

In relaxed mode readers hold nothing and every update is in place: a reply may then mix versions,
as in ElasticDL's asynchronous design (lock-free reads), for those who want that.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

import numpy as np

from aiops import kernels
from aiops.arena import Arena, aligned
from aiops.errors import UsageError
from aiops.gradients import (
    Accumulator,
    Gradient,
    Group,
    groups,
    rows_in,
    section_size,
    spans_of,
)
from aiops.kernels.rule import Rule
from aiops.kernels.sharing import update
from aiops.layout import Array, Bytes, Ints, Layout, compute_dtype
from aiops.machine import Machine
from aiops.versions import Lease, Shelf, Version

_F4 = np.dtype("<f4")
_NONE = np.empty(0, np.int64)


@dataclass(slots=True)
class Job:
    """One kernel's work, fixed when it is issued; `run` may be called on another thread.

    With ``weights`` it first adds ``weights[t] · g`` to the accumulator. With a ``target`` it then
    takes a step, with the accumulator (or the gradient itself, when there are no weights) times
    ``factor``, at the learning rate ``steps[t]`` for tensor t. ``scalars`` are the rule's, one row
    per tensor; ``sent`` is what it reads beside the parameters: the version that the gradient's
    worker was sent. A gradient whose norm is more than ``clip`` (if not 0) is scaled down to it.
    ``pushed`` are the tensors that the gradient covers, on whichever shard. With ``measure`` it
    adds as above and takes no step, but returns the sum of squares that the norm is of.
    """

    store: Store
    gradient: Gradient | None
    weights: Array | None = None  # [covered tensors]
    factor: float = 1.0
    clip: float = 0.0
    steps: Array | None = None  # [touched tensors]
    scalars: Array | None = None  # [touched tensors, the rule's scalars]
    sent: Version | None = None
    base: Version | None = None
    target: Version | None = None
    touched: Ints = field(default_factory=lambda: _NONE)
    pushed: Ints = field(default_factory=lambda: _NONE)
    measure: bool = False

    @property
    def cost(self) -> int:
        """Bytes read and written, at most."""
        return self.store.cost

    def _packed(self) -> bool:
        """Say whether the update can read the gradient as it came."""
        return self.weights is None and not self.clip and self.store.reads_packed

    def run(self) -> Ints:
        """Do it; return the statistic's fixed-point sums of the tensors of the step."""
        if self.gradient is not None and self.gradient.parts and not self._packed():
            self.gradient = self.store.dense(self.gradient)
        if self.gradient is not None and self.weights is not None:
            mine = self.weights[: len(self.gradient.cover.tensors)]
            self.store.accumulator.fold(self.gradient, mine)
        if self.measure:
            return np.array([self.store.squares(self)]).view(np.int64)
        return _NONE if self.target is None else self.store.step(self)


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
        At most so many versions are alive at once; beyond it the readers of the oldest are given
        a copy of what they have not sent yet (counted in `copies`).
    relaxed
        Whether reads may mix versions.
    arena
        The initial parameters (may also be given by `set`).
    machine
        Where further versions are made, who shares the work of an update, and who counts.
    held
        The pieces of the model that are held here, if other shards hold the rest: the first of its
        tensors, of which the last may be cut. Versions and sums are those of the whole model.
    """

    def __init__(
        self,
        layout: Layout,
        rule: Rule,
        *,
        backend: str = "auto",
        live: int = 8,
        relaxed: bool = False,
        arena: Arena | None = None,
        machine: Machine | None = None,
        held: Layout | None = None,
    ) -> None:
        machine = machine or Machine()
        self._together = machine.together
        self._dense = machine.measure("decode", Gradient.dense)
        self.layout, self.rule, self.relaxed = layout, rule, relaxed
        self.held = held = layout if held is None else held
        levels = np.zeros(len(layout.tensors), np.int64)
        first = Version(0, arena or Arena(held), levels, 0, layout=layout)
        self._shelf = Shelf(first, live, machine.memory)
        self.state: list[tuple[Array, ...]] = []
        self.masters: list[Array | None] = []
        self._kernels = [kernels.build(rule, s.dtype, backend) for s in held.sections]
        nothing = np.empty(0, np.int64)
        none = kernels.Spans(nothing, nothing, nothing, np.empty(0))
        self._spans: list[tuple[Array | None, Array | None, kernels.Spans]] = [
            (None, None, none)
        ] * len(held.sections)
        # The same for a collected gradient, which is in the compute dtype already.
        self._wide = [kernels.build(rule, compute_dtype(s.dtype), backend) for s in held.sections]
        for section in held.sections:
            size, dtype = section_size(section), compute_dtype(section.dtype)
            self.state.append(tuple(np.full(size, v, dtype) for v in rule.state.values()))
            wide = dtype == section.dtype
            self.masters.append(None if wide else np.empty(size, dtype))
        if arena is not None:
            self._fill_masters()
        self._cut_to_held: tuple[Array | None, Array | None, Array | None, Array | None] | None = (
            None
        )
        self._accumulator: Accumulator | None = None
        self._decoded: Bytes | None = None
        self._packed: dict[str, kernels.Kernel] = {}  # by the codec that they read
        self._backend = backend
        self.cost = held.nbytes * (3 + len(rule.state))  # bytes that an update reads and writes
        self.busy = False  # the current version is being overwritten
        self.sums = self._first_sums()
        self._units = kernels.STATISTIC_SCALE * np.maximum(layout.sizes, 1)  # of a tensor's mean
        self._total = int(self.sums.sum())

    # ------------------------------------------------------------ reading

    @property
    def current(self) -> Version:
        """The newest version."""
        return self._shelf.current

    @property
    def version(self) -> int:
        """The number of updates applied so far (the papers' timestamp)."""
        return self.current.number

    @property
    def readable(self) -> bool:
        """Whether the current version may be read now."""
        return self.relaxed or not self.busy

    @property
    def alive(self) -> int:
        """How many versions are alive."""
        return self._shelf.alive

    @property
    def spare(self) -> int:
        """How many arenas are kept for versions to come."""
        return self._shelf.spare

    @property
    def copies(self) -> int:
        """How many slow readers were given a copy."""
        return self._shelf.copies

    @property
    def backend(self) -> str:
        """Which kernels run: ``"numba"`` or ``"numpy"``."""
        return self._kernels[0].backend if self._kernels else kernels.resolve(self._backend)

    def lease(self) -> Lease:
        """Take hold of the current version."""
        assert self.readable, "the current version is being overwritten"
        if self.relaxed:
            return Lease(self.current, None)
        return self._shelf.lease()

    # ------------------------------------------------------------ writing

    @property
    def accumulator(self) -> Accumulator:
        """The sum in progress (made on first use: most rules need none)."""
        if self._accumulator is None:
            self._accumulator = Accumulator(self.held, self._backend, self._together)
        return self._accumulator

    def dense(self, gradient: Gradient) -> Gradient:
        """Return a gradient with every tensor raw; it is valid until the next is asked for."""
        found: Gradient = self._dense(gradient, self.held, self._decoding_room, self._backend)
        return found

    def _decoding_room(self) -> Bytes:
        if self._decoded is None:
            self._decoded = aligned(self.held.nbytes)
        return self._decoded

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
        self._fill_masters()

    def _fill_masters(self) -> None:
        for master, section in zip(self.masters, self.current.arena.sections, strict=True):
            if master is not None:
                np.copyto(master, section)

    def read_packed(self, codecs: Iterable[str]) -> None:
        """Have updates read gradients in these codecs as they came, where there is a kernel for it.

        Others are decoded first.
        """
        if [section.dtype for section in self.held.sections] == [np.float32]:
            for name in kernels.PACKED & set(codecs):
                self._packed[name] = kernels.build(self.rule, np.float32, self._backend, name)

    @property
    def reads_packed(self) -> bool:
        """Whether there are such kernels."""
        return bool(self._packed)

    def warm(self) -> None:
        """Compile the kernels now, so that the first push need not wait for it."""
        for kernel in (*self._kernels, *self._wide, *self._packed.values()):
            kernel.warm()
        for section in self.held.sections:
            kernels.survey(np.zeros(1, section.dtype), self._backend)

    def begin(self, spare: bool = False) -> Version:
        """Return where the next version is to be written: in place, or a spare arena.

        ``spare``: not in place, whoever reads here.
        """
        assert not self.busy, "one update at a time"
        if self.relaxed:
            self.busy = True
            return self.current
        target = self._shelf.target(spare)
        self.busy = target is self.current  # else readers of the current version go on
        return target

    def commit(self, target: Version, touched: Ints, sums: Ints) -> None:
        """Publish what was written: ``touched`` tensors have one more update."""
        self.busy = False
        target.advance(self.current.number + 1, touched)
        self._shelf.publish(target)
        if self.rule.statistic is not None:
            if touched is self.layout.all:
                self.sums = sums
            else:
                self.sums[touched] = sums
            self._total = int(np.add.reduce(self.sums))

    def step(self, job: Job) -> Ints:
        """Run the rule for a job (on any thread; one at a time)."""
        if self.held is not self.layout:
            job = self._of_held(job)
        base, target, steps = job.base, job.target, job.steps
        assert base is not None
        assert target is not None
        assert steps is not None
        if target is not base and len(job.touched) < len(self.held.tensors):
            np.copyto(target.arena.data, base.arena.data)
        if not len(job.touched):
            return _NONE
        if job.gradient is not None and job.weights is None:
            return self._step_from(job, job.gradient, base, target, steps)
        return self._step_from_sum(job, base, target, steps)

    def squares(self, job: Job) -> float:
        """Return the sum of squares of what a job's step is taken with, as far as it is held here.

        The job's factor is not in it.
        """
        if self.held is not self.layout:
            job = self._of_held(job)
        found: list[Array] = []
        gradient = job.gradient
        for index, section in enumerate(self.held.sections):
            if gradient is not None and job.weights is None:
                rows = rows_in(gradient.cover.tensors, section)
                if len(rows):
                    steps = np.zeros(len(gradient.cover.tensors))
                    found.append(spans_of(self.held, section, gradient, rows, steps)[1])
                continue
            tensors = job.touched[rows_in(job.touched, section)]
            lo = (self.held.starts[tensors] - section.start) // section.dtype.itemsize
            ends = (lo + self.held.sizes[tensors]).tolist()
            array = self.accumulator.arrays[index]
            found += [array[low:high] for low, high in zip(lo.tolist(), ends, strict=True)]
        return sum(kernels.sum_squares(array, self._backend) for array in found)

    def _of_held(self, job: Job) -> Job:
        """Return what a job comes to here, where only the first tensors are held."""
        count = int(np.searchsorted(job.touched, len(self.held.tensors)))
        whole = count == len(self.held.tensors)
        known = self._cut_to_held
        if known is None or known[0] is not job.steps or known[1] is not job.scalars:
            steps = None if job.steps is None else job.steps[:count]
            scalars = None if job.scalars is None else job.scalars[:count]
            known = self._cut_to_held = (job.steps, job.scalars, steps, scalars)
        touched = self.held.all if whole else job.touched[:count]
        return replace(job, touched=touched, steps=known[2], scalars=known[3])

    def _step_from(
        self, job: Job, gradient: Gradient, base: Version, target: Version, steps: Array
    ) -> Ints:
        if gradient.parts:
            found = groups(self.held, gradient, self._packed)
            if found is not None:
                return self._step_packed(job, gradient, found, base, target, steps)
            gradient = self.dense(gradient)
        sums, work = [], []
        for index, section in enumerate(self.held.sections):
            if gradient.cover.whole:  # the usual case, and its spans are known
                spans = self._whole_spans(index, steps, job.scalars)
                grad = gradient.data[section.start : section.stop].view(section.dtype)
            else:
                rows = rows_in(gradient.cover.tensors, section)
                if not len(rows):
                    continue
                spans, grad = spans_of(self.held, section, gradient, rows, steps)
                if job.scalars is not None:
                    spans.more = job.scalars[rows]
            work.append((index, spans, grad))
        factor = job.factor
        if job.clip:
            factor *= self._clipped(job.clip, factor, [grad for _index, _spans, grad in work])
        for index, spans, grad in work:
            master = self.masters[index]
            source = base.arena.sections[index] if master is None else master
            output, state = target.arena.sections[index], self.state[index]
            reads = [] if job.sent is None else [job.sent.arena.sections[index]]
            arrays = factor, source, grad, output, state, reads
            sums.append(update(self._kernels[index], self._together, spans, *arrays))
        return sums[0] if len(sums) == 1 else np.concatenate(sums)

    def _step_packed(
        self,
        job: Job,
        gradient: Gradient,
        found: list[Group],
        base: Version,
        target: Version,
        steps: Array,
    ) -> Ints:
        """Update from payloads: all tensors are float32, so there is one section and no master."""
        tensors = gradient.cover.tensors
        sums = np.zeros(len(tensors), np.int64)
        source, output = base.arena.sections[0], target.arena.sections[0]
        reads = [] if job.sent is None else [job.sent.arena.sections[0]]
        for group in found:
            chosen = tensors[group.rows]
            lo = self.held.starts[chosen] // source.itemsize
            spans = kernels.Spans(lo, lo + self.held.sizes[chosen], group.source, steps[group.rows])
            if job.scalars is not None:
                spans.more = job.scalars[group.rows]
            kernel = self._packed.get(group.codec, self._kernels[0])
            sums[group.rows] = kernel(
                spans, job.factor, source, group.data, output, self.state[0], reads
            )
        return sums

    def _clipped(self, clip: float, factor: float, gradients: list[Array]) -> float:
        """Return what brings the norm of a gradient, times a factor, down to the limit."""
        total = sum(kernels.sum_squares(gradient, self._backend) for gradient in gradients)
        return clipping(clip, factor, total)

    def _whole_spans(self, index: int, steps: Array, scalars: Array | None) -> kernels.Spans:
        """Return the spans of a whole section; the last ones again if the numbers are the same."""
        last, others, spans = self._spans[index]
        if last is not steps or others is not scalars:
            section, (lo, hi) = self.held.sections[index], self.held.whole[index]
            mine = slice(section.first, section.last)
            if last is None:
                spans = kernels.Spans(lo, hi, lo, steps[mine])
            spans.step = steps[mine]
            if scalars is not None:
                spans.more = scalars[mine]
            self._spans[index] = (steps, scalars, spans)
        return spans

    def _step_from_sum(self, job: Job, base: Version, target: Version, steps: Array) -> Ints:
        sums, work = [], []
        for index, section in enumerate(self.held.sections):
            rows = rows_in(job.touched, section)
            if not len(rows):
                continue
            tensors, item = job.touched[rows], section.dtype.itemsize
            lo = (self.held.starts[tensors] - section.start) // item
            spans = kernels.Spans(lo, lo + self.held.sizes[tensors], lo, steps[rows])
            if job.scalars is not None:
                spans.more = job.scalars[rows]
            work.append((index, spans))
        factor = job.factor
        if job.clip:
            totals = [
                self.accumulator.arrays[index][low:high]
                for index, spans in work
                for low, high in zip(spans.lo.tolist(), spans.hi.tolist(), strict=True)
            ]
            factor *= self._clipped(job.clip, factor, totals)
        for index, spans in work:
            grad, state = self.accumulator.arrays[index], self.state[index]
            master, output = self.masters[index], target.arena.sections[index]
            wide = self._wide[index]
            if master is None:
                source = base.arena.sections[index]
                arrays = factor, source, grad, output, state
                sums.append(update(wide, self._together, spans, *arrays))
            else:
                arrays = factor, master, grad, master, state
                sums.append(update(wide, self._together, spans, *arrays))
                with np.errstate(over="ignore"):
                    output[:] = master
        self.accumulator.reset()
        return sums[0] if len(sums) == 1 else np.concatenate(sums)

    # ------------------------------------------------------------ the statistic

    def vbar(self) -> float | None:
        """Return the mean of the rule's statistic over all parameters, or None without one."""
        if self.rule.statistic is None:
            return None
        return self._total / kernels.STATISTIC_SCALE / max(self.layout.parameters, 1)

    def vbars(self) -> bytes:
        """Return the same per tensor, float32 little endian (empty without a statistic)."""
        if self.rule.statistic is None:
            return b""
        return (self.sums / self._units).astype(_F4).tobytes()

    def _first_sums(self) -> Ints:
        if self.rule.statistic is None:
            return np.zeros(len(self.layout.tensors), np.int64)
        first = self.rule.state[self.rule.statistic]
        each = int(min(first * kernels.STATISTIC_SCALE, kernels.STATISTIC_CAP))
        return self.layout.sizes * each


def clipping(clip: float, factor: float, squares: float) -> float:
    """Return what brings the norm of a gradient, times a factor, down to the limit."""
    norm = abs(factor) * math.sqrt(squares)
    return clip / norm if norm > clip else 1.0
