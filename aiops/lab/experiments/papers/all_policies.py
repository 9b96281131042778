"""All policies on one task and one cluster: what each of them gives, and what it costs."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import zip_longest
from statistics import fmean
from typing import Self

from aiops.algorithms import BUILT_IN
from aiops.lab.experiments.cluster_simulation import StragglerSimulation, mean_reached, reached
from aiops.lab.experiments.execution import TransformerStraggler
from aiops.lab.experiments.experiment import Experiment, Findings, Verdict
from aiops.lab.experiments.network_scale import ADAMW, NETWORK, NetworkScale
from aiops.lab.experiments.planned_run import PlannedRun
from aiops.lab.experiments.runs import FinishedRun, Group, RunGroups, Runs
from aiops.lab.experiments.seed_statistics import percents
from aiops.lab.figures import Figure, Panel, Series
from aiops.sim.cluster.spec import StarTopology
from aiops.sim.turns.simulation import Simulation

SETTINGS: Mapping[str, tuple[str, ...]] = {
    "rennala": ("b=8",),
    "ringmaster": ("r=16",),
    "softsync": ("n=2",),
}
"""What a policy is given beside its defaults."""

_STALE = ("lr=0.0003", "lr=0.001", "lr=0.003")
_PLAIN = ("lr=0.01", "lr=0.03", "lr=0.1")

TRANSFORMER: Mapping[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    **dict.fromkeys(("asgd", "ringmaster", "sasgd", "softsync", "ssp"), (ADAMW, _STALE)),
    **dict.fromkeys(("downpour", "exponential"), (ADAMW, _STALE)),
    **dict.fromkeys(("hardsync", "rennala"), (ADAMW, ("lr=0.001", "lr=0.003", "lr=0.01"))),
    **dict.fromkeys(("average", "dcasgd", "easgd", "eamsgd"), ((), _PLAIN)),
    **dict.fromkeys(("gap-aware", "no-delay"), ((), _PLAIN)),
    "diloco": (
        ("inner_beta2=0.95", "inner_clip=1"),
        ("inner_lr=0.001", "inner_lr=0.003", "inner_lr=0.01"),
    ),
    "fasgd": (("relative=0.01",), ("lr=0.001", "lr=0.003")),
    "fedbuff": (("inner=adamw",), ("inner_lr=0.001", "inner_lr=0.003", "inner_lr=0.01")),
    "schedule-free": ((), ("lr=0.008",)),
}
"""What a policy is given for the transformer: settings, and the rates of which the best counts."""

BARRIERS = ("diloco", "hardsync", "no-delay")
"""Whose merges wait for every worker."""

SYNCHRONOUS = "hardsync"


@dataclass(frozen=True, kw_only=True)
class AllPoliciesScale(NetworkScale):
    """On which machines.

    Attributes
    ----------
    link
        What the server's link carries each way, and each worker's.
    times
        How many times slower one worker is.
    target
        A test error that one waits for.
    """

    link: str
    times: float = 3.0
    target: float

    def of_transformer(self) -> Self:
        """Return the scale with the transformer's own mini-batches, of which there are few."""
        base = replace(self.base, dataset="digits", batch_size=16, iterations=600, samples=12)
        return replace(self, base=base)

    @property
    def goal(self) -> float:
        """The target for the network that is trained."""
        return _TRANSFORMER_TARGET if self.transformer else self.target


QUICK = AllPoliciesScale(
    base=Simulation(
        dataset="digits", hidden=32, clients=8, batch_size=16, iterations=2400, samples=24
    ),
    seeds=2,
    link="15Mbit/s",
    target=0.10,
)
FULL = AllPoliciesScale(
    base=Simulation(dataset="mnist", clients=8, batch_size=32, iterations=40_000, samples=100),
    seeds=3,
    link="1Gbit/s",
    target=0.03,
)

_TRANSFORMER_TARGET = 0.65  # of the next bytes are guessed wrong
_PANEL = "one straggler"
_WAITING, _FREE = "with a barrier", "without a barrier"


def cases(scale: AllPoliciesScale, runs: Runs) -> Iterator[PlannedRun]:
    """Yield each policy, for the transformer at each of its rates."""
    links = StarTopology(worker=scale.link, server=scale.link, latency=0.0002)
    for policy in sorted(BUILT_IN):
        for rate in TRANSFORMER[policy][1] if scale.transformer else ("",):
            for seed in range(scale.seeds):
                task = replace(scale.base, seed=seed)
                settings, kind = SETTINGS.get(policy, ()), StragglerSimulation
                if scale.transformer:
                    kind = TransformerStraggler
                    settings = (*settings, *TRANSFORMER[policy][0], rate)
                work = kind(task, policy, settings, scale.times, links=links)
                yield PlannedRun(_PANEL, f"{policy} {rate}".strip(), seed, work)


def ranked(scale: AllPoliciesScale, groups: RunGroups) -> dict[str, Group]:
    """Return each policy's runs at its best rate, by when they reach the goal, then by error."""
    best: dict[str, Group] = {}

    def place(group: Group) -> tuple[float, float]:
        return mean_reached(group, scale.goal), fmean(run.last["error"] for run in group)

    for curve, group in groups.panel(_PANEL).items():
        policy = curve.partition(" ")[0]
        if policy not in best or _mean_cost(group) < _mean_cost(best[policy]):
            best[policy] = group
    return dict(sorted(best.items(), key=lambda each: place(each[1])))


def _mean_cost(group: Group) -> float:
    return fmean(run.end("cost") for run in group)


def _name(policy: str, group: Group) -> str:
    """Return a policy with its settings, and its rate where several were tried."""
    rate = group[0].case.curve.removeprefix(policy).strip()
    return " ".join(filter(None, (policy, *SETTINGS.get(policy, ()), rate)))


def _mean(group: Group, name: str) -> float:
    return fmean(float(run.result[name]) for run in group)


def findings(scale: AllPoliciesScale, groups: RunGroups) -> Findings:
    """Write one row for each policy, and compare synchronous SGD with the others."""
    found = ranked(scale, groups)
    goal = f"seconds to {100 * scale.goal:g} %"
    table = []
    for policy, group in found.items():
        first = mean_reached(group, scale.goal)
        table.append(
            {
                "policy": _name(policy, group),
                "error %": percents([run.last["error"] for run in group]),
                "nats": f"{_mean_cost(group):.3f}",
                goal: f"{first:.1f}" if math.isfinite(first) else "–",
                "seconds in all": f"{_mean(group, 'seconds'):.1f}",
                "MB": f"{fmean(run.last['bytes'] for run in group) / 1e6:,.1f}",
                "idle": f"{_mean(group, 'idle'):.1%}",
                "mean τ": f"{_mean(group, 'mean_staleness'):.2f}",
            }
        )
    return Findings(table, [_sooner(found), _goal(scale, found)])


def _sooner(found: Mapping[str, Group]) -> Verdict:
    """Say whether synchronous SGD takes longest for the same number of gradients."""
    if len(found) < len(BUILT_IN):
        return Verdict(None, f"{len(found)} of {len(BUILT_IN)} policies have been run")
    seconds = {policy: _mean(group, "seconds") for policy, group in found.items()}
    free = {policy: took for policy, took in seconds.items() if policy not in BARRIERS}
    slowest = max(free, key=lambda policy: free[policy])
    text = f"for the same gradients {SYNCHRONOUS} takes {seconds[SYNCHRONOUS]:.1f} s, those without"
    text += f" a barrier {min(free.values()):.1f} to {free[slowest]:.1f} s ({slowest})"
    return Verdict(seconds[SYNCHRONOUS] > free[slowest], text)


def _goal(scale: AllPoliciesScale, found: Mapping[str, Group]) -> Verdict:
    """Say how many policies reach the target before synchronous SGD does."""
    if len(found) < len(BUILT_IN):
        return Verdict(None, "which policy reaches the target first is not known yet")
    first = {policy: mean_reached(group, scale.goal) for policy, group in found.items()}
    ahead = [policy for policy, when in first.items() if when < first[SYNCHRONOUS]]
    never = [policy for policy, when in first.items() if math.isinf(when)]
    text = f"{len(ahead)} of {len(first) - 1} others reach {100 * scale.goal:g} % before"
    text += f" {SYNCHRONOUS} ({first[SYNCHRONOUS]:.1f} s)"
    text += f"; first is {next(iter(first))} ({min(first.values()):.1f} s)"
    if never:
        text += f"; {', '.join(never)} did not reach it"
    if math.isinf(min(first.values())):
        return Verdict(None, f"no policy reached {100 * scale.goal:g} %")
    return Verdict(len(ahead) > (len(first) - 1) / 2, text)


def figure(scale: AllPoliciesScale, groups: RunGroups) -> Figure:
    """Draw what each policy gives and costs, a row for each; the best of the table is on top."""
    found = ranked(scale, groups)
    names = [_name(policy, group) for policy, group in found.items()]

    def panel(
        title: str,
        xlabel: str,
        of: Callable[[FinishedRun], float],
        log: str = "",
        left: float | None = None,
    ) -> Panel:
        lines = []
        for label, waits in ((_FREE, False), (_WAITING, True)):
            rows = [row for row, policy in enumerate(found) if (policy in BARRIERS) is waits]
            values = [[of(run) for run in group] for group in found.values()]
            seeds = zip_longest(*values, fillvalue=math.nan)
            lines.append(Series(label, rows, [[y[row] for row in rows] for y in seeds], "rows"))
        return Panel(title, xlabel, "", lines, log, bottom=left, ticks=names)

    panels = [
        panel(
            f"Time to {100 * scale.goal:g} %",
            "seconds",
            lambda run: reached(run, scale.goal),
            log="x",
        ),
        panel("Last error", "% of the test", lambda run: 100 * run.last["error"]),
        panel("Time in all", "seconds", lambda run: float(run.result["seconds"]), left=0.0),
        panel("Traffic", "GB", lambda run: run.last["bytes"] / 1e9, log="x"),
        panel("Idle", "% of the time", lambda run: 100 * float(run.result["idle"]), left=0.0),
    ]
    title = "All policies beside a straggler (mean, and range of the seeds)"
    return Figure(title, panels, columns=len(panels))


EXPERIMENT = Experiment(
    name="everything",
    title="All policies on one task and one cluster: error, time, bytes, idle time",
    source="ElasticDL, Zhang et al. (2015) and Bagua on stragglers",
    claim="Beside a straggler asynchronous policies need less time than synchronous SGD, for the"
    " same number of gradients and to a given error.",
    quick=QUICK,
    full=FULL,
    cases=cases,
    findings=findings,
    figure=figure,
    knobs=NETWORK,
    note="A cluster in virtual time: eight workers, of which one is three times slower; log-normal"
    " times of 50 ms (sigma 0.25) for a mini-batch; 1 Gbit/s for each worker and for the server,"
    " which all share. On digits, whose model is smaller, links are slower in proportion. Policies"
    " have their defaults, but for the settings in the table; they were chosen for MNIST and four"
    " workers, and are not tuned here. The error of `average` is that of the mean of the workers'"
    " models; a byte between two of them is counted once. --with network=transformer trains that"
    " of one-rule (600 mini-batches of 16 windows in all), with AdamW where a policy admits it"
    " (beta2 0.95, clip 1), and each policy's best of three rates a factor of three apart counts.",
)
