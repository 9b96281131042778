"""Run the arithmetic of one store: add gradients up, and take steps with them.

It is the same on the host and on a device; the `ComputeBackend` (`aiops.store.backends`) is what
differs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TypeAlias

import numpy as np

from aiops import kernels
from aiops.codecs.raw import NAME as RAW
from aiops.kernels.clipping import Clip, by_factor
from aiops.kernels.interface import Operands
from aiops.kernels.ranges import Interval
from aiops.kernels.rule import Rule
from aiops.kernels.trimmed_mean import NO_TRIM, Trim
from aiops.model.arena import Arena
from aiops.model.layout import Array, Ints, Layout, compute_dtype
from aiops.store.accumulators import Accumulator, GradientHolder
from aiops.store.backends import ComputeBackend
from aiops.store.finite_guard import interval, magnitude
from aiops.store.gradient import CodedGroup, Gradient, groups, rows_in, section_size, spans_of
from aiops.store.snapshots import Version
from aiops.store.sum_directions import SumDirections, growth

NONE = np.empty(0, np.int64)

REHEARSED = 65_536
"""Elements that are rehearsed at a time, in scratch buffers that stay in the cache."""

SectionArrays: TypeAlias = tuple[Array, Array, list[Array]]
"""A section's parameters before an update, its target, and the versions that the rule reads."""


@dataclass(slots=True, kw_only=True)
class Update:
    """The numbers of one update.

    Attributes
    ----------
    gradient
        The gradient that it begins with; None: it takes a step with the sum in progress.
    weights
        float64[covered tensors]: ``weights[t] · g`` is added to the accumulator, and the step is
        taken with that. None: it is taken with the gradient itself.
    factor
        Multiplied with the gradient or the sum of the step.
    scales
        float64[touched tensors], what the factor is multiplied by for each; None: 1.
    clip
        The largest norms of groups of the touched tensors, to which factor and scales are brought
        down; None: the step is taken with them as they are.
    touched
        int64[touched tensors], the tensors of the step.
    steps
        float64[touched tensors], the learning rate of each.
    scalars
        float64[touched tensors, the rule's scalars], if it has any.
    sent
        The version that the gradient's worker was sent, for rules that read it (`Rule.reads`).
    """

    gradient: Gradient | None = None
    weights: Array | None = None
    factor: float = 1.0
    scales: Array | None = None
    clip: Clip | None = None
    touched: Ints = field(default_factory=NONE.copy)
    steps: Array = field(default_factory=NONE.copy)
    scalars: Array | None = None
    sent: Version | None = None

    def largest_factor(self, rows: Ints | slice = slice(None)) -> float:
        """Return the largest magnitude of the factor of some of the touched tensors."""
        scales = 1.0 if self.scales is None else float(self.scales[rows].max(initial=0.0))
        return abs(self.factor) * scales


class Updater:
    """The optimiser's state, the float32 masters, the sum in progress, and the kernels.

    Parameters
    ----------
    layout
        The tensors that are held here.
    rule
        The mathematics of an update.
    compute
        The backend: its memory and kernels.
    trim
        Whether a trimmed mean of collected gradients is taken, in place of their sum.
    momentum
        The memory of the momentum of collected gradients, of whose directions steps are made
        (`aiops.store.sum_directions`); None: they are made of the sum itself.

    Attributes
    ----------
    kernels
        The rule's, for each section.
    growth
        By how much the largest magnitude of what a step is made of may exceed that of the sum.
    """

    def __init__(
        self,
        layout: Layout,
        rule: Rule,
        compute: ComputeBackend,
        trim: Trim = NO_TRIM,
        momentum: float | None = None,
    ) -> None:
        self.layout, self.rule, self.compute, self.trim = layout, rule, compute, trim
        dtypes = [section.dtype for section in layout.sections]
        self.kernels = [compute.kernel(rule, dtype) for dtype in dtypes]
        # For a sum of gradients, which is in the compute dtype already.
        self._wide = [compute.kernel(rule, compute_dtype(dtype)) for dtype in dtypes]
        self._packed: dict[str, kernels.Kernel] = {}  # by the codec that they read
        self._firsts = [compute.folding(kernels.FIRST, dtype) for dtype in dtypes]
        self._folds = [compute.folding(kernels.FOLD, dtype) for dtype in dtypes]
        self.state: list[tuple[Array, ...]] = []
        self.masters: list[Array | None] = []
        for section in layout.sections:
            size, dtype = section_size(section), compute_dtype(section.dtype)
            self.state.append(tuple(compute.array(size, dtype, v) for v in rule.state.values()))
            wide = dtype == section.dtype
            self.masters.append(None if wide else compute.array(size, dtype))
        self._accumulator: Accumulator | GradientHolder | None = None
        self._directions = None
        if momentum is not None:
            self._directions = SumDirections(layout, compute, momentum)
        self._directed = False  # the sum in progress is of directions already
        whole = layout if layout.within is None else layout.within[0]
        self.growth = growth(whole) if self._directions is not None else 1.0
        nothing = kernels.Spans(NONE, NONE, NONE, np.empty(0))
        self._spans: list[tuple[Array | None, Array | None, kernels.Spans]] = [
            (None, None, nothing)
        ] * len(layout.sections)

    def load(self, arena: Arena) -> None:
        """Start from these parameters; the masters follow."""
        self.compute.load(arena, self.masters)

    def read_packed(self, codecs: Iterable[str]) -> None:
        """Have updates read payloads in these codecs directly, where there is a kernel for it.

        Gradients in other codecs are decoded first.
        """
        # There are such kernels for float32 only: with other dtypes, payloads are decoded first.
        if [section.dtype for section in self.layout.sections] == [np.float32]:
            found = self.compute.read_packed() & set(codecs)
            if found and not self.compute.joins:  # raw tensors are read between coded ones then
                found |= {RAW}
            for name in found:
                self._packed[name] = self.compute.kernel(self.rule, np.dtype(np.float32), name)

    def warming(self) -> list[Callable[[], object]]:
        """Return the calls that compile the kernels, in the order in which they are needed."""
        others = *self._packed.values(), *self._wide, *self._firsts, *self._folds
        mine = [partial(self._warm, index) for index in range(len(self.kernels))]
        found: list[Callable[[], object]] = [*mine, *(kernel.warm for kernel in others)]
        if self.trim.share:
            holder = GradientHolder(self.layout, self.compute, self._firsts, self.trim.share)
            self._accumulator = self._accumulator or holder
            found += holder.warming(self.trim.gathered)
        return found

    def _warm(self, index: int) -> None:
        self.kernels[index] = self.kernels[index].warm()

    @property
    def accumulator(self) -> Accumulator | GradientHolder:
        """The sum in progress (made on first use: most rules need none)."""
        if self._accumulator is None:
            given = self.layout, self.compute, self._firsts
            if self.trim.share:
                self._accumulator = GradientHolder(*given, self.trim.share)
            else:
                self._accumulator = Accumulator(*given, self._folds)
        return self._accumulator

    # ------------------------------------------------------------ state

    @property
    def filled(self) -> Array:
        """The tensors that have a sum in progress, as of `aiops.store.accumulators`."""
        if self._accumulator is None:
            return np.zeros(len(self.layout.tensors), bool)
        return self._accumulator.filled

    def arrays(self) -> dict[str, Array]:
        """Return the arrays that updates overwrite, but for parameters, by name.

        They are the backend's (`ComputeBackend.on_host`): the optimiser's state, masters, and the
        sum in progress if any tensor has one.
        """
        found: dict[str, Array] = {}
        for index, (arrays, master) in enumerate(zip(self.state, self.masters, strict=True)):
            names = [f"state/{index}/{name}" for name in self.rule.state]
            found |= dict(zip(names, arrays, strict=True))
            if master is not None:
                found[f"master/{index}"] = master
        if self._directions is not None:
            momenta = self._directions.momenta
            found |= {f"momentum/{n}": each for n, each in enumerate(momenta) if len(each)}
        if self.filled.any():
            found |= self.accumulator.stored()
        return found

    def restore(self, filled: Array, read: Callable[[str, Array], object]) -> None:
        """Continue from what `filled` and `arrays` returned, once the parameters are loaded.

        ``read``: writes the array of a name into a NumPy array. The masters need not be what
        `load` makes of the parameters: they have more digits.
        """
        if filled.any():
            self.accumulator.restore(filled)
        for name, array in self.arrays().items():
            self.compute.fill(array, partial(read, name))

    # ------------------------------------------------------------ a gradient

    def prepared(self, gradient: Gradient, *, alone: bool) -> Gradient:
        """Return a gradient as the kernels read it.

        ``alone``: a step follows from it alone, and neither a sum nor its norm is needed.
        """
        if not gradient.parts:
            return self.compute.resident(gradient)
        found = None
        if alone and self._packed:
            found = groups(self.layout, gradient, self._packed, join=self.compute.joins)
        if found is None:
            return self.compute.dense(gradient)
        gradient = self.compute.resident(gradient)
        gradient.groups = found
        return gradient

    # ------------------------------------------------------------ a step

    def step(self, update: Update, base: Version, target: Version, read_soon: bool) -> Ints:
        """Take a step; return the statistic's fixed-point sums of the tensors touched.

        Parameters
        ----------
        update
            Its numbers, of tensors that are held here. Its gradient is as `prepared` returned it.
        base, target
            The version before the update, and the one that it makes.
        read_soon
            Whether the new version will be read before long.
        """
        compute, whole = self.compute, len(update.touched) == len(self.layout.tensors)
        compute.begin(base, target, whole, read_soon)
        arrays = self._arrays(base, target, update.sent)
        gradient = update.gradient if update.weights is None else None
        if not len(update.touched):
            sums = NONE
        elif gradient is not None and gradient.groups is not None:
            sums = self._step_packed(update, gradient, gradient.groups, arrays[0])
        else:
            calls = self._calls(update, *self._clipped(update), arrays)
            found = [call.run(compute) for call in calls]
            sums = found[0] if len(found) == 1 else np.concatenate(found)
        if gradient is None:
            self._end_sum()  # the next gradient starts a new one
        compute.end(target, read_soon)
        return sums

    def rehearse(self, update: Update, base: Version, target: Version) -> int | None:
        """Compute a step in scratch buffers, and change nothing.

        Parameters are those of `step`; the gradient is dense.

        Returns
        -------
        int or None
            The index, among the tensors held here, of the first with a result that is not finite.
        """
        if not len(update.touched):
            return None
        arrays = self._arrays(base, target, update.sent)
        calls = self._calls(update, *self._clipped(update), arrays)
        return next((bad for call in calls if (bad := call.unfit(self.compute)) is not None), None)

    @property
    def sum_cost(self) -> int:
        """The cost of a step with the sum, beyond that of a step with one gradient."""
        return 0 if self._directions is None else self._directions.cost

    def direct_sum(self) -> None:
        """Put directions in the place of matrices' sums, once, if a step is made of those."""
        if self._directions is not None and not self._directed and self.filled.any():
            accumulator = self.accumulator
            self._directions.put(accumulator.arrays, np.flatnonzero(accumulator.filled))
            accumulator.bound *= self.growth
            self._directed = True

    def drop_sum(self) -> None:
        """Forget the sum in progress; if there is one, no step was made of it."""
        if self._directions is not None:
            self._directions.forget(np.flatnonzero(self.filled))
        self._end_sum()

    def _end_sum(self) -> None:
        self._directed = False
        if self._accumulator is not None:
            self._accumulator.reset()

    @property
    def sum_bound(self) -> float:
        """The largest magnitude that the sum in progress can have."""
        return 0.0 if self._accumulator is None else self._accumulator.bound

    def intervals(self, base: Version, others: Sequence[Version]) -> list[dict[str, Interval]]:
        """Return, for each section, the least and largest value of ``w`` and of each state.

        ``w`` includes those of ``others``.
        """
        on_host, found = self.compute.on_host, []
        for index, parameters in enumerate(self.compute.parameters(base)):
            master = self.masters[index]
            ends = [interval(on_host(parameters if master is None else master))]
            ends += [interval(other.arena.sections[index]) for other in others]
            w = min(low for low, _high in ends), max(high for _low, high in ends)
            states = zip(self.rule.state, self.state[index], strict=True)
            found.append({"w": w} | {name: interval(on_host(each)) for name, each in states})
        return found

    def magnitude(self, gradient: Gradient | None) -> float:
        """Return the largest magnitude in a raw gradient; None: in the sum in progress."""
        if gradient is None:
            arrays = [self.compute.on_host(array) for array in self.accumulator.arrays]
        else:
            arrays = []
            for index, section in enumerate(self.layout.sections):
                rows = rows_in(gradient.cover.tensors, section)
                if len(rows):
                    nothing = np.zeros(len(gradient.cover.tensors))
                    found = spans_of(self.layout, index, gradient, rows, nothing)[1]
                    on_host = isinstance(found, np.ndarray)  # as it came, before it is prepared
                    arrays.append(found if on_host else self.compute.on_host(found))
        return magnitude(arrays)

    def _arrays(self, base: Version, target: Version, sent: Version | None) -> list[SectionArrays]:
        """Return the arrays that each section's kernel reads and writes, beside gradient and state.

        With masters, these are the parameters before the update.
        """
        compute = self.compute
        before, after = compute.parameters(base), compute.parameters(target)
        reads: list[list[Array]] = [[] for _ in before]
        if sent is not None:
            reads = [[array] for array in compute.sent(sent, base)]
        sources = [
            array if master is None else master
            for array, master in zip(before, self.masters, strict=True)
        ]
        return list(zip(sources, after, reads, strict=True))

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

    def _calls(
        self, update: Update, factor: float, scales: Array | None, arrays: list[SectionArrays]
    ) -> Iterator[KernelCall]:
        """Yield the calls of a step from a dense gradient, or from the sum in progress."""
        gradient = update.gradient if update.weights is None else None
        for index, section in enumerate(self.layout.sections):
            source, output, reads = arrays[index]
            state = self.state[index]
            if gradient is None:
                rows = rows_in(update.touched, section)
                if not len(rows):
                    continue
                tensors = update.touched[rows]
                lo, hi = self.layout.ranges(index, tensors)
                spans = kernels.Spans(lo, hi, lo, update.steps[rows])
                _give_scalars(spans, update, rows)
                grad, master = self.accumulator.arrays[index], self.masters[index]
                to = output if master is None else master
                operands: Operands = (factor, source, grad, to, state, ())
                own, rounded = _rows_of(scales, rows), None if master is None else output
                yield KernelCall(self._wide[index], spans, operands, tensors, own, rounded)
                continue
            if gradient.cover.whole:  # the usual case, and its spans are known
                spans = self._whole_spans(index, update.steps, update.scalars)
                grad = gradient.data[section.start : section.stop].view(section.dtype)
                mine = slice(section.first, section.last)
                tensors, own = self.layout.all[mine], _rows_of(scales, mine)
            else:
                rows = rows_in(gradient.cover.tensors, section)
                if not len(rows):
                    continue
                tensors = gradient.cover.tensors[rows]
                spans, grad = spans_of(self.layout, index, gradient, rows, update.steps)
                _give_scalars(spans, update, rows)
                own = _rows_of(scales, rows)
            operands = factor, source, grad, output, state, reads
            yield KernelCall(self.kernels[index], spans, operands, tensors, own)

    def _step_packed(
        self, update: Update, gradient: Gradient, found: list[CodedGroup], arrays: SectionArrays
    ) -> Ints:
        """Update from payloads: all tensors are float32, so there is one section and no master."""
        tensors = gradient.cover.tensors
        sums = np.zeros(len(tensors), np.int64)
        source, output, reads = arrays
        for group in found:
            lo, hi = self.layout.ranges(0, tensors[group.rows])
            spans = kernels.Spans(lo, hi, group.source, update.steps[group.rows])
            _give_scalars(spans, update, group.rows)
            kernel = self._packed.get(group.codec, self.kernels[0])
            data = group.data if self.compute.joins else gradient.data
            operands = update.factor, source, data, output, self.state[0], reads
            scales, coded = _rows_of(update.scales, group.rows), group.codec in self._packed
            call = KernelCall(kernel, spans, operands, tensors, scales)
            sums[group.rows] = call.run(self.compute, whole=coded)
        return sums

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
                spans.scalars = scalars[mine]
            self._spans[index] = (steps, scalars, spans)
        return spans

    # ------------------------------------------------------------ a norm

    def _clipped(self, update: Update) -> tuple[float, Array | None]:
        """Return the factor and the scales with which the norms are within the clip."""
        if update.clip is None:
            return update.factor, update.scales
        return update.clip.clipped(update.factor, self.squares(update, update.clip))

    def squares(self, update: Update, clip: Clip) -> list[float]:
        """Return the sum of squares of each group that has a limit, without the factor.

        They are those of the gradient, or of the sum in progress.
        """
        gradient = update.gradient if update.weights is None else None
        touched, found = update.touched, [0.0] * len(clip.limits)
        for index, section in enumerate(self.layout.sections):
            rows = rows_in(touched, section)
            if not len(rows):
                continue
            if gradient is None:
                lo, hi = self.layout.ranges(index, touched[rows])
                array = self.accumulator.arrays[index]
            else:
                steps = np.zeros(len(touched))
                spans, array = spans_of(self.layout, index, gradient, rows, steps)
                lo, hi = spans.src, spans.src + spans.hi - spans.lo
            for group, part in clip.runs(rows, lo, hi):
                found[group] += self.compute.sum_squares(array[part])
        return found


def _give_scalars(spans: kernels.Spans, update: Update, rows: Ints) -> None:
    """Give spans the rule's scalars of some of an update's tensors, if it has any."""
    if update.scalars is not None:
        spans.scalars = update.scalars[rows]


def _rows_of(numbers: Array | None, rows: Ints | slice) -> Array | None:
    """Return the numbers of some tensors, if there are any."""
    return None if numbers is None else numbers[rows]


@dataclass(slots=True)
class KernelCall:
    """A call of a kernel that updates some tensors of one section.

    ``tensors``: the tensor of each span. ``scales``: float64[spans], what the factor is multiplied
    by for each; None: 1. ``rounded``: where the target, which is a float32 master, is rounded to.
    """

    kernel: kernels.Kernel
    spans: kernels.Spans
    operands: Operands
    tensors: Ints
    scales: Array | None = None
    rounded: Array | None = None

    def run(self, compute: ComputeBackend, *, whole: bool = False) -> Ints:
        """Make the call, or one for each factor; return its sums. ``whole``: as of `update`."""
        factor, base, grad, target, state, reads = self.operands
        sums = np.empty(len(self.spans), np.int64)
        for rows, spans, mine in by_factor(self.spans, factor, self.scales):
            operands = mine, base, grad, target, state, reads
            sums[rows] = compute.update(self.kernel, spans, operands, whole=whole)
        if self.rounded is not None:
            compute.narrow(self.rounded, target)
        return sums

    def unfit(self, compute: ComputeBackend) -> int | None:
        """Return the first tensor with a result that is not finite; nothing is changed."""
        factor, base, grad, target, state, reads = self.operands
        spans, rounded, scales = self.spans, self.rounded, self.scales
        size = min(REHEARSED, int((spans.hi - spans.lo).max(initial=0)))
        scratch = [compute.array(size, array.dtype) for array in (base, *state)]
        narrow = target if rounded is None else rounded
        apart = compute.array(size, narrow.dtype) if narrow.dtype != base.dtype else None
        for row, (low, high, source, step) in enumerate(spans.rows()):
            scaled = factor if scales is None else factor * float(scales[row])
            for start in range(low, high, REHEARSED):
                stop = min(start + REHEARSED, high)
                one = kernels.Spans.whole(stop - start, step, spans.scalars[row].tolist())
                w, *states = (array[: stop - start] for array in scratch)
                for array, mine in zip((base, *state), (w, *states), strict=True):
                    compute.copy(mine, array[start:stop])
                out = w if apart is None else apart[: stop - start]
                given = grad[source + start - low : source + stop - low]
                read = [array[start:stop] for array in reads]
                to = w if rounded is not None else out
                self.kernel(one, scaled, w, given, to, states, read)
                if rounded is not None:
                    compute.narrow(out, w)
                if not all(compute.finite(array) for array in (out, w, *states)):
                    return int(self.tensors[row])
        return None
