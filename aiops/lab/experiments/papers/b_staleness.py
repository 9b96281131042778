"""FASGD's hypothesis: what predicts how far a stale gradient is from the fresh one."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from statistics import fmean

import numpy as np

from aiops.client.params import Params
from aiops.lab.experiments.execution import perceptron, reported
from aiops.lab.experiments.experiment import Experiment, Findings, Scale, Verdict
from aiops.lab.experiments.planned_run import OnProgress, PlannedRun, Result
from aiops.lab.experiments.runs import FinishedRun, RunGroups, Runs
from aiops.lab.figures import Figure, Panel, Series
from aiops.model.layout import Array
from aiops.sim.turns.run import Run
from aiops.sim.turns.simulation import Simulation

PREDICTORS = {
    "tau": "step-staleness τ",
    "vbar": "v̄",
    "vbar_tau": "v̄·τ",
    "distance": "‖θᵢ − θⱼ‖",
}
CURVE = ("Γ", "fasgd")
_WINDOWS = 10  # parts of a run, within which v̄ hardly changes


@dataclass(frozen=True)
class GradientDistances:
    """Γ = ‖g(θ_j) − g(θ_i)‖, at even intervals, on mini-batches that are not trained on then.

    Attributes
    ----------
    simulation
        What is run.
    looks
        How often one looks, evenly spread.
    clients
        How many clients one looks at each time, drawn at random: θ_j is what it holds.
    """

    simulation: Simulation
    looks: int
    clients: int = 4

    def __call__(self, on_progress: OnProgress) -> Result:
        """Run it."""
        run = self.simulation
        task = perceptron(run.dataset, run.hidden)
        random = np.random.default_rng([run.seed, 4])
        curve: list[dict[str, float]] = []
        with Run(run, task) as initialized:
            rooms = [initialized.dispatcher.workers[0].params.like() for _ in range(2)]
            for look in range(1, self.looks + 1):
                initialized.dispatcher.run(
                    round(run.iterations * look / self.looks) - initialized.iteration
                )
                for client in random.choice(run.clients, self.clients, replace=False):
                    rows = random.integers(task.examples, size=run.batch_size)
                    stale = initialized.dispatcher.workers[client].params
                    fresh = initialized.dispatcher.model
                    task.gradient(stale, rows, rooms[0])
                    task.gradient(fresh, rows, rooms[1])
                    sample = _sample(initialized, stale, _distance(stale, fresh), _distance(*rooms))
                    curve.append(sample)
                on_progress(initialized.iteration)
            return {**reported(initialized.execute()), "curve": curve}


def _distance(one: Mapping[str, Array], other: Mapping[str, Array]) -> float:
    parts = [np.asarray(one[name], np.float64) - other[name] for name in one]
    return float(np.sqrt(sum(float(np.vdot(part, part)) for part in parts)))


def _sample(run: Run, stale: Params, distance: float, gamma: float) -> dict[str, float]:
    store = run.engine.defined_store
    vbar, tau = store.vbar() or 0.0, store.version - stale.version
    found = {"tau": tau, "vbar": vbar, "vbar_tau": vbar * tau, "distance": distance}
    return {"iteration": run.iteration, **found, "gamma": gamma}


def spearman(x: list[float], y: list[float]) -> float:
    """Return the rank correlation of two series, 0 where one of them is constant.

    >>> spearman([1, 2, 3], [10, 20, 15]), spearman([1, 1], [2, 3])
    (0.5, 0.0)
    """
    one, other = (_ranks(np.asarray(values)) for values in (x, y))
    one, other = one - one.mean(), other - other.mean()
    size = float(np.sqrt(np.vdot(one, one) * np.vdot(other, other)))
    return round(float(np.vdot(one, other)) / size, 9) if size else 0.0


def _ranks(values: Array) -> Array:
    """Return ranks, equal values sharing theirs."""
    _sorted, place, count = np.unique(values, return_inverse=True, return_counts=True)
    ends = np.cumsum(count)
    ranks: Array = ((ends - count + ends - 1) / 2)[place]
    return ranks


@dataclass(frozen=True, kw_only=True)
class DistanceScale(Scale):
    """The number of measurements in each run."""

    looks: int


_BASE = Simulation(policy="fasgd", lr=0.005, clients=16, batch_size=8)
QUICK = DistanceScale(
    base=replace(_BASE, dataset="digits", hidden=32, iterations=12_000), seeds=3, looks=300
)
FULL = DistanceScale(base=replace(_BASE, dataset="mnist", iterations=100_000), seeds=3, looks=2000)


def cases(scale: DistanceScale, runs: Runs) -> Iterator[PlannedRun]:
    """Yield a run for each seed."""
    for seed in range(scale.seeds):
        work = GradientDistances(replace(scale.base, seed=seed), scale.looks)
        yield PlannedRun(*CURVE, seed, work)


def correlations(run: FinishedRun) -> dict[str, tuple[float, float]]:
    """Return each predictor's rank correlation with Γ: of a whole run, and within its parts."""
    gamma, size = run.series("gamma"), len(run.result["curve"]) // _WINDOWS
    found = {}
    for name in PREDICTORS:
        series = run.series(name)
        parts = [slice(at, at + size) for at in range(0, size * _WINDOWS, max(size, 1))]
        within = [spearman(series[part], gamma[part]) for part in parts]
        found[name] = spearman(series, gamma), fmean(within) if within else 0.0
    return found


def findings(scale: DistanceScale, groups: RunGroups) -> Findings:
    """Compare the predictors."""
    found = [correlations(run) for run in groups[CURVE]]
    if not found:
        return Findings([], [Verdict(None, "nothing has been run")])
    table = [
        {
            "predictor": text,
            "rank correlation with Γ": _mean_and_range([each[name][0] for each in found]),
            "within a tenth of the run": _mean_and_range([each[name][1] for each in found]),
        }
        for name, text in PREDICTORS.items()
    ]
    verdicts = [_better(found, place) for place in (0, 1)]
    numbers = {name: [each[name] for each in found] for name in PREDICTORS}
    return Findings(table, verdicts, numbers)


def _better(found: list[dict[str, tuple[float, float]]], place: int) -> Verdict:
    """Say whether v̄·τ, what FASGD divides by, predicts Γ better than τ alone."""
    ours, theirs = ([each[name][place] for each in found] for name in ("vbar_tau", "tau"))
    where = ("over the whole run", "within a tenth of the run")[place]
    text = f"{where}: rank correlation with Γ {fmean(ours):.2f} of v̄·τ, {fmean(theirs):.2f} of τ,"
    text += f" {fmean(each['vbar'][place] for each in found):.2f} of v̄"
    text += f" and {fmean(each['distance'][place] for each in found):.2f} of the distance moved"
    if len(found) > 1 and min(ours) > max(theirs):
        return Verdict(True, text)
    if len(found) > 1 and max(ours) < min(theirs):
        return Verdict(False, text)
    return Verdict(None, text)


def _mean_and_range(values: list[float]) -> str:
    return f"{fmean(values):.2f} ({min(values):.2f} to {max(values):.2f})"


def figure(scale: DistanceScale, groups: RunGroups) -> Figure:
    """Draw Γ of the first seed against each predictor."""
    first = groups[CURVE][:1]
    panels = []
    for name, text in PREDICTORS.items():
        lines = [
            Series("one client's gradient", run.series(name), [run.series("gamma")], kind="points")
            for run in first
        ]
        panels.append(Panel(text, text, "Γ", lines, log="xy" if name != "tau" else "y"))
    return Figure("What predicts B-staleness Γ", panels, columns=2)


EXPERIMENT = Experiment(
    name="b-staleness",
    title="What predicts B-staleness: v̄, τ, or the distance moved",
    source="Odena, Faster Asynchronous SGD (2016), section 2.2, equation 3",
    claim="Moving averages of gradient statistics say more about how far a stale gradient is from"
    " the fresh one than the number of updates in between.",
    quick=QUICK,
    full=FULL,
    cases=cases,
    findings=findings,
    figure=figure,
    note="Γ = ‖g(θ_j) − g(θ_i)‖ on one mini-batch, of four clients at a time. FASGD divides its"
    " steps by v·τ. Within a tenth of a run v̄ hardly changes, so there it cannot tell much.",
)
