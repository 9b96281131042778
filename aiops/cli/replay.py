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

Journal = Annotated[Path, typer.Argument(help="A file of `aiops serve --record`.")]
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
    """
    from aiops.engine.journal import digest
    from aiops.engine.journal import replay as run_again
    from aiops.serving.config import Config
    from aiops.serving.safetensors_io import write_model

    Config(kernels=kernels)  # raises for an unknown name
    began = time.perf_counter()
    try:
        with journal.open("rb") as file:
            ended = run_again(file, kernels)
    except OSError as error:
        raise UsageError(f"{journal}: {error.strerror}") from None
    store = ended.engine.store
    found = {
        "policy": ended.engine.algorithm.name,
        "version": store.version if store is not None else 0,
        "events": ended.events,
        "sha256": digest(ended.engine),
        "seconds": round(time.perf_counter() - began, 3),
        "complete": ended.complete,
        "kernels": store.backend if store is not None else "",
        "saved": str(save) if save else None,
    }
    if save is not None:
        if store is None:
            raise UsageError(f"nothing to save: no model was defined in {journal}")
        write_model(save, store.current.arena.views, store.version)
    _print(found, as_json=as_json)


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
