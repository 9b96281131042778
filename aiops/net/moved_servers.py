"""The servers that have moved to another address while this process knows them by their first.

A server that is started again on another machine has another address, and a program that has been
given the first one keeps it: in its URL, and in that of the workers that it starts. Whatever starts
servers elsewhere (`aiops.ray`) notes the new address here, and every connection is made to it.
"""

from __future__ import annotations

_moved: dict[tuple[str, int], tuple[str, int]] = {}


def note(first: tuple[str, int], present: tuple[str, int]) -> None:
    """Have connections to a server's first address (host, port) be made to its present one."""
    if first == present:
        _moved.pop(first, None)
    else:
        _moved[first] = present


def present_address(host: str, port: int) -> tuple[str, int]:
    """Return the address at which a server is now."""
    return _moved.get((host, port), (host, port))
