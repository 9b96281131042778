"""A model's values as strategies compute with them: one flat array per section of the arena.

The arrays have the compute dtype: a 16-bit tensor has a float32 array beside it, and holds that
array's rounded values.
"""

from __future__ import annotations

import types
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from aiops import kernels
from aiops.algorithms import optimizers
from aiops.algorithms.per_tensor import PerTensor
from aiops.algorithms.schedules import Schedule
from aiops.client.encode_push import gather
from aiops.client.params import Params
from aiops.errors import BadPush
from aiops.kernels.clipping import by_factor
from aiops.model.layout import Array, Ints, Layout, compute_dtype
from aiops.model.matrices import direction_rate

Flat = list[Array]
"""One array of the compute dtype per section of a layout."""


def zeros(layout: Layout) -> Flat:
    """Return zeros."""
    return [
        np.zeros((s.stop - s.start) // s.dtype.itemsize, compute_dtype(s.dtype))
        for s in layout.sections
    ]


def wide(params: Params) -> Flat:
    """Return a model's arrays in the compute dtype: views where that is their dtype, or copies."""
    return [array.astype(compute_dtype(array.dtype), copy=False) for array in params.arena.sections]


def ranges(layout: Layout, tensors: Sequence[int] | Ints) -> list[tuple[int, slice]]:
    """Return where some tensors lie: (section, range of elements), neighbours joined."""
    found: list[tuple[int, slice]] = []
    for number, section in enumerate(layout.sections):
        for tensor in tensors:
            if not section.first <= tensor < section.last:
                continue
            start = int(layout.starts[tensor] - section.start) // section.dtype.itemsize
            stop = start + int(layout.sizes[tensor])
            if found and found[-1][0] == number and found[-1][1].stop == start:
                start = found.pop()[1].start
            found.append((number, slice(start, stop)))
    return found


def rounded(array: Array, dtype: np.dtype[Any]) -> Array:
    """Return an array in the dtype that travels; what is too large for it becomes its largest."""
    if array.dtype == dtype:
        return array
    most = 65504.0 if dtype == np.float16 else 9.9e17  # what servers take is below 1e18
    found: Array = np.clip(array, -most, most).astype(dtype)
    return found


def difference(left: Array, right: Array, out: Array) -> None:
    """Write left − right to ``out``, in the dtype that travels (see `rounded`)."""
    if out.dtype == left.dtype:
        np.subtract(left, right, out=out)  # new memory for each step would cost more than the sum
    else:
        out[...] = rounded(left - right, out.dtype)


def take_over(params: Params, fresh: Params) -> None:
    """Copy a model that was fetched, with its versions."""
    params.arena.data[:] = fresh.arena.data
    note_version(params, fresh)


def note_version(params: Params, fresh: Params) -> None:
    """Take over the versions of a model that was fetched, not its values."""
    params.version, params.connection = fresh.version, fresh.connection
    params.held[:] = fresh.held
    params.versions[:] = fresh.versions


class Intake:
    """Takes the gradients of a training loop, and looks them over.

    Parameters
    ----------
    params
        The model's.
    """

    def __init__(self, params: Params) -> None:
        self._layout = params.layout
        self._gradient = params.like()
        self._surveys = [kernels.surveyor(s.dtype) for s in params.layout.sections]

    def take(self, gradients: Mapping[str, Array]) -> tuple[Params, Ints]:
        """Check a gradient; return it in one arena, and which tensors it has, in arena order.

        Raises
        ------
        UsageError, BadPush
            As `LocalStrategy.apply`; nothing has changed.
        """
        layout = self._layout
        if isinstance(gradients, Params) and gradients.layout is layout:
            into, tensors = gradients, layout.all
        else:
            into, tensors = self._gradient, gather(layout, gradients, self._gradient)
        for tensor in tensors.tolist():
            if (bad := self._bad(into, tensor)) >= 0:
                name = layout.tensors[tensor].name
                value = float(into[name].reshape(-1)[bad])
                raise BadPush(
                    f"{name!r} holds {value} at element {bad}: every value of a gradient must be"
                    " finite and below 1e18 in magnitude; no step was taken",
                    tensor=name,
                    value=repr(value),
                )
        return into, tensors

    def _bad(self, params: Params, tensor: int) -> int:
        for section, survey in zip(self._layout.sections, self._surveys, strict=True):
            if section.first <= tensor < section.last:
                return survey(params[self._layout.tensors[tensor].name].reshape(-1))
        return -1


class LocalModel:
    """A worker's own model: parameters that it trains itself, by an optimiser of its own.

    Parameters
    ----------
    params
        Its parameters, as the training loop sees them.
    inner
        The optimiser and its settings.
    """

    layout: Layout
    params: Params
    rate: float
    steps: int

    def __init__(self, params: Params, inner: Mapping[str, Any]) -> None:
        self.params, self.layout = params, params.layout
        self.x: Flat = wide(params)
        settings = types.SimpleNamespace(**inner)
        self._optimizer = optimizers.make(settings)
        schedule = Schedule(inner["schedule"], inner["scale"])
        self._lr, self._schedule = float(inner["lr"]), schedule
        others, names = PerTensor.of(inner["per_tensor"]), [t.name for t in self.layout.tensors]
        self._clip = others.clip(float(inner["clip"]), names)
        self._rates = np.array([others.value("lr", name, self._lr) for name in names])
        if inner["orthogonal"]:
            self._rates *= [direction_rate(tensor.shape) for tensor in self.layout.tensors]
        own = [self._optimizer.tensor_scalars(name) for name in names]
        self._own_scalars = np.array(own, np.float64).reshape(len(names), -1 if names else 0)
        self.rate = 0.0  # the learning rate of the last step
        rule = self._optimizer.rule
        self._kernels = [kernels.build(rule, s.dtype) for s in self.layout.sections]
        self._state = [
            tuple(np.full_like(array, value) for value in rule.state.values()) for array in self.x
        ]
        self._intake = Intake(params)
        self._times = np.zeros(len(self.layout.tensors), np.int64)  # steps of each tensor
        self.steps = 0

    def take(self, gradients: Mapping[str, Array]) -> tuple[Params, Ints]:
        """Check a gradient; return it in one arena, and which tensors it has (see `Intake`)."""
        return self._intake.take(gradients)

    def step(
        self,
        gradient: Params,
        tensors: Ints,
        update: int | None = None,
        lr_factors: Array | None = None,
    ) -> None:
        """Take a step of the optimiser with a gradient that `take` has checked.

        ``update``: at which the schedule is; by default the number of steps so far. ``lr_factors``:
        float64[tensors of the model], what their learning rates are multiplied by.
        """
        scheduled = self._schedule(self.steps if update is None else update)
        self.rate = self._lr * scheduled
        if lr_factors is not None and len(lr_factors):
            self.rate *= float(lr_factors[0])  # those of `Elastic` are all the same
        scale, scales = self._clipping(gradient, tensors)
        self.steps += 1
        self._times[tensors] += 1
        for number, section in enumerate(self.layout.sections):
            at = np.flatnonzero((tensors >= section.first) & (tensors < section.last))
            if not len(at):
                continue
            inside = tensors[at]
            lo = (self.layout.starts[inside] - section.start) // section.dtype.itemsize
            steps = self._rates[inside] * scheduled
            if lr_factors is not None:
                steps *= lr_factors[inside]
            spans = kernels.Spans(lo, lo + self.layout.sizes[inside], lo, steps)
            if self._optimizer.rule.scalars:
                rows = [self._optimizer.scalars(t) for t in self._times[inside].tolist()]
                mine = np.array(rows, np.float64).reshape(len(inside), -1)
                spans.scalars = np.hstack([mine, self._own_scalars[inside]])
            x, state = self.x[number], self._state[number]
            grad, target = gradient.arena.sections[number], self.params.arena.sections[number]
            own = None if scales is None else scales[at]
            for _rows, some, factor in by_factor(spans, scale, own):
                self._kernels[number](some, factor, x, grad, target, state)

    def _clipping(self, gradient: Params, tensors: Ints) -> tuple[float, Array | None]:
        """Return the numbers that bring norms of a gradient within the clip, as of `Clip`."""
        if self._clip is None:
            return 1.0, None
        clip, squares = self._clip.of(tensors), [0.0] * len(self._clip.limits)
        for number, section in enumerate(self.layout.sections):
            rows = np.flatnonzero((tensors >= section.first) & (tensors < section.last))
            lo, hi = self.layout.ranges(number, tensors[rows])
            array = gradient.arena.sections[number]
            for group, part in clip.runs(rows, lo, hi):
                squares[group] += kernels.sum_squares(array[part])
        return clip.clipped(1.0, squares)

    def momentum(self) -> list[Array | None]:
        """Return the optimiser's momentum per section, where it keeps one."""
        names = list(self._optimizer.rule.state)
        index = names.index("m") if "m" in names else None
        return [None if index is None else state[index] for state in self._state]

    def show(self) -> None:
        """Round `x` into the parameters, where they have 16 bits."""
        for x, target in self._narrow():
            with np.errstate(over="ignore"):
                target[...] = x

    def adopt(self) -> None:
        """Take over the parameters where they have 16 bits: they have new values."""
        for x, source in self._narrow():
            x[...] = source

    def arrays(self) -> dict[str, Array]:
        """Return the arrays that steps overwrite, beside the parameters, by name."""
        names = self._optimizer.rule.state
        found = {
            f"state/{number}/{name}": array
            for number, arrays in enumerate(self._state)
            for name, array in zip(names, arrays, strict=True)
        }
        pairs = enumerate(zip(self.x, self.params.arena.sections, strict=True))
        return found | {f"x/{number}": x for number, (x, own) in pairs if x.dtype != own.dtype}

    def state(self) -> list[Any]:
        """Return the numbers of steps as plain values, for `restore`."""
        return [self.steps, self.rate, self._times.copy()]

    def restore(self, state: Sequence[Any]) -> None:
        """Continue from what `state` returned; `arrays` are filled beside it."""
        self.steps, self.rate, times = state
        self._times[:] = times

    def _narrow(self) -> Iterator[tuple[Array, Array]]:
        for x, array in zip(self.x, self.params.arena.sections, strict=True):
            if x.dtype != array.dtype:
                yield x, array
