"""What a text such as ``package.module:Class`` stands for."""

from __future__ import annotations

import importlib
from typing import Any

from aiops.errors import UsageError


def imported(place: str, what: str) -> Any:
    """Return what lies at ``package.module:name``; ``what`` asks for it, for people.

    Raises
    ------
    UsageError
        When it is not written so, or nothing lies there.
    """
    module_name, colon, attribute = place.partition(":")
    if not colon:
        raise UsageError(f"{what}: write package.module:name")
    try:
        return getattr(importlib.import_module(module_name), attribute)
    except ModuleNotFoundError as error:
        if error.name is not None and not module_name.startswith(error.name):
            raise
        raise UsageError(
            f"{what}: there is no module {module_name!r}; is it on PYTHONPATH?"
        ) from None
    except AttributeError:
        raise UsageError(f"{what}: {module_name} has no {attribute!r}") from None
