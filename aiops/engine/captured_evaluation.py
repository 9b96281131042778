"""The parameters of a capture where its model is evaluated (`aiops.store.evaluation`)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from aiops.algorithms.base import Algorithm
from aiops.engine.restore import Captured
from aiops.engine.staleness import RecentStaleness
from aiops.model.arena import Arena
from aiops.model.layout import Array, Layout
from aiops.store.evaluation import leave_out
from aiops.store.snapshots import Version


class CapturedEvaluation:
    """Moves the parameters of a captured model to where it is evaluated.

    Parameters
    ----------
    algorithm
        That of the server, whose rule has an offset.
    found
        The plain values of the server that decides.
    layout
        The whole model.

    Raises
    ------
    LookupError, TypeError, ValueError
        When these are no values of such a server.
    """

    def __init__(self, algorithm: Algorithm, found: Captured, layout: Layout) -> None:
        rule, owners = algorithm.rule(), found.owners
        assert rule.offset is not None, "it is evaluated where it is trained"
        self._offset = rule.offset
        recent = RecentStaleness()
        recent.restore(owners["updates"]["recent_staleness"])
        [_name, _of_replica, *numbers] = owners["versions"][0]
        current = Version.from_description(numbers, Arena(Layout([], empty=True)), layout)
        kept = [algorithm.offset_kept(each, recent.mean) for each in current.tensor_versions]
        self._left = 1 - np.array(kept, np.float64)

    def move(self, arena: Arena, array: Callable[[str], Any], first: int = 0) -> None:
        """Bring captured parameters of one server to where they are evaluated.

        Parameters
        ----------
        arena
            Them, whose values are replaced.
        array
            Returns an array of the server's capture, by its name (`aiops.engine.capture`).
        first
            The number of its first tensor in the whole model.
        """
        values, offsets = list[Array](), list[Array]()
        for index, section in enumerate(arena.layout.sections):
            wide = section.dtype.itemsize < 4
            values.append(array(f"master/{index}") if wide else arena.sections[index])
            offsets.append(array(f"state/{index}/{self._offset}"))
        leave_out(arena, values, offsets, self._left[first : first + len(arena.layout.tensors)])
