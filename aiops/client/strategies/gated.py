"""Push and fetch when a gate lets pass: B-FASGD and its kin (`aiops.bandwidth.gates`)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from aiops.bandwidth.gates import Gate
from aiops.client.encode_push import gather
from aiops.client.lr_factors import LrFactors, by_tensor
from aiops.client.params import Params, Stamp, Stamped
from aiops.client.request_kinds import Receipt
from aiops.client.requests import Transfer
from aiops.client.strategies.base import LocalStrategy
from aiops.client.strategies.flat import (
    Intake,
    LocalModel,
    note_version,
    ranges,
    rounded,
    take_over,
    zeros,
)
from aiops.client.strategies.plan import Plan
from aiops.errors import UsageError
from aiops.model.layout import Array, Ints

_ROUNDING = 1e-9
"""Of sums of shares, such as twenty times 0.05."""


class Gated(LocalStrategy):
    """One decision per direction after each mini-batch, for the model or for each tensor.

    What is not fetched keeps its true version, so that the staleness of its next gradient is
    counted right. What is not pushed is accumulated, with the count and a stamp; or the server
    applies the last gradient again; or it is dropped (`aiops.bandwidth.gates.Gate.skipped`).

    With ``local`` the gradients are steps of the worker's own model too, until it fetches: then
    what is fetched is received beside it, and takes its place.

    With ``overlap`` the next gradients are computed while a transfer is under way, until a gate is
    open again; a gradient that travels alone is copied, and parameters are received beside those
    in use. Of a local model the steps taken meanwhile are lost here, not in what is pushed.

    The plan: ``gate``, its settings; ``worker``, this worker's number, with which the gate's seed
    makes its random stream.
    """

    local: bool
    writes: bool

    def __init__(self, plan: Mapping[str, Any], params: Params, *, overlap: bool = False) -> None:
        super().__init__(params)
        self._overlap = overlap
        announced = plan.get("gate")
        if not isinstance(announced, Mapping):
            raise UsageError("the server's plan announces a gate, and does not say which")
        self._gate = Gate.from_plan(announced)
        number = Plan(plan).whole("worker", 0, 0)
        self._random = np.random.Generator(np.random.PCG64([self._gate.seed, number]))
        tensors = len(params.layout.tensors)
        self._each = tensors if self._gate.by == "tensor" else 1
        self._steps = 0
        self._statistic: Array | None = None
        self._level: Array | None = None  # its running mean, if the gate goes by that
        self._constants: tuple[float, ...] = ()
        self._passed = np.zeros((2, self._each), np.int64)  # opportunities passed over, in a row
        self._owed = np.full(self._each, self._most_ahead)  # pushes due to the least share, less 1
        self._gradients: Mapping[str, Array] = {}
        self._lr_factors: LrFactors = None  # of the newest gradient
        self._last: list[str] = []  # the tensors of the gradient that the server has
        self._kept = _Sum(params, self._gate) if self._gate.skipped == "accumulate" else None
        self._fresh = params  # where parameters are received
        self._model: LocalModel | None = None
        if self._gate.local:
            inner = {"optimizer": "sgd", "lr": self._gate.local}
            self._model = LocalModel(params, Plan({"inner": inner}).inner())
        if self._gate.local or overlap:
            self._fresh = params.copy()
        self._out = params.like() if overlap and self._kept is None else None
        self._at: Stamped = params  # what the last gradient was computed at
        self._opened = np.zeros((2, self._each), bool)  # for the last gradient
        self._take = Intake(params).take if self._model is None else self._model.take
        self._sent_once = False  # the server has a gradient that it can apply again
        self.local, self.writes = self._kept is not None, self._fresh is not params

    def apply(self, gradients: Mapping[str, Array], lr_factors: LrFactors = None) -> None:
        """Add it to what is to be pushed, and throw the coins."""
        self._lr_factors = lr_factors
        self._add(gradients)
        self._steps += 1
        self._at = self.params
        self._draw()

    def _add(self, gradients: Mapping[str, Array]) -> None:
        if self._kept is None and self._model is None:
            self._gradients = gradients
            return
        gradient, tensors = self._take(gradients)
        if self._kept is not None:
            self._kept.add(gradient, tensors, self.params)
        else:
            names = [self.params.layout.tensors[tensor].name for tensor in tensors.tolist()]
            self._gradients = {name: gradient[name] for name in names}
        if self._model is not None:
            factors = by_tensor(self._lr_factors, self.params.layout)
            self._model.step(gradient, tensors, lr_factors=factors)

    def _draw(self) -> None:
        """Decide what passes after this gradient."""
        gate = self._gate
        chances = gate.chances(self._steps, self._statistic, self._constants, self._level)
        drawn = self._random.random((2, self._each))
        opened = np.empty((2, self._each), bool)
        for direction, chance in enumerate(chances):
            opened[direction] = drawn[direction] < chance
        opened |= self._passed >= gate.longest
        self._keep_share(opened[0])
        self._passed[opened] = 0
        self._passed[~opened] += 1
        self._opened = opened

    @property
    def due(self) -> bool:
        """True if anything passes now."""
        return self._overlap and bool(self._opened.any() or self._gate.skipped == "reapply")

    @property
    def waits(self) -> bool:
        """True if the transfer under way is waited for."""
        return not self._overlap and super().waits

    def transfer(self) -> Transfer | None:
        """Push what the gate lets pass, and fetch what it lets pass."""
        if self.under_way is not None:  # with overlap: nothing passes
            return None
        push, fetch = self._tensors(self._opened[0]), self._tensors(self._opened[1])
        into = self._fresh if len(fetch) else None
        wanted = None if len(fetch) == len(self.params.layout.tensors) else fetch
        self.under_way = self._made(push, into, wanted)
        return self.under_way

    @property
    def _most_ahead(self) -> float:
        """Pushes that may be made ahead of the least share: those due after the longest run."""
        return min(-self._gate.share * self._gate.longest, -1.0)

    def _keep_share(self, opened: Array) -> None:
        """Open the gate for pushes where the least share is due (`Gate.share`)."""
        if not self._gate.share:
            return
        self._owed += self._gate.share
        opened |= self._owed > -_ROUNDING
        self._owed = np.maximum(self._owed - opened, self._most_ahead)

    def _tensors(self, opened: Array) -> Ints:
        everything = self.params.layout.all
        if self._gate.by == "tensor":  # tensors without elements go with all others, or not at all
            elements = self.params.layout.sizes > 0
            return everything if opened[elements].all() else np.flatnonzero(opened & elements)
        return everything if opened[0] else everything[:0]

    def _made(self, push: Ints, into: Params | None, wanted: Ints | None) -> Transfer | None:
        """Return the transfer of some tensors, if there is anything to be moved."""
        if self._kept is not None:
            out = self._kept.take(push)
            if out is not None:
                arrays, stamp, count = out
                return Transfer(arrays, stamp, into, wanted, count, lr_factors=self._lr_factors)
        elif len(push) or (self._gate.skipped == "reapply" and not self._sent_once):
            names = {self.params.layout.tensors[tensor].name for tensor in push.tolist()}
            arrays = {name: g for name, g in self._gradients.items() if name in names or not names}
            if arrays:
                given = self._copied(arrays), Stamp.of(self._at), into, wanted
                return Transfer(*given, lr_factors=self._lr_factors)
        elif self._gate.skipped == "reapply":
            at, factors = Stamp.of(self._at), self._of_last()
            return Transfer(None, at, into, wanted, again=True, lr_factors=factors)
        return None if into is None else Transfer(None, self._fresh, into, wanted)

    def _of_last(self) -> LrFactors:
        """Return the factors of the tensors that were pushed last, which are applied again."""
        factors = self._lr_factors
        if not isinstance(factors, Mapping):
            return factors
        return {name: factors.get(name, 1.0) for name in self._last}

    def _copied(self, arrays: Mapping[str, Array]) -> Mapping[str, Array]:
        """Return these, or with overlap a copy: the caller changes its own while it travels."""
        out = self._out
        if out is None:
            return arrays
        tensors = gather(out.layout, arrays, out)
        names = [out.layout.tensors[tensor].name for tensor in tensors.tolist()]
        return out if len(names) == len(out.layout.tensors) else {name: out[name] for name in names}

    def arrived(self, receipt: Receipt | None) -> None:
        """Learn the statistic; what was pushed is done with."""
        transfer = self.under_way
        if transfer is None:
            return
        statistics = transfer.request.statistics if transfer.request is not None else None
        if statistics is not None:
            self._constants = statistics.gate
            if statistics.vbar is not None:
                by_tensor = self._gate.by == "tensor" and len(statistics.vbars)
                self._statistic = statistics.vbars if by_tensor else np.array([statistics.vbar])
                self._level = self._gate.followed(self._level, self._statistic)
        if receipt is not None:
            self._sent_once = receipt.used
            if receipt.used and transfer.arrays is not None:
                self._last = [*transfer.arrays]
        if transfer.into is not None and self._fresh is not self.params:
            if self._at is self.params:
                self._at = Stamp.of(self.params)
            self._take_over(transfer.wanted)
            if self._model is not None:
                self._model.adopt()
        if self._kept is not None:
            self._kept.settled(transfer.into if transfer.arrays is None else None)
        super().arrived(receipt)

    def _take_over(self, wanted: Ints | None) -> None:
        """Go on with what was fetched."""
        fresh, params = self._fresh, self.params
        if wanted is None:
            take_over(params, fresh)
        else:
            for tensor in wanted.tolist():
                name = params.layout.tensors[tensor].name
                params[name][...] = fresh[name]
            note_version(params, fresh)

    def failed(self) -> None:
        """Put back what was to be pushed."""
        if self._kept is not None and self.under_way is not None:
            self._kept.put_back()
        super().failed()

    @property
    def unpushed(self) -> int:
        """The gradients in the sum; the tensor with the most counts."""
        return 0 if self._kept is None else self._kept.most

    def rest(self) -> Transfer | None:
        """Push what has been accumulated since the last push."""
        if self._kept is not None:
            self.under_way = self._made(self.params.layout.all, None, None)
        return self.under_way

    def refresh(self) -> Transfer:
        """Fetch; what has been accumulated stays for the next push."""
        self.under_way = Transfer(None, self._fresh, self._fresh)
        return self.under_way

    def restarted(self) -> None:
        """Stamp what has been accumulated with the versions that are fetched next."""
        self._sent_once = False
        if self._kept is not None:
            self._kept.restarted = True

    def buffers(self) -> dict[str, Params]:
        """Return the parameters, those fetched last, and what is to be put back."""
        found = super().buffers()
        if self._fresh is not self.params:
            found["fresh"] = self._fresh
        return found if self._kept is None else found | self._kept.buffers()

    def arrays(self) -> dict[str, Array]:
        """Return these, the sum and the optimiser's."""
        found = super().arrays()
        if self._kept is not None:
            found |= self._kept.arrays()
        return found if self._model is None else found | self._model.arrays()

    def state(self) -> dict[str, Any]:
        """Return the random stream, what the gate was told, and the numbers of the sum."""
        statistic = None if self._statistic is None else self._statistic.copy()
        gate = [self._steps, statistic, list(self._constants), self._passed.copy()]
        level = None if self._level is None else self._level.copy()
        found = {
            "bounds": [level, self._owed.copy()],
            "gate": [*gate, self._sent_once, self._random.bit_generator.state],
            "sum": None if self._kept is None else self._kept.state(),
            "model": None if self._model is None else self._model.state(),
        }
        return {**super().state(), **found}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue from what `state` returned."""
        if self._kept is not None:  # first, as what is to be put back follows from it
            self._kept.restore(state["sum"])
        super().restore(state)
        self._steps, self._statistic, constants, passed, self._sent_once, random = state["gate"]
        self._constants, self._passed[:] = tuple(constants), passed
        self._level, self._owed[:] = state["bounds"]
        self._random.bit_generator.state = random
        if self._model is not None:
            self._model.restore(state["model"])


class _Sum:
    """Gradients that have not been pushed: their sum, count and stamp, for each tensor.

    Sums are in the compute dtype: what rounding to 16 bits takes from one stays in it.
    """

    def __init__(self, params: Params, gate: Gate) -> None:
        self._layout, self._gate = params.layout, gate
        tensors = len(params.layout.tensors)
        self._sum = zeros(params.layout)
        self._count = np.zeros(tensors, np.int64)
        self._versions = np.zeros(tensors, np.int64)  # their minimum, sum or last
        self._connection, self._newest = params.connection, params.newest
        self._out = params.like()
        self._sent: tuple[Ints, Ints, Ints] | None = None  # tensors, counts, versions
        self.restarted = False  # the server was restarted: older versions mean nothing

    def add(self, gradient: Params, tensors: Ints, params: Params) -> None:
        """Add a gradient that was computed at these parameters."""
        for number, part in ranges(self._layout, tensors):
            self._sum[number][part] += gradient.arena.sections[number][part]
        now = params.versions[tensors]
        if self._gate.stamp == "mean":
            self._versions[tensors] = np.where(self._count[tensors], self._versions[tensors], 0)
            self._versions[tensors] += now
        elif self._gate.stamp == "newest":
            self._versions[tensors] = now
        else:
            known = np.where(self._count[tensors], self._versions[tensors], now)
            self._versions[tensors] = np.minimum(known, now)
        held = self._count.any()
        self._connection = min(self._connection, params.connection) if held else params.connection
        self._newest = max(self._newest, params.newest) if held else params.newest
        self._count[tensors] += 1

    def take(self, tensors: Ints) -> tuple[Mapping[str, Array], Stamp, int] | None:
        """Move what some tensors have accumulated into the buffer that travels.

        Returns the arrays, their stamp, and of how many mini-batches they are; None if there is
        nothing.
        """
        tensors = tensors[self._count[tensors] > 0]
        if not len(tensors):
            return None
        counts, versions = self._count[tensors], self._versions[tensors]
        stamp = Stamp(self._layout, self._versions.copy(), self._newest, self._connection)
        if self._gate.stamp == "mean":
            stamp.versions[tensors] //= counts
        for tensor, count in zip(tensors.tolist(), counts.tolist(), strict=True):
            divide = count if self._gate.combine == "mean" else 1
            for number, part in ranges(self._layout, [tensor]):
                total, out = self._sum[number], self._out.arena.sections[number]
                if out.dtype == total.dtype:
                    np.divide(total[part], divide, out=out[part])
                    total[part] = 0
                else:
                    out[part] = rounded(total[part] / divide, out.dtype)
                    total[part] -= out[part].astype(total.dtype) * divide
        self._sent = tensors, counts, versions
        self._count[tensors] = 0
        if len(tensors) == len(self._layout.tensors):
            return self._out, stamp, int(counts.max())
        names = [self._layout.tensors[tensor].name for tensor in tensors.tolist()]
        return {name: self._out[name] for name in names}, stamp, int(counts.max())

    def settled(self, fetched: Params | None) -> None:
        """Note that what was taken has arrived, or that parameters have been fetched."""
        if self.restarted and fetched is not None:
            self._restamp(fetched)
        if fetched is None:
            self._sent = None

    def put_back(self) -> None:
        """Add again what was taken, which was refused."""
        if self._sent is None:
            return
        tensors, counts, versions = self._sent
        self._sent = None
        for tensor, count in zip(tensors.tolist(), counts.tolist(), strict=True):
            times = count if self._gate.combine == "mean" else 1
            for number, part in ranges(self._layout, [tensor]):
                out = self._out.arena.sections[number][part]
                self._sum[number][part] += out.astype(self._sum[number].dtype) * times
        empty = self._count[tensors] == 0
        both = self._versions[tensors]
        if self._gate.stamp == "mean":
            merged = np.where(empty, versions, both + versions)
        elif self._gate.stamp == "newest":
            merged = np.where(empty, versions, both)
        else:
            merged = np.where(empty, versions, np.minimum(both, versions))
        self._versions[tensors] = merged
        self._count[tensors] += counts

    @property
    def most(self) -> int:
        """The most gradients that the sum has of a tensor."""
        return int(self._count.max())

    def buffers(self) -> dict[str, Params]:
        """Return what is to be put back, if it is refused."""
        return {} if self._sent is None else {"out": self._out}

    def arrays(self) -> dict[str, Array]:
        """Return the sum."""
        return {f"sum/{number}": total for number, total in enumerate(self._sum)}

    def state(self) -> list[Any]:
        """Return counts, versions, and those of what is to be put back, for `restore`."""
        sent = None if self._sent is None else [array.copy() for array in self._sent]
        numbers = self._count.copy(), self._versions.copy()
        return [*numbers, self._newest, list(self._connection), sent, self.restarted]

    def restore(self, state: Sequence[Any]) -> None:
        """Continue from what `state` returned."""
        self._count[:], self._versions[:], self._newest, connection, sent, self.restarted = state
        client, epoch = connection
        self._connection = client, epoch
        self._sent = None
        if sent is not None:
            tensors, counts, versions = sent
            self._sent = tensors, counts, versions

    def _restamp(self, params: Params) -> None:
        self.restarted = False
        times = self._count if self._gate.stamp == "mean" else 1
        self._versions[:] = params.versions * times
        self._connection, self._newest = params.connection, params.newest
