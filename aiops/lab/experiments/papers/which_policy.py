"""Policies after equal time: on fast links and slow ones, with equal workers and a slow one."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from statistics import fmean

from aiops.lab.experiments.curves import curve
from aiops.lab.experiments.experiment import Experiment, Findings, Scale, Verdict
from aiops.lab.experiments.planned_run import PlannedRun
from aiops.lab.experiments.runs import FinishedRun, Group, RunGroups, Runs
from aiops.lab.experiments.timed_training import TimedTraining
from aiops.lab.figures import Figure, Panel
from aiops.sim.cluster.spec import StarTopology
from aiops.sim.turns.simulation import Simulation

DIRECTIONS: Mapping[str, float] = {"perceptron": 4.6, "convnet": 0.08, "transformer": 0.14}
"""The time of directions of matrices in that of a gradient, on one thread of an AMD EPYC: 1.4 ms
beside 0.3 (32 examples), 0.6 beside 7 (16), and 2.5 beside 18 (16 windows of 64 bytes)."""

GRID = (0.0001, 0.0003, 0.001, 0.003, 0.01, 0.03, 0.1)
"""The learning rates to which a rule's are widened."""

_SLOWER = 3.0  # times as long the slow worker takes
_LONGER = 2  # times as much time on slow links


@dataclass(frozen=True)
class TimedRule:
    """A policy with its settings, as a user would start it.

    Attributes
    ----------
    name
        In tables and figures.
    policy, settings
        The server's.
    rates
        The learning rates that are tried first, of which the best counts; one rate stays alone.
    rate
        The setting that they are values of.
    horizon
        ``server``: the learning rate is told when the time ends, and falls as a cosine; ``worker``:
        those of the workers' own steps are; empty: no rate is.
    push, fetch
        Codecs.
    overlap
        Of the workers.
    """

    name: str
    policy: str
    rates: tuple[float, ...]
    settings: tuple[str, ...] = ()
    rate: str = "lr"
    horizon: str = ""
    push: tuple[str, ...] = ()
    fetch: tuple[str, ...] = ()
    overlap: int = 0

    def schedule(self, seconds: float, steps: float) -> tuple[str, ...]:
        """Return the settings of a schedule, for the seconds, or a worker's steps, that there are.

        A rate rises for a tenth of them, and falls as a cosine to their end.
        """
        if self.horizon == "server":
            return "schedule_unit=seconds", _cosine("schedule", seconds)
        return (_cosine("inner_schedule", steps),) if self.horizon else ()

    @property
    def directs(self) -> bool:
        """True if workers make directions of matrices."""
        along = any(each.startswith("inner_orthogonal=") for each in self.settings)
        return along or (self.policy == "schedule-free" and "orthogonal=false" not in self.settings)

    def coded(self, codec: str, overlap: int = 1) -> TimedRule:
        """Return it with a codec both ways, and exchanges beside computing."""
        settings, more = self.settings, f" {codec}"
        if self.policy == "diloco":
            settings, overlap = (*settings, "overlap=true"), 0
        if overlap or self.policy == "diloco":
            more = f", overlap{more}"
        return replace(
            self,
            name=f"{self.name}{more}",
            settings=settings,
            push=(codec,),
            fetch=(codec,),
            overlap=overlap,
        )


def _cosine(setting: str, end: float) -> str:
    rises = max(1, round(end / 10))
    return f"{setting}=warmup:{rises},cosine:{max(rises + 1, round(end))}"


_ADAMW = ("optimizer=adamw", "beta2=0.95", "clip=1")
_INNER = ("inner_beta2=0.95", "inner_clip=1")

FREE = TimedRule("schedule-free", "schedule-free", (0.008,))
WARMED = replace(FREE, name="schedule-free, warm-up", settings=("schedule=warmup:100",))
"""With the warm-up that ``aiops advise`` names for a transformer."""
PLAIN = TimedRule(
    "schedule-free, gradients", "schedule-free", (0.001, 0.003), ("orthogonal=false",)
)
ASGD = TimedRule("asgd, AdamW", "asgd", (0.0003, 0.001, 0.003), _ADAMW, horizon="server")
SYNC = TimedRule("hardsync, AdamW", "hardsync", (0.001, 0.003, 0.01), _ADAMW, horizon="server")
DILOCO = TimedRule("diloco", "diloco", (0.001, 0.003), _INNER, rate="inner_lr", horizon="worker")
DIRECTED = replace(
    DILOCO,
    name="diloco, directions",
    settings=(*_INNER, "inner_orthogonal=0.7"),
    rates=(0.003, 0.01),
)
DELAYED = replace(DILOCO, name="diloco async", settings=(*_INNER, "mode=async"))
FASGD = TimedRule("fasgd, defaults", "fasgd", (0.005,))
RELATIVE = TimedRule("fasgd, relative=0.01", "fasgd", (0.001, 0.003), ("relative=0.01",))

FAST: tuple[TimedRule, ...] = (FREE, PLAIN, ASGD, SYNC, DILOCO, DELAYED, FASGD, RELATIVE)
SLOW: tuple[TimedRule, ...] = (
    FREE,
    FREE.coded("int8"),
    FREE.coded("onebit"),
    WARMED.coded("int8"),
    WARMED.coded("onebit"),
    PLAIN.coded("int8"),
    PLAIN.coded("onebit"),
    ASGD.coded("int8"),
    ASGD.coded("onebit"),
    SYNC,
    SYNC.coded("int8", overlap=0),
    SYNC.coded("onebit", overlap=0),
    DILOCO.coded("int8"),
    DIRECTED.coded("int8"),
    DELAYED.coded("int8"),
)

SETTINGS: tuple[TimedRule, ...] = (
    FREE,
    replace(FREE, name="schedule-free, beta2=0.95", settings=("beta2=0.95",)),
    replace(FREE, name="schedule-free, beta2=0.999", settings=("beta2=0.999",)),
    ASGD,
    replace(ASGD, name="asgd, AdamW, beta2=0.999", settings=(_ADAMW[0], "beta2=0.999", _ADAMW[2])),
    replace(ASGD, name="asgd, AdamW, no clip", settings=_ADAMW[:2]),
)
"""Of two policies one setting at a time is another: what carries over to another network?"""


@dataclass(frozen=True)
class PanelMachines:
    """The machines of one panel.

    Attributes
    ----------
    links
        Between workers and server.
    times
        How many times as long one worker takes.
    rules
        That are compared on them.
    longer
        Times the time of the experiment.
    """

    links: StarTopology
    rules: tuple[TimedRule, ...]
    times: float = 1.0
    longer: int = 1


_FAST = StarTopology(worker="1Gbit/s", server="1Gbit/s", latency=0.0002)
_SLOW = StarTopology(worker="20Mbit/s", latency=0.01)

PLACES: Mapping[str, PanelMachines] = {
    "1 Gbit/s, equal workers": PanelMachines(_FAST, FAST),
    "1 Gbit/s, one slow": PanelMachines(_FAST, FAST, _SLOWER),
    "20 Mbit/s, equal workers": PanelMachines(_SLOW, SLOW, longer=_LONGER),
    "20 Mbit/s, one slow": PanelMachines(_SLOW, SLOW, _SLOWER, longer=_LONGER),
}


@dataclass(frozen=True, kw_only=True)
class WhichPolicyScale(Scale):
    """The network, and the machines.

    Attributes
    ----------
    network
        Where no knob says otherwise.
    places
        The panels, of which knobs may choose some.
    """

    network: str = "perceptron"
    places: Mapping[str, PanelMachines] = field(default_factory=lambda: PLACES)

    @property
    def trained(self) -> str:
        """The network that is trained."""
        if self.base.dataset == "digits":
            return self.network
        return self.knobs.get("network", self.network)

    @property
    def panels(self) -> Mapping[str, PanelMachines]:
        """The panels of the links and the workers that knobs leave."""
        links, workers = (self.knobs.get(name, "all") for name in ("links", "workers"))
        if self.knobs.get("rules") == "settings":
            name, place = next(iter(self.places.items()))
            return {name: replace(place, rules=SETTINGS)}
        return {
            name: place
            for name, place in self.places.items()
            if links in ("all", "slow" if place.longer > 1 else "fast")
            and workers in ("all", "unequal" if place.times > 1 else "equal")
        }


QUICK = WhichPolicyScale(
    base=Simulation(
        dataset="digits", hidden=32, clients=4, batch_size=16, iterations=400, samples=5
    ),
    seeds=1,
)
FULL = WhichPolicyScale(
    base=Simulation(dataset="mnist", clients=4, batch_size=16, iterations=1600, samples=8),
    seeds=1,
    network="transformer",
)


def cases(scale: WhichPolicyScale, runs: Runs) -> Iterator[PlannedRun]:
    """Yield each rule at each of its rates, on the machines of each panel."""
    for panel, place in scale.panels.items():
        for rule in place.rules:
            yield from _searched(scale, panel, rule, runs)


def _searched(
    scale: WhichPolicyScale, panel: str, rule: TimedRule, runs: Runs
) -> Iterator[PlannedRun]:
    """Yield a rule's runs: while its best rate is at an edge of those tried, one more beyond it."""
    low, high = (GRID.index(rule.rates[at]) for at in (0, -1)) if len(rule.rates) > 1 else (0, -1)
    made = {rate: _at(scale, panel, rule, rate) for rate in rule.rates}
    yield from itertools.chain(*made.values())
    while low < high and all(runs.settled(each) for each in made.values()):
        best = GRID.index(min(made, key=lambda rate: _mean(runs.of(made[rate]))))
        if best == low > 0:
            low = step = low - 1
        elif best == high < len(GRID) - 1:
            high = step = high + 1
        else:
            return
        made[GRID[step]] = _at(scale, panel, rule, GRID[step])
        yield from made[GRID[step]]


def _at(scale: WhichPolicyScale, panel: str, rule: TimedRule, rate: float) -> list[PlannedRun]:
    """Return the runs of a rule at one rate."""
    curve, place = f"{rule.name} at {rate:g}", scale.places[panel]
    return [
        PlannedRun(panel, curve, seed, _work(scale, place, rule, rate, seed))
        for seed in range(scale.seeds)
    ]


def _work(
    scale: WhichPolicyScale, place: PanelMachines, rule: TimedRule, rate: float, seed: int
) -> TimedTraining:
    network = scale.trained
    dataset = "cifar10" if network == "convnet" else scale.base.dataset
    simulation = replace(
        scale.base,
        dataset=dataset,
        policy=rule.policy,
        set=(*rule.settings, f"{rule.rate}={rate:g}"),
        iterations=place.longer * scale.base.iterations,
        push_codec=rule.push,
        fetch_codec=rule.fetch,
        seed=seed,
    )
    work = TimedTraining(
        simulation,
        network=network,
        beside=DIRECTIONS[network] if rule.directs else 0.0,
        times=place.times,
        links=place.links,
        overlap=rule.overlap,
    )
    schedule = rule.schedule(work.seconds, work.seconds / work.median)
    return replace(work, in_seconds=schedule)


def last_cost(run: FinishedRun) -> float:
    """Return the validation cost at the end, in nats; infinite if it diverged."""
    return run.end("cost")


def _mean(group: Group) -> float:
    return fmean(map(last_cost, group)) if group else math.inf


def best(groups: RunGroups, panel: str, rule: TimedRule) -> tuple[str, Group] | None:
    """Return the rate of a rule that does best, and its runs; None: not all ran."""
    begin = f"{rule.name} at "
    found = {
        curve.removeprefix(begin): group
        for curve, group in groups.panel(panel).items()
        if curve.startswith(begin)
    }
    if not {f"{rate:g}" for rate in rule.rates} <= found.keys():
        return None
    return min(found.items(), key=lambda each: _mean(each[1]))


def findings(scale: WhichPolicyScale, groups: RunGroups) -> Findings:
    """Write one row for each panel and rule, the best first, and say which rule is ahead."""
    table, verdicts = [], []
    for panel, place in scale.panels.items():
        found = {rule: chosen for rule in place.rules if (chosen := best(groups, panel, rule))}
        ends = {rule: _mean(group) for rule, (_rate, group) in found.items()}
        for rule in sorted(ends, key=lambda rule: ends[rule]):
            rate, group = found[rule]
            table.append(
                {
                    "links and workers": panel,
                    "rule": rule.name,
                    "best rate": rate,
                    "nats": f"{ends[rule]:.3f}",
                    "error %": f"{100 * fmean(run.last['error'] for run in group):.2f}",
                    "mini-batches": f"{fmean(run.last['iteration'] for run in group):,.0f}",
                    "MB": f"{fmean(run.last['bytes'] for run in group) / 1e6:,.1f}",
                    "idle": f"{fmean(float(run.result['idle']) for run in group):.0%}",
                    "mean τ": f"{fmean(run.result['mean_staleness'] for run in group):.2f}",
                }
            )
        verdicts.append(_ahead(panel, place, ends))
    return Findings(table, verdicts)


def _ahead(panel: str, place: PanelMachines, ends: Mapping[TimedRule, float]) -> Verdict:
    """Say whether a form of schedule-free is ahead of each other rule."""
    if len(ends) < len(place.rules):
        return Verdict(None, f"{panel}: {len(ends)} of {len(place.rules)} rules have been run")
    ours = min((rule for rule in ends if rule.policy == FREE.policy), key=lambda r: ends[r])
    rival = min((rule for rule in ends if rule.policy != FREE.policy), key=lambda r: ends[r])
    text = f"{panel}: {ours.name} {ends[ours]:.3f}, {rival.name} {ends[rival]:.3f} nats"
    return Verdict(ends[ours] <= ends[rival], text)


def figure(scale: WhichPolicyScale, groups: RunGroups) -> Figure:
    """Draw the cost over time, each rule at its best rate."""
    panels = []
    for panel, place in scale.panels.items():
        found = [(rule, best(groups, panel, rule)) for rule in place.rules]
        lines = [
            curve(rule.name, chosen[1], "cost", x="seconds") for rule, chosen in found if chosen
        ]
        panels.append(Panel(panel, "seconds", "nats", lines))
    return Figure("Policies after equal time, each at its best rate", panels, columns=2)


EXPERIMENT = Experiment(
    name="which-policy",
    title="Policies after equal time, on fast and slow links, with equal workers and a slow one",
    source="this project's own question",
    claim="After equal time schedule-free is ahead of every other policy: on fast links, and on"
    " slow ones with a codec and exchanges beside computing.",
    quick=QUICK,
    full=FULL,
    cases=cases,
    findings=findings,
    figure=figure,
    knobs={
        "network": ("transformer", "convnet", "perceptron"),
        "links": ("all", "fast", "slow"),
        "workers": ("all", "equal", "unequal"),
        "rules": ("policies", "settings"),
    },
    note="A cluster in virtual time: four workers, 50 ms for a mini-batch (log-normal, sigma 0.1),"
    " and for schedule-free as much more as directions take on one thread; a slow worker takes"
    " three times as long. Links of 1 Gbit/s and 0.2 ms, or 20 Mbit/s and 10 ms for each worker and"
    " none for the server. Each rule has the same seconds, on slow links twice as many. AdamW has"
    " beta2 0.95 and clip 1; its rates rise for a tenth of the time and fall as a cosine to its"
    " end, which schedule-free and fasgd do not know. Of a rule's rates, a factor of three apart,"
    " the best counts, by the runs that are reported; the range is widened until it is not at an"
    " edge. The transformer is that of one-rule (675 kB), the convnet that of softsync-cifar10"
    " (358 kB), the perceptron 784-200-10 (636 kB).",
)
