"""Bound the connections that have not introduced themselves, apart from those that have."""

from __future__ import annotations

from collections import Counter, OrderedDict

MOST_STRANGERS = 256
"""Connections at a time that may not have completed the handshake."""


class StrangerPool:
    """The connections whose peers have not shown yet that they may connect.

    They have a pool of their own, so they take no place of a client. In a full pool the oldest of
    the address with the most of them makes room: idle ones keep out no client that says hello.

    Parameters
    ----------
    most
        The size of the pool.
    """

    def __init__(self, most: int = MOST_STRANGERS) -> None:
        self.most = most
        self._hosts: OrderedDict[int, str] = OrderedDict()  # by connection, the oldest first
        self._counts: Counter[str] = Counter()

    def __len__(self) -> int:
        return len(self._hosts)

    def came(self, number: int, host: str) -> int | None:
        """Note a new connection from an address; return the one to end for it, if there is one."""
        self._hosts[number] = host
        self._counts[host] += 1
        if len(self._hosts) <= self.most:
            return None
        most = max(self._counts.values())
        found = next(n for n, host in self._hosts.items() if self._counts[host] == most)
        self.gone(found)
        return found

    def gone(self, number: int) -> None:
        """Note that a connection has been admitted, or has ended."""
        host = self._hosts.pop(number, None)
        if host is not None:
            self._counts[host] -= 1
            if not self._counts[host]:
                del self._counts[host]
