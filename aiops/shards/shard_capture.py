"""Capture a follower's state in the place of an update, and restore it.

A capture is as one of an engine (`aiops.engine.capture`). Its owners are those of a store and its
delta replica, and further:

==============  ==================================================================================
``load``        the order that the shard was made of, as bytes of the wire
``cut``         the row of the lead's journal that the capture is of
``history``     the generations of the lead, each with the row behind which it began
``ticket``      the number of the capture among the updates
``held``        the versions that are held: number, whether of the replica, place in ``versions``
``queue``       portions that are to be applied: the rows of the journal that have them
``kept``        portions that may be applied again: number and parts; their bytes are an array
``rows``        the state of the engine that serves rows of tables here; None: none lie here. Its
                queue is among ``queue``, and the rows are arrays as in a capture of an engine
==============  ==================================================================================
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from aiops.engine.capture import Capture, CapturedVersions, add_overwritten, capture
from aiops.engine.restore import (
    Captured,
    ReadArray,
    RestoredVersions,
    aligned_array,
    check_settings,
    first_version,
    restore_store,
)
from aiops.model.parts import Part
from aiops.shards.follower import Follower
from aiops.shards.shard import Shard
from aiops.wire.decoding import decode
from aiops.wire.encoding import encode
from aiops.wire.server_messages import LoadShard


def capture_shard(follower: Follower, shard: Shard, cut: int, ticket: int) -> Capture:
    """Capture a follower's state, when the order of a capture is the last that it has.

    Parameters
    ----------
    follower, shard
        The follower, and its part of the model.
    cut
        The row of the lead's journal that the capture is of.
    ticket
        The capture's number among the updates.
    """
    found, store, replica = Capture(cut, _settings(follower)), shard.store, shard.replica
    versions = CapturedVersions(store, replica)
    held = [[*key, versions.number(lease)] for key, lease in sorted(shard.leases.items())]
    portions = follower.portions
    kept = [each for each in portions if each.kept and each.gradient is not None]
    found.versions = [store.version]
    found.owners = {
        "load": bytes(encode(shard.order)),
        "cut": cut,
        "history": [*map(list, follower.history)],
        "ticket": ticket,
        "held": held,
        "queue": [["push", [each.row, each.number]] for each in portions if not each.kept],
        "rows": None,
        "kept": [[each.number, [*map(tuple, each.parts)]] for each in kept],
        "filled": store.updater.filled.copy(),
        "sums": store.sums.copy(),
        "replica": None if replica is None else replica.state(),
        "versions": versions.described(),
    }
    versions.add(found)
    for each in kept:
        assert each.gradient is not None, "it is complete"
        found.arrays[f"portion/{each.number}"] = each.gradient.data
    if follower.rows is not None:
        _add_rows(found, capture(follower.rows.engine, cut))
    on_device = follower.machine.device is not None
    add_overwritten(found, store, replica, on_device=on_device)
    return found


def _add_rows(found: Capture, rows: Capture) -> None:
    """Add a capture of the engine that serves rows: their model has no tensors."""
    found.versions += rows.versions[1:]
    found.owners["rows"] = rows.owners
    found.owners["queue"] += [item for item in rows.owners["queue"] if item[0] == "rows"]
    found.rows |= rows.rows
    found.arrays |= {name: array for name, array in rows.arrays.items() if _of_tables(name)}
    found.leases += rows.leases
    found.images += rows.images
    found.kept += rows.kept


def _of_tables(name: str) -> bool:
    return name.startswith("table/")


def restore_shard(follower: Follower, found: Captured, read: ReadArray) -> Shard:
    """Restore a captured state into a fresh follower, but for the portions in ``queue``.

    Parameters
    ----------
    follower
        It has carried out no order.
    found, read
        As of `aiops.engine.restore.restore`.

    Raises
    ------
    UsageError
        When the follower has other settings than the one that was captured.
    ValueError
        When there is no room for the model.
    """
    check_settings(found.settings, _settings(follower))
    owners: Mapping[str, Any] = found.owners
    order = decode(owners["load"])
    assert isinstance(order, LoadShard), "it begins a shard"
    memory = follower.machine.memory
    shard = follower.load(order, first_version(read, Shard.nbytes_of(order), memory))
    store, replica = shard.store, shard.replica
    versions = RestoredVersions(store, replica, memory, owners["versions"], read)
    restore_store(store, replica, owners, read)
    held = {(number, mine): versions.lease(place) for number, mine, place in owners["held"]}
    shard.restore(owners["ticket"], held)
    follower.reached = owners["cut"]
    follower.history = tuple((number, row) for number, row in owners["history"])
    for number, rows in owners["kept"]:
        parts = tuple(Part(*row) for row in rows)
        data = aligned_array(read, f"portion/{number}", sum(part.nbytes for part in parts))
        follower.restore_portion(number, parts, data.data, keep=True)
    return shard


def _settings(follower: Follower) -> dict[str, Any]:
    algorithm = follower.algorithm
    return {"algorithm": {"policy": algorithm.name, **algorithm.settings()}, "options": {}}
