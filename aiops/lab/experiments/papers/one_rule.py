"""One rule at one setting for any number of workers: schedule-free beside tuned rivals."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from statistics import fmean

from aiops.lab.experiments.curves import across
from aiops.lab.experiments.execution import TransformerSimulation
from aiops.lab.experiments.experiment import Experiment, Findings, Scale, Verdict
from aiops.lab.experiments.planned_run import PlannedRun, RunWork
from aiops.lab.experiments.runs import FinishedRun, Group, RunGroups, Runs
from aiops.lab.figures import Figure, Panel
from aiops.sim.turns.simulation import Simulation

OURS = "schedule-free"
PLAIN = "schedule-free, gradients"
ASGD, SYNC = "asgd, AdamW", "hardsync, AdamW"

RATES: Mapping[str, tuple[float, ...]] = {
    OURS: (0.008,),
    PLAIN: (0.001, 0.003),
    ASGD: (0.0003, 0.001, 0.003, 0.01),
    SYNC: (0.001, 0.003, 0.01, 0.03),
}
"""The learning rates tried. Ours has one; of a rival's the best counts in each panel, by the same
runs that are reported, so rivals are judged too well, if anything."""

NEAREST: Mapping[str, tuple[float, ...]] = {
    OURS: (0.008,),
    PLAIN: (0.001,),
    ASGD: (0.001, 0.003),
    SYNC: (0.001, 0.003),
}
"""Those of the larger transformer, whose runs take minutes: what was best for the small one."""

_WARMUP = 60  # mini-batches
_ADAMW = ("optimizer=adamw", "beta2=0.95", "clip=1")


@dataclass(frozen=True)
class Measure:
    """A figure of a run's end by which rules are compared; less is better.

    Attributes
    ----------
    name, unit
        Its name in the samples, and the unit in words.
    times
        What a sample's figure is multiplied by.
    level
        Differences up to this are none.
    """

    name: str
    unit: str
    times: float
    level: float

    def of(self, run: FinishedRun) -> float:
        """Return it; infinite if the run diverged."""
        found = self.times * float(run.last[self.name])
        return found if math.isfinite(found) and not run.diverged else math.inf

    def mean(self, group: Group) -> float:
        """Return the mean of some runs."""
        return fmean(map(self.of, group))


COST = Measure("cost", "nats", 1.0, 0.02)
ERROR = Measure("error", "% wrong", 100.0, 0.5)


@dataclass(frozen=True, kw_only=True)
class OneRuleScale(Scale):
    """Numbers of workers, and what they train.

    Attributes
    ----------
    workers
        One panel's each.
    transformer
        Whether it is a transformer instead of a perceptron.
    """

    workers: tuple[int, ...]
    transformer: bool = False

    @property
    def measure(self) -> Measure:
        """The measure by which rules are compared."""
        return COST if self.transformer else ERROR

    @property
    def large(self) -> bool:
        """True if the transformer is the larger one."""
        return self.knobs.get("transformer") == "large"

    @property
    def rates(self) -> Mapping[str, tuple[float, ...]]:
        """The learning rates of each rule."""
        return NEAREST if self.large else RATES

    @property
    def counts(self) -> tuple[int, ...]:
        """The numbers of workers."""
        return tuple(count for count in self.workers if count <= 8 or not self.large)

    def work(self, simulation: Simulation) -> RunWork:
        """Return the run of a simulation with the task of this scale."""
        if not self.transformer:
            return simulation
        if self.large:
            half = replace(
                simulation, batch_size=simulation.batch_size // 2
            )  # of windows twice as long
            return TransformerSimulation(half, width=128, blocks=4, context=128)
        return TransformerSimulation(simulation)


QUICK = OneRuleScale(
    base=Simulation(dataset="digits", hidden=32, batch_size=16, iterations=600, samples=6),
    seeds=2,
    workers=(1, 4, 16),
)
FULL = OneRuleScale(
    base=Simulation(batch_size=16, iterations=600, samples=6),
    seeds=2,
    workers=(1, 2, 4, 8, 16),
    transformer=True,
)


def cases(scale: OneRuleScale, runs: Runs) -> Iterator[PlannedRun]:
    """Yield ours and each rival at each of its rates, for each number of workers."""
    for count in scale.counts:
        for rule, rates in scale.rates.items():
            for rate in rates:
                for seed in range(scale.seeds):
                    work = scale.work(_simulation(scale, rule, count, rate, seed))
                    yield PlannedRun(_panel(count), f"{rule} at {rate:g}", seed, work)


def _panel(workers: int) -> str:
    return f"λ = {workers}"


def _simulation(scale: OneRuleScale, rule: str, workers: int, rate: float, seed: int) -> Simulation:
    """Return a run of a rule; workers are equal: in each round all, in a newly drawn order."""
    policy, _comma, _more = rule.partition(",")
    settings: tuple[str, ...] = ()
    if rule == PLAIN:
        settings = ("orthogonal=false",)
    elif rule != OURS:
        each = workers if rule == SYNC else 1  # mini-batches of an update
        updates, warmup = scale.base.iterations // each, max(1, _WARMUP // each)
        settings = (*_ADAMW, f"schedule=warmup:{warmup},cosine:{max(updates, warmup + 1)}")
    return replace(
        scale.base,
        policy=policy,
        lr=rate,
        set=settings,
        clients=workers,
        selection="softmax:add=-20",
        seed=seed,
    )


def best(
    scale: OneRuleScale, groups: RunGroups, workers: int, rule: str
) -> tuple[float, Group] | None:
    """Return the rate of a rule that does best, and its runs; None: not all ran."""
    found = {rate: groups[_panel(workers), f"{rule} at {rate:g}"] for rate in scale.rates[rule]}
    if not all(found.values()):
        return None
    rate = min(found, key=lambda rate: scale.measure.mean(found[rate]))
    return rate, found[rate]


def findings(scale: OneRuleScale, groups: RunGroups) -> Findings:
    """Write one row for each number of workers and rule."""
    table, measure = [], scale.measure
    for count in scale.counts:
        for rule in scale.rates:
            chosen = best(scale, groups, count, rule)
            if chosen is not None:
                rate, group = chosen
                ends = [measure.of(run) for run in group]
                table.append(
                    {
                        "workers": str(count),
                        "rule": rule,
                        "best rate": f"{rate:g}",
                        measure.unit: f"{fmean(ends):.3f}",
                        "of the seeds": f"{min(ends):.3f} to {max(ends):.3f}",
                        "mean τ": f"{fmean(run.result['mean_staleness'] for run in group):.2f}",
                    }
                )
    return Findings(table, [_ahead(scale, groups), _price(scale, groups)])


def _ahead(scale: OneRuleScale, groups: RunGroups) -> Verdict:
    """Say whether ours is ahead of each rival, or level, for every number of workers."""
    texts, behind, measure = list[str](), False, scale.measure
    for count in scale.counts:
        found = {rule: best(scale, groups, count, rule) for rule in scale.rates}
        ends = {rule: measure.mean(each[1]) for rule, each in found.items() if each}
        if len(ends) < len(scale.rates):
            return Verdict(None, f"not all has been run for {count} workers")
        rival = min((ASGD, SYNC), key=lambda rule: ends[rule])
        behind = behind or ends[OURS] > ends[rival] + measure.level
        texts.append(f"λ = {count}: {ends[OURS]:.3f}, {rival} {ends[rival]:.3f}")
    return Verdict(not behind, f"{measure.unit} at the end: {'; '.join(texts)}")


def _price(scale: OneRuleScale, groups: RunGroups) -> Verdict:
    """Say whether staleness costs ours less than the best rival: one worker is the measure."""
    first, *others = scale.counts
    ends = dict[tuple[str, int], float]()
    for count in scale.counts:
        for rule in (OURS, ASGD):
            found = best(scale, groups, count, rule)
            if found is None:
                return Verdict(None, "what staleness costs is not known yet")
            ends[rule, count] = scale.measure.mean(found[1])
    lost = {key: end - ends[key[0], first] for key, end in ends.items()}
    text = ", ".join(
        f"{lost[OURS, count]:+.3f} and {lost[ASGD, count]:+.3f} with {count}" for count in others
    )
    less = all(lost[OURS, c] <= lost[ASGD, c] + scale.measure.level for c in others)
    start = f"beside {first} worker ours and {ASGD} lose"
    return Verdict(less, f"{start} {text} ({scale.measure.unit})")


def figure(scale: OneRuleScale, groups: RunGroups) -> Figure:
    """Draw the end over the number of workers, each rule at its best rate."""
    lines, measure = [], scale.measure
    for rule in scale.rates:
        found = [best(scale, groups, count, rule) for count in scale.counts]
        ran = [(count, each[1]) for count, each in zip(scale.counts, found, strict=True) if each]
        places, runs = [float(count) for count, _group in ran], [group for _count, group in ran]
        lines.append(across(rule, places, runs, measure.of))
    panel = Panel("Each at the best of its rates", "workers λ", measure.unit, lines, "x")
    return Figure("One rule for any number of equal workers", [panel], columns=1)


EXPERIMENT = Experiment(
    name="one-rule",
    title="schedule-free at one setting beside tuned AdamW, asynchronous and synchronous",
    source="this project's own claim",
    claim="At one setting schedule-free is not behind AdamW at the best of its rates, with or"
    " without a barrier, whatever the number of workers, and staleness costs it less.",
    quick=QUICK,
    full=FULL,
    cases=cases,
    findings=findings,
    figure=figure,
    knobs={"transformer": ("small", "large")},
    note="Equal workers and equal mini-batches in all: hardsync with λ workers makes 1/λ of the"
    " updates. Rivals know the horizon: their rates rise for 60 mini-batches and fall as a cosine."
    " Of a rival's rates the best counts, by the runs that are reported. --full trains a byte-level"
    " transformer (3 blocks of width 64; 170,000 parameters) on the text of Python's help, 600"
    " mini-batches of 16 windows of 64 bytes, so it depends on the version of Python a little."
    " --with transformer=large has 4 blocks of width 128 (840,000 parameters), 8 windows of 128."
    " --quick trains a perceptron on scikit-learn's digits.",
)
