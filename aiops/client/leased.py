"""Read-only parameters in memory that the server lends."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from aiops.client.params import Params
from aiops.model.arena import Arena
from aiops.model.layout import Array, Layout
from aiops.wire.shared_payloads import LentPayload


class Leased(Params):
    """Parameters that are read in the server's memory, or copied where that cannot be.

    The arrays are read-only, and others after each fetch. A version is copied when it must be
    written to: when a fetch brings parts of the model, or the connection cannot lend.
    """

    def __init__(self, layout: Layout) -> None:
        super().__init__(layout)
        self._give_back: Callable[[], object] | None = None

    @property
    def borrowed(self) -> bool:
        """True while the arrays are the server's."""
        return self._give_back is not None

    def lend(self, lent: LentPayload) -> bool:
        """Read this version from here on."""
        self.read(lent.arena(self.layout), lent.give_back)
        return True

    def read(self, arena: Arena, give_back: Callable[[], object]) -> None:
        """Read a version in the server's arena, and call ``give_back`` when it is not needed."""
        self.let_go()
        self.arena, self._give_back = arena, give_back

    def own(self) -> Arena:
        """Return an arena of its own, with what was read until now."""
        if self._give_back is not None:
            mine = Arena(self.layout)
            mine.data[:] = self.arena.data
            self.let_go()
            self.arena = mine
        return self.arena

    def let_go(self) -> None:
        """End the hold on the server's version; the arrays mean nothing then."""
        give_back, self._give_back = self._give_back, None
        if give_back is not None:
            give_back()

    def __getitem__(self, name: str) -> Array:
        return self.arena.shown[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.arena.shown)
