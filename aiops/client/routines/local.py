"""Train locally, push how far it came: DiLoCo, FedBuff, asynchronous SGD without gradient delay."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from aiops.client.params import Params, Stamp
from aiops.client.routines.accumulate import note_version
from aiops.client.routines.base import Routine, Transfer
from aiops.client.routines.flat import Model, ranges, wide
from aiops.errors import UsageError
from aiops.layout import Array


class Local(Routine):
    """Push start − end of some local steps, and go on from what the server makes of it.

    With x the local model and a the anchor (what of x is not news to the server): to hand over,
    push a − x and let a ← a − (a − x); when a new model θ comes, x ← θ + (x − a), a ← θ. So the
    steps taken while a push is on its way are kept, and nothing is counted twice (the listing of
    algorithm 1 of *ASGD without gradient delay* forgets the reset of a that its prose intends).
    What rounding does to a − x stays in x − a, for the next push.

    The plan: ``push_every`` local steps are one cycle, ``inner`` is their optimiser. ``overlap``:

    * ``none`` (default): wait for the answer to each push (DiLoCo, FedBuff).
    * ``free``: hand over after a cycle if nothing is under way; wait only when ``limit`` steps
      have been taken since the last hand-over that the newest model has in it (algorithm 1).
    * ``cycle``: at the end of each cycle wait for the answer to the last, merge it, and hand over
      (algorithm 2).
    * ``mix``: hand over at the end of each cycle, merge when the answer comes (streaming DiLoCo).

    ``fragments`` P > 1: each push is one of P groups of tensors, in turn. ``mix`` m: of what comes,
    x ← m · x + (1 − m) · (θ + (x − a)).
    """

    def __init__(self, plan: Mapping[str, Any], params: Params) -> None:
        super().__init__(params)
        layout = params.layout
        self._model = Model(params, plan["inner"])
        self._every = int(plan["push_every"])
        self._overlap, self._limit = plan.get("overlap", "none"), int(plan.get("limit", 0))
        if self._overlap not in ("none", "free", "cycle", "mix"):
            text = f"the server wants overlap {self._overlap!r}, which this client does not know"
            raise UsageError(f"{text}: upgrade aiops here")
        count, self._mix = int(plan.get("fragments", 1)), float(plan.get("mix", 0.0))
        if count > len(layout.tensors):
            raise UsageError(
                f"the server wants the model in {count} fragments, but it has only"
                f" {len(layout.tensors)} tensors: start it with fewer (--set fragments=...)"
            )
        # Strided, as in streaming DiLoCo: each fragment has early and late layers.
        tensors = range(len(layout.tensors))
        self._fragments = [tensors[first::count] for first in range(count)]
        self._ranges = [ranges(layout, fragment) for fragment in self._fragments]
        # Workers that go in step push the same fragment: they count from the version they join at.
        self._turn = params.version
        self._anchor = [array.copy() for array in self._model.x]
        self._out, self._fresh = params.like(), params.copy()
        self._since = self._ahead = 0  # steps: since the last push; ahead of the newest model
        self._out_steps = 0  # how many steps the last push was
        self._handed = 0  # after how many steps the last was handed over
        self._come = False  # a new model is to be merged
        self._refreshing = False

    def apply(self, gradients: Mapping[str, Array]) -> None:
        """Take a local step."""
        self._model.step(*self._model.take(gradients))
        self._since += 1
        self._ahead += 1

    @property
    def due(self) -> bool:
        """Whether a cycle ends that cannot be handed over before the last has been answered."""
        return self._overlap != "free" and self._since >= self._every

    def transfer(self) -> Transfer | None:
        """Hand over at the end of a cycle."""
        if self._since < self._every or (self.under_way is not None and not self._come):
            return None
        self._merge()
        return self._hand_over(fetch=True)

    @property
    def waits(self) -> bool:
        """Whether the worker is as far ahead as it may be."""
        if self.under_way is None or self._overlap in ("cycle", "mix"):
            return False
        return self._overlap == "none" or self._ahead >= self._limit

    def arrived(self) -> None:
        """Merge the new model; in cycles that waits for the cycle's end."""
        assert self.under_way is not None
        if self.under_way.into is not None:
            self._come = True
        if self._overlap != "cycle" or self._refreshing or self._since >= self._every:
            self._merge()
        super().arrived()

    def failed(self) -> None:
        """Take back what was handed over."""
        if self.under_way is not None and self.under_way.arrays is not None:
            for number, part in self._pushed():
                self._anchor[number][part] += self._out.arena.sections[number][part]
            self._since += self._out_steps
        self._refreshing = False
        super().failed()

    def rest(self) -> Transfer | None:
        """Hand over an unfinished cycle."""
        self._merge()
        return self._hand_over(fetch=False) if self._since else None

    def refresh(self) -> Transfer:
        """Fetch the newest model; local steps that it does not have stay on top of it."""
        self._refreshing = True
        self.under_way = Transfer(None, self._fresh, self._fresh)
        return self.under_way

    # ------------------------------------------------------------ inside

    def _pushed(self) -> list[tuple[int, slice]]:
        """Return where the fragment lies that is pushed, or was last."""
        return self._ranges[self._turn % len(self._ranges)]

    def _hand_over(self, *, fetch: bool) -> Transfer:
        for number, part in self._pushed():
            anchor, out = self._anchor[number][part], self._out.arena.sections[number][part]
            with np.errstate(over="ignore"):
                out[...] = anchor - self._model.x[number][part]
            anchor -= out
        fragment = self._fragments[self._turn % len(self._fragments)]
        names = [self.params.layout.tensors[tensor].name for tensor in fragment]
        whole = len(self._fragments) == 1
        arrays = self._out if whole else {name: self._out[name] for name in names}
        self._out_steps, self._since = self._since, 0
        self._handed = self._model.steps
        self.under_way = Transfer(arrays, Stamp.of(self._fresh), self._fresh if fetch else None)
        return self.under_way

    def _merge(self) -> None:
        """Put the worker's own news on top of the new model, if one has come."""
        if not self._come:
            return
        everything = [(number, slice(None)) for number in range(len(self._anchor))]
        fresh, mix = wide(self._fresh), 0.0 if self._refreshing else self._mix
        for number, part in everything if self._refreshing else self._pushed():
            x, anchor = self._model.x[number][part], self._anchor[number][part]
            theta = fresh[number][part]
            news = theta + (x - anchor)
            x[...] = news if not mix else x + (1 - mix) * (news - x)
            anchor[...] = theta
        self._model.show()
        note_version(self.params, self._fresh)
        if not self._refreshing:
            self._turn += 1
            self._ahead = self._model.steps - self._handed
        self._come = self._refreshing = False
