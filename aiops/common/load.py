"""Import of objects by a text such as ``package.module:Class``."""

from __future__ import annotations

import importlib
import sys
import traceback
from collections.abc import Iterable
from typing import Any

from aiops.errors import UsageError

_NOT_THEIRS = {__name__.partition(".")[0], *sys.stdlib_module_names} - {"__main__"}


def imported(place: str, what: str) -> Any:
    """Return the object at ``package.module:name``; errors begin with ``what``.

    Raises
    ------
    UsageError
        When the text has another form, the module cannot be imported, or there is no such object.
    """
    module_name, colon, attribute = place.partition(":")
    if not (colon and attribute and all(module_name.split("."))) or "/" in module_name:
        raise UsageError(f"{what}: write package.module:name, with the module as in an import")
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module_name}.".startswith(f"{error.name}."):
            raise _failed(what, module_name, error) from error
        raise UsageError(
            f"{what}: there is no module {module_name!r}; is it on PYTHONPATH?"
        ) from None
    except Exception as error:  # it runs code of the user's
        raise _failed(what, module_name, error) from error
    try:
        return getattr(module, attribute)
    except AttributeError:
        raise UsageError(f"{what}: {module_name} has no {attribute!r}") from None


def own_modules(parts: Iterable[object]) -> set[str]:
    """Return the names of the modules of a user's that objects have their classes in.

    >>> from argparse import Namespace
    >>> own_modules([UsageError("why"), Namespace()])
    set()
    """
    modules = {cls.__module__ for part in parts for cls in type(part).__mro__}
    return {each for each in modules if each.partition(".")[0] not in _NOT_THEIRS}


def described(error: BaseException, *, skipped: int = 0) -> str:
    """Return an error of a user's code in one line: its class, its text, and the last line in it.

    ``skipped``: the frames of the caller's own, from the outside: without others there is no line.
    """
    frames = traceback.extract_tb(error.__traceback__)[skipped:]
    text = " ".join(str(error).split())
    if isinstance(error, SyntaxError):
        text, place = error.msg, f" ({error.filename}, line {error.lineno})"
    else:
        place = f" ({frames[-1].filename}, line {frames[-1].lineno})" if frames else ""
    return f"{type(error).__name__}{text and ': '}{text}{place}"


def _failed(what: str, module_name: str, error: Exception) -> UsageError:
    """Return the error of a module that cannot be imported, with the place of the mistake."""
    return UsageError(f"{what}: {module_name} cannot be imported: {described(error)}")
