"""Load compiled code, if it is there and was built from the sources that are there.

The C files of this folder make one library, ``_core``. An installation builds it where there is a C
compiler (``hatch_build.py``); ``aiops --version`` says whether it is there. The variable
``AIOPS_COMPILED=0`` has everything take the way in Python.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping
from functools import cache
from importlib import import_module
from importlib.resources import files
from types import ModuleType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from aiops.compiled._core import Exchange

__all__ = ["COMPILED", "core", "exchange_type"]

COMPILED = "AIOPS_COMPILED"


def core(environment: Mapping[str, str] = os.environ) -> ModuleType | None:
    """Return the library; None: it is missing or outdated, or `COMPILED` is 0."""
    if environment.get(COMPILED) == "0":
        return None
    try:
        found = import_module("aiops.compiled._core")
    except (ImportError, SystemError):  # there was no compiler, or it is of another machine
        return None
    return found if _digest() == getattr(found, "SOURCE", None) else None


def exchange_type(environment: Mapping[str, str] = os.environ) -> type[Exchange] | None:
    """Return the compiled exchange of a client, `aiops.client.steady`, or None as `core`."""
    found = core(environment)
    return None if found is None else found.Exchange


@cache
def _digest() -> str:
    """Return the digest of the sources, which a library that was built from them has."""
    sources = (each for each in files(__package__).iterdir() if each.name.endswith((".c", ".h")))
    found = hashlib.sha256()
    for source in sorted(sources, key=lambda each: each.name):
        found.update(hashlib.sha256(source.read_bytes()).digest())
    return found.hexdigest()
