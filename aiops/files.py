"""Models as files, in the safetensors format (read by PyTorch, JAX, NumPy and others)."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from aiops.errors import UsageError
from aiops.layout import Array, dtype_named

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
    for name, row in rows:
        if row["dtype"] not in _DTYPES:
            raise UsageError(
                f"{path}: {name!r} is {row['dtype']}, which cannot be trained; convert it to one"
                f" of {', '.join(_DTYPES)}, or leave it out"
            )
        dtype = dtype_named(_DTYPES[row["dtype"]])
        found[name] = np.frombuffer(row["data"], dtype).reshape(row["shape"])
    return found


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


def write_model(path: Path, arrays: Mapping[str, Array], version: int) -> None:
    """Write tensors to a .safetensors file, whole or not at all (a crash leaves the old file)."""
    safetensors = _library()
    from safetensors.numpy import save_file

    whole: dict[str, Any] = {name: np.asarray(array, order="C") for name, array in arrays.items()}
    half_done = _half_done(path)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        save_file(whole, half_done, metadata={"aiops_version": str(version)})
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
