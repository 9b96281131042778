"""Import of objects by a text such as ``package.module:Class``."""

from __future__ import annotations

import importlib
from typing import Any

from aiops.errors import UsageError


def imported(place: str, what: str) -> Any:
    """Return the object at ``package.module:name``; errors begin with ``what``.

    Raises
    ------
    UsageError
        When the text has another form, or there is no such object.
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
