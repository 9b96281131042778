"""Train locally, push how far it came: DiLoCo, FedBuff, asynchronous SGD without gradient delay."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from aiops.client.lr_factors import LrFactors, by_tensor
from aiops.client.params import Params, Stamp
from aiops.client.request_kinds import Receipt
from aiops.client.requests import Transfer
from aiops.client.strategies.base import LocalStrategy
from aiops.client.strategies.flat import LocalModel, difference, note_version, ranges, wide
from aiops.client.strategies.plan import Plan
from aiops.errors import UsageError
from aiops.model.layout import Array, Layout


class Local(LocalStrategy):
    """Push start − end of some local steps, and go on from what the server makes of it.

    With x the local model and a the anchor (what of x the server knows): to hand over,
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

    ``fragments`` P > 1: each push is one of P groups of tensors, in turn; with ``in_step`` the turn
    is the model's version, so that workers at a barrier always push the same. ``mix`` m: of what
    comes, x ← m · x + (1 − m) · (θ + (x − a)).
    """

    def __init__(self, plan: Mapping[str, Any], params: Params) -> None:
        super().__init__(params)
        read, layout = Plan(plan), params.layout
        self._model = LocalModel(params, read.inner())
        self._every, self._limit = read.whole("push_every", 1), read.whole("limit", 0, 0)
        self._overlap = read.word("overlap", ("none", "free", "cycle", "mix"), "none")
        self._mix, self._in_step = read.real("mix", 0, 1, 0.0), read.truth("in_step")
        self._fragments = _fragments(layout, read.whole("fragments", 1, 1))
        self._turn = max(params.version, 0)
        self._anchor = [array.copy() for array in self._model.x]
        self._stamp = Stamp.of(params)  # of the anchor
        self._out, self._fresh = params.like(), params.copy()
        self._since = self._ahead = 0  # steps: since the last push; ahead of the newest model
        self._out_steps = 0  # how many steps the last push was
        self._sent_at = 0  # after how many steps the last was handed over
        self._unpushed = [0] * len(self._fragments)  # steps that have not been pushed
        self._sent: Sequence[int] = ()  # the fragments that are under way
        self._come = False  # a new model is to be merged
        self._refreshing = False

    def apply(self, gradients: Mapping[str, Array], lr_factors: LrFactors = None) -> None:
        """Take a local step."""
        factors = by_tensor(lr_factors, self.params.layout)
        self._model.step(*self._model.take(gradients), lr_factors=factors)
        self._since += 1
        self._ahead += 1
        self._unpushed = [steps + 1 for steps in self._unpushed]

    @property
    def due(self) -> bool:
        """True if a cycle ends that cannot be handed over before the last was answered."""
        return self._overlap != "free" and self._since >= self._every

    def transfer(self) -> Transfer | None:
        """Hand over at the end of a cycle."""
        if self._since < self._every or self.under_way is not None:
            return None
        self._merge()
        return self._hand_over([self._turn % len(self._fragments)], fetch=True)

    @property
    def waits(self) -> bool:
        """True if the worker is as far ahead of the server as it may be."""
        if self.under_way is None or self._overlap in ("cycle", "mix"):
            return False
        return self._overlap == "none" or self._ahead >= self._limit

    def arrived(self, receipt: Receipt | None) -> None:
        """Merge the new model; in cycles that waits for the cycle's end."""
        if self.under_way is not None and self.under_way.into is not None:
            self._come = True
        if self._overlap != "cycle" or self._refreshing or self._since >= self._every:
            self._merge()
        super().arrived(receipt)

    def failed(self) -> None:
        """Take back what was handed over."""
        if self.under_way is not None and self.under_way.arrays is not None:
            for number, part in self._ranges(self._sent):
                self._anchor[number][part] += self._out.arena.sections[number][part]
            self._since += self._out_steps
            for fragment in self._sent:
                self._unpushed[fragment] += self._out_steps
        self._refreshing = False
        super().failed()

    @property
    def unpushed(self) -> int:
        """The local steps that no push has had; of fragments, that with the most counts."""
        return max(self._unpushed)

    def rest(self) -> Transfer | None:
        """Push all steps that have not been pushed."""
        self._merge()
        left = [fragment for fragment, steps in enumerate(self._unpushed) if steps]
        return self._hand_over(left, fetch=False) if left else None

    def refresh(self) -> Transfer:
        """Fetch the newest model; local steps that it does not have stay on top of it."""
        self._merge()
        self._refreshing = True
        self.under_way = Transfer(None, self._fresh, self._fresh)
        return self.under_way

    def offered(self) -> None:
        """Start again from the parameters that were offered: they have all local steps."""
        for anchor, x in zip(self._anchor, self._model.x, strict=True):
            anchor[...] = x
        self._since = self._ahead = 0
        self._unpushed = [0] * len(self._fragments)

    # ------------------------------------------------------------ state

    def buffers(self) -> dict[str, Params]:
        """Return the worker's parameters, those fetched last, and what is to be taken back."""
        found = {**super().buffers(), "fresh": self._fresh}
        if self.under_way is not None and self.under_way.arrays is not None:
            found["out"] = self._out
        return found

    def arrays(self) -> dict[str, Array]:
        """Return these, the anchor and the optimiser's."""
        anchor = {f"anchor/{number}": array for number, array in enumerate(self._anchor)}
        return {**super().arrays(), **anchor, **self._model.arrays()}

    def state(self) -> dict[str, Any]:
        """Return the stamp, and where in its cycle it is."""
        steps = self._turn, self._since, self._ahead, self._out_steps, self._sent_at
        fragments = list(self._unpushed), list(self._sent)
        merging = self._come, self._refreshing
        found = [*steps, *fragments, *merging, self._stamp.state(), self._model.state()]
        return {**super().state(), "local": found}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue from what `state` returned."""
        super().restore(state)
        *steps, self._unpushed, self._sent, self._come, self._refreshing, stamp, model = state[
            "local"
        ]
        self._turn, self._since, self._ahead, self._out_steps, self._sent_at = steps
        self._stamp = Stamp.from_state(stamp, self.params.layout)
        self._model.restore(model)

    # ------------------------------------------------------------ inside

    def _ranges(self, fragments: Sequence[int]) -> list[tuple[int, slice]]:
        """Return where some fragments lie."""
        tensors = sorted(tensor for number in fragments for tensor in self._fragments[number])
        return ranges(self.params.layout, tensors)

    def _hand_over(self, fragments: Sequence[int], *, fetch: bool) -> Transfer:
        for number, part in self._ranges(fragments):
            anchor, out = self._anchor[number][part], self._out.arena.sections[number][part]
            difference(anchor, self._model.x[number][part], out)
            anchor -= out
        tensors = self.params.layout.tensors
        names = [tensors[tensor].name for number in fragments for tensor in self._fragments[number]]
        whole = len(names) == len(tensors)
        arrays = self._out if whole else {name: self._out[name] for name in names}
        self._out_steps, self._since = self._since, 0
        self._sent_at, self._sent = self._model.steps, fragments
        for fragment in fragments:
            self._unpushed[fragment] = 0
        self.under_way = Transfer(arrays, self._stamp.copy(), self._fresh if fetch else None)
        return self.under_way

    def _merge(self) -> None:
        """Put the worker's own steps on top of the new model, if one has come."""
        if not self._come:
            return
        fragments = range(len(self._fragments)) if self._refreshing else self._sent
        fresh, mix = wide(self._fresh), 0.0 if self._refreshing else self._mix
        for number, part in self._ranges(fragments):
            x, anchor = self._model.x[number][part], self._anchor[number][part]
            theta = fresh[number][part]
            target = np.subtract(x, anchor, out=anchor)
            np.add(theta, target, out=target)
            if mix:  # x + (1 − mix) · (target − x)
                target -= x
                target *= 1 - mix
                x += target
            else:
                x[...] = target
            anchor[...] = theta
        self._model.show()
        note_version(self.params, self._fresh)
        tensors = [tensor for number in fragments for tensor in self._fragments[number]]
        self._stamp = self._stamp.renewed(self._fresh, tensors)
        if not self._refreshing:
            self._turn = self._fresh.version if self._in_step else self._turn + 1
            self._ahead = self._model.steps - self._sent_at
        self._come = self._refreshing = False


def _fragments(layout: Layout, count: int) -> list[Sequence[int]]:
    """Return the tensors of each fragment: strided, so that each has early and late layers."""
    tensors = [number for number, tensor in enumerate(layout.tensors) if tensor.size]
    if count > 1 and count > len(tensors):
        raise UsageError(
            f"the server wants the model in {count} fragments, but it has only {len(tensors)}"
            " tensors: start it with fewer (--set fragments=...)"
        )
    return (
        [tensors[first::count] for first in range(count)]
        if count > 1
        else [range(len(layout.tensors))]
    )
