"""Have a server's process start fast: what is done before its modules are imported, and after."""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from aiops.net.cpu_count import leave_blas_alone
from aiops.serving.state.read_ahead import read_ahead

__all__ = ["begin", "end", "state_folder"]

_FLAG, _VARIABLE = "--state", "AIOPS_STATE"


def begin() -> None:
    """Begin, before NumPy is imported.

    The state's files are read meanwhile. And nothing that is imported is garbage: to look for some
    again and again takes a fifth of the time of an import.
    """
    leave_blas_alone()
    gc.disable()
    folder = state_folder(sys.argv[1:], os.environ)
    if folder is not None:
        read_ahead(folder)


def end() -> None:
    """Collect garbage from here on, among what is made from here on."""
    gc.freeze()
    gc.enable()


def state_folder(arguments: Sequence[str], environment: Mapping[str, str]) -> Path | None:
    """Return the folder that a server is to keep its state in, if that can be told at a glance."""
    found = environment.get(_VARIABLE, "")
    for at, argument in enumerate(arguments):
        name, given, value = argument.partition("=")
        if name == _FLAG:
            found = value if given else next(iter(arguments[at + 1 :]), "")
    return Path(found) if found else None
