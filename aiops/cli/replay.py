"""``aiops replay``: run a recorded run again."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from aiops.cli.flags import Json
from aiops.errors import UsageError

if TYPE_CHECKING:
    from aiops.engine.engine import Engine

Journal = Annotated[
    Path, typer.Argument(help="A file of `aiops serve --record`, or a folder of --state.")
]
Save = Annotated[
    Path | None, typer.Option("--save", help="Write the final model to this .safetensors file.")
]
Kernels = Annotated[
    str, typer.Option("--kernels", help="'numba', 'numpy' or 'auto'; all give the same bits.")
]


def replay(
    journal: Journal, save: Save = None, kernels: Kernels = "auto", as_json: Json = False
) -> None:
    """Run a recorded run again, to bit-identical parameters.

    Prints the final version and the SHA-256 of the parameters. The exit status is 2 when the
    replay departs from the record, or the file is no journal; a record that was cut short is
    replayed up to the cut, and the output tells.

    Each file is one run: a server that was started again with the same --record FILE has gone on
    in FILE.2, then in FILE.3.

    Of a folder of --state the rows after its oldest snapshot are run again, up to the newest row.
    """
    from aiops.engine.journal import digest
    from aiops.serving.config import Config
    from aiops.serving.safetensors_io import write_model

    Config(kernels=kernels)  # raises for an unknown name
    began = time.perf_counter()
    engine, events, complete = (_state if journal.is_dir() else _record)(journal, kernels)
    store = engine.store
    found = {
        "policy": engine.algorithm.name,
        "version": store.version if store is not None else 0,
        "events": events,
        "sha256": digest(engine),
        "seconds": round(time.perf_counter() - began, 3),
        "complete": complete,
        "kernels": store.backend if store is not None else "",
        "saved": str(save) if save else None,
    }
    if save is not None:
        if store is None:
            raise UsageError(f"nothing to save: no model was defined in {journal}")
        write_model(save, store.current.arena.views, store.version, engine.saved_tables())
    _print(found, as_json=as_json)


def _record(file: Path, kernels: str) -> tuple[Engine, int, bool]:
    """Return the engine at the end of a record, its events, and whether it is complete."""
    from aiops.engine.journal import replay as run_again

    try:
        with file.open("rb") as opened:
            ended = run_again(opened, kernels)
    except OSError as error:
        raise UsageError(f"{file}: {error.strerror}") from None
    return ended.engine, ended.events, ended.complete


def _state(folder: Path, kernels: str) -> tuple[Engine, int, bool]:
    """Return the same for a folder of ``--state``."""
    from aiops.cli.state_folder import StateFolder
    from aiops.cli.state_replay import engine_at

    state = StateFolder(folder)
    files = list(state.files(thorough=False))
    row: int = state.outcome(files)["row"]
    engine, rows = engine_at(state, row, kernels, oldest=True)
    return engine, rows, not any(each.torn for each in files)


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
    if not found["complete"]:
        print("The record was cut short: this is its state at the cut.")
