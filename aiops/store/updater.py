"""Run the arithmetic of one store: add gradients up, and take steps with them.

It is the same on the host and on a device; the `ComputeBackend` (`aiops.store.backends`) is what
differs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np

from aiops import kernels
from aiops.codecs.raw import NAME as RAW
from aiops.kernels.rule import Rule
from aiops.model.arena import Arena
from aiops.model.layout import Array, Ints, Layout, compute_dtype
from aiops.store.backends import ComputeBackend
from aiops.store.gradient import CodedGroup, Gradient, groups, rows_in, section_size, spans_of
from aiops.store.snapshots import Version

NONE = np.empty(0, np.int64)


@dataclass(slots=True)
class KernelWork:
    """The input of one update.

    The attributes are those of `aiops.store.parameters.UpdateJob`, cut to the tensors held here.
    ``gradient`` is in the backend's memory. ``wanted``: the new version will be read before long.
    """

    gradient: Gradient | None
    weights: Array | None
    factor: float
    clip: float
    base: Version
    target: Version
    touched: Ints
    steps: Array = field(default_factory=lambda: np.empty(0))
    scalars: Array | None = None
    sent: Version | None = None
    wanted: bool = False


class Updater:
    """The optimiser's state, the float32 masters, the sum in progress, and the kernels.

    Parameters
    ----------
    layout
        The tensors that are held here.
    rule
        The mathematics of an update.
    place
        The backend: its memory and kernels.
    """

    def __init__(self, layout: Layout, rule: Rule, place: ComputeBackend) -> None:
        self.layout, self.rule, self.place = layout, rule, place
        self.kernels = [place.kernel(rule, s.dtype) for s in layout.sections]
        # For a sum of gradients, which is in the compute dtype already.
        self._wide = [place.kernel(rule, compute_dtype(s.dtype)) for s in layout.sections]
        self._packed: dict[str, kernels.Kernel] = {}  # by the codec that they read
        self._folds = [
            (place.folding(kernels.FIRST, s.dtype), place.folding(kernels.FOLD, s.dtype))
            for s in layout.sections
        ]
        self.state: list[tuple[Array, ...]] = []
        self.masters: list[Array | None] = []
        for section in layout.sections:
            size, dtype = section_size(section), compute_dtype(section.dtype)
            self.state.append(tuple(place.array(size, dtype, v) for v in rule.state.values()))
            wide = dtype == section.dtype
            self.masters.append(None if wide else place.array(size, dtype))
        self._accumulator: Accumulator | None = None
        self._sent: Sequence[Array] = ()  # the sections of the version that `Rule.reads`
        nothing = kernels.Spans(NONE, NONE, NONE, np.empty(0))
        self._spans: list[tuple[Array | None, Array | None, kernels.Spans]] = [
            (None, None, nothing)
        ] * len(layout.sections)

    def load(self, arena: Arena) -> None:
        """Start from these parameters; the masters follow."""
        self.place.load(arena, self.masters)

    def read_packed(self, codecs: Iterable[str]) -> None:
        """Have updates read payloads in these codecs directly, where there is a kernel for it.

        Gradients in other codecs are decoded first.
        """
        # There are such kernels for float32 only: with other dtypes, payloads are decoded first.
        if [section.dtype for section in self.layout.sections] == [np.float32]:
            found = self.place.read_packed() & set(codecs)
            if found and not self.place.joins:  # raw tensors are read between coded ones then
                found |= {RAW}
            for name in found:
                self._packed[name] = self.place.kernel(self.rule, np.dtype(np.float32), name)

    def warming(self) -> list[Callable[[], None]]:
        """Return the calls that compile the kernels, in the order in which they are needed."""
        folds = [kernel for pair in self._folds for kernel in pair]
        every = *self.kernels, *self._packed.values(), *self._wide, *folds
        return [kernel.warm for kernel in every]

    @property
    def accumulator(self) -> Accumulator:
        """The sum in progress (made on first use: most rules need none)."""
        if self._accumulator is None:
            self._accumulator = Accumulator(self.layout, self.place, self._folds)
        return self._accumulator

    def taken(self, gradient: Gradient, *, alone: bool) -> Gradient:
        """Return a gradient as the kernels read it.

        ``alone``: a step follows from it alone, and neither a sum nor its norm is needed.
        """
        if not gradient.parts:
            return self.place.taken(gradient)
        found = None
        if alone and self._packed:
            found = groups(self.layout, gradient, self._packed, join=self.place.joins)
        if found is None:
            return self.place.dense(gradient)
        gradient = self.place.taken(gradient)
        gradient.groups = found
        return gradient

    # ------------------------------------------------------------ a step

    def step(self, work: KernelWork) -> Ints:
        """Take a step; return the statistic's fixed-point sums of the tensors touched."""
        place, whole = self.place, len(work.touched) == len(self.layout.tensors)
        place.begin(work.base, work.target, whole, work.wanted)
        self._sent = () if work.sent is None else place.sent(work.sent, work.base)
        if not len(work.touched):
            sums = NONE
        elif work.gradient is not None and work.weights is None:
            sums = self._step_from(work, work.gradient)
        else:
            sums = self._step_from_sum(work)
        place.end(work.target, work.wanted)
        return sums

    def whole(
        self,
        base: Version,
        target: Version,
        gradient: Sequence[Array],
        steps: Array,
        scalars: Array | None,
    ) -> Ints:
        """Take a step of all tensors with a raw gradient, on the host; return as `step` does."""
        sums = []
        for index, kernel in enumerate(self.kernels):
            last, others, spans = self._spans[index]
            if last is not steps or others is not scalars:
                spans = self._whole_spans(index, steps, scalars)
            master = self.masters[index]
            source = base.room.sections[index] if master is None else master
            output, state = target.room.sections[index], self.state[index]
            sums.append(kernel(spans, 1.0, source, gradient[index], output, state))
        return sums[0] if len(sums) == 1 else np.concatenate(sums)

    def _step_from(self, work: KernelWork, gradient: Gradient) -> Ints:
        if gradient.groups is not None:
            return self._step_packed(work, gradient, gradient.groups)
        sums, calls = [], []
        for index, section in enumerate(self.layout.sections):
            if gradient.cover.whole:  # the usual case, and its spans are known
                spans = self._whole_spans(index, work.steps, work.scalars)
                grad = gradient.data[section.start : section.stop].view(section.dtype)
            else:
                rows = rows_in(gradient.cover.tensors, section)
                if not len(rows):
                    continue
                spans, grad = spans_of(self.layout, section, gradient, rows, work.steps)
                if work.scalars is not None:
                    spans.more = work.scalars[rows]
            calls.append((index, spans, grad))
        factor = work.factor
        if work.clip:
            factor *= self._clipped(work.clip, factor, [grad for _index, _spans, grad in calls])
        for index, spans, grad in calls:
            source, output, reads = self._arrays(work, index)
            arrays = factor, source, grad, output, self.state[index], reads
            sums.append(self.place.update(self.kernels[index], spans, *arrays))
        return sums[0] if len(sums) == 1 else np.concatenate(sums)

    def _arrays(self, work: KernelWork, index: int) -> tuple[Array, Array, list[Array]]:
        """Return a section's base, its target, and the version that the rule reads beside them."""
        master, place = self.masters[index], self.place
        source = place.parameters(work.base)[index] if master is None else master
        sent = [] if work.sent is None else [self._sent[index]]
        return source, place.parameters(work.target)[index], sent

    def _step_packed(self, work: KernelWork, gradient: Gradient, found: list[CodedGroup]) -> Ints:
        """Update from payloads: all tensors are float32, so there is one section and no master."""
        tensors = gradient.cover.tensors
        sums = np.zeros(len(tensors), np.int64)
        source, output, reads = self._arrays(work, 0)
        for group in found:
            chosen = tensors[group.rows]
            lo = self.layout.starts[chosen] // source.dtype.itemsize
            hi = lo + self.layout.sizes[chosen]
            spans = kernels.Spans(lo, hi, group.source, work.steps[group.rows])
            if work.scalars is not None:
                spans.more = work.scalars[group.rows]
            kernel = self._packed.get(group.codec, self.kernels[0])
            data = group.data if self.place.joins else gradient.data
            arrays = work.factor, source, data, output, self.state[0], reads
            coded = group.codec in self._packed
            sums[group.rows] = self.place.update(kernel, spans, *arrays, whole=coded)
        return sums

    def _clipped(self, clip: float, factor: float, gradients: list[Array]) -> float:
        """Return the factor that brings the norm of ``factor · gradients`` down to ``clip``."""
        return clipping(clip, factor, sum(self.place.sum_squares(g) for g in gradients))

    def _whole_spans(self, index: int, steps: Array, scalars: Array | None) -> kernels.Spans:
        """Return the spans of a whole section; the last ones again if the numbers are the same."""
        last, others, spans = self._spans[index]
        if last is not steps or others is not scalars:
            section, (lo, hi) = self.layout.sections[index], self.layout.whole[index]
            mine = slice(section.first, section.last)
            if last is None:
                spans = kernels.Spans(lo, hi, lo, steps[mine])
            spans.step = steps[mine]
            if scalars is not None:
                spans.more = scalars[mine]
            self._spans[index] = (steps, scalars, spans)
        return spans

    def _step_from_sum(self, work: KernelWork) -> Ints:
        sums, calls = [], []
        for index, section in enumerate(self.layout.sections):
            rows = rows_in(work.touched, section)
            if not len(rows):
                continue
            tensors, item = work.touched[rows], section.dtype.itemsize
            lo = (self.layout.starts[tensors] - section.start) // item
            spans = kernels.Spans(lo, lo + self.layout.sizes[tensors], lo, work.steps[rows])
            if work.scalars is not None:
                spans.more = work.scalars[rows]
            calls.append((index, spans))
        factor = work.factor
        if work.clip:
            totals = [
                self.accumulator.arrays[index][low:high]
                for index, spans in calls
                for low, high in zip(spans.lo.tolist(), spans.hi.tolist(), strict=True)
            ]
            factor *= self._clipped(work.clip, factor, totals)
        for index, spans in calls:
            grad, master = self.accumulator.arrays[index], self.masters[index]
            source, output, _reads = self._arrays(work, index)
            to = output if master is None else master
            arrays = factor, source, grad, to, self.state[index]
            sums.append(self.place.update(self._wide[index], spans, *arrays))
            if master is not None:
                self.place.narrow(output, master)
        self.accumulator.reset()  # the next gradient starts a new sum
        return sums[0] if len(sums) == 1 else np.concatenate(sums)

    # ------------------------------------------------------------ a norm

    def squares(self, gradient: Gradient | None, touched: Ints) -> float:
        """Return the sum of squares of a gradient; None: of the sum in progress."""
        found: list[Array] = []
        for index, section in enumerate(self.layout.sections):
            if gradient is not None:
                rows = rows_in(gradient.cover.tensors, section)
                if len(rows):
                    steps = np.zeros(len(gradient.cover.tensors))
                    found.append(spans_of(self.layout, section, gradient, rows, steps)[1])
                continue
            tensors = touched[rows_in(touched, section)]
            lo = (self.layout.starts[tensors] - section.start) // section.dtype.itemsize
            ends = (lo + self.layout.sizes[tensors]).tolist()
            array = self.accumulator.arrays[index]
            found += [array[low:high] for low, high in zip(lo.tolist(), ends, strict=True)]
        return sum(self.place.sum_squares(array) for array in found)


class Accumulator:
    """The sum of gradients that a rule collects before it takes a step, in the compute dtype.

    ``folds`` are the kernels of `aiops.kernels.FIRST` and `FOLD`, for each section of the layout.
    """

    def __init__(
        self,
        layout: Layout,
        place: ComputeBackend,
        folds: Sequence[tuple[kernels.Kernel, kernels.Kernel]],
    ) -> None:
        self.layout, self._place = layout, place
        self.arrays = [
            place.array(section_size(section), compute_dtype(section.dtype))
            for section in layout.sections
        ]
        self.filled = np.zeros(len(layout.tensors), bool)  # which tensors have a sum already
        self._first, self._add = [one for one, _ in folds], [two for _, two in folds]

    def fold(self, gradient: Gradient, weights: Array) -> None:
        """Add a gradient: ``sum ← sum + weight · g`` (``sum ← weight · g`` the first time)."""
        again = self.filled[gradient.cover.tensors]
        for rows, compiled in ((~again, self._first), (again, self._add)):
            for index, section in enumerate(self.layout.sections):
                chosen = rows_in(gradient.cover.tensors, section, rows)
                if not len(chosen):
                    continue
                spans, grad = spans_of(self.layout, section, gradient, chosen, weights)
                total, wide = self.arrays[index], self._place.widened(grad)
                self._place.update(compiled[index], spans, 1.0, total, wide, total, ())
        self.filled[gradient.cover.tensors] = True

    def reset(self) -> None:
        """Begin a new sum."""
        self.filled[:] = False


def clipping(clip: float, factor: float, squares: float) -> float:
    """Return the factor that brings ``factor · √squares`` down to ``clip``; at most 1."""
    norm = abs(factor) * math.sqrt(squares)
    return clip / norm if norm > clip else 1.0
