"""FASGD's figure 2: from 250 to 10,000 clients."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial
from itertools import pairwise
from statistics import fmean

from aiops.lab.experiments.experiment import Experiment, Findings, Verdict
from aiops.lab.experiments.papers import policy_comparison
from aiops.lab.experiments.papers.policy_comparison import PolicyComparison
from aiops.lab.experiments.rate_search import RateSearch, ladder
from aiops.lab.experiments.runs import RunGroups
from aiops.sim.turns.simulation import Simulation

_RATES = (("fasgd", ladder(0.005, 2, 2, 5)), ("sasgd", ladder(0.04, 2, 0, 7)))
QUICK = PolicyComparison(
    base=Simulation(dataset="digits", hidden=32, iterations=1200, samples=24),
    seeds=3,
    panels=((25, 32), (50, 32), (100, 32), (400, 32)),
    pool=RateSearch(_RATES, share=0.5, finalists=0),
)
FULL = PolicyComparison(
    base=Simulation(dataset="mnist", hidden=200, iterations=100_000, samples=100),
    seeds=3,
    panels=((250, 128), (500, 128), (1000, 128), (10_000, 128)),
    pool=RateSearch(_RATES, share=0.25, finalists=2),
)


def findings(scale: PolicyComparison, found: RunGroups) -> Findings:
    """Count the panels in which FASGD is ahead, and see whether its lead grows with λ."""
    common = policy_comparison.findings(scale, found)
    leads = [lead_verdict(scale, found, protocol) for protocol in scale.protocols]
    return replace(common, verdicts=[*common.verdicts, *leads])


def lead_verdict(scale: PolicyComparison, found: RunGroups, protocol: str) -> Verdict:
    """Say whether SASGD's error, in FASGD's, grows with λ."""
    ratios = []
    for panel in scale.named:
        ours, theirs = policy_comparison.both_errors(found, panel, protocol)
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


EXPERIMENT = Experiment(
    name="fasgd-clients",
    title="FASGD against SASGD with 250 to 10,000 clients",
    source="Odena, Faster Asynchronous SGD (2016), figure 2",
    claim="FASGD beats SASGD at every λ, and its relative lead grows with λ.",
    quick=QUICK,
    full=FULL,
    cases=policy_comparison.cases,
    findings=findings,
    figure=partial(policy_comparison.figure, "FASGD and SASGD with many clients"),
    knobs=policy_comparison.KNOBS,
    note="--full chooses rates from a pool of 8, first at a quarter of the iterations, then the"
    " best two in full; --quick from a pool of 8 at half of them, on scikit-learn's digits with"
    " λ from 25 to 400.",
)
