"""Capture everything that decides an engine's future (`aiops.engine.restore` is the inverse).

A capture is taken between two events, when no update is outstanding. It is a map of plain values
(`aiops.state.plain`), an entry per owner, and named arrays:

====================  ============================================================================
``params``            the parameters; ``params@95``: version 95, at which a worker computes
``replica``           the delta replica's values; ``replica@93`` as above
``state/0/n``         the optimiser's array n, of the layout's section 0
``master/0``          float32 masters of 16-bit parameters, of section 0
``sum/0``             the sum in progress, if any tensor has one
``gradient/7``        the bytes of a gradient that may be applied again
``table/words/ids``   the rows of a table that are stored; ``table/words/rows``: with their state
``replica/payloads``  those of the replica's increments, one after the other
``replica/encoders``  the arrays on which later ones depend
====================  ============================================================================

Arrays that no update overwrites (versions, gradients, payloads) are held by leases and references,
and can be written beside training. The others are copied by `Capture.copy`, which must be done
before the next update begins.

Some state is not captured, because it does not outlive the process: connections and their buffers,
caches of pure functions, memory kept for reuse. Nor are the payloads that are queued. The journal
has them, and the capture has the numbers of their rows (`Received.row`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np

from aiops.algorithms.base import Decision, Policy
from aiops.engine.engine import Engine
from aiops.engine.gradient_cache import CachedGradient
from aiops.engine.membership import Membership
from aiops.engine.replies import PendingPush
from aiops.engine.table_requests import TableWork
from aiops.engine.training import Training
from aiops.engine.update_queue import QueueItem
from aiops.errors import UsageError
from aiops.model.layout import Array, Bytes
from aiops.state.plain import pack, unpack
from aiops.store.gradient import Gradient
from aiops.store.snapshots import Lease, Version


@dataclass(slots=True)
class Capture:
    """The state of an engine after one event.

    Attributes
    ----------
    number
        The number that it was requested with.
    settings
        The settings that must be equal in the engine that it is restored into.
    owners
        Plain values, by owner. They are copies.
    arrays
        Arrays by name, which do not change while the leases are held.
    copies
        Calls that return further arrays, by name; `copy` makes them.
    leases
        On the versions among the arrays.
    """

    number: int
    settings: dict[str, Any]
    owners: dict[str, Any] = field(default_factory=dict)
    arrays: dict[str, Array] = field(default_factory=dict)
    copies: dict[str, Callable[[], Array]] = field(default_factory=dict)
    leases: list[Lease] = field(default_factory=list)

    def copy(self) -> None:
        """Copy the arrays that updates overwrite (on any thread, while no update runs)."""
        while self.copies:
            name, copied = self.copies.popitem()
            self.arrays[name] = copied()

    def array(self, name: str, into: Array) -> None:
        """Write an array into one of its dtype and as many elements."""
        into.reshape(-1)[:] = self.arrays[name].reshape(-1)

    def release(self) -> None:
        """End the leases (on the engine's thread)."""
        while self.leases:
            self.leases.pop().release()


def capture(engine: Engine, number: int = 0) -> Capture:
    """Capture an engine's state between two events.

    Parameters
    ----------
    engine
        No update is outstanding; other work may be only if it is that of this capture.
    number
        The capture's own.

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
    budget, training = engine.budget, engine.training
    versions = CapturedVersions(engine)
    found.owners = {
        "engine": engine.state(),
        "policy": policy_state(engine.policy),
        "membership": engine.membership.state(versions.number),
        "rendezvous": engine.rendezvous.state(),
        "budget": None if budget is None else budget.state(),
    }
    if training is not None:
        _add_training(found, engine.membership, training, versions)
    return found


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
    remedy = "cannot be kept in --state: give the policy state() and restore()"
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
    """Numbers the versions of an engine's parameters and of its replica that a capture has.

    The first is the current version, and if there is a replica the second is its newest one.
    """

    def __init__(self, engine: Engine) -> None:
        self._store, self._replica = engine.store, engine.replica
        self._found: list[Version] = []
        if self._store is not None:
            self._found.append(self._store.current)
        if self._replica is not None:
            self._found.append(self._replica.current)

    def number(self, lease: Lease) -> int:
        """Return the number of the version that a lease is on."""
        if lease.version not in self._found:
            self._found.append(lease.version)
        return self._found.index(lease.version)

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
            if version.fill is None:
                found.arrays[row[0]] = version.room.data
            else:  # its values are on a device
                found.copies[row[0]] = partial(_values, version)

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
    found: Capture, membership: Membership, training: Training, versions: CapturedVersions
) -> None:
    """Add everything that depends on the model."""
    store, updates, replies = training.store, training.updates, training.delta_replies
    gradients = CapturedGradients()
    waiting = [item for item in updates.queued if isinstance(item, PendingPush | TableWork)]
    waiting += updates.held.pushes
    found.owners |= {
        "model": [[row[:3] for row in store.layout.rows], training.tables.described],
        "forgotten": _forgotten(membership, waiting, versions),
        "updates": updates.state(gradients.number),
        "queue": [_item_state(item, gradients) for item in updates.queued],
        "held": updates.held.state(),
        "filled": store.updater.filled.copy(),
        "sums": store.sums.copy(),
        "tables": [table.state() for table in training.table_requests.stores],
        "replies": None if replies is None else replies.state(),
        "replica": None if replies is None else replies.replica.state(),
        "versions": versions.described(),
        "gradients": [gradient.described() for gradient in gradients.found],
    }
    versions.add(found)
    for place, gradient in enumerate(gradients.found):
        found.arrays[f"gradient/{place}"] = gradient.data
    for name, array in store.updater.arrays().items():
        found.copies[name] = partial(_copied, store.updater.compute.on_host, array)
    for table in training.table_requests.stores:
        ids = table.stored_ids()
        found.arrays[f"table/{table.named.name}/ids"] = ids
        found.copies[f"table/{table.named.name}/rows"] = partial(table.records, ids)
    if replies is not None:
        found.copies["replica/payloads"] = partial(_joined, replies.replica.payloads())
        found.copies["replica/encoders"] = partial(_joined, replies.replica.encoder_arrays())


def _forgotten(
    membership: Membership,
    waiting: Sequence[PendingPush | TableWork],
    versions: CapturedVersions,
) -> list[Any]:
    """Return the members with unanswered pushes that `Membership` remembers no longer."""
    members = {item.member.number: item.member for item in waiting if item.member is not None}
    return [
        member.state(versions.number)
        for member in members.values()
        if membership.find(member.client) is not member
    ]


def _item_state(item: QueueItem, gradients: CapturedGradients) -> list[Any]:
    """Return the kind of a queued item, and its plain values."""
    if isinstance(item, Decision):
        return ["decision", *item]
    if isinstance(item, TableWork):
        return ["rows", item.state()]
    assert isinstance(item, PendingPush), "nothing else is queued"
    if not isinstance(item.sink, CachedGradient):
        return ["push", item.state()]
    gradient = item.sink.gradient  # its worker's last when it came, and perhaps not any more
    return ["reapply", item.state(), None if gradient is None else gradients.number(gradient)]


def _values(version: Version) -> Array:
    """Return the values of a version, once they are on the host."""
    return version.arena.data


def _copied(on_host: Callable[[Array], Array], array: Array) -> Array:
    """Return a copy on the host of a backend's array."""
    found = on_host(array)
    return found.copy() if found is array else found


def _joined(arrays: Sequence[Array]) -> Bytes:
    """Return a copy of the bytes of some arrays, one after the other."""
    flat = [np.ascontiguousarray(array).reshape(-1).view(np.uint8) for array in arrays]
    return np.concatenate([np.empty(0, np.uint8), *flat])
