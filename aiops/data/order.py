"""The order of a data set's examples in an epoch: a permutation that needs no memory.

Every worker computes the same order from the seed, and of that only the positions that it was
given. So nothing but positions travels. A permutation of n numbers is a cipher: a Feistel network
on the least even number of bits that n needs, which is applied again while the result is n or more
(`docs/wire-data.md` has it in full, with examples).
"""

from __future__ import annotations

from typing import Any

import numpy as np

from aiops.common.settings import whole_number
from aiops.model.layout import Ints
from aiops.model.parts import LARGEST

_ROUNDS = 6
_GOLDEN = 0x9E3779B97F4A7C15
_ALL = (1 << 64) - 1

Words = np.ndarray[Any, np.dtype[np.uint64]]


def _mixed(z: Words) -> Words:
    """Mix the bits of numbers: the last step of SplitMix64."""
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))


def _word(number: int) -> Words:
    return np.array([number & _ALL], np.uint64)


def _keys(seed: int, epoch: int, stream: int) -> Words:
    """Return the key of each round."""
    key = _mixed(_word(seed) + _word(_GOLDEN))
    key = _mixed(key + _word(epoch) + _word(_GOLDEN))
    key = _mixed(key + _word(stream) + _word(_GOLDEN))
    return _mixed(key + np.arange(1, _ROUNDS + 1, dtype=np.uint64) * np.uint64(_GOLDEN))


def permuted(numbers: Ints, n: int, seed: int, epoch: int, stream: int) -> Ints:
    """Return where a permutation of 0 to n - 1 takes some of these numbers.

    Parameters
    ----------
    numbers
        int64, each from 0 to n - 1.
    n
        At least 1, below 2⁵³.
    seed, epoch, stream
        Which permutation.
    """
    half = max(1, ((n - 1).bit_length() + 1) // 2)
    bits, mask = np.uint64(half), np.uint64((1 << half) - 1)
    keys = _keys(seed, epoch, stream)
    found = numbers.astype(np.uint64)
    rest = np.arange(len(found))
    while len(rest):
        left, right = found[rest] >> bits, found[rest] & mask
        for key in keys:
            left, right = right, left ^ (_mixed(right + key) & mask)
        found[rest] = (left << bits) | right
        rest = rest[found[rest] >= n]
    return found.astype(np.int64)


class EpochOrder:
    """The order of the examples of a data set, in each epoch.

    Parameters
    ----------
    examples
        How many there are: 1 to 2⁵³ - 1.
    block
        0: they come as they are. 1: any may follow any. More: that number of neighbours stay
        together; the blocks are shuffled, and the examples in each.
    seed
        0 to 2⁵³ - 1.

    Raises
    ------
    UsageError
        When a number is not whole, or out of range.
    """

    block: int
    examples: int
    seed: int

    def __init__(self, examples: int, block: int = 1, seed: int = 0) -> None:
        self.examples = whole_number("the number of examples", examples, 1, LARGEST)
        self.block = whole_number("the block", block, 0, LARGEST)
        self.seed = whole_number("the seed", seed, 0, LARGEST)

    def indices(self, epoch: int, start: int, stop: int) -> Ints:
        """Return the examples at positions ``start`` to ``stop`` of an epoch: int64."""
        positions = np.arange(start, stop, dtype=np.int64)
        block, n = self.block, self.examples
        if block == 0:
            return positions
        whole = n // block  # blocks; what is left over comes last
        first = whole * block
        found = positions.copy()
        inside = positions < first
        if block == 1:
            return permuted(positions, n, self.seed, epoch, 0)
        blocks = positions[inside] // block
        found[inside] = permuted(blocks, whole, self.seed, epoch, 0) if whole else 0
        offsets = np.where(inside, positions % block, positions - first)
        chosen = np.where(inside, found, whole)
        for each in np.unique(chosen):
            here = chosen == each
            size = block if each < whole else n - first
            within = permuted(offsets[here], size, self.seed, epoch, 1 + int(each))
            found[here] = int(each) * block + within
        return found
