"""Received gradients: their bytes, and the offsets of their tensors in them."""

from __future__ import annotations

from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from aiops import kernels
from aiops.codecs import checked_codec, raw
from aiops.kernels.parallel import LARGE, ParallelMap, serial_map
from aiops.model.layout import Array, Bytes, Cover, Ints, Layout, Section
from aiops.model.parts import Part, Parts

_HALF = np.float32(65504.0)
"""The largest float16."""


@dataclass(slots=True)
class Gradient:
    """A received push: its bytes, the tensors that it covers, and its parts (none: all raw).

    ``number``: the push's number at the lead, if other shards hold portions of it. ``on_drop``:
    called when it is kept no longer. ``whole``: its cover on all shards together. ``groups``: the
    payloads that kernels read themselves, if any.
    """

    data: Bytes
    cover: Cover
    parts: Parts = ()
    number: int = 0
    on_drop: Callable[[], None] | None = None
    whole: Cover | None = None
    groups: list[CodedGroup] | None = None

    def dense(
        self,
        layout: Layout,
        room: Callable[[], Bytes],
        backend: str,
        parallel_map: ParallelMap = serial_map,
    ) -> Gradient:
        """Return the gradient with every tensor raw, decoded into ``room()`` if it has parts."""
        if not self.parts:
            return self
        out, begin = room(), 0
        for part in self.parts:
            payload = self.data[begin : begin + part.nbytes]
            begin += part.nbytes
            index = layout.tensor_at(part.start)
            tensor = layout.tensors[index]
            row = int(np.searchsorted(self.cover.tensors, index))
            place = int(self.cover.starts[row]) + part.start - tensor.offset
            target = out[place : place + part.stop - part.start]
            if part.codec == raw.NAME:
                target[:] = payload
                continue
            codec = checked_codec(part.codec)
            typed = target.view(tensor.dtype)
            if tensor.dtype == np.float32:
                if parallel_map is serial_map or typed.nbytes < LARGE:
                    codec.decode(payload, tensor.shape, typed, backend=backend)
                else:
                    parallel_map(codec.pieces(payload, tensor.shape, typed, backend=backend))
                continue
            single = np.empty(typed.size, np.float32)
            codec.decode(payload, tensor.shape, single, backend=backend)
            typed[:] = narrowed(single, tensor.dtype)
        return Gradient(out, self.cover)

    def described(self) -> list[Any]:
        """Return everything but the bytes, as plain values, for `from_description`."""
        whole = None if self.whole is None else _described(self.whole)
        parts = [*map(tuple, self.parts)]
        return [len(self.data), _described(self.cover), parts, self.number, whole]

    @classmethod
    def from_description(
        cls, row: Sequence[Any], data: Bytes, layout: Layout, held: Layout
    ) -> Gradient:
        """Return the gradient of a model that `described` returned this row of.

        ``layout``: the whole model's; ``held``: that of the pieces that are held here.
        """
        _nbytes, cover, parts, number, whole = row
        found = cls(data, _cover(cover, held), tuple(Part(*part) for part in parts), number)
        found.whole = None if whole is None else _cover(whole, layout)
        return found


def _described(cover: Cover) -> list[Any]:
    """Return a cover as plain values, for `_cover`."""
    numbers = [] if cover.level is not None else [cover.tensors, cover.starts, cover.each]
    return [cover.whole, cover.level, numbers]


def _cover(row: Sequence[Any], layout: Layout) -> Cover:
    whole, level, numbers = row
    if level is not None:
        return Cover(layout.all, layout.starts, True, level, None)
    tensors, starts, each = numbers
    return Cover(layout.all if whole else tensors, starts, whole, None, each)


@dataclass(slots=True)
class CodedGroup:
    """The tensors of a gradient that a kernel can read in one call.

    ``codec``: the codec of all of them. ``rows``: their indices among the cover's tensors.
    ``source``: the start of each in ``data``, in bytes of a payload, or in elements if raw.
    """

    codec: str
    rows: Ints
    source: Ints
    data: Array


def groups(
    layout: Layout, gradient: Gradient, readable: Container[str], *, join: bool = True
) -> list[CodedGroup] | None:
    """Return a coded gradient's tensors by codec, for kernels that read payloads themselves.

    None if one is in a codec that is not ``readable``, or is no whole tensor. ``join``: copy raw
    tensors together, aligned; otherwise they are read in place, as payloads.
    """
    rows: dict[str, list[int]] = {}
    sources: dict[str, list[int]] = {}
    raws: list[Bytes] = []
    begin = elements = 0
    for part in gradient.parts:
        first = layout.first_from(part.start)
        last = len(layout.tensors)
        if part.stop < layout.nbytes:
            last = layout.first_from(part.stop)
        end = layout.nbytes if last == len(layout.tensors) else int(layout.starts[last])
        whole = first < last and int(layout.starts[first]) == part.start and end == part.stop
        if not whole or (part.codec != raw.NAME and part.codec not in readable):
            return None
        if part.codec != raw.NAME:
            first = layout.tensor_at(part.start)  # an empty tensor may begin at the same offset
            last = first + 1
        row = int(np.searchsorted(gradient.cover.tensors, first))
        rows.setdefault(part.codec, []).extend(range(row, row + last - first))
        if part.codec == raw.NAME and not join:
            ahead = layout.starts[first:last] - part.start + begin
            sources.setdefault(part.codec, []).extend(ahead.tolist())
        elif part.codec == raw.NAME:
            ahead = (layout.starts[first:last] - part.start) // 4 + elements
            sources.setdefault(part.codec, []).extend(ahead.tolist())
            raws.append(gradient.data[begin : begin + part.nbytes])
            elements += part.nbytes // 4
        else:
            sources.setdefault(part.codec, []).append(begin)
        begin += part.nbytes
    joined = np.concatenate(raws).view(np.float32) if raws else None  # aligned; they are small
    return [
        CodedGroup(
            codec,
            np.array(rows[codec], np.int64),
            np.array(sources[codec], np.int64),
            joined if codec == raw.NAME and joined is not None else gradient.data,
        )
        for codec in rows
    ]


def narrowed(array: Array, dtype: np.dtype[Any]) -> Array:
    """Return an array in another dtype; a value too large for it becomes its largest.

    A gradient's 1e5 must not become float16's infinity, which would end the training.
    """
    if dtype == np.float16:
        array = np.clip(array, -_HALF, _HALF)
    found: Array = array.astype(dtype)
    return found


def section_size(section: Section) -> int:
    """Return the number of elements of a section."""
    return (section.stop - section.start) // section.dtype.itemsize


def rows_in(tensors: Ints, section: Section, chosen: Array | None = None) -> Ints:
    """Return the indices, in a list of tensors, of those in a section (and chosen)."""
    inside = (tensors >= section.first) & (tensors < section.last)
    return np.flatnonzero(inside if chosen is None else inside & chosen)


def spans_of(
    layout: Layout, index: int, gradient: Gradient, rows: Ints, steps: Array
) -> tuple[kernels.Spans, Array]:
    """Return the kernel's spans for some rows of a gradient, and its typed gradient array.

    ``index`` is that of the section in which the tensors of these rows are.
    """
    cover, dtype = gradient.cover, layout.sections[index].dtype
    tensors = cover.tensors[rows]
    begin = int(cover.starts[rows[0]])
    end = int(cover.starts[rows[-1]] + layout.nbytes_each[tensors[-1]])
    source = (cover.starts[rows] - begin) // dtype.itemsize
    spans = kernels.Spans(*layout.ranges(index, tensors), source, steps[rows])
    return spans, gradient.data[begin:end].view(dtype)
