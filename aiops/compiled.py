"""Whether what every message goes through runs compiled, or as it is read."""

from __future__ import annotations

from aiops import wire

COMPILED: bool = not wire.__file__.endswith(".py")
