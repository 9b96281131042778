"""Versions of the parameters, and the leases by which readers hold them.

Theory of operation
===================

Every update of a model makes a new version of its parameters. A `Version` is a number, an arena
with the values, and two arrays with an entry per tensor: how many updates the tensor has had, and
the model version in which it was last updated. Exactly one version is current. Workers fetch the
current version while the next one is computed, and a worker with a slow connection is still
receiving an old one many updates later. This module keeps those apart without copying the
parameters for every reader.

**Leases.** A reader takes a `Lease` on the current version. While a version has leases, its arena
is not written to, so the reader sees exactly one version. `Lease.payloads` returns views of the
arena, to be sent. Each view holds the lease, and so does the lease itself until `release`; when the
last of them is gone, the lease has ended. Nothing needs to report that a payload was sent: the
driver drops the view. `Lease.borrowed_views` returns views that hold nothing, for answers so small
that they are copied before `release`. Leases are taken for answers on their way to workers, for the
version a worker computes its gradient at where the rule will read it (`Rule.reads`), and for a
model that is being saved.

**In place or into a spare.** `SnapshotPool.target` returns where the next version is written. If
the current version has no lease, that is the current version: it is overwritten in place, no second
arena is needed, and no value is copied. Otherwise, or if the caller requests it (``spare``), it is
a new version in a spare arena. An update of all tensors then reads the old arena and writes the new
one, so that its own write is the copy; an update of some tensors copies the old arena first.
A lease may end on any thread, so what a server that keeps a record finds is fixed for each event
(`aiops.store.parameters.Store.freeze`), and a replay is told. `SnapshotPool.publish` makes the
target current. The version before it is retired at once if it has
no lease, and when its last lease ends otherwise.

**The pool.** A retired version's arena is kept as a spare, since memory fresh from the system costs
more than an update. Spares that no update needed during 256 calls of `target` are let go.

**Cutting the slowest readers.** If all readers were slow, every version would stay alive. ``live``
bounds that. When as many versions would be in the hands of readers, the one to be written included,
the pool lets go of the version whose readers are slowest, by ending their connections
(`Sender.dismiss`). A version is as slow as the fastest of its readers, and costs the same however
many share it: so a crowd that reads nothing is cut, and a reader that is slow and gets on is not,
as long as there is one that is slower. The bytes that are unsent are not copied instead: the event
loop holds a view of those that come next, which keeps the arena of a reader that has stalled, and
a copy for each reader would be without a bound. Leases without a sender are not
counted, such as those of `Rule.reads`, which are bounded by the number of workers, and those of
answers that wait for the journal. Nor are those that were cut: the event loop may hold their last
bytes until its next turn. `target` makes another arena rather than wait for them.

**Lent versions and poisoned arenas.** A client on the same machine may map a version's arena and
read it there (`Lease.lend`); no payload is sent. The lease lasts until the client gives the payload
back, and versions that are only lent do not count towards ``live``, since there is nothing to copy.
When the connection of such a client is lost, its process may still be reading, and the mapping
cannot be taken back. `Lease.abandon` then marks the version as poisoned: its arena is never written
to again.
A poisoned current version is not updated in place, and a poisoned arena never becomes a spare. Its
memory is freed when the last process has unmapped it.

**Relaxed mode.** With ``--consistency relaxed`` (`aiops.store.parameters.Store`) a lease is not
counted and every update is in place. There is one arena and no copy, and a reply may mix versions.
Such a lease cannot be lent.

**Values elsewhere.** With a CUDA backend the values are computed on the device. ``Version.room`` is
then the arena on the host and `Version.fill` copies the values into it. `Version.arena` calls
``fill`` on first use and so may take as long as that copy.

Ownership
---------
The pool owns the current version, the older versions with leases, and the spare arenas. The caller
of `target` owns the target until `publish`: no one else reads it or writes to it. There is one
target at a time, which the pool does not check (the store does). A reader owns its lease, and has
to call `release` or `abandon` once, whatever happened to its connection.

Concurrency
-----------
One thread, that of the event loop, makes every call of the pool, takes leases and releases them.
Other threads do three things. A kernel writes the target's arena while the loop goes on leasing and
sending the current version; if the target is the current version, the store reports itself as not
readable and answers wait until the update is committed. A leased version may be read, to be written
to a file. And the interpreter may drop the last view of a payload on any thread. `Lease._close`,
which runs then, only counts down and appends the lease to ``returned``. `SnapshotPool.settle`
removes the lease from its version later, on the loop's thread. `Lease.release` does so at once, if
no view is left.

Faults
------
A reader that never drops its views keeps one arena until it is cut or its connection is closed
(deadlines are the server's concern). A lease that is never released keeps its version's arena for
good. `target` raises MemoryError when the system has no memory for another arena; no version has
changed then. An update that fails in place leaves the current version half written. It cannot be
repaired from here, so the server ends.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, Protocol

import numpy as np

from aiops.model.arena import Arena
from aiops.model.layout import MAX_PART, Bytes, Ints, Layout, level_of, split
from aiops.model.parts import Part, Parts
from aiops.model.shared_memory import Memory
from aiops.store.wanted import ALL, Wanted, chosen_parts

_WINDOW = 1024
"""The updates after which half of the spare arenas that none of them needed are let go."""


_part = partial(tuple.__new__, Part)  # what Part(*item) does, in a third of the time


class Version:
    """One version of the parameters; immutable while it has `readers`.

    ``layout`` is the whole model's. On a shard the arena holds only some of its bytes. ``room`` is
    that arena, whatever it contains, and ``fill``, if set, copies the values into it.
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
        self._each: Ints | None = tensor_versions  # made of the level on first use
        self._changed = changed
        self.readers: set[Lease] = set()
        self.lent = 0  # the readers to which its memory is lent
        self.poisoned = False  # a lost reader may still read its arena
        self._parts: Parts | None = None

    @property
    def arena(self) -> Arena:
        """The arena with the values, copied here first if they are on a device."""
        if self.fill is not None:
            self.fill()
            self.fill = None
        return self.room

    @property
    def tensor_versions(self) -> Ints:
        """int64[tensors], the updates that each tensor has had. Not to be written to."""
        if self._each is None:
            self._each = np.full(len(self.layout.tensors), self.level, np.int64)
        return self._each

    @property
    def parts(self) -> Parts:
        """The parts of a message that carry all of this version."""
        if self._parts is None:
            if self.level is not None:
                self._parts = tuple(split(0, self.layout.nbytes, "raw", self.level))
            else:
                self._parts = self.layout.parts(self.tensor_versions)
        return self._parts

    @property
    def changed(self) -> Ints:
        """The model version in which each tensor was last updated. Not to be written to."""
        if self._changed is None:
            return np.full(len(self.layout.tensors), self.number, np.int64)
        return self._changed

    def described(self) -> list[Any]:
        """Return its numbers as plain values, for `from_description`."""
        each = None if self.level is not None else self._each
        return [self.number, self.level, each, self._changed]

    @classmethod
    def from_description(cls, row: Sequence[Any], arena: Arena, layout: Layout) -> Version:
        """Return the version that `described` returned this row of, with its values."""
        number, level, each, changed = row
        return cls(number, arena, each, level, changed, layout)

    def following(self, arena: Arena) -> Version:
        """Return a copy of this version's numbers with another arena, for `advance`."""
        return Version(self.number, arena, self._each, self.level, self._changed, self.layout)

    def follow(self, other: Version, tensors: Ints) -> None:
        """Take another version's number; ``tensors`` are those whose values were taken too."""
        changed = self.changed.copy()
        changed[tensors] = other.number
        self._changed, self._parts = changed, None
        self.number, self._each, self.level = other.number, other.tensor_versions, other.level

    @property
    def all_changed(self) -> bool:
        """True if every tensor was last updated in this version."""
        return self._changed is None

    def follow_all(self, other: Version) -> None:
        """Take another version's number, as all values were taken."""
        self._changed = self._parts = None
        self.number, self._each, self.level = other.number, other._each, other.level

    def parts_since(self, have: int) -> Parts:
        """Return the parts for a reader that holds version ``have`` of all tensors."""
        if have == self.number:
            return ()
        if self._changed is not None:
            return self.parts_for(Wanted(have) if have <= self.number else ALL)
        nbytes, level = self.layout.nbytes, self.level
        if self._parts is None and level is not None and 0 < nbytes <= MAX_PART:
            self._parts = (_part((0, nbytes, "raw", nbytes, level)),)  # `parts` in fewer calls
        return self._parts or self.parts

    def parts_for(self, wanted: Wanted) -> Parts:
        """Return the parts that a reader requests and does not hold."""
        if not wanted.wants:
            if wanted.have == self.number:
                return ()
            if self._changed is None:
                return self.parts
        mask = wanted.mask(self.changed)
        layout = self.layout
        return self.parts if mask.all() else tuple(chosen_parts(layout, self.tensor_versions, mask))

    def advance(self, number: int, touched: Ints) -> None:
        """Become version ``number``, in which the touched tensors have one more update."""
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


class Sender(Protocol):
    """The connection on which a lease's payloads are sent."""

    def pace(self) -> float:
        """Return the bytes per second at which its peer has read the answer so far."""

    def dismiss(self, why: str) -> None:
        """End it, and drop the views that are unsent; ``why``: a sentence, of the peer."""


class Lease:
    """A reader's hold on a version; ends after `release`, with the last view of `payloads`.

    ``sender``: set by the one that sends the payloads; the pool may cut it off when too many
    versions are alive.
    """

    __slots__ = ("_coded", "_open", "_pool", "lent", "sender", "version")

    def __init__(
        self,
        version: Version,
        pool: SnapshotPool | None,
        coded: Mapping[int, Bytes] | None = None,
    ) -> None:
        self.version, self.lent = version, False
        self._coded = coded or {}  # payloads of parts that are not raw, by part number
        self.sender: Sender | None = None
        self._pool = pool  # None: it is not counted
        self._open = 1  # the lease itself, until `release`
        if pool is not None:
            version.readers.add(self)

    def shared(self) -> Lease:
        """Return another lease on the same version, which ends by itself."""
        return Lease(self.version, self._pool)

    def borrowed_views(self, parts: Parts | None = None) -> list[list[memoryview]]:
        """Return views to be copied before the lease is released, one list per part.

        ``parts`` are by default those of the whole version.
        """
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
        """Return views to send, one list per part; each keeps the version until it is dropped."""
        parts = self.version.parts if parts is None else parts
        found: list[list[memoryview]] = []
        begin = self.version.arena.layout.begin
        for place, part in enumerate(parts):
            if not part.nbytes:  # its bytes lie on another shard
                found.append([])
                continue
            if place in self._coded:  # encoded once, and not written to after
                found.append([self._coded[place].data])
                continue
            array = self.version.arena.data[part.start - begin : part.stop - begin]
            self._open += 1
            weakref.finalize(array, self._close).atexit = False
            found.append([array.data])
        return found

    @property
    def in_use(self) -> bool:
        """True while payloads that are views of the version have not been dropped."""
        return self._open > 1

    @property
    def lendable(self) -> bool:
        """True if the version can be lent: the lease is counted, all of it is raw, and few are."""
        pool = self._pool
        return pool is not None and not self._coded and pool.may_lend(self.version)

    def lend(self) -> None:
        """Let the reader read the version in its memory, until it gives that back."""
        self.lent = True
        self.version.lent += 1

    def release(self) -> None:
        """End the lease; payloads still in use keep the version until they are dropped."""
        self._open -= 1
        pool, version = self._pool, self.version
        if self._open or pool is None:
            return
        version.readers.remove(self)  # as `SnapshotPool.settle` does, in fewer calls
        version.lent -= self.lent
        if version is not pool.current:
            pool.retire(version)

    def abandon(self) -> None:
        """End the lease of a lost reader, which may still read: poison the version."""
        self.version.poisoned = True
        self._close()

    def _close(self) -> None:
        # May run on any thread, since a garbage collection can start on any. So it only appends:
        # the pool's own sets change on one thread, in `settle`.
        self._open -= 1
        if self._open == 0 and self._pool is not None:
            self._pool.returned.append(self)


class SnapshotPool:
    """The live versions of one model: the current one, and the older ones that have leases.

    Parameters
    ----------
    current
        The first version.
    live
        Bound on the versions that are sent to readers, with the one in the making; and on those
        that are lent. Beyond it the slowest readers are cut off.
    memory
        Makes the arenas.

    Attributes
    ----------
    cut
        The number of readers that were cut off.
    """

    # Those that compiled code reads: `aiops.compiled`.
    __slots__ = ("__dict__", "__weakref__", "_until", "current", "returned")

    def __init__(self, current: Version, live: int, memory: Memory | None = None) -> None:
        self.current, self.live, self._memory = current, live, memory or Memory()
        self.cut = 0
        self.returned: deque[Lease] = deque()  # ended, and not settled yet
        self._alive = {current: None}  # in the order of their numbers
        self._spare: list[Arena] = []
        self._unused = 0  # spare arenas that were not needed in this window
        self._until = _WINDOW  # versions to come in it

    def __contains__(self, version: Version) -> bool:
        return version in self._alive

    @property
    def spare(self) -> int:
        """The number of arenas kept for versions to come."""
        return len(self._spare)

    @property
    def alive(self) -> int:
        """The number of versions alive."""
        self.settle()
        return len(self._alive)

    @property
    def leased(self) -> bool:
        """True if the current version may not be written to: it has readers, or is poisoned."""
        if self.returned:
            self.settle()
        return bool(self.current.readers) or self.current.poisoned

    def lease(self, coded: Mapping[int, Bytes] | None = None) -> Lease:
        """Return a lease on the current version.

        ``coded``: payloads of parts that are not raw, by part number.
        """
        if self.returned:
            self.settle()
        return Lease(self.current, self, coded)

    def lease_of(self, version: Version) -> Lease:
        """Return a lease on a version that is alive."""
        return Lease(version, self)

    def restore(self, current: Version, older: Iterable[Version]) -> None:
        """Continue with these versions; the older ones need a lease each before the next call."""
        self.current, self._alive = current, dict.fromkeys((*older, current))

    def target(self, spare: bool = False) -> Version:
        """Return where the next version is to be written: in place, or in a spare arena.

        ``spare``: not in place, since the current version may still be requested.
        """
        if self.returned:
            self.settle()
        self._until -= 1  # `_unused`: the fewest spares left over at any time in this window
        if not self._until:
            # Half of what was not needed: the next crowd of readers would have the system hand out,
            # and clear, all of it again while updates wait.
            del self._spare[: -(-self._unused // 2)]
            self._unused, self._until = len(self._spare), _WINDOW
        if not (self.current.readers or self.current.poisoned or spare):
            return self.current
        if len(self._alive) >= self.live:
            self._make_room()
        if not self._spare:
            return self.current.following(self._memory.arena(self.current.room.layout))
        arena = self._spare.pop()
        self._unused = min(self._unused, len(self._spare))
        return self.current.following(arena)

    def may_lend(self, version: Version) -> bool:
        """Return whether a version can be lent: it is already, or there are fewer than ``live``."""
        return version.lent > 0 or sum(each.lent > 0 for each in self._alive) < self.live

    def publish(self, version: Version) -> None:
        """Make what `target` returned the current version."""
        if version is not self.current:
            before, self.current = self.current, version
            self._alive[version] = None
            self.retire(before)

    @property
    def versions(self) -> list[Version]:
        """The versions alive, in the order of their numbers."""
        return [*self._alive]

    def abandon(self, version: Version) -> None:
        """Keep what `target` returned as a spare, unless it is the current version."""
        if version is not self.current:
            self._spare.append(version.room)

    def settle(self) -> None:
        """Remove the leases that have ended, and retire the versions left without any."""
        while self.returned:
            lease = self.returned.popleft()
            version = lease.version
            version.readers.remove(lease)
            version.lent -= lease.lent
            if version is not self.current:
                self.retire(version)

    def retire(self, version: Version) -> None:
        """Keep the arena of a version without leases as a spare, unless it is the current one."""
        if version.readers or version is self.current:
            return
        del self._alive[version]
        if not version.poisoned:
            self._spare.append(version.room)

    def _make_room(self) -> None:
        """Cut off the slowest readers, until the next version is within the bound."""
        while True:
            sent = [version for version in self._alive if _is_sent(version)]
            older = [version for version in sent if version is not self.current]
            if len(sent) + 1 <= self.live or not older:
                return
            slowest = min(older, key=_pace)
            why = (
                f"it read slowest ({_pace(slowest) / 1024:.0f} KiB/s) of the clients that hold"
                f" {len(sent)} versions of the parameters: --live-versions allows more"
            )
            for lease in list(slowest.readers):
                if lease.sender is not None:
                    sender, lease.sender = lease.sender, None
                    sender.dismiss(why)
                    self.cut += 1
            self.settle()


def _is_sent(version: Version) -> bool:
    """Return whether only readers hold a version, to whom it is being sent."""
    return bool(version.readers) and all(lease.sender is not None for lease in version.readers)


def _pace(version: Version) -> float:
    """Return the pace of the fastest reader of a version."""
    return max(lease.sender.pace() for lease in version.readers if lease.sender is not None)
