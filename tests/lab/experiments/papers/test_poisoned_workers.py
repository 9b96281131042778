"""Hostile workers: which runs there are, of which network, and what is said of them."""

from __future__ import annotations

from typing import Any

import pytest

from aiops.lab.experiments import run_planning
from aiops.lab.experiments.experiment import Findings
from aiops.lab.experiments.papers.poisoned_workers import (
    EXPERIMENT,
    POLICIES,
    TRANSFORMER_POLICIES,
    PoisonScale,
)
from aiops.lab.experiments.poisoned_run import PoisonedRun
from aiops.lab.experiments.runs import Runs
from tests.lab.experiments.small_experiment import result

pytest.importorskip("torch")


def scale(*knobs: str, seeds: int = 1) -> PoisonScale:
    found = EXPERIMENT.scale(full=False, seeds=seeds, knobs=["hostile=33%", *knobs])
    assert isinstance(found, PoisonScale)
    return found


def judged(at: PoisonScale, filtered: float) -> Findings:
    """Return the findings of runs that end at 0.1, and with filters at another error."""
    runs = Runs()
    for case in EXPERIMENT.cases(at, runs):
        kept = "absent" in case.curve or "no attack, off" in case.curve
        error = filtered if case.curve.endswith("robust") else 0.1 if kept else 0.5
        runs.add(case.key, result(error + 0.02 * case.seed))
    return EXPERIMENT.judge(at, runs)


def test_cells_are_means_over_seeds_with_their_range() -> None:
    found = judged(scale(seeds=2), filtered=0.1)
    row = {(r["policy"], r["data"], r["attack"]): r for r in found.table}[
        "hardsync", "own data", "flipped"
    ]
    assert row["off"] == "51.0 (50.0–52.0)"
    assert row["robust"] == row["absent"] == row["no attack"] == "11.0 (10.0–12.0)"
    assert {r["hostile"] for r in found.table} == {"0%", "33%"}
    assert {verdict.agrees for verdict in found.verdicts} == {True}


def test_a_seed_alone_has_a_whole_table() -> None:
    cases = [*EXPERIMENT.cases(EXPERIMENT.scale(full=True, seeds=3), Runs())]
    assert [case.seed for case in cases] == sorted(case.seed for case in cases)


@pytest.mark.parametrize(
    ("network", "policies"), [("perceptron", POLICIES), ("transformer", TRANSFORMER_POLICIES)]
)
def test_the_knob_says_what_is_trained(network: str, policies: Any) -> None:
    cases = run_planning.planned(EXPERIMENT, scale(f"network={network}"), Runs())
    works = [case.work for case in cases if isinstance(case.work, PoisonedRun)]
    assert len(works) == len(cases)
    assert {work.network for work in works} == {network}
    trained = {work.simulation.policy: work.simulation for work in works if not work.attack}
    trained |= {work.simulation.policy: work.simulation for work in works}
    assert trained.keys() == policies.keys()
    for name, (lr, settings) in policies.items():
        assert trained[name].lr == lr
        assert set(settings) <= set(trained[name].set)


def test_a_transformer_is_told_of_in_nats() -> None:
    """A cost is twice the error here: 0.04 more of it are 0.08 nats, and 4 points of error."""
    ours, theirs = scale("network=transformer"), scale()
    found = judged(ours, filtered=0.14)
    assert {verdict.agrees for verdict in found.verdicts} == {True}
    assert "0.08 nats worse" in found.verdicts[0].text
    assert {row["robust"] for row in found.table} == {"0.28"}
    assert {verdict.agrees for verdict in judged(theirs, filtered=0.14).verdicts} == {False}
    assert {verdict.agrees for verdict in judged(ours, filtered=0.16).verdicts} == {False}
    (panel, *_) = EXPERIMENT.draw(ours, Runs()).panels
    assert "nats" in panel.ylabel
