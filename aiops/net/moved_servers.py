"""The servers that have moved to another address while this process knows them by their first.

A server that is started again on another machine has another address, and a program that has been
given the first one keeps it: in its URL, and in that of the workers that it starts. Whatever starts
servers elsewhere (`aiops.ray`) notes the new address here, and every connection is made to it.

A machine that falls silent closes no connection, and its kernel may acknowledge what it is sent. So
a connection to an address at which the server is no more is given up, too: one that is waited on in
a thread is looked at now and then, and one of an event loop is told.
"""

from __future__ import annotations

import threading
import weakref
from typing import Protocol, TypeAlias

from aiops.errors import ConnectionLost

Place: TypeAlias = tuple[str, int]
"""A host and a port."""


class LoopConnection(Protocol):
    """A connection of an event loop."""

    def server_moved(self, error: ConnectionLost) -> None:
        """End it, with this error; called on any thread."""


_moved: dict[Place, Place] = {}
_lock = threading.Lock()
_connections: weakref.WeakKeyDictionary[LoopConnection, tuple[Place, Place]] = (
    weakref.WeakKeyDictionary()
)


def note(first: Place, present: Place) -> None:
    """Have connections to a server's first address (host, port) be made to its present one."""
    with _lock:
        if first == present:
            _moved.pop(first, None)
        else:
            _moved[first] = present
        stale = [each for each, (of, at) in _connections.items() if of == first and at != present]
    for connection in stale:
        connection.server_moved(gone(first))


def present_address(host: str, port: int) -> Place:
    """Return the address at which a server is now."""
    return _moved.get((host, port), (host, port))


def watch(connection: LoopConnection, first: Place, present: Place) -> None:
    """Have a connection told when the server that it leads to is noted to be elsewhere.

    ``first``, ``present``: the server's address, and that to which the connection was made.
    """
    with _lock:
        _connections[connection] = first, present
    if present_address(*first) != present:
        connection.server_moved(gone(first))


def gone(first: Place) -> ConnectionLost:
    """Return the error of a connection to an address at which the server is no more."""
    return ConnectionLost(
        f"the server of {first[0]}:{first[1]} is at another address now, as its machine is lost"
    )
