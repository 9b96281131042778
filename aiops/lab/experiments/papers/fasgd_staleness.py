"""FASGD's figure 1: λ·µ = 128, divided in four ways."""

from __future__ import annotations

from functools import partial

from aiops.lab.experiments.experiment import Experiment
from aiops.lab.experiments.papers import policy_comparison
from aiops.lab.experiments.papers.policy_comparison import PolicyComparison
from aiops.lab.experiments.rate_search import RateSearch, ladder
from aiops.sim.turns.simulation import Simulation

PANELS = ((128, 1), (32, 4), (16, 8), (4, 32))

QUICK = PolicyComparison(
    base=Simulation(dataset="digits", hidden=32, iterations=4500, samples=30),
    seeds=3,
    panels=PANELS,
    pool=RateSearch(
        rates=(("fasgd", ladder(0.005, 2, 4, 3)), ("sasgd", ladder(0.04, 2, 2, 5))),
        share=0.3,
        finalists=0,
    ),
)
FULL = PolicyComparison(
    base=Simulation(dataset="mnist", hidden=200, iterations=100_000, samples=100),
    seeds=3,
    panels=PANELS,
    pool=RateSearch(
        rates=(("fasgd", ladder(0.005, 2**0.5, 9, 6)), ("sasgd", ladder(0.04, 2**0.5, 6, 9))),
        share=0.1,
        finalists=4,
    ),
)


EXPERIMENT = Experiment(
    name="fasgd-staleness",
    title="FASGD against SASGD, λ·µ = 128 divided in four ways",
    source="Odena, Faster Asynchronous SGD (2016), figure 1",
    claim="FASGD converges faster, and to a better cost, regardless of λ and µ.",
    quick=QUICK,
    full=FULL,
    cases=policy_comparison.cases,
    findings=policy_comparison.findings,
    figure=partial(policy_comparison.figure, "FASGD and SASGD at λ·µ = 128"),
    knobs=policy_comparison.KNOBS,
    note="The error is that of 10,000 held-out examples, the mean of the last tenth of a"
    " run. --full chooses rates from a pool of 16, first at a tenth of the iterations, then the"
    " best four in full; --quick from a pool of 8 at 30 %, on scikit-learn's digits, where 4,500"
    " iterations are too few for λ = 128 (in full, from N(0, 1) weights, FASGD"
    " overtakes there after some 30,000).",
)
