"""The execution of runs, at their smallest."""

from __future__ import annotations

import doctest
import json
import sys
from dataclasses import replace
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from aiops.common import jsonable
from aiops.errors import UsageError
from aiops.lab.experiments import execution, rate_search, run_planning, seed_statistics
from aiops.lab.experiments.cluster_simulation import (
    ClusterMachines,
    ClusterSimulation,
    ThroughputSimulation,
)
from aiops.lab.experiments.execution import (
    ConvNetSimulation,
    InitializedSimulation,
    carry_out,
    initialized,
)
from aiops.lab.experiments.papers import b_staleness, gated_runs
from aiops.lab.experiments.papers.b_staleness import GradientDistances
from aiops.lab.experiments.papers.elastic_clients import ElasticClients
from aiops.lab.experiments.papers.sync_waste import CountedTurns
from aiops.lab.experiments.planned_run import OnProgress, PlannedRun
from aiops.lab.workloads import PerceptronTask
from aiops.lab.workloads.dataset import Dataset
from aiops.sim.cluster.spec import StarTopology
from aiops.sim.turns.run import simulate
from tests.lab.experiments.small_experiment import TINY


def quiet(_iterations: int) -> None:
    """Be told nothing."""


@pytest.mark.parametrize(
    "module", [jsonable, rate_search, seed_statistics, gated_runs, b_staleness]
)
def test_the_examples_in_docstrings(module: ModuleType) -> None:
    found = doctest.testmod(module)
    assert found.attempted
    assert not found.failed


def test_a_simulation_comes_to_what_simulate_says() -> None:
    found = carry_out(TINY, quiet)
    assert found["digest"] == simulate(TINY, PerceptronTask(TINY.dataset, TINY.hidden)).digest
    assert [sample["iteration"] for sample in found["curve"]] == [0, 10, 20]
    assert found["diverged"] is None
    json.dumps(found, allow_nan=False)


def test_one_that_diverges_is_a_result() -> None:
    found = carry_out(replace(TINY, policy="asgd", lr=1e30, iterations=200), quiet)
    assert found["diverged"]
    assert found["curve"][-1]["iteration"] < 200
    json.dumps(found, allow_nan=False)


class TestInitialWeights:
    @pytest.mark.parametrize(
        ("initial", "deviation"), [("glorot", np.sqrt(2 / (64 + 4))), ("small", 0.01), ("unit", 1)]
    )
    def test_they_are_drawn_as_stated(self, initial: str, deviation: float) -> None:
        begin = initialized(replace(TINY, iterations=1, lr=1e-9), initial)
        assert isinstance(begin, InitializedSimulation)
        drawn = begin.task.initial(TINY.seed)
        assert drawn["layer0.weight"].shape == (64, 4)
        assert drawn["layer0.weight"].std() == pytest.approx(deviation, rel=0.15)
        assert not drawn["layer0.bias"].any()
        digests = {carry_out(begin, quiet)["digest"] for _ in range(2)}
        assert len(digests) == 1
        assert digests != {carry_out(begin.simulation, quiet)["digest"]}

    def test_hes_are_the_simulations_own(self) -> None:
        assert initialized(TINY, "he") is TINY

    def test_others_are_refused(self) -> None:
        with pytest.raises(UsageError, match="glorot"):
            InitializedSimulation(TINY, "glorto")


class TestGammas:
    def test_a_fresh_gradient_is_not_stale(self) -> None:
        alone = replace(TINY, clients=1)
        found = carry_out(GradientDistances(alone, looks=4, clients=1), quiet)
        assert [sample["iteration"] for sample in found["curve"]] == [5, 10, 15, 20]
        for sample in found["curve"]:
            assert sample["tau"] == sample["distance"] == sample["gamma"] == 0

    def test_looking_changes_nothing(self) -> None:
        found = carry_out(GradientDistances(TINY, looks=4, clients=3), quiet)
        assert found["digest"] == carry_out(TINY, quiet)["digest"]
        stale = [sample for sample in found["curve"] if sample["tau"]]
        assert stale
        assert all(sample["distance"] > 0 and sample["gamma"] > 0 for sample in stale)


class TestElastic:
    GATED = replace(TINY, hidden=32, gate="bfasgd:c_push=0.2,c_fetch=0.2", iterations=60)

    def test_fixed_clients_stay_as_many(self) -> None:
        found = carry_out(ElasticClients(self.GATED, most=3), quiet)
        assert {sample["clients"] for sample in found["curve"]} == {3}
        assert found["curve"][-1]["round"] == 20
        assert found["curve"][-1]["iteration"] == 60

    def test_growing_ones_become_more_as_the_gate_closes(self) -> None:
        found = carry_out(ElasticClients(self.GATED, most=9), quiet)
        clients = [sample["clients"] for sample in found["curve"]]
        assert clients == sorted(clients)
        assert 3 < clients[-1] <= 9
        again = carry_out(ElasticClients(self.GATED, most=9), quiet)
        assert again == found

    def test_without_a_gate_nobody_is_added(self) -> None:
        found = carry_out(ElasticClients(replace(TINY, iterations=60), most=9), quiet)
        assert found["curve"][-1]["clients"] == 3


class TestInTime:
    def test_a_simulations_settings_on_a_cluster(self) -> None:
        work = ClusterSimulation(
            replace(TINY, policy="softsync", set=("n=1",), iterations=40, samples=4)
        )
        reported: list[int] = []
        found = carry_out(work, reported.append)
        assert found["mean_staleness"] <= 2
        assert found["curve"][-1]["iteration"] == 40
        assert found["seconds"] == pytest.approx(40 / 3 * 0.1, rel=0.2)
        assert found == carry_out(work, quiet)
        json.dumps(found, allow_nan=False)

    def test_a_barrier_makes_workers_wait(self) -> None:
        idle = {
            policy: carry_out(ClusterSimulation(replace(TINY, policy=policy), sigma=0.5), quiet)[
                "idle"
            ]
            for policy in ("hardsync", "asgd")
        }
        assert idle["hardsync"] > idle["asgd"] == 0


class TestTurns:
    def tried(self, policy: str, *settings: str, on_progress: OnProgress = quiet) -> dict[str, int]:
        base = replace(TINY, policy=policy, set=settings, lr=0.01, iterations=60)
        last = carry_out(CountedTurns(base), on_progress)["curve"][-1]
        return {name: last[name] for name in ("turns", "blocked", "refused", "iteration")}

    def test_asynchronous_sgd_loses_none(self) -> None:
        assert self.tried("asgd") == {"turns": 60, "blocked": 0, "refused": 0, "iteration": 60}

    def test_waiting_blocks_and_refuses_nothing(self) -> None:
        found = self.tried("hardsync")
        assert found["blocked"] > 0 == found["refused"]
        assert found["turns"] == found["iteration"] + found["blocked"] >= 60

    def test_rejecting_refuses(self) -> None:
        assert self.tried("hardsync", "admission=reject")["refused"] > 0

    def test_it_tells_how_far_it_is(self) -> None:
        reported: list[int] = []
        self.tried("asgd", on_progress=reported.append)
        assert reported == [30, 60]


class TestThroughput:
    MACHINES = ClusterMachines(400_000, 0.1, 0.0, StarTopology(worker=4e6, server=4e6))

    def figures(self, machines: ClusterMachines, policy: str, clients: int, *settings: str) -> Any:
        run = replace(TINY, policy=policy, set=settings, clients=clients, iterations=8 * clients)
        return carry_out(ThroughputSimulation(run, machines), quiet)["curve"][0]

    def test_a_worker_that_waits_for_the_link_is_as_much_slower(self) -> None:
        found = self.figures(self.MACHINES, "asgd", 1)
        # 0.8 s: three mini-batches of 0.1 s, and each way 0.1 s for two models and a half.
        assert found["speedup"] == pytest.approx(3 / 8, rel=1e-2)
        assert found["speedup"] == pytest.approx(1 - found["idle"], rel=1e-6)

    def test_workers_that_compute_meanwhile_do_not_wait(self) -> None:
        roomy = replace(self.MACHINES, links=StarTopology(worker=4e6, server=8e6))
        found = self.figures(roomy, "no-delay", 2, "tau_max=8")
        assert found["speedup"] == pytest.approx(2)
        assert found["idle"] == pytest.approx(0, abs=1e-9)

    def test_a_large_model_is_simulated_by_a_small_one(self) -> None:
        large = ClusterMachines(
            40_000_000, 0.1, 0.0, StarTopology(worker="3.2Gbit/s", server=4e8), 1e9
        )
        small = replace(self.MACHINES, apply_rate=1e7)
        assert large.light() == small
        assert small.light() is small
        one, other = (self.figures(machines, "softsync", 2, "n=2") for machines in (large, small))
        assert one == other

    def test_the_same_again(self) -> None:
        spread = replace(self.MACHINES, sigma=0.3)
        work = ThroughputSimulation(replace(TINY, policy="hardsync"), spread)
        assert carry_out(work, quiet) == carry_out(work, quiet)


class TestConvolved:
    RUN = replace(TINY, dataset="cifar10", policy="asgd", lr=0.01, iterations=6, samples=1)

    @pytest.fixture
    def few(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Have CIFAR-10 be a few images."""
        pytest.importorskip("torch")
        from aiops.lab.experiments import image_task

        random = np.random.default_rng(0)
        x, y = random.random((30, 32, 32, 3), dtype=np.float32), np.arange(30) % 10
        data = Dataset("few", x[:20], y[:20], x[20:], y[20:], 10)
        monkeypatch.setattr(image_task, "load", lambda name: data)
        execution._convnet.cache_clear()

    @pytest.mark.slow
    def test_it_trains_the_network(self, few: None) -> None:
        found = carry_out(ConvNetSimulation(self.RUN), quiet)
        assert [sample["iteration"] for sample in found["curve"]] == [0, 6]
        assert found["digest"] == carry_out(ConvNetSimulation(self.RUN), quiet)["digest"]
        case = PlannedRun("panel", "curve", 0, ConvNetSimulation(self.RUN))
        assert run_planning.memory(case) > 2e9
        run_planning.check([case])

    def test_without_pytorch_it_says_what_to_install(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setitem(sys.modules, "torch", None)
        execution._convnet.cache_clear()
        with pytest.raises(UsageError, match="pip install 'aiops-ps\\[torch\\]'"):
            carry_out(ConvNetSimulation(self.RUN), quiet)
