"""One file with all runs of an experiment, from which another machine goes on.

A run is found by its settings, so a folder takes from an archive what it lacks: more seeds, another
rule or another network need the runs that are missing alone, wherever the others were made.

The file is gzip of JSON, a line for each run: its ``key``, and what the file of a run has
(`aiops.lab.experiments.runs.RunFolder`). Equal runs give equal bytes.
"""

from __future__ import annotations

import gzip
import io
import json
import zlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from aiops.errors import UsageError
from aiops.lab.run_record import write_bytes

__all__ = ["NAME", "read", "write"]

NAME = "runs.jsonl.gz"

_MOST = 1 << 30  # bytes of a line: a file that is no archive may have none that ends


def write(path: Path, folder: Path, keys: Iterable[str]) -> None:
    """Write the runs with these keys, whose files are in a folder.

    Raises
    ------
    UsageError
        When a file cannot be read or written.
    """
    text = io.BytesIO()
    try:
        with gzip.GzipFile(fileobj=text, mode="wb", filename="", mtime=0) as archive:
            for key in sorted(keys):
                row = json.loads((folder / f"{key}.json").read_text(encoding="utf-8"))
                line = json.dumps({"key": key, **row}, ensure_ascii=False, allow_nan=False)
                archive.write(line.encode() + b"\n")
        write_bytes(path, text.getvalue())
    except OSError as error:
        raise UsageError(f"{path} cannot be written: {error.strerror}", output=str(path)) from None


def read(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield each run's key, and what its file has.

    Raises
    ------
    UsageError
        When the file cannot be read, or is no archive.
    """
    try:
        with gzip.open(path, "rb") as archive:
            while line := archive.readline(_MOST):
                row = dict(json.loads(line))
                yield _checked(row.pop("key")), row
    except (ValueError, KeyError, TypeError, EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise UsageError(f"{path} is no archive of runs: {error!r}") from None
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror}") from None


def _checked(key: object) -> str:
    """Return the key, which becomes the name of a file."""
    if not isinstance(key, str) or not key.isalnum():
        raise ValueError(f"{key!r} is no key of a run")
    return key
