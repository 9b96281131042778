"""FASGD's figure 3, first half: fetches that are left out."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from statistics import fmean

from aiops.lab.experiments.experiment import Experiment, Verdict
from aiops.lab.experiments.network_scale import NETWORK
from aiops.lab.experiments.papers import gated_runs
from aiops.lab.experiments.papers.gated_runs import GatedScale
from aiops.lab.experiments.planned_run import PlannedRun
from aiops.lab.experiments.rate_search import RateSearch, ladder
from aiops.lab.experiments.runs import Group, Runs
from aiops.sim.turns.simulation import Simulation

QUICK = GatedScale(
    base=Simulation(
        dataset="digits", hidden=32, lr=0.005, clients=4, batch_size=16, iterations=7000, samples=40
    ),
    seeds=3,
    constants=(1 / 16, 1 / 7),
    pool=RateSearch((("fasgd", ladder(0.005, 2, 1, 3)),), share=0.5, finalists=0),
)
FULL = GatedScale(
    base=Simulation(dataset="mnist", lr=0.005, iterations=1_000_000, samples=200),
    seeds=3,
    constants=(1 / 64, 1 / 32, 1 / 16, 1 / 8),
    pool=RateSearch((("fasgd", ladder(0.005, 2, 3, 4)),), share=0.1, finalists=0),
)

_TEN = 9.5  # a reduction that one would call tenfold
_RARER = 0.95  # fetches of the second half for one of the first that one would call fewer


def cases(scale: GatedScale, runs: Runs) -> Iterator[PlannedRun]:
    """Yield a curve for each constant; then no gate and the largest at their best rates."""
    gates = {label(c): scale.bfasgd(f"c_fetch={c:g}") for c in scale.constants}
    yield from gated_runs.at_rates(scale, gates, [label(scale.largest)], runs)


def label(c: float) -> str:
    """Return a curve's name."""
    return f"c = 1/{1 / c:g}" if c < 1 else f"c = {c:g}"


def _verdicts(
    scale: GatedScale, panel: str, gates: Mapping[str, Group], base: Group
) -> Iterator[Verdict]:
    """Find the least fetches that cost nothing, and see whether they become fewer."""
    yield _tenfold(panel, gates, base)
    if panel == scale.panels[0] and gates:
        yield _fewer(gates)


def _tenfold(panel: str, gates: Mapping[str, Group], base: Group) -> Verdict:
    for name, group in gates.items():
        factor = 1 / max(gated_runs.share(group, "fetches"), 1e-9)
        if factor >= _TEN:
            return gated_runs.keeps(group, base, f"{panel}: fetches ÷{factor:.1f} at {name}")
    return Verdict(None, f"{panel}: no constant left out nine fetches of ten")


def _fewer(gates: Mapping[str, Group]) -> Verdict:
    """Say whether the second half of a run has fewer fetches than the first: `_RARER`."""
    parts, shares = [], []
    for name, group in gates.items():
        halves = []
        for run in group:
            counts = gated_runs.counted(run, "fetches")
            middle = counts[len(counts) // 2]
            halves.append((middle, counts[-1] - middle))
        first, second = (fmean(half) for half in zip(*halves, strict=True))
        shares.append(second / max(first, 1))
        parts.append(f"{shares[-1]:.2f} at {name}")
    text = "fetches in the second half of a run per fetch in the first: " + ", ".join(parts)
    return Verdict(max(shares) <= _RARER, text)


EXPERIMENT = Experiment(
    name="bfasgd-fetch",
    title="B-FASGD: fetches left out, the more the smaller the gradients' deviation",
    source="Odena, Faster Asynchronous SGD (2016), figure 3",
    claim="Fetches can be reduced by a factor of 10 with little impact on convergence, and become"
    " rarer as training goes on.",
    quick=QUICK,
    full=FULL,
    cases=cases,
    findings=partial(gated_runs.findings, _verdicts),
    figure=partial(gated_runs.figure, "fetches"),
    knobs=NETWORK,
    note="Little impact: at most 0.3 points; rarer: at most 0.95 fetches in the second half for one"
    " in the first. λ = 16, µ = 8; the constants are the paper's, and 1/8;"
    " --quick has larger ones, for digits have a larger v̄, and λ = 4, µ = 16: with λ = 16 its runs"
    " end long before those with stale parameters have caught up. Best rates are of a pool of 8"
    " (--quick: 5), tried for a tenth (half) of the iterations."
    " --with network=transformer trains that of one-rule, with 4 clients and 600 mini-batches of 16"
    " windows; its gates are relative to v̄'s mean, and its FASGD has no floor (relative=0.01)."
    " It has one rate.",
)
