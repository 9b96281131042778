"""The table, the verdicts and the figure of `one_rule`."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

from aiops.lab.experiments.curves import across
from aiops.lab.experiments.experiment import Verdict
from aiops.lab.experiments.papers.one_rule_rivals import (
    BARRIER,
    OURS,
    PARTS,
    RIVALS,
    TUNED,
    Contender,
)
from aiops.lab.experiments.papers.one_rule_tasks import LearnedTask, Measure
from aiops.lab.experiments.runs import Group
from aiops.lab.experiments.seed_statistics import compare
from aiops.lab.figures import Figure, Panel, Series

_FAMILIES: Mapping[str, tuple[str, ...]] = {
    "asgd, its best": ("asgd",),
    "hardsync, its best": ("hardsync",),
    "sasgd, fasgd, the better": ("sasgd", "fasgd"),
}
"""Lines of the figure: each has the best of its rules."""


@dataclass(frozen=True)
class Ran:
    """The reported runs of a rule with a number of workers, at the rate that was chosen.

    Attributes
    ----------
    rate
        The rate.
    tried
        All rates that were tried.
    group
        The finished runs, one or more.
    """

    rate: float
    tried: Sequence[float]
    group: Group

    @property
    def rate_text(self) -> str:
        """The rate, and whether it is at an edge of those tried: a better one may lie beyond."""
        edge = {min(self.tried): " (the least)", max(self.tried): " (the greatest)"}
        return f"{self.rate:g}{edge.get(self.rate, '') if len(self.tried) > 1 else ''}"


@dataclass(frozen=True)
class Ends:
    """The ends of all runs: what the findings are made of.

    Attributes
    ----------
    task
        What was learnt.
    rules
        By which.
    workers
        The numbers of workers.
    ran
        The runs by number of workers and rule's name, those that are finished.
    """

    task: LearnedTask
    rules: Sequence[Contender]
    workers: Sequence[int]
    ran: Mapping[tuple[int, str], Ran]

    @property
    def measure(self) -> Measure:
        """The task's measure."""
        return self.task.measure

    def of(self, workers: int, rule: Contender) -> list[float]:
        """Return the ends of a rule, by seed; none: it has not run."""
        found = self.ran.get((workers, rule.name))
        return [] if found is None else [self.measure.of(run) for run in found.group]

    def mean(self, workers: int, rule: Contender) -> float:
        """Return the mean of them; infinite if it has not run, or diverged."""
        return fmean(self.of(workers, rule) or [math.inf])

    def best(self, workers: int, rules: Iterable[Contender]) -> Contender:
        """Return the rule whose mean is least."""
        return min(rules, key=lambda rule: self.mean(workers, rule))

    def complete(self) -> bool:
        """Return whether all rules have run with all numbers of workers."""
        wanted = {(n, rule.name) for n in self.workers for rule in self.rules if rule.runs_with(n)}
        return wanted <= self.ran.keys()

    def text(self, value: float) -> str:
        """Return a figure as it is printed."""
        return f"{value:.3f}" if math.isfinite(value) else "diverged"


def table(ends: Ends) -> list[dict[str, str]]:
    """Return a row for each number of workers and rule."""
    rows = []
    for workers in ends.workers:
        for rule in ends.rules:
            found = ends.ran.get((workers, rule.name))
            if found is not None:
                rows.append(_row(ends, workers, rule, found))
    return rows


def _row(ends: Ends, workers: int, rule: Contender, found: Ran) -> dict[str, str]:
    """Return a rule's row; beside ours it is behind if its figure is greater for all seeds."""
    values, ours, text = ends.of(workers, rule), ends.of(workers, OURS), ends.text
    behind = ends.mean(workers, rule) - ends.mean(workers, OURS)
    staleness = fmean(run.result.get("mean_staleness", math.nan) for run in found.group)
    return {
        "workers": str(workers),
        "µ": str(ends.task.batch_size(workers)),
        "rule": rule.name,
        "rate": found.rate_text,
        ends.measure.unit: text(fmean(values)),
        "of the seeds": f"{text(min(values))} to {text(max(values))}",
        "minus ours": f"{behind:+.3f}" if math.isfinite(behind) else "–",
        "beside ours": "–" if rule is OURS else compare(values, ours),
        "mean τ": f"{staleness:.2f}",
    }


def verdicts(ends: Ends, *, unequal: bool) -> list[Verdict]:
    """Say where ours is ahead, level or behind."""
    if not ends.complete():
        return [Verdict(None, "not all has been run")]
    unaware = [rule for rule in RIVALS if not rule.cosine]
    found = [
        _beside(ends, "the best rival", RIVALS),
        _beside(ends, "the best rival that does not know the horizon either", unaware),
        _beside(ends, "itself with the best of four rates", [TUNED]),
        _beside(ends, "itself behind a barrier, with the best of four rates for that", [BARRIER]),
    ]
    priced = not (unequal or ends.task.product) and len(ends.workers) > 1
    return [*found, _price(ends)] if priced else found


def _beside(ends: Ends, title: str, rules: Sequence[Contender]) -> Verdict:
    """Say whether ours is not behind the best of some rules, for every number of workers."""
    texts, behind = list[str](), False
    for workers in ends.workers:
        running = [rule for rule in rules if rule.runs_with(workers)]
        if not running:
            continue
        rival = ends.best(workers, running)
        ours, theirs = ends.mean(workers, OURS), ends.mean(workers, rival)
        behind = behind or not ours <= theirs + ends.measure.level
        name = f"{rival.name} " if len(rules) > 1 else ""
        texts.append(f"λ = {workers}: {ends.text(ours)}, {name}{ends.text(theirs)}")
    return Verdict(not behind, f"{ends.measure.unit}, ours and {title}: {'; '.join(texts)}")


def _price(ends: Ends) -> Verdict:
    """Say whether staleness costs ours less than the best asgd: one worker is the measure."""
    first, *others = ends.workers
    alone = [rule for rule in RIVALS if rule.policy == "hardsync"]  # with one worker it is asgd
    stale = [rule for rule in RIVALS if rule.policy == "asgd"]
    start = ends.mean(first, OURS), ends.mean(first, ends.best(first, alone))
    lost = {
        workers: (
            ends.mean(workers, OURS) - start[0],
            ends.mean(workers, ends.best(workers, stale)) - start[1],
        )
        for workers in others
    }
    less = all(ours <= theirs + ends.measure.level for ours, theirs in lost.values())
    text = ", ".join(
        f"{ours:+.3f} and {theirs:+.3f} with {workers}" for workers, (ours, theirs) in lost.items()
    )
    return Verdict(
        less, f"beside {first} worker ours and the best asgd lose {text} ({ends.measure.unit})"
    )


def figure(ends: Ends, title: str) -> Figure:
    """Draw the end over the number of workers."""
    lines = [_line(ends, rule.name, [rule]) for rule in (OURS, *PARTS)]
    for label, policies in _FAMILIES.items():
        lines.append(_line(ends, label, [rule for rule in RIVALS if rule.policy in policies]))
    panel = Panel("Each at the best of its rates", "workers λ", ends.measure.unit, lines, "x")
    return Figure(title, [panel], columns=1)


def _line(ends: Ends, label: str, rules: Sequence[Contender]) -> Series:
    """Return the best of some rules over the numbers of workers with which one of them has run."""
    found = {n: ends.ran.get((n, ends.best(n, rules).name)) for n in ends.workers}
    ran = {n: each.group for n, each in found.items() if each is not None}
    return across(label, [float(n) for n in ran], list(ran.values()), ends.measure.of)
