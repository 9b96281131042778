"""Bounds on what all connections hold together, beyond which the one that holds most is ended."""

from __future__ import annotations

from collections.abc import Callable, Collection

from aiops.net.transport import MessageTransport

ANSWERS = 64 << 20
"""Bytes of answers that wait for their readers, without those that are in a version's memory."""

HEADERS = 64 << 20
"""Bytes of headers that have come in part."""


class SharedBound:
    """A bound on bytes of one kind that connections hold.

    Each client has a bound of its own, to which few honest ones come near. Many that all go up to
    theirs are bounded here: the one that holds most makes room, the oldest first.

    Parameters
    ----------
    bound
        Bytes, of all together.
    held
        Returns those of one connection.
    why
        The reason that is given to a client that is ended, as a sentence about it.
    links
        Returns the connections, the oldest first.
    """

    def __init__(
        self,
        bound: int,
        held: Callable[[MessageTransport], int],
        why: str,
        links: Callable[[], Collection[MessageTransport]],
    ) -> None:
        self.bound, self._held, self._why, self._links = bound, held, why, links
        self._total = 0  # no less than all of them hold

    def grew(self, nbytes: int) -> None:
        """Note that a connection holds ``nbytes`` more; end others until all are in the bound."""
        self._total += nbytes
        if self._total <= self.bound:
            return
        held = {link: self._held(link) for link in self._links()}
        self._total = sum(held.values())
        while self._total > self.bound:
            most = max(held, key=held.__getitem__)
            self._total -= held.pop(most)
            most.dismiss(self._why)
