"""``aiops replay``: run a recorded run again."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from aiops.cli.flags import Json
from aiops.errors import UsageError

Folder = Annotated[
    Path,
    typer.Argument(metavar="DIR", help="The folder of `aiops serve --record` or of --state."),
]
Save = Annotated[
    Path | None, typer.Option("--save", help="Write the final model to this .safetensors file.")
]
Kernels = Annotated[
    str, typer.Option("--kernels", help="'numba', 'numpy' or 'auto'; all give the same bits.")
]


def replay(
    folder: Folder, save: Save = None, kernels: Kernels = "auto", as_json: Json = False
) -> None:
    """Run a recorded run again, to bit-identical parameters.

    Prints the final version and the SHA-256 of the parameters. It ends with an error when the
    replay departs from the record, or there is none, and with status 1 when rows of it are damaged
    or missing: those before are replayed. A record that was cut short is replayed up to the cut,
    and the output tells.

    Each folder is one run: a server that was started again with the same --record DIR has gone on
    in DIR.2, then in DIR.3.

    Of a folder of --state the rows after its oldest snapshot are run again, up to the newest row;
    with --keep-journal all rows since the beginning. Of a model on several shards DIR is the folder
    with those of all shards, shard-0 and so on; the events are the lead's.
    """
    from aiops.cli.shards_replay import replay_shards
    from aiops.cli.state_folder import StateFolder, shard_folders
    from aiops.cli.state_replay import replay_all
    from aiops.engine.digest import digest
    from aiops.serving.config import Config
    from aiops.serving.safetensors_io import write_model

    Config(kernels=kernels)  # raises for an unknown name
    began = time.perf_counter()
    if folder.is_file():
        raise UsageError(
            f"{folder} is a file, and a record is a folder (aiops serve --record DIR): files that"
            " earlier versions wrote with --record can only be replayed by these",
            damaged=str(folder),
        )
    if shard_folders(folder):
        model = replay_shards(folder, kernels)
        ended, damage, arena = model.lead, model.damage, model.evaluated
        sha256, tables = model.digest, model.tables
        complete = ended.stopping and damage is None
    else:
        state = StateFolder(folder)
        ended, damage = replay_all(state, kernels)
        training = ended.engine.training
        arena = None if training is None else training.evaluated()
        last = state.listing.snapshots[:1] == (ended.last,)  # written by a server that ended
        complete = ended.complete or last
        sha256, tables = digest(ended.engine), ended.engine.saved_tables()
    engine, store = ended.engine, ended.engine.store
    found = {
        "policy": engine.algorithm.name,
        "version": store.version if store is not None else 0,
        "events": ended.rows,
        "sha256": sha256,
        "seconds": round(time.perf_counter() - began, 3),
        "complete": complete,
        "damage": "" if damage is None else str(damage),
        "kernels": store.backend if store is not None else "",
        "saved": str(save) if save else None,
    }
    if save is not None:
        if store is None or arena is None:
            raise UsageError(f"nothing to save: no model was defined in {folder}")
        write_model(save, arena.views, store.version, tables)
    _print(found, as_json=as_json)
    if damage is not None:
        raise typer.Exit(1)


def _print(found: Mapping[str, Any], *, as_json: bool) -> None:
    if as_json:
        print(json.dumps(found))
        return
    print(f"policy    {found['policy']}")
    print(f"version   {found['version']:,}")
    print(f"events    {found['events']:,}")
    print(f"sha256    {found['sha256']}  (of the parameters)")
    print(f"seconds   {found['seconds']:.3f}  ({found['kernels'] or 'no'} kernels)")
    if found["saved"]:
        print(f"saved     {found['saved']}")
    if found["damage"]:
        print(f"This is the state before the rows that are damaged or missing: {found['damage']}")
    elif not found["complete"]:
        print("The record was cut short, or goes on: this is its state at the last row.")
