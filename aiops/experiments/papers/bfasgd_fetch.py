"""FASGD's figure 3, first half: fetches that are left out."""

from __future__ import annotations

from collections.abc import Iterator
from statistics import fmean

from aiops.experiments.case import Case
from aiops.experiments.experiment import Experiment, Findings, Verdict
from aiops.experiments.figure import Figure, Panel
from aiops.experiments.papers import gated
from aiops.experiments.papers.gated import OPEN, Gated, Group
from aiops.experiments.runs import Runs, gathered
from aiops.sim.simulation import Simulation

QUICK = Gated(
    base=Simulation(dataset="digits", hidden=32, lr=0.005, iterations=8000, samples=40),
    seeds=3,
    constants=(1 / 32, 1 / 8, 1 / 4),
)
FULL = Gated(
    base=Simulation(dataset="mnist", lr=0.005, iterations=1_000_000, samples=200),
    seeds=3,
    constants=(1 / 64, 1 / 32, 1 / 16, 1 / 8),
)

_PANEL = "fetches"
_TEN = 9.5  # a reduction that one would call tenfold


def cases(scale: Gated, runs: Runs) -> Iterator[Case]:
    """Yield a curve for each constant."""
    gates = {label(c): f"bfasgd:c_fetch={c:g}" for c in scale.constants}
    yield from gated.reported(scale, _PANEL, {OPEN: "", **gates})


def label(c: float) -> str:
    """Return a curve's name."""
    return f"c = 1/{1 / c:g}"


def groups(scale: Gated, runs: Runs) -> dict[str, Group]:
    """Return the finished runs by curve."""
    return {
        curve: group for (_panel, curve), group in gathered(runs.of(cases(scale, runs))).items()
    }


def findings(scale: Gated, runs: Runs) -> Findings:
    """Find the least fetches that cost nothing, and see whether they become fewer."""
    found = groups(scale, runs)
    base = found.get(OPEN)
    if not base:
        return Findings([], [Verdict(None, "nothing has been run without a gate")])
    table = [gated.row(name, group, base) for name, group in found.items()]
    gates = {name: group for name, group in found.items() if name != OPEN}
    return Findings(table, [_tenfold(gates, base), *([_fewer(gates)] if gates else [])])


def _tenfold(gates: dict[str, Group], base: Group) -> Verdict:
    for name, group in gates.items():
        factor = 1 / max(gated.share(group, "fetches"), 1e-9)
        if factor >= _TEN:
            return gated.keeps(group, base, f"fetches ÷{factor:.1f} at {name}")
    return Verdict(None, "no constant left out nine fetches of ten")


def _fewer(gates: dict[str, Group]) -> Verdict:
    """Say whether the second half of a run has fewer fetches than the first."""
    said, fewer = [], []
    for name, group in gates.items():
        halves = []
        for run in group:
            counts = gated.counted(run, "fetches")
            middle = counts[len(counts) // 2]
            halves.append((middle, counts[-1] - middle))
        first, second = (fmean(half) for half in zip(*halves, strict=True))
        said.append(f"{second / max(first, 1):.2f} at {name}")
        fewer.append(second < first)
    text = "the second half of a run has so many fetches for one of the first: " + ", ".join(said)
    return Verdict(all(fewer), text)


def figure(scale: Gated, runs: Runs) -> Figure:
    """Draw errors, and copies against potential copies."""
    found = groups(scale, runs)
    lines = [gated.copies(name, group, "fetches") for name, group in found.items()]
    copied = Panel("Fetches", "potential fetches", "fetches", lines)
    return Figure("B-FASGD: fewer fetches", [gated.errors("Learning", found), copied], columns=2)


EXPERIMENT = Experiment(
    name="bfasgd-fetch",
    title="B-FASGD: fetches left out, the more the smaller the gradients' deviation",
    source="Odena, Faster Asynchronous SGD (2016), figure 3",
    claim="Fetches can be reduced by a factor of 10 with little impact on convergence, and become"
    " rarer as training goes on.",
    quick=QUICK,
    full=FULL,
    cases=cases,
    findings=findings,
    figure=figure,
    note="Little impact: at most 0.3 points. λ = 16, µ = 8; the constants are the paper's, and 1/8;"
    " --quick has larger ones, for digits have a larger v̄.",
)
