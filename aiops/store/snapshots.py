"""Versions of the parameters, and the leases by which readers hold them."""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from itertools import pairwise

import numpy as np

from aiops.errors import BadPush
from aiops.model.arena import Arena
from aiops.model.layout import MAX_PART, Bytes, Ints, Layout, level_of, split
from aiops.model.parts import Part, Parts, Wants
from aiops.model.shared_memory import Memory

_WINDOW = 256
"""Versions after which arenas that none of them needed are let go.

Until then they are kept: memory fresh from the system costs more than an update.
"""


class Wanted:
    """Which tensors are asked for, and as of which model version their reader holds them.

    Parameters
    ----------
    have
        The model version that it holds of every tensor (-1: none), without ``wants``.
    wants
        Runs of tensors, each with the version held of it.
    """

    __slots__ = ("have", "wants")

    def __init__(self, have: int, wants: Wants = ()) -> None:
        self.have, self.wants = have, wants

    @property
    def newest(self) -> int:
        """The newest version held of any tensor."""
        return max([self.have, *(run[2] for run in self.wants)]) if self.wants else self.have

    def mask(self, changed: Ints) -> np.ndarray[tuple[int], np.dtype[np.bool_]]:
        """Return which tensors have changed since, given when each last did."""
        if not self.wants:
            return changed > self.have
        mask = np.zeros(len(changed), bool)
        for first, last, have in self.wants:
            mask[first:last] = changed[first:last] > have
        return mask

    def held(self, tensors: int) -> Ints:
        """Return the model version held of each tensor (of those that are not wanted too)."""
        held = np.full(tensors, self.have, np.int64)
        for first, last, have in self.wants:
            held[first:last] = have
        return held

    def known(self, version: int, tensors: int) -> Wanted:
        """Return the same, without claims to hold versions that do not exist yet.

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


_part = partial(tuple.__new__, Part)  # what Part(*item) does, in a third of the time

ALL = Wanted(-1)
"""Everything, for a reader who holds nothing."""


class Version:
    """One version of the parameters; immutable while it has `readers`.

    ``layout`` is the model's; the arena may hold only the first of its bytes. ``room`` is that
    arena, whatever is in it, and ``fill`` brings its values if they are elsewhere.
    """

    __slots__ = (
        *("_changed", "_each", "_parts", "fill", "layout", "lent", "level", "number", "readers"),
        *("room", "poisoned"),
    )

    def __init__(
        self,
        number: int,
        arena: Arena,
        tensor_versions: Ints | None,
        level: int | None,
        changed: Ints | None = None,
        layout: Layout | None = None,
    ) -> None:
        self.number = number
        self.room = arena
        self.fill: Callable[[], None] | None = None
        self.layout = layout or arena.layout
        self.level = level  # the version of every tensor, when they are all equal
        self._each: Ints | None = tensor_versions  # made of the level when somebody asks
        self._changed = changed
        self.readers: set[Lease] = set()
        self.lent = 0  # of these, those to whom it is lent: they read it in its memory
        self.poisoned = False  # somebody may read its arena for ever: it is never written to again
        self._parts: Parts | None = None

    @property
    def arena(self) -> Arena:
        """Its values; they are brought here if they were not, which takes as long as that does."""
        if self.fill is not None:
            self.fill()
            self.fill = None
        return self.room

    @property
    def tensor_versions(self) -> Ints:
        """The version of each tensor: how many updates it has had. Not to be written to."""
        if self._each is None:
            self._each = np.full(len(self.layout.tensors), self.level, np.int64)
        return self._each

    @property
    def parts(self) -> Parts:
        """The parts that this version travels as."""
        if self._parts is None:
            layout = self.layout
            nbytes, level = layout.nbytes, self.level
            if level is not None and 0 < nbytes <= MAX_PART:
                self._parts = (_part((0, nbytes, "raw", nbytes, level)),)
            elif level is not None:
                self._parts = tuple(split(0, nbytes, "raw", level))
            else:
                self._parts = layout.parts(self.tensor_versions)
        return self._parts

    @property
    def changed(self) -> Ints:
        """The model version in which each tensor was last updated."""
        if self._changed is None:
            self._changed = np.full(len(self.layout.tensors), self.number, np.int64)
        return self._changed

    def following(self, arena: Arena) -> Version:
        """Return what the next version is to be made of, in another arena."""
        return Version(self.number, arena, self._each, self.level, self._changed, self.layout)

    def follow(self, other: Version, tensors: Ints) -> None:
        """Become the version of another's number, with some of its tensors."""
        changed = self.changed.copy()
        changed[tensors] = other.number
        self._changed, self._parts = changed, None
        self.number, self._each, self.level = other.number, other.tensor_versions, other.level

    def parts_since(self, have: int) -> Parts:
        """Return the parts that bring what a reader does not have who holds a version of all."""
        if have == self.number:
            return ()
        if self._changed is None:
            return self._parts or self.parts
        return self.parts_for(Wanted(have) if have <= self.number else ALL)

    def parts_for(self, wanted: Wanted) -> Parts:
        """Return the parts that bring what a reader wants and does not have."""
        if not wanted.wants:
            if wanted.have == self.number:
                return ()
            if self._changed is None:
                return self.parts
        mask = wanted.mask(self.changed)
        layout = self.layout
        return self.parts if mask.all() else tuple(_chosen(layout, self.tensor_versions, mask))

    def advance(self, number: int, touched: Ints) -> None:
        """Become the version of that number, in which the touched tensors have one more update."""
        if touched is not self.layout.all:
            changed, each = self.changed.copy(), self.tensor_versions.copy()
            changed[touched] = number
            each[touched] += 1
            self._changed, self._each, self.level = changed, each, level_of(each)
        elif self.level is not None:
            self._changed, self._each, self.level = None, None, self.level + 1
        else:
            self._changed, self._each = None, self.tensor_versions + 1
        self.number, self._parts = number, None


class Lease:
    """A reader's hold on a version; ends when everything `payloads` returned has been let go.

    ``evict`` may be set by whoever sends the payloads: the store calls it when too many versions
    are alive, and the sender then copies what is still unsent and lets the version go.
    """

    __slots__ = ("_coded", "_open", "_returned", "evict", "lent", "version")

    def __init__(
        self,
        version: Version,
        returned: deque[Lease] | None,
        coded: Mapping[int, Bytes] | None = None,
    ) -> None:
        self.version, self.lent = version, False
        self._coded = coded or {}  # payloads of parts that are not raw, by their place
        self.evict: Callable[[Lease], None] | None = None
        self._returned = returned
        self._open = 1  # the lease itself, until `release`
        if returned is not None:
            version.readers.add(self)

    def glimpses(self, parts: Parts | None = None) -> list[list[memoryview]]:
        """Return views to be copied before the lease is released, one list per part (of all)."""
        version = self.version
        parts = version.parts if parts is None else parts
        arena = version.room if version.fill is None else version.arena
        data, begin = arena.data.data, arena.layout.begin
        found: list[list[memoryview]] = []
        for place, part in enumerate(parts):
            if place in self._coded:
                found.append([self._coded[place].data])
            else:
                found.append([data[part.start - begin : part.stop - begin]] if part.nbytes else [])
        return found

    def payloads(self, parts: Parts | None = None) -> list[list[memoryview]]:
        """Return views to send, one list per part; each keeps the version until it is let go."""
        parts = self.version.parts if parts is None else parts
        found: list[list[memoryview]] = []
        begin = self.version.arena.layout.begin
        for place, part in enumerate(parts):
            if not part.nbytes:  # its bytes lie on another shard
                found.append([])
                continue
            if place in self._coded:  # nobody writes to it any more
                found.append([self._coded[place].data])
                continue
            array = self.version.arena.data[part.start - begin : part.stop - begin]
            self._open += 1
            weakref.finalize(array, self._close).atexit = False
            found.append([array.data])
        return found

    @property
    def lendable(self) -> bool:
        """Whether its reader may read the version in its memory: it is whole, and stays."""
        return self._returned is not None and not self._coded

    def lend(self) -> None:
        """Let the reader read the version in its memory, for as long as it likes."""
        self.lent = True
        self.version.lent += 1

    def release(self) -> None:
        """End the lease; payloads still out keep the version alive until they are let go."""
        self._open -= 1  # as `_close`
        if self._open == 0 and self._returned is not None:
            self._returned.append(self)

    def abandon(self) -> None:
        """End the lease of a reader that was lost, and may read on: nobody can tell it."""
        self.version.poisoned = True
        self._close()

    def _close(self) -> None:
        # May run on any thread (a collection can start anywhere), so it only appends: the store
        # does the counting on its own thread.
        self._open -= 1
        if self._open == 0 and self._returned is not None:
            self._returned.append(self)


class SnapshotPool:
    """The versions of one model that are alive: those that somebody reads, and the current one.

    Parameters
    ----------
    current
        The first.
    live
        At most so many are alive, beside those that are lent; beyond it the readers of the oldest
        are given a copy of what they have not sent yet (counted in `copies`).
    memory
        Where their arenas are made.
    """

    def __init__(self, current: Version, live: int, memory: Memory | None = None) -> None:
        self.current, self.live, self._memory = current, live, memory or Memory()
        self.copies = 0
        self.returned: deque[Lease] = deque()  # those that have ended, and are not counted yet
        self._alive = {current: None}  # in the order of their numbers
        self._spare: list[Arena] = []
        self._unused = 0  # spare arenas that were not needed in this window
        self._until = _WINDOW  # versions to come in it

    def __contains__(self, version: Version) -> bool:
        return version in self._alive

    @property
    def spare(self) -> int:
        """How many arenas are kept for versions to come."""
        return len(self._spare)

    @property
    def alive(self) -> int:
        """How many versions are alive."""
        self.settle()
        return len(self._alive)

    def lease(self, coded: Mapping[int, Bytes] | None = None) -> Lease:
        """Take hold of the current version; ``coded`` are the payloads of parts that are coded."""
        if self.returned:
            self.settle()
        return Lease(self.current, self.returned, coded)

    def target(self, spare: bool = False) -> Version:
        """Return where the next version is to be written: in place, or in a spare arena.

        ``spare``: not in place, since the current version may still be asked for.
        """
        if self.returned:
            self.settle()
        self._until -= 1
        if not self._until:
            del self._spare[: self._unused]
            self._unused, self._until = len(self._spare), _WINDOW
        if not (self.current.readers or self.current.poisoned or spare):
            return self.current
        if len(self._alive) >= self.live and self._busy >= self.live:
            self._evict()
        if not self._spare:
            return self.current.following(self._memory.arena(self.current.room.layout))
        arena = self._spare.pop()
        self._unused = min(self._unused, len(self._spare))
        return self.current.following(arena)

    @property
    def _busy(self) -> int:
        """How many versions are alive not only because they are lent."""
        return sum(len(version.readers) > version.lent for version in self._alive) + 1

    def publish(self, version: Version) -> None:
        """Make what `target` returned the current version."""
        if version is not self.current:
            before, self.current = self.current, version
            self._alive[version] = None
            self._retire(before)

    def settle(self) -> None:
        """Count the leases that ended, and keep the arenas that nobody reads any more."""
        while self.returned:
            lease = self.returned.popleft()
            version = lease.version
            version.readers.remove(lease)
            version.lent -= lease.lent
            if version is not self.current:
                self._retire(version)

    def _retire(self, version: Version) -> None:
        """Keep the arena of a version that nobody reads any more, unless it is the current one."""
        if version.readers or version is self.current:
            return
        del self._alive[version]
        if not version.poisoned:
            self._spare.append(version.room)

    def _evict(self) -> None:
        """Give the readers of the oldest version that has any a copy of what they have not sent.

        Versions that are kept because their workers' gradients will be compared with them
        (`Rule.reads`) have no such readers: they do not count.
        """
        for version in self._alive:
            slow = [lease for lease in version.readers if lease.evict is not None]
            for lease in slow:
                assert lease.evict is not None
                lease.evict(lease)
                self.copies += 1
            if slow:
                break
        self.settle()


def _chosen(
    layout: Layout, versions: Ints, mask: np.ndarray[tuple[int], np.dtype[np.bool_]]
) -> Iterator[Part]:
    """Yield the parts of some tensors: one per run of neighbours of equal version."""
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
