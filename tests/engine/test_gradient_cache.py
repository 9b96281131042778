"""Gradients kept to be applied again: whose, how many bytes of them, and with which version."""

from __future__ import annotations

import numpy as np
import pytest

from aiops.model.layout import Array
from aiops.wire.messages import Ack, Reapply
from tests.inline import Inline

SIZE = 100
NBYTES = 4 * SIZE


def started(workers: int = 3, recall: int = 10 * NBYTES, policy: str = "asgd") -> Inline:
    gate = "constant:p_push=0.5,skipped=reapply"
    inline = Inline(policy, {"lr": 1.0}, gate=gate, recall=recall, backend="numpy")
    inline.define({"w": np.zeros(SIZE, np.float32)})
    for peer in range(1, workers + 1):
        inline.join(peer)
    return inline


def gradient(value: float) -> dict[str, Array]:
    return {"w": np.full(SIZE, value, np.float32)}


def again(inline: Inline, peer: int, seq: int | None = None) -> Ack:
    """Have a worker's last gradient applied again."""
    if seq is None:
        seq = inline.seqs[peer] = inline.seqs.get(peer, 0) + 1
    answer = inline.receive(peer, Reapply(1000 * peer + seq, seq, False, -1))
    assert isinstance(answer, Ack)
    return answer


def test_the_last_one_is_applied_with_its_first_version() -> None:
    """Each time it is staler, as it would be had it been sent so late."""
    inline = started()
    inline.push(1, gradient(1))
    inline.push(1, gradient(2))
    assert [again(inline, 1).staleness for _ in range(3)] == [1, 2, 3]
    np.testing.assert_array_equal(inline.params()["w"], -(1 + 2 + 3 * 2))
    assert inline.engine.report()["gradients"] == 5


def test_each_worker_has_its_own() -> None:
    inline = started()
    inline.push(1, gradient(1))
    inline.push(2, gradient(10))
    assert again(inline, 2).used
    assert not again(inline, 3).used, "it has pushed none"
    np.testing.assert_array_equal(inline.params()["w"], -21)


def test_a_word_that_is_repeated_is_obeyed_once() -> None:
    inline = started()
    inline.push(1, gradient(1))
    first = again(inline, 1, seq=2)
    second = again(inline, 1, seq=2)
    assert (first.used, first.version) == (second.used, second.version) == (True, 2)
    assert inline.version == 2


def test_who_has_not_pushed_for_longest_gives_way() -> None:
    inline = started(recall=2 * NBYTES)
    for peer in (1, 2):
        inline.push(peer, gradient(peer))
    assert again(inline, 1).used, "being used counts"
    inline.push(3, gradient(3))
    recall = inline.engine.training.updates.recall
    assert (recall.nbytes, recall.evicted) == (2 * NBYTES, 1)
    version = inline.version
    assert not again(inline, 2).used
    assert inline.version == version
    assert again(inline, 1).used
    inline.push(2, gradient(2))
    assert again(inline, 2).used, "it has been sent again"


@pytest.mark.parametrize("recall", [0, NBYTES - 1])
def test_no_room_for_any(recall: int) -> None:
    inline = started(recall=recall)
    inline.push(1, gradient(1))
    assert not again(inline, 1).used
    assert inline.engine.training.updates.recall.nbytes == 0
    assert inline.version == 1


def test_what_is_kept_is_not_the_pools() -> None:
    """Pushes never wait for the buffers of gradients that are kept."""
    inline = started()
    for _ in range(50):
        for peer in (1, 2, 3):
            inline.push(peer, gradient(peer))
            again(inline, peer)
    assert inline.engine.admission.pool.out == 0
    assert inline.engine.training.updates.recall.nbytes == 3 * NBYTES


def test_an_ignored_gradient_is_not_kept() -> None:
    gate = "constant:p_push=0.5,skipped=reapply"
    inline = Inline("ringmaster", {"lr": 1.0, "r": 2}, gate=gate, backend="numpy")
    inline.define({"w": np.zeros(SIZE, np.float32)})
    for peer in (1, 2):
        inline.join(peer)
    for _ in range(4):
        inline.push(1, gradient(1))
    late = inline.push(2, gradient(100), 0)
    assert isinstance(late, Ack)
    assert (late.used, late.why) == (False, "ringmaster leaves it out: its staleness is 4")
    missing = again(inline, 2)
    assert not missing.used
    assert missing.why == "the server does not keep this worker's last gradient any more"
    assert inline.engine.admission.pool.out == 0
