"""Codecs of averages: which runs there are, of which network, and what is said of them."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from aiops.lab.experiments import run_planning
from aiops.lab.experiments.cluster_simulation import StragglerSimulation
from aiops.lab.experiments.execution import TransformerAverage, TransformerStraggler
from aiops.lab.experiments.experiment import Findings
from aiops.lab.experiments.papers import average_codecs
from aiops.lab.experiments.papers.average_codecs import BUDGET, EXPERIMENT, CodecScale
from aiops.lab.experiments.runs import Runs

MEGABYTES = {"none": 100, "bf16": 53, "fp16": 53, "int8": 29, "chosen": 30}


def scale(network: str) -> CodecScale:
    found = EXPERIMENT.scale(full=True, seeds=1, knobs=[f"network={network}"])
    assert isinstance(found, CodecScale)
    return found


def judged(at: CodecScale, **worse: float) -> Findings:
    """Return the findings of runs that all end at 2 nats and 10 %, but for those of some codecs."""
    runs = Runs()
    for case in average_codecs.cases(at, runs):
        more = worse.get(case.curve, 0.0)
        sample = {"iteration": 9, "cost": 2 + more, "error": 0.1 + more}
        sample |= {"bytes": 1e6 * MEGABYTES[case.curve]}
        runs.add(case.key, {"digest": "d", "diverged": None, "idle": 0.0, "curve": [sample]})
    return EXPERIMENT.judge(at, runs)


@pytest.mark.parametrize(
    ("network", "kind"), [("perceptron", StragglerSimulation), ("transformer", TransformerAverage)]
)
def test_the_knob_says_what_is_trained(network: str, kind: type) -> None:
    cases = run_planning.planned(EXPERIMENT, scale(network), Runs())
    assert {type(case.work) for case in cases} == {kind}
    assert {case.curve for case in cases if case.panel == BUDGET} == {"none", "chosen"}


def test_a_transformer_has_the_links_of_a_model_of_its_size_at_any_scale() -> None:
    quick = EXPERIMENT.scale(full=False, knobs=["network=transformer"])
    assert isinstance(quick, CodecScale)
    assert (quick.link, quick.budget) == (EXPERIMENT.full.link, EXPERIMENT.full.budget)  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("network", "worse", "agrees", "text"),
    [
        ("perceptron", 0.004, True, "the error +0.40 points"),
        ("perceptron", 0.006, False, "the error +0.60 points"),
        ("transformer", 0.015, True, "the cost +0.015 nats"),
        ("transformer", 0.025, False, "the cost +0.025 nats"),
    ],
)
def test_each_network_has_a_measure_of_its_own(
    network: str, worse: float, agrees: bool, text: str
) -> None:
    findings = judged(scale(network), int8=worse, chosen=worse)
    bf16, fp16, int8, groups, budget = findings.verdicts
    assert (bf16.agrees, fp16.agrees, groups.agrees) == (True, True, True)
    assert (int8.agrees, budget.agrees) == (agrees, agrees)
    assert text in int8.text
    assert {row["nats"] for row in findings.table if row["codec"] == "bf16"} == {"2.000"}


class TestWorkersWithAdamW:
    torch = pytest.importorskip("torch")
    task = replace(scale("transformer").base, clients=2, iterations=4, samples=1, batch_size=2)

    def test_a_run_is_another_than_with_plain_sgd(self) -> None:
        settings = ("lr=0.001", "interval=0.1", "grace=0.1")
        ours = TransformerAverage(self.task, "average", settings)
        plain = TransformerStraggler(self.task, "average", settings)
        costs = [work(lambda done: None)["curve"][-1]["cost"] for work in (ours, plain)]
        assert costs[0] < costs[1] - 0.01  # its steps are larger

    def test_the_steps_are_those_of_the_algorithm(self) -> None:
        work = TransformerAverage(self.task, "average")
        params = work.workload.initial(0)
        plain = super(TransformerAverage, work).workload.gradient(1, seed=5)
        steps, name = work.workload.gradient(1, seed=5), "0.up"
        first, second = 0.0, 0.0
        for count in (1, 2):
            gradients = plain(params)
            norm = np.sqrt(sum(float((array**2).sum()) for array in gradients.values()))
            assert norm > 1, "so that they are clipped"
            clipped = gradients[name] / norm
            first, second = 0.9 * first + 0.1 * clipped, 0.95 * second + 0.05 * clipped**2
            ahead = np.sqrt(second / (1 - 0.95**count)) + 1e-8
            wanted = first / (1 - 0.9**count) / ahead
            np.testing.assert_allclose(steps(params)[name], wanted, rtol=1e-3, atol=1e-4)
