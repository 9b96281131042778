"""Bagua's asynchronous model average: one slow worker, and what the others lose by it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean

import numpy as np

from aiops.lab.experiments.cluster_simulation import StragglerSimulation
from aiops.lab.experiments.curves import across, interpolated
from aiops.lab.experiments.experiment import Experiment, Findings, Scale, Verdict
from aiops.lab.experiments.planned_run import PlannedRun
from aiops.lab.experiments.runs import FinishedRun, RunGroups, Runs
from aiops.lab.experiments.seed_statistics import percents
from aiops.lab.figures import Figure, Panel
from aiops.sim.cluster.spec import StarTopology
from aiops.sim.turns.simulation import Simulation

RULES: Mapping[str, tuple[str, tuple[str, ...]]] = {
    "model average": ("average", ("lr=0.1", "interval=0.5", "grace=0.1")),
    "synchronous": ("hardsync", ("lr=0.1",)),
    "parameter server": ("asgd", ("lr=0.04",)),
}
AVERAGE, SYNCHRONOUS, SERVER = RULES


@dataclass(frozen=True, kw_only=True)
class StragglerScale(Scale):
    """The slowness of the slow worker.

    Attributes
    ----------
    times
        How many times as long it takes; 1, all are alike, comes first.
    link
        What the server's link carries each way, and each worker's.
    """

    times: tuple[float, ...]
    link: str


QUICK = StragglerScale(
    base=Simulation(
        dataset="digits", hidden=32, clients=4, batch_size=16, iterations=2400, samples=20
    ),
    seeds=3,
    times=(1.0, 4.0, 10.0),
    link="15Mbit/s",
)
FULL = StragglerScale(
    base=Simulation(dataset="mnist", clients=8, batch_size=32, iterations=40_000, samples=100),
    seeds=3,
    times=(1.0, 2.0, 5.0, 10.0),
    link="1Gbit/s",
)

_KEPT = 0.9  # of the others' pace: a straggler that costs no more is borne
_NEAR = 0.01  # errors within a point are level


def cases(scale: StragglerScale, runs: Runs) -> Iterator[PlannedRun]:
    """Yield each rule beside each straggler."""
    links = StarTopology(worker=scale.link, server=scale.link, latency=0.0002)
    for times in scale.times:
        for label, (policy, settings) in RULES.items():
            for seed in range(scale.seeds):
                task = replace(scale.base, seed=seed)
                yield PlannedRun(
                    title(times),
                    label,
                    seed,
                    StragglerSimulation(task, policy, settings, times, links=links),
                )


def title(times: float) -> str:
    """Return a panel's name."""
    return f"one worker {times:g} times slower" if times > 1 else "all alike"


def throughput(run: FinishedRun) -> float:
    """Return all workers' mini-batches per virtual second."""
    return float(run.last["iteration"]) / float(run.result["seconds"])


def others(run: FinishedRun) -> float:
    """Return the mini-batches per virtual second of a worker that is not slow."""
    steps: Sequence[int] = run.result["steps"]
    return fmean(steps[1:]) / float(run.result["seconds"])


def kept(scale: StragglerScale, found: RunGroups, times: float, label: str) -> float | None:
    """Return which share of their pace the others keep; None while that is not known."""
    alike, beside = (found[title(t), label] for t in (scale.times[0], times))
    return fmean(map(others, beside)) / fmean(map(others, alike)) if alike and beside else None


def error_at(run: FinishedRun, seconds: float) -> float:
    """Return the test error at a time, as read off the curve."""
    return float(np.interp(seconds, run.series("seconds"), run.series("error")))


def findings(scale: StragglerScale, found: RunGroups) -> Findings:
    """Compare paces with those of healthy workers, and errors at equal work and at equal time."""
    table = []
    for times in scale.times:
        rules = found.panel(title(times))
        took = [fmean(run.result["seconds"] for run in group) for group in rules.values()]
        for label, group in rules.items():
            share = kept(scale, found, times, label)
            table.append(
                {
                    "straggler": title(times),
                    "rule": label,
                    "mini-batches/s": f"{fmean(map(throughput, group)):.1f}",
                    "the others keep": f"{share:.0%}" if share is not None else "–",
                    "idle": f"{fmean(run.result['idle'] for run in group):.1%}",
                    "error %": percents([run.last["error"] for run in group]),
                    "at equal time": percents([error_at(run, min(took)) for run in group]),
                    "MB": f"{fmean(run.last['bytes'] for run in group) / 1e6:,.1f}",
                }
            )
    slow = [times for times in scale.times if times > 1]
    return Findings(table, [v for t in slow for v in (_pace(scale, found, t), _errors(found, t))])


def _pace(scale: StragglerScale, found: RunGroups, times: float) -> Verdict:
    shares = {label: kept(scale, found, times, label) for label in RULES}
    if None in shares.values():
        return Verdict(None, f"{title(times)}: not all has been run")
    text = ", ".join(f"{share:.0%} ({label})" for label, share in shares.items())
    ours, theirs = shares[AVERAGE], shares[SYNCHRONOUS]
    agrees = ours is not None and theirs is not None and ours >= _KEPT > theirs
    return Verdict(agrees, f"{title(times)}: of their pace the others keep {text}")


def _errors(found: RunGroups, times: float) -> Verdict:
    rules = found.panel(title(times))
    errors = {rule: fmean(run.last["error"] for run in group) for rule, group in rules.items()}
    if len(errors) < len(RULES):
        return Verdict(None, f"{title(times)}: errors are not known yet")
    text = ", ".join(f"{100 * error:.2f} % ({label})" for label, error in errors.items())
    level = errors[AVERAGE] <= errors[SYNCHRONOUS] + _NEAR
    return Verdict(level, f"{title(times)}: error after the same number of mini-batches: {text}")


def figure(scale: StragglerScale, found: RunGroups) -> Figure:
    """Draw the throughput by straggler, and the errors by time."""
    lines = [
        across(label, scale.times, [found[title(t), label] for t in scale.times], throughput)
        for label in RULES
    ]
    xlabel = "times as slow as the others"
    panels = [Panel("Throughput", xlabel, "mini-batches per second", lines, bottom=0)]
    for times in scale.times:
        lines = [interpolated(label, found[title(times), label], "seconds") for label in RULES]
        panels.append(Panel(title(times), "virtual seconds", "test error (%)", lines, log="y"))
    return Figure("One slow worker", panels, columns=2)


EXPERIMENT = Experiment(
    name="model-average-straggler",
    title="Asynchronous model average beside one slow worker",
    source="Bagua, Asynchronous Model Average",
    claim="Synchronous workers wait for the slowest in each iteration, which can harm the whole"
    " system dramatically; workers that average their models asynchronously do not.",
    quick=QUICK,
    full=FULL,
    cases=cases,
    findings=findings,
    figure=figure,
    note="The real averagers, in virtual time: ring, lock and meeting point are those of real runs."
    " Synchronous: a mean gradient of all workers in each step, by a server. Mini-batches take"
    " 50 ms (log-normal, sigma 0.25). All runs have the same number of mini-batches, and at equal"
    " time is when the first rule has done them. The average's error is that of the mean of all"
    " workers' models.",
)
