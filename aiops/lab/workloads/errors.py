"""The errors of data sets.

::

    AiopsError
    └── DataUnavailable     the files are nowhere to be found, or cannot be had or decoded here
        └── DamagedData     a file is there, but it is not what it should be
"""

from __future__ import annotations

from pathlib import Path

from aiops.errors import AiopsError

__all__ = ["DamagedData", "DataUnavailable"]


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
