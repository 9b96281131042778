"""The bound on how far workers drift apart, as workers come and go."""

from __future__ import annotations

from aiops.algorithms.ssp import SSP


def test_the_last_push_of_a_worker_that_has_left_holds_up_no_other() -> None:
    """It was queued behind an update, or a snapshot, when its worker was lost."""
    policy = SSP(s=1).policy(workers=None)
    policy.workers_changed(frozenset({1, 2, 3}))
    policy.workers_changed(frozenset({1, 2}))
    assert policy.push(3, 0).use
    for _ in range(5):
        for worker in (1, 2):
            policy.push(worker, 0)
            assert policy.may_go(worker, published=True)
    policy.workers_changed(frozenset({1, 2, 3}))
    policy.push(3, 0)
    assert policy.may_go(1, published=True), "one that comes back starts at the slowest clock"
