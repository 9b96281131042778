"""Runs behind gates: what they send, what that costs, and how they are drawn.

``--with network=transformer``: the small transformer of `one_rule`, in place of the papers'
perceptron. FASGD then has no floor (``relative=0.01``), and a gate's c is in units of v̄'s mean
(``relative=true``), since gradients have another scale.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean
from typing import Any, Self

from aiops.lab.experiments.curves import curve
from aiops.lab.experiments.execution import TransformerSimulation
from aiops.lab.experiments.experiment import MOST_SEEDS, Findings, Verdict
from aiops.lab.experiments.network_scale import NetworkScale
from aiops.lab.experiments.planned_run import PlannedRun, RunWork
from aiops.lab.experiments.rate_search import RateSearch, search_rates
from aiops.lab.experiments.runs import FinishedRun, Group, RunGroups, Runs
from aiops.lab.experiments.seed_statistics import BEHIND, LEVEL, compare, percents, tails
from aiops.lab.figures import Figure, Panel, Series
from aiops.sim.turns.simulation import Simulation

OPEN = "no gate"
PAPERS, OWN = "the paper's rate", "each at its best rate"
ONE = "one rate"

NO_LOSS = 0.003
"""An error larger by no more than this share (0.3 points) is no loss worth mentioning."""


@dataclass(frozen=True, kw_only=True)
class BFASGDScale(NetworkScale):
    """A scale of runs behind B-FASGD's gate."""

    def of_transformer(self) -> Self:
        """Return the scale with the transformer's own base."""
        return replace(self, base=_TRANSFORMER)

    def work(self, simulation: Simulation) -> RunWork:
        """Return the run of a simulation with the network."""
        return TransformerSimulation(simulation) if self.transformer else simulation

    def bfasgd(self, settings: str) -> str:
        """Return B-FASGD's gate with these settings."""
        return f"bfasgd:{settings},relative=true" if self.transformer else f"bfasgd:{settings}"


_TRANSFORMER = Simulation(
    dataset="help",
    lr=0.003,
    set=("relative=0.01",),
    clients=4,
    batch_size=16,
    iterations=600,
    samples=6,
)


@dataclass(frozen=True, kw_only=True)
class GatedScale(BFASGDScale):
    """The gate's constants, one curve for each.

    Attributes
    ----------
    constants
        At the paper's learning rate; the largest also at the best rate of a pool, beside no gate
        at its own best: what a gate leaves out makes gradients staler, and steps smaller. The
        transformer has one rate.
    pool
        Of learning rates.
    """

    constants: tuple[float, ...]
    pool: RateSearch

    @property
    def largest(self) -> float:
        """The largest constant."""
        return max(self.constants)

    @property
    def panels(self) -> tuple[str, ...]:
        """The rates at which there are runs: the first for all constants."""
        return (ONE,) if self.transformer else (PAPERS, OWN)

    def of_transformer(self) -> Self:
        """Return the scale with the transformer's own base and constants."""
        return replace(super().of_transformer(), constants=(1.0, 3.0, 7.0))


def reported(scale: BFASGDScale, panel: str, gates: Mapping[str, str]) -> Iterator[PlannedRun]:
    """Yield the seeds of a curve for each gate, by its label."""
    for label, gate in gates.items():
        for seed in range(scale.seeds):
            work = scale.work(replace(scale.base, gate=gate, seed=seed))
            yield PlannedRun(panel, label, seed, work)


def at_rates(
    scale: GatedScale, gates: Mapping[str, str], largest: Sequence[str], runs: Runs
) -> Iterator[PlannedRun]:
    """Yield all gates at the first rate, by their labels, and the ``largest`` each at its best.

    No gate comes with both.
    """
    yield from reported(scale, scale.panels[0], {OPEN: "", **gates})
    if OWN in scale.panels:
        chosen = {OPEN: "", **{label: gates[label] for label in largest}}
        yield from _at_best_rate(scale, OWN, chosen, runs)


def _at_best_rate(
    scale: GatedScale, panel: str, gates: Mapping[str, str], runs: Runs
) -> Iterator[PlannedRun]:
    """Yield the runs of a pool for each gate, and then the seeds of each at its best rate."""

    def make(label: str, rate: float, share: float) -> PlannedRun:
        steps = max(1, round(share * scale.base.iterations))
        seed = scale.pool.seed
        work = replace(scale.base, gate=gates[label], lr=rate, iterations=steps, seed=seed)
        return PlannedRun(panel, f"{label}, rate {rate:g}", seed, scale.work(work), role="pool")

    pool, choice = search_rates(scale.pool, scale.base.policy, list(gates), make, runs)
    yield from pool
    if choice is not None:
        for label, rate in choice.panels.items():
            best = replace(scale, base=replace(scale.base, lr=rate))
            yield from reported(best, panel, {label: gates[label]})


def findings(
    judge: Callable[[Any, str, Mapping[str, Group], Group], Iterable[Verdict]],
    scale: GatedScale,
    found: RunGroups,
) -> Findings:
    """Return a row for each gate, and the verdicts on each panel.

    ``judge(scale, panel, gates, base)`` is given the runs of each gate and those without one.
    """
    table: list[dict[str, Any]] = []
    verdicts: list[Verdict] = []
    for panel in scale.panels:
        groups = found.panel(panel)
        base = groups.get(OPEN)
        if base is None:
            verdicts.append(Verdict(None, f"{panel}: nothing has been run without a gate"))
            continue
        table += [{"at": panel, **row(name, group, base)} for name, group in groups.items()]
        del groups[OPEN]
        verdicts += judge(scale, panel, groups, base)
    return Findings(table, verdicts)


def counted(run: FinishedRun, name: str) -> list[float]:
    """Return how many copies had crossed at each sample: ``pushes`` or ``fetches``.

    The fetches with which the clients begin are left out.
    """
    series = run.series(name)
    return [value - series[0] for value in series]


def share(group: Group, name: str) -> float:
    """Return how many of the potential copies crossed, from 0 to 1: the mean over the seeds."""
    return fmean(counted(run, name)[-1] / run.last["iteration"] for run in group)


def copies(label: str, group: Group, name: str) -> Series:
    """Return copies against potential copies as a line."""
    line = curve(label, group, name)
    return replace(line, ys=[[value - ys[0] for value in ys] for ys in line.ys])


def errors(title: str, groups: Mapping[str, Group]) -> Panel:
    """Return the learning curves as a panel."""
    lines = [curve(label, group, "error", times=100) for label, group in groups.items()]
    return Panel(title, "iterations", "validation error (%)", lines, log="y")


def figure(name: str, scale: GatedScale, found: RunGroups) -> Figure:
    """Draw the errors at each rate, and copies against potential copies, of ``name``."""
    groups = found.panel(scale.panels[0])
    lines = [copies(label, group, name) for label, group in groups.items()]
    panels = [errors(panel.capitalize(), found.panel(panel)) for panel in scale.panels]
    panels.append(Panel(name.capitalize(), f"potential {name}", name, lines))
    return Figure(f"B-FASGD: fewer {name}", panels, columns=3)


def row(label: str, group: Group, base: Group) -> dict[str, Any]:
    """Return a run's line of the table: what it sent, and how that compares with no gate."""
    rate = f"{group[0].case.simulation.lr:g}"
    found: dict[str, Any] = {"run": label, "rate": rate, "error %": percents(tails(group))}
    found["nats"] = f"{fmean(tails(group, 'cost')):.3f}"
    for name in ("pushes", "fetches"):
        found[name] = f"÷{1 / max(share(group, name), 1e-9):.1f}"
    staleness = fmean(run.result["mean_staleness"] for run in group)
    return found | {"mean τ": f"{staleness:.1f}", "points": f"{100 * loss(group, base):+.2f}"}


def loss(group: Group, base: Group) -> float:
    """Return by how much the error is larger than without a gate, as a share of 1."""
    return fmean(tails(group)) - fmean(tails(base))


def keeps(group: Group, base: Group, what: str) -> Verdict:
    """Say whether a gate costs nothing: at most 0.3 points."""
    lost = loss(group, base)
    text = f"{what}: the error changes by {100 * lost:+.2f} points"
    if lost <= NO_LOSS:
        return Verdict(True, text)
    if compare(tails(group), tails(base)) == BEHIND:
        return Verdict(False, text)
    return Verdict(None, f"{text}, and the seeds' ranges overlap")


def fails(group: Group, base: Group, what: str) -> Verdict:
    """Say whether a gate does harm: more than 0.3 points."""
    kept = keeps(group, base, what)
    return replace(kept, agrees=None if kept.agrees is None else not kept.agrees)


def level(ours: Group, theirs: Group) -> bool:
    """Say whether neither of two is better beyond its seeds."""
    return compare(tails(ours), tails(theirs)) == LEVEL


@dataclass(frozen=True)
class Trials:
    """The search for a gate's constants at which it sends a wanted share.

    Attributes
    ----------
    scale, panel, label
        Of the runs that are tried, on a seed of their own.
    gate
        Returns the gate with such constants.
    measured
        Returns what a run has sent, as a share for each constant.
    rounds
        How often it is tried.
    """

    scale: BFASGDScale
    panel: str
    label: str
    gate: Callable[[Mapping[str, float]], str]
    measured: Callable[[FinishedRun], Mapping[str, float]]
    rounds: int = 2

    def approach(
        self, start: Mapping[str, float], wanted: Mapping[str, float], runs: Runs
    ) -> tuple[list[PlannedRun], dict[str, float] | None]:
        """Return the trials that can be known by now, and the constants once they are finished."""
        constants, cases = dict(start), []
        for _ in range(self.rounds):
            run = replace(self.scale.base, gate=self.gate(constants), seed=MOST_SEEDS)
            work = self.scale.work(run)
            cases.append(PlannedRun(self.panel, self.label, MOST_SEEDS, work, role="pool"))
            found = runs.find(cases[-1])
            if found is None:
                return cases, None
            sent = self.measured(found)
            constants = {key: calibrated(c, sent[key], wanted[key]) for key, c in constants.items()}
        return cases, constants


def calibrated(c: float, sent: float, wanted: float) -> float:
    """Return the constant at which another share is sent, from what is sent at one.

    A share is k / (k + c), with a k that stands for v̄ over the whole run.

    >>> calibrated(0.1, sent=0.5, wanted=0.1)
    0.9
    """
    sent, wanted = (min(max(share, 1e-6), 1 - 1e-6) for share in (sent, wanted))
    return round(c * sent / (1 - sent) * (1 - wanted) / wanted, 9)
