"""The declaration of an experiment: a claim, the runs that test it, and the findings."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Self

from aiops.errors import UsageError, nearest
from aiops.lab.experiments.planned_run import PlannedRun
from aiops.lab.experiments.runs import FinishedRun, RunGroups, Runs
from aiops.lab.figures import Figure
from aiops.sim.turns.simulation import Simulation

MOST_SEEDS = 1000
"""Reported runs have seeds below this one; those of pools have it."""


@dataclass(frozen=True, kw_only=True)
class Scale:
    """The size of an experiment.

    Attributes
    ----------
    base
        The simulation of which all others are variations.
    seeds
        How many runs each curve has, from seed 0 up.
    knobs
        Settings that the source leaves open, as chosen.
    """

    base: Simulation
    seeds: int = 3
    knobs: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Check the number of seeds."""
        if not 1 <= self.seeds <= MOST_SEEDS:
            raise UsageError(f"--seeds must be 1 to {MOST_SEEDS:,}, not {self.seeds:,}")

    def chosen(self, knobs: Mapping[str, str]) -> Self:
        """Return the scale with these settings; override where the base depends on them."""
        return replace(self, knobs=knobs)


@dataclass(frozen=True)
class Verdict:
    """The verdict of the runs on a claim.

    Attributes
    ----------
    agrees
        Whether the runs agree with it; None: they cannot decide it.
    text
        Why, in figures.
    """

    agrees: bool | None
    text: str

    @property
    def word(self) -> str:
        """The verdict in a word or three."""
        return {True: "agrees", False: "does not agree", None: "cannot be told"}[self.agrees]


@dataclass(frozen=True)
class Findings:
    """The findings of the runs.

    Attributes
    ----------
    table
        A row for each line of the table: its cells by their columns' names.
    verdicts
        The verdicts on the parts of the source's claim.
    numbers
        What else belongs into the summary, as JSON has it.
    """

    table: Sequence[Mapping[str, Any]]
    verdicts: Sequence[Verdict]
    numbers: Mapping[str, Any] = field(default_factory=dict)


def _curve(run: FinishedRun) -> Iterable[Mapping[str, Any]]:
    found: Iterable[Mapping[str, Any]] = run.result["curve"]
    return found


@dataclass(frozen=True, kw_only=True)
class Experiment:
    """An experiment, as it is declared.

    Attributes
    ----------
    name, title
        What it is called on the command line, and on paper.
    source
        The paper, and which of its figures.
    claim
        The source's claim, in a sentence.
    quick, full
        The two scales: one that takes less than a minute on two processors, and the paper's.
    cases
        Returns the runs, given those finished so far: all that can be known by now. It is asked
        again when these are settled, until it names no new one.
    findings, figure
        What the finished runs came to, and how they are drawn; of any part of the runs.
    samples
        A run's lines in ``curves.csv``; default: its curve.
    knobs
        Settings that the source leaves open: their values, the first of them the default.
    note
        How this reproduction differs from the source.
    """

    name: str
    title: str
    source: str
    claim: str
    quick: Scale
    full: Scale
    cases: Callable[[Any, Runs], Iterable[PlannedRun]]
    findings: Callable[[Any, RunGroups], Findings]
    figure: Callable[[Any, RunGroups], Figure]
    samples: Callable[[FinishedRun], Iterable[Mapping[str, Any]]] = _curve
    knobs: Mapping[str, Sequence[str]] = field(default_factory=dict)
    note: str = ""

    def judge(self, scale: Scale, runs: Runs) -> Findings:
        """Return what the runs so far came to."""
        return self.findings(scale, RunGroups(self.cases(scale, runs), runs))

    def draw(self, scale: Scale, runs: Runs) -> Figure:
        """Return the figure of the runs so far."""
        return self.figure(scale, RunGroups(self.cases(scale, runs), runs))

    def scale(
        self,
        *,
        full: bool,
        seeds: int | None = None,
        iterations: int | None = None,
        knobs: Sequence[str] = (),
    ) -> Scale:
        """Return the scale that a user asks for.

        Raises
        ------
        UsageError
            When there cannot be such a one.
        """
        chosen = {key: values[0] for key, values in self.knobs.items()}
        for item in knobs:
            key, _equals, value = item.partition("=")
            if key not in self.knobs:
                offer = nearest(key, self.knobs) if self.knobs else "it has none"
                raise UsageError(f"{self.name} has no knob {key!r}; {offer}")
            if value not in self.knobs[key]:
                offer = nearest(value, self.knobs[key])
                raise UsageError(f"{self.name}: {key} cannot be {value!r}; {offer}")
            chosen[key] = value
        scale = (self.full if full else self.quick).chosen(chosen)
        if seeds is not None:
            scale = replace(scale, seeds=seeds)
        if iterations is not None:
            scale = replace(scale, base=replace(scale.base, iterations=iterations))
        return scale
