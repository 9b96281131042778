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
from aiops.model.layout import Array, Ints, dtype_named
from aiops.model.tables import NamedTable, StoredTable, Table, Tables
from aiops.net.disk import SystemDisk

Described: TypeAlias = tuple[Any, ...]

_TABLES, _ORDER = "aiops_tables", "aiops_order"
"""Keys of a file's metadata: its tables, and the names of its tensors in the model's order."""

_DTYPES = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16"}


def read_model(path: Path) -> dict[str, Array]:
    """Return the tensors of a .safetensors file, in the model's order.

    That is the order that they were written in, if `write_model` wrote them. Otherwise it is the
    order in which their data lie in the file: the order of names in its header is a different one
    in every process that reads it.

    Raises
    ------
    UsageError
        When it cannot be read, is no such file, or has a tensor that cannot be trained.
    """
    held, described = _read(path)
    tables = {key for name, *_rest in described for key in _keys(name)}
    found = {}
    for name, row in held.items():
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

    Each is described as in a message, and comes with the ids and the parameters of its stored rows.

    Raises
    ------
    UsageError
        As `read_model`, and when the metadata name a table that the file does not have.
    """
    held, described = _read(path)
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


def _read(path: Path) -> tuple[dict[str, Any], list[Described]]:
    """Return a file's tensors by name, in the model's order, and its tables' descriptions."""
    safetensors = _library()
    try:
        content = path.read_bytes()
        held = dict(safetensors.deserialize(content))
    except OSError as error:
        raise UsageError(f"{path}: {error.strerror}") from None
    except safetensors.SafetensorError as error:
        raise UsageError(f"{path} is not a safetensors file: {error}", damaged=str(path)) from None
    length = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + length])  # the library has checked it
    metadata = header.get("__metadata__") or {}
    try:
        order = json.loads(metadata.get(_ORDER, "[]"))
        if not isinstance(order, list):
            raise TypeError(f"{_ORDER} is no list")
        written = {str(name): place for place, name in enumerate(order)}
        rows = json.loads(metadata.get(_TABLES, "[]"))
        described = [(str(row[0]), *row[1:]) for row in rows]
    except (ValueError, TypeError, AttributeError, IndexError) as error:
        raise UsageError(f"{path}: its metadata are damaged: {error}") from None

    def place(name: str) -> tuple[Any, ...]:
        return written.get(name, len(written)), *header[name]["data_offsets"], name

    return {name: held[name] for name in sorted(held, key=place)}, described


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
        raise UsageError(
            f"cannot write the model to {path}: {error.strerror or error}", output=str(path)
        ) from None


def write_model(
    path: Path,
    arrays: Mapping[str, Array],
    version: int,
    tables: Sequence[StoredTable] = (),
) -> None:
    """Write tensors to a .safetensors file, whole or not at all (a crash leaves the old file).

    The order of the tensors is kept in the file's metadata, since clients hold a model in it. Of
    each table the ids and the parameters of its stored rows are written, as tensors named
    ``tables/NAME/ids`` and ``tables/NAME/rows``; the others follow from its description, which is
    in the file's metadata.

    Raises
    ------
    UsageError
        When it cannot be written; the file is as it was. Or when only its folder cannot be synced:
        then it is the new one, whole, and a loss of power may bring the old one back.
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
    metadata = {"aiops_version": str(version), _ORDER: json.dumps(list(arrays))}
    if described:
        metadata[_TABLES] = json.dumps(described)
    half_done = _half_done(path)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        save_file(whole, half_done, metadata=metadata)
        with half_done.open("rb") as file:
            os.fsync(file.fileno())  # before the old file goes: some disks are full only now
        SystemDisk().rename(half_done, path)
    except (OSError, safetensors.SafetensorError) as error:
        why = getattr(error, "strerror", None) or error
        raise UsageError(f"cannot write the model to {path}: {why}") from None
    finally:
        with contextlib.suppress(OSError):
            half_done.unlink()


def write_table(path: Path, ids: Ints, rows: Array) -> None:
    """Write the stored rows of a table to a .npz file, whole or not at all: ``ids``, ``rows``.

    Raises
    ------
    UsageError
        When its name does not end so, or it cannot be written; the file is as it was.
    """
    if path.suffix != ".npz":
        raise UsageError(f"a table is written to a .npz file, not to {path}: name it so")
    half_done = _half_done(path)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with half_done.open("wb") as file:
            np.savez(file, ids=ids, rows=rows)
            file.flush()
            os.fsync(file.fileno())
        SystemDisk().rename(half_done, path)
    except OSError as error:
        raise UsageError(
            f"cannot write the table to {path}: {error.strerror or error}", output=str(path)
        ) from None
    finally:
        with contextlib.suppress(OSError):
            half_done.unlink()


def _half_done(path: Path) -> Path:
    if not path.name:  # of "", for example, in the place of a variable that is not set
        raise UsageError(f"{str(path)!r} is a folder: name a file in it", output=str(path))
    return path.with_name(f".{path.name}.{os.getpid()}.part")


def _library() -> Any:
    try:
        import safetensors
    except ImportError:
        raise UsageError(
            "reading and writing models needs safetensors: pip install 'aiops-ps[server]'"
        ) from None
    return safetensors
