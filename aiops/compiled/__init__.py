"""Compiled code, which aiops does without where it is missing: its specification is in Python.

``exchange.c`` is the client's half of the steady exchange (`aiops.client.steady`). An installation
builds it where there is a C compiler (``hatch_build.py``); ``aiops --version`` says whether it is
there. The variable ``AIOPS_COMPILED=0`` has everything take the way in Python.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping
from functools import cache
from importlib.resources import files
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from aiops.compiled._exchange import Exchange

__all__ = ["COMPILED", "exchange_type"]

COMPILED = "AIOPS_COMPILED"


def exchange_type(environment: Mapping[str, str] = os.environ) -> type[Exchange] | None:
    """Return the compiled exchange; None: it is missing or outdated, or `COMPILED` is 0."""
    if environment.get(COMPILED) == "0":
        return None
    try:
        from aiops.compiled._exchange import SOURCE, Exchange
    except (ImportError, SystemError):  # there was no compiler, or it is of another machine
        return None
    return Exchange if _digest() == SOURCE else None


@cache
def _digest() -> str:
    """Return the digest of the source, which a library that was built from it has."""
    return hashlib.sha256((files("aiops.compiled") / "exchange.c").read_bytes()).hexdigest()
