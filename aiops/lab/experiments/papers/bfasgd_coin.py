"""Is B-FASGD's gate more than a coin? Both at equal traffic."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Self

from aiops.lab.experiments.experiment import Experiment, Findings, Verdict
from aiops.lab.experiments.network_scale import NETWORK
from aiops.lab.experiments.papers import gated_runs
from aiops.lab.experiments.papers.gated_runs import BFASGDScale, Trials
from aiops.lab.experiments.planned_run import PlannedRun
from aiops.lab.experiments.runs import FinishedRun, RunGroups, Runs
from aiops.lab.experiments.seed_statistics import AHEAD, BEHIND, compare, tails
from aiops.lab.figures import Figure
from aiops.sim.turns.simulation import Simulation


@dataclass(frozen=True, kw_only=True)
class CoinScale(BFASGDScale):
    """At which constants of the gate it is tried, of fetches and of pushes."""

    gates: tuple[tuple[str, float], ...]

    def of_transformer(self) -> Self:
        """Return the scale with the transformer's own base and constants."""
        gates = (("fetch", 3.0), ("fetch", 7.0), ("push", 3.0), ("push", 7.0))
        return replace(super().of_transformer(), gates=gates)


QUICK = CoinScale(
    base=Simulation(dataset="digits", hidden=32, lr=0.005, iterations=4000, samples=40),
    seeds=3,
    gates=(("fetch", 1 / 8), ("push", 0.08)),
)
FULL = CoinScale(
    base=Simulation(dataset="mnist", lr=0.005, iterations=100_000, samples=100),
    seeds=5,
    gates=(("fetch", 1 / 16), ("fetch", 1 / 4), ("push", 0.03), ("push", 0.12)),
)

GATE, FREE, COIN = "gate", "gate without v̄'s floor", "coin"
_COUNTS = {"fetch": "fetches", "push": "pushes"}
_FREE_GUESS = 0.1  # of the constant, by this factor


def cases(scale: CoinScale, runs: Runs) -> Iterator[PlannedRun]:
    """Yield the gates; then coins, and gates without a floor, that send as much."""
    for way, c in scale.gates:
        panel = title(way, c)
        gates = list(gated_runs.reported(scale, panel, {GATE: scale.bfasgd(f"c_{way}={c:g}")}))
        yield from gates
        if not runs.settled(gates) or not runs.of(gates):
            continue
        sent = gated_runs.share(runs.of(gates), _COUNTS[way])
        yield from gated_runs.reported(scale, panel, {COIN: f"constant:p_{way}={sent:.4g}"})
        if scale.transformer:  # its v̄ has no floor
            continue

        def free(constants: Mapping[str, float], way: str = way) -> str:
            return f"bfasgd:c_{way}={constants[way]:.4g},floor_free=yes"

        def measured(run: FinishedRun, way: str = way) -> dict[str, float]:
            return {way: gated_runs.share([run], _COUNTS[way])}

        trials = Trials(scale, panel, FREE, free, measured)
        tried, constants = trials.approach({way: _FREE_GUESS * c}, {way: sent}, runs)
        yield from tried
        if constants is not None:
            yield from gated_runs.reported(scale, panel, {FREE: free(constants)})


def title(way: str, c: float) -> str:
    """Return a panel's name."""
    return f"{way}, c = {c:g}"


def findings(scale: CoinScale, found: RunGroups) -> Findings:
    """Compare gate and coin, panel by panel."""
    table = []
    for (panel, curve), group in found.items():
        row = gated_runs.row(curve, group, found[panel, GATE])
        row["points against the gate"] = row.pop("points")
        table.append({"panel": panel, **row})
    panels = [title(*gate) for gate in scale.gates]
    curves = (GATE,) if scale.transformer else (GATE, FREE)
    return Findings(table, [_verdict(panels, found, curve) for curve in curves])


def _verdict(panels: Sequence[str], found: RunGroups, curve: str) -> Verdict:
    """Say whether a gate is ahead of the coin somewhere, and nowhere behind."""
    orders = {}
    for panel in panels:
        ours, coin = (tails(found[panel, name]) for name in (curve, COIN))
        orders[panel] = compare(ours, coin) if ours and coin else None
    parts = ", ".join(f"{order or 'not run'} at {panel}" for panel, order in orders.items())
    text = f"the {curve} and the coin at equal traffic: {parts}"
    kinds = set(orders.values())
    if BEHIND in kinds:
        return Verdict(False, text)
    if AHEAD in kinds and None not in kinds:
        return Verdict(True, text)
    return Verdict(None, text)


def figure(scale: CoinScale, found: RunGroups) -> Figure:
    """Draw the errors."""
    names = (title(*gate) for gate in scale.gates)
    panels = [gated_runs.errors(name, found.panel(name)) for name in names]
    return Figure("B-FASGD's gate and a coin, at equal traffic", panels, columns=2)


EXPERIMENT = Experiment(
    name="bfasgd-coin",
    title="B-FASGD's gate against a constant probability, at equal traffic",
    source="Odena, Faster Asynchronous SGD (2016), section 2.3 and figure 3",
    claim="It makes sense to modulate bandwidth by gradient statistics: a gate that goes by v̄ does"
    " better than a fixed rate of transfers.",
    quick=QUICK,
    full=FULL,
    cases=cases,
    findings=findings,
    figure=figure,
    knobs=NETWORK,
    note="The coin's probability is the share that the gate was seen to send. v̄ cannot fall below"
    " sqrt(ε) = 0.01, so its gate is tried without that floor as well."
    " --with network=transformer trains that of one-rule, with 4 clients and 600 mini-batches of 16"
    " windows; its gates are relative to v̄'s mean, and its FASGD has no floor (relative=0.01).",
)
