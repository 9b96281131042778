"""Requests for tensors: what a reader asks for, what it holds already, and the parts it is sent."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

import numpy as np

from aiops.errors import BadPush
from aiops.model.layout import Ints, Layout, split
from aiops.model.parts import Part, Wants


class Wanted:
    """A request for tensors, with the model version of each that the reader already holds.

    Parameters
    ----------
    have
        Without ``wants``: the model version that the reader holds of every tensor (-1: none).
    wants
        Runs of tensors (first, past the last, version held), in order and without overlaps.
    """

    __slots__ = ("have", "wants")

    def __init__(self, have: int, wants: Wants = ()) -> None:
        self.have, self.wants = have, wants

    @property
    def newest(self) -> int:
        """The newest version held of any tensor."""
        return max([self.have, *(run[2] for run in self.wants)]) if self.wants else self.have

    def mask(self, changed: Ints) -> np.ndarray[tuple[int], np.dtype[np.bool_]]:
        """Return bool[tensors]: those that changed since the reader's version.

        ``changed`` is the model version in which each tensor was last updated.
        """
        if not self.wants:
            return changed > self.have
        mask = np.zeros(len(changed), bool)
        for first, last, have in self.wants:
            mask[first:last] = changed[first:last] > have
        return mask

    def held(self, tensors: int) -> Ints:
        """Return int64[tensors], the model version held of each, wanted or not."""
        held = np.full(tensors, self.have, np.int64)
        for first, last, have in self.wants:
            held[first:last] = have
        return held

    @property
    def whole(self) -> Wanted:
        """The same request of a reader that holds none of it."""
        return Wanted(-1, tuple((first, last, -1) for first, last, _have in self.wants))

    def known(self, version: int, tensors: int) -> Wanted:
        """Return the same request, without claims to hold versions newer than ``version``.

        A claim to a newer version, as after a restart of the server, counts as none.

        Raises
        ------
        BadPush
            When a run goes beyond the model's tensors.
        """
        if not self.wants:  # the usual case
            return self if self.have <= version else ALL
        if self.wants[-1][1] > tensors:
            raise BadPush(
                f"tensors up to number {self.wants[-1][1]} are asked for, but the model has"
                f" {tensors}: was it made for another model?"
            )
        if self.newest <= version:
            return self
        runs = tuple((a, b, have if have <= version else -1) for a, b, have in self.wants)
        return Wanted(self.have if self.have <= version else -1, runs)


ALL = Wanted(-1)
"""A request for all tensors, of a reader that holds none."""


def chosen_parts(
    layout: Layout, versions: Ints, mask: np.ndarray[tuple[int], np.dtype[np.bool_]]
) -> Iterator[Part]:
    """Yield the parts of the tensors in a mask: one per run of neighbours of equal version."""
    edges = np.flatnonzero(np.diff(mask, prepend=False, append=False)).tolist()
    for first, last in zip(edges[::2], edges[1::2], strict=True):
        offset = layout.tensors[first].offset
        stop = layout.tensors[last].offset if last < len(layout.tensors) else layout.nbytes
        if stop == offset:
            continue  # tensors without elements travel with others, or not at all
        breaks = (np.flatnonzero(np.diff(versions[first:last])) + first + 1).tolist()
        for low, high in pairwise([first, *breaks, last]):
            start = layout.tensors[low].offset
            end = layout.tensors[high].offset if high < len(layout.tensors) else layout.nbytes
            if end > start:
                yield from split(start, end, "raw", int(versions[low]))
