"""The clients of a follower: their connections, and the traffic with each."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

from aiops.common.sent_away import SentAway
from aiops.errors import Kicked
from aiops.wire.server_messages import ShardHello
from aiops.wire.traffic import Traffic

_DEPARTED = 4096  # clients whose traffic is remembered after they left


class ShardClients:
    """The clients of one follower. A client's connections follow each other in rising epochs.

    Attributes
    ----------
    hellos
        By connection, the message that its client introduced itself with.
    """

    def __init__(self) -> None:
        self._keys: dict[int, tuple[str, int]] = {}  # client and epoch, by connection
        self.hellos: dict[int, ShardHello] = {}  # by connection
        self._peers: dict[tuple[str, int], int] = {}
        self._traffic: dict[int, Traffic] = {}  # by connection
        self._past: OrderedDict[str, Traffic] = OrderedDict()  # of past connections, by client
        self._sent_away = SentAway()

    def join(self, peer: int, hello: ShardHello, traffic: Traffic) -> list[int]:
        """Add a connection; return those of earlier epochs, which are to be dropped.

        Raises
        ------
        ValueError
            When the client has a connection of this epoch already.
        Kicked
            When it was sent away.
        """
        if hello.client in self._sent_away:
            raise Kicked(self._sent_away[hello.client])
        key = hello.client, hello.epoch
        if key in self._peers:
            raise ValueError("this client has such a connection already")
        earlier = [
            peer
            for peer, (client, epoch) in self._keys.items()
            if client == hello.client and epoch < hello.epoch
        ]
        self._keys[peer], self._peers[key], self._traffic[peer] = key, peer, traffic
        self.hellos[peer] = hello
        return earlier

    def send_away(self, client: str, why: str) -> list[int]:
        """Take a client no more; return its connections, which are to be dropped."""
        self._sent_away.note(client, why)
        return [peer for peer, (each, _epoch) in self._keys.items() if each == client]

    def leave(self, peer: int) -> tuple[str, int] | None:
        """Remove a connection that ended; return its client and epoch, None if it has none."""
        key = self._keys.pop(peer, None)
        if key is None:
            return None
        del self._peers[key], self.hellos[peer]
        client = key[0]
        self._past.setdefault(client, Traffic()).add(self._traffic.pop(peer))
        self._past.move_to_end(client)
        if len(self._past) > _DEPARTED:
            self._past.popitem(last=False)
        return key

    @property
    def present(self) -> list[int]:
        """Their connections."""
        return list(self._keys)

    def key(self, peer: int) -> tuple[str, int] | None:
        """Return the client and epoch of a connection, None if it is no client's."""
        return self._keys.get(peer)

    def peer(self, client: str, epoch: int) -> int | None:
        """Return a client's connection of an epoch, None if it is not there."""
        return self._peers.get((client, epoch))

    def counted(self) -> dict[str, Any]:
        """Return the traffic with each client, as `Traffic.counts`."""
        found: dict[str, Traffic] = {}
        present = ((self._keys[peer][0], traffic) for peer, traffic in self._traffic.items())
        for client, traffic in (*self._past.items(), *present):
            found.setdefault(client, Traffic()).add(traffic)
        return {client: traffic.counts() for client, traffic in found.items()}
