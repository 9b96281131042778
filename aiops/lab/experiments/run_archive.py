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
    number = 0
    try:
        with gzip.open(path, "rb") as archive:
            while line := archive.readline(_MOST):
                number += 1
                yield _run(line)
    except _NoRun as error:
        raise _no_archive(path, f"line {number} of it, unpacked, {error}") from None
    except EOFError:
        raise _no_archive(path, "it ends in the midst of its data: copy it again") from None
    except gzip.BadGzipFile as error:
        if "Not a gzipped file" in str(error):
            raise _no_archive(path, "it is not compressed by gzip") from None
        raise _no_archive(path, "its checksum does not match: copy it again") from None
    except zlib.error:
        raise _no_archive(path, "its compressed data is damaged: copy it again") from None
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror}") from None


class _NoRun(ValueError):
    """A line describes no run; the text goes on from "line 3 of it, unpacked,"."""


def _no_archive(path: Path, why: str) -> UsageError:
    return UsageError(
        f"{path} is no archive of runs: {why}; give a {NAME}, which experiments write into the"
        " folder of their results"
    )


def _run(line: bytes) -> tuple[str, dict[str, Any]]:
    """Return the key of a line, which becomes the name of a file, and the run."""
    try:
        row: object = json.loads(line)
    except (ValueError, RecursionError):
        raise _NoRun("is not JSON") from None
    if not isinstance(row, dict):
        raise _NoRun("is no JSON object")
    key = row.pop("key", None)
    if not isinstance(key, str) or not key.isalnum():
        raise _NoRun('has no "key" of letters and digits')
    for part in ("result", "versions"):
        if not isinstance(row.get(part), dict):
            raise _NoRun(f'has no "{part}" with values of a run')
    return key, row
