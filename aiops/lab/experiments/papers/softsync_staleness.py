"""Staleness-aware async-SGD's figure 1: which staleness n-softsync brings about."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from statistics import fmean

from aiops.lab.experiments.cluster_simulation import ClusterSimulation
from aiops.lab.experiments.experiment import Experiment, Findings, Scale, Verdict
from aiops.lab.experiments.planned_run import PlannedRun
from aiops.lab.experiments.runs import FinishedRun, Group, RunGroups, Runs
from aiops.lab.figures import Figure, Panel, Series
from aiops.sim.turns.simulation import Simulation

CLUSTER = "cluster"
"""Learners compute for nearly constant times, and their gradients come when they come."""


@dataclass(frozen=True, kw_only=True)
class StalenessScale(Scale):
    """The orders of the learners, which are the base's clients.

    Attributes
    ----------
    orders
        Selection rules, or a cluster in virtual time, by what figures call them.
    """

    orders: tuple[tuple[str, str], ...] = (
        ("at their own times", CLUSTER),
        ("in turn", "round-robin"),
        ("in rounds", "softmax:add=-20"),
        ("at random", "uniform"),
    )

    @property
    def splits(self) -> tuple[int, ...]:
        """The values of n."""
        learners = self.base.clients
        return 1, learners // 2, learners


_BASE = Simulation(
    policy="softsync", lr=0.02, dataset="digits", hidden=8, clients=30, batch_size=4, samples=1
)
QUICK = StalenessScale(base=replace(_BASE, iterations=4000), seeds=2)
FULL = StalenessScale(base=replace(_BASE, iterations=100_000), seeds=3)

_NEAR = 0.1  # of n: a mean staleness as close as this is n
_RARE = 1e-4
_FEW = 4  # bars beyond would be too thin


def cases(scale: StalenessScale, runs: Runs) -> Iterator[PlannedRun]:
    """Yield each n under each order."""
    for n in scale.splits:
        for label, rule in scale.orders:
            for seed in range(scale.seeds):
                work = replace(scale.base, set=(f"n={n}",), seed=seed)
                ordered = (
                    ClusterSimulation(work) if rule == CLUSTER else replace(work, selection=rule)
                )
                yield PlannedRun(title(n), label, seed, ordered)


def title(n: int) -> str:
    """Return a panel's name."""
    return f"{n}-softsync"


def staleness(run: FinishedRun) -> dict[int, float]:
    """Return what share of a run's gradients had which staleness."""
    counts = {int(tau): count for tau, count in run.result["staleness"].items()}
    total = sum(counts.values())
    return {tau: count / total for tau, count in sorted(counts.items())}


def mean(runs: Group) -> float:
    """Return the mean staleness."""
    return fmean(sum(tau * share for tau, share in staleness(run).items()) for run in runs)


def beyond(runs: Group, limit: int) -> float:
    """Return the share of gradients that are staler than a limit."""
    return fmean(sum(p for tau, p in staleness(run).items() if tau > limit) for run in runs)


def findings(scale: StalenessScale, found: RunGroups) -> Findings:
    """Compare the means with n, and see how often 2n is exceeded."""
    table = [
        {
            "protocol": panel,
            "clients come": label,
            "mean τ": f"{mean(group):.2f}",
            "P(τ > 2n)": f"{beyond(group, 2 * _split(panel)):.2g}",
            "largest τ": max(max(staleness(run)) for run in group),
        }
        for (panel, label), group in found.items()
    ]
    verdicts = [_verdict(scale, found, label) for label, _rule in scale.orders]
    return Findings(table, verdicts)


def _split(panel: str) -> int:
    return int(panel.partition("-")[0])


def _verdict(scale: StalenessScale, found: RunGroups, label: str) -> Verdict:
    means, rare, parts = [], [], []
    for n in scale.splits:
        group = found[title(n), label]
        if not group:
            return Verdict(None, f"clients {label}: not all has been run")
        means.append(abs(mean(group) - n) <= _NEAR * n)
        rare.append(beyond(group, 2 * n) < _RARE)
        parts.append(f"{mean(group):.2f} for n = {n} (P {beyond(group, 2 * n):.2g})")
    return Verdict(all(means) and all(rare), f"clients {label}: mean τ " + ", ".join(parts))


def samples(run: FinishedRun) -> list[dict[str, float]]:
    """Return the distribution, for the table of curves."""
    return [{"staleness": tau, "share": share} for tau, share in staleness(run).items()]


def figure(scale: StalenessScale, found: RunGroups) -> Figure:
    """Draw the distributions."""
    panels = []
    for n in scale.splits:
        lines = []
        for label, _rule in scale.orders:
            group = found[title(n), label]
            taus = list(range(2 * n + 2))
            ys = [[100 * staleness(run).get(tau, math.nan) for tau in taus] for run in group]
            lines.append(Series(label, taus, ys, kind="bars" if n < _FEW else "line"))
        panels.append(Panel(title(n), "staleness τ", "gradients (%)", lines, "y", bottom=0.01))
    return Figure(f"Staleness with {scale.base.clients} learners", panels, columns=3)


EXPERIMENT = Experiment(
    name="softsync-staleness",
    title="Which staleness n-softsync brings about, with 30 learners",
    source="Zhang, Gupta, Lian & Liu, Staleness-aware async-SGD (2015), figure 1",
    claim="The mean staleness is close to n, and τ exceeds 2n with a probability below 0.0001.",
    quick=QUICK,
    full=FULL,
    cases=cases,
    findings=findings,
    figure=figure,
    samples=samples,
    note="The paper's learners run at similar speed. At their own times: a cluster in virtual time,"
    " whose mini-batches take 0.1 s, give or take 5 %; beside it orders of turns, FRED's uniform"
    " one among them. What is trained does not matter: digits.",
)
