"""Gather much in small portions, so that an event loop does other work in between."""

from __future__ import annotations

from collections.abc import Generator, Iterator, Sequence
from typing import TypeAlias, TypeVar

__all__ = ["SLICE", "Gathering", "gathered", "slices"]

T = TypeVar("T")

SLICE = 64
"""The elements between two pauses: of clients, a few tenths of a millisecond."""

Gathering: TypeAlias = Generator[None, None, T]
"""Yields at each pause, and returns what was gathered."""


def slices(elements: Sequence[T]) -> Iterator[Sequence[T]]:
    """Yield the elements, `SLICE` at a time."""
    for begin in range(0, len(elements), SLICE):
        yield elements[begin : begin + SLICE]


def gathered(gathering: Gathering[T]) -> T:
    """Return what is gathered, without a pause."""
    while True:
        try:
            next(gathering)
        except StopIteration as ended:
            found: T = ended.value
            return found
