"""Checkpoints: a running simulation as a file, from which it continues to the same result.

A file begins with a magic line and one line of JSON that describes it; both are read and compared
first. The rest is a pickle (`aiops.sim.turns.graph_pickle`). Trust a checkpoint like code: its
author decides what is executed where it is read.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import pickle
import platform
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any

import numpy as np

from aiops._version import __version__
from aiops.errors import UsageError
from aiops.sim.turns import graph_pickle
from aiops.sim.turns.task import Task

FORMAT = 1

_MAGIC = b"aiops simulation checkpoint\n"
_LONGEST = 1 << 20  # bytes of the line of JSON

Facts = Mapping[str, Any]


def facts_of(task: Task) -> Facts:
    """Return the facts that identify a task: its class, its examples, its initial parameters."""
    found = hashlib.sha256()
    for name, array in task.initial(0).items():
        found.update(f"{name} {array.dtype} {array.shape}".encode())
        found.update(np.ascontiguousarray(array).tobytes())
    kind = type(task)
    return {
        "kind": f"{kind.__module__}.{kind.__qualname__}",
        "examples": task.examples,
        "initial": found.hexdigest(),
    }


def save(path: Path, simulation: Facts, task: Task, state: object) -> None:
    """Write a checkpoint, whole or not at all: an older file stays until the new one is complete.

    Parameters
    ----------
    path
        Of the file.
    simulation
        Its settings.
    task
        The task that is trained; it is not written.
    state
        Everything else.

    Raises
    ------
    UsageError
        When the file cannot be written, or an object in the state exists in this process only.
    """
    try:
        pickled, arrays = graph_pickle.write(state, {"task": task})
    except (pickle.PicklingError, TypeError, AttributeError) as error:
        raise UsageError(f"this simulation cannot be kept in a file: {error}") from None
    header = {
        "format": FORMAT,
        **_env(),
        "simulation": dict(simulation),
        "task": dict(facts_of(task)),
        "graph": len(pickled),
        "arrays": sum(array.nbytes for array in arrays),
    }
    half_done = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        with half_done.open("wb") as file:
            file.write(_MAGIC + json.dumps(header).encode() + b"\n")
            file.write(pickled)
            for array in arrays:
                file.write(graph_pickle.contents(array))
            file.flush()
            os.fsync(file.fileno())
        half_done.replace(path)
    except OSError as error:
        why = error.strerror or error
        raise UsageError(f"cannot write the checkpoint {path}: {why}") from None
    finally:
        with contextlib.suppress(OSError):
            half_done.unlink()


def simulation_of(path: Path) -> Facts:
    """Return the settings of a checkpoint's simulation; nothing in the file is executed.

    Raises
    ------
    UsageError
        When it cannot be read, or not by this release.
    """
    try:
        with path.open("rb") as file:
            found: Facts = _header(file, path)["simulation"]
            return found
    except OSError as error:
        raise UsageError(f"cannot read the checkpoint {path}: {error.strerror}") from None


def load(path: Path, task: Task) -> Any:
    """Return the state that a checkpoint holds. The file is trusted like code.

    Raises
    ------
    UsageError
        When it cannot be read, or is of another task.
    """
    try:
        with path.open("rb") as file:
            header = _header(file, path)
            _compare(header["task"], facts_of(task), f"{path} is of another task")
            there = file.tell() + header["graph"] + header["arrays"]
            if os.fstat(file.fileno()).st_size != there:
                raise UsageError(
                    f"{path} is not as long as its header states: it was cut, or changed; resume"
                    " from another checkpoint"
                )
            pickled = file.read(header["graph"])
            return graph_pickle.read(pickled, file, {"task": task})
    except OSError as error:
        raise UsageError(f"cannot read the checkpoint {path}: {error.strerror}") from None
    except (pickle.UnpicklingError, AttributeError, ImportError, EOFError) as error:
        raise UsageError(f"{path} cannot be read any more: {error}") from None


def _env() -> dict[str, str]:
    """Return the versions that must be the same where it is read."""
    python = ".".join(platform.python_version_tuple()[:2])
    return {"aiops": __version__, "python": python, "numpy": np.__version__}


def _header(file: IO[bytes], path: Path) -> dict[str, Any]:
    """Read and check a file's magic line and header."""
    if file.read(len(_MAGIC)) != _MAGIC:
        raise UsageError(f"{path} is no checkpoint of a simulation")
    try:
        header: dict[str, Any] = json.loads(file.readline(_LONGEST))
        if header["format"] != FORMAT:
            text = f"{path} has format {header['format']}, and this release reads {FORMAT}"
            raise UsageError(f"{text}: go on with the release that wrote it")
        wrote = {name: header[name] for name in _env()}
        _compare(wrote, _env(), f"{path} was written elsewhere")
        if not all(type(header[name]) is int for name in ("graph", "arrays")):
            raise TypeError("lengths")
        if not all(isinstance(header[name], dict) for name in ("simulation", "task")):
            raise TypeError("descriptions")
    except (ValueError, KeyError, TypeError) as error:
        raise UsageError(f"{path} is damaged: its header lacks {error}") from None
    return header


def _compare(wrote: Facts, here: Facts, what: str) -> None:
    """Raise unless all facts agree."""
    for name in here:
        if wrote.get(name) != here[name]:
            raise UsageError(
                f"{what}: its {name} is {wrote.get(name)!s:.60}, not {here[name]!s:.60}"
            )


def compare(path: Path, wanted: Facts) -> Facts:
    """Return the settings of a checkpoint's simulation, if they are the wanted ones.

    Raises
    ------
    UsageError
        With the first setting that differs.
    """
    found = simulation_of(path)
    expected = json.loads(json.dumps(dict(wanted)))  # tuples are lists there
    _compare(found, expected, f"{path} is of another simulation")
    return found
