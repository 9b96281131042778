"""Staleness-aware async-SGD's figure 2: how much faster many learners are than one."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from statistics import fmean

from aiops.lab.experiments.cluster_simulation import ClusterMachines, ThroughputSimulation
from aiops.lab.experiments.curves import across
from aiops.lab.experiments.experiment import Experiment, Findings, Scale, Verdict
from aiops.lab.experiments.planned_run import PlannedRun
from aiops.lab.experiments.runs import FinishedRun, RunGroups, Runs
from aiops.lab.figures import Figure, Panel, Series
from aiops.sim.cluster.spec import StarTopology
from aiops.sim.turns.simulation import Simulation

_NODE = 96e9  # bytes per second each way: half of the paper's 192 GB/s in both directions
_FABRIC = StarTopology(worker=_NODE / 4, server=_NODE, latency=1e-5)  # a node has four learners
_ETHERNET = StarTopology(worker="1Gbit/s", server="1Gbit/s", latency=1e-4)
_MEMORY = 64e9  # bytes per second: four of a node's 32 cores' share of its 512 GB/s
_CIFAR, _IMAGENET = 4 * 89_578, 289_000_000  # bytes
_SIGMA = 0.2

MACHINES = {
    "CIFAR-10, µ = 4": ClusterMachines(_CIFAR, 4 * 0.002, _SIGMA, _FABRIC, _MEMORY),
    "CIFAR-10, µ = 128": ClusterMachines(_CIFAR, 128 * 0.002, _SIGMA, _FABRIC, _MEMORY),
    "ImageNet, µ = 16": ClusterMachines(_IMAGENET, 16 * 0.07, _SIGMA, _FABRIC, _MEMORY),
}
"""The paper's, by the panels' names; it does not state times of mini-batches, or their spread."""

SLOW = "CIFAR-10, µ = 4, 1 Gb/s"
"""For comparison: a network the paper does not have."""

SPREAD = "CIFAR-10, µ = 128, by spread"

_RANGE = 22, 28
_FASTER = 1.5
_NEAR = 0.15  # of it

RULES = ("hardsync", "1-softsync", "λ-softsync")


@dataclass(frozen=True, kw_only=True)
class SpeedupScale(Scale):
    """The numbers of learners; the base's ``iterations`` are those of each.

    Attributes
    ----------
    learners
        From few to many.
    sigmas
        Spreads of the times of mini-batches, tried with the most learners.
    """

    learners: tuple[int, ...]
    sigmas: tuple[float, ...]


_BASE = Simulation(lr=0.001, dataset="digits", samples=1)
QUICK = SpeedupScale(
    base=replace(_BASE, iterations=60), seeds=1, learners=(1, 10, 30), sigmas=(0.05, 0.2, 0.4)
)
FULL = SpeedupScale(
    base=replace(_BASE, iterations=400),
    seeds=3,
    learners=(1, 2, 5, 10, 15, 20, 25, 30),
    sigmas=(0.05, 0.1, 0.15, 0.2, 0.25, 0.3, 0.4),
)


def cases(scale: SpeedupScale, runs: Runs) -> Iterator[PlannedRun]:
    """Yield each rule with each number of learners, and with each spread."""
    for seed in range(scale.seeds):
        for panel in (*MACHINES, SLOW):
            for learners in scale.learners:
                for rule in RULES:
                    yield case(scale, panel, rule, learners, seed)
        for sigma in scale.sigmas:
            for rule in RULES:
                yield case(scale, SPREAD, rule, scale.learners[-1], seed, sigma)


def case(
    scale: SpeedupScale, panel: str, rule: str, learners: int, seed: int, sigma: float = _SIGMA
) -> PlannedRun:
    """Return one run."""
    machines = MACHINES.get(panel) or MACHINES["CIFAR-10, µ = 128"]
    if panel == SLOW:
        machines = replace(MACHINES["CIFAR-10, µ = 4"], links=_ETHERNET)
    splits = {"1-softsync": ("n=1",), "λ-softsync": (f"n={learners}",)}.get(rule, ())
    simulation = replace(
        scale.base,
        policy="softsync" if splits else "hardsync",
        set=(*splits, "optimizer=momentum"),
        clients=learners,
        iterations=scale.base.iterations * learners,
        seed=seed,
    )
    work = ThroughputSimulation(simulation, replace(machines, sigma=sigma))
    return PlannedRun(panel, _curve(panel, rule, learners, sigma), seed, work)


def _curve(panel: str, rule: str, learners: int, sigma: float) -> str:
    spread = f", σ = {sigma:g}" if panel == SPREAD else ""
    return f"{rule}, {learners} learners{spread}"


def speedups(
    found: RunGroups, panel: str, rule: str, learners: int, sigma: float = _SIGMA
) -> list[float]:
    """Return the speed-up of each seed that is finished."""
    return [run.last["speedup"] for run in found[panel, _curve(panel, rule, learners, sigma)]]


def findings(scale: SpeedupScale, found: RunGroups) -> Findings:
    """Compare the speed-ups of most learners with the paper's."""
    table = []
    for panel in (*MACHINES, SLOW):
        for rule in RULES:
            by_learners = {n: speedups(found, panel, rule, n) for n in scale.learners}
            if any(by_learners.values()):
                means = {n: f"{fmean(v):.1f}" if v else "–" for n, v in by_learners.items()}
                cells = {f"λ = {n}": mean for n, mean in means.items()}
                table.append({"panel": panel, "rule": rule, **cells})
    by_spread = ratios(scale, found)
    for sigma, ratio in by_spread.items():
        table.append(
            {"panel": SPREAD, "rule": f"σ = {sigma:g}: λ-softsync is {ratio:.2f}× as fast"}
        )
    return Findings(table, [_fast(scale, found), _faster(scale, found)])


def ratios(scale: SpeedupScale, groups: RunGroups) -> dict[float, float]:
    """Return how many times as fast as hardsync λ-softsync is, with most learners, by spread."""
    most, found = scale.learners[-1], {}
    for sigma in scale.sigmas:
        ours, theirs = (speedups(groups, SPREAD, r, most, sigma) for r in (RULES[-1], RULES[0]))
        if ours and theirs:
            found[sigma] = fmean(ours) / fmean(theirs)
    return found


def _most(scale: SpeedupScale, found: RunGroups, rule: str) -> list[float]:
    """Return the speed-ups of most learners on the paper's machines, where there are any."""
    by_panel = (speedups(found, panel, rule, scale.learners[-1]) for panel in MACHINES)
    return [fmean(values) for values in by_panel if values]


def _fast(scale: SpeedupScale, found: RunGroups) -> Verdict:
    most = _most(scale, found, "λ-softsync")
    if len(most) < len(MACHINES):
        return Verdict(None, "the speed-up with most learners: not all has been run")
    low, high = _RANGE
    named = ", ".join(f"{s:.1f} ({p})" for s, p in zip(most, MACHINES, strict=True))
    text = f"{scale.learners[-1]} learners of λ-softsync are as fast as {named}"
    if max(most) > high:
        text += f"; above {high}: what slows the paper's learners beyond its links is not modelled"
    return Verdict(min(most) >= low, text)


def _faster(scale: SpeedupScale, found: RunGroups) -> Verdict:
    ours, theirs = (_most(scale, found, rule) for rule in (RULES[-1], RULES[0]))
    if min(len(ours), len(theirs)) < len(MACHINES):
        return Verdict(None, "softsync against hardsync: not all has been run")
    ratio = fmean(a / b for a, b in zip(ours, theirs, strict=True))
    spread = ", ".join(f"{r - 1:.0%} at {s:g}" for s, r in ratios(scale, found).items())
    text = f"λ-softsync is {ratio - 1:.0%} faster than hardsync at σ = {_SIGMA:g}"
    return Verdict(abs(ratio - _FASTER) <= _NEAR, f"{text}; it depends on the spread: {spread}")


def samples(run: FinishedRun) -> list[dict[str, float]]:
    """Return a run's figures, with its learners and their spread."""
    work = run.case.work
    assert isinstance(work, ThroughputSimulation)
    known = {"learners": run.case.simulation.clients, "sigma": work.machines.sigma}
    return [{**known, **sample} for sample in run.result["curve"]]


def figure(scale: SpeedupScale, found: RunGroups) -> Figure:
    """Draw speed-ups by learners, and what asynchrony gains by spread."""
    panels = []
    for title in (*MACHINES, SLOW):
        lines = []
        for rule in RULES:
            groups = [found[title, _curve(title, rule, n, _SIGMA)] for n in scale.learners]
            lines.append(across(rule, scale.learners, groups, lambda run: run.last["speedup"]))
        lines.append(Series("linear", scale.learners, [[float(n) for n in scale.learners]]))
        panels.append(Panel(title, "learners λ", "speed-up", lines, bottom=0))
    by_spread = ratios(scale, found)
    gain = Series("λ-softsync / hardsync", list(by_spread), [list(by_spread.values())])
    spread = "spread σ of mini-batches' times"
    panels.append(Panel(f"{scale.learners[-1]} learners", spread, "times as fast", [gain]))
    return Figure("Speed-up against one learner that never waits", panels, columns=3)


EXPERIMENT = Experiment(
    name="softsync-speedup",
    title="The speed-up of up to 30 learners, with softsync and hardsync",
    source="Zhang, Gupta, Lian & Liu, Staleness-aware async-SGD (2015), figure 2",
    claim="Thirty learners are 22 to 28 times as fast as one, and asynchronous ones on average 50 %"
    " faster than synchronous ones.",
    quick=QUICK,
    full=FULL,
    cases=cases,
    findings=findings,
    figure=figure,
    samples=samples,
    note="A cluster in virtual time; the data does not matter, the size of the model does (350 kB"
    " and 289 MB, the latter simulated at a scale on which all takes as long). From the paper: the"
    " models, 192 GB/s between nodes of four learners, 512 GB/s of memory. Not in the paper, and"
    " assumed: 2 and 70 ms of computing for an image, times of mini-batches spread by σ = 0.2, one"
    " server with four threads. Iterations are those of each learner. The last panel shows what"
    " the spread does.",
)
