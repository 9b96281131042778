"""The clients that an administrator has sent away (``aiops kick``): a server takes them no more."""

from __future__ import annotations

from collections import OrderedDict

MOST_SENT_AWAY = 4096
"""Clients that are remembered because an administrator has sent them away: the last ones."""


class SentAway(OrderedDict[str, str]):
    """Why each client was sent away, by its id; of the last 4,096 of them."""

    def note(self, client: str, why: str) -> None:
        """Add a client; forget the one that was sent away first if there are too many."""
        self[client] = why
        self.move_to_end(client)
        if len(self) > MOST_SENT_AWAY:
            self.popitem(last=False)
