"""The exit statuses of ``aiops``: those of sysexits(3), so that a script can tell errors apart."""

from __future__ import annotations

from typing import Final

__all__ = ["UNAVAILABLE"]

UNAVAILABLE: Final = 69
"""A package, a server or another thing that is needed is not there."""
