"""Execute a rule on a device as one generated kernel, with the bits of NumPy."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations
from typing import Any

import numpy as np
import numpy.typing as npt

from aiops.errors import UsageError
from aiops.kernels.cuda_source import THREADS, TILE, ArrayTypes, text
from aiops.kernels.device import Argument, Device, DeviceArray, DeviceStream
from aiops.kernels.interface import Spans, check_counts, check_spans
from aiops.kernels.payloads import FORMATS, PayloadFormat
from aiops.kernels.rule import Rule
from aiops.kernels.rule_parser import parse

__all__ = ["RAW", "DeviceKernel"]

RAW = PayloadFormat("raw", ((np.dtype("<f4"), 1),), lambda values, _: values)
"""Float32 at any address, as in a push whose other tensors are coded."""


class DeviceKernel:
    """A rule as one kernel over arrays of a device; implements ``Kernel``.

    A call of a rule with a statistic or a gauge returns when the sums have arrived. Otherwise it
    may return before the work is done: finish the stream before the arrays are read.
    """

    backend = "cuda"

    def __init__(self, rule: Rule, kinds: ArrayTypes, device: Device, stream: DeviceStream) -> None:
        self.rule, self.kinds = rule, kinds
        self.text = text(parse(rule), kinds)
        self._device, self._stream = device, stream
        self._form = {**FORMATS, RAW.name: RAW}[kinds.grad] if kinds.packed else None
        real = _dtype(kinds.real)
        self._dtypes = {
            "base": real,
            "target": _dtype(kinds.wire),
            "grad": np.dtype(np.uint8) if kinds.packed else _dtype(kinds.grad),
        }
        self._constants: list[Argument] = [real.type(v) for v in rule.constants.values()]
        self._function: object | None = None
        self._checked: object = None  # the last call whose arguments were checked
        self._spans = b""  # those of the last call
        self._table = np.empty(0, np.uint8)  # and their table: int64, then float64
        self._tiles = 0
        self._on_device: DeviceArray | None = None  # the table on the device
        self._sums: tuple[npt.NDArray[np.uint8], DeviceArray] | None = None

    def __repr__(self) -> str:
        return f"<DeviceKernel {self.rule.name} {self.kinds}>"

    def __call__(
        self,
        spans: Spans,
        factor: float,
        base: Any,
        grad: Any,
        target: Any,
        state: Sequence[Any],
        reads: Sequence[Any] = (),
    ) -> npt.NDArray[np.int64]:
        """Queue the update of every span, as `Kernel` specifies; arrays are `DeviceArray`."""
        call = _identity(spans, (base, grad, target, *state, *reads))
        if call != self._checked:
            self._check(spans, base, grad, target, state, reads)
            self._checked = call
        count = len(spans)
        there = self._placed(spans)
        if not self._tiles:
            return np.zeros(count, np.int64)
        numbers = there[8 * (4 * count + 1) :]
        given: list[Argument] = [
            *(np.int64(count), there, numbers, np.float64(factor)),
            *(base, target, grad, *reads, *state),
            *self._constants,
        ]
        if self.rule.summed is None:
            self._launch(given)
            return np.zeros(count, np.int64)
        host, sums = self._room(count)
        self._stream.clear(sums)
        self._launch([*given, sums])
        self._stream.download(host, sums)
        self._stream.finish()
        return host.view(np.int64).copy()

    def warm(self) -> DeviceKernel:
        """Compile the kernel, and return it."""
        self._compiled()
        return self

    def _compiled(self) -> object:
        if self._function is None:
            self._function = self._device.function(self.text)
        return self._function

    def _launch(self, given: Sequence[Argument]) -> None:
        self._stream.launch(self._compiled(), self._tiles, THREADS, given)

    def _placed(self, spans: Spans) -> DeviceArray:
        """Return where the spans' table lies; it is sent only if it is another than the last."""
        places = [spans.lo, spans.hi, spans.src]
        numbers = [spans.step, *spans.flat(len(self.rule.scalars))]
        known = b"".join(column.tobytes() for column in (*places, *numbers))
        if self._on_device is not None and known == self._spans:
            return self._on_device
        first = np.zeros(len(spans) + 1, np.int64)
        np.cumsum(-(-(spans.hi - spans.lo) // TILE), out=first[1:])
        table = b"".join(column.tobytes() for column in (*places, first, *numbers))
        self._stream.finish()  # the last table may still be on its way from there
        if len(self._table) != len(table):
            self._table = self._device.host(len(table))
        self._table[:] = np.frombuffer(table, np.uint8)
        if self._on_device is None or len(self._on_device) < len(table):
            self._on_device = self._device.allocate(len(table))
        self._stream.upload(self._on_device[: len(table)], self._table)
        self._spans, self._tiles = known, int(first[-1])
        return self._on_device

    def _room(self, count: int) -> tuple[npt.NDArray[np.uint8], DeviceArray]:
        if self._sums is None or len(self._sums[0]) < 8 * count:
            self._sums = self._device.host(8 * count), self._device.allocate(8 * count)
        host, there = self._sums
        return host[: 8 * count], there[: 8 * count]

    def _check(
        self,
        spans: Spans,
        base: DeviceArray,
        grad: DeviceArray,
        target: DeviceArray,
        state: Sequence[DeviceArray],
        reads: Sequence[DeviceArray],
    ) -> None:
        rule, real = self.rule, self._dtypes["base"]
        check_counts(rule, state, reads)
        written = {"target": target, **{f"state[{i}]": array for i, array in enumerate(state)}}
        only_read = {"grad": grad, **{f"reads[{i}]": array for i, array in enumerate(reads)}}
        wire = self._dtypes["target"]
        for role, array in {"base": base, **written, **only_read}.items():
            wanted = self._dtypes.get(role, real if role.startswith("state") else wire)
            if not isinstance(array, DeviceArray) or array.dtype != wanted:
                raise UsageError(
                    f"kernel {rule.name!r} was given {role} that is no {wanted} on the device;"
                    " bring it there first",
                    kernel=rule.name,
                )
        size = min(array.size for array in (base, target, *state, *reads))
        check_spans(rule.name, spans, size, grad.size, rule.scalars, self._form)
        pairs = [*combinations(written.items(), 2)]
        pairs += [(one, two) for one in written.items() for two in only_read.items()]
        pairs += [(("base", base), one) for one in written.items()]
        for (one, first), (two, second) in pairs:
            # A thread reads everything of an element before it writes any of it, so an array that
            # is read may be the one that is written.
            same = first.start == second.start and {one, two} & {"base", "target"}
            harmless = same and (one == "base" or two.startswith("reads"))
            if first.overlaps(second) and not harmless:
                raise UsageError(
                    f"kernel {rule.name!r} was given {one} and {two} that overlap in memory; only"
                    " target may be base, and then exactly",
                    kernel=rule.name,
                    arrays=(one, two),
                )


def _identity(spans: Spans, arrays: Sequence[Any]) -> object:
    """Return a value that is equal for calls that `DeviceKernel._check` cannot tell apart."""
    columns = spans.lo, spans.hi, spans.src, spans.step
    places = [column.tobytes() for column in columns[:3]]
    shapes = [len(column) for column in columns], spans.scalars.shape
    held = [
        (each.start, each.size, each.dtype) if isinstance(each, DeviceArray) else None
        for each in arrays
    ]
    return places, shapes, held


def _dtype(name: str) -> np.dtype[Any]:
    if name != "bfloat16":
        return np.dtype(name)
    import ml_dtypes

    found: np.dtype[Any] = np.dtype(ml_dtypes.bfloat16)
    return found
