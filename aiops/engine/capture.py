"""Capture everything that decides an engine's future (`aiops.engine.restore` is the inverse).

A capture is taken between two events, when no update is outstanding: after the one that issued the
`CaptureJob` of a `SnapshotDue`, or at the end. It is a map of plain values (`aiops.state.plain`),
an entry per owner, and named arrays:

====================  ============================================================================
``params``            the parameters; ``params@95``: version 95, at which a worker computes
``replica``           the delta replica's values; ``replica@93`` as above
``state/0/n``         the optimiser's array called n, of the layout's section 0
``master/0``          float32 masters of 16-bit parameters, of section 0
``sum/0``             the sum in progress, if any tensor has one
``gradient/7``        the bytes of a gradient that may be applied again
``table/words/ids``   the rows of a table that are stored; ``table/words/rows``: with their state
``replica/payloads``  those of the replica's increments, one after the other
``replica/encoders``  the arrays on which later ones depend
====================  ============================================================================

Arrays that no update overwrites (versions, gradients, payloads) are held by leases and references,
and can be written beside training. So can the rows of tables: updates copy those that they are
about to overwrite (`aiops.store.table_image`). The others are copied by `Capture.copy`, which must
be done before the next update begins: the `CaptureJob` does it, on any thread. So a capture takes,
beside what it copies, the memory of one version, which is held while updates go to another arena,
and that of rows which were pushed before they were written. The memory of the copies is kept for
the next capture.

Some state is not captured, because it does not outlive the process: connections and their buffers,
caches of pure functions, memory kept for reuse. Nor are the payloads that are queued. The journal
has them, and the capture has the numbers of their rows (`Received.row`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np

from aiops.algorithms.base import Decision, Policy
from aiops.engine.engine import Engine
from aiops.engine.gradient_cache import CachedGradient
from aiops.engine.membership import Member, Membership
from aiops.engine.replies import PendingPush
from aiops.engine.table_requests import TableWork
from aiops.engine.training import Training
from aiops.engine.update_queue import QueueItem
from aiops.errors import UsageError
from aiops.kernels.parallel import ParallelMap, serial_map
from aiops.model.arena import aligned
from aiops.model.layout import Array, Bytes
from aiops.state.plain import pack, unpack
from aiops.store.capture_job import CaptureJob
from aiops.store.delta_replica import DeltaReplica
from aiops.store.gradient import Gradient
from aiops.store.parameters import Store
from aiops.store.snapshots import Lease, Version
from aiops.store.sparse_table import SparseTable
from aiops.store.table_image import RowStream, TableImage

_PIECE = 8 << 20
"""Bytes that are copied at a time, on several threads."""

_PAGE = 4096
"""Bytes: memory that begins at a page can be written to a disk without another copy."""

Copied = Callable[[], Mapping[str, Array]]
"""Copies arrays; returns them by name."""


@dataclass(slots=True)
class Capture:
    """The state of an engine after one event.

    Attributes
    ----------
    number
        The number that it was requested with.
    settings
        The settings that must be equal in the engine that it is restored into.
    versions
        The number of the model's version, and of each table's.
    owners
        Plain values, by owner. They are copies.
    arrays
        Arrays by name, which do not change while the leases are held.
    rows
        Further arrays, of tables, which are not in memory as one. They are read once.
    overwritten, copies
        Further arrays, which `copy` copies: those of the host, and calls that return the others.
    copied
        Bytes that `copy` copies.
    kept
        Bytes that updates copy, at most: as if all rows were overwritten before they are read.
    leased
        Bytes of the versions that are current, which updates would have overwritten.
    room
        Arrays of earlier captures by name, to be copied to; `release` puts those of this one there.
    leases
        On the versions among the arrays.
    images
        Of the tables, by the table.
    """

    number: int
    settings: dict[str, Any]
    versions: list[int] = field(default_factory=list)
    owners: dict[str, Any] = field(default_factory=dict)
    arrays: dict[str, Array] = field(default_factory=dict)
    rows: dict[str, RowStream] = field(default_factory=dict)
    overwritten: dict[str, Array] = field(default_factory=dict)
    copies: list[Copied] = field(default_factory=list)
    copied: int = 0
    kept: int = 0
    leased: int = 0
    room: dict[str, Array] = field(default_factory=dict)
    _copied: list[str] = field(default_factory=list)
    leases: list[Lease] = field(default_factory=list)
    images: list[tuple[SparseTable, TableImage]] = field(default_factory=list)

    @property
    def contents(self) -> dict[str, Array | RowStream]:
        """All arrays by name, once `copy` is done."""
        return {**self.arrays, **self.rows}

    @property
    def nbytes(self) -> int:
        """The bytes of memory that it takes, at most."""
        return self.copied + self.kept + self.leased

    def copy(self, parallel_map: ParallelMap = serial_map) -> None:
        """Copy the arrays that updates overwrite (on any thread, while no update runs).

        ``parallel_map``: shares the work among threads.
        """
        pieces: list[Callable[[], object]] = []
        for name, source in self.overwritten.items():
            self.arrays[name] = target = self._target(name, source)
            step = max(_PIECE // source.itemsize, 1)
            pieces += [
                partial(np.copyto, target[at : at + step], source[at : at + step])
                for at in range(0, len(source), step)
            ]
        parallel_map(pieces)
        for copied in self.copies:
            self.arrays.update(copied())
        self._copied, self.overwritten, self.copies = [*self.overwritten], {}, []

    def _target(self, name: str, source: Array) -> Array:
        """Return an array for a copy. New memory takes several times as long as the copying."""
        found = self.room.pop(name, None)
        fits = found is not None and (found.shape, found.dtype) == (source.shape, source.dtype)
        if found is not None and fits:
            return found
        return aligned(source.nbytes, _PAGE).view(source.dtype).reshape(source.shape)

    def array(self, name: str, into: Array) -> None:
        """Write an array into one of its dtype and as many elements."""
        self.read_rows(name)
        into.reshape(-1)[:] = self.arrays[name].reshape(-1)

    def read_rows(self, *names: str) -> None:
        """Have arrays of tables in memory: those of these names, or all."""
        for name in [each for each in self.rows if each in names or not names]:
            stream = self.rows.pop(name)
            pieces = [np.empty((0, *stream.shape[1:]), stream.dtype), *stream.pieces()]
            self.arrays[name] = np.concatenate(pieces)

    def release(self) -> None:
        """End the leases (on the engine's thread); the arrays may change from here on."""
        while self.leases:
            self.leases.pop().release()
        while self.images:
            table, image = self.images.pop()
            table.end_image(image)
        for name in self._copied:
            self.room[name] = self.arrays[name]
        self._copied = []


def capture(engine: Engine, number: int = 0, leases: Sequence[Lease] = ()) -> Capture:
    """Capture an engine's state between two events.

    Parameters
    ----------
    engine
        No update is outstanding; other work may be only if it is that of this capture.
    number
        The capture's own.
    leases
        Of readers that go on reading their versions: `aiops.engine.restore` gives them new ones.

    Returns
    -------
    Capture
        Its arrays are complete after `Capture.copy`.

    Raises
    ------
    UsageError
        When the policy keeps what cannot be written.
    """
    found = Capture(number, settings_of(engine))
    try:
        _add_all(found, engine, leases)
    except BaseException:
        found.release()
        raise
    return found


def _add_all(found: Capture, engine: Engine, leases: Sequence[Lease]) -> None:
    """Add everything, and leases on the versions that it has."""
    found.versions = [engine.version, *(table.version for table in engine.tables)]
    budget, training = engine.budget, engine.training
    versions = CapturedVersions(engine.store, engine.replica)
    found.owners = {
        "engine": engine.state(),
        "policy": policy_state(engine.policy),
        "membership": engine.membership.state(versions.number),
        "rendezvous": engine.rendezvous.state(),
        "budget": None if budget is None else budget.state(),
    }
    if leases:
        found.owners["leases"] = [versions.number(lease) for lease in leases]
    if training is not None:
        _add_training(found, engine, training, versions)


def settings_of(engine: Engine) -> dict[str, Any]:
    """Return what must be equal where an engine's state is restored, as plain values."""
    settings = {"policy": engine.algorithm.name, **engine.algorithm.settings()}
    return {"algorithm": settings, "options": engine.options.deciding()}


def policy_state(policy: Policy) -> dict[str, Any]:
    """Return a copy of a policy's state. A server that keeps a state calls this at its start.

    Raises
    ------
    UsageError
        When the policy keeps what cannot be written; it names the attribute.
    """
    kind, found = type(policy), dict[str, Any]()
    whose = f"{kind.__module__}:{kind.__qualname__}"
    remedy = "cannot be kept in a state: give the policy state() and restore()"
    slots = [name for cls in kind.__mro__ for name in vars(cls).get("__slots__", ())]
    if slots and kind.state is Policy.state:  # `vars` does not have them
        raise UsageError(f"{whose} keeps .{slots[0]} in a slot, which {remedy}")
    for name, value in policy.state().items():
        try:
            found[name] = unpack(pack(value), name)
        except UsageError:
            what = type(value).__qualname__
            raise UsageError(f"{whose} keeps a {what} in .{name}, which {remedy}") from None
    return found


class CapturedVersions:
    """Numbers the versions of the parameters and of the delta replica that a capture has.

    The first is the current version, and if there is a replica the second is its newest one.
    """

    def __init__(self, store: Store | None, replica: DeltaReplica | None) -> None:
        self._store, self._replica = store, replica
        self._found: dict[Version, int] = {}  # thousands of clients may read one each
        for owner in (self._store, self._replica):
            if owner is not None:
                self._found[owner.current] = len(self._found)

    def number(self, lease: Lease) -> int:
        """Return the number of the version that a lease is on."""
        return self._found.setdefault(lease.version, len(self._found))

    def described(self) -> list[list[Any]]:
        """Return of each its array's name, if it is one of the replica's, and its numbers."""
        newest = [owner.current for owner in (self._store, self._replica) if owner is not None]
        rows = []
        for version in self._found:
            of_replica = self._of_replica(version)
            name = "replica" if of_replica else "params"
            if version not in newest:
                name += f"@{version.number}"
            rows.append([name, of_replica, *version.described()])
        return rows

    def add(self, found: Capture) -> None:
        """Add all arrays, and leases on them, to a capture."""
        for row, version in zip(self.described(), self._found, strict=True):
            found.leases.append(self._lease(version))
            found.arrays[row[0]] = version.arena.data  # which it waits for, if it is on a device
        newest = [owner.current for owner in (self._store, self._replica) if owner is not None]
        found.leased = sum(version.room.data.nbytes for version in newest)

    def _of_replica(self, version: Version) -> bool:
        return self._replica is not None and self._replica.owns(version)

    def _lease(self, version: Version) -> Lease:
        if self._replica is not None and self._replica.owns(version):
            return self._replica.lease_of(version)
        assert self._store is not None, "a version is of parameters"
        return self._store.lease_of(version)


class CapturedGradients:
    """Numbers the gradients that a capture has, in ``found``."""

    def __init__(self) -> None:
        self.found: list[Gradient] = []
        self._numbers: dict[int, int] = {}  # by identity

    def number(self, gradient: Gradient) -> int:
        """Return the number of a gradient."""
        number = self._numbers.setdefault(id(gradient), len(self.found))
        if number == len(self.found):
            self.found.append(gradient)
        return number


def _add_training(
    found: Capture, engine: Engine, training: Training, versions: CapturedVersions
) -> None:
    """Add everything that depends on the model."""
    membership, tables = engine.membership, training.table_requests.stores
    store, updates, replies = training.store, training.updates, training.delta_replies
    gradients = CapturedGradients()
    waiting = [item for item in updates.queued if isinstance(item, PendingPush | TableWork)]
    waiting += updates.held.pushes
    forgotten = _forgotten(membership, waiting)
    found.owners |= {
        "model": [[row[:3] for row in store.layout.rows], training.tables.described],
        "forgotten": [member.state(versions.number) for member in forgotten],
        "updates": updates.state(gradients.number),
        "queue": [_item_state(item, gradients) for item in updates.queued],
        "held": updates.held.state(),
        "filled": store.updater.filled.copy(),
        "sums": store.sums.copy(),
        "tables": [table.state() for table in tables],
        "data": training.data_sets.state([*membership, *forgotten]),
        "replies": None if replies is None else replies.state(),
        "replica": None if replies is None else replies.replica.state(),
        "versions": versions.described(),
        "gradients": [gradient.described() for gradient in gradients.found],
    }
    versions.add(found)
    for place, gradient in enumerate(gradients.found):
        found.arrays[f"gradient/{place}"] = gradient.data
    add_overwritten(found, store, engine.replica, on_device=engine.machine.device is not None)
    for table in tables:
        image, name = table.image(), f"table/{table.named.name}"
        found.images.append((table, image))
        found.rows |= {f"{name}/ids": image.ids, f"{name}/rows": image.rows}
        found.kept += image.nbytes


def add_overwritten(
    found: Capture, store: Store, replica: DeltaReplica | None, *, on_device: bool
) -> None:
    """Add what updates of a store and steps of its replica overwrite, to be copied."""
    arrays = store.updater.arrays()
    if on_device:
        found.copies.append(partial(_on_host, store.updater.compute.on_host, arrays))
    else:
        found.overwritten |= arrays
    found.copied += sum(array.nbytes for array in arrays.values())
    if replica is not None:
        parts = {
            "replica/payloads": replica.payloads(),
            "replica/encoders": replica.encoder_arrays(),
        }
        found.copies.append(partial(_joined, parts))
        found.copied += sum(array.nbytes for each in parts.values() for array in each)


def _forgotten(membership: Membership, waiting: Sequence[PendingPush | TableWork]) -> list[Member]:
    """Return the members with unanswered pushes that `Membership` remembers no longer."""
    members = {item.member.number: item.member for item in waiting if item.member is not None}
    return [m for m in members.values() if membership.find(m.client) is not m]


REFERRING = ("push", "rows", "reapply")
"""Kinds of queued items that begin with the number of a row."""


def _item_state(item: QueueItem, gradients: CapturedGradients) -> list[Any]:
    """Return the kind of a queued item, and its plain values."""
    if isinstance(item, Decision):
        return ["decision", *item]
    if isinstance(item, CaptureJob):  # an earlier server was killed before its turn came
        return ["snapshot", item.number]
    if isinstance(item, TableWork):
        return ["rows", item.state()]
    assert isinstance(item, PendingPush), "nothing else is queued"
    if not isinstance(item.sink, CachedGradient):
        return ["push", item.state()]
    gradient = item.sink.gradient  # its worker's last when it came, and perhaps not any more
    return ["reapply", item.state(), None if gradient is None else gradients.number(gradient)]


def _on_host(on_host: Callable[[Array], Array], arrays: Mapping[str, Array]) -> dict[str, Array]:
    """Return copies of a device's arrays."""
    return {name: on_host(array) for name, array in arrays.items()}


def _joined(parts: Mapping[str, Sequence[Array]]) -> dict[str, Bytes]:
    """Return copies of the bytes of some arrays, one after the other."""
    found = {}
    for name, arrays in parts.items():
        flat = [np.ascontiguousarray(array).reshape(-1).view(np.uint8) for array in arrays]
        found[name] = np.concatenate([np.empty(0, np.uint8), *flat])
    return found


def queued_rows(owners: Mapping[str, Any]) -> list[int]:
    """Return by queued push of a capture the row of the journal that has it; 0: none has."""
    return [values[0][0] for kind, *values in owners.get("queue", ()) if kind in REFERRING]


def needed_rows(owners: Mapping[str, Any]) -> list[int]:
    """Return the rows of the journal that have what a capture's queue refers to, rising."""
    return sorted({row for row in queued_rows(owners) if row})
