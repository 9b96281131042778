"""Step locally, push what accrued, fetch now and then: Downpour SGD, SSP with local steps."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from aiops.client.lr_factors import LrFactors, by_tensor
from aiops.client.params import Params, Stamp
from aiops.client.request_kinds import Receipt
from aiops.client.requests import Transfer
from aiops.client.strategies.base import LocalStrategy
from aiops.client.strategies.flat import (
    LocalModel,
    note_version,
    ranges,
    rounded,
    take_over,
    wide,
    zeros,
)
from aiops.client.strategies.plan import Plan
from aiops.model.layout import Array


class Accumulate(LocalStrategy):
    """Apply gradients locally, and push their sum (Dean et al. 2012, algorithm 7.1).

    The plan: push every ``push_every`` steps, fetch every ``fetch_every``; ``inner`` is the local
    optimiser. A push is in the background, and is waited for when the next is due; a fetch is
    waited for. A push is stamped with the oldest version among its gradients, and has the factors
    of the learning rate that its newest gradient had. What rounding to 16 bits takes from a sum
    stays in it, for the next push.

    With ``overlap`` a fetch is waited for only when the next transfer is due; the local steps taken
    meanwhile stay on top of what comes.
    """

    def __init__(self, plan: Mapping[str, Any], params: Params, *, overlap: bool = False) -> None:
        super().__init__(params)
        read = Plan(plan)
        self._model = LocalModel(params, read.inner())
        self._push_every = read.whole("push_every", 1)
        self._fetch_every = read.whole("fetch_every", 1)
        self._sum = zeros(params.layout)
        self._out, self._fresh = params.like(), params.copy()
        self._stamp = Stamp.of(params)
        self._held: set[int] = set()  # the tensors that the sum has
        self._sent: set[int] = set()
        self._fetched_at = 0  # steps when parameters were last fetched
        self._asked_at = 0  # steps when the fetch under way was asked for
        # With overlap: the parameters at that time.
        self._anchor = [array.copy() for array in self._model.x] if overlap else None
        self._lr_factors: LrFactors = None
        self._restarted = False  # the server was restarted: older versions mean nothing

    def apply(self, gradients: Mapping[str, Array], lr_factors: LrFactors = None) -> None:
        """Add it to the sum, and take a local step at the server's learning rate."""
        self._lr_factors = lr_factors
        gradient, tensors = self._model.take(gradients)
        if not self._held:
            self._stamp = Stamp.of(self.params)
        for number, part in ranges(self.params.layout, tensors):
            self._sum[number][part] += gradient.arena.sections[number][part]
        self._held.update(tensors.tolist())
        # The server's schedule counts its updates, and each push is one.
        pushes = (self._model.steps - self._fetched_at) // self._push_every
        update = max(self.params.version, 0) + pushes
        self._model.step(gradient, tensors, update, by_tensor(lr_factors, self.params.layout))

    @property
    def due(self) -> bool:
        """True if this step pushes or fetches."""
        steps = self._model.steps
        return steps % self._push_every == 0 or steps % self._fetch_every == 0

    def transfer(self) -> Transfer | None:
        """Push every so often, fetch every so often."""
        if not self.due:
            return None
        fetch = self._model.steps % self._fetch_every == 0
        arrays = self._take_sum() if self._model.steps % self._push_every == 0 else None
        if arrays is None and not fetch:
            return None
        if fetch:
            self._ask()
        into = self._fresh if fetch else None
        self.under_way = Transfer(arrays, self._stamp, into, lr_factors=self._lr_factors)
        return self.under_way

    def _ask(self) -> None:
        """Note where the model is as parameters are asked for."""
        self._asked_at = self._model.steps
        if self._anchor is not None:
            for anchor, x in zip(self._anchor, self._model.x, strict=True):
                anchor[...] = x

    @property
    def waits(self) -> bool:
        """A fetch is waited for (with overlap, not at once), a push is not."""
        fetches = self.under_way is not None and self.under_way.into is not None
        return fetches and self._anchor is None

    def arrived(self, receipt: Receipt | None) -> None:
        """Go on with the fetched parameters, and the steps taken since they were asked for."""
        if self.under_way is not None and self.under_way.into is not None:
            if self._anchor is None or self._asked_at == self._model.steps:
                take_over(self.params, self._fresh)
                self._model.adopt()
            else:
                for x, anchor, theta in zip(
                    self._model.x, self._anchor, wide(self._fresh), strict=True
                ):
                    x -= anchor
                    x += theta
                self._model.show()
                note_version(self.params, self._fresh)
            self._fetched_at = self._asked_at
            if self._restarted:
                self._stamp, self._restarted = Stamp.of(self._fresh), False
        super().arrived(receipt)

    def failed(self) -> None:
        """Put back into the sum what was to be pushed."""
        transfer = self.under_way
        if transfer is not None and transfer.arrays is not None:
            for total, part in zip(self._sum, self._out.arena.sections, strict=True):
                total += part
            self._stamp = self._stamp.older(transfer.at) if self._held else Stamp.of(transfer.at)
            self._held |= self._sent
        super().failed()

    @property
    def unpushed(self) -> int:
        """The steps since a push was last due, if the sum has any."""
        return (self._model.steps % self._push_every or self._push_every) if self._held else 0

    def rest(self) -> Transfer | None:
        """Push what has accrued since the last push."""
        arrays = self._take_sum()
        if arrays is not None:
            self.under_way = Transfer(arrays, self._stamp, None, lr_factors=self._lr_factors)
        return self.under_way

    def refresh(self) -> Transfer:
        """Fetch; steps that have not been pushed travel with the next push."""
        self._ask()
        self.under_way = Transfer(None, self._stamp, self._fresh)
        return self.under_way

    def restarted(self) -> None:
        """Stamp what has accrued with the versions that are fetched next."""
        self._restarted = True

    def offered(self) -> None:
        """Forget the sum: the parameters that were offered have it."""
        for total in self._sum:
            total[...] = 0
        self._held = set()

    def buffers(self) -> dict[str, Params]:
        """Return the worker's parameters, those fetched last, and what is to be put back."""
        found = {**super().buffers(), "fresh": self._fresh}
        if self.under_way is not None and self.under_way.arrays is not None:
            found["out"] = self._out
        return found

    def arrays(self) -> dict[str, Array]:
        """Return these, the sum and the optimiser's."""
        sums = {f"sum/{number}": total for number, total in enumerate(self._sum)}
        return {**super().arrays(), **sums, **self._model.arrays()}

    def state(self) -> dict[str, Any]:
        """Return the stamp, the tensors in the sum, and the steps."""
        tensors = sorted(self._held), sorted(self._sent)
        fetched = self._fetched_at, self._restarted
        found = [self._stamp.state(), *tensors, *fetched, self._model.state()]
        return {**super().state(), "accumulate": found}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue from what `state` returned."""
        super().restore(state)
        stamp, held, sent, self._fetched_at, self._restarted, model = state["accumulate"]
        self._stamp = Stamp.from_state(stamp, self.params.layout)
        self._held, self._sent = set(held), set(sent)
        self._model.restore(model)
        self._asked_at = self._model.steps  # one that is kept computes nothing during a fetch

    def _take_sum(self) -> Mapping[str, Array] | None:
        """Move the sum into the buffer that travels."""
        if not self._held:
            return None
        for total, part in zip(self._sum, self._out.arena.sections, strict=True):
            part[...] = rounded(total, part.dtype)
            total -= part
        self._sent, self._held = self._held, set()
        if len(self._sent) == len(self.params.layout.tensors):
            return self._out
        names = [self.params.layout.tensors[tensor].name for tensor in sorted(self._sent)]
        return {name: self._out[name] for name in names}
