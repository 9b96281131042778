"""The memory that this process holds, as the kernel counts it."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path


def resident() -> int | None:
    """Return the bytes of this process that are in memory; None where the system cannot tell."""
    with contextlib.suppress(OSError, ValueError, IndexError):  # it is not Linux
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    return None
