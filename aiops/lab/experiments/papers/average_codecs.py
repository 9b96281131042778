"""Codecs, groups and a budget under ``average``: the bytes that each costs, and the error."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean

from aiops.lab.experiments.cluster_simulation import StragglerSimulation
from aiops.lab.experiments.curves import interpolated
from aiops.lab.experiments.experiment import Experiment, Findings, Scale, Verdict
from aiops.lab.experiments.planned_run import PlannedRun
from aiops.lab.experiments.runs import FinishedRun, RunGroups, Runs
from aiops.lab.experiments.seed_statistics import percents
from aiops.lab.figures import Figure, Panel
from aiops.sim.cluster.spec import StarTopology
from aiops.sim.turns.simulation import Simulation

CODECS: Mapping[str, tuple[str, ...]] = {
    "none": ("raw",),
    "bf16": ("bf16",),
    "fp16": ("fp16",),
    "int8": ("int8",),
}
RINGS: Mapping[str, int] = {"one ring": 0, "rings of 4": 4, "rings of 2": 2}
BUDGET = "one ring, a budget"
CHOSEN: Mapping[str, tuple[str, ...]] = {"none": ("raw",), "chosen": ()}
"""Under a budget: rounds further apart, and the codec that it needs."""


@dataclass(frozen=True, kw_only=True)
class CodecScale(Scale):
    """The task.

    Attributes
    ----------
    link
        What the server's link carries each way, and each worker's.
    budget
        What each worker may send and receive in a second, in the last panel.
    """

    link: str
    budget: str


QUICK = CodecScale(
    base=Simulation(
        dataset="digits", hidden=32, clients=8, batch_size=16, iterations=4000, samples=20
    ),
    seeds=3,
    link="15Mbit/s",
    budget="20KB/s",
)
FULL = CodecScale(
    base=Simulation(dataset="mnist", clients=8, batch_size=32, iterations=16_000, samples=40),
    seeds=3,
    link="1Gbit/s",
    budget="1.2MB/s",
)

_SETTINGS = ("lr=0.1", "interval=0.5", "grace=0.1")
_LEVEL = 0.005  # errors within half a point are level
_SHARES = {"bf16": 0.55, "fp16": 0.55, "int8": 0.31}  # of the bytes, with some for first rounds


def cases(scale: CodecScale, runs: Runs) -> Iterator[PlannedRun]:
    """Yield each codec in each kind of rings, and the runs under a budget."""
    links = StarTopology(worker=scale.link, server=scale.link, latency=0.0002)
    kinds = [(title, group, None, CODECS) for title, group in RINGS.items()]
    for title, group, budget, codecs in (*kinds, (BUDGET, 0, scale.budget, CHOSEN)):
        for label, codec in codecs.items():
            for seed in range(scale.seeds):
                run = StragglerSimulation(
                    replace(scale.base, seed=seed),
                    "average",
                    (*_SETTINGS, f"group={group}"),
                    links=links,
                    push_codec=codec,
                    worker_budget=budget,
                )
                yield PlannedRun(title, label, seed, run)


def megabytes(group: Sequence[FinishedRun]) -> float:
    """Return the bytes that crossed between workers, in millions: the mean over seeds."""
    return fmean(run.last["bytes"] for run in group) / 1e6


def error(group: Sequence[FinishedRun]) -> float:
    """Return the error at the end: the mean over seeds."""
    return fmean(run.last["error"] for run in group)


def findings(scale: CodecScale, found: RunGroups) -> Findings:
    """List errors and bytes, and compare them with those of values as they are."""
    table = [
        {
            "rings": title,
            "codec": label,
            "error %": percents([run.last["error"] for run in group]),
            "MB": f"{megabytes(group):,.2f}",
            "idle": f"{fmean(run.result['idle'] for run in group):.1%}",
        }
        for title in (*RINGS, BUDGET)
        for label, group in found.panel(title).items()
        if group
    ]
    verdicts = [_codec(found, codec) for codec in _SHARES]
    return Findings(table, [*verdicts, _groups(found), _budget(found)])


def _codec(found: RunGroups, codec: str) -> Verdict:
    """Return whether a codec saves its share of the bytes of one ring, at the same error."""
    raw, coded = (found["one ring", label] for label in ("none", codec))
    if not (raw and coded):
        return Verdict(None, f"{codec}: not all has been run")
    share, more = megabytes(coded) / megabytes(raw), error(coded) - error(raw)
    return Verdict(
        share <= _SHARES[codec] and more <= _LEVEL,
        f"{codec} in one ring: {share:.0%} of the bytes, the error {100 * more:+.2f} points",
    )


def _groups(found: RunGroups) -> Verdict:
    """Return whether smaller rings keep the error of one ring."""
    groups = {title: found[title, "none"] for title in RINGS}
    if not all(groups.values()):
        return Verdict(None, "rings: not all has been run")
    whole = groups["one ring"]
    text = ", ".join(
        f"{title}: {megabytes(runs) / megabytes(whole):.0%} of the bytes,"
        f" the error {100 * (error(runs) - error(whole)):+.2f} points"
        for title, runs in groups.items()
        if runs is not whole
    )
    level = all(error(runs) <= error(whole) + _LEVEL for runs in groups.values())
    return Verdict(level, text)


def _budget(found: RunGroups) -> Verdict:
    """Return whether a chosen codec does no worse under a budget than fewer rounds."""
    raw, chosen = (found[BUDGET, label] for label in CHOSEN)
    if not (raw and chosen):
        return Verdict(None, "a budget: not all has been run")
    text = ", ".join(
        f"{100 * error(runs):.2f} % with {megabytes(runs):,.2f} MB ({label})"
        for label, runs in zip(CHOSEN, (raw, chosen), strict=True)
    )
    return Verdict(error(chosen) <= error(raw) + _LEVEL, f"under a budget the error is {text}")


def figure(scale: CodecScale, found: RunGroups) -> Figure:
    """Draw the errors by bytes."""
    panels = []
    for title in (*RINGS, BUDGET):
        labels = CHOSEN if title == BUDGET else CODECS
        lines = [interpolated(label, found[title, label], "bytes") for label in labels]
        panels.append(Panel(title, "bytes", "test error (%)", lines, log="y"))
    return Figure("Codecs of averages", panels, columns=2)


EXPERIMENT = Experiment(
    name="average-codecs",
    title="Codecs, groups and a budget under average",
    source="aiops, --policy average",
    claim="Differences in half or a quarter of the bytes, and rings of some of the workers, cost no"
    " accuracy; under a budget a codec does no worse than fewer rounds.",
    quick=QUICK,
    full=FULL,
    cases=cases,
    findings=findings,
    figure=figure,
    note="The real averagers, in virtual time. Eight workers, mini-batches of 50 ms (log-normal,"
    " sigma 0.25), an average every 0.5 s. The error is that of the mean of all workers' models. A"
    " byte between two of them is counted once. The budget is what a worker may send and receive in"
    " a second: three tenths of what rounds of values need.",
)
