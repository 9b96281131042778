"""Restore what `aiops.engine.capture` has captured into a fresh engine."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, TypeAlias

import numpy as np

from aiops.algorithms.base import Decision
from aiops.algorithms.per_tensor import SETTING
from aiops.engine.capture import REFERRING, settings_of
from aiops.engine.engine import Engine
from aiops.engine.events import Apply, DistributeModel, Effect, Received
from aiops.engine.gradient_cache import CachedGradient
from aiops.engine.membership import Member
from aiops.engine.receive import PushSink
from aiops.engine.registration import Definition
from aiops.engine.table_receive import RowsSink
from aiops.engine.training import Training
from aiops.engine.update_queue import QueueItem
from aiops.errors import DamagedState, UsageError
from aiops.kernels.table_rows import parameters_of
from aiops.model.arena import Arena, aligned
from aiops.model.layout import Array, Bytes, Layout
from aiops.model.placement import Placement
from aiops.model.shared_memory import Memory
from aiops.model.tables import StoredTable, Tables
from aiops.store.capture_job import CaptureJob
from aiops.store.delta_replica import DeltaReplica
from aiops.store.gradient import Gradient
from aiops.store.parameters import Store
from aiops.store.snapshots import Lease, Version

ReadArray: TypeAlias = Callable[[str, Array], object]
"""Writes the array of a name into one of its dtype and as many elements."""

Queued: TypeAlias = Callable[[int], Received | None]
"""Returns the event of a row of the journal, with its payload in a sink; None: there is none."""


class Captured(Protocol):
    """The plain values of a capture: in memory, or read from a file."""

    @property
    def settings(self) -> Mapping[str, Any]:
        """The settings that must be equal."""

    @property
    def owners(self) -> Mapping[str, Any]:
        """Plain values, by owner; they become parts of the engine."""


def restore(
    engine: Engine,
    found: Captured,
    read: ReadArray,
    queued: Queued | None = None,
    leases: list[Lease] | None = None,
    begun: Callable[[Training], object] = lambda training: None,
    kept: Callable[[Gradient], object] = lambda gradient: None,
) -> list[Effect]:
    """Restore a captured state.

    Parameters
    ----------
    engine
        It has handled no event, and goes on as the captured one would have.
    found
        The plain values.
    read
        Reads the arrays.
    queued
        Finds the payloads of queued pushes. None: there is no journal. Pushes that are in none
        count as never received; their clients push again, since they have no answer.
    leases
        Receives a lease for each that was given to the capture, in their order.
    begun
        Called when the model is there, before anything is queued.
    kept
        Called with each gradient that may be applied again.

    Returns
    -------
    list of Effect
        The kernels to compile, if there is a model; and the capture's own `Apply`, which does
        nothing, but no update is begun before its `Applied`.

    Raises
    ------
    UsageError
        When the engine has other settings than the one that was captured.
    """
    check_settings(found.settings, settings_of(engine))
    owners = found.owners
    engine.restore(owners["engine"])
    engine.policy.restore(owners["policy"])
    engine.rendezvous.restore(owners["rendezvous"])
    if engine.budget is not None:
        engine.budget.restore(owners["budget"])
    if "model" not in owners:
        engine.membership.restore(owners["membership"], _no_lease)
        return []
    training = _begun(engine, owners, read)
    replica, memory = engine.replica, engine.machine.memory
    versions = RestoredVersions(training.store, replica, memory, owners["versions"], read)
    if leases is not None:
        leases += map(versions.lease, owners.get("leases", ()))
    begun(training)
    restore_store(training.store, replica, owners, read)
    _restore_tables(training, owners, read)
    engine.membership.restore(owners["membership"], versions.lease)
    layout = training.store.layout
    forgotten = [Member.from_state(row, layout, versions.lease) for row in owners["forgotten"]]
    members = {member.number: member for member in (*forgotten, *engine.membership)}
    _restore_updates(training, owners, members, read, queued or _no_journal, kept)
    training.data_sets.restore(owners["data"], members)
    effects: list[Effect] = [
        effect for effect in training.begun if not isinstance(effect, DistributeModel)
    ]
    if training.updates.working:
        effects.append(Apply(training.updates.tickets, CaptureJob(0)))
    return effects


def check_settings(kept: Mapping[str, Any], mine: Mapping[str, Any]) -> None:
    """Refuse to restore into an engine that decides otherwise.

    A journal needs the heartbeat, and of one server the least bytes of a shard; a state is the same
    whatever they are.

    Parameters
    ----------
    kept, mine
        As `settings_of` returned them, then and now.

    Raises
    ------
    UsageError
        Naming the first setting that differs.
    """
    alone = kept["options"].get("shards") == 1  # a follower's have none
    free = {"heartbeat", "shard_bytes"} if alone else {"heartbeat"}
    for group in ("algorithm", "options"):
        for name in {**kept[group], **mine[group]}:
            before, now = kept[group].get(name), mine[group].get(name)
            if before != now and name not in free:
                was, has = (_said(name, value) for value in (before, now))
                raise UsageError(
                    f"the state is of a server with {was}, and this one has {has}: give the same"
                    " settings, or begin a new run in another folder"
                )


def _said(name: str, value: Any) -> str:
    """Write a setting, those of single tensors as the flags that they come from."""
    if name != SETTING:
        return f"{name}={value!r}"
    return f"--set {value!r}" if value else "no settings of single tensors"


def _no_lease(number: int) -> Lease:
    raise LookupError(f"version {number} is of no model")


def _no_journal(row: int) -> None:
    return None


def aligned_array(read: ReadArray, name: str, nbytes: int) -> Bytes:
    """Return an array of bytes in aligned memory."""
    data = aligned(nbytes)
    read(name, data)
    return data


def first_version(read: ReadArray, nbytes: int, memory: Memory) -> Bytes:
    """Return the parameters, in memory that becomes that of a version."""
    data = memory.room(nbytes)
    read("params", data)
    return data


def _begun(engine: Engine, owners: Mapping[str, Any], read: ReadArray) -> Training:
    """Make everything that depends on the model, with the parameters of the capture."""
    rows, described = owners["model"]
    layout, options = Layout(rows, empty=bool(described)), engine.options
    tables, nbytes = Tables.from_description(described, layout.index), layout.nbytes
    if options.shards > 1:  # the first part is here
        nbytes = Placement.even(layout, options.shards, options.shard_bytes).layouts[0].nbytes
    params = first_version(read, nbytes, engine.machine.memory)
    return engine.begin(Definition(layout, params, tables))


class RestoredVersions:
    """Makes the versions of a capture, and has store and replica continue with them."""

    def __init__(
        self,
        store: Store,
        replica: DeltaReplica | None,
        memory: Memory,
        rows: Sequence[Sequence[Any]],
        read: ReadArray,
    ) -> None:
        self._store, self._replica = store, replica
        self._found: list[tuple[bool, Version]] = []
        for place, (name, of_replica, *numbers) in enumerate(rows):
            arena = store.current.room  # which has the parameters already
            if place:
                arena = Arena(store.held) if of_replica else memory.arena(store.held)
                read(name, arena.data)
            version = Version.from_description(numbers, arena, store.layout)
            self._found.append((of_replica, version))
        store.restore(*self._of(replica=False))
        if replica is not None:
            replica.restore_versions(*self._of(replica=True))

    def _of(self, *, replica: bool) -> tuple[Version, list[Version]]:
        """Return the current version, and the older ones in the order of their numbers."""
        current, *older = (version for mine, version in self._found if mine == replica)
        return current, sorted(older, key=lambda version: version.number)

    def lease(self, place: int) -> Lease:
        """Return a lease on a version, by its number in the capture."""
        of_replica, version = self._found[place]
        if of_replica and self._replica is not None:
            return self._replica.lease_of(version)
        return self._store.lease_of(version)


def restore_store(
    store: Store, replica: DeltaReplica | None, owners: Mapping[str, Any], read: ReadArray
) -> None:
    """Restore the optimiser's state, and the replica's increments."""
    store.restore_sums(owners["sums"])
    store.updater.restore(owners["filled"], read)
    if replica is not None:
        state = owners["replica"]
        arrays = sum(array.nbytes for array in replica.encoder_arrays())
        replica.restore(
            state,
            aligned_array(read, "replica/payloads", replica.payload_bytes(state)),
            aligned_array(read, "replica/encoders", arrays),
        )


def _restore_tables(training: Training, owners: Mapping[str, Any], read: ReadArray) -> None:
    """Restore the rows of tables."""
    for table, counts in zip(training.table_requests.stores, owners["tables"], strict=True):
        ids = np.empty(counts["made"], np.int64)
        records = np.empty((len(ids), table.columns), table.dtype)
        read(f"table/{table.named.name}/ids", ids)
        read(f"table/{table.named.name}/rows", records)
        table.restore(counts, ids, records)


def stored_tables(owners: Mapping[str, Any], array: Callable[[str], Array]) -> list[StoredTable]:
    """Return the tables of a capture, with the ids and the parameters of the rows stored.

    Parameters
    ----------
    owners
        Its plain values.
    array
        Reads the array of a name.

    Raises
    ------
    DamagedState
        When they are not what was captured.
    """
    try:
        tables = Tables.from_description(owners["model"][1])
    except (IndexError, KeyError, TypeError, ValueError, UsageError) as error:
        raise DamagedState(f"the snapshot's tables are damaged: {error}") from None
    found = []
    for named in tables.each:
        ids, records = (array(f"table/{named.name}/{part}") for part in ("ids", "rows"))
        width, dtype = named.table.width, np.dtype(named.table.dtype)
        fits = records.ndim == 2 and records.shape[1] >= width and records.dtype == dtype
        if not fits or ids.shape != records.shape[:1]:
            raise DamagedState(f"the snapshot's rows of table {named.name!r} do not fit it")
        found.append((named, ids, parameters_of(records, width)))
    return found


def _restore_updates(
    training: Training,
    owners: Mapping[str, Any],
    members: Mapping[int, Member],
    read: ReadArray,
    queued: Queued,
    kept: Callable[[Gradient], object],
) -> None:
    """Restore the queue, and the answers that wait."""
    layouts = training.store.layout, training.store.held
    gradients = [
        Gradient.from_description(row, aligned_array(read, f"gradient/{place}", row[0]), *layouts)
        for place, row in enumerate(owners["gradients"])
    ]
    for gradient in gradients:
        kept(gradient)
    updates, replies, rows = training.updates, training.delta_replies, owners["queue"]
    updates.held.restore(owners["held"], members)
    queue: list[QueueItem] = []
    for kind, *values in _received(rows, members, queued):
        queue.append(_item(training, kind, values, members, gradients))
    updates.restore(owners["updates"], gradients, queue)
    if replies is not None:
        replies.restore(owners["replies"], members)


def _received(
    rows: Sequence[Sequence[Any]], members: Mapping[int, Member], queued: Queued
) -> list[list[Any]]:
    """Return what is queued, each item with the event that has its payload, or None.

    A push whose event is in no journal counts as never received, and so do those of its worker that
    follow it: their sequence numbers are not used up.
    """
    found, lost = list[list[Any]](), set[int | None]()
    for kind, *values in rows:
        if kind not in REFERRING:
            found.append([kind, *values, None])
            continue
        row, number, seq, *_rest = values[0]
        event = queued(row) if row and number not in lost else None
        if event is not None:
            found.append([kind, *values, event])
        elif number is not None:  # else it is a fetch, which needs no answer any more
            lost.add(number)
            members[number].last_seq = min(members[number].last_seq, seq - 1)
    return found


def _item(
    training: Training,
    kind: str,
    values: Sequence[Any],
    members: Mapping[int, Member],
    gradients: Sequence[Gradient],
) -> QueueItem:
    """Return a queued item; the last of ``values`` is the event that has its payload, or None."""
    *values, event = values
    if kind == "decision":
        return Decision(*values)
    if kind == "snapshot":
        return CaptureJob(*values)
    if kind == "reapply":
        state, number = values
        gradient = None if number is None else gradients[number]
        return training.replies.restore(state, CachedGradient(gradient), members)
    if kind == "rows":
        event = training.table_requests.with_sink(event)
    [state], sink = values, event.sink
    if kind == "push":
        assert isinstance(sink, PushSink), "the row is of a push"
        return training.replies.restore(state, sink, members)
    assert isinstance(sink, RowsSink), "the row is of rows"
    return training.table_requests.restore(state, sink, members)
