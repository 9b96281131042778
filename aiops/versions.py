"""Versions of the parameters, and the leases by which readers hold them."""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable

from aiops.layout import Arena, Ints, split
from aiops.messages import Parts


class Version:
    """One version of the parameters; immutable while `readers` is not 0."""

    __slots__ = ("_parts", "arena", "leases", "level", "number", "readers", "tensor_versions")

    def __init__(self, number: int, arena: Arena, tensor_versions: Ints, level: int | None) -> None:
        self.number = number
        self.arena = arena
        self.tensor_versions = tensor_versions
        self.level = level  # the version of every tensor, when they are all equal
        self.readers = 0
        self.leases: list[weakref.ref[Lease]] = []
        self._parts: Parts | None = None

    @property
    def parts(self) -> Parts:
        """The parts that this version travels as."""
        if self._parts is None:
            layout = self.arena.layout
            if self.level is not None:
                self._parts = tuple(split(0, layout.nbytes, "raw", self.level))
            else:
                self._parts = layout.parts(self.tensor_versions)
        return self._parts

    def advance(self, number: int, touched: Ints) -> None:
        """Become the version of that number, in which the touched tensors have one more update."""
        self.number, self._parts = number, None
        if touched is self.arena.layout.all:
            self.tensor_versions = self.tensor_versions + 1
            self.level = None if self.level is None else self.level + 1
        else:
            self.tensor_versions = self.tensor_versions.copy()
            self.tensor_versions[touched] += 1
            low, high = self.tensor_versions.min(), self.tensor_versions.max()
            self.level = int(low) if low == high else None


class Lease:
    """A reader's hold on a version; ends when everything `payloads` returned has been let go.

    ``evict`` may be set by whoever sends the payloads: the store calls it when too many versions
    are alive, and the sender then copies what is still unsent and lets the version go.
    """

    __slots__ = ("__weakref__", "_open", "_returned", "evict", "version")

    def __init__(self, version: Version, returned: deque[Version] | None) -> None:
        self.version = version
        self.evict: Callable[[Lease], None] | None = None
        self._returned = returned
        self._open = 1  # the lease itself, until `release`
        if returned is not None:
            version.readers += 1

    def glimpses(self) -> list[list[memoryview]]:
        """Return views to be copied before the lease is released, one list per part."""
        data = self.version.arena.data.data
        return [[data[part.start : part.stop]] for part in self.version.parts]

    def payloads(self) -> list[list[memoryview]]:
        """Return views to send, one list per part; each keeps the version until it is let go."""
        found = []
        for part in self.version.parts:
            array = self.version.arena.data[part.start : part.stop]
            self._open += 1
            weakref.finalize(array, self._close).atexit = False
            found.append([array.data])
        return found

    def release(self) -> None:
        """End the lease; payloads still out keep the version alive until they are let go."""
        self._close()

    def _close(self) -> None:
        # May run on any thread (a collection can start anywhere), so it only appends: the store
        # does the counting on its own thread.
        self._open -= 1
        if self._open == 0 and self._returned is not None:
            self._returned.append(self.version)
