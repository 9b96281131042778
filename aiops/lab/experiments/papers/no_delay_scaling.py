"""ASGD without gradient delay, figures 2 and 3: idle time, speed-up, and what is learnt."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean

from aiops.lab.experiments.cluster_simulation import (
    ClusterMachines,
    ClusterSimulation,
    ThroughputSimulation,
)
from aiops.lab.experiments.curves import across, curve
from aiops.lab.experiments.experiment import Experiment, Findings, Scale, Verdict
from aiops.lab.experiments.planned_run import PlannedRun
from aiops.lab.experiments.runs import FinishedRun, Group, RunGroups, Runs
from aiops.lab.experiments.seed_statistics import percents, tails
from aiops.lab.figures import Figure, Panel
from aiops.sim.cluster.spec import StarTopology
from aiops.sim.turns.simulation import Simulation

WORKERS = (1, 2, 3, 4)
TAUS = (1, 2, 4, 8, 16, 32)
MOST, TAU = WORKERS[-1], 16
_ENOUGH = 8  # the paper's τ_max from which no worker idles

RULES = ("algorithm 1", "algorithm 2", "asgd", "hardsync")
_OURS = RULES[:2]

APART, AMONG = "server on one link", "server on the workers' machines"

_LINK = 125e6  # bytes per second: 1 Gb/s
_LATENCY = 1e-4
_NBYTES = 28_000_000  # GoogLeNet's seven million parameters
_MEDIAN = 0.1275  # seconds for 32 images on the paper's card, as Caffe2's benchmarks have it
_SIGMA = 0.05

LEARNING = "learning"
_PERIODS = _NBYTES / _LINK / _MEDIAN  # mini-batches that take as long as the model on a link
_FEATURES = {"digits": 64, "mnist": 784}
_CLASSES = 10
_WARM = 0.1  # of a worker's steps
_IDLE = 0.05  # is practically none
_LINEAR = 1 - _IDLE  # of as many times as there are workers
_POINT = 0.005


@dataclass(frozen=True, kw_only=True)
class ScalingScale(Scale):
    """The loads: the base is what is learnt; its iterations are those of all workers together.

    Attributes
    ----------
    steps
        Mini-batches of each worker where only time is measured.
    """

    steps: int


QUICK = ScalingScale(
    base=Simulation(
        dataset="digits", hidden=32, batch_size=32, iterations=2400, samples=20, lr=0.1
    ),
    seeds=3,
    steps=120,
)
FULL = ScalingScale(
    base=Simulation(
        dataset="mnist", hidden=200, batch_size=32, iterations=40_000, samples=40, lr=0.1
    ),
    seeds=3,
    steps=1000,
)


def cases(scale: ScalingScale, runs: Runs) -> Iterator[PlannedRun]:
    """Yield what is timed, and what is learnt."""
    for seed in range(scale.seeds):
        for place in (APART, AMONG):
            for rule in RULES:
                for workers in WORKERS:
                    yield timing_run(scale, place, rule, workers, TAU, seed)
            for tau in TAUS:
                for rule in _OURS:
                    if _possible(rule, tau):
                        yield timing_run(scale, place, rule, MOST, tau, seed)
        for rule, workers in LEARNERS:
            yield learning_run(scale, rule, workers, seed)


LEARNERS = (
    *((rule, workers) for rule in _OURS for workers in (1, 2, MOST)),
    *((rule, MOST) for rule in RULES[2:]),
)
"""The curves of what is learnt: rules, and numbers of workers."""


def _possible(rule: str, tau: int) -> bool:
    """Say whether a rule can have such a τ_max: algorithm 2's cycles are half of it."""
    return rule != "algorithm 2" or tau % 2 == 0


def _policy(rule: str, tau: int) -> tuple[str, tuple[str, ...]]:
    if rule in _OURS:
        return "no-delay", (f"variant={rule[-1]}", f"tau_max={tau}")
    return rule, ()


def timing_run(
    scale: ScalingScale, place: str, rule: str, workers: int, tau: int, seed: int
) -> PlannedRun:
    """Return a run of which only the time matters."""
    policy, settings = _policy(rule, tau)
    server = _LINK * (workers if place == AMONG else 1)
    links = StarTopology(worker=_LINK, server=server, latency=_LATENCY)
    simulation = replace(
        scale.base,
        policy=policy,
        set=settings,
        lr=0.01,
        clients=workers,
        iterations=scale.steps * workers,
        seed=seed,
    )
    work = ThroughputSimulation(simulation, ClusterMachines(_NBYTES, _MEDIAN, _SIGMA, links))
    return PlannedRun(place, _timing_curve(rule, workers, tau), seed, work)


def _timing_curve(rule: str, workers: int, tau: int) -> str:
    bound = f", τ_max = {tau}" if rule in _OURS else ""
    return f"{_learning_curve(rule, workers)}{bound}"


def _learning_curve(rule: str, workers: int) -> str:
    return f"{rule}, {workers} workers"


def learning_run(scale: ScalingScale, rule: str, workers: int, seed: int) -> PlannedRun:
    """Return a run that learns: λ workers, each with a λth of the steps, at λ times the rate.

    Asynchronous SGD applies each gradient for itself, so it has λ times the rate as it is.
    """
    policy, settings = _policy(rule, TAU)
    base = scale.base
    if rule != "asgd" and workers > 1:
        warm = max(round(_WARM * base.iterations / workers), 1)
        settings = *settings, "scale_lr=true", f"schedule=warmup:{warm}"
    simulation = replace(base, policy=policy, set=settings, clients=workers, seed=seed)
    rate = _model(base) / (_PERIODS * _MEDIAN)  # so that all takes as long as with GoogLeNet
    links = StarTopology(worker=rate, server=rate * workers, latency=_LATENCY)
    work = ClusterSimulation(simulation, _MEDIAN, _SIGMA, links)
    return PlannedRun(LEARNING, _learning_curve(rule, workers), seed, work)


def _model(base: Simulation) -> int:
    """Return the bytes of the base's perceptron."""
    inputs, hidden = _FEATURES[base.dataset], base.hidden
    return 4 * (inputs * hidden + hidden + hidden * _CLASSES + _CLASSES)


def measured(
    found: RunGroups, name: str, place: str, rule: str, workers: int, tau: int = TAU
) -> list[float]:
    """Return one figure of each seed that is finished."""
    return [run.last[name] for run in found[place, _timing_curve(rule, workers, tau)]]


def learnt(found: RunGroups, rule: str, workers: int) -> Group:
    """Return the runs that are finished."""
    return found[LEARNING, _learning_curve(rule, workers)]


def findings(scale: ScalingScale, found: RunGroups) -> Findings:
    """Look at idle time, speed-up, and errors."""
    table = []
    for place in (APART, AMONG):
        for rule in RULES:
            for tau in TAUS if rule in _OURS else (TAU,):
                if not _possible(rule, tau):
                    continue
                idle = measured(found, "idle", place, rule, MOST, tau)
                fast = measured(found, "speedup", place, rule, MOST, tau)
                if idle:
                    row = {"panel": place, "rule": rule, "τ_max": tau if rule in _OURS else "–"}
                    row |= {"idle %": percents(idle), "speed-up of 4": f"{fmean(fast):.2f}"}
                    table.append(row | {"error %": "–"})
    for rule, workers in LEARNERS:
        if errors := tails(learnt(found, rule, workers)):
            row = {"panel": f"{LEARNING}, λ = {workers}", "rule": rule}
            table.append(
                {**row, "τ_max": TAU if rule in _OURS else "–", "error %": percents(errors)}
            )
    verdicts = [make(found, place) for make in (_idle, _linear) for place in (APART, AMONG)]
    return Findings(table, [*verdicts, *(_accuracy(found, rule) for rule in _OURS)])


def _idle(found: RunGroups, place: str) -> Verdict:
    """No worker idles from τ_max = 8 on."""
    idle_shares, none = [], True
    for rule in _OURS:
        for tau in (tau for tau in TAUS if tau >= _ENOUGH):
            idle = measured(found, "idle", place, rule, MOST, tau)
            if not idle:
                return Verdict(None, f"{place}: idle time: not all has been run")
            none = none and fmean(idle) <= _IDLE
            idle_shares.append(f"{fmean(idle):.1%} ({rule}, τ_max = {tau})")
    waits = {r: measured(found, "idle", place, r, MOST) for r in RULES[2:]}
    beside = ", ".join(f"{fmean(idle):.0%} ({rule})" for rule, idle in waits.items() if idle)
    merge = 2 * _PERIODS * (MOST if place == APART else 1)
    text = f"{place}, where a merge takes {merge:.1f} mini-batches' time: 4 workers idle"
    return Verdict(none, f"{text} {', '.join(idle_shares)}; beside it {beside}")


def _linear(found: RunGroups, place: str) -> Verdict:
    """Four workers are four times as fast."""
    speedups = {rule: measured(found, "speedup", place, rule, MOST) for rule in RULES}
    if not all(speedups.values()):
        return Verdict(None, f"{place}: speed-up: not all has been run")
    text = ", ".join(f"{fmean(speeds):.2f} ({rule})" for rule, speeds in speedups.items())
    linear = all(fmean(speedups[rule]) >= _LINEAR * MOST for rule in _OURS)
    return Verdict(linear, f"{place}: 4 workers, τ_max = {TAU}, are as fast as {text}")


def _accuracy(found: RunGroups, rule: str) -> Verdict:
    """Four workers learn as much as one."""
    one, four = (tails(learnt(found, rule, workers)) for workers in (1, MOST))
    if not one or not four:
        return Verdict(None, f"{rule}: what is learnt: not all has been run")
    text = f"{rule}: 4 workers' error is {percents(four)} %, one's {percents(one)} %"
    return Verdict(fmean(four) <= fmean(one) + _POINT, text)


def samples(run: FinishedRun) -> Sequence[Mapping[str, float]]:
    """Return a run's figures, with its workers."""
    workers = run.case.simulation.clients
    return [{"workers": workers, **sample} for sample in run.result["curve"]]


def figure(scale: ScalingScale, found: RunGroups) -> Figure:
    """Draw idle time by τ_max, speed-up by workers, and errors by mini-batches."""
    panels = []
    for place in (APART, AMONG):
        lines = []
        for rule in RULES:
            taus = [tau for tau in TAUS if _possible(rule, tau)]
            groups = [found[place, _timing_curve(rule, MOST, tau)] for tau in taus]
            lines.append(across(rule, taus, groups, lambda run: 100 * run.last["idle"]))
        panels.append(Panel(place, "τ_max", "4 workers' idle time (%)", lines, "x", bottom=0))
    for place in (APART, AMONG):
        lines = []
        for rule in RULES:
            groups = [found[place, _timing_curve(rule, n, TAU)] for n in WORKERS]
            lines.append(across(rule, WORKERS, groups, lambda run: float(run.last["speedup"])))
        title = f"{place}, τ_max = {TAU}"
        panels.append(Panel(title, "workers", "speed-up", lines, bottom=0, top=MOST))
    for rule in _OURS:
        shown = ((rule, 1), (rule, 2), (rule, MOST), *((other, MOST) for other in RULES[2:]))
        lines = [
            curve(f"{name}, λ = {n}", learnt(found, name, n), "error", 100) for name, n in shown
        ]
        panels.append(Panel(f"{rule}, τ_max = {TAU}", "mini-batches", "error (%)", lines, "y"))
    return Figure("Asynchronous SGD without gradient delay, on 1 Gb/s", panels, columns=2)


EXPERIMENT = Experiment(
    name="no-delay-scaling",
    title="Asynchronous SGD without gradient delay: idle time, and speed-up up to 4 workers",
    source="Asynchronous SGD without gradient delay (submitted to ICLR 2019), figures 2 and 3",
    claim="From τ_max = 8 on no worker idles, and four workers on a 1 Gb/s switch are four times as"
    " fast as one, without loss of accuracy.",
    quick=QUICK,
    full=FULL,
    cases=cases,
    findings=findings,
    figure=figure,
    samples=samples,
    note="A cluster in virtual time. Timed: GoogLeNet's 28 MB (simulated at a scale on which all"
    " takes as long), 0.1275 s for 32 images on the paper's GTX TITAN X (as Caffe2's benchmarks"
    " have it), 1 Gb/s. The paper does not say where its server was: on a machine and a link of"
    " its own, or on the workers' four machines, a part on each. What is learnt: a perceptron"
    " instead of GoogLeNet, 784-200-10 on MNIST (--quick: 64-32-10 on digits), with links so slow"
    " that its model takes as many mini-batches' time as GoogLeNet's, τ_max = 16, the rate times λ"
    " after a linear warm-up over a tenth of the steps, and a λth of the steps for each worker."
    " asgd applies each gradient for itself, at the unscaled rate.",
)
