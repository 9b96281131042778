"""Explore locally, tied to the centre by a spring: EASGD, EAMSGD."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from aiops.client.lr_factors import LrFactors, by_tensor
from aiops.client.params import Params
from aiops.client.request_kinds import Receipt
from aiops.client.requests import Transfer
from aiops.client.strategies.base import LocalStrategy
from aiops.client.strategies.flat import LocalModel, note_version, rounded, take_over, wide
from aiops.client.strategies.plan import Plan
from aiops.errors import UsageError
from aiops.model.layout import Array


class Elastic(LocalStrategy):
    """Every ``push_every`` steps push the position x, and move towards the centre θ.

    The server moves first, θ' = θ + d with d = κ(x − θ), and answers with θ'; the same d is
    κ/(1−κ) · (x − θ'), with κ the plan's ``moving_rate`` (Zhang et al. 2015, algorithm 1). With
    ``lookahead`` δ > 0 (algorithm 2) what is trained is x + δv, v the velocity: it is x that is
    pushed, and d that moves both.
    """

    def __init__(self, plan: Mapping[str, Any], params: Params) -> None:
        super().__init__(params)
        read = Plan(plan)
        self._model = LocalModel(params, read.inner())
        self._every = read.whole("push_every", 1)
        self._kappa = read.real("moving_rate", 0, 1)
        self._lookahead = read.real("lookahead", 0, 1, 0.0)
        self._out, self._centre = params.copy(), params.copy()
        self._refreshing = False

    def apply(self, gradients: Mapping[str, Array], lr_factors: LrFactors = None) -> None:
        """Take a local step; with a lookahead all tensors have one factor."""
        if self._lookahead and isinstance(lr_factors, Mapping):
            raise UsageError(
                "eamsgd looks ahead by one learning rate: give one lr_factor for all tensors"
            )
        factors = by_tensor(lr_factors, self.params.layout)
        self._model.step(*self._model.take(gradients), lr_factors=factors)

    def transfer(self) -> Transfer | None:
        """Push the position."""
        if self._model.steps % self._every:
            return None
        for x, out, m in zip(
            self._model.x, self._out.arena.sections, self._model.momentum(), strict=True
        ):
            # v = −α·m, so x = (x + δv) + δ·α·m.
            ahead = x.dtype.type(self._lookahead * self._model.rate)
            out[...] = rounded(x if m is None else x + ahead * m, out.dtype)
        self.under_way = Transfer(self._out, self._centre, self._centre)
        return self.under_way

    def arrived(self, receipt: Receipt | None) -> None:
        """Move towards the centre (after `refresh`: be there)."""
        if self._refreshing:
            take_over(self.params, self._centre)
            self._model.adopt()
        elif receipt is not None:
            # An answer that was lost is given again with a newer centre than the push had made:
            # the plain move then is the nearest that can be had.
            moved = receipt.version == self._centre.version
            pull = self._kappa / (1 - self._kappa) if moved else self._kappa
            for x, pushed, centre in zip(
                self._model.x, wide(self._out), wide(self._centre), strict=True
            ):
                np.subtract(pushed, centre, out=pushed)  # it has travelled: its memory is free
                pushed *= x.dtype.type(pull)
                x -= pushed
            self._model.show()
            note_version(self.params, self._centre)
        self._refreshing = False
        super().arrived(receipt)

    def failed(self) -> None:
        """Stay where it is."""
        self._refreshing = False
        super().failed()

    def refresh(self) -> Transfer:
        """Fetch the centre, and go there."""
        self._refreshing = True
        self.under_way = Transfer(None, self._centre, self._centre)
        return self.under_way

    def offer(self) -> Params:
        """Return the centre as it was when it was last seen."""
        return self._centre

    def buffers(self) -> dict[str, Params]:
        """Return the worker's parameters, the centre, and the position that is under way."""
        found = {**super().buffers(), "centre": self._centre}
        if self.under_way is not None and self.under_way.arrays is not None:
            found["out"] = self._out
        return found

    def arrays(self) -> dict[str, Array]:
        """Return these, and the optimiser's."""
        return {**super().arrays(), **self._model.arrays()}

    def state(self) -> dict[str, Any]:
        """Return the steps, and whether the centre is to be taken over."""
        return {**super().state(), "elastic": [self._refreshing, self._model.state()]}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue from what `state` returned."""
        super().restore(state)
        self._refreshing, model = state["elastic"]
        self._model.restore(model)
