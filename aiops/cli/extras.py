"""The packages of extras that commands need: a missing one is named, with what installs it."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator, Mapping, Sequence

from aiops._version import __version__
from aiops.cli.exit_status import UNAVAILABLE
from aiops.compiled import exchange_type

__all__ = ["missing_package_named", "print_version", "version_text"]

_EXTRA_OF: Mapping[str, str] = {"typer": "cli", "rich": "cli"}
"""The packages that commands import, each with the extra that brings it."""


def version_text() -> str:
    """Return the version, and whether there is compiled code."""
    compiled = "no" if exchange_type() is None else "yes"
    return f"aiops {__version__}\ncompiled exchange: {compiled}"


def print_version(arguments: Sequence[str]) -> bool:
    """Print the version and return True if that is all that is asked for: it needs no extra."""
    asked = list(arguments) == ["--version"]
    if asked:
        print(version_text())
    return asked


@contextlib.contextmanager
def missing_package_named(extra: str | None = None) -> Iterator[None]:
    """End the process with one line if what runs inside lacks a package of the command line.

    Parameters
    ----------
    extra
        The extra to name; default the smallest with the package.
    """
    try:
        yield
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        if package not in _EXTRA_OF:
            raise
        print(
            f"aiops: the command line needs the package {package!r}, which is not here:"
            f" pip install 'aiops-ps[{extra or _EXTRA_OF[package]}]'",
            file=sys.stderr,
        )
        raise SystemExit(UNAVAILABLE) from None
