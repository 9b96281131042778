"""Whether what every message goes through runs compiled, or as it is read."""

from __future__ import annotations

from aiops.wire import connection

COMPILED: bool = not connection.__file__.endswith(".py")
