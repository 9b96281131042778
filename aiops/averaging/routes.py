"""Decide how the members of a round are reached where there is a relay: directly if possible.

A direct connection is always tried, for it is shorter and costs the relay nothing. The relay is
tried beside it when the direct one has failed, or has had a head start of a quarter of a second.
The first that answers is used. A member that was reached through the relay the last time gets no
head start, so that each round does not wait for it; in every sixteenth round it gets one again, in
case that the network has changed.
"""

from __future__ import annotations

from typing import TypeAlias

Address: TypeAlias = tuple[str, int]

HEAD_START = 0.25
"""Seconds that a direct connection has before the relay is tried beside it."""

AGAIN = 16
"""Rounds through the relay, after which the direct connection gets a head start again."""

_REMEMBERED = 4096  # members; the one reached first is forgotten first


class Routes:
    """The way to each member of the rounds, as it was the last time."""

    def __init__(self) -> None:
        self._relayed: dict[Address, int] = {}  # rounds in a row in which it was

    def head_start(self, member: Address) -> float:
        """Return the seconds that a direct connection has before the relay is tried beside it."""
        return 0.0 if self._relayed.get(member, 0) % AGAIN else HEAD_START

    def note(self, member: Address, relayed: bool) -> None:
        """Note how a member has been reached."""
        if not relayed:
            self._relayed.pop(member, None)
            return
        if member not in self._relayed and len(self._relayed) >= _REMEMBERED:
            del self._relayed[next(iter(self._relayed))]
        self._relayed[member] = self._relayed.get(member, 0) + 1
