"""An update from the gradient to the new version, without a queue, a policy or a worker."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from aiops.algorithms import find
from aiops.algorithms.base import APPLY, COLLECT, Decision
from aiops.engine.receive import PushSink
from aiops.engine.replies import PendingPush
from aiops.engine.update_maker import UpdateMaker
from aiops.model.layout import Layout
from aiops.model.parts import Part
from aiops.store.parameters import Store
from aiops.wire.messages import Push

ZEROS = {"a": np.zeros(2, np.float32), "b": np.zeros(3, np.float32)}
LAYOUT = Layout.of(ZEROS)
STEP = Decision(True, divide=2)
"""Take a step with the sum, of two gradients."""


class Made:
    """A store and the maker of its updates."""

    def __init__(self, policy: str = "asgd", **settings: Any) -> None:
        algorithm = find(policy).make({"lr": 1.0, **settings})
        self.store = Store(LAYOUT, algorithm.rule(), backend="numpy")
        self.store.set(ZEROS)
        self.maker = UpdateMaker(algorithm, None, self.store, 1)
        self.seq = 0

    def push(self, value: float, *tensors: str, staleness: int = 0) -> PendingPush:
        """Return a push of these tensors, all of them if none is named, full of a value."""
        self.seq += 1
        chosen = [each for each in LAYOUT.tensors if not tensors or each.name in tensors]
        version = self.store.version - staleness
        parts = tuple(Part(t.offset, t.offset + t.nbytes, "raw", t.nbytes, version) for t in chosen)
        cover = LAYOUT.covered(parts)
        gradient = np.full(sum(t.size for t in chosen), value, np.float32).view(np.uint8)
        sink = PushSink(gradient, [len(gradient)], LAYOUT, cover, None, [])
        message = Push(self.seq, self.seq, False, -1, parts)
        return PendingPush(1, message, sink, None, staleness=staleness)  # type: ignore[arg-type]

    def update(self, push: PendingPush | None, decision: Decision = APPLY) -> Any:
        """Make one update; return what `UpdateMaker.end` does."""
        job = self.maker.begin(push, decision)
        return self.maker.end(job.run())

    def values(self) -> list[float]:
        """Return the first element of each tensor."""
        return [float(view[0]) for view in self.store.current.arena.views.values()]


def test_a_gradient_alone_makes_a_version() -> None:
    made = Made()
    assert made.update(made.push(1.0)) == (True, None)
    assert (made.store.version, made.values()) == (1, [-1, -1])
    assert made.maker.staleness.bins == {0: 1}
    assert made.maker.job is None


def test_gradients_are_collected_until_the_step() -> None:
    made = Made()
    assert made.update(made.push(1.0), COLLECT) == (False, None)
    assert (made.store.version, made.maker.collected.count) == (0, 1)
    assert made.update(made.push(3.0), STEP) == (True, None)
    assert made.values() == [-2, -2]
    assert made.maker.collected.count == 0


def test_a_step_without_a_gradient_takes_the_sum() -> None:
    made = Made()
    made.update(made.push(4.0, "b"), COLLECT)
    assert made.update(None, STEP) == (True, None)
    assert made.values() == [0, -2], "a tensor that no gradient has keeps its values"
    assert made.store.current.tensor_versions.tolist() == [0, 1]


def test_a_plain_step_weights_each_gradient_with_its_own_staleness() -> None:
    made = Made("sasgd")
    made.update(made.push(1.0, staleness=2), COLLECT)
    made.update(made.push(1.0, staleness=4), STEP)
    assert made.values() == pytest.approx([-0.375, -0.375])


def test_a_normalised_step_is_modulated_with_the_mean() -> None:
    made = Made("sasgd", optimizer="adam", eps=1e-12)
    made.update(made.push(1.0, staleness=2), COLLECT)
    made.update(made.push(1.0, "a", staleness=4), STEP)
    assert made.values() == pytest.approx([-0.375, -0.5])


@pytest.mark.parametrize("collected", [0, 1])
def test_a_result_that_is_not_finite_is_refused(collected: int) -> None:
    made = Made(lr=1e36)
    for _ in range(collected):
        made.update(made.push(1e17), COLLECT)
    before = made.store.current
    found = made.update(made.push(1e17), Decision(True, divide=1 + collected))
    assert found == (False, 0)
    assert (made.store.current, made.values()) == (before, [0, 0])
    assert made.maker.collected.count == 0, "nothing of the sum is left"


def test_examples_count_once_their_step_is_published() -> None:
    made = Made(schedule="warmup:10", schedule_unit="examples", mini_batch=1)
    position = made.maker.position
    assert position is not None
    made.update(made.push(1.0), COLLECT)
    made.update(made.push(1.0), STEP)
    assert position.at() == 1
    assert made.update(made.push(1e17), APPLY) == (True, None)
    assert position.at() == 2


def test_what_an_update_would_have_changes_nothing() -> None:
    made = Made("sasgd", optimizer="adam")
    steps, scalars = made.maker.whole(4, now=0.0)
    assert steps.tolist() == [0.25, 0.25]
    job = made.maker.begin(made.push(1.0, staleness=4), APPLY)
    np.testing.assert_array_equal(job.steps, steps)
    assert job.scalars is not None
    assert scalars is not None
    np.testing.assert_array_equal(job.scalars, scalars)


def test_it_goes_on_from_its_state_within_a_sum() -> None:
    made, other = Made("sasgd", optimizer="adam"), Made("sasgd", optimizer="adam")
    for each in (made, other):
        each.update(each.push(1.0, "a", staleness=2), COLLECT)
    fresh = UpdateMaker(find("sasgd").make({"lr": 1.0, "optimizer": "adam"}), None, other.store, 1)
    fresh.restore(other.maker.state())
    other.maker = fresh
    for each in (made, other):
        each.update(each.push(2.0, staleness=3), STEP)
    assert made.values() == other.values()


def test_an_outstanding_update_is_no_state() -> None:
    made = Made()
    made.maker.begin(made.push(1.0), COLLECT)
    with pytest.raises(AssertionError, match="being changed"):
        made.maker.state()
