"""Fetches for evaluation: who is sent what, and when."""

from __future__ import annotations

from typing import Any

import numpy as np

from aiops.engine.events import Left, Resumed, SnapshotDue, Stopping
from aiops.engine.training import Training
from aiops.model.layout import Array
from aiops.store.capture_job import CaptureJob
from aiops.store.evaluation import EvaluationJob
from aiops.wire.messages import Fetch, FetchedParams
from tests.inline import Inline
from tests.rows import each_row

W = {"v": np.ones(2, np.float32), "w": np.zeros(3, np.float32)}
G = {"v": np.ones(2, np.float32), "w": np.ones(3, np.float32)}


def running(policy: str = "schedule-free", *, hold: bool = False, **settings: Any) -> Inline:
    if policy == "schedule-free":
        settings.setdefault("schedule", "constant")
    inline = Inline(policy, settings, hold=hold)
    inline.define(W)
    for peer in (1, 2):
        inline.join(peer)
    return inline


def stepped(inline: Inline, count: int = 3) -> None:
    for _ in range(count):
        inline.push(1, G, inline.version)
        inline.release()


def training_of(inline: Inline) -> Training:
    assert inline.engine.training is not None
    return inline.engine.training


def values(inline: Inline, peer: int) -> dict[str, Array]:
    """Return what the last answer with parameters sent, and end its lease."""
    lease = next(lease for to, lease in reversed(inline.leases) if to == peer)
    found = {name: array.copy() for name, array in lease.version.arena.views.items()}
    inline.release()
    return found


def best(inline: Inline) -> dict[str, Array]:
    """Return w − (1−φ) · offset of all tensors, as they are now."""
    training = training_of(inline)
    store, mean = training.store, training.updates.maker.numbers.recent_staleness.mean
    offset = part_of(store.state[0][2], store.current.arena.sections[0])
    kept = inline.engine.algorithm.offset_kept(store.version, mean)
    return {
        name: array - np.float32(1 - kept) * offset(array)
        for name, array in store.current.arena.views.items()
    }


def part_of(offset: Array, section: Array) -> Any:
    """Return what finds the part of an offset that belongs to a view of a section."""
    start = section.__array_interface__["data"][0]

    def of(view: Array) -> Array:
        first = (view.__array_interface__["data"][0] - start) // 4
        return offset[first : first + view.size].reshape(view.shape)

    return of


def test_the_offset_is_left_out_and_workers_are_sent_the_parameters_as_they_are() -> None:
    inline = running()
    stepped(inline)
    expected, current = best(inline), inline.params()
    answer = inline.receive(2, Fetch(5, -1, (), False, True))
    assert isinstance(answer, FetchedParams)
    assert answer.version == 3
    assert sum(part.nbytes for part in answer.parts) == inline.engine.defined_store.layout.nbytes
    found = values(inline, 2)
    for name, array in expected.items():
        np.testing.assert_array_equal(found[name], array)
        assert (array != current[name]).all()
    assert isinstance(inline.receive(1, Fetch(6, -1)), FetchedParams)
    for name, array in values(inline, 1).items():
        np.testing.assert_array_equal(array, current[name])


def test_what_a_reader_has_does_not_count() -> None:
    inline = running()
    stepped(inline)
    answer = inline.receive(2, Fetch(5, 3, (), False, True))
    assert isinstance(answer, FetchedParams)
    assert sum(part.nbytes for part in answer.parts) == inline.engine.defined_store.layout.nbytes
    some = inline.receive(2, Fetch(6, 3, ((1, 2, 3),), False, True))
    assert isinstance(some, FetchedParams)
    assert [part.nbytes for part in some.parts] == [12]


def test_one_version_serves_all_who_ask_until_there_is_a_newer_one() -> None:
    inline = running()
    stepped(inline)
    inline.receive(2, Fetch(5, -1, (), False, True))
    tickets = training_of(inline).updates.tickets
    inline.receive(1, Fetch(6, -1, (), False, True))
    assert training_of(inline).updates.tickets == tickets
    (_, first), (_, second) = inline.leases[-2:]
    assert first.version is second.version
    inline.release()
    stepped(inline, 1)
    answer = inline.receive(2, Fetch(7, -1, (), False, True))
    assert isinstance(answer, FetchedParams)
    assert answer.version == 4


def test_it_is_made_when_no_update_is_outstanding_and_before_those_that_wait() -> None:
    inline = running(hold=True)
    inline.push(1, G, 0)
    inline.push(2, G, 0)
    assert inline.receive(2, Fetch(5, -1, (), False, True)) is None
    inline.run_kernel()  # the first update
    assert inline.version == 1
    expected = best(inline)
    assert not inline.acks(2)
    inline.run_kernel()  # the version for evaluation
    answer = inline.said[2][-1]
    assert isinstance(answer, FetchedParams)
    assert answer.version == 1
    found = values(inline, 2)
    inline.run_kernel()
    assert inline.version == 2
    for name, array in expected.items():
        np.testing.assert_array_equal(found[name], array)


def test_requests_that_come_while_one_is_made_are_sent_it_too() -> None:
    inline = running(hold=True)
    assert inline.receive(2, Fetch(5, -1, (), False, True)) is None
    assert inline.receive(1, Fetch(6, -1, (), False, True)) is None
    inline.run_kernel()
    assert [type(inline.said[peer][-1]) for peer in (1, 2)] == [FetchedParams] * 2
    assert inline.outstanding is None


def test_who_has_left_is_sent_nothing() -> None:
    inline = running(hold=True)
    inline.receive(2, Fetch(5, -1, (), False, True))
    inline.post(Left(1.0, 2))
    said = list(inline.said[2])
    inline.run_kernel()
    assert inline.said[2] == said


def test_after_a_capture_it_is_made_again_as_a_restored_server_makes_it() -> None:
    inline = running()
    stepped(inline)
    inline.receive(2, Fetch(5, -1, (), False, True))
    inline.post(SnapshotDue(1.0, 1))
    tickets = training_of(inline).updates.tickets
    inline.receive(2, Fetch(6, -1, (), False, True))
    assert training_of(inline).updates.tickets == tickets + 1


def test_after_a_start_it_is_made_again_as_a_restored_server_makes_it() -> None:
    inline = running()
    stepped(inline)
    inline.receive(2, Fetch(5, -1, (), False, True))
    inline.post(Stopping(1.0, kept=True))
    inline.post(Resumed(1.0, 2))
    inline.join(3)
    tickets = training_of(inline).updates.tickets
    inline.receive(3, Fetch(6, -1, (), False, True))
    assert training_of(inline).updates.tickets == tickets + 1


def test_a_capture_takes_its_turn_behind_the_versions_that_are_waited_for() -> None:
    inline = running(hold=True)
    inline.push(1, G, 0)
    inline.receive(2, Fetch(5, -1, (), False, True))
    inline.post(SnapshotDue(1.0, 1))
    inline.run_kernel()
    assert isinstance(job_of(inline), EvaluationJob)
    inline.run_kernel()
    assert isinstance(inline.said[2][-1], FetchedParams)
    assert isinstance(job_of(inline), CaptureJob)


def job_of(inline: Inline) -> object:
    assert inline.outstanding is not None
    return inline.outstanding.job


@each_row("policy", ["asgd", "fasgd", "dcasgd", "hardsync", "diloco"])
def test_other_policies_are_evaluated_where_they_are_trained(policy: str) -> None:
    inline = Inline(policy, {}, workers=1 if policy in ("hardsync", "diloco") else None)
    inline.define(W)
    inline.join(1)
    answer = inline.receive(1, Fetch(5, 0, (), False, True))
    assert isinstance(answer, FetchedParams)
    assert sum(part.nbytes for part in answer.parts) == inline.engine.defined_store.layout.nbytes
    for name, array in values(inline, 1).items():
        np.testing.assert_array_equal(array, W[name])
