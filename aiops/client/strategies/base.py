"""The base of all strategies, and the simplest one: each gradient travels as it is."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from aiops.client.lr_factors import LrFactors
from aiops.client.params import Params, Stamp
from aiops.client.request_kinds import Receipt
from aiops.client.requests import Transfer
from aiops.model.layout import Array


class LocalStrategy:
    """One worker's part. Derive and override; see `aiops.client.strategies` for the order of calls.

    Between two gradients a strategy can be kept: `state` has plain values, and `arrays` are written
    beside them. One that is made alike continues after `restore`, and after its `arrays` have been
    filled. The request of a transfer that is under way is its driver's to keep.

    Attributes
    ----------
    params
        The parameters to compute the next gradient at; the same arrays all the time.
    under_way
        The transfer that has not arrived yet (the oldest of several), or None.
    local
        Whether gradients are applied here: then none is lost when a transfer fails.
    writes
        Whether steps change `params` here; else only what is fetched does.
    depth
        How many transfers may be under way; they arrive in order.
    """

    local = True
    writes = True
    depth = 1

    def __init__(self, params: Params) -> None:
        self.params = params
        self.under_way: Transfer | None = None

    def apply(self, gradients: Mapping[str, Array], lr_factors: LrFactors = None) -> None:
        """Take the gradient of a mini-batch, computed at `params`: the worker's own step.

        ``lr_factors``: what the learning rate of the step is multiplied by, here or at the server.

        Raises
        ------
        UsageError
            When a gradient does not fit its tensor.
        BadPush
            When a value is not finite, or 1e18 or more; nothing has changed.
        """
        raise NotImplementedError

    def room(self) -> Params | None:
        """Return the strategy's room for the next gradient; None: any is as good as another."""
        return None

    def keep(self) -> None:
        """Copy what was applied, if `transfer` is to find it: the caller changes its arrays."""

    @property
    def due(self) -> bool:
        """True if the next call of `transfer` needs the oldest under way to have arrived."""
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

    @property
    def unpushed(self) -> int:
        """The steps that `rest` would push."""
        return 0

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

    def buffers(self) -> dict[str, Params]:
        """Return the parameters, by name, that later steps depend on."""
        return {"params": self.params}

    def arrays(self) -> dict[str, Array]:
        """Return the arrays themselves, by name, that later steps depend on."""
        return {name: buffer.arena.data for name, buffer in self.buffers().items()}

    def state(self) -> dict[str, Any]:
        """Return everything else that later steps depend on, as plain values, for `restore`."""
        buffers, transfer = self.buffers(), None
        if self.under_way is not None:
            transfer = _transfer_state(self.under_way, buffers)
        versions = {name: buffer.state() for name, buffer in buffers.items()}
        return {"under_way": transfer, "versions": versions}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue from what `state` returned; then `arrays` are those that are to be filled."""
        transfer = state["under_way"]
        if transfer is not None:
            self.under_way = _transfer_of(transfer, self.buffers())
        for name, buffer in self.buffers().items():
            buffer.restore(state["versions"][name])


def _transfer_state(transfer: Transfer, buffers: Mapping[str, Params]) -> list[Any]:
    """Return a transfer that was sent as plain values, for `_transfer_of`."""
    names = {id(buffer): name for name, buffer in buffers.items()}
    at = names.get(id(transfer.at))
    return [
        transfer.arrays is not None,
        Stamp.of(transfer.at).state() if at is None else at,
        None if transfer.into is None else names[id(transfer.into)],
        None if transfer.wanted is None else transfer.wanted.copy(),
        transfer.count,
        transfer.again,
    ]


def _transfer_of(state: Any, buffers: Mapping[str, Params]) -> Transfer:
    """Return a transfer that was sent: its arrays are not needed any more."""
    pushes, at, into, wanted, count, again = state
    layout = buffers["params"].layout
    return Transfer(
        {} if pushes else None,
        buffers[at] if isinstance(at, str) else Stamp.from_state(at, layout),
        None if into is None else buffers[into],
        wanted,
        count,
        again,
    )


class Direct(LocalStrategy):
    """Push each gradient as it is, and wait for the parameters after it."""

    local = False
    writes = False

    def __init__(self, params: Params) -> None:
        super().__init__(params)
        self._gradients: Mapping[str, Array] = {}
        self._lr_factors: LrFactors = None

    def apply(self, gradients: Mapping[str, Array], lr_factors: LrFactors = None) -> None:
        """Keep it; the server does all."""
        self._gradients, self._lr_factors = gradients, lr_factors

    def transfer(self) -> Transfer | None:
        """Push it."""
        factors = self._lr_factors
        self.under_way = Transfer(self._gradients, self.params, self.params, lr_factors=factors)
        return self.under_way

    def refresh(self) -> Transfer:
        """Fetch."""
        self.under_way = Transfer(None, self.params, self.params)
        return self.under_way
