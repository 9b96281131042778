"""Files of data sets: where they may lie, and how they are downloaded.

A file is good if its reader accepts it. The reader checks the checksum and turns the file into
arrays, or raises :class:`DamagedData`; so nothing is kept that could not be read, and nothing is
unpacked twice only to be checked.
"""

from __future__ import annotations

import http.client
import logging
import os
import tempfile
import urllib.request
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from aiops.errors import AiopsError

__all__ = [
    "TIMEOUT_S",
    "DamagedData",
    "DataUnavailable",
    "RemoteFile",
    "download",
    "folders",
    "unavailable",
]

TIMEOUT_S = 20.0
"""How long a mirror may stay silent (seconds) before the next one is asked."""

_CHUNK = 1 << 20
_log = logging.getLogger(__name__)

T = TypeVar("T")


class DataUnavailable(AiopsError):
    """A data set is not on this machine and cannot be downloaded; the text lists what was tried."""


class DamagedData(DataUnavailable):
    """A file of a data set is corrupt, cut short, or another file under the same name.

    ``details`` holds ``path`` (str) and ``reason`` (str).
    """

    def __init__(self, path: Path, reason: str) -> None:
        text = f"{path} is damaged: {reason}; delete it and load again, or put a good copy there"
        super().__init__(text, path=str(path), reason=reason)
        self.reason = reason


@dataclass(frozen=True, slots=True)
class RemoteFile:
    """A file that public mirrors serve.

    Attributes:
        dataset: the data set it belongs to, and the folder it lies in.
        name: the file's name, in the folder and on every mirror.
        mirrors: base URLs, asked in this order.
        limit: the most bytes that are accepted for it.
    """

    dataset: str
    name: str
    mirrors: Sequence[str]
    limit: int


def folders(dataset: str, cache: Path | None = None) -> tuple[Path, ...]:
    """Return where the files of a data set may lie, best first; downloads go to the last.

    These are ``$AIOPS_DATA/<dataset>`` (when the variable is set) and ``<cache>/<dataset>``, where
    ``cache`` is by default ``$XDG_CACHE_HOME/aiops/data``, or ``~/.cache/aiops/data``.
    """
    environ = os.environ  # the one place that reads it
    if cache is None:
        home = environ.get("XDG_CACHE_HOME") or "~/.cache"
        cache = Path(home).expanduser() / "aiops" / "data"
    shared = environ.get("AIOPS_DATA")
    roots = (Path(shared).expanduser(), cache) if shared else (cache,)
    return tuple(root / dataset for root in roots)


def download(remote: RemoteFile, read: Callable[[Path], T], places: Sequence[Path]) -> T:
    """Fetch a file from the first mirror with a good copy, keep it, and return its content.

    It is kept in the last of the ``places`` (see :func:`folders`); the others are for the error.

    The file appears under its name only when it is whole and ``read`` has accepted it, so that an
    interrupted or second download never leaves half a file behind.

    Raises:
        DataUnavailable: no mirror gave a good copy, or the folder cannot be written.
    """
    into, failures = places[-1], []
    try:
        into.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=into, prefix=".download-") as folder:
            for mirror in remote.mirrors:
                url = f"{mirror.rstrip('/')}/{remote.name}"
                part = Path(folder) / remote.name
                try:
                    _copy(url, part, remote.limit)
                    content = read(part)
                except DamagedData as error:
                    failures.append(f"{url}: {error.reason}")
                except (OSError, http.client.HTTPException, ValueError) as error:
                    failures.append(f"{url}: {str(error) or type(error).__name__}")
                else:
                    part.replace(into / remote.name)
                    return content
    except OSError as error:
        failures.append(f"cannot write to {into}: {error}")
    raise unavailable(remote, places, f"could not be downloaded ({'; '.join(failures)})")


def unavailable(remote: RemoteFile, places: Sequence[Path], reason: str) -> DataUnavailable:
    """Return the error of a missing file: where it was looked for, why it is missing, a remedy."""
    dataset, name = remote.dataset, remote.name
    looked = " or ".join(str(place) for place in places)
    text = (
        f"data set {dataset!r}: {name} is not in {looked}, and {reason}; put it into {places[-1]}, "
        f"or set AIOPS_DATA to a folder that holds {dataset}/{name}; the data"
        " set 'digits' comes with the package"
    )
    return DataUnavailable(text, dataset=dataset, file=name, looked=[str(p) for p in places])


def _copy(url: str, target: Path, limit: int) -> None:
    """Copy what ``url`` serves into a file; OSError when it is cut short or over ``limit``."""
    _log.info("downloading %s", url)
    # Some mirrors turn away the name under which urllib introduces itself.
    request = urllib.request.Request(url, headers={"User-Agent": "aiops"})
    with (
        urllib.request.urlopen(request, timeout=TIMEOUT_S) as response,
        target.open("wb") as file,
    ):
        received = 0
        while chunk := response.read(_CHUNK):
            received += len(chunk)
            if received > limit:
                raise OSError(f"sent more than the {limit:,} bytes that the file may have")
            file.write(chunk)
        promised = response.headers.get("Content-Length")
        if promised is not None and received != int(promised):
            raise OSError(f"broke off after {received:,} of {int(promised):,} bytes")
