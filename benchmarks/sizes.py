"""Numbers of bytes, as people write them."""

from __future__ import annotations

import argparse
import re

from aiops.errors import UsageError

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30
_UNITS = {"b": 1, "kib": KIB, "mib": MIB, "gib": GIB}


def parse_size(text: str) -> int:
    """Turn ``4KiB``, ``1 MiB`` or ``4096`` into bytes; UsageError unless it is whole float32s."""
    match = re.fullmatch(r"\s*(\d+)\s*(b|kib|mib|gib)?\s*", text.lower())
    size = int(match[1]) * _UNITS[match[2] or "b"] if match else 0
    if size < 4 or size % 4:
        raise UsageError(
            f"size {text!r} is not a positive multiple of 4 bytes (float32);"
            " write it like 4096, 64KiB or 1MiB"
        )
    return size


def size_flag(text: str) -> int:
    """Read a size on the command line: `parse_size`, whose sentence argparse then shows."""
    try:
        return parse_size(text)
    except UsageError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def format_size(size: int) -> str:
    """Write a number of bytes in the largest unit that divides it."""
    for name, unit in (("GiB", GIB), ("MiB", MIB), ("KiB", KIB)):
        if size % unit == 0:
            return f"{size // unit} {name}"
    return f"{size} B"


def short_size(size: int) -> str:
    """Write it for the axis of a plot: 4K, 16M."""
    return format_size(size).replace("iB", "").replace(" ", "")
