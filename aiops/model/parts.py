"""Payloads as values: which bytes of a model one payload holds, which tensors a request wants."""

from __future__ import annotations

from typing import NamedTuple, TypeAlias

LARGEST = (1 << 53) - 1
"""Largest of the numbers that count something: every language holds it exactly.

No run reaches it, and the sum of thousands of them fits into 64 bits.
"""

MAX_TEXT = 4096
"""Longest string, in characters, except inside a map of plain values: of a tensor's name too."""

Wants: TypeAlias = tuple[tuple[int, int, int], ...]
"""Tensors that a request wants: first tensor, past the last, the version held of them."""

Ranges: TypeAlias = tuple[tuple[int, int, int], ...]
"""Ranges of the arena, in bytes: start, stop, the version of their tensors."""


class Part(NamedTuple):
    """One payload: the bytes [start, stop) of the arena, written by a codec.

    ``version`` is the version of the tensors in it: in a push the one the gradient was computed
    at (its base), in a reply the one that is sent. All tensors of a part share it.
    """

    start: int
    stop: int
    codec: str
    nbytes: int
    version: int


Parts: TypeAlias = tuple[Part, ...]
