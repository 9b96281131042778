"""Explore locally, tied to the centre by a spring: EASGD, EAMSGD."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from aiops.client.params import Params
from aiops.client.routines.accumulate import note_version, take_over
from aiops.client.routines.base import Routine, Transfer
from aiops.client.routines.flat import Model, wide
from aiops.layout import Array


class Elastic(Routine):
    """Every ``push_every`` steps push the position x, and move towards the centre θ.

    The server moves first, θ' = θ + d with d = κ(x − θ), and answers with θ'; the same d is
    κ/(1−κ) · (x − θ'), with κ the plan's ``moving_rate`` (Zhang et al. 2015, algorithm 1).
    """

    def __init__(self, plan: Mapping[str, Any], params: Params) -> None:
        super().__init__(params)
        self._model = Model(params, plan["inner"])
        self._every, rate = int(plan["push_every"]), float(plan["moving_rate"])
        self._pull = rate / (1 - rate)
        self._out, self._centre = params.copy(), params.copy()
        self._refreshing = False

    def apply(self, gradients: Mapping[str, Array]) -> None:
        """Take a local step."""
        self._model.step(*self._model.take(gradients))

    def transfer(self) -> Transfer | None:
        """Push the position."""
        if self._model.steps % self._every:
            return None
        self._out.arena.data[:] = self.params.arena.data
        self.under_way = Transfer(self._out, self._centre, self._centre)
        return self.under_way

    def arrived(self) -> None:
        """Move towards the centre (after `refresh`: be there)."""
        if self._refreshing:
            take_over(self.params, self._centre)
            self._model.adopt()
        else:
            for x, pushed, centre in zip(
                self._model.x, wide(self._out), wide(self._centre), strict=True
            ):
                x -= x.dtype.type(self._pull) * np.subtract(pushed, centre)
            self._model.show()
            note_version(self.params, self._centre)
        self._refreshing = False
        super().arrived()

    def failed(self) -> None:
        """Stay where it is."""
        self._refreshing = False
        super().failed()

    def refresh(self) -> Transfer:
        """Fetch the centre, and go there."""
        self._refreshing = True
        self.under_way = Transfer(None, self._centre, self._centre)
        return self.under_way
