"""Schedules of examples, tokens and seconds: the rate of each update, and what is counted."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from aiops.algorithms import BUILT_IN, find
from aiops.algorithms.model_support import tables_obstacle
from aiops.engine.events import Paused, Resumed
from aiops.errors import ConflictError, UsageError
from aiops.wire.messages import Push, Reapply
from tests.inline import Inline
from tests.rows import each_row

ONE = {"w": np.ones(1)}
EXAMPLES = {"lr": 1.0, "schedule": "warmup:1000", "schedule_unit": "examples", "mini_batch": 10}
SECONDS = {"lr": 1.0, "schedule": "linear:100", "schedule_unit": "seconds"}


class Run(Inline):
    """A run whose parameters show the sum of all rates: every gradient is 1."""

    def __init__(self, policy: str, settings: dict[str, Any], **options: Any) -> None:
        super().__init__(policy, settings, backend="numpy", **options)
        self.define({"w": np.zeros(1)})
        for peer in (1, 2):
            self.join(peer)
        self.before = 0.0

    def rate(self) -> float:
        """Return the rates since the last call."""
        now, before = -float(self.params()["w"][0]), self.before
        self.before = now
        return round(now - before, 9)


@pytest.mark.parametrize("unit", ["examples", "tokens"])
def test_examples_are_those_of_the_pushes_that_were_used(unit: str) -> None:
    run = Run("asgd", {**EXAMPLES, "schedule_unit": unit})
    for update in range(1, 5):
        run.push(1 + update % 2, ONE)
        assert run.rate() == update * 10 / 1000
    assert run.engine.report()["schedule"] == 39.0


@each_row(
    ("gate", "count", "counted"),
    [
        ("constant:longest=7", 7, 7),
        ("constant:longest=6", 7, 7),
        ("constant:longest=6", 8, 7),
        ("constant:longest=6,skipped=discard", 2, 1),
        ("constant:longest=6,skipped=reapply", 2, 1),
        ("", 1, 1),
        ("", 1 << 20, 1),
    ],
)
def test_a_sum_counts_as_the_mini_batches_that_the_plan_allows(
    gate: str, count: int, counted: int
) -> None:
    """A worker that claims more does not move the schedule of all others to its end."""
    run = Run("asgd", EXAMPLES, gate=gate, recall=1000)
    sent = run.receive
    run.receive = lambda peer, message, data=b"": sent(  # type: ignore[method-assign]
        peer, Push(message.id, message.seq, False, -1, message.parts, count=count), data
    )
    run.push(1, ONE)
    assert run.rate() == counted * 10 / 1000


def test_gradients_that_are_collected_count_with_their_step() -> None:
    run = Run("softsync", {**EXAMPLES, "n": 1, "modulate": "none"}, workers=2)
    for update in (1, 2):
        run.push(1, ONE)
        assert run.rate() == 0
        run.push(2, ONE)
        assert run.rate() == update * 20 / 1000


def test_a_gradient_that_is_left_out_or_refused_counts_nothing() -> None:
    run = Run("ringmaster", {**EXAMPLES, "r": 1})
    run.push(1, ONE)
    run.push(2, ONE, version=0)  # too stale
    assert run.rate() == 10 / 1000
    run.push(2, {"w": np.full(1, np.inf)})
    run.push(2, ONE)
    assert run.rate() == 20 / 1000


def test_a_step_that_is_not_finite_counts_nothing() -> None:
    half = Inline("asgd", {**EXAMPLES, "lr": 1e30}, backend="numpy")
    half.define({"w": np.zeros(1, np.float32)})
    half.join(1)
    half.push(1, {"w": np.full(1, 9e17, np.float32)})
    assert half.version == 0
    assert half.errors(1)
    assert half.engine.report()["schedule"] == 0
    half.push(1, {"w": np.full(1, 1e-30, np.float32)})
    np.testing.assert_allclose(half.params()["w"], -0.01, rtol=1e-6)


def test_a_gradient_that_is_applied_again_is_no_new_example() -> None:
    run = Run("asgd", EXAMPLES, gate="constant:skipped=reapply", recall=1000)
    run.push(1, ONE)
    run.seqs[1] += 1
    run.receive(1, Reapply(77, run.seqs[1], False, -1))
    assert run.version == 2
    assert run.rate() == 20 / 1000
    run.push(1, ONE)
    assert run.rate() == 20 / 1000


def test_a_push_of_local_training_counts_as_its_cycle() -> None:
    settings = {**EXAMPLES, "optimizer": "sgd", "local_steps": 6, "fragments": 1}
    run = Run("diloco", settings, workers=2)
    run.push(1, ONE)
    run.push(2, ONE)
    assert run.rate() == 2 * 6 * 10 / 1000


def test_seconds_are_those_since_the_first_push_without_pauses() -> None:
    run = Run("asgd", SECONDS)
    run.wait(1000)  # for the first worker
    run.push(1, ONE)
    assert run.rate() == 1
    run.wait(25)
    run.push(1, ONE)
    assert run.rate() == 0.75
    run.wait(5)
    run.post(Paused(run.now, "the file system is moved"))
    run.wait(10)
    run.post(Paused(run.now, "and checked"))
    run.wait(500)
    run.post(Paused(run.now, ""))
    run.wait(20)
    run.push(2, ONE)
    assert run.rate() == 0.5
    run.wait(100)
    run.push(2, ONE)
    assert run.rate() == 0


def test_the_time_in_which_no_server_ran_does_not_count() -> None:
    run = Run("asgd", SECONDS)
    for seconds in (0, 10, 10):
        run.wait(seconds)
        run.push(1, ONE)
    assert run.rate() == 1 + 0.9 + 0.8
    run.wait(3600)
    run.post(Resumed(run.now, 2))
    run.join(1, epoch=2)
    run.wait(5)
    run.push(1, ONE)
    assert run.rate() == 0.75
    run.post(Paused(run.now, "the next one is a pause"))
    run.wait(50)
    run.post(Resumed(run.now, 2))
    run.wait(50)
    run.post(Paused(run.now, ""))
    run.join(1, epoch=3)
    run.wait(5)
    run.push(1, ONE)
    assert run.rate() == 0.7


@each_row("unit", ["updates", "examples", "seconds"])
def test_it_begins_where_it_is_told(unit: str) -> None:
    told = {"schedule_unit": unit, "schedule_start": 40, "mini_batch": 1}
    run = Run("asgd", {**SECONDS, **told})
    run.push(1, ONE)
    assert run.rate() == 0.6


def test_settings_that_say_too_little_or_contradict_are_refused() -> None:
    with pytest.raises(UsageError, match="mini_batch must be the tokens of one mini-batch, 1 or"):
        find("asgd").make({"schedule_unit": "tokens"})
    with pytest.raises(UsageError, match="schedule_unit must be one of updates, examples, tokens"):
        find("asgd").make({"schedule_unit": "epochs"})
    with pytest.raises(UsageError, match="schedule_start must be 0 or more"):
        find("asgd").make({"schedule_start": -1})
    why = tables_obstacle(find("asgd").make(EXAMPLES), alone=True)
    assert why is not None
    assert "counts examples by pushes of tensors" in why
    assert tables_obstacle(find("asgd").make(EXAMPLES)) is None
    assert tables_obstacle(find("asgd").make(SECONDS), alone=True) is None


@each_row("name", sorted(BUILT_IN))
def test_workers_that_follow_the_schedule_themselves_count_updates(name: str) -> None:
    algorithm, own = find(name), {"downpour", "easgd", "eamsgd", "no-delay", "average"}
    if name not in own:
        assert algorithm.make(SECONDS).schedule_unit == "seconds"
        return
    for settings in (SECONDS, EXAMPLES, {"schedule_start": 5}):
        with pytest.raises(ConflictError):
            algorithm.make(settings)


def test_ssp_counts_updates_where_its_workers_take_local_steps() -> None:
    with pytest.raises(ConflictError, match="count updates from 0"):
        find("ssp").make({**SECONDS, "get_model_frequency": 2})
