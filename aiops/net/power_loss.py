"""The bytes that a loss of power leaves of what was written and not synced."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

SECTOR = 512
"""Bytes that a disk writes whole, unless it is torn."""


def reach(
    data: bytearray, writes: Sequence[tuple[int, bytes]], rng: Random, *, tear: bool = False
) -> None:
    """Apply to a file's synced bytes those unsynced writes that reached the disk before a cut.

    Parameters
    ----------
    data
        The file; writes beyond its end are cut off.
    writes
        Offsets and bytes, in order.
    rng
        Chooses: all, none, the first ones, or any sectors.
    tear
        Whether of a sector a part may be written.
    """
    sectors = [
        (start, new[start - at : min(at + len(new), start + SECTOR - start % SECTOR) - at])
        for at, new in writes
        for start in (at, *range(at + SECTOR - at % SECTOR, at + len(new), SECTOR))
    ]
    way = rng.randrange(4)
    share = (0.0, 1.0, 1.0, rng.choice((0.5, 0.9)))[way]
    if way == 2:
        sectors = sectors[: rng.randrange(len(sectors) + 1)]
    for start, new in sectors:
        if rng.random() >= share:
            continue
        if tear and rng.random() < 0.3:
            new = new[: rng.randrange(len(new) + 1)]
        new = new[: max(0, len(data) - start)]
        data[start : start + len(new)] = new


def flip_bit(data: bytearray, rng: Random) -> None:
    """Flip one bit, of the bytes before the zeros at the end."""
    used = len(data.rstrip(b"\0"))
    if used:
        data[rng.randrange(used)] ^= 1 << rng.randrange(8)
