"""Hostile workers, with filters and without: which attacks they keep out, and which not."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import product
from statistics import fmean
from typing import Self

from aiops.lab.experiments.curves import curve
from aiops.lab.experiments.experiment import Experiment, Findings, Verdict
from aiops.lab.experiments.network_scale import ADAMW, NETWORK, ComparedFigure, NetworkScale
from aiops.lab.experiments.planned_run import PlannedRun
from aiops.lab.experiments.poisoned_run import ATTACKS, DIVERGED, PoisonedRun
from aiops.lab.experiments.runs import Group, RunGroups, Runs
from aiops.lab.figures import Figure, Panel
from aiops.sim.turns.simulation import Simulation

POLICIES: Mapping[str, tuple[float, tuple[str, ...]]] = {
    "asgd": (0.05, ()),
    "fasgd": (0.005, ()),
    "softsync": (0.1, ()),
    "hardsync": (0.2, ()),
    "fedbuff": (1.0, ()),
}
"""Learning rates and settings."""

TRANSFORMER_POLICIES: Mapping[str, tuple[float, tuple[str, ...]]] = {
    "schedule-free": (0.008, ()),
    "asgd": (0.0003, ADAMW),
    "hardsync": (0.003, ADAMW),
}
"""Those with which a transformer is trained, at their best rates in ``everything``."""

FILTER = "robust"
TRIMMED = "trim"
"""No filter, and hardsync's setting: a step has a gradient of each worker, so the share holds."""

_TRIM = 1 / 3


@dataclass(frozen=True, kw_only=True)
class PoisonScale(NetworkScale):
    """The shares of hostile workers that are tried, and the attacks beside the policies' table."""

    shares: tuple[float, ...]

    def of_transformer(self) -> Self:
        """Return the scale with the transformer's own mini-batches."""
        return replace(self, base=replace(self.base, dataset="help", iterations=600, samples=5))

    @property
    def policies(self) -> Mapping[str, tuple[float, tuple[str, ...]]]:
        """The policies, with their rates and settings."""
        return TRANSFORMER_POLICIES if self.transformer else POLICIES

    @property
    def harmless(self) -> float:
        """By how much what is measured may be worse than without an attack."""
        return 0.1 if self.transformer else 1.0  # nats, or points


_BASE = Simulation(
    dataset="digits", hidden=32, policy="asgd", clients=12, iterations=3000, samples=12
)
QUICK = PoisonScale(base=_BASE, seeds=1, shares=(0.1, 0.2, 1 / 3))
FULL = PoisonScale(
    base=replace(_BASE, dataset="mnist", hidden=64, iterations=8000, samples=16),
    seeds=2,
    shares=(0.1, 0.2, 1 / 3),
)


def cases(scale: PoisonScale, runs: Runs) -> Iterator[PlannedRun]:
    """Yield each policy under each attack, with the filters and without, on both kinds of data.

    All of a seed come before those of the next, so that a part of the runs has a table, too.
    """
    for seed in range(scale.seeds):
        for policy, (lr, settings) in scale.policies.items():
            for own_data, (attack, share) in product((False, True), _attacks(scale)):
                for text in ("off",) if attack == "absent" else _defences(policy):
                    trim = (f"trim={_TRIM}",) if text == TRIMMED else ()
                    base = replace(scale.base, policy=policy, lr=lr, set=(*settings, *trim))
                    used = "off" if text == TRIMMED else text
                    work = PoisonedRun(
                        replace(base, seed=seed), attack, share, used, own_data, scale.network
                    )
                    panel = f"{policy}, {_data(own_data)}"
                    yield PlannedRun(panel, _label(attack, share, text), seed, work)


def _attacks(scale: PoisonScale) -> list[tuple[str, float]]:
    """Return the attacks, each with the shares of the workers that carry it out."""
    shares = _shares(scale)
    return [(a, share) for a in ATTACKS for share in ((0.0,) if a == "none" else shares)]


def _shares(scale: PoisonScale) -> list[float]:
    """Return the shares that the knob leaves."""
    chosen = scale.knobs.get("hostile", "all")
    return [share for share in scale.shares if chosen in ("all", f"{share:.0%}")]


def _defences(policy: str) -> tuple[str, ...]:
    return ("off", FILTER, TRIMMED) if policy == "hardsync" else ("off", FILTER)


def _data(own_data: bool) -> str:
    return "own data" if own_data else "same data"


def _label(attack: str, share: float, text: str) -> str:
    who = "no attack" if attack == "none" else f"{attack} {share:.0%}"
    return f"{who}, {text}"


def findings(scale: PoisonScale, groups: RunGroups) -> Findings:
    """Tabulate the errors in the end, over the seeds, and judge their means by attack."""
    table, worst, measure = [], dict[tuple[bool, str], list[float]](), scale.measure
    for policy, own_data in product(scale.policies, (False, True)):
        found = groups.panel(f"{policy}, {_data(own_data)}")
        errors = {label: _ends(measure, group) for label, group in found.items()}
        clean = errors.get(_label("none", 0.0, "off"), [])
        for attack, share in _attacks(scale):
            off, on = (errors.get(_label(attack, share, text), []) for text in ("off", FILTER))
            if not off or not on:
                continue
            absent = errors.get(_label("absent", share, "off"), [])
            others = [fmean(each) for each in (clean, absent) if each]
            if others:
                away = fmean(on) - max(others)
                worst.setdefault((own_data, attack), []).append(away)
            row = {"policy": policy, "data": _data(own_data), "attack": attack}
            row |= {"hostile": f"{share:.0%}", "off": measure.text(off), FILTER: measure.text(on)}
            row[TRIMMED] = measure.text(errors.get(_label(attack, share, TRIMMED), []))
            row |= {"no attack": measure.text(clean), "absent": measure.text(absent)}
            table.append(row)
    verdicts = [
        Verdict(
            max(worse) <= scale.harmless,
            f"{attack}, {_data(own_data)}: with the filters at most"
            f" {max(worse):.{measure.digits}f} {measure.apart} worse than without an attack, or"
            f" without the hostile workers; {fmean(worse):.{measure.digits}f} in the mean",
        )
        for (own_data, attack), worse in worst.items()
    ]
    return Findings(table, verdicts or [Verdict(None, "nothing has been run")])


def _ends(measure: ComparedFigure, group: Group) -> list[float]:
    return [value if value < DIVERGED else math.inf for value in measure.ends(group)]


def figure(scale: PoisonScale, groups: RunGroups) -> Figure:
    """Draw errors, or costs, on the way, at the largest share."""
    most, panels, measure = max(_shares(scale)), [], scale.measure
    bottom = None if scale.transformer else 0
    for policy in scale.policies:
        found = groups.panel(f"{policy}, same data")
        wanted = [_label("none", 0.0, "off")]
        wanted += [_label(attack, most, FILTER) for attack in ATTACKS[2:]]
        lines = [
            curve(label, found[label], measure.series, measure.times)
            for label in wanted
            if label in found
        ]
        panels.append(Panel(policy, "mini-batches", measure.title, lines, bottom=bottom))
    return Figure("Hostile workers, with --filter robust", panels, columns=3)


EXPERIMENT = Experiment(
    name="poison",
    title="Hostile workers, with --filter robust and without",
    source="Damaskinos et al., Asynchronous Byzantine machine learning (2018), on other filters",
    claim="With a third of the workers hostile, the final error is at most 1 point worse with the"
    " filter on than without an attack.",
    quick=QUICK,
    full=FULL,
    cases=cases,
    findings=findings,
    figure=figure,
    knobs={"hostile": ("all", "10%", "20%", "33%"), **NETWORK},
    note="Twelve workers take turns at random. absent: the hostile ones are not there; huge: 2e17"
    " in each element; scaled: 100 times the gradient; flipped: minus the gradient; random: noise"
    " of its norm; labels: 9 − y; colluding: one noise from all, at three times the norm. Own"
    " data: about two classes a worker. trim: a third of the values of each coordinate is left out"
    " at each end, and no filter is on. --with network=transformer trains that of one-rule, with"
    " 600 mini-batches of 8 windows in all, under three policies; own data: two pieces of the text"
    " a worker; labels: 255 − byte.",
)
