"""Servers written for FRED come to what ours do."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from aiops.errors import UsageError
from aiops.lab.workloads import PerceptronTask
from aiops.model.layout import Array
from aiops.sim.turns.fred import FredResult, simulate_fred
from aiops.sim.turns.run import Run
from tests.sim.turns.cases import TASK, simulation


class Shared:
    """A shared variable of Theano's, as FRED's parameters are."""

    def __init__(self, value: Array) -> None:
        self._value = value.copy()

    def get_value(self) -> Array:
        return self._value.copy()

    def set_value(self, value: Array) -> None:
        self._value = value


class Synchronous:
    """The listing of the FASGD paper's section 3, to the letter."""

    def __init__(self, params: Sequence[Array], clients: int, learning_rate: float) -> None:
        self.params = [Shared(array) for array in params]
        self.timestamp = 0
        self.clients, self.learning_rate = clients, learning_rate
        self.pending_grads: dict[int, Any] = {}

    def apply_update(self, grads: Any, timestamp: int, client: int) -> tuple[Any, int, bool]:
        unblock = False
        self.pending_grads[client] = grads
        if len(self.pending_grads) == self.clients:
            # all grads is a list of lists of grads
            # each of which has the same length
            all_grads = self.pending_grads.values()
            # apply the param update
            for this_grad in all_grads:
                for g, p in zip(this_grad, self.params, strict=True):
                    old_p = p.get_value()
                    mod = g / self.clients
                    p.set_value(old_p - self.learning_rate * mod)
            self.timestamp += 1
            # weights have changed
            unblock = True
            self.pending_grads = {}
        return self.params, self.timestamp, unblock


class FASGD:
    """Equations 4 to 8 of the paper, in FRED's style: plain arrays, updated in place."""

    def __init__(self, params: dict[str, Array], learning_rate: float) -> None:
        self.params = {name: array.copy() for name, array in params.items()}
        self.timestamp, self.learning_rate = 0, learning_rate
        self.n = {name: np.zeros_like(array) for name, array in params.items()}
        self.b = {name: np.zeros_like(array) for name, array in params.items()}
        self.v = {name: np.ones_like(array) for name, array in params.items()}

    def apply_update(self, grads: Any, timestamp: int, client: int) -> tuple[Any, int, bool]:
        tau = max(self.timestamp - timestamp, 1)
        for name, g in grads.items():
            n, b, v = self.n[name], self.b[name], self.v[name]
            n[...] = 0.95 * n + 0.05 * g**2
            b[...] = 0.95 * b + 0.05 * g
            v[...] = 0.9 * v + 0.1 * np.sqrt(n - b**2 + 1e-4)
            self.params[name] -= self.learning_rate / (v * tau) * g
        self.timestamp += 1
        return self.params, self.timestamp, True


def run(server: Any, **settings: Any) -> FredResult:
    chosen = {"clients": 4, "iterations": 60, "batch_size": 8, "order": "random", "samples": 2}
    return simulate_fred(server, TASK, **{**chosen, **settings})


def ours(policy: str, **settings: Any) -> tuple[Any, dict[str, Array]]:
    with Run(simulation(policy, **settings), TASK) as run:
        outcome = run.execute()
        return outcome, {name: array.copy() for name, array in run.dispatcher.model.items()}


def synchronous(**settings: Any) -> Synchronous:
    return Synchronous(list(TASK.initial(0).values()), 4, 0.2, **settings)


@pytest.mark.parametrize("rule", ["uniform", "round-robin", "softmax:add=-1"])
def test_fred_s_synchronous_server_is_hardsync(rule: str) -> None:
    found = run(synchronous(), selection=rule)
    outcome, model = ours("hardsync", lr=0.2, selection=rule)
    assert found.timestamp == outcome.curve[-1].version == 15
    assert found.staleness == dict(outcome.staleness) == {0: 60}
    for name, array in model.items():
        np.testing.assert_allclose(found.params[name], array, rtol=2e-4, atol=1e-6)
    for theirs, point in zip(found.curve, outcome.curve, strict=True):
        assert theirs.iteration == point.iteration
        assert theirs.cost == pytest.approx(point.cost, rel=1e-4)


@pytest.mark.parametrize("rule", ["uniform", "round-robin"])
def test_an_fasgd_of_fred_s_is_ours(rule: str) -> None:
    found = run(FASGD(TASK.initial(0), 0.005), selection=rule, iterations=120)
    outcome, model = ours("fasgd", selection=rule, iterations=120)
    assert found.staleness == dict(outcome.staleness)
    assert found.mean_staleness == outcome.mean_staleness
    for name, array in model.items():
        np.testing.assert_allclose(found.params[name], array, rtol=1e-3, atol=2e-5)
    assert found.curve[-1].error == pytest.approx(outcome.curve[-1].error, abs=0.01)


def test_is_the_same_every_time() -> None:
    assert run(synchronous()).digest == run(synchronous()).digest
    assert run(synchronous(), seed=1).digest != run(synchronous()).digest


def test_clients_are_given_copies() -> None:
    """A server that changes its arrays in place changes no client's before its turn."""
    found = run(FASGD(TASK.initial(0), 0.0), iterations=8)
    np.testing.assert_array_equal(found.params["layer0.bias"], TASK.initial(0)["layer0.bias"])
    assert max(found.staleness) > 0


def test_the_mini_batches_are_those_of_a_simulation() -> None:
    """FRED's own order is another, and is asked for."""
    given = {"clients": 4, "iterations": 60, "samples": 2}
    found = simulate_fred(FASGD(TASK.initial(0), 0.005), TASK, **given)
    assert found.digest == run(FASGD(TASK.initial(0), 0.005)).digest
    assert found.digest != run(FASGD(TASK.initial(0), 0.005), order="sequential").digest
    assert found.diverged is None


def test_a_run_ends_where_it_diverges() -> None:
    class Exploding(FASGD):
        def apply_update(self, grads: Any, timestamp: int, client: int) -> tuple[Any, int, bool]:
            if self.timestamp == 5:
                self.params["layer0.weight"] *= np.float32(np.inf)
            return super().apply_update(grads, timestamp, client)

    with np.errstate(invalid="ignore"):
        found = run(Exploding(TASK.initial(0), 0.005), clients=1)
    assert found.diverged is not None
    assert "holds nan at" in found.diverged
    assert found.diverged.endswith("every value must be finite and below 1e18 in magnitude")
    assert found.curve[-1].iteration == found.timestamp == 6


def test_it_diverges_where_it_was_sampled() -> None:
    """That iteration has one point of the curve."""

    class Endless(FASGD):
        def apply_update(self, grads: Any, timestamp: int, client: int) -> tuple[Any, int, bool]:
            self.params["layer0.weight"] *= np.float32(np.inf)
            return super().apply_update(grads, timestamp, client)

    with np.errstate(invalid="ignore"):
        found = run(Endless(TASK.initial(0), 0.005), clients=1, samples=60)
    assert found.diverged is not None
    assert [each.iteration for each in found.curve] == [0, 1]


def test_a_task_is_checked_as_a_simulation_does() -> None:
    class Half(PerceptronTask):
        def validate(self, params: Any) -> Any:
            return 0.5

    server = FASGD(TASK.initial(0), 0.005)
    with pytest.raises(UsageError, match="the task is the class PerceptronTask"):
        simulate_fred(server, PerceptronTask, clients=1, iterations=1)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match=r"the task Half: validate.* returned 0.5, and"):
        simulate_fred(server, Half("digits", 8), clients=1, iterations=1)


def test_no_client_is_unblocked() -> None:
    server = Synchronous(list(TASK.initial(0).values()), 5, 0.2)
    with pytest.raises(UsageError, match="4 of 4 clients wait, and no other is selected"):
        run(server)


def test_parameters_of_another_task() -> None:
    initial = TASK.initial(0)
    with pytest.raises(UsageError, match=r"have the shapes .* and the task's are"):
        run(FASGD({**initial, "more": np.zeros(2, np.float32)}, 0.1))
    with pytest.raises(UsageError, match="have the shapes"):
        run(Synchronous(list(initial.values())[:-1], 4, 0.1))
    with pytest.raises(UsageError, match="20 samples and seed -1: give 0 or more"):
        simulate_fred(synchronous(), TASK, clients=4, iterations=60, seed=-1)
    with pytest.raises(UsageError, match="0 clients and 60 iterations"):
        run(synchronous(), clients=0)
