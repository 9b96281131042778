"""Models as files, in the safetensors format (read by PyTorch, JAX, NumPy and others)."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np

from aiops.errors import UsageError
from aiops.layout import Array, Ints, dtype_named
from aiops.tables import NamedTable, Table, Tables

Described: TypeAlias = tuple[Any, ...]

_TABLES = "aiops_tables"
_LONGEST_HEADER = 100_000_000  # as the format has it

_DTYPES = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16"}


def read_model(path: Path) -> dict[str, Array]:
    """Return the tensors of a .safetensors file.

    Raises
    ------
    UsageError
        When it cannot be read, is no such file, or has a tensor that cannot be trained.
    """
    safetensors = _library()
    try:
        rows = safetensors.deserialize(path.read_bytes())
    except OSError as error:
        raise UsageError(f"{path}: {error.strerror}") from None
    except safetensors.SafetensorError as error:
        raise UsageError(f"{path} is not a safetensors file: {error}") from None
    found = {}
    tables = {key for name, *_rest in _described(path) for key in _keys(name)}
    for name, row in rows:
        if name in tables:
            continue
        if row["dtype"] not in _DTYPES:
            raise UsageError(
                f"{path}: {name!r} is {row['dtype']}, which cannot be trained; convert it to one"
                f" of {', '.join(_DTYPES)}, or leave it out"
            )
        dtype = dtype_named(_DTYPES[row["dtype"]])
        found[name] = np.frombuffer(row["data"], dtype).reshape(row["shape"])
    return found


def read_tables(path: Path) -> list[tuple[Described, Ints, Array]]:
    """Return the sparse tables of a .safetensors file that `write_model` has written.

    Each is described as on the wire, and comes with the ids and the parameters of its stored rows.

    Raises
    ------
    UsageError
        As `read_model`, and when it says that it has a table and does not.
    """
    safetensors = _library()
    described = _described(path)
    if not described:
        return []
    held = dict(safetensors.deserialize(path.read_bytes()))
    found = []
    for row in sorted(described):
        try:
            ids, rows = (held[key] for key in _keys(row[0]))
            table = NamedTable(row[0], 0, Table(*row[1:])).table
            kinds = {"float32": "F32", "float64": "F64"}
            if ids["dtype"] != "I64" or rows["dtype"] != kinds[table.dtype]:
                raise ValueError(f"ids {ids['dtype']}, rows {rows['dtype']}")
            numbers = np.frombuffer(ids["data"], "<i8").astype(np.int64)
            matrix = np.frombuffer(rows["data"], table.dtype).reshape(len(numbers), table.width)
        except (KeyError, TypeError, ValueError) as error:
            raise UsageError(f"{path}: its table {row[0]!r} is damaged: {error!r}") from None
        found.append((row, numbers, matrix))
    return found


def _described(path: Path) -> list[Described]:
    """Return what the file's metadata say about tables."""
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        header = file.read(min(length, _LONGEST_HEADER))
    try:
        rows = json.loads(json.loads(header).get("__metadata__", {}).get(_TABLES, "[]"))
        return [(str(row[0]), *row[1:]) for row in rows]
    except (ValueError, TypeError, AttributeError, IndexError) as error:
        raise UsageError(f"{path}: its metadata are damaged: {error}") from None


def _keys(name: str) -> tuple[str, str]:
    """Return the names under which a table's ids and rows are written."""
    return f"tables/{name}/ids", f"tables/{name}/rows"


def check_writable(path: Path) -> None:
    """See that a model can be written there, before a training run depends on it.

    Raises
    ------
    UsageError
        When it cannot.
    """
    _library()
    half_done = _half_done(path)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        half_done.open("wb").close()
        half_done.unlink()
    except OSError as error:
        raise UsageError(f"cannot write the model to {path}: {error.strerror or error}") from None


def write_model(
    path: Path,
    arrays: Mapping[str, Array],
    version: int,
    tables: Sequence[tuple[NamedTable, Ints, Array]] = (),
) -> None:
    """Write tensors to a .safetensors file, whole or not at all (a crash leaves the old file).

    Of each table the ids and the parameters of its stored rows are written, as tensors named
    ``tables/NAME/ids`` and ``tables/NAME/rows``; the others follow from its description, which is
    in the file's metadata.
    """
    safetensors = _library()
    from safetensors.numpy import save_file

    whole: dict[str, Any] = {name: np.asarray(array, order="C") for name, array in arrays.items()}
    described = []
    for named, ids, rows in tables:
        if set(_keys(named.name)) & whole.keys():
            raise UsageError(
                f"cannot write table {named.name!r}: a tensor has its name in the file"
            )
        whole.update(zip(_keys(named.name), (ids, rows), strict=True))
        described.append(Tables({named.name: named.table}).described[0])
    metadata = {"aiops_version": str(version)}
    if described:
        metadata[_TABLES] = json.dumps(described)
    half_done = _half_done(path)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        save_file(whole, half_done, metadata=metadata)
        half_done.replace(path)
    except (OSError, safetensors.SafetensorError) as error:
        why = getattr(error, "strerror", None) or error
        raise UsageError(f"cannot write the model to {path}: {why}") from None
    finally:
        with contextlib.suppress(OSError):
            half_done.unlink()


def _half_done(path: Path) -> Path:
    return path.with_name(f".{path.name}.{os.getpid()}.part")


def _library() -> Any:
    try:
        import safetensors
    except ImportError:
        raise UsageError(
            "reading and writing models needs safetensors: pip install 'aiops-ps[server]'"
        ) from None
    return safetensors
