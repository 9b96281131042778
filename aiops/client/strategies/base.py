"""The base of all strategies, and the simplest one: each gradient travels as it is."""

from __future__ import annotations

from collections.abc import Mapping

from aiops.client.params import Params
from aiops.client.request_kinds import Receipt
from aiops.client.requests import Transfer
from aiops.model.layout import Array


class LocalStrategy:
    """One worker's part. Derive and override; see `aiops.client.strategies` for the order of calls.

    Attributes
    ----------
    params
        The parameters to compute the next gradient at; the same arrays all the time.
    under_way
        The transfer that has not arrived yet, or None.
    local
        Whether gradients are applied here: then none is lost when a transfer fails.
    writes
        Whether steps change `params` here; else only what is fetched does.
    """

    local = True
    writes = True

    def __init__(self, params: Params) -> None:
        self.params = params
        self.under_way: Transfer | None = None

    def apply(self, gradients: Mapping[str, Array]) -> None:
        """Take the gradient of a mini-batch, computed at `params`: the worker's own step.

        Raises
        ------
        UsageError
            When a gradient does not fit its tensor.
        BadPush
            When a value is not finite, or 1e18 or more; nothing has changed.
        """
        raise NotImplementedError

    @property
    def due(self) -> bool:
        """True if the next call of `transfer` needs the one under way to have arrived."""
        return False

    def transfer(self) -> Transfer | None:
        """Return what is to travel after this step, if anything; it is then `under_way`."""
        raise NotImplementedError

    @property
    def waits(self) -> bool:
        """True if no gradient may be computed before the transfer under way has arrived."""
        return self.under_way is not None

    def arrived(self, receipt: Receipt | None) -> None:
        """Note that the transfer under way was answered, and its parameters received.

        ``receipt``: of a push.
        """
        self.under_way = None

    def failed(self) -> None:
        """Go on without the transfer under way, which was refused, and lose nothing.

        Only for what is known not to have been applied. When that is not known (the connection was
        lost, say), leave it under way and carry the same transfer again: its push has a number,
        and is applied once.
        """
        self.under_way = None

    def rest(self) -> Transfer | None:
        """Return what has not been pushed yet, at the end of training; it is then `under_way`."""
        return None

    def refresh(self) -> Transfer:
        """Return a fetch of the newest parameters; it is then `under_way`."""
        raise NotImplementedError

    def restarted(self) -> None:
        """Note that the server was restarted: versions from before are void."""

    def offer(self) -> Params:
        """Return what to offer a server that has lost its model."""
        return self.params

    def offered(self) -> None:
        """Note that the server took the offer."""


class Direct(LocalStrategy):
    """Push each gradient as it is, and wait for the parameters after it."""

    local = False
    writes = False

    def __init__(self, params: Params) -> None:
        super().__init__(params)
        self._gradients: Mapping[str, Array] = {}

    def apply(self, gradients: Mapping[str, Array]) -> None:
        """Keep it; the server does all."""
        self._gradients = gradients

    def transfer(self) -> Transfer | None:
        """Push it."""
        self.under_way = Transfer(self._gradients, self.params, self.params)
        return self.under_way

    def refresh(self) -> Transfer:
        """Fetch."""
        self.under_way = Transfer(None, self.params, self.params)
        return self.under_way
