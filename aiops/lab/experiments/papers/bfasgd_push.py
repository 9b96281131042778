"""FASGD's figure 3, second half: pushes that are left out, and what becomes of their gradients."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial

from aiops.lab.experiments.experiment import Experiment, Verdict
from aiops.lab.experiments.network_scale import NETWORK
from aiops.lab.experiments.papers import gated_runs
from aiops.lab.experiments.papers.gated_runs import GatedScale
from aiops.lab.experiments.planned_run import PlannedRun
from aiops.lab.experiments.rate_search import RateSearch, ladder
from aiops.lab.experiments.runs import Group, Runs
from aiops.sim.turns.simulation import Simulation

MODES = ("reapply", "accumulate")

QUICK = GatedScale(
    base=Simulation(dataset="digits", hidden=32, lr=0.005, iterations=6000, samples=40),
    seeds=3,
    constants=(0.2,),
    pool=RateSearch((("fasgd", ladder(0.005, 2, 1, 3)),), share=0.5, finalists=0),
)
FULL = GatedScale(
    base=Simulation(dataset="mnist", lr=0.005, iterations=1_000_000, samples=200),
    seeds=3,
    constants=(0.00125, 0.02, 0.08),
    pool=RateSearch((("fasgd", ladder(0.005, 2, 3, 4)),), share=0.1, finalists=0),
)


def cases(scale: GatedScale, runs: Runs) -> Iterator[PlannedRun]:
    """Yield a curve for each way and constant; then the largest at their best rates."""
    gates = {label(mode, c): _gate(scale, mode, c) for mode in MODES for c in scale.constants}
    largest = [label(mode, scale.largest) for mode in MODES]
    yield from gated_runs.at_rates(scale, gates, largest, runs)


def _gate(scale: GatedScale, mode: str, c: float) -> str:
    return scale.bfasgd(f"c_push={c:g},skipped={mode},share=0")


def label(mode: str, c: float) -> str:
    """Return a curve's name."""
    return f"{mode}, c = {c:g}"


def _verdicts(
    scale: GatedScale, panel: str, gates: Mapping[str, Group], base: Group
) -> Iterator[Verdict]:
    """Judge what the largest constant costs each way, at the paper's rate and at the best."""
    for mode, judge in (("reapply", gated_runs.fails), ("accumulate", gated_runs.keeps)):
        group = gates.get(label(mode, scale.largest))
        if group:
            factor = 1 / max(gated_runs.share(group, "pushes"), 1e-9)
            yield judge(group, base, f"{panel}: pushes ÷{factor:.1f}, {mode}")


EXPERIMENT = Experiment(
    name="bfasgd-push",
    title="B-FASGD: pushes left out, their gradients replaced or kept",
    source="Odena, Faster Asynchronous SGD (2016), figure 3",
    claim="Reducing pushes quickly does harm when the server applies a client's last gradient"
    " again; gathering unsent gradients on the client may work better.",
    quick=QUICK,
    full=FULL,
    cases=cases,
    findings=partial(gated_runs.findings, _verdicts),
    figure=partial(gated_runs.figure, "pushes"),
    knobs=NETWORK,
    note="The paper's c of 0.00125 leaves out few pushes here, where v̄ cannot fall below 0.01;"
    " 0.08 leaves out 88 %. Gathered gradients are larger than single ones, so v̄ is too,"
    " and steps are smaller: hence the second panel. Best rates are of a pool as in bfasgd-fetch."
    " --with network=transformer trains that of one-rule, with 4 clients and 600 mini-batches of 16"
    " windows; its gates are relative to v̄'s mean, and its FASGD has no floor (relative=0.01)."
    " It has one rate.",
)
