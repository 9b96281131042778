"""ASGD without gradient delay, figure 1: how far apart workers' parameters are."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean

import numpy as np

from aiops.lab.experiments.curves import across
from aiops.lab.experiments.execution import perceptron
from aiops.lab.experiments.experiment import Experiment, Findings, Scale, Verdict
from aiops.lab.experiments.planned_run import OnProgress, PlannedRun, Result
from aiops.lab.experiments.runs import RunGroups, Runs
from aiops.lab.figures import Figure, Panel, Series
from aiops.sim.turns.dispatcher import Dispatcher
from aiops.sim.turns.run import Run, digest
from aiops.sim.turns.simulation import Simulation


@dataclass(frozen=True)
class ParameterDistances:
    """A simulation in turns, and how far its clients' parameters are from each other's.

    Attributes
    ----------
    simulation
        What is run; its clients come one after the other.
    cycle
        Turns of each client, of which the farthest is what one look sees.
    looks
        How often one looks, evenly spread.
    """

    simulation: Simulation
    cycle: int
    looks: int

    def __call__(self, on_progress: OnProgress) -> Result:
        """Run it."""
        run = self.simulation
        curve: list[dict[str, float]] = []
        with Run(run, perceptron(run.dataset, run.hidden)) as initialized:
            dispatcher = initialized.dispatcher
            for look in range(1, self.looks + 1):
                # The last cycle before the mark, round by round.
                begin = run.iterations * look // self.looks - self.cycle * run.clients
                begin -= begin % run.clients
                dispatcher.run(max(begin - initialized.iteration, 0))
                seen = [_look(dispatcher, run.clients) for _ in range(self.cycle)]
                distance, norm = max(seen)
                sample = {"iteration": initialized.iteration, "distance": distance}
                curve.append({**sample, "relative": distance / norm})
                on_progress(initialized.iteration)
            return {"digest": digest(dispatcher), "diverged": None, "curve": curve}


def _look(dispatcher: Dispatcher, clients: int) -> tuple[float, float]:
    """Have every client take a turn; return the mean distance of pairs, and the model's norm."""
    dispatcher.run(clients)
    models = np.stack(
        [
            np.concatenate([np.ravel(array) for array in worker.params.values()])
            for worker in dispatcher.workers
        ]
    )
    return pairwise(models), float(np.linalg.norm(models.mean(axis=0)))


def pairwise(points: np.ndarray[tuple[int, int], np.dtype[np.float32]]) -> float:
    """Return the mean Euclidean distance between two of the rows.

    >>> pairwise(np.array([[0.0, 0.0], [3.0, 4.0], [0.0, 0.0]], np.float32))
    3.3333333333333335
    """
    found = [
        float(np.linalg.norm(points[place + 1 :] - one, axis=1).sum(dtype=np.float64))
        for place, one in enumerate(points[:-1])
    ]
    return sum(found) / (len(points) * (len(points) - 1) / 2)


@dataclass(frozen=True, kw_only=True)
class DiscrepancyScale(Scale):
    """The settings that are varied.

    Attributes
    ----------
    limits
        Values of τ_max, with the base's clients.
    workers
        Values of λ, with the staleness ``limit``.
    limit
        That τ_max.
    looks
        How often one looks at a run.
    """

    limits: tuple[int, ...] = (2, 4, 8, 16, 32)
    workers: tuple[int, ...] = (2, 4, 8, 16, 32)
    limit: int = 8
    looks: int

    @property
    def steps(self) -> int:
        """Steps of each worker of the averaging rule, as the base's iterations allow.

        Under gradient delay, whose every gradient is a whole step, of all workers together: so the
        models have come equally far.
        """
        return max(self.base.iterations // self.base.clients, 1)


_BASE = Simulation(selection="round-robin", lr=0.02, clients=8, batch_size=16, samples=1)
QUICK = DiscrepancyScale(
    base=replace(_BASE, dataset="digits", hidden=32, iterations=3200), seeds=3, looks=5
)
FULL = DiscrepancyScale(
    base=replace(_BASE, dataset="mnist", batch_size=32, iterations=80_000),
    seeds=3,
    looks=20,
)

BY_LIMIT, BY_WORKERS = "by τ_max", "by λ"
AVERAGED, DELAYED = "without gradient delay", "with gradient delay"
_LEVEL = 0.15
"""Exponents as small as this are no growth, and those as near to 1 as twice this are linear."""


def cases(scale: DiscrepancyScale, runs: Runs) -> Iterator[PlannedRun]:
    """Yield each τ_max, and each λ under both rules."""
    base = scale.base
    for seed in range(scale.seeds):
        seen = set()
        for limit, workers in (
            *((limit, base.clients) for limit in scale.limits),
            *((scale.limit, workers) for workers in scale.workers),
        ):
            if (limit, workers) not in seen:
                seen.add((limit, workers))
                work = _averaged(scale, limit, workers, seed)
                yield PlannedRun(f"τ_max {limit}, λ {workers}", AVERAGED, seed, work)
        for workers in scale.workers:
            work = _delayed(scale, workers, seed)
            yield PlannedRun(f"λ {workers}", DELAYED, seed, work)


def _averaged(scale: DiscrepancyScale, limit: int, workers: int, seed: int) -> ParameterDistances:
    settings = (f"tau_max={limit}", "variant=2")
    run = replace(
        scale.base,
        policy="no-delay",
        set=settings,
        clients=workers,
        iterations=scale.steps * workers,
        seed=seed,
    )
    return ParameterDistances(run, limit, max(min(scale.looks, scale.steps // limit), 1))


def _delayed(scale: DiscrepancyScale, workers: int, seed: int) -> ParameterDistances:
    steps = max(scale.steps, workers)
    run = replace(scale.base, policy="asgd", clients=workers, iterations=steps, seed=seed)
    return ParameterDistances(run, 1, min(scale.looks, steps // workers))


def series(
    scale: DiscrepancyScale, found: RunGroups, name: str = "distance", times: float = 1.0
) -> dict[tuple[str, str], Series]:
    """Return by panel and rule: where there is something, and each seed's mean over its looks."""
    wanted = {
        (BY_LIMIT, AVERAGED): {n: f"τ_max {n}, λ {scale.base.clients}" for n in scale.limits},
        (BY_WORKERS, AVERAGED): {n: f"τ_max {scale.limit}, λ {n}" for n in scale.workers},
        (BY_WORKERS, DELAYED): {n: f"λ {n}" for n in scale.workers},
    }
    result = {}
    for (panel, rule), titles in wanted.items():
        groups = {n: group for n, title in titles.items() if (group := found[title, rule])}
        result[panel, rule] = across(
            rule, list(groups), list(groups.values()), lambda run: times * fmean(run.series(name))
        )
    return result


def exponent(x: Sequence[float], y: Sequence[float]) -> float:
    """Return p of the power law y ~ x**p that fits best.

    >>> round(exponent([2, 4, 8], [10.0, 20.0, 40.0]), 6)
    1.0
    """
    logs = [math.log(value) for value in x], [math.log(value) for value in y]
    return float(np.polyfit(*logs, 1)[0])


def findings(scale: DiscrepancyScale, groups: RunGroups) -> Findings:
    """Fit a power law to each series."""
    found, relative = series(scale, groups), series(scale, groups, "relative")
    table = [
        {
            "varied": panel,
            "rule": rule,
            "value": n,
            "distance of pairs": f"{fmean(y[place] for y in line.ys):.4f}",
            "of the model's norm": f"{fmean(y[place] for y in relative[panel, rule].ys):.2%}",
        }
        for (panel, rule), line in found.items()
        for place, n in enumerate(line.x)
    ]
    powers = {
        key: [exponent(line.x, y) for y in line.ys]
        for key, line in found.items()
        if len(line.x) > 1
    }
    verdicts = [
        _verdict(powers, (BY_LIMIT, AVERAGED), "τ_max", 1.0),
        _verdict(powers, (BY_WORKERS, AVERAGED), "λ", 0.0),
        _verdict(powers, (BY_WORKERS, DELAYED), "λ", 1.0),
        _crowd(found),
    ]
    numbers = {f"{rule}, {panel}": values for (panel, rule), values in powers.items()}
    return Findings(table, verdicts, numbers)


def _verdict(
    powers: Mapping[tuple[str, str], Sequence[float]], key: tuple[str, str], x: str, claimed: float
) -> Verdict:
    values = powers.get(key)
    if not values:
        return Verdict(None, f"{key[1]}, {key[0]}: not all has been run")
    span = f"{min(values):.2f} to {max(values):.2f}"
    text = f"{key[1]} the distance grows as {x}^{fmean(values):.2f} ({span}); claimed is"
    text += " a straight line" if claimed else " no growth"
    near = _LEVEL * (2 if claimed else 1)
    return Verdict(all(abs(value - claimed) <= near for value in values), text)


def _crowd(found: Mapping[tuple[str, str], Series]) -> Verdict:
    """Say whether only gradient delay drives more workers farther apart."""
    grown = {}
    for rule in (AVERAGED, DELAYED):
        line = found[BY_WORKERS, rule]
        if len(line.x) < 2:
            return Verdict(None, "whether more workers are farther apart is not known yet")
        grown[rule] = [y[-1] / y[0] for y in line.ys]
    xs = line.x
    parts = ", ".join(f"× {fmean(values):.2f} {rule}" for rule, values in grown.items())
    text = f"from λ = {xs[0]} to {xs[-1]} the distance becomes {parts}"
    return Verdict(min(grown[DELAYED]) > 2 * max(grown[AVERAGED]), text)


def figure(scale: DiscrepancyScale, groups: RunGroups) -> Figure:
    """Draw distances, and as shares of the model's norm, against τ_max and against λ."""
    panels = []
    for name, ylabel, times in (
        ("distance", "mean distance of pairs", 1.0),
        ("relative", "of the model's norm (%)", 100.0),
    ):
        found = series(scale, groups, name, times)
        for panel, xlabel, fixed in (
            (BY_LIMIT, "staleness limit τ_max", f"λ = {scale.base.clients}"),
            (BY_WORKERS, "workers λ", f"τ_max = {scale.limit}"),
        ):
            lines = [line for (where, _rule), line in found.items() if where == panel]
            panels.append(Panel(f"{panel}, {fixed}", xlabel, ylabel, lines, bottom=0))
    return Figure("How far apart workers' parameters are", panels, columns=2)


EXPERIMENT = Experiment(
    name="no-delay-discrepancy",
    title="How far apart workers' parameters are, with and without gradient delay",
    source="Asynchronous SGD without gradient delay (submitted to ICLR 2019), figure 1",
    claim="Without gradient delay the distance between workers is roughly linear in the largest"
    " staleness and does not depend on the number of workers; with it, it is linear in their"
    " number.",
    quick=QUICK,
    full=FULL,
    cases=cases,
    findings=findings,
    figure=figure,
    note="A perceptron (784-200-10 on MNIST, --quick 64-32-10 on digits) instead of ResNet50 on"
    " CIFAR-10. Clients take turns in"
    " order, so with gradient delay they hold the last λ versions: the paper's worst case. Without"
    " it they work in cycles (algorithm 2), and are farthest apart just before the next hand-over,"
    " τ_max − 1 steps after their last common model; each look takes that moment. All steps have"
    " the same rate. Steps on mini-batches drawn independently lead apart as a random walk does,"
    " with the square root of their number: the straight line is an upper bound (lemma 3.8).",
)
