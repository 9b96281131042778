"""Is B-FASGD's gate more than a coin? Both at equal traffic."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from aiops.lab.experiments.case import Case
from aiops.lab.experiments.experiment import Experiment, Findings, Scale, Verdict
from aiops.lab.experiments.figure import Figure
from aiops.lab.experiments.papers import gated
from aiops.lab.experiments.papers.gated import Group, Trials
from aiops.lab.experiments.runs import Finished, Runs, gathered
from aiops.lab.experiments.stats import AHEAD, BEHIND, compare, tails
from aiops.sim.turns.simulation import Simulation


@dataclass(frozen=True, kw_only=True)
class Coins(Scale):
    """At which constants of the gate it is tried, of fetches and of pushes."""

    gates: tuple[tuple[str, float], ...]


QUICK = Coins(
    base=Simulation(dataset="digits", hidden=32, lr=0.005, iterations=4000, samples=40),
    seeds=3,
    gates=(("fetch", 1 / 8), ("push", 0.08)),
)
FULL = Coins(
    base=Simulation(dataset="mnist", lr=0.005, iterations=100_000, samples=100),
    seeds=5,
    gates=(("fetch", 1 / 16), ("fetch", 1 / 4), ("push", 0.03), ("push", 0.12)),
)

GATE, FREE, COIN = "gate", "gate without v̄'s floor", "coin"
_COUNTS = {"fetch": "fetches", "push": "pushes"}
_FREE_GUESS = 0.1  # of the constant, by this factor


def cases(scale: Coins, runs: Runs) -> Iterator[Case]:
    """Yield the gates; then coins, and gates without a floor, that send as much."""
    for way, c in scale.gates:
        panel = title(way, c)
        gates = list(gated.reported(scale, panel, {GATE: f"bfasgd:c_{way}={c:g}"}))
        yield from gates
        if not runs.settled(gates) or not runs.of(gates):
            continue
        sent = gated.share(runs.of(gates), _COUNTS[way])
        yield from gated.reported(scale, panel, {COIN: f"constant:p_{way}={sent:.4g}"})

        def free(constants: Mapping[str, float], way: str = way) -> str:
            return f"bfasgd:c_{way}={constants[way]:.4g},floor_free=yes"

        def measured(run: Finished, way: str = way) -> dict[str, float]:
            return {way: gated.share([run], _COUNTS[way])}

        trials = Trials(scale, panel, FREE, free, measured)
        tried, constants = trials.approach({way: _FREE_GUESS * c}, {way: sent}, runs)
        yield from tried
        if constants is not None:
            yield from gated.reported(scale, panel, {FREE: free(constants)})


def title(way: str, c: float) -> str:
    """Return a panel's name."""
    return f"{way}, c = {c:g}"


def groups(scale: Coins, runs: Runs) -> dict[tuple[str, str], Group]:
    """Return the reported runs by panel and curve."""
    found = runs.of(cases(scale, runs))
    return dict(gathered([run for run in found if run.case.role == "reported"]))


def findings(scale: Coins, runs: Runs) -> Findings:
    """Compare gate and coin, panel by panel."""
    found = groups(scale, runs)
    table = []
    for (panel, curve), group in found.items():
        row = gated.row(curve, group, found[panel, GATE])
        row["points against the gate"] = row.pop("points")
        table.append({"panel": panel, **row})
    panels = [title(*gate) for gate in scale.gates]
    return Findings(table, [_verdict(panels, found, curve) for curve in (GATE, FREE)])


def _verdict(panels: Sequence[str], found: Mapping[tuple[str, str], Group], curve: str) -> Verdict:
    """Say whether a gate is ahead of the coin somewhere, and nowhere behind."""
    orders = {}
    for panel in panels:
        ours, coin = (tails(found.get((panel, name), [])) for name in (curve, COIN))
        orders[panel] = compare(ours, coin) if ours and coin else None
    said = ", ".join(f"{order or 'not run'} at {panel}" for panel, order in orders.items())
    text = f"the {curve} and the coin at equal traffic: {said}"
    kinds = set(orders.values())
    if BEHIND in kinds:
        return Verdict(False, text)
    if AHEAD in kinds and None not in kinds:
        return Verdict(True, text)
    return Verdict(None, text)


def figure(scale: Coins, runs: Runs) -> Figure:
    """Draw the errors."""
    found = groups(scale, runs)
    panels = [
        gated.errors(p, {curve: group for (panel, curve), group in found.items() if panel == p})
        for p in (title(*gate) for gate in scale.gates)
    ]
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
    note="The coin's probability is the share that the gate was seen to send. v̄ cannot fall below"
    " sqrt(ε) = 0.01, so its gate is tried without that floor as well.",
)
