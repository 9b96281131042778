"""The cluster in virtual time: what follows from its description, and that it always follows."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from aiops.algorithms import BUILT_IN
from aiops.errors import BadPush, DeadlineExceeded, UsageError
from aiops.lab.workloads import PerceptronWorkload
from aiops.serving.config import Config
from aiops.testing import (
    Cluster,
    ClusterResult,
    Cut,
    Deadweight,
    Diurnal,
    Fixed,
    Join,
    Kill,
    LogNormal,
    Silence,
    StarTopology,
    Straggler,
    simulate,
)
from tests.recording import replayed
from tests.rows import each_row
from tests.support import assert_same

POLICIES = sorted(BUILT_IN)
ROOT = Path(__file__).parents[3]
ROUND = 1_000_000
"""Bytes of a model of which one crosses a link of 1 MB/s in a second, headers left out."""

NEAR = 0.02  # seconds, and shares: what headers, versions and handshakes add here


def run(**fields: Any) -> ClusterResult:
    fields = {"gradients": 24, **fields}
    fields.setdefault("server", Config(policy="asgd", kernels="numpy"))
    fields.setdefault("workload", PerceptronWorkload())
    return simulate(Cluster(**fields))


def rough(**fields: Any) -> dict[str, Any]:
    """A run with something of everything."""
    return {
        "server": Config(policy="fasgd", kernels="numpy", lr=0.01),
        "workers": 6,
        "workload": PerceptronWorkload(),
        "computing": Straggler(LogNormal(0.1), times=3.0),
        "links": StarTopology(
            worker="100Mbit/s", server="20Mbit/s", latency=0.001, jitter=0.002, burst=0.04
        ),
        "apply_seconds": 0.001,
        "gradients": 120,
        "every": 1.0,
        "schedule": (Cut(0.3, 2), Kill(0.5, 4), Join(0.7, 2)),
        **fields,
    }


class TestOverlap:
    """Exchanges beside computing, over a link of 20 Mbit/s each way (2.5 MB/s)."""

    STEPS = 30

    def rate(self, nbytes: int, compute: float, overlap: int, latency: float = 0.0) -> float:
        """Return one worker's steps per second under asgd."""
        outcome = run(
            workers=1,
            workload=Deadweight(nbytes),
            computing=Fixed(compute),
            links=StarTopology(server="20Mbit/s", latency=latency),
            gradients=self.STEPS,
            overlap=overlap,
        )
        assert outcome.version == outcome.gradients == self.STEPS, "what is under way is pushed"
        assert sum(outcome.staleness.values()) == self.STEPS
        # Own steps only, and never more than are under way; the last ones find all before them.
        assert max(outcome.staleness) <= overlap
        return outcome.gradients / outcome.seconds

    @pytest.mark.parametrize(
        ("nbytes", "compute", "latency"),
        [
            (250_000, 0.05, 0.0),
            (250_000, 0.15, 0.05),
            (250_000, 1.0, 0.05),
            (3_000_000, 0.1, 0.0),
            (3_000_000, 1.5, 0.0),
            (3_000_000, 3.0, 0.05),
            (10_000_000, 0.5, 0.05),
        ],
    )
    def test_a_step_takes_the_longest_of_its_parts(
        self, nbytes: int, compute: float, latency: float
    ) -> None:
        """None: the sum of all. One exchange: both ways together. Two: the longer way.

        Also with a model of which one answer is more than a server keeps unsent for a peer while it
        reads from it.
        """
        way = nbytes / 2.5e6
        expected = [
            compute + 2 * way + 2 * latency,
            max(compute, 2 * way + 2 * latency),
            max(compute, way + latency),
        ]
        for overlap, seconds in enumerate(expected):
            found = 1 / self.rate(nbytes, compute, overlap, latency)
            filled = 2 * (compute + 2 * way + 2 * latency)  # at the beginning and the end, at most
            assert seconds * (1 - 1e-9) <= found <= 1.02 * seconds + filled / self.STEPS

    def test_gradients_are_as_stale_as_exchanges_are_deep(self) -> None:
        """While the link is slower than the worker; and not at all more while it is faster."""
        links = StarTopology(server="20Mbit/s")
        for compute, expected in ((0.01, [0, 1, 2, 3]), (5.0, [0, 1, 1, 1])):
            for overlap, own in enumerate(expected):
                outcome = run(
                    workers=1, workload=Deadweight(ROUND), computing=Fixed(compute), links=links,
                    gradients=self.STEPS, overlap=overlap,
                )  # fmt: skip
                assert max(outcome.staleness) == own
                assert outcome.staleness[own] >= self.STEPS - own

    @pytest.mark.parametrize("policy", ["asgd", "fasgd", "downpour", "ringmaster"])
    @pytest.mark.parametrize("overlap", [1, 2])
    def test_with_faults(self, policy: str, overlap: int) -> None:
        """Connections that are cut in the midst of exchanges, on which each push counts once."""
        fields = rough(
            server=Config(policy=policy, kernels="numpy", lr=0.01), overlap=overlap,
            schedule=tuple(Cut(0.11 * number, number % 6) for number in range(1, 30)),
        )  # fmt: skip
        outcome = run(**fields)
        assert outcome.digest == run(**fields).digest
        if policy != "downpour":  # which pushes sums
            assert outcome.report["gradients"] + outcome.report["ignored"] == 120

    def test_workers_that_average_have_nothing_to_overlap(self) -> None:
        with pytest.raises(UsageError, match="leave it out"):
            run(server=Config(policy="average"), overlap=1)


class TestTime:
    def test_one_worker_computes_pushes_fetches(self) -> None:
        outcome = run(
            workers=1,
            workload=Deadweight(ROUND),
            computing=Fixed(2.0),
            links=StarTopology(server="1MB/s", latency=0.25),
            apply_seconds=0.5,
            gradients=10,
        )
        there_and_back = 1.0 + 0.25 + 0.5 + 1.0 + 0.25
        assert outcome.seconds == pytest.approx(10 * (2.0 + there_and_back), abs=10 * NEAR)
        assert outcome.idle == pytest.approx(there_and_back / (2.0 + there_and_back), abs=NEAR)
        assert outcome.staleness == {0: 10}
        sent, received = outcome.traffic
        assert 10 * ROUND < sent < 11 * ROUND + 10_000  # the first offered the model
        assert 11 * ROUND < received < 11 * ROUND + 10_000

    def test_an_update_takes_what_its_bytes_take(self) -> None:
        fields = {"workers": 1, "workload": Deadweight(ROUND), "computing": Fixed(0.0)}
        fast, slow = run(**fields, gradients=10), run(**fields, gradients=10, apply_rate=ROUND)
        touched = 3  # SGD reads parameters and gradient, and writes parameters
        assert fast.seconds == 0
        assert slow.seconds == pytest.approx(10 * touched)
        assert slow.digest != fast.digest or slow.version == fast.version

    def test_workers_share_the_servers_link(self) -> None:
        """In step, eight workers push at an eighth of the rate each, and then all fetch so."""
        outcome = run(
            workers=8,
            workload=Deadweight(ROUND),
            computing=Fixed(1.0),
            links=StarTopology(server="1MB/s", worker="1MB/s"),
            gradients=80,
        )
        assert outcome.seconds == pytest.approx(10 * (1.0 + 8.0 + 8.0), abs=10 * NEAR)
        assert outcome.idle == pytest.approx(16 / 17, abs=NEAR)
        assert max(outcome.staleness) == 7

    def test_out_of_step_both_ways_are_used_at_once(self) -> None:
        """The link sets the pace, and never rests."""
        outcome = run(
            workers=8,
            workload=Deadweight(ROUND),
            computing=LogNormal(1.0, 1.0),
            links=StarTopology(server="1MB/s", worker="1MB/s"),
            gradients=160,
        )
        assert 160.0 < outcome.seconds < 1.25 * 160.0

    def test_a_barrier_waits_for_the_slowest(self) -> None:
        computing = Straggler(Fixed(0.1), times=5.0, workers=(3,))
        server = Config(policy="hardsync", kernels="numpy")
        outcome = run(server=server, workers=4, computing=computing, gradients=40)
        assert outcome.version == 10
        assert outcome.seconds == pytest.approx(10 * 0.5)
        assert [worker.idle_share for worker in outcome.workers] == pytest.approx([0.8] * 3 + [0.0])
        assert set(outcome.staleness) == {0}

    def test_nobody_waits_for_a_straggler_without_one(self) -> None:
        computing = Straggler(Fixed(0.1), times=5.0, workers=(3,))
        outcome = run(workers=4, computing=computing, seconds=10.0, gradients=None)
        assert outcome.seconds == 10.0
        assert [worker.steps for worker in outcome.workers] == pytest.approx(
            [100] * 3 + [20], abs=1
        )
        assert outcome.idle < NEAR

    def test_ssp_bounds_how_far_the_fast_ones_get(self) -> None:
        computing = Straggler(Fixed(0.1), times=10.0)
        server = Config(policy="ssp", set=["s=3"], kernels="numpy")
        outcome = run(server=server, workers=3, computing=computing, seconds=20.0, gradients=None)
        slow, *fast = [worker.steps for worker in outcome.workers]
        assert slow == pytest.approx(20, abs=1)
        assert all(slow + 2 <= steps <= slow + 5 for steps in fast)

    def test_a_budget_is_kept_in_virtual_time(self) -> None:
        server = Config(policy="asgd", kernels="numpy", bandwidth_budget="100KB/s")
        outcome = run(server=server, workload=Deadweight(10_000), gradients=100)
        crossed = outcome.report["budget"]
        assert crossed["peak"] <= 100_000
        assert outcome.seconds >= 2 * 100 * 10_000 / 100_000

    def test_days(self) -> None:
        """Twice as slow at noon, so a mini-batch takes 1.5 times as long over the day."""
        computing = Diurnal(Fixed(0.01), period=10.0, depth=2.0)
        outcome = run(workers=1, computing=computing, seconds=10.0, gradients=None)
        assert outcome.gradients == pytest.approx(1000 / 3**0.5, abs=5)

    def test_hours_of_silence_are_not_waited_out(self) -> None:
        """Heartbeats are answered while a mini-batch takes long."""
        outcome = run(workers=2, computing=Fixed(7200.0), gradients=4)
        assert outcome.seconds == 14400.0
        assert sum(worker.steps for worker in outcome.workers) == 4


class TestWhatHappens:
    def test_a_cut_costs_no_gradient(self) -> None:
        schedule = tuple(Cut(0.05 + 0.1 * number, number % 3) for number in range(12))
        links = StarTopology(server="1MB/s", latency=0.02)
        outcome = run(workers=3, links=links, schedule=schedule, gradients=60)
        assert outcome.gradients == outcome.version == 60
        assert sum(outcome.staleness.values()) == 60

    def test_what_is_sent_in_a_silence_arrives_afterwards(self) -> None:
        """The push of 0.6 s, and no other; two silences that overlap are one."""
        alone = {"workers": 1, "computing": Fixed(0.1), "gradients": 10}
        assert run(**alone).seconds == pytest.approx(1.0)
        one, two = Silence(0.55, 0, 1.0), Silence(0.75, 0, 0.3)
        assert run(**alone, schedule=(one,)).seconds == pytest.approx(1.95)
        assert run(**alone, schedule=(one, two)).seconds == pytest.approx(1.95)

    def test_a_barrier_waits_for_who_is_silent(self) -> None:
        server = Config(policy="hardsync", kernels="numpy")
        schedule = (Silence(0.55, 1, 2.0),)
        outcome = run(server=server, workers=3, computing=Fixed(0.1), schedule=schedule)
        assert outcome.seconds == pytest.approx(0.8 + 1.95)
        assert outcome.workers[0].idle == pytest.approx(1.95)

    def test_a_killed_worker_is_gone(self) -> None:
        outcome = run(workers=3, schedule=(Kill(0.55, 1),), gradients=60)
        assert outcome.workers[1].steps == 5
        assert outcome.gradients == outcome.version == 59
        assert sum(worker.steps for worker in outcome.workers) == 59

    def test_nobody_left(self) -> None:
        outcome = run(workers=2, schedule=(Kill(0.55, 1), Kill(0.35, 0)), gradients=60)
        assert (outcome.gradients, outcome.seconds) == (8, 0.55)

    def test_a_killed_worker_holds_up_a_barrier_no_longer(self) -> None:
        server = Config(policy="hardsync", kernels="numpy")
        outcome = run(server=server, workers=3, schedule=(Kill(0.55, 1),), gradients=60)
        assert outcome.gradients == 59
        assert outcome.version > 25

    def test_who_joins_takes_part(self) -> None:
        outcome = run(workers=1, schedule=(Join(1.0, 3),), seconds=2.0, gradients=None)
        steps = [worker.steps for worker in outcome.workers]
        assert steps == pytest.approx([20, 10, 10, 10], abs=1)

    def test_what_ends_a_worker_ends_the_run(self) -> None:
        class Bad(Deadweight):
            def gradient(self, worker: int, seed: int) -> Any:
                return lambda params: {"w0": np.full(25, np.nan, np.float32)}

        with pytest.raises(BadPush, match="finite"):
            run(workload=Bad(100))

    def test_what_takes_too_long_is_an_error(self) -> None:
        links = StarTopology(server="1MB/s")
        server = Config(policy="asgd", kernels="numpy", worker_deadline=1.0)
        with pytest.raises(DeadlineExceeded, match=r"did not send .* in 4 s"):
            run(server=server, workers=8, workload=Deadweight(ROUND), links=links, patience=3.0)

    def test_progress_is_told(self) -> None:
        reported: list[tuple[int, float]] = []
        cluster = Cluster(server=Config(policy="asgd"), workers=2, gradients=5)
        simulate(cluster, lambda *so_far: reported.append(so_far))
        assert [done for done, _seconds in reported] == [1, 2, 3, 4, 5]
        assert [seconds for _done, seconds in reported] == pytest.approx([0.1, 0.1, 0.2, 0.2, 0.3])

    def test_it_can_be_stopped(self) -> None:
        so_far: list[int] = []
        cluster = Cluster(server=Config(policy="asgd"), workers=1, gradients=50)
        reported, stopping = lambda done, _seconds: so_far.append(done), lambda: len(so_far) == 7
        outcome = simulate(cluster, reported, stopping)
        assert not outcome.complete
        assert outcome.gradients == outcome.version == 7
        assert simulate(cluster).complete


class TestLearning:
    @pytest.mark.parametrize("policy", POLICIES)
    def test_every_policy_runs(self, policy: str) -> None:
        """With failures and joins; what is idle, used and sent adds up."""
        server = Config(policy=policy, kernels="numpy", lr=0.05)
        outcome = run(**rough(server=server))
        assert outcome.gradients >= 110
        assert 0 <= outcome.idle < 1
        assert outcome.version == outcome.report["version"]
        assert (outcome.version > 0) == (policy != "average"), "its workers have the model"
        assert all(np.isfinite(array).all() for array in outcome.params.values())
        assert len(outcome.workers) == 8
        times = [sample.seconds for sample in outcome.samples]
        assert times == sorted(times)
        assert times[-1] == outcome.seconds
        assert outcome.samples[-1].loss < outcome.samples[0].loss

    def test_workers_that_average_their_models(self) -> None:
        """They train at their own paces, and each byte between two of them is counted once."""
        outcome = run(
            server=Config(policy="average", lr=0.1, kernels="numpy", set=["grace=0.1"]),
            computing=Straggler(Fixed(0.1), times=4.0),
            links=StarTopology(worker="100Mbit/s", latency=0.001),
            gradients=200,
            every=1.0,
        )
        steps = [worker.steps for worker in outcome.workers]
        assert sum(steps) == outcome.gradients == 200
        assert min(steps[1:]) > 3.5 * steps[0], "no worker waits for the straggler"
        assert outcome.idle < 0.05
        assert outcome.version == 0
        assert outcome.staleness == {}
        first, last = outcome.samples[0], outcome.samples[-1]
        assert last.accuracy > first.accuracy
        sent, received = outcome.traffic
        assert max(sent, received) < last.nbytes < sent + received

    def test_it_learns(self) -> None:
        outcome = run(gradients=1500, computing=LogNormal(0.1), server=Config(policy="fasgd"))
        assert outcome.samples[-1].accuracy > 0.9
        assert outcome.samples[-1].gradients == 1500

    def test_a_gate_and_codecs_save_bytes(self) -> None:
        plain = run(gradients=60)
        server = Config(
            policy="asgd", push_codec=["topk:0.05"], fetch_codec=["int8"], kernels="numpy"
        )
        coded = run(gradients=60, server=server)
        gated = run(gradients=60, server=dataclasses.replace(server, gate="constant:p_push=0.5"))
        nbytes = [sum(outcome.traffic) for outcome in (plain, coded, gated)]
        assert nbytes[0] > 2 * nbytes[1]
        assert nbytes[1] > nbytes[2]


PROGRAM = """
from tests.sim.cluster.test_run import rough, run
import sys
print(run(**rough(seed=int(sys.argv[1]))).digest)
"""


class TestDeterminism:
    def test_the_same_seed_gives_the_same_run(self) -> None:
        first, again = run(**rough()), run(**rough())
        assert describe(first) == describe(again)

    def test_another_seed_gives_another(self) -> None:
        assert run(**rough(seed=1)).digest != run(**rough(seed=2)).digest

    @pytest.mark.parametrize("pieces", [100, 1000, 100_000])
    def test_chunks_of_the_byte_stream_do_not_matter(self, pieces: int) -> None:
        fields = rough(links=StarTopology(worker="100Mbit/s", server="20Mbit/s", latency=0.001))
        whole, pieced = run(**fields), run(**fields, pieces=pieces)
        assert describe(whole) == describe(pieced)

    @pytest.mark.slow
    def test_neither_do_processes_and_hash_seeds(self) -> None:
        digests = [
            subprocess.run(
                [sys.executable, "-c", PROGRAM, seed],
                env={**os.environ, "PYTHONHASHSEED": hash_seed},
                capture_output=True,
                text=True,
                check=True,
                cwd=ROOT,
            ).stdout.strip()
            for seed, hash_seed in (("5", "1"), ("5", "2"))
        ]
        assert digests[0] == digests[1] == run(**rough(seed=5)).digest

    def test_a_recorded_run_is_replayed_to_the_same_bits(self, tmp_path: Path) -> None:
        """A journal of a simulated run replays as that of a real run does."""
        path = tmp_path / "run.journal"
        server = Config(policy="fasgd", kernels="numpy", lr=0.01, record=path)
        outcome = run(**rough(server=server))
        again = replayed(path, "numpy")
        assert again.complete
        assert again.engine.store is not None
        assert_same(dict(again.engine.store.current.arena.views), outcome.params)
        assert again.engine.store.version == outcome.version


def describe(outcome: ClusterResult) -> str:
    """Everything about an outcome."""
    fields = {field.name: getattr(outcome, field.name) for field in dataclasses.fields(outcome)}
    params = fields.pop("params")
    digest = hashlib.sha256(b"".join(array.tobytes() for array in params.values())).hexdigest()
    del fields["messages"]  # pieces make more of them, perhaps
    report = fields.pop("report")
    memory = {name: each for name, each in report["memory"].items() if name != "resident"}
    fields["report"] = {**report, "memory": memory}
    return json.dumps([fields, digest], default=str, sort_keys=True)


class TestWhatCannotBe:
    @each_row(
        ("fields", "says"),
        [
            ({"workers": 0}, "0 workers cannot train"),
            ({"gradients": None}, "would never end"),
            ({"gradients": 0}, "gradients is 0"),
            ({"seconds": -1.0}, "seconds is -1"),
            ({"every": 0.0}, "every is 0"),
            ({"patience": float("nan")}, "patience is nan"),
            ({"apply_seconds": -0.1}, "apply_seconds is -0.1"),
            ({"apply_rate": 0.0}, "apply_rate is 0"),
            ({"seed": -1}, "the seed is -1"),
            (
                {"schedule": (Cut(1.0, 4),)},
                r"^--cut 1:4 is of worker 4, and there are workers 0 to 3 by then",
            ),
            ({"schedule": (Kill(1.0, 5), Join(2.0, 9))}, r"there are workers 0 to 3 by then"),
            (
                {"schedule": (Kill(-1.0, 0),)},
                "^--kill -1:0 comes at -1 s, and training begins at 0 s: give a finite number",
            ),
            ({"schedule": (Silence(1.0, 0, 0.0),)}, "give a finite number of seconds, more than 0"),
            ({"schedule": (Silence(1.0, 4, 1.0),)}, r"there are workers 0 to 3 by then"),
            ({"schedule": (Join(1.0, 0),)}, "^--join 1:0 has 0 workers join: give 1 or more"),
        ],
    )
    def test_of_a_cluster(self, fields: dict[str, Any], says: str) -> None:
        with pytest.raises(UsageError, match=says):
            Cluster(**{"gradients": 10, **fields})

    def test_who_joins_can_fail_later(self) -> None:
        Cluster(gradients=10, schedule=(Cut(3.0, 5), Join(2.0, 2)))

    @each_row(
        ("make", "says"),
        [
            (lambda: StarTopology(latency=-0.1), "latency is -0.1 s"),
            (lambda: StarTopology(jitter=float("inf")), "jitter is inf s"),
            (lambda: StarTopology(server="fast"), "'fast' is not a rate"),
            (lambda: StarTopology(worker=-5), "is not a rate"),
            (lambda: Deadweight(3), "cannot be"),
            (lambda: Fixed(-1.0), "compute time is -1"),
            (lambda: LogNormal(0.1, -1.0), "sigma of compute times is -1"),
            (lambda: Straggler(Fixed(1.0), times=float("nan")), "factor is nan"),
            (lambda: Straggler(Fixed(1.0), times=0.0), "factor is 0: give a finite number, more"),
            (lambda: Straggler(Fixed(1.0), workers=(-1,)), "number is -1"),
            (lambda: Diurnal(Fixed(1.0), period=0.0), "a day of 0 seconds"),
        ],
    )
    def test_of_its_parts(self, make: Any, says: str) -> None:
        with pytest.raises(UsageError, match=says):
            make()

    @each_row(
        ("server", "says"),
        [
            (Config(policy="softsync", set=["n=9"]), "n"),
            (Config(policy="fasdg"), "did you mean 'fasgd'"),
            (Config(set=["rate=1"]), "rate"),
        ],
    )
    def test_of_its_server(self, server: Config, says: str) -> None:
        with pytest.raises(UsageError, match=says):
            simulate(Cluster(server=server, gradients=10))
