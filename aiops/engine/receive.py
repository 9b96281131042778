"""Receive the payloads of a push into a buffer, and survey them while they arrive.

Raw values are surveyed chunk by chunk while they are still in the cache. They must be finite and
below 1e18 in magnitude: a finite 1e20 squares to infinity and would freeze a moving average of
squares for ever. A coded part is checked by its codec, and kept coded until the update's thread
decodes it (`aiops.store.gradient`), so that a queued push takes no more memory than was sent.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate

import numpy as np

from aiops.codecs import BUILT_IN, checked_codec, codec_named, raw
from aiops.engine.buffer_pool import BufferPool
from aiops.errors import BadPush, Refused, nearest
from aiops.kernels.scan import Surveyor, largest_magnitude
from aiops.model.layout import Array, Bytes, Cover, Layout
from aiops.model.parts import Part, Parts
from aiops.store.finite_guard import LIMIT
from aiops.store.gradient import Gradient, rows_in
from aiops.wire.shared_payloads import LentPayload
from aiops.wire.sinks import Sink

_ALIGNMENT = 8  # bytes: of the largest items
SURVEY = 256 * 1024  # bytes per survey: within the cache, whatever the size of the chunks
NOTHING_APPLIED = "; nothing of this push was applied"
"""The end of a refusal of a value."""


class PushSink(Sink):
    """The sink of one push or one offered model: a buffer, surveyed as it fills."""

    __slots__ = (
        *("_borrowed", "_done", "_freed", "_layout", "_least", "_offsets", "_pinned", "_pool"),
        *("_runs", "_surveys", "buffer", "cover", "fault"),
    )

    def __init__(
        self,
        buffer: Bytes,
        lengths: list[int],
        layout: Layout,
        cover: Cover,
        pool: BufferPool | None,
        surveys: Sequence[Surveyor],
    ) -> None:
        self.buffer, self.cover, self._layout, self._pool = buffer, cover, layout, pool
        self.fault: Refused | None = None
        self._offsets = [0] if len(lengths) == 1 else list(accumulate(lengths, initial=0))
        self._surveys = surveys
        self._runs: list[tuple[int, Array, Surveyor]] | None = None  # made at the first bytes
        self._least: dict[int, int] = {}  # what the surveys returned, by the start of the run
        self._done = 0  # bytes surveyed
        self._borrowed = False  # the buffer is the sender's
        self._pinned = self._freed = False

    def view(self, part: int, offset: int) -> memoryview:
        """Return the rest of the buffer from there."""
        return self.buffer.data[self._offsets[part] + offset :]

    def filled(self, part: int, offset: int, nbytes: int) -> None:
        """Survey the blocks that are complete, and the rest when it ends the payload."""
        end = self._offsets[part] + offset + nbytes
        if self.fault is not None:
            return
        if self._runs is None:
            if self.cover.whole and len(self._surveys) == 1:  # the usual case
                dtype = self._layout.sections[0].dtype
                self._runs = [(0, self.buffer.view(dtype), self._surveys[0])]
            else:
                self._runs = self._typed_runs()
        for begin, typed, survey in self._runs:
            stop = begin + typed.nbytes
            low = max(self._done, begin)
            high = stop if end >= stop else begin + (end - begin) // SURVEY * SURVEY
            if high > low:
                item = typed.itemsize
                first = (low - begin) // item
                bad = survey(typed[first : (high - begin) // item])
                self._done = high
                if bad >= 0:
                    self.fault = self._bad_value(begin, typed, first + bad)
                    return
                if bad < self._least.get(begin, 0):
                    self._least[begin] = bad
            if end < stop:
                return

    @property
    def largest(self) -> float:
        """The largest magnitude of the values that have been surveyed; raw ones only."""
        runs = self._runs or ()
        found = [(self._least.get(begin, -1), typed.dtype) for begin, typed, _survey in runs]
        return max((largest_magnitude(bits, dtype) for bits, dtype in found), default=0.0)

    def fill_with(self, exchange: Callable[[Bytes], Bytes | None]) -> bool:
        """Have all bytes come in other memory, which stands in for the buffer from here on.

        ``exchange``: takes the buffer for one of as many bytes, with the payload; None: it has
        none. Returns whether it had.
        """
        found = None if self._pool is None else exchange(self.buffer)
        if found is None:
            return False
        self.buffer = found
        self.filled(0, 0, len(found))
        return True

    def take(self) -> Gradient:
        """Return the gradient that was received."""
        return Gradient(self.buffer, self.cover)

    def keep(self) -> Gradient:
        """Return the gradient that was received; the caller owns its buffer from here on."""
        if self._pool is not None:
            pool, self._pool = self._pool, None
            pool.hand_over(self.buffer)
        if self._borrowed:
            self.buffer, self._borrowed = self.buffer.copy(), False
        return self.take()

    def free(self) -> None:
        """Put the buffer back, once it is not pinned; may be called twice."""
        if self._pinned:
            self._freed = True
        elif self._pool is not None:
            pool, self._pool = self._pool, None
            pool.give(self.buffer)

    def pin(self) -> bool:
        """Have the buffer's bytes stay until `unpin`, even if it is freed; False: they may not."""
        self._pinned = self._pool is not None
        return self._pinned

    def unpin(self) -> None:
        """Put the buffer back if it was freed meanwhile."""
        self._pinned = False
        if self._freed:
            self.free()

    def abandoned(self) -> None:
        """Put the buffer back: the rest will not arrive."""
        self.free()

    def _typed_runs(self) -> list[tuple[int, Array, Surveyor]]:
        """Return, per dtype, where its bytes begin in the buffer, a typed view, and its survey."""
        cover, layout, found = self.cover, self._layout, []
        for section, survey in zip(layout.sections, self._surveys, strict=True):
            if cover.whole:
                typed = self.buffer[section.start : section.stop].view(section.dtype)
                found.append((section.start, typed, survey))
                continue
            rows = rows_in(cover.tensors, section)
            if len(rows):
                begin = int(cover.starts[rows[0]])
                last = rows[-1]
                end = int(cover.starts[last] + layout.nbytes_each[cover.tensors[last]])
                found.append((begin, self.buffer[begin:end].view(section.dtype), survey))
        return found

    def _bad_value(self, begin: int, typed: Array, index: int) -> BadPush:
        place = begin + index * typed.itemsize
        row = int(np.searchsorted(self.cover.starts, place, side="right")) - 1
        offset = self._layout.tensors[int(self.cover.tensors[row])].offset
        here = offset + place - int(self.cover.starts[row])
        return bad_value(self._layout, here, float(typed[index]))


class RawIncoming(PushSink):
    """The sink of one push whose parts are all raw."""

    __slots__ = ()

    def adopt(self, lent: LentPayload) -> bool:
        """Use a lent payload in place, without a copy; return whether that is possible.

        Its bytes must not change until this sink has been freed, or kept.
        """
        payload = lent.data
        if len(payload) != len(self.buffer) or payload.ctypes.data % _ALIGNMENT:
            return False
        self.free()
        self.buffer, self._borrowed = payload, True
        self.filled(0, 0, len(payload))
        return True


class CopiedIncoming(RawIncoming):
    """The same, where a lent payload is copied: its bytes must stay, whatever the sender does."""

    __slots__ = ()

    def adopt(self, lent: LentPayload) -> bool:
        """Return False: copy it."""
        return False


class CodedIncoming(PushSink):
    """The sink of one push with coded parts."""

    __slots__ = ("_next", "_parts")

    def __init__(
        self,
        buffer: Bytes,
        parts: Parts,
        layout: Layout,
        cover: Cover,
        pool: BufferPool,
        surveys: list[Surveyor],
    ) -> None:
        self.buffer, self.cover, self._layout, self._pool = buffer, cover, layout, pool
        self.fault, self._borrowed = None, False
        self._pinned = self._freed = False
        self._parts, self._surveys = parts, surveys
        self._offsets = list(accumulate((part.nbytes for part in parts), initial=0))
        self._next = 0  # the first part that has not been checked
        self._look_over(0)  # parts of no bytes: `filled` is not called for them

    @property
    def largest(self) -> float:
        """A bound of the magnitudes: the payloads are not decoded yet."""
        return LIMIT

    def filled(self, part: int, offset: int, nbytes: int) -> None:
        """Check each part when it is complete."""
        self._look_over(self._offsets[part] + offset + nbytes)

    def _look_over(self, end: int) -> None:
        while self._next < len(self._parts) and self._offsets[self._next + 1] <= end:
            if self.fault is None:
                self.fault = self._fault(self._next)
            self._next += 1

    def take(self) -> Gradient:
        """Return the gradient that was received, its parts still coded."""
        return Gradient(self.buffer, self.cover, self._parts)

    def _fault(self, number: int) -> BadPush | None:
        part, begin = self._parts[number], self._offsets[number]
        payload = self.buffer[begin : begin + part.nbytes]
        if part.codec == raw.NAME:
            return self._raw_fault(part, payload)
        tensor = self._layout.tensors[self._layout.tensor_at(part.start)]
        why = checked_codec(part.codec).check(payload, tensor.shape)
        if why is None:
            return None
        return BadPush(
            f"{tensor.name!r}: its payload is no {part.codec} of this tensor: it {why}; nothing of"
            " this push was applied",
            tensor=tensor.name,
            codec=part.codec,
        )

    def _raw_fault(self, part: Part, payload: Bytes) -> BadPush | None:
        for section, survey in zip(self._layout.sections, self._surveys, strict=True):
            low, high = max(part.start, section.start), min(part.stop, section.stop)
            if low >= high:
                continue
            piece = payload[low - part.start : high - part.start]
            aligned = piece.ctypes.data % section.dtype.itemsize == 0
            typed = (piece if aligned else piece.copy()).view(section.dtype)
            bad = survey(typed)
            if bad >= 0:
                place = low + bad * typed.itemsize
                return bad_value(self._layout, place, float(typed[bad]))
        return None


def bad_value(layout: Layout, place: int, value: float) -> BadPush:
    """Return the refusal of a value at a byte of the arena."""
    if layout.within is not None:
        whole, begin = layout.within
        layout, place = whole, begin + place
    tensor = layout.tensors[layout.tensor_at(place)]
    element = (place - tensor.offset) // tensor.dtype.itemsize
    where = tuple(int(i) for i in np.unravel_index(element, tensor.shape))
    return BadPush(
        f"{tensor.name!r} holds {value} at {list(where)}: every value must be finite and"
        f" below 1e18 in magnitude{NOTHING_APPLIED}",
        tensor=tensor.name,
        value=repr(value),
    )


def check_codecs(parts: Parts, *, coded: bool = False) -> None:
    """Refuse a codec that this server does not decode; without ``coded`` all but raw."""
    for part in parts:
        if part.codec == raw.NAME or (coded and codec_named(part.codec) is not None):
            continue
        if coded:
            raise BadPush(
                f"codec {part.codec!r} is not known here; {nearest(part.codec, BUILT_IN)}"
            )
        raise BadPush(f"codec {part.codec!r} is only for gradients of tensors: send this raw")
