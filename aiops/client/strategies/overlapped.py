"""Push each gradient as it is, and compute the next while that exchange is under way."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from typing import Any

from aiops.client.encode_push import gather
from aiops.client.lr_factors import LrFactors
from aiops.client.params import Params, Stamp, Stamped
from aiops.client.request_kinds import Receipt
from aiops.client.requests import Transfer
from aiops.client.strategies.base import LocalStrategy
from aiops.client.strategies.flat import take_over
from aiops.model.layout import Array


class Overlapped(LocalStrategy):
    """As `Direct`, but the next gradients are computed before the answer to a push has come.

    With one exchange under way (``depth`` 1) gradient n + 1 is computed while gradient n is pushed
    and its answer comes: at parameters that lack one of the worker's own steps. With two, gradient
    n is sent while the answer to n − 1 still comes, so that both directions of a link are in use;
    then up to two own steps are lacking. A gradient is stamped with the versions that it was
    computed at, so its staleness is counted as it is.

    The caller's gradient is copied when it is handed over, as the caller may change it after the
    step; one in `room` is not. An answer is received beside `params`, which the caller computes
    at, and is copied there between two gradients. Memory: per exchange under way a gradient and
    parameters, and one gradient more if `room` is used.

    Source: Odena, "Faster Asynchronous SGD", 2016, section 3: "we might just work with whatever the
    most recently computed set of parameters is".

    Parameters
    ----------
    params
        The parameters to train.
    depth
        How many exchanges may be under way, 1 or more.
    aside
        Whether answers are received beside ``params``. False, for a driver to which no answer comes
        while a gradient is computed, and that keeps gradients until they are answered or `kept`.
    """

    local = False

    def __init__(self, params: Params, depth: int = 1, *, aside: bool = True) -> None:
        super().__init__(params)
        self.depth = depth
        self.writes = self._aside = aside
        self._gradients: Mapping[str, Array] = {}
        self._lr_factors: LrFactors = None
        self._at: Stamped = params  # what the gradient was computed at
        self._sent: deque[tuple[Transfer, Params | None]] = deque()  # with their gradients' rooms
        self._fresh = deque(params.copy() for _ in range(depth) if aside)
        self._rooms: list[Params] = []  # for gradients, those that nothing uses
        self._room: Params | None = None  # that the caller writes to, or that has what is kept

    def room(self) -> Params:
        """Return room for the next gradient, from which it travels without a copy."""
        if self._room is None:
            self._room = self._rooms.pop() if self._rooms else self.params.like()
        return self._room

    def apply(self, gradients: Mapping[str, Array], lr_factors: LrFactors = None) -> None:
        """Note it, and the versions that it was computed at."""
        self._gradients, self._at, self._lr_factors = gradients, self.params, lr_factors

    def keep(self) -> None:
        """Copy the gradient, and note the versions: both change before it travels."""
        room, gradients = self.room(), self._gradients
        if gradients is not room:
            tensors = gather(room.layout, gradients, room)
            names = [room.layout.tensors[tensor].name for tensor in tensors.tolist()]
            whole = len(names) == len(room.layout.tensors)
            self._gradients = room if whole else {name: room[name] for name in names}
        if self._at is self.params:
            self._at = Stamp.of(self.params)

    @property
    def due(self) -> bool:
        """True if as many exchanges are under way as may be."""
        return len(self._sent) >= self.depth

    def transfer(self) -> Transfer | None:
        """Push the gradient; what comes is received beside the parameters."""
        room = None
        if self._aside or self._at is not self.params:
            self.keep()
            room, self._room = self._room, None
        made = Transfer(self._gradients, self._at, self._into(), lr_factors=self._lr_factors)
        return self._send(made, room)

    def _into(self) -> Params:
        return self._fresh.popleft() if self._aside else self.params

    def _send(self, transfer: Transfer, room: Params | None) -> Transfer:
        self._sent.append((transfer, room))
        self.under_way = self._sent[0][0]
        return transfer

    @property
    def waits(self) -> bool:
        """Return False."""
        return False

    def arrived(self, receipt: Receipt | None) -> None:
        """Go on with the parameters that have come."""
        into = self._over()
        if self._aside and into is not None:
            if self._at is self.params:  # a gradient that was computed at them is to be pushed
                self._at = Stamp.of(self.params)
            take_over(self.params, into)

    def failed(self) -> None:
        """Go on without the oldest exchange."""
        self._over()

    def _over(self) -> Params | None:
        """End the oldest exchange; return where its answer was received."""
        transfer, room = self._sent.popleft()
        if room is not None:
            self._rooms.append(room)
        if self._aside and transfer.into is not None:
            self._fresh.append(transfer.into)
        self.under_way = self._sent[0][0] if self._sent else None
        return transfer.into

    def refresh(self) -> Transfer:
        """Fetch; nothing else is under way."""
        into = self._into()
        return self._send(Transfer(None, into, into), None)

    # ------------------------------------------------------------ state

    @property
    def _ahead(self) -> Params | None:
        """A gradient that is kept, and has not travelled yet."""
        return self._room if self._gradients is self._room else None

    def arrays(self) -> dict[str, Array]:
        """Return the parameters, and the gradient that is kept."""
        found = super().arrays()
        return found if self._ahead is None else {**found, "ahead": self._ahead.arena.data}

    def state(self) -> dict[str, Any]:
        """Return the stamp of the gradient that is kept, too.

        Only of one to which answers do not come aside, and whose gradients are of all tensors.
        """
        stamp = None if self._ahead is None else Stamp.of(self._at).state()
        return {**super().state(), "ahead": stamp}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue from what `state` returned."""
        super().restore(state)
        if self.under_way is not None:
            self._sent.append((self.under_way, None))
        if state["ahead"] is not None:
            self._gradients = self.room()
            self._at = Stamp.from_state(state["ahead"], self.params.layout)
