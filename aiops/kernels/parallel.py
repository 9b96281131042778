"""Cut large work into pieces that several threads can share.

A caller that has threads passes a `ParallelMap`. The result has the same bits with any: the
elements of a kernel do not depend on each other, and its sums are exact.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from aiops.kernels.interface import Kernel, Operands, Spans
from aiops.kernels.vocabulary import Array

__all__ = [
    "LARGE",
    "PIECE",
    "ParallelMap",
    "add",
    "copy",
    "cut",
    "filled",
    "serial_map",
    "survey",
    "update",
]

ParallelMap: TypeAlias = Callable[[Sequence[Callable[[], Any]]], None]
"""Calls all of these functions, in any order, and returns when all have returned."""

LARGE = 8 << 20
"""Bytes of parameters; with fewer, waking another thread takes as long as the work."""

PIECE = 1 << 20
"""Bytes of a piece: at least these, and at least an eighth of all."""


def serial_map(pieces: Sequence[Callable[[], Any]]) -> None:
    """Call the functions one after the other: the `ParallelMap` of one thread."""
    for piece in pieces:
        piece()


def copy(target: Array, source: Array, parallel_map: ParallelMap) -> None:
    """Copy uint8[n] ``source`` to ``target``."""
    if parallel_map is serial_map or len(source) < LARGE:
        target[:] = source
        return
    parallel_map([partial(np.copyto, target[at], source[at]) for at in _slices(source)])


def filled(size: int, dtype: np.dtype[Any], value: float, parallel_map: ParallelMap) -> Array:
    """Return a new array, ``dtype[size]``, whose elements all are ``value``.

    Zeros take neither time nor memory: the system maps pages when they are first written.
    """
    if value == 0.0 and not np.signbit(value):
        return np.zeros(size, dtype)
    array = np.empty(size, dtype)
    if parallel_map is serial_map or array.nbytes < LARGE:
        array.fill(value)
        return array
    parallel_map([partial(array[at].fill, value) for at in _slices(array)])
    return array


def beside(busy: Callable[[], bool], parallel_map: ParallelMap) -> ParallelMap:
    """Return a map that does one piece after the other while a thread is busy, and then shares.

    So that thread has a processor to itself, if there are two.
    """

    def share(pieces: Sequence[Callable[[], Any]]) -> None:
        at = 0
        while at < len(pieces) and busy():
            pieces[at]()
            at += 1
        parallel_map(pieces[at:])

    return share


def add(target: Array, other: Array, parallel_map: ParallelMap) -> Array:
    """Add a flat array to another of its dtype, ``target``, in place; return that."""
    if parallel_map is serial_map or target.nbytes < LARGE:
        target += other
        return target
    parallel_map([partial(np.add, target[at], other[at], out=target[at]) for at in _slices(target)])
    return target


def survey(find: Callable[[Array], int], array: Array, parallel_map: ParallelMap) -> int:
    """Return what ``find``, a `aiops.kernels.scan.Surveyor`, returns for a flat array."""
    if parallel_map is serial_map or array.nbytes < LARGE:
        return find(array)
    unfit: list[int] = []
    fit: list[int] = []

    def look(at: slice) -> None:
        index = find(array[at])
        if index >= 0:
            unfit.append(at.start + index)
        else:
            fit.append(index)

    parallel_map([partial(look, at) for at in _slices(array)])
    return min(unfit or fit, default=-1)


def update(
    kernel: Kernel,
    parallel_map: ParallelMap,
    spans: Spans,
    operands: Operands,
    *,
    whole: bool = False,
) -> npt.NDArray[np.int64]:
    """Call a kernel piece by piece, and return its sums, int64[spans].

    ``spans`` and ``operands`` are the kernel's arguments. ``whole``: spans are not cut, because the
    gradient of each is a payload.
    """
    target = operands[3]
    if parallel_map is serial_map or target.nbytes < LARGE:
        return kernel(spans, *operands)
    most = _each(target.nbytes) // target.itemsize
    parts = list(_rows(spans, most) if whole else cut(spans, most))
    found: list[npt.NDArray[np.int64]] = [np.empty(0, np.int64)] * len(parts)

    def run(number: int) -> None:
        found[number] = kernel(parts[number][1], *operands)

    parallel_map([partial(run, number) for number in range(len(parts))])
    sums = np.zeros(len(spans), np.int64)
    for (rows, _part), some in zip(parts, found, strict=True):
        np.add.at(sums, rows, some)
    return sums


def _slices(array: Array) -> Iterator[slice]:
    """Yield the pieces of a flat array."""
    each = _each(array.nbytes) // array.itemsize
    return (slice(low, low + each) for low in range(0, len(array), each))


def _each(nbytes: int) -> int:
    """Return the bytes of a piece: whole cache lines."""
    return max(PIECE, -(-nbytes // 8)) + 63 & -64


def _rows(spans: Spans, most: int) -> Iterator[tuple[npt.NDArray[np.int64], Spans]]:
    """Yield groups of whole spans, of ``most`` elements or a span more, with their indices."""
    begun = np.concatenate(([0], np.cumsum(spans.hi - spans.lo)[:-1])) // most
    edges = np.flatnonzero(np.diff(begun)) + 1
    for first, last in zip([0, *edges.tolist()], [*edges.tolist(), len(spans)], strict=True):
        yield np.arange(first, last), spans.take(slice(first, last))


def cut(spans: Spans, most: int) -> Iterator[tuple[npt.NDArray[np.int64], Spans]]:
    """Cut spans into groups of about ``most`` elements, each with the indices of its spans."""
    sizes = spans.hi - spans.lo
    counts = np.maximum(-(-sizes // most), 1)
    rows = np.repeat(np.arange(len(spans)), counts)
    skipped = np.arange(len(rows)) - np.repeat(np.cumsum(counts) - counts, counts)
    skipped *= most
    low = spans.lo[rows] + skipped
    high = np.minimum(low + most, spans.hi[rows])
    source = spans.src[rows] + skipped
    done = np.cumsum(high - low)
    edges = np.flatnonzero(np.diff((done - 1) // most)) + 1
    for first, last in zip([0, *edges.tolist()], [*edges.tolist(), len(rows)], strict=True):
        mine, at = rows[first:last], slice(first, last)
        yield mine, Spans(low[at], high[at], source[at], spans.step[mine], spans.scalars[mine])
