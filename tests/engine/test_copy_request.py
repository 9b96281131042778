"""A copy of the model that is due: which version is handed out, and when."""

from __future__ import annotations

import numpy as np

from aiops.engine.events import CopyDue, Resumed, SnapshotDue, Stopping
from aiops.model.layout import Array
from aiops.store.capture_job import CaptureJob
from aiops.store.evaluation import EvaluationJob
from aiops.wire.messages import Fetch
from tests.engine.test_evaluation_replies import G, W, best, job_of, running, stepped, training_of
from tests.inline import Inline
from tests.recording import Recording


def copied(inline: Inline) -> list[tuple[int, Array]]:
    """Return the version of each copy so far, and one tensor of it; end their leases."""
    found = list[tuple[int, Array]]()
    for effect in inline.copies:
        version = effect.lease.version
        found.append((version.number, version.arena.views["w"].copy()))
        effect.lease.release()
    inline.copies.clear()
    return found


def due(inline: Inline) -> None:
    inline.post(CopyDue(inline.now))


def test_without_a_model_there_is_no_copy() -> None:
    inline = Inline("asgd")
    due(inline)
    assert not inline.copies


def test_parameters_that_can_be_read_are_copied_at_once() -> None:
    inline = running("asgd", lr=1)
    stepped(inline)
    due(inline)
    [(version, w)] = copied(inline)
    assert version == 3
    np.testing.assert_array_equal(w, np.full(3, -3, np.float32))


def test_updates_go_on_while_a_version_is_copied() -> None:
    inline = running("asgd", lr=1)
    stepped(inline)
    due(inline)
    stepped(inline)
    [(version, w)] = copied(inline)
    assert version == 3
    np.testing.assert_array_equal(w, np.full(3, -3, np.float32))
    assert inline.version == 6


def test_a_copy_waits_for_the_update_in_place_and_comes_before_the_next() -> None:
    inline = running("asgd", lr=1, hold=True)
    inline.push(1, G, 0)
    inline.push(2, G, 0)
    due(inline)
    assert not inline.copies
    inline.run_kernel()
    [(version, w)] = copied(inline)
    assert version == 1
    np.testing.assert_array_equal(w, np.full(3, -1, np.float32))
    inline.run_kernel()
    assert inline.version == 2
    assert not inline.copies, "it was due once"


def test_a_copy_that_nothing_is_queued_behind_waits_no_longer_than_the_update() -> None:
    inline = running("asgd", lr=1, hold=True)
    inline.push(1, G, 0)
    due(inline)
    inline.run_kernel()
    assert [version for version, _w in copied(inline)] == [1]


def test_it_is_as_the_model_is_evaluated() -> None:
    inline = running()
    stepped(inline)
    expected, current = best(inline)["w"], inline.params()["w"]
    due(inline)
    [(version, w)] = copied(inline)
    assert version == 3
    np.testing.assert_array_equal(w, expected)
    assert (w != current).all()


def test_a_version_for_evaluation_that_is_there_is_copied_at_once() -> None:
    inline = running()
    stepped(inline)
    inline.receive(2, Fetch(5, -1, (), False, True))
    tickets = training_of(inline).updates.tickets
    due(inline)
    due(inline)
    assert training_of(inline).updates.tickets == tickets
    assert [version for version, _w in copied(inline)] == [3, 3]


def test_it_is_made_before_what_is_queued() -> None:
    inline = running(hold=True)
    inline.push(1, G, 0)
    inline.push(2, G, 0)
    due(inline)
    inline.post(SnapshotDue(1.0, 1))
    inline.run_kernel()  # the first update
    assert isinstance(job_of(inline), EvaluationJob)
    expected = best(inline)["w"]
    inline.run_kernel()
    assert isinstance(job_of(inline), CaptureJob)
    [(version, w)] = copied(inline)
    assert version == 1
    np.testing.assert_array_equal(w, expected)


def test_after_a_start_no_copy_is_due() -> None:
    inline = running(hold=True)
    inline.push(1, G, 0)
    due(inline)
    inline.post(Stopping(1.0, kept=True))
    inline.post(Resumed(1.0, 2))
    inline.run_kernel()
    if inline.outstanding is not None:
        inline.run_kernel()  # the version for evaluation
    assert not inline.copies


def test_a_replay_makes_the_versions_that_were_copied() -> None:
    """Their updates have numbers, which the rows of a journal compare."""
    for policy in ("schedule-free", "asgd"):
        inline = Inline(policy, {"schedule": "constant"})
        recording = Recording(policy, inline.engine)
        inline.on_event = recording.note
        inline.define(W)
        inline.join(1)
        for _ in range(3):
            stepped(inline, 2)
            due(inline)
        recording.end(inline.now)
        found = recording.replay()
        assert found.complete
        assert [version for version, _w in copied(inline)] == [2, 4, 6]
