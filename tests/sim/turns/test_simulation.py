"""Simulations: the same result every time, however they are carried out, and the right one."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest

from aiops.algorithms.base import Algorithm, Decision, Policy
from aiops.client.params import Params
from aiops.codecs.int8 import Int8
from aiops.errors import BadPush, ConflictError, StaleGradient, UsageError
from aiops.kernels.rule import Rule
from aiops.lab.workloads import PerceptronTask
from aiops.model.layout import Array, Ints
from aiops.sim.turns.run import Run, digest, simulate
from aiops.sim.turns.simulation import Simulation
from aiops.sim.turns.task import Batches
from tests.rows import each_row
from tests.sim.turns.cases import CASES, OTHERS, TASK, of_case, random_pieces, simulation
from tests.sim.turns.lines import ByteLine, in_pieces


def parameters(run: Run) -> Array:
    """Return a copy of the server's parameters."""
    store = run.engine.store
    assert store is not None
    return store.current.arena.data.view(np.float32).copy()


def finished(case: Simulation, **how: Any) -> tuple[str, Array]:
    """Run a simulation; return its digest and its parameters."""
    with Run(case, TASK, **how) as run:
        return run.execute().digest, parameters(run)


class TestDigest:
    @pytest.mark.parametrize("case", OTHERS, ids="-".join)
    def test_is_the_same_however_messages_move(self, case: tuple[str, str]) -> None:
        chosen = of_case(*case, iterations=25)
        expected = finished(chosen)[0]
        assert finished(chosen, line=ByteLine)[0] == expected
        assert finished(chosen, jobs=3, line=in_pieces(random_pieces(5)))[0] == expected

    @pytest.mark.parametrize("way", ["bare", "gate", "codecs", "both", "reapply"])
    def test_differs_with_the_seed(self, way: str) -> None:
        digests = {finished(of_case("fasgd", way, seed=seed))[0] for seed in range(3)}
        assert len(digests) == 3

    @pytest.mark.parametrize(
        "change",
        [
            {"lr": 0.006},
            {"clients": 5},
            {"batch_size": 9},
            {"iterations": 61},
            {"selection": "round-robin"},
            {"order": "sequential"},
            {"gate": "bfasgd:c_fetch=0.1"},
            {"fetch_codec": ("int8",)},
            {"set": ("gamma=0.9",)},
        ],
        ids=str,
    )
    def test_differs_with_every_setting(self, change: dict[str, Any]) -> None:
        assert finished(simulation())[0] != finished(simulation(**change))[0]

    def test_does_not_depend_on_when_one_looks(self) -> None:
        assert finished(simulation(samples=0))[0] == finished(simulation(samples=30))[0]

    def test_backends_agree(self) -> None:
        case = of_case("fasgd", "gate")
        digests = {
            finished(dataclasses.replace(case, kernels=name))[0] for name in ("numba", "numpy")
        }
        assert len(digests) == 1

    @pytest.mark.slow
    def test_is_the_same_in_another_process(self) -> None:
        chosen = [(name, way) for name, way in CASES if name in ("fasgd", "hardsync", "easgd")]
        here = [finished(of_case(name, way))[0] for name, way in chosen]
        found = subprocess.run(
            [sys.executable, "-c", _ELSEWHERE, json.dumps(chosen)],
            env={**os.environ, "PYTHONHASHSEED": "4711", "PYTHONPATH": os.pathsep.join(sys.path)},
            capture_output=True,
            text=True,
            check=True,
            timeout=60,
        )
        assert found.stdout.split() == here


_ELSEWHERE = """
import json, sys
from tests.sim.turns.cases import of_case
from tests.sim.turns.test_simulation import finished
for name, way in json.loads(sys.argv[1]):
    print(finished(of_case(name, way))[0])
"""


class TestMathematics:
    """Equivalences that the papers state."""

    @pytest.mark.parametrize("clients", [1, 3, 4])
    def test_hardsync_is_sgd_with_a_mini_batch_of_all(self, clients: int) -> None:
        case = simulation("hardsync", lr=0.2, clients=clients, selection="round-robin")
        params = TASK.initial(case.seed)
        batches = Batches(TASK.examples, case.batch_size, case.seed)
        for update in range(60 // clients):
            turns = range(update * clients, (update + 1) * clients)
            rows = np.concatenate([batches.rows(turn) for turn in turns])
            gradient = TASK.model.gradients(params, TASK._x[rows], TASK._y[rows])[1]
            for name, array in params.items():
                array -= np.float32(0.2) * gradient[name]
        with Run(case, TASK) as run:
            run.execute()
            model = run.dispatcher.model
            for name, array in params.items():
                np.testing.assert_allclose(model[name], array, rtol=2e-4, atol=2e-5)

    def test_whoever_comes_first_hardsync_is_the_same_updates(self) -> None:
        """Within a round the order is another, and so is the rounding of the sum."""
        runs = []
        for rule in ("round-robin", "uniform"):
            case = simulation("hardsync", selection=rule, order="sequential", lr=0.2)
            with Run(case, TASK) as run:
                outcome = run.execute()
                runs.append((outcome.curve[-1].version, outcome.staleness, parameters(run)))
        assert runs[0][:2] == runs[1][:2] == (15, {0: 60})
        np.testing.assert_allclose(runs[0][2], runs[1][2], rtol=1e-3, atol=1e-5)

    def test_one_softsync_updates_as_often_as_hardsync_and_nobody_waits(self) -> None:
        """In turn, the gradients of a round but the last are of one update before."""
        outcomes = {
            policy: simulate(simulation(policy, selection="round-robin"), TASK)
            for policy in ("hardsync", "softsync")
        }
        assert {outcome.curve[-1].version for outcome in outcomes.values()} == {15}
        assert outcomes["hardsync"].staleness == {0: 60}
        assert outcomes["softsync"].staleness == {0: 4 + 14, 1: 14 * 3}

    def test_one_softsync_of_one_worker_is_hardsync(self) -> None:
        runs = [finished(simulation(policy, clients=1)) for policy in ("hardsync", "softsync")]
        np.testing.assert_array_equal(runs[0][1], runs[1][1])

    def test_lambda_softsync_without_modulation_is_asgd(self) -> None:
        softsync = finished(simulation("softsync", set=("n=4", "modulate=none"), lr=0.1))
        assert softsync[1].tobytes() == finished(simulation("asgd", lr=0.1))[1].tobytes()

    @pytest.mark.parametrize("clients", [4, 12])
    def test_mean_staleness_of_asgd_is_the_number_of_others(self, clients: int) -> None:
        outcome = simulate(simulation("asgd", clients=clients, iterations=1600, lr=0.01), TASK)
        assert outcome.mean_staleness == pytest.approx(clients - 1, rel=0.1)

    def test_in_turn_the_staleness_of_asgd_is_the_number_of_others(self) -> None:
        outcome = simulate(simulation("asgd", clients=5, selection="round-robin"), TASK)
        assert outcome.staleness == {0: 1, 1: 1, 2: 1, 3: 1, 4: 56}

    def test_learns(self) -> None:
        case = simulation("fasgd", iterations=900, hidden=16)
        outcome = simulate(case, PerceptronTask("digits", 16))
        assert outcome.curve[0].error > 0.7
        assert outcome.curve[-1].error < 0.2

    def test_a_gradient_that_was_refused_is_computed_again(self) -> None:
        """Of the same mini-batch: its worker owes the server that one."""
        seen: list[tuple[int, ...]] = []

        class Noted(PerceptronTask):
            def gradient(self, params: Any, rows: Any, out: Any) -> None:
                seen.append(tuple(rows.tolist()))
                super().gradient(params, rows, out)

        case = simulation("hardsync", set=("admission=reject",), order="random", clients=3)
        with Run(case, Noted("digits", 8)) as run:
            run.execute()
            refused = run.engine.membership.refused[StaleGradient.code]
            owed = sum(worker.refused for worker in run.dispatcher.workers)
            assert refused == sum(worker.recomputed for worker in run.dispatcher.workers) > 0
        assert len(seen) - len(set(seen)) == refused - owed


class TestRun:
    def test_curve(self) -> None:
        outcome = simulate(simulation(iterations=100, samples=4), TASK)
        assert [sample.iteration for sample in outcome.curve] == [0, 25, 50, 75, 100]
        assert [sample.version for sample in outcome.curve] == [0, 25, 50, 75, 100]
        first, last = outcome.curve[0], outcome.curve[-1]
        assert last.pushes == 100
        assert last.fetches == 100 + 4, "each began with a fetch"
        assert (last.cost, last.error) != (first.cost, first.error)
        assert first.vbar == 1.0
        assert last.vbar is not None
        assert last.vbar < 1.0
        assert last.pushed > 100 * 4 * TASK.model.shapes["layer0.weight"][0]
        assert outcome.complete

    def test_without_samples_there_are_two(self) -> None:
        outcome = simulate(simulation(samples=0), TASK)
        assert [sample.iteration for sample in outcome.curve] == [0, 60]

    def test_report_is_json_and_begins_with_what_counts(self) -> None:
        report = simulate(simulation(), TASK).report()
        assert list(report)[:7] == [
            *("digest", "validation_error", "validation_cost", "fetches", "pushes", "bytes"),
            "iterations_per_second",
        ]
        again = json.loads(json.dumps(report))
        assert Simulation(**{**again["simulation"], **_TUPLES}) == simulation()

    def test_tells_how_far_it_is(self) -> None:
        reported: list[int] = []
        simulate(simulation(), TASK, on_progress=reported.append)
        assert reported
        assert reported == sorted(reported)
        assert reported[-1] <= 60

    def test_half_way_it_says_so(self) -> None:
        with Run(simulation(), TASK) as run:
            run.dispatcher.run(10)
            run.curve.append(run._sample())
            outcome = run.outcome()
        assert not outcome.complete
        assert outcome.curve[-1].iteration == 10
        assert outcome.digest == finished(simulation(iterations=10))[0]

    def test_a_gradient_that_is_not_finite_is_named(self) -> None:
        class Broken(PerceptronTask):
            def gradient(self, params: Any, rows: Any, out: Any) -> None:
                out.arena.data.view(np.float32)[:] = np.nan

        outcome = simulate(simulation(), Broken("digits", 8))
        assert not outcome.complete
        assert outcome.diverged is not None
        assert re.search(r"layer0.*holds nan", outcome.diverged)

    def test_a_payload_that_its_codec_refuses_is_no_divergence(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        with Run(simulation(push_codec=("int8",)), TASK) as run:
            refuse = classmethod(lambda *_given: "has 9 bytes instead of 9")
            monkeypatch.setattr(Int8, "check", refuse)
            with pytest.raises(BadPush, match="its payload is no int8 of this tensor: it has 9"):
                run.execute()
        assert run._diverged is None

    def test_the_rest_is_pushed_at_the_end(self) -> None:
        gate = "periodic:k_push=8,k_fetch=8"
        with Run(simulation(gate=gate, iterations=30), TASK) as run:
            run.execute()
            pushed = run.engine.membership.ledger()["pushed"]["with_payload"]
            run.dispatcher.finish()
            left = run.engine.membership.ledger()["pushed"]["with_payload"] - pushed
        assert 0 < left <= 4


class PlainTask:
    """A task of a user's: the mean of some numbers."""

    examples: Any = 600

    def initial(self, seed: int) -> dict[str, Array]:
        return {"mean": np.zeros(1, np.float32)}

    def gradient(self, params: Any, rows: Any, out: Any) -> None:
        out["mean"][:] = params["mean"] - 3

    def validate(self, params: Any) -> tuple[float, float]:
        return 0.0, 0.0


_TUPLES: dict[str, tuple[str, ...]] = {"set": (), "push_codec": (), "fetch_codec": ()}


class ScaledTask(PerceptronTask):
    """A perceptron on digits whose cost is counted in other units: so are its gradients."""

    def __init__(self, hidden: int, scale: float) -> None:
        super().__init__("digits", hidden)
        self._scale = np.float32(scale)

    def gradient(
        self, params: Mapping[str, Array], rows: Ints, out: Params, *, flipped: bool = False
    ) -> None:
        """Write the gradient of the scaled cost."""
        super().gradient(params, rows, out, flipped=flipped)
        for name in out:
            out[name][...] *= self._scale


class TestGates:
    def passed(self, hidden: int, scale: float, gate: str) -> tuple[float, float]:
        """Return the shares of pushes and fetches, once v̄ has forgotten that it began at 1."""
        case = simulation(
            "fasgd", set=("relative=0.01", "lr=0.002"), gate=gate, iterations=2400, samples=3
        )
        with Run(case, ScaledTask(hidden, scale)) as run:
            outcome = run.execute()
        before, after = outcome.curve[-2:]
        steps = after.iteration - before.iteration
        pushes, fetches = after.pushes - before.pushes, after.fetches - before.fetches
        return pushes / steps, fetches / steps

    @pytest.mark.slow
    def test_a_relative_gate_has_the_same_share_on_models_of_other_scales(self) -> None:
        """v̄ differs 500 times between the models; the paper's constant is for one of them."""
        models = [(8, 1.0), (32, 2e-3)]
        relative = "bfasgd:c_push=4,c_fetch=3,relative=true"
        shares = [self.passed(*model, relative) for model in models]
        assert [push for push, _fetch in shares] == pytest.approx([0.2, 0.2], rel=0.15)
        assert shares[0][1] == pytest.approx(shares[1][1], rel=0.1)
        papers = "bfasgd:c_push=0.15,c_fetch=0.1,share=0"
        (push, _fetch), (others, _fetches) = (self.passed(*model, papers) for model in models)
        assert push > 8 * others
        bounded = self.passed(*models[1], "bfasgd:c_push=0.15,c_fetch=0.1")[0]
        assert bounded == pytest.approx(0.05, rel=0.1), "its least share"

    def test_a_gate_that_starves_is_in_the_result(self) -> None:
        case = simulation(
            "fasgd", set=("relative=0.01",), gate="bfasgd:c_push=0.15", iterations=600
        )
        outcome = simulate(case, ScaledTask(8, 2e-3))
        [text] = outcome.warnings
        assert "the gate bfasgd lets" in text
        assert outcome.report()["warnings"] == [text]

    def test_the_statistic_on_its_floor_is_in_the_result_and_a_checkpoint_knows_it(
        self, tmp_path: Path
    ) -> None:
        case = simulation("fasgd", iterations=300, samples=0)
        task = ScaledTask(8, 1e-4)
        whole = simulate(case, task)
        [text] = whole.warnings
        assert "within 10 % of its floor" in text
        warned = int(re.findall(r"at version (\d+)", text)[0])
        for pause in (10, warned - 1, warned, warned + 1, 200):
            with Run(case, task) as run:
                run.dispatcher.run(pause)
                run.save(tmp_path / "run.ckpt")
            with Run.load(tmp_path / "run.ckpt", task) as run:
                outcome = run.execute()
            assert outcome.warnings == whole.warnings
            assert outcome.digest == whole.digest


class TestRefused:
    @each_row(
        ("settings", "match"),
        [
            ({"clients": 0}, "clients must be 1 or more, not 0"),
            ({"batch_size": 0}, "batch-size must be 1 or more"),
            ({"iterations": -3}, "iterations must be 1 or more, not -3"),
            ({"hidden": 0}, "hidden must be 1 or more"),
            ({"samples": -1}, "samples must be 0 or more"),
            ({"seed": -1}, "seed must be 0 or more"),
            ({"clients": "4"}, "clients must be a whole number, not '4'"),
            ({"batch_size": 2.5}, "batch_size must be a whole number, not 2.5"),
            ({"lr": "0.1"}, "lr must be a number, or None, not '0.1'"),
            ({"dataset": None}, "dataset must be a text, not None"),
            ({"waits": "no"}, "waits must be true or false, not 'no'"),
            ({"push_codec": "int8"}, r"tuple of texts, not 'int8': write \['int8'\]"),
            ({"fetch_codec": None}, "fetch_codec must be a list or tuple of texts, not None"),
            ({"set": "lr=1"}, r"set must be a list or tuple of texts, not 'lr=1': write \['lr=1"),
            ({"set": (1,)}, r"set must be a list or tuple of texts, not \(1,\)"),
            ({"batch_size": 2000}, "give 1 to 1198"),
            ({"order": "sequentially"}, "no order of examples is called 'sequentially'.*sequent"),
            ({"selection": "unifrom"}, "no selection rule is called 'unifrom'.*uniform"),
            ({"set": ("gamma",)}, "write key=value"),
            ({"set": ("gama=0.9",)}, "gama.*gamma"),
            ({"gate": "bfasg"}, "bfasg"),
            ({"push_codec": ("topkk",)}, "topkk"),
        ],
        ids=str,
    )
    def test_settings(self, settings: Mapping[str, Any], match: str) -> None:
        with pytest.raises(UsageError, match=match), Run(simulation(**settings), TASK):
            pass

    @each_row(
        ("part", "value", "match"),
        [
            ("examples", None, "PlainTask has examples = None, and it must be a whole number"),
            ("examples", 2.5, "PlainTask has examples = 2.5, and it must be a whole number"),
            ("gradient", None, "PlainTask has 'gradient', and it must be a method"),
            ("initial", lambda seed: [np.zeros(1)], r"initial\(\) returned a list, .* a dict of"),
            ("initial", lambda seed: None, r"initial\(\) returned None, and it must return a dict"),
            ("validate", lambda params: 0.5, r"validate\(\) returned 0.5, .* two numbers, the co"),
            ("validate", lambda params: None, r"validate\(\) returned None, and it must return"),
            ("validate", lambda params: (1, 2, 3), r"validate\(\) returned a tuple, and it must"),
            ("validate", lambda params: "ab", r"validate\(\) returned a str, and it must"),
        ],
    )
    def test_tasks(self, part: str, value: Any, match: str) -> None:
        task = PlainTask()
        setattr(task, part, value)
        with pytest.raises(UsageError, match=f"^the task .*{match}"):
            simulate(simulation("asgd"), task)

    @each_row("part", ["initial", "examples", "gradient", "validate"])
    def test_tasks_that_lack_a_part(self, part: str) -> None:
        members = {**vars(PlainTask), "examples": 600}
        del members[part]
        with pytest.raises(UsageError, match=f"the task Lacking has no '{part}': a task has initi"):
            simulate(simulation("asgd"), type("Lacking", (), members)())

    def test_a_class_is_no_task(self) -> None:
        with pytest.raises(UsageError, match=r"is the class PlainTask: give an .* PlainTask\(\)"):
            simulate(simulation("asgd"), PlainTask)  # type: ignore[arg-type]

    def test_policies(self) -> None:
        with pytest.raises(UsageError, match=r"fasgdd.*fasgd"):
            simulation("fasgdd").engine()
        with pytest.raises(ConflictError, match="n = 9 groups cannot be made of 4 workers"):
            simulation("softsync", set=("n=9",)).engine()
        with pytest.raises(ConflictError, match="simulate a cluster"):
            simulation("average").engine()
        with pytest.raises(ConflictError, match=r"no time.*simulate a cluster"):
            simulation("asgd", set=("schedule_unit=seconds",)).engine()
        with pytest.raises(ConflictError, match="hardsync"):
            simulation("hardsync", gate="bfasgd").engine()

    def test_nobody_is_ever_answered(self) -> None:
        case = simulation(f"{__name__}:Silent")
        with pytest.raises(UsageError, match="all 4 clients wait, and silent answers none"):
            simulate(case, TASK)

    def test_a_rule_that_selects_only_who_waits(self) -> None:
        """Priorities that grow have one client selected for ever, and hardsync wants them all."""
        case = simulation("hardsync", selection="softmax:add=30")
        with pytest.raises(UsageError, match=r"selected only clients that wait.*1 of 4"):
            simulate(case, TASK)


class _Silent(Policy):
    def push(self, worker: int, staleness: int) -> Decision:
        return Decision(True, hold=True)

    def may_go(self, worker: int, published: bool) -> bool:
        return False


def _rule(w: Array, g: Array, step: Any) -> tuple[Array]:
    return (w - step * g,)


@dataclass(frozen=True, kw_only=True)
class Silent(Algorithm):
    """Answers no push, so that all wait."""

    name: ClassVar[str] = "silent"

    def policy(self, workers: int | None) -> Policy:
        return _Silent()

    def rule(self) -> Rule:
        return Rule(_rule)


class TestVersions:
    """Clients read versions where the server keeps them."""

    @pytest.mark.parametrize(
        "case",
        [
            (name, way)
            for name, way in CASES
            if way in ("bare", "reapply") and name in ("fasgd", "softsync-2", "hardsync", "dcasgd")
        ],
        ids="-".join,
    )
    def test_none_is_written_while_a_client_reads_it(self, case: tuple[str, str]) -> None:
        with Run(of_case(*case), TASK) as run:
            dispatcher, store = run.dispatcher, run.engine.store
            assert store is not None
            held = [worker.params.arena.data.tobytes() for worker in dispatcher.workers]
            borrowed = 0
            for _ in range(60):
                turn = dispatcher.turn()
                for number, worker in enumerate(dispatcher.workers):
                    now = worker.params.arena.data.tobytes()
                    # At a barrier the last to come has all of them answered.
                    assert number == turn or now == held[number] or case[0] == "hardsync"
                    held[number] = now
                    borrowed += getattr(worker.params, "borrowed", False)
                    fetched = np.array([store.current.number]) >= worker.params.version
                    assert fetched.all()
                assert store.alive <= len(dispatcher.workers) + 1
            assert borrowed == 60 * 4

    def test_are_shared(self) -> None:
        """After an update at a barrier all hold one and the same, and no more than that lives."""
        with Run(simulation("hardsync", iterations=40), TASK) as run:
            run.execute()
            assert run.engine.store is not None
            assert run.engine.store.alive == 1
            arenas = {id(worker.params.arena) for worker in run.dispatcher.workers}
            assert arenas == {id(run.engine.store.current.arena)}

    def test_their_arenas_are_used_again(self) -> None:
        with Run(simulation(iterations=200), TASK) as run:
            seen: set[int] = set()
            for _ in range(200):
                run.dispatcher.turn()
                assert run.engine.store is not None
                seen.add(run.engine.store.current.arena.data.ctypes.data)
        assert len(seen) <= 4 + 1 + 4  # one for each client, the newest, and the spares

    def test_parameters_cannot_be_written_to(self) -> None:
        with Run(simulation(), TASK) as run:
            model = run.dispatcher.model
            with pytest.raises(ValueError, match="read-only"):
                model["layer0.bias"][...] = 0
            with pytest.raises(ValueError, match="read-only"):
                run.dispatcher.workers[0].params["layer0.bias"][...] = 0

    def test_the_digest_has_them(self) -> None:
        with Run(simulation(), TASK) as run:
            run.execute()
            before = digest(run.dispatcher)
            run.dispatcher.workers[0].params.versions[0] += 1
            assert digest(run.dispatcher) != before
