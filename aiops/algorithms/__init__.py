"""The algorithms: one file each, found by name."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from importlib import metadata

from aiops.algorithms.base import Algorithm
from aiops.errors import UsageError, nearest

BUILT_IN: Mapping[str, str] = {
    "asgd": "aiops.algorithms.asgd:ASGD",
    "average": "aiops.algorithms.average:Average",
    "fasgd": "aiops.algorithms.fasgd:FASGD",
    "hardsync": "aiops.algorithms.hardsync:Hardsync",
    "sasgd": "aiops.algorithms.sasgd:SASGD",
    "softsync": "aiops.algorithms.softsync:Softsync",
}


def available() -> dict[str, str]:
    """Return every algorithm's name and where it is: ours, and those of installed packages."""
    others = metadata.entry_points(group="aiops.algorithms")
    return {**{point.name: point.value for point in others}, **BUILT_IN}


def find(name: str) -> type[Algorithm]:
    """Return the algorithm of that name, or the class at ``package.module:Class``.

    Raises
    ------
    UsageError
        When there is none, with the nearest name; or when what is there is no `Algorithm`.
    """
    place = BUILT_IN.get(name) or available().get(name, name)
    module_name, colon, attribute = place.partition(":")
    if not colon:
        raise UsageError(f"no policy is called {name!r}; {nearest(name, available())}")
    try:
        found = getattr(importlib.import_module(module_name), attribute)
    except ModuleNotFoundError as error:
        if error.name is not None and not module_name.startswith(error.name):
            raise
        raise UsageError(
            f"policy {name!r}: there is no module {module_name!r}; is it on PYTHONPATH?"
        ) from None
    except AttributeError:
        raise UsageError(f"policy {name!r}: {module_name} has no {attribute!r}") from None
    if not (isinstance(found, type) and issubclass(found, Algorithm)):
        raise UsageError(f"policy {name!r} is not a class derived from aiops.algorithms.Algorithm")
    return found
