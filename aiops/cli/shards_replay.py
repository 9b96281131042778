"""Bring the model of several shards to the state that their directories have at a row."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np

from aiops.cli.state_folder import StateFolder, check_folders, shard_folders
from aiops.cli.state_replay import (
    all_rows,
    frames_of,
    from_newest,
    own_snapshot,
    queued_rows,
    replayed_to,
)
from aiops.common.frozen import value
from aiops.durable.run_record import Replayed
from aiops.durable.shards_replay import PartReplay
from aiops.engine.digest import Stores, digest_of
from aiops.engine.engine import Engine
from aiops.engine.restore import stored_tables
from aiops.errors import DamagedState, UsageError
from aiops.model.arena import Arena
from aiops.model.placement import Placement
from aiops.model.tables import StoredTable
from aiops.state.directory import StateIdentity, foreign


@value
class ModelAt:
    """A model at one moment: its tensors by name, its version, and its tables.

    ``tables``: as `aiops.serving.safetensors_io.write_model` takes them.
    """

    arrays: dict[str, Any]
    version: int
    tables: list[StoredTable]


def model_at(path: Path, row: int, kernels: str = "auto") -> ModelAt:
    """Return the model after a row of the lead's journal, of the replays of all servers.

    Parameters
    ----------
    path
        The folder with those of all shards.
    row
        The row.
    kernels
        The kernels to use; all give the same bits.

    Raises
    ------
    UsageError
        When the servers do not have that moment together.
    DamagedState
        When the directory of one is damaged.
    """
    engine = replayed_to(StateFolder(shard_folders(path)[0]), row, kernels)
    if engine.store is None:
        raise UsageError(f"no model was defined at row {row:,}")
    if engine.options.spread_tables and engine.tables:
        raise UsageError(
            f"the rows of tables lie on all servers of {path}, each with a clock of its own, so"
            f" there is no row {row:,} of all: leave --at out, and the newest snapshot that all"
            " have is exported"
        )
    whole = _whole(path, engine, row, _replayed)
    return ModelAt(whole.evaluated.views, engine.version, _stored(whole.shares))


def replay_shards(path: Path, kernels: str = "auto") -> ReplayedModel:
    """Run a recorded run of several shards again, one server after the other.

    The lead is replayed from its first row on (from its oldest snapshot, if that is gone) up to its
    last whole row, and each follower in the same way, to the version that was current then.

    Raises
    ------
    UsageError
        When a server's journal has no beginning, or does not lead to that version.
    DamagedState
        When the replay of a server departs from the record; when a follower's is damaged before
        that version.
    """
    lead = StateFolder(shard_folders(path)[0])
    identity = lead.identity()
    if identity.shards == 1:
        raise DamagedState(f"{lead.path} holds a whole model, and is to be the lead's of several")
    ended, damage = all_rows(lead, kernels)
    engine = ended.engine
    if engine.store is None:
        return ReplayedModel(ended, None, None, [engine.tables], damage)
    whole = _whole(path, engine, ended.last, _replayed_from_first)
    return ReplayedModel(ended, whole.arena, whole.evaluated, whole.shares, damage)


@value
class _Whole:
    """A whole model: ``arena``, ``evaluated`` and ``shares`` as of `ReplayedModel`."""

    arena: Arena
    evaluated: Arena
    shares: list[Stores]


Moment: TypeAlias = tuple[int, int]
"""A row of the lead's journal, and the version of a follower's part of the tensors then."""


def _whole(
    path: Path,
    engine: Engine,
    row: int,
    replayed: Callable[[StateFolder, Engine, str, Moment], PartReplay],
) -> _Whole:
    """Return the whole model, of a lead's engine and of what ``replayed`` makes of followers."""
    lead, *followers = map(StateFolder, shard_folders(path))
    training, options = engine.training, engine.options
    assert training is not None, "there is a model"
    store, left = training.store, training.left_out()
    placement = Placement.even(store.layout, options.shards, options.shard_bytes)
    spread = options.spread_tables and bool(engine.tables)
    check_folders(path, followers, placement)
    arena, short, shares = Arena(store.layout), dict[int, PartReplay](), [engine.tables]
    arena.data[: placement.edges[1]] = store.current.arena.data[: placement.edges[1]]
    evaluated = arena if store.rule.offset is None else Arena(store.layout)
    if evaluated is not arena:
        evaluated.data[: placement.edges[1]] = training.evaluated().data[: placement.edges[1]]
    identity, history = lead.identity(), lead.generations().history
    for shard in range(1, options.shards) if spread else placement.used[1:]:
        folder, (low, high) = followers[shard - 1], placement.edges[shard : shard + 2]
        _check_place(folder, identity, shard, row)
        version = store.version if shard in placement.used else 0
        part = replayed(folder, engine, identity.run, (row, version))
        part.check_history(history, str(folder.path))
        if part.version != version:
            short[shard] = part
            continue
        arena.data[low:high] = part.data[: high - low]
        if evaluated is not arena and low < high:
            evaluated.data[low:high] = part.evaluated(left)[: high - low]
        if spread:
            shares.append(part.tables)
    if short:
        raise UsageError(_lacking(path, row, store.version, short))
    return _Whole(arena, evaluated, shares)


@value
class ReplayedModel:
    """The end of a replay of several shards.

    ``lead``: the end of the lead's replay; ``arena``: the whole model, or None if none was defined;
    ``evaluated``: the same where it is evaluated; ``shares``: the tables of each server that has
    rows, the lead's first; ``damage``: that at which the lead's replay ended, or None.
    """

    lead: Replayed
    arena: Arena | None
    evaluated: Arena | None
    shares: list[Stores]
    damage: DamagedState | None

    @property
    def digest(self) -> str:
        """The digest of the parameters, which is that of one server."""
        data = None if self.arena is None else self.arena.data
        return digest_of(data, zip(*self.shares, strict=True))

    @property
    def tables(self) -> list[StoredTable]:
        """The rows of all tables."""
        return _stored(self.shares)


def _stored(shares: Sequence[Stores]) -> list[StoredTable]:
    """Return the rows of tables, of which each server has some."""
    stored = [[(table.named, *table.stored()) for table in tables] for tables in shares]
    return [_merged(tables) for tables in zip(*stored, strict=True)]


def tables_at(path: Path, row: int) -> list[StoredTable]:
    """Return the tables of the snapshots of a row: of the lead, or of all shards."""
    lead, *followers = map(StateFolder, shard_folders(path))
    with lead.snapshot(row) as file:
        model, options = file.header.owners["model"], file.header.settings["options"]
    if not model[1]:
        return []
    shares = [replayed_to(lead, row).saved_tables()]
    for folder in followers if options.get("spread_tables") else ():
        with folder.snapshot(folder.cuts()[row]) as file:
            shares.append(stored_tables({"model": model}, file.array))
    return [_merged(tables) for tables in zip(*shares, strict=True)]


def _merged(shares: Sequence[StoredTable]) -> StoredTable:
    """Return one table, of the rows of each shard."""
    ids = np.concatenate([ids for _named, ids, _rows in shares])
    order = np.argsort(ids, kind="stable")
    rows = np.concatenate([rows for _named, _ids, rows in shares])
    return shares[0][0], ids[order], rows[order]


def _check_place(folder: StateFolder, lead: StateIdentity, shard: int, row: int) -> None:
    """Check that a folder is that of a follower, and that it need not go back before a row."""
    why = foreign(str(folder.path), folder.identity().origin, (lead.run, shard, lead.shards))
    if why:
        raise DamagedState(f"{why}: put back the folder that was there")
    back_to = folder.generations().back_to
    if back_to is not None and back_to < row:
        raise UsageError(
            f"{folder.path} goes back to row {back_to:,} of the lead's journal at its next start,"
            f" and row {row:,} is later: give --at {back_to}, or start the servers first"
        )


def _replayed(folder: StateFolder, lead: Engine, run: str, moment: Moment) -> PartReplay:
    """Bring a fresh follower to a moment, or to the newest before that it has."""
    return _replayed_from(folder, lead, run, moment, _bases(folder, moment))


def _replayed_from_first(folder: StateFolder, lead: Engine, run: str, moment: Moment) -> PartReplay:
    """Do the same from its first row on, or from its oldest snapshot if that is gone."""
    whole = 1 in folder.listing.segments
    bases = [] if whole else _bases(folder, moment)[-1:]
    return _replayed_from(folder, lead, run, moment, bases)


def _replayed_from(
    folder: StateFolder, lead: Engine, run: str, moment: Moment, bases: Sequence[int]
) -> PartReplay:
    """Bring a fresh follower there from one of its snapshots, the first that will do."""

    def from_snapshot(base: int) -> PartReplay:
        part = PartReplay(lead, run, *moment)
        with own_snapshot(folder, base) as file:
            part.restore(base, file.header, file.array, queued_rows(folder, file.header))
            part.go_on(frames_of(folder, base + 1), base)
        return part

    def from_first() -> PartReplay:
        part = PartReplay(lead, run, *moment)
        part.go_on(frames_of(folder, 1))
        return part

    name = f"row {moment[0]:,} of the lead's"
    try:
        return from_newest(folder, bases, from_snapshot, from_first, name)
    except DamagedState as error:
        raise DamagedState(f"{folder.path}: {error}", **error.details) from error


def _bases(folder: StateFolder, moment: Moment) -> list[int]:
    """Return the rows of a follower's snapshots of a moment or earlier, the newest first."""
    (row, version), found = moment, list[int]()
    for base in folder.listing.snapshots:
        try:
            with folder.snapshot(base) as file:
                header = file.header
        except DamagedState:
            continue
        cut = header.owners.get("cut")
        if type(cut) is int and cut <= row and header.versions[0] <= version:
            found.append(base)
    return found


def _lacking(path: Path, row: int, version: int, short: dict[int, PartReplay]) -> str:
    """Return why the servers do not have a moment together, and which one they have."""
    names = ", ".join(f"shard {shard} at version {short[shard].version:,}" for shard in short)
    newest = min(part.reached for part in short.values())
    return (
        f"row {row:,} is of version {version:,}, which not all journals of {path} lead to: {names};"
        f" the newest row that all lead to is {newest:,}: give --at {newest}, if the lead has it"
        " still"
    )
