"""FASGD's future work: a bandwidth budget, and how it is best spent."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from statistics import fmean
from typing import Any, Self

from aiops.lab.experiments.curves import across
from aiops.lab.experiments.experiment import MOST_SEEDS, Experiment, Findings, Verdict
from aiops.lab.experiments.network_scale import NETWORK
from aiops.lab.experiments.papers import gated_runs
from aiops.lab.experiments.papers.gated_runs import OPEN, BFASGDScale, Trials
from aiops.lab.experiments.planned_run import PlannedRun
from aiops.lab.experiments.runs import FinishedRun, Group, RunGroups, Runs
from aiops.lab.experiments.seed_statistics import percents, tails
from aiops.lab.figures import Figure, Panel
from aiops.sim.turns.simulation import Simulation


@dataclass(frozen=True, kw_only=True)
class BudgetScale(BFASGDScale):
    """The budgets, and how they are divided between pushes and fetches.

    Attributes
    ----------
    budgets
        Bytes for each gradient computed, as shares of what crosses without a gate.
    splits
        What share of the budget pushes have.
    """

    budgets: tuple[float, ...]
    splits: tuple[float, ...]

    def of_transformer(self) -> Self:
        """Return the scale with the transformer's own base, and one budget."""
        return replace(super().of_transformer(), budgets=(0.25,))


QUICK = BudgetScale(
    base=Simulation(
        dataset="digits", hidden=32, lr=0.01, clients=4, batch_size=16, iterations=4000, samples=40
    ),
    seeds=3,
    budgets=(0.2,),
    splits=(0.3, 0.7),
)
FULL = BudgetScale(
    base=Simulation(dataset="mnist", lr=0.005, iterations=100_000, samples=100),
    seeds=3,
    budgets=(0.5, 0.25, 0.1, 0.05),
    splits=(0.25, 0.5, 0.75),
)

BY = {"whole model": "model", "tensor by tensor": "tensor"}
_DEVIATION = 0.0125  # v̄ as it is over most of a run: where constants begin, if not relative
_WAYS = ("push", "fetch")


@dataclass(frozen=True)
class Spending:
    """One way to spend a budget."""

    budget: float
    pushes: float
    by: str

    @property
    def label(self) -> str:
        """It as a curve's name."""
        return f"{self.pushes:.0%} for pushes, {self.by}"

    @property
    def panel(self) -> str:
        """The panel that it belongs to."""
        return f"budget {self.budget:.0%}"

    @property
    def shares(self) -> dict[str, float]:
        """The share of the potential pushes and fetches that it affords."""
        both = 2 * self.budget
        wanted = {"push": both * self.pushes, "fetch": both * (1 - self.pushes)}
        return {way: min(share, 1.0) for way, share in wanted.items()}

    def gate(self, scale: BudgetScale, constants: Mapping[str, float]) -> str:
        """Return the gate with such constants."""
        written = ",".join(f"c_{way}={constants[way]:.4g}" for way in _WAYS)
        return scale.bfasgd(f"{written},by={BY[self.by]},share=0")


def spendings(scale: BudgetScale) -> list[Spending]:
    """Return all ways to spend all budgets."""
    return [Spending(b, s, by) for b in scale.budgets for s in scale.splits for by in BY]


def cases(scale: BudgetScale, runs: Runs) -> Iterator[PlannedRun]:
    """Yield a trial of each, at guessed constants; then the runs at those that hit the budget."""
    work = scale.work(replace(scale.base, seed=MOST_SEEDS))
    open_trial = PlannedRun(OPEN, OPEN, MOST_SEEDS, work, role="pool")
    yield open_trial
    yield from gated_runs.reported(scale, OPEN, {OPEN: ""})
    for way in spendings(scale):
        unit, gate = 1.0 if scale.transformer else _DEVIATION, partial(way.gate, scale)
        guess = {w: unit * (1 / share - 1) for w, share in way.shares.items()}
        whole = runs.find(open_trial)
        if whole is None:
            continue

        def measured(run: FinishedRun, whole: FinishedRun = whole) -> dict[str, float]:
            return {w: traffic(run)[w] / traffic(whole)[w] for w in _WAYS}

        trials = Trials(scale, way.panel, way.label, gate, measured)
        tried, constants = trials.approach(guess, way.shares, runs)
        yield from tried
        if constants is not None:
            yield from gated_runs.reported(scale, way.panel, {way.label: gate(constants)})


def traffic(run: FinishedRun) -> dict[str, float]:
    """Return the bytes each way, for each gradient computed, without those of the beginning."""
    first, last = run.result["curve"][0], run.last
    names = {"push": "pushed", "fetch": "fetched"}
    return {way: (last[name] - first[name]) / last["iteration"] for way, name in names.items()}


def spent(group: Group, base: Group) -> float:
    """Return the bytes for each gradient as a share of those without a gate."""
    ours, whole = (fmean(sum(traffic(run).values()) for run in runs) for runs in (group, base))
    return ours / whole


def findings(scale: BudgetScale, found: RunGroups) -> Findings:
    """Say which division is best under each budget, and whether tensors are best chosen apart."""
    base = found[OPEN, OPEN]
    if not base:
        return Findings([], [Verdict(None, "nothing has been run without a gate")])
    table = []
    for (panel, label), group in found.items():
        row: dict[str, Any] = {
            "budget": panel,
            "spent on": label,
            "error %": percents(tails(group)),
            "nats": f"{fmean(tails(group, 'cost')):.3f}",
        }
        row["bytes of no gate's"] = f"{spent(group, base):.1%}"
        table.append(row | {"points": f"{100 * gated_runs.loss(group, base):+.2f}"})
    verdicts = [_apart(scale, found, budget) for budget in scale.budgets]
    return Findings(table, verdicts)


def _apart(scale: BudgetScale, found: RunGroups, budget: float) -> Verdict:
    """Compare the best way to spend a budget on tensors with the best on the whole model."""
    best: dict[str, tuple[float, Spending]] = {}
    for way in spendings(scale):
        group = found[way.panel, way.label]
        if group and way.budget == budget:
            error = fmean(tails(group))
            if way.by not in best or error < best[way.by][0]:
                best[way.by] = error, way
    if len(best) < len(BY):
        return Verdict(None, f"budget {budget:.0%}: not all has been run")
    whole, apart = (best[by][1] for by in BY)
    text = f"budget {budget:.0%}: best is {100 * best[whole.by][0]:.2f} % with {whole.label}, and"
    text += f" {100 * best[apart.by][0]:.2f} % with {apart.label}"
    if gated_runs.level(found[whole.panel, whole.label], found[apart.panel, apart.label]):
        return Verdict(None, f"{text}: the seeds' ranges overlap")
    return Verdict(best[apart.by][0] < best[whole.by][0], text)


def figure(scale: BudgetScale, found: RunGroups) -> Figure:
    """Draw the error against the bytes, and the learning curves of each budget."""
    base = found[OPEN, OPEN]
    lines = []
    for way in spendings(replace(scale, budgets=scale.budgets[:1])):
        mine = [g for (_panel, label), g in found.items() if label == way.label]
        shares = [100 * spent(group, base) for group in mine]
        lines.append(across(way.label, shares, mine, lambda run: 100 * run.tail()))
    panels = [Panel("Error", "bytes (% of no gate's)", "validation error (%)", lines, log="x")]
    for budget in scale.budgets:
        title = f"budget {budget:.0%}"
        panels.append(gated_runs.errors(title, found.panel(title)))
    return Figure("What a budget is best spent on", panels, columns=2 if len(panels) < 5 else 3)


EXPERIMENT = Experiment(
    name="bfasgd-budget",
    title="A byte budget per gradient: between pushes and fetches, and between tensors",
    source="Odena, Faster Asynchronous SGD (2016), section 5 (future work)",
    claim="With a fixed bandwidth budget it may pay to divide it among the tensors by their"
    " gradient statistics.",
    quick=QUICK,
    full=FULL,
    cases=cases,
    findings=findings,
    figure=figure,
    knobs=NETWORK,
    note="The gate's constants are chosen so that a run spends the budget: from a trial on a seed"
    " of its own. An order of turns has no clock, so a budget is bytes for each gradient computed."
    " All runs have the same learning rate."
    " --with network=transformer trains that of one-rule, with 4 clients and 600 mini-batches of 16"
    " windows; its gates are relative to v̄'s mean, and its FASGD has no floor (relative=0.01).",
)
