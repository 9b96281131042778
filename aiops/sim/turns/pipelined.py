"""The strategy of clients that compute on before the server has answered their last push."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from aiops.client.params import Params, Stamp, Stamped
from aiops.client.requests import Transfer
from aiops.client.strategies.base import Direct
from aiops.model.layout import Array


class PipelinedPush(Direct):
    """Push each gradient as it is, and meanwhile compute the next at the present parameters.

    At most one gradient is ahead. It is kept, stamped with the versions that it was computed at,
    and pushed when the last push has been answered; until then no other is computed.

    Source: Odena, "Faster Asynchronous SGD", 2016, section 3: "we might just work with whatever the
    most recently computed set of parameters is".
    """

    def __init__(self, params: Params) -> None:
        super().__init__(params)
        self._at: Stamped = params
        self._kept: Params | None = None  # a buffer for the gradient ahead

    def apply(self, gradients: Mapping[str, Array]) -> None:
        """Keep a gradient: a copy, if it cannot be pushed now."""
        if self.under_way is None:
            self._gradients, self._at = gradients, self.params
            return
        if self._kept is None:
            self._kept = self.params.like()
        for name, array in gradients.items():
            self._kept[name][...] = array
        self._gradients, self._at = self._kept, Stamp.of(self.params)

    @property
    def due(self) -> bool:
        """Return True: every step pushes."""
        return True

    def transfer(self) -> Transfer | None:
        """Return the push of the gradient that is kept."""
        self.under_way = Transfer(self._gradients, self._at, self.params)
        return self.under_way

    @property
    def waits(self) -> bool:
        """Return False."""
        return False

    @property
    def _ahead(self) -> Params | None:
        """The buffer, if the gradient in it may be still to be pushed."""
        return self._kept if self._gradients is self._kept else None

    def arrays(self) -> dict[str, Array]:
        """Return the parameters, and the gradient ahead."""
        found = super().arrays()
        return found if self._ahead is None else {**found, "ahead": self._ahead.arena.data}

    def state(self) -> dict[str, Any]:
        """Return the stamp of the gradient ahead too."""
        stamp = None if self._ahead is None else Stamp.of(self._at).state()
        return {**super().state(), "ahead": stamp}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue from what `state` returned."""
        super().restore(state)
        if state["ahead"] is not None:
            self._gradients = self._kept = self.params.like()
            self._at = Stamp.from_state(state["ahead"], self.params.layout)
