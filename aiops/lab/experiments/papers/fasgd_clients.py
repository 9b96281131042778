"""FASGD's figure 2: from 250 to 10,000 clients."""

from __future__ import annotations

import math
from itertools import pairwise
from statistics import fmean

from aiops.lab.experiments.experiment import Experiment, Findings, Verdict
from aiops.lab.experiments.papers import policy_comparison
from aiops.lab.experiments.papers.policy_comparison import ComparisonPanels, PolicyComparison
from aiops.lab.experiments.rate_search import RateSearch, ladder
from aiops.lab.experiments.runs import Runs
from aiops.lab.experiments.seed_statistics import tails
from aiops.lab.figures import Figure
from aiops.sim.turns.simulation import Simulation

QUICK = PolicyComparison(
    base=Simulation(dataset="digits", hidden=32, iterations=1200, samples=24),
    seeds=3,
    panels=((25, 32), (50, 32), (100, 32), (400, 32)),
    pool=RateSearch(
        rates=(("fasgd", ladder(0.005, 2, 2, 5)), ("sasgd", ladder(0.04, 2, 0, 7))),
        share=0.5,
        finalists=0,
    ),
)
FULL = PolicyComparison(
    base=Simulation(dataset="mnist", hidden=200, iterations=100_000, samples=100),
    seeds=3,
    panels=((250, 128), (500, 128), (1000, 128), (10_000, 128)),
    pool=RateSearch(
        rates=(("fasgd", ladder(0.005, 2, 2, 5)), ("sasgd", ladder(0.04, 2, 0, 7))),
        share=0.25,
        finalists=2,
    ),
)


def findings(scale: PolicyComparison, runs: Runs) -> Findings:
    """Count the panels in which FASGD is ahead, and see whether its lead grows with λ."""
    panels = ComparisonPanels.of(scale, runs)
    verdicts = [
        policy_comparison.order_verdict(scale, panels, protocol) for protocol in scale.protocols
    ]
    verdicts += [lead_verdict(scale, panels, protocol) for protocol in scale.protocols]
    return Findings(
        policy_comparison.table(scale, panels), verdicts, policy_comparison.robustness(scale, runs)
    )


def lead_verdict(scale: PolicyComparison, panels: ComparisonPanels, protocol: str) -> Verdict:
    """Say whether SASGD's error, in FASGD's, grows with λ."""
    ratios = []
    for panel in scale.named:
        ours, theirs = (tails(panels.seeds(panel, p, protocol)) for p in policy_comparison.POLICIES)
        if not ours or not theirs or not all(map(math.isfinite, (*ours, *theirs))):
            return Verdict(None, f"{protocol} rates: not all panels have an error of both")
        ratios.append(fmean(theirs) / max(fmean(ours), 1e-9))
    named = ", ".join(
        f"{ratio:.2f} at λ = {clients:,}"
        for ratio, (clients, _batch) in zip(ratios, scale.panels, strict=True)
    )
    text = f"{protocol} rates: SASGD's error is FASGD's times {named}"
    if all(before < after for before, after in pairwise(ratios)):
        return Verdict(True, f"{text}: the lead grows with λ")
    if ratios[-1] <= ratios[0]:
        return Verdict(False, f"{text}: the lead does not grow with λ")
    return Verdict(None, f"{text}: the lead grows, but not from each λ to the next")


def figure(scale: PolicyComparison, runs: Runs) -> Figure:
    """Draw the validation error."""
    return policy_comparison.figure("FASGD and SASGD with many clients", scale, runs)


EXPERIMENT = Experiment(
    name="fasgd-clients",
    title="FASGD against SASGD with 250 to 10,000 clients",
    source="Odena, Faster Asynchronous SGD (2016), figure 2",
    claim="FASGD beats SASGD at every λ, and its relative lead grows with λ.",
    quick=QUICK,
    full=FULL,
    cases=policy_comparison.cases,
    findings=findings,
    figure=figure,
    knobs=policy_comparison.KNOBS,
    note="--full chooses rates from a pool of 8, first at a quarter of the iterations, then the"
    " best two in full; --quick from a pool of 8 at half of them, on scikit-learn's digits with"
    " λ from 25 to 400.",
)
