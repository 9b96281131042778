"""All policies on one task and one cluster: what each of them gives, and what it costs."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import zip_longest
from statistics import fmean

from aiops.algorithms import BUILT_IN
from aiops.lab.experiments.cluster_simulation import StragglerSimulation, mean_reached, reached
from aiops.lab.experiments.experiment import Experiment, Findings, Scale, Verdict
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

BARRIERS = ("diloco", "hardsync", "no-delay")
"""Whose merges wait for every worker."""

SYNCHRONOUS = "hardsync"


@dataclass(frozen=True, kw_only=True)
class AllPoliciesScale(Scale):
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

_PANEL = "one straggler"
_WAITING, _FREE = "with a barrier", "without a barrier"


def cases(scale: AllPoliciesScale, runs: Runs) -> Iterator[PlannedRun]:
    """Yield each policy."""
    links = StarTopology(worker=scale.link, server=scale.link, latency=0.0002)
    for policy in sorted(BUILT_IN):
        for seed in range(scale.seeds):
            task = replace(scale.base, seed=seed)
            settings = SETTINGS.get(policy, ())
            yield PlannedRun(
                _PANEL,
                policy,
                seed,
                StragglerSimulation(task, policy, settings, scale.times, links=links),
            )


def ranked(scale: AllPoliciesScale, groups: RunGroups) -> dict[str, Group]:
    """Return the runs of each policy: sorted by when they reach the target, then by error."""
    found = groups.panel(_PANEL)

    def place(policy: str) -> tuple[float, float]:
        group = found[policy]
        return mean_reached(group, scale.target), fmean(run.last["error"] for run in group)

    return {policy: found[policy] for policy in sorted(found, key=place)}


def _name(policy: str) -> str:
    return " ".join((policy, *SETTINGS.get(policy, ())))


def _mean(group: Group, name: str) -> float:
    return fmean(float(run.result[name]) for run in group)


def findings(scale: AllPoliciesScale, groups: RunGroups) -> Findings:
    """Write one row for each policy, and compare synchronous SGD with the others."""
    found = ranked(scale, groups)
    goal = f"seconds to {100 * scale.target:g} %"
    table = []
    for policy, group in found.items():
        first = mean_reached(group, scale.target)
        table.append(
            {
                "policy": _name(policy),
                "error %": percents([run.last["error"] for run in group]),
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
    first = {policy: mean_reached(group, scale.target) for policy, group in found.items()}
    ahead = [policy for policy, when in first.items() if when < first[SYNCHRONOUS]]
    never = [policy for policy, when in first.items() if math.isinf(when)]
    text = f"{len(ahead)} of {len(first) - 1} others reach {100 * scale.target:g} % before"
    text += f" {SYNCHRONOUS} ({first[SYNCHRONOUS]:.1f} s)"
    text += f"; first is {next(iter(first))} ({min(first.values()):.1f} s)"
    if never:
        text += f"; {', '.join(never)} did not reach it"
    if math.isinf(min(first.values())):
        return Verdict(None, f"no policy reached {100 * scale.target:g} %")
    return Verdict(len(ahead) > (len(first) - 1) / 2, text)


def figure(scale: AllPoliciesScale, groups: RunGroups) -> Figure:
    """Draw what each policy gives and costs, a row for each; the best of the table is on top."""
    found = ranked(scale, groups)
    names = [_name(policy) for policy in found]

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
            f"Time to {100 * scale.target:g} %",
            "seconds",
            lambda run: reached(run, scale.target),
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
    note="A cluster in virtual time: eight workers, of which one is three times slower; log-normal"
    " times of 50 ms (sigma 0.25) for a mini-batch; 1 Gbit/s for each worker and for the server,"
    " which all share. On digits, whose model is smaller, links are slower in proportion. Policies"
    " have their defaults, but for the settings in the table; they were chosen for MNIST and four"
    " workers, and are not tuned here. The error of `average` is that of the mean of the workers'"
    " models; a byte between two of them is counted once.",
)
