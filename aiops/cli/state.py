"""``aiops state``: look into the directory of `aiops serve --state`, or into one snapshot file."""

from __future__ import annotations

import dataclasses
import json
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Group, RenderableType
from rich.table import Table

from aiops.cli import tables
from aiops.cli.flags import Json
from aiops.common import formatting
from aiops.common.generations import generation_text
from aiops.errors import UsageError, nearest
from aiops.model.tables import NamedTable

app = typer.Typer(help="Look into the directory of a server's --state.", no_args_is_help=True)

Folder = Annotated[
    Path, typer.Argument(help="The directory of `aiops serve --state`, or a simulation's file.")
]
Store = Annotated[str, typer.Argument(help="The store: s3://bucket/path.")]
Empty = Annotated[Path, typer.Argument(help="A directory for its state.")]
Row = Annotated[int | None, typer.Option("--row", help="Print all of this row.")]
Of = Annotated[int | None, typer.Option("--snapshot", help="Print this snapshot's plain values.")]
Count = Annotated[int, typer.Option("--rows", help="List the last N rows.")]
Out = Annotated[Path, typer.Option("--out", help="The .safetensors file, or .npz.")]
At = Annotated[
    int | None, typer.Option("--at", help="Export the model after this row, by a replay.")
]
Which = Annotated[
    int | None, typer.Option("--snapshot", help="Export this snapshot; default the newest.")
]

OneTable = Annotated[
    str | None,
    typer.Option("--table", help="Export only this table: ids and rows, to a .npz file."),
]

_LONGEST = 200  # characters of what a row says


@app.command()
def ls(folder: Folder, as_json: Json = False) -> None:
    """List the files of a state, and the rows that they hold; payloads are not read."""
    _report(folder, as_json=as_json, thorough=False)


@app.command()
def verify(folder: Folder, as_json: Json = False) -> None:
    """Compare every byte of a state with its checksums; exit status 1 if it is not whole."""
    if not _report(folder, as_json=as_json, thorough=True):
        raise typer.Exit(1)


def _report(path: Path, *, as_json: bool, thorough: bool) -> bool:
    """Print the status of all files; return True if they are whole, and lead to a state.

    Of several shards, the lead's is first; as JSON, each is a line.
    """
    from aiops.cli.state_folder import is_one_file, shard_folders, snapshot_status

    if is_one_file(path):
        return _report_file(snapshot_status(path, thorough=thorough), as_json, thorough)
    reports = [_of_folder(each, thorough=thorough) for each in shard_folders(path) or [path]]
    for number, each in enumerate(reports):
        if as_json:
            print(json.dumps(each))
        else:
            gap = [""] if number else []
            tables.console().print(Group(*gap, *_shown(each, thorough=thorough)))
    return all(each["whole"] for each in reports)


def _of_folder(path: Path, *, thorough: bool) -> dict[str, Any]:
    """Return the status of all files of one server's folder, and the state that they lead to."""
    from aiops.cli.state_folder import StateFolder

    folder = StateFolder(path)
    identity, generations = folder.identity(), folder.generations()
    files = list(folder.files(thorough=thorough))
    outcome = folder.outcome(files)
    whole = not outcome["why"] and not any(each.why for each in files)
    return {
        "run": identity.run,
        "shard": identity.shard,
        "shards": identity.shards,
        "generation": generations.generation,
        "starts": len(generations.starts),
        "files": [dataclasses.asdict(each) for each in files],
        "spares": len(folder.listing.spares),
        "incomplete": list(folder.listing.parts),
        "foreign": list(folder.listing.foreign),
        "state": outcome,
        "whole": whole,
    }


def _report_file(report: Mapping[str, Any], as_json: bool, thorough: bool) -> bool:
    """Print the status of one snapshot file; return True if it is whole."""
    whole = not report["why"]
    if as_json:
        print(json.dumps({**report, "whole": whole}))
        return whole
    cells = {
        "file": f"{report['file']}, {formatting.nbytes(report['nbytes'])}",
        "whole" if thorough else "readable": "yes" if whole else report["why"],
    }
    if report["kind"] is not None:
        turns = "turns" if report["kind"] == "simulation" else "rows"
        cells |= {
            "kind": report["kind"],
            turns: f"{report['row']:,}",
            "versions": ", ".join(f"{version:,}" for version in report["versions"]) or "–",
            "arrays": f"{report['arrays']:,}",
            "wrote": ", ".join(f"{name} {each}" for name, each in report["wrote"].items()),
        }
    tables.console().print(tables.facts(cells))
    return whole


def _shown(report: Mapping[str, Any], *, thorough: bool) -> Iterator[RenderableType]:
    shard = f", shard {report['shard']} of {report['shards']}" if report["shards"] > 1 else ""
    yield f"run {report['run']}{shard}, generation {generation_text(report['generation'])}"
    yield ""
    columns = "rows", "size", "generation", "versions", "whole" if thorough else "readable"
    made = tables.table("file", *columns)
    for each in report["files"]:
        made.add_row(
            each["name"],
            _rows(each),
            formatting.nbytes(each["nbytes"]),
            "–" if each["generation"] is None else generation_text(each["generation"]),
            ", ".join(f"{version:,}" for version in each["versions"] or ()) or "–",
            "no" if each["why"] else f"torn: {each['torn']:,} B" if each["torn"] else "yes",
            style="red" if each["why"] else None,
        )
    yield made
    yield ""
    if report["spares"]:
        yield f"{report['spares']} spare segments"
    for name in report["state"].get("void", ()):
        yield f"{name} is void: rows before it are lost"
    for each in report["files"]:
        if each["gap"]:
            first, last = each["gap"]
            yield (
                f"the rows from {first:,} to {last:,}, behind {each['name']}, were never journalled"
                " (there was no room, say): a later snapshot has what they did"
            )
    for name in (*report["incomplete"], *report["foreign"]):
        yield f"{name} is not a part of the state"
    for each in report["files"]:
        if each["why"]:
            yield each["why"]
    yield _conclusion(report["state"])


def _rows(file: Mapping[str, Any]) -> str:
    if file["kind"] == "snapshot":
        return f"to {file['last']:,}"
    if file["last"] is None or file["last"] < file["first"]:
        return "none"
    return f"{file['first']:,} to {file['last']:,}"


def _conclusion(state: Mapping[str, Any]) -> str:
    if state["why"]:
        return f"A server cannot resume with this state: {state['why']}."
    start = state["snapshot"]
    if start is None:
        return f"A server resumes with row {state['row']:,}, from the first row on."
    version = f" (version {state['versions'][0]:,})" if state["versions"] else ""
    rows = state["row"] - start
    since = f" and the {rows:,} row{'s' if rows > 1 else ''} since" if rows else ""
    return f"A server resumes with row {state['row']:,}: the snapshot{version}{since}."


@app.command()
def show(
    folder: Folder, row: Row = None, snapshot: Of = None, rows: Count = 20, as_json: Json = False
) -> None:
    """List the last rows of the journal; or print one row, or a snapshot's plain values."""
    from aiops.cli.state_folder import StateFolder, is_one_file, opened_file

    if row is not None and snapshot is not None:
        raise UsageError("--row and --snapshot are two questions: ask one")
    if is_one_file(folder):
        if row is not None or snapshot is not None:
            raise UsageError(f"{folder} is one snapshot, without rows: give nothing else")
        with opened_file(folder) as file:
            _print_plain(file, as_json)
        return
    state = StateFolder(folder)
    if snapshot is not None:
        with state.snapshot(snapshot) as file:
            _print_plain(file, as_json)
        return
    if row is not None:
        found = next((each for each in _journal(state, row) if each["number"] == row), None)
        if found is None:
            raise UsageError(f"{folder} has no row {row:,}: its journal holds others")
        print(json.dumps(_row(found), indent=None if as_json else 2))
        return
    last = deque(_journal(state, None), maxlen=max(rows, 0))
    if as_json:
        for each in last:
            print(json.dumps(_row(each)))
        return
    made = Table(box=None, header_style="bold", padding=(0, 2, 0, 0))
    for name in ("row", "time", "payload", "kind"):
        made.add_column(name, justify="left" if name == "kind" else "right", no_wrap=True)
    made.add_column("what", overflow="fold")
    for each in last:
        what = each["text"]
        made.add_row(
            f"{each['number']:,}",
            f"{each['time']:.3f}",
            formatting.nbytes(each["payload"]) if each["payload"] else "–",
            each["kind"],
            what if len(what) <= _LONGEST else what[: _LONGEST - 1] + "…",
        )
    tables.console().print(made)


def _print_plain(file: Any, as_json: bool) -> None:
    """Print the plain values of a snapshot, and the places of its arrays."""
    header = file.header.plain()
    header["arrays"] = [dataclasses.asdict(entry) for entry in file.arrays.values()]
    print(json.dumps(_json(header), indent=None if as_json else 2))


def _row(found: dict[str, Any]) -> dict[str, Any]:
    """Return a row as JSON."""
    return {**found, "fields": _json(found["fields"])}


def _journal(state: Any, row: int | None) -> Iterator[dict[str, Any]]:
    """Yield the rows of the segment that has a row, or of all segments."""
    from aiops.cli.row_text import RowText, with_messages
    from aiops.state.row_kinds import RowKind, row_fields

    text = RowText()
    names = {kind.value: kind.name.lower() for kind in RowKind}
    own = None if row is None else state.listing.segment_of(row)
    for first in state.listing.segments if row is None else [own] if own is not None else []:
        with state.segment(first, payloads=False) as scan:
            for frame in _frames(state, scan, first):
                kind, payload = names.get(frame.kind, str(frame.kind)), len(frame.payload)
                fields = row_fields(frame.kind, frame.row, f"row {frame.number:,}")
                fields = with_messages(fields)
                yield {
                    "number": frame.number,
                    "kind": kind,
                    "time": frame.time,
                    "leased": bool(frame.flags & 1),
                    "payload": payload,
                    "text": text.of(kind, fields, payload),
                    "fields": fields,
                }


def _frames(state: Any, scan: Any, first: int) -> Iterator[Any]:
    """Yield the rows of a segment, up to those that were never journalled, if some were not."""
    try:
        yield from scan
    except UsageError as error:
        if state.gap_of(first, error) is None:
            raise


def _json(value: Any) -> Any:
    """Return a plain value as JSON types: bytes in hex, an array as its dtype and its items."""
    import numpy as np

    from aiops.cli.row_text import plain
    from aiops.wire.messages import Message

    if isinstance(value, Message):
        return _json(plain(value))
    if isinstance(value, dict):
        return {key if isinstance(key, str) else repr(key): _json(v) for key, v in value.items()}
    if isinstance(value, list | tuple):
        return [_json(item) for item in value]
    if isinstance(value, set | frozenset):
        return [_json(item) for item in sorted(value, key=repr)]
    if isinstance(value, bytes):
        return value.hex()
    if isinstance(value, np.ndarray):
        return {"dtype": value.dtype.name, "items": value.astype(object).tolist()}
    if isinstance(value, float) and not np.isfinite(value):
        return repr(value)
    return value


@app.command()
def fetch(url: Store, folder: Empty) -> None:
    """Download the newest whole copy of a state (--state-copy) into an empty directory.

    The other commands read it there, and a server may go on from it.
    """
    from aiops.serving.state import state_copies

    if folder.exists() and any(folder.iterdir()):
        raise UsageError(f"{folder} is not empty: name a new directory")
    row = state_copies.fetch(folder, url)
    if not row:
        raise UsageError(f"{state_copies.shown(url)} has no copy of a state")
    print(f"{folder}: the state of row {row:,}")


@app.command()
def export(
    folder: Folder,
    out: Out,
    snapshot: Which = None,
    at: At = None,
    table: OneTable = None,
    as_json: Json = False,
) -> None:
    """Write the model of a snapshot to a .safetensors file, for --init and other software.

    It is the model of the snapshot, as it is evaluated, with its tables: the rows of the journal
    since are not applied.
    With --at it is that after a row: the rows since the snapshot before it are replayed, which
    takes about as long as the training did.

    With --table NAME it writes the stored rows of one table to a .npz file for NumPy: ids, an int64
    array, and rows, with a row for each of them.

    Of the folder with those of all shards it writes the whole model, tables included, at the newest
    moment of which all servers have a snapshot; rows are those of the lead's journal, in shard-0.
    """
    from aiops.cli.state_folder import StateFolder, is_one_file, opened_file, shard_folders
    from aiops.engine.restore import stored_tables

    if at is not None and (snapshot is not None or is_one_file(folder)):
        raise UsageError("--at is for a directory, and without --snapshot")
    if shard_folders(folder):
        _export_shards(folder, snapshot, at, out, table, as_json=as_json)
        return
    if at is not None:
        _export_at(StateFolder(folder), at, out, table, as_json=as_json)
        return
    if is_one_file(folder):
        if snapshot is not None:
            raise UsageError(f"{folder} is one snapshot: leave out --snapshot")
        opened = opened_file(folder)
    else:
        state = StateFolder(folder)
        newest = state.newest() if snapshot is None else snapshot
        if newest is None:
            raise UsageError(
                f"{folder} has no whole snapshot to export: with --at ROW its journal is replayed"
                " up to a row (`aiops state show` tells the newest)"
            )
        opened = state.snapshot(newest)
    with opened as file:
        arrays, row = _parameters(file), file.header.row
        version, found = file.header.versions[0], stored_tables(file.header.owners, file.array)
    _write(out, row, version, arrays, found, table, as_json=as_json)


def _export_shards(
    folder: Path,
    snapshot: int | None,
    row: int | None,
    out: Path,
    table: str | None,
    *,
    as_json: bool,
) -> None:
    """Write the model of several shards: of a set of snapshots, or after a row."""
    from aiops.cli.shards_replay import ModelAt, model_at, tables_at
    from aiops.cli.state_folder import exported_set

    if row is None:
        arrays, row, version = exported_set(folder, snapshot)
        found = ModelAt(arrays, version, tables_at(folder, row))
    else:
        found = model_at(folder, row)
    _write(out, row, found.version, found.arrays, found.tables, table, as_json=as_json)


def _export_at(state: Any, row: int, out: Path, table: str | None, *, as_json: bool) -> None:
    """Write the model after a row."""
    from aiops.cli.state_replay import engine_at

    engine = engine_at(state, row)
    if engine.training is None:
        raise UsageError(f"no model was defined at row {row:,}")
    arrays = engine.training.evaluated().views
    _write(out, row, engine.version, arrays, engine.saved_tables(), table, as_json=as_json)


def _write(
    out: Path,
    row: int,
    version: int,
    arrays: Mapping[str, Any],
    stored: Sequence[tuple[NamedTable, Any, Any]],
    table: str | None,
    *,
    as_json: bool,
) -> None:
    """Write the model, or one of its tables, and print what was written."""
    from aiops.serving.safetensors_io import write_model, write_table

    found: dict[str, Any] = {"out": str(out), "row": row, "version": version}
    if table is None:
        write_model(out, arrays, version, stored)
        found |= {"tensors": len(arrays)}
        what = f"version {version:,}, at row {row:,}, {len(arrays):,} tensors"
        if stored:
            found |= {"tables": {named.name: len(ids) for named, ids, _rows in stored}}
            count = len(stored)
            what += f", {count:,} table{'s' if count > 1 else ''}"
    else:
        by_name = {named.name: (ids, rows) for named, ids, rows in stored}
        if table not in by_name:
            known = nearest(table, by_name) if by_name else "it has no tables at all"
            raise UsageError(f"the model has no table {table!r}; {known}")
        ids, rows = by_name[table]
        write_table(out, ids, rows)
        found |= {"table": table, "rows": len(ids)}
        what = f"table {table!r} at row {row:,}, {len(ids):,} rows"
    print(json.dumps(found) if as_json else f"{out}: {what}")


def _parameters(file: Any) -> dict[str, Any]:
    """Return the tensors of a snapshot by name."""
    from aiops.cli.state_folder import described_layout, evaluation_of
    from aiops.errors import DamagedState
    from aiops.model.arena import Arena

    if file.header.shards > 1:
        raise UsageError(
            f"it is of shard {file.header.shard} of {file.header.shards}: give the folder with"
            " those of all shards"
        )
    layout = described_layout(file.header)
    if "params" not in file.arrays:
        raise UsageError("the snapshot has no parameters: it is no server's")
    data = file.array("params").reshape(-1).view("uint8")
    if len(data) < layout.nbytes:
        raise DamagedState(f"the snapshot's parameters have {len(data):,} bytes, too few")
    arena, evaluation = Arena(layout, data[: layout.nbytes]), evaluation_of(file.header, layout)
    if evaluation is not None:
        arena = Arena(layout)
        arena.data[:] = data[: layout.nbytes]
        evaluation.move(arena, file.array)
    return arena.views
