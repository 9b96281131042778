"""Choose the gates' constants so that the workers' demand fits a bandwidth budget.

A worker transmits with the probability p = 1 / (1 + c / (v̄ + ε)) (B-FASGD, Odena 2016, eq 9). The
controller chooses one c for pushes, and a multiple of it for fetches, by integral control of
y = -ln p = ln(1 + c / (v̄ + ε)). Demand is proportional to p, so in y the loop has the same gain
everywhere; y = 0 is c = 0, where the integrator stops (no wind-up); and c = (v̄ + ε) (eʸ - 1)
follows a falling v̄ by itself. (For a gate that is ``relative`` to v̄'s level c is eʸ - 1.)

While the budget is the bottleneck, the workers' demand beyond it cannot be measured. It is inferred
from the number of workers that are waiting. With λ workers of which a share f waits, transfers
of s seconds follow each other without a gap, so a worker's cycle takes λs, of which it computes
(1 - f) λs; it would have to compute (λ - 1) s for the demand to be the budget. The quotient of the
two, F = (λ - 1) / ((1 - f) λ), is the factor by which 1/p is too small.

A worker receives new constants only when it transmits. So the loop's time constant is the time in
which, at full use of the budget, each worker transmits once; but at least one second.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from aiops.bandwidth.token_bucket import USABLE

_TARGET = 0.985 * USABLE
"""The target share of the budget: a little below what can cross, so that demand shows."""

_QUEUED, _QUEUED_FEW = 1.5, 8.0
"""F that is tolerated: for any number of workers, and in addition divided by their number.

Transfers are random, so full use needs a queue now and then. A few workers make one only if their
demand exceeds the budget.
"""

_GAIN = 0.6  # of the integrator, per time constant: well damped with the averaging
_FASTEST, _SLOWEST = 1.0, 30.0  # seconds: bounds of the time constant
_FIRST_VBAR = 1.0  # FASGD's v begins at 1
_REMEMBERED = 64  # transmissions over which their size is averaged
_MOST = math.log(1e4)  # bound of y
_LEAST_USE = 0.01  # a use below this share counts as this
_BEAT = 0.1  # seconds before the first sample

HEAVIEST = 4.0
"""The weight of a worker that has not transmitted for long, relative to 1."""


@dataclass(slots=True)
class _Seen:
    """One connection: its last transmission, and its weight under the budget."""

    version: int  # the model version at its last transmission
    weight: float = 1.0


@dataclass(slots=True)
class BudgetSample:
    """One sample of a budget's use; its fields are those of `aiops.engine.events.BudgetTick`."""

    time: float
    nbytes: int
    second: int
    peak: int
    backlog: int
    busy: int
    limited: bool


@dataclass(slots=True)
class GateController:
    """The constants of the gates, and the shares of the workers.

    Parameters
    ----------
    budget
        Bytes per second of all workers together; None: only ``each`` bounds them.
    each
        Bytes per second of one worker; None: none.
    ratio
        c of a fetch, relative to that of a push.
    depth
        y = ln(1 + c / (v̄ + ε)) to begin with.
    eps, floor
        The gate's ε, and the floor that it subtracts from v̄ first.
    adaptive
        True if there is a gate that uses the constants.
    relative
        Whether that gate's constants are in units of v̄'s own level.
    """

    budget: int | None
    each: int | None = None
    ratio: float = 1.0
    depth: float = 0.0
    eps: float = 0.0
    floor: float = 0.0
    adaptive: bool = True
    relative: bool = False
    _time: float | None = None
    _use: float = 0.0  # share of the budget that crosses, averaged
    _waiting: float = 0.0  # workers with a message on its way, averaged
    _sizes: list[float] = field(default_factory=lambda: [0.0, 0.0])  # bytes, and transmissions
    _sent: int = 0  # transmissions since the last sample
    _seen: dict[int, _Seen] = field(default_factory=dict)
    _last: BudgetSample | None = None
    _limited: list[float] = field(default_factory=lambda: [0.0, 0.0])  # bytes, and bytes possible

    @classmethod
    def for_gate(
        cls, gate: Mapping[str, Any] | None, budget: int | None, each: int | None
    ) -> GateController | None:
        """Return the controller of a gate, given its entry in the client plan; None: no budget.

        It begins with the gate's own constants, and keeps their ratio.
        """
        if budget is None and each is None:
            return None
        if gate is None or gate.get("kind") != "bfasgd":
            return cls(budget, each, adaptive=False)
        push, fetch = gate["c_push"], gate["c_fetch"]
        eps, floor, relative = gate["eps"], gate["floor"], gate["relative"]
        depth = math.log1p((push or fetch) / (1.0 if relative else _FIRST_VBAR + eps))
        ratio = fetch / push if push and fetch else 1.0
        return cls(budget, each, ratio, min(depth, _MOST), eps, floor, relative=relative)

    def constants(self, vbar: float | None) -> tuple[float, ...]:
        """Return c of a push and c of a fetch for this v̄; ``()`` without a gate.

        Both are 0 while the budget is not needed.
        """
        if not self.adaptive or vbar is None:
            return ()
        level = 1.0 if self.relative else max(vbar - self.floor, 0.0) + self.eps
        c = level * math.expm1(self.depth)
        return c, c * self.ratio

    def seconds_per_byte(self, workers: int) -> float:
        """Return the seconds that a client should allow per byte of an exchange.

        Four times the time that it takes when all ``workers`` push and fetch at once: more workers
        may join, and others may be ahead in the queue.
        """
        return 4 * 2 * max(workers, 1) / (USABLE * self._rate(workers))

    # ------------------------------------------------------------ what happens

    def transmitted(self, peer: int, version: int) -> None:
        """Note a push or a fetch at model version ``version``."""
        self._sent += 1
        seen = self._seen.get(peer)
        if seen is None:
            self._seen[peer] = _Seen(version)
        else:
            seen.version = version

    def left(self, peer: int) -> None:
        """Forget a connection."""
        self._seen.pop(peer, None)

    def resumed(self) -> None:
        """Forget all connections: the server was started again."""
        self._seen.clear()

    def paced(self, crossing: BudgetSample, workers: int) -> None:
        """Update the depth y from one sample, with the number of workers connected."""
        last = self._time if self._time is not None else crossing.time - _BEAT
        self._time, self._last = crossing.time, crossing
        seconds = crossing.time - last
        rate = self._rate(workers)
        if seconds <= 0 or not workers:
            return
        constant = self._constant(crossing.nbytes, workers, rate)
        weight = seconds / (constant + seconds)
        self._use += weight * (crossing.nbytes / (rate * seconds) - self._use)
        self._waiting += weight * (min(crossing.busy, workers) - self._waiting)
        if crossing.limited:
            self._limited[0] += crossing.nbytes
            self._limited[1] += rate * seconds
        step = _GAIN * self._error(workers) * seconds / constant
        self.depth = min(max(self.depth + step, 0.0), _MOST)

    def shares(self, version: int, workers: int) -> tuple[tuple[int, float], ...]:
        """Return the connections whose weight under the budget has changed, with their weights.

        Workers that have not transmitted for many versions go first: a weight grows from 1 to 4
        with the versions since then, divided by the number of workers.
        """
        changed = []
        for peer, seen in self._seen.items():
            behind = (version - seen.version) / max(workers, 1)
            weight = min(1.0 + math.floor(behind), HEAVIEST)
            if weight != seen.weight:
                seen.weight = weight
                changed.append((peer, weight))
        return tuple(changed)

    def report(self, vbar: float | None) -> dict[str, Any]:
        """Return the budget's row of the statistics, with the constants for this v̄."""
        last, (crossed, possible) = self._last, self._limited
        c_push, c_fetch = self.constants(vbar) or (None, None)
        return {
            "bytes_per_second": self.budget,
            "worker_bytes_per_second": self.each,
            "used": last.second if last else 0,
            "peak": last.peak if last else 0,
            "backlog": last.backlog if last else 0,
            "utilisation": min(crossed / possible, 1.0) if possible else None,
            "c_push": c_push,
            "c_fetch": c_fetch,
        }

    # ------------------------------------------------------------ state

    def state(self) -> dict[str, Any]:
        """Return the state of the control loop as plain values, for `restore`."""
        last = self._last
        return {
            "depth": self.depth,
            "time": self._time,
            "averages": [self._use, self._waiting],
            "sizes": list(self._sizes),
            "sent": self._sent,
            "seen": [[peer, seen.version, seen.weight] for peer, seen in self._seen.items()],
            "last": None if last is None else dataclasses.astuple(last),
            "limited": list(self._limited),
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue from what `state` returned, on a controller made with the same settings."""
        self.depth, self._time, self._sent = state["depth"], state["time"], state["sent"]
        self._use, self._waiting = state["averages"]
        self._sizes, self._limited = list(state["sizes"]), list(state["limited"])
        self._seen = {peer: _Seen(version, weight) for peer, version, weight in state["seen"]}
        self._last = None if state["last"] is None else BudgetSample(*state["last"])

    # ------------------------------------------------------------ inside

    def _constant(self, nbytes: int, workers: int, rate: float) -> float:
        """Return the loop's time constant in seconds."""
        sizes = self._sizes
        sizes[0], sizes[1] = sizes[0] + nbytes, sizes[1] + self._sent
        self._sent = 0
        if sizes[1] > _REMEMBERED:  # an average that forgets: half of the sums
            sizes[:] = [size / 2 for size in sizes]
        return min(max(workers * sizes[0] / max(sizes[1], 1.0) / rate, _FASTEST), _SLOWEST)

    def _rate(self, workers: int) -> float:
        rates = [float(self.budget)] if self.budget is not None else []
        if self.each is not None:
            rates.append(float(self.each * max(workers, 1)))
        return min(rates)

    def _error(self, workers: int) -> float:
        """Return the control error, about ln of demand over target: above 0 for too much demand."""
        use = self._use / _TARGET
        if use < 0.5:
            return math.log(max(use, _LEAST_USE))
        error = min(use, 2.0) - 1.0
        if workers > 1 and use > 0.9:
            computing = max(1.0 - self._waiting / workers, 0.05)
            short = (workers - 1) / workers / computing
            error += max(0.0, math.log(short / (_QUEUED + _QUEUED_FEW / workers)))
        return error
