"""FASGD against SASGD, panel by panel, under three protocols for their learning rates."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from statistics import fmean
from typing import Any

from aiops.lab.experiments.curves import curve
from aiops.lab.experiments.execution import INITIAL, initialized
from aiops.lab.experiments.experiment import Findings, Scale, Verdict
from aiops.lab.experiments.planned_run import PlannedRun
from aiops.lab.experiments.rate_search import ChosenRates, RateSearch, search_rates
from aiops.lab.experiments.runs import Group, RunGroups, Runs
from aiops.lab.experiments.seed_statistics import AHEAD, BEHIND, compare, percents, tails
from aiops.lab.figures import Figure, Panel

POLICIES = ("fasgd", "sasgd")
PRINTED = {"fasgd": 0.005, "sasgd": 0.04}
"""The learning rates in the paper."""

PROTOCOLS = {
    "paper": "the paper's rates, 0.005 and 0.04, and the initial weights of FRED's code, N(0, 1)",
    "printed": "the paper's rates from He's initial weights",
    "fair": "each policy's rate chosen for each panel, from He's initial weights",
}
KNOBS = {
    "initial": INITIAL,
    "sasgd": ("inverse", "inverse-plus-one"),
    "order": ("random", "sequential"),
    "rates": ("both", "printed", "chosen"),
}

_POOL_SAMPLES = 20


@dataclass(frozen=True, kw_only=True)
class PolicyComparison(Scale):
    """The panels, and the candidates from which the learning rates are chosen.

    Attributes
    ----------
    panels
        λ and µ of each.
    pool
        Of learning rates.
    """

    panels: tuple[tuple[int, int], ...]
    pool: RateSearch

    @property
    def named(self) -> dict[str, tuple[int, int]]:
        """The panels by their titles."""
        return {f"λ = {clients:,}, µ = {batch}": (clients, batch) for clients, batch in self.panels}

    @property
    def protocols(self) -> Mapping[str, str]:
        """The protocols that are followed: all, or those with printed or chosen rates alone."""
        rates = self.knobs.get("rates", "both")
        left_out = {"printed": {"fair"}, "chosen": {"paper", "printed"}}.get(rates, set())
        return {name: text for name, text in PROTOCOLS.items() if name not in left_out}


def cases(scale: PolicyComparison, runs: Runs) -> Iterator[PlannedRun]:
    """Yield the runs at the printed rates and those of the pools; then those at chosen rates."""
    choices = {}
    for policy in POLICIES:
        for protocol in scale.protocols:
            if protocol == "fair":
                continue
            rates = dict.fromkeys(scale.named, PRINTED[policy])
            yield from _reported(scale, policy, protocol, rates)
        if "fair" not in scale.protocols:
            continue
        make = partial(_candidate, scale, policy)
        pool, choices[policy] = search_rates(scale.pool, policy, list(scale.named), make, runs)
        yield from pool
    for policy, choice in choices.items():
        if choice is not None:
            yield from _reported(scale, policy, "fair", choice.panels)


def _reported(
    scale: PolicyComparison, policy: str, protocol: str, rates: Mapping[str, float]
) -> Iterator[PlannedRun]:
    for panel, rate in rates.items():
        for seed in range(scale.seeds):
            yield _case(scale, policy, panel, rate, seed, protocol)


def _candidate(
    scale: PolicyComparison, policy: str, panel: str, rate: float, share: float
) -> PlannedRun:
    base = scale.base
    short = replace(base, iterations=max(1, round(share * base.iterations)), samples=_POOL_SAMPLES)
    name = f"rate {rate:g}, {share:.0%} of the iterations"
    case = _case(replace(scale, base=short), policy, panel, rate, scale.pool.seed, name)
    return replace(case, role="pool")


def _case(
    scale: PolicyComparison, policy: str, panel: str, rate: float, seed: int, kind: str
) -> PlannedRun:
    clients, batch = scale.named[panel]
    knobs = scale.knobs
    other = policy == "sasgd" and knobs.get("sasgd", "inverse") != "inverse"
    simulation = replace(
        scale.base,
        policy=policy,
        lr=rate,
        set=(f"modulate={knobs['sasgd']}",) if other else (),
        clients=clients,
        batch_size=batch,
        order=knobs.get("order", "random"),
        seed=seed,
    )
    initial = "unit" if kind == "paper" else knobs.get("initial", "he")
    return PlannedRun(panel, f"{policy}, {kind}", seed, initialized(simulation, initial))


def seeds(found: RunGroups, panel: str, policy: str, protocol: str) -> Group:
    """Return the runs of one curve."""
    return found[panel, f"{policy}, {protocol}"]


def both_errors(found: RunGroups, panel: str, protocol: str) -> tuple[list[float], list[float]]:
    """Return FASGD's and SASGD's errors in a panel."""
    ours, theirs = (tails(seeds(found, panel, policy, protocol)) for policy in POLICIES)
    return ours, theirs


def order(found: RunGroups, panel: str, protocol: str) -> str | None:
    """Say whether FASGD is ahead, behind or level; None: not both have been run."""
    ours, theirs = both_errors(found, panel, protocol)
    return compare(ours, theirs) if ours and theirs else None


def findings(scale: PolicyComparison, found: RunGroups) -> Findings:
    """Count the panels in which FASGD is ahead, under each protocol."""
    table = []
    for protocol in scale.protocols:
        for panel in scale.named:
            row = {"rates": protocol, "panel": panel}
            for policy in POLICIES:
                group = seeds(found, panel, policy, protocol)
                lr = f"{group[0].case.simulation.lr:g}" if group else "–"
                row |= {f"{policy} rate": lr, f"{policy} error %": percents(tails(group))}
            table.append({**row, "fasgd is": order(found, panel, protocol) or "–"})
    verdicts = [order_verdict(scale, found, protocol) for protocol in scale.protocols]
    return Findings(table, verdicts, robustness(scale, found.runs))


def order_verdict(scale: PolicyComparison, found: RunGroups, protocol: str) -> Verdict:
    """Say whether FASGD is ahead in all panels, under one protocol."""
    orders = {panel: order(found, panel, protocol) for panel in scale.named}
    ahead = [panel for panel, place in orders.items() if place == AHEAD]
    behind = [panel for panel, place in orders.items() if place == BEHIND]
    text = f"{PROTOCOLS[protocol]}: FASGD is ahead in {len(ahead)} of {len(orders)} panels"
    if behind:
        text += f", behind at {' and '.join(behind)}"
    if None in orders.values():
        return Verdict(None, f"{text}; not all have been run")
    if behind:
        return Verdict(False, text)
    if len(ahead) == len(orders):
        return Verdict(True, text)
    return Verdict(None, f"{text}, and in the others the seeds' ranges overlap")


def robustness(scale: PolicyComparison, runs: Runs) -> dict[str, Any]:
    """Return how far the panels' best rates differ, and what one rate for all of them costs."""
    found: dict[str, Any] = {}
    for policy in POLICIES if "fair" in scale.protocols else ():
        make = partial(_candidate, scale, policy)
        _cases, choice = search_rates(scale.pool, policy, list(scale.named), make, runs)
        if choice is None:
            continue
        candidates = scale.pool.of(policy)
        edges = {candidates[0], candidates[-1]}
        found[policy] = {
            "once": choice.once,
            "fair": choice.panels,
            "at the pool's edge": [p for p, lr in choice.panels.items() if lr in edges],
            "best rates differ by a factor of": round(choice.spread, 2),
            "points lost by one rate for all": _regret(choice),
        }
    return found


def _regret(choice: ChosenRates) -> float | None:
    lost = [choice.errors[p, choice.once] - choice.errors[p, lr] for p, lr in choice.panels.items()]
    return round(100 * fmean(lost), 3) if all(map(math.isfinite, lost)) else None


def figure(title: str, scale: PolicyComparison, found: RunGroups) -> Figure:
    """Return a row of panels for each protocol."""
    panels = []
    for protocol in scale.protocols:
        for panel in scale.named:
            groups = {policy: seeds(found, panel, policy, protocol) for policy in POLICIES}
            lines = [curve(p.upper(), group, "error", times=100) for p, group in groups.items()]
            rates = [f"{group[0].case.simulation.lr:g}" for group in groups.values() if group]
            heading = f"{panel}\n{protocol}: " + " and ".join(rates)
            panels.append(Panel(heading, "iterations", "validation error (%)", lines, log="y"))
    return Figure(title, panels, columns=len(scale.panels))
