"""Report whether the modules that every message goes through are compiled."""

from __future__ import annotations

from aiops.wire import connection

COMPILED: bool = not connection.__file__.endswith(".py")
