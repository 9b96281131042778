"""Segments in which a client's payloads lie while a server on the same machine reads them.

A payload in a room (`Outbox.room`) is lent in place; another of some size is copied into a segment
that is kept for that. Memory that the server may still be reading is never written to: a segment is
used again when the request that lent it has been answered, and at no other time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias
from weakref import WeakSet

import numpy as np

from aiops.kernels.parallel import ParallelMap, copy, serial_map
from aiops.model.arena import Arena
from aiops.model.layout import Layout
from aiops.model.shared_memory import Segment
from aiops.wire.connection import SMALL, Places
from aiops.wire.messages import Share

_KEPT = 4
"""Segments kept for payloads to come."""

Show: TypeAlias = Callable[[Segment], tuple[int, Share | None]]
"""Returns a segment's number (0: it has none), and what the server must be sent first, if any."""


@dataclass(slots=True)
class Lending:
    """The payloads of one request as they are lent.

    Attributes
    ----------
    places
        Where each lies, None if it is sent.
    shares
        The messages that are to be sent before.
    rooms
        The rooms that some of them lie in.
    copied
        The segment that others were copied into, if they were.
    """

    places: Places = ()
    shares: list[Share] = field(default_factory=list)
    rooms: list[Segment] = field(default_factory=list)
    copied: Segment | None = None


class Outbox:
    """One client's segments.

    Parameters
    ----------
    parallel_map
        Copies large payloads in parallel.

    Attributes
    ----------
    lends_above
        Bytes: a model of more is lent; a smaller one is sent as quickly.
    """

    lends_above: int

    def __init__(self, parallel_map: ParallelMap = serial_map) -> None:
        self._parallel_map, self.lends_above = parallel_map, SMALL
        self._rooms: WeakSet[Segment] = WeakSet()
        self._lent: WeakSet[Segment] = WeakSet()  # those that the server may be reading
        self._kept: list[Segment] = []
        self._newest: Arena | None = None

    def room(self, layout: Layout) -> Arena:
        """Return an arena from which payloads are lent as they lie.

        It is the same as last time, unless the server may still be reading that.
        """
        arena = self._newest
        if arena is None or arena.layout is not layout or arena.segment in self._lent:
            self._kept.clear()  # such as the model that was offered: copies are made no more
            segment = Segment(layout.nbytes)
            self._rooms.add(segment)
            arena = self._newest = Arena(layout, segment.data, segment)
        return arena

    def lend(self, payloads: Sequence[Sequence[memoryview]], show: Show) -> Lending:
        """Lend payloads: in place, or copied into a segment; small ones are left to be sent."""
        found: list[tuple[Segment, int] | None] = [self._as_it_lies(views) for views in payloads]
        sizes = [sum(map(len, views)) for views in payloads]
        others = [n for n, place in enumerate(found) if place is None and sizes[n]]
        total = sum(sizes[number] for number in others)
        copied = self._take(total) if total > self.lends_above else None
        if copied is not None:
            begin = 0
            for number in others:
                found[number] = (copied, begin)
                for view in payloads[number]:
                    end = begin + len(view)
                    copy(copied.data[begin:end], np.frombuffer(view, np.uint8), self._parallel_map)
                    begin = end
        lending, places = Lending(copied=copied), []
        for place in found:
            number = 0
            if place is not None:
                number, share = show(place[0])
                if share is not None:
                    lending.shares.append(share)
            if place is not None and number and place[0] is not copied:
                lending.rooms.append(place[0])
                self._lent.add(place[0])
            places.append((number, place[1]) if place is not None and number else None)
        lending.places = places
        return lending

    def take_back(self, lending: Lending) -> None:
        """Note that the server has read these payloads: their segments may be written to."""
        self._lent.difference_update(lending.rooms)
        if lending.copied is not None:
            self._kept.append(lending.copied)
            del self._kept[:-_KEPT]

    def _take(self, nbytes: int) -> Segment:
        """Return a segment of ``nbytes`` to twice that many bytes, kept or new."""
        for index, segment in enumerate(self._kept):
            if nbytes <= len(segment.data) <= 2 * nbytes:
                return self._kept.pop(index)
        return Segment(nbytes)

    def _as_it_lies(self, views: Sequence[memoryview]) -> tuple[Segment, int] | None:
        """Return where in a room a payload lies as a whole, its views one after the other."""
        if not views or not self._rooms:
            return None
        begin = _address(views[0])
        for segment in self._rooms:
            offset, end = begin - segment.data.ctypes.data, begin
            if 0 <= offset < len(segment.data):
                for view in views:
                    if _address(view) != end:
                        return None
                    end += len(view)
                return (segment, offset) if end - begin <= len(segment.data) - offset else None
        return None


def _address(view: memoryview) -> int:
    return np.frombuffer(view, np.uint8).ctypes.data
