"""FASGD's figure 3, second half: pushes that are left out, and what becomes of their gradients."""

from __future__ import annotations

from collections.abc import Iterator

from aiops.experiments.case import Case
from aiops.experiments.experiment import Experiment, Findings, Verdict
from aiops.experiments.figure import Figure, Panel
from aiops.experiments.papers import gated
from aiops.experiments.papers.gated import OPEN, Gated, Group
from aiops.experiments.runs import Runs, gathered
from aiops.sim.simulation import Simulation

MODES = {
    "reapply": "skipped=reapply",
    "accumulate": "skipped=accumulate",
    "accumulate, mean": "skipped=accumulate,combine=mean",
}

QUICK = Gated(
    base=Simulation(dataset="digits", hidden=32, lr=0.005, iterations=8000, samples=40),
    seeds=3,
    constants=(0.15,),
)
FULL = Gated(
    base=Simulation(dataset="mnist", lr=0.005, iterations=1_000_000, samples=200),
    seeds=3,
    constants=(0.00125, 0.02, 0.08),
)

_PANEL = "pushes"


def cases(scale: Gated, runs: Runs) -> Iterator[Case]:
    """Yield a curve for each way and constant."""
    gates = {
        label(mode, c): f"bfasgd:c_push={c:g},{settings}"
        for mode, settings in MODES.items()
        for c in scale.constants
    }
    yield from gated.reported(scale, _PANEL, {OPEN: "", **gates})


def label(mode: str, c: float) -> str:
    """Return a curve's name."""
    return f"{mode}, c = {c:g}"


def groups(scale: Gated, runs: Runs) -> dict[str, Group]:
    """Return the finished runs by curve."""
    return {
        curve: group for (_panel, curve), group in gathered(runs.of(cases(scale, runs))).items()
    }


def findings(scale: Gated, runs: Runs) -> Findings:
    """See what the largest constant costs each way."""
    found = groups(scale, runs)
    base = found.get(OPEN)
    if not base:
        return Findings([], [Verdict(None, "nothing has been run without a gate")])
    table = [gated.row(name, group, base) for name, group in found.items()]
    return Findings(table, list(_verdicts(found, base, max(scale.constants))))


def _verdicts(found: dict[str, Group], base: Group, c: float) -> Iterator[Verdict]:
    for mode in MODES:
        group = found.get(label(mode, c))
        if group:
            factor = 1 / max(gated.share(group, "pushes"), 1e-9)
            judge = gated.fails if mode == "reapply" else gated.keeps
            yield judge(group, base, f"pushes ÷{factor:.1f}, {mode}")


def figure(scale: Gated, runs: Runs) -> Figure:
    """Draw the errors each way, and copies against potential copies."""
    found = groups(scale, runs)
    panels = []
    for mode in ("reapply", "accumulate"):
        names = [OPEN, *(label(mode, c) for c in scale.constants)]
        panels.append(gated.errors(mode, {name: found[name] for name in names if name in found}))
    lines = [gated.copies(name, group, "pushes") for name, group in found.items()]
    panels.append(Panel("Pushes", "potential pushes", "pushes", lines))
    return Figure("B-FASGD: fewer pushes", panels, columns=3)


EXPERIMENT = Experiment(
    name="bfasgd-push",
    title="B-FASGD: pushes left out, their gradients replaced or kept",
    source="Odena, Faster Asynchronous SGD (2016), figure 3",
    claim="Reducing pushes quickly does harm when the server applies a client's last gradient"
    " again; gathering unsent gradients on the client may work better.",
    quick=QUICK,
    full=FULL,
    cases=cases,
    findings=findings,
    figure=figure,
    note="The paper's c of 0.00125 leaves out few pushes here, where v̄ cannot fall below 0.01;"
    " 0.08 leaves out seven of eight.",
)
