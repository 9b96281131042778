"""Codecs, groups and a budget under ``average``: the bytes that each costs, and the error."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean
from typing import Self

from aiops.lab.experiments.cluster_simulation import StragglerSimulation
from aiops.lab.experiments.curves import interpolated
from aiops.lab.experiments.execution import TransformerAverage
from aiops.lab.experiments.experiment import Experiment, Findings, Verdict
from aiops.lab.experiments.network_scale import NETWORK, NetworkScale
from aiops.lab.experiments.planned_run import PlannedRun, RunWork
from aiops.lab.experiments.runs import FinishedRun, RunGroups, Runs
from aiops.lab.experiments.seed_statistics import percents, spread
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
class CodecScale(NetworkScale):
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

    def of_transformer(self) -> Self:
        """Return the scale of the transformer, which is as large as the perceptron of MNIST."""
        base = replace(self.base, dataset="help", batch_size=16, iterations=1200, samples=12)
        return replace(self, base=base, link=FULL.link, budget=FULL.budget)

    def work(self, codec: tuple[str, ...], group: int, budget: str | None, seed: int) -> RunWork:
        """Return a run with a codec, in rings of at most ``group`` workers, within a budget."""
        kind, lr = (TransformerAverage, 0.003) if self.transformer else (StragglerSimulation, 0.1)
        return kind(
            replace(self.base, seed=seed),
            "average",
            (f"lr={lr:g}", "interval=0.5", "grace=0.1", f"group={group}"),
            links=StarTopology(worker=self.link, server=self.link, latency=0.0002),
            push_codec=codec,
            worker_budget=budget,
        )

    @property
    def level(self) -> float:
        """By how much what is measured may be worse and still be level."""
        return 0.02 if self.transformer else 0.5  # nats, or points


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

_SHARES = {"bf16": 0.55, "fp16": 0.55, "int8": 0.31}  # of the bytes, with some for first rounds


def cases(scale: CodecScale, runs: Runs) -> Iterator[PlannedRun]:
    """Yield each codec in each kind of rings, and the runs under a budget."""
    kinds = [(title, group, None, CODECS) for title, group in RINGS.items()]
    for title, group, budget, codecs in (*kinds, (BUDGET, 0, scale.budget, CHOSEN)):
        for label, codec in codecs.items():
            for seed in range(scale.seeds):
                yield PlannedRun(title, label, seed, scale.work(codec, group, budget, seed))


def megabytes(group: Sequence[FinishedRun]) -> float:
    """Return the bytes that crossed between workers, in millions: the mean over seeds."""
    return fmean(run.last["bytes"] for run in group) / 1e6


def end(scale: CodecScale, group: Sequence[FinishedRun]) -> float:
    """Return the error (%) or the cost (nats) at the end: the mean over seeds."""
    measure = scale.measure
    return measure.times * fmean(run.last[measure.series] for run in group)


def findings(scale: CodecScale, found: RunGroups) -> Findings:
    """List errors and bytes, and compare them with those of values as they are."""
    table = [
        {
            "rings": title,
            "codec": label,
            "error %": percents([run.last["error"] for run in group]),
            "nats": spread([run.last["cost"] for run in group], 3),
            "MB": f"{megabytes(group):,.2f}",
            "idle": f"{fmean(run.result['idle'] for run in group):.1%}",
        }
        for title in (*RINGS, BUDGET)
        for label, group in found.panel(title).items()
        if group
    ]
    verdicts = [_codec(scale, found, codec) for codec in _SHARES]
    return Findings(table, [*verdicts, _groups(scale, found), _budget(scale, found)])


def _codec(scale: CodecScale, found: RunGroups, codec: str) -> Verdict:
    """Return whether a codec saves its share of the bytes of one ring, at the same error."""
    raw, coded = (found["one ring", label] for label in ("none", codec))
    if not (raw and coded):
        return Verdict(None, f"{codec}: not all has been run")
    share, more = megabytes(coded) / megabytes(raw), end(scale, coded) - end(scale, raw)
    return Verdict(
        share <= _SHARES[codec] and more <= scale.level,
        f"{codec} in one ring: {share:.0%} of the bytes, {_more(scale, more)}",
    )


def _more(scale: CodecScale, more: float) -> str:
    measure = scale.measure
    return f"the {measure.series} {more:+.{measure.digits + 1}f} {measure.apart}"


def _groups(scale: CodecScale, found: RunGroups) -> Verdict:
    """Return whether smaller rings keep the error of one ring."""
    groups = {title: found[title, "none"] for title in RINGS}
    if not all(groups.values()):
        return Verdict(None, "rings: not all has been run")
    whole = groups["one ring"]
    text = ", ".join(
        f"{title}: {megabytes(runs) / megabytes(whole):.0%} of the bytes,"
        f" {_more(scale, end(scale, runs) - end(scale, whole))}"
        for title, runs in groups.items()
        if runs is not whole
    )
    most = end(scale, whole) + scale.level
    level = all(end(scale, runs) <= most for runs in groups.values())
    return Verdict(level, text)


def _budget(scale: CodecScale, found: RunGroups) -> Verdict:
    """Return whether a chosen codec does no worse under a budget than fewer rounds."""
    raw, chosen = (found[BUDGET, label] for label in CHOSEN)
    if not (raw and chosen):
        return Verdict(None, "a budget: not all has been run")
    measure, digits = scale.measure, scale.measure.digits + 1
    text = ", ".join(
        f"{end(scale, runs):.{digits}f} {measure.unit} with {megabytes(runs):,.2f} MB ({label})"
        for label, runs in zip(CHOSEN, (raw, chosen), strict=True)
    )
    more = end(scale, chosen) - end(scale, raw)
    return Verdict(more <= scale.level, f"under a budget the {measure.series} is {text}")


def figure(scale: CodecScale, found: RunGroups) -> Figure:
    """Draw the errors, or costs, by bytes."""
    panels, measure = [], scale.measure
    for title in (*RINGS, BUDGET):
        labels = CHOSEN if title == BUDGET else CODECS
        lines = [
            interpolated(label, found[title, label], "bytes", measure.series, measure.times)
            for label in labels
        ]
        panels.append(Panel(title, "bytes", measure.title, lines, log="y"))
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
    knobs=NETWORK,
    note="The real averagers, in virtual time. Eight workers, mini-batches of 50 ms (log-normal,"
    " sigma 0.25), an average every 0.5 s. The error is that of the mean of all workers' models. A"
    " byte between two of them is counted once. The budget is what a worker may send and receive in"
    " a second: three tenths of what rounds of values need. --with network=transformer trains that"
    " of one-rule, whose workers have AdamW in their loops (0.003, beta2 0.95, clip 1): 1,200"
    " mini-batches of 16 windows in all.",
)
