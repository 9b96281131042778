"""Acknowledgements leave when their rows are committed: none before, each once, in order."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aiops.durable.commit_gate import Acks, CommitGate, EncodedReply
from aiops.engine.events import Drop, Effect, Order, Reply
from aiops.errors import UsageError
from aiops.wire.messages import Ack, Pong
from aiops.wire.server_messages import FinishPush, KeepSets, RunUpdate, ShareSecret


def ack(peer: int, number: int) -> Reply:
    return Reply(peer, Ack(number, 1, 1, True, 0, 0.0, None, b""))


def pong(peer: int, number: int) -> Reply:
    return Reply(peer, Pong(number))


def test_what_promises_no_journal_waits_for_nothing() -> None:
    effects: list[Effect] = [ack(1, 1), Drop(1, "bye")]
    assert CommitGate(Acks.APPLIED).hold(effects, 1) == effects


def test_an_acknowledgement_waits_and_a_pong_does_not() -> None:
    gate = CommitGate(Acks.DURABLE)
    assert gate.hold([ack(1, 1), pong(1, 2), ack(2, 3)], 7) == [pong(1, 2)]
    assert gate.committed(6) == []
    assert gate.committed(7) == [ack(1, 1), ack(2, 3)]
    assert gate.waiting == 0


def test_a_connection_is_closed_after_its_answers() -> None:
    gate = CommitGate(Acks.DURABLE)
    gate.hold([ack(1, 1)], 1)
    assert gate.hold([Drop(2, "it has none")], 2) == [Drop(2, "it has none")]
    assert gate.hold([Drop(1, "it said goodbye")], 2) == []
    assert gate.committed(2) == [ack(1, 1), Drop(1, "it said goodbye")]
    assert gate.hold([Drop(1, "again")], 3) == [Drop(1, "again")]


def test_without_a_journal_nothing_waits() -> None:
    gate = CommitGate(Acks.DURABLE)
    gate.hold([ack(1, 1)], 1)
    gate.hold_reply(2, b"encoded", 2)
    assert gate.open() == [ack(1, 1), EncodedReply(2, b"encoded")]
    assert gate.level is Acks.APPLIED
    assert gate.hold([ack(1, 2)], 3) == [ack(1, 2)]
    gate.close()
    assert gate.level is Acks.DURABLE
    assert gate.hold([ack(1, 3)], 4) == []


def test_a_follower_that_came_back_gets_no_order_of_before() -> None:
    """What it is given then comes first: it may have lost all that those are about."""
    gate = CommitGate(Acks.DURABLE)
    update, other = Order(1, RunUpdate(1, 0, 0, {})), Order(2, RunUpdate(1, 0, 0, {}))
    behind, later = Order(1, KeepSets(0, (1,))), Order(2, FinishPush(1, False))
    assert gate.hold([update, other, ack(7, 1)], 1) == []
    assert gate.hold([behind, later], 2) == []
    gate.forget_orders(1)
    given = [Order(1, ShareSecret(0, b"")), update]
    assert gate.hold([*given], 3) == []
    assert gate.committed(3) == [other, ack(7, 1), later, *given]
    assert gate.waiting == 0
    assert gate.hold([given[0]], 4) == [given[0]]


@given(
    st.lists(st.tuples(st.integers(1, 3), st.sampled_from(["ack", "pong", "drop", "bytes"]))),
    st.lists(st.integers(0, 40)),
)
def test_everything_leaves_once_and_in_order(
    does: list[tuple[int, str]], commits: list[int]
) -> None:
    gate, left, written = CommitGate(Acks.DURABLE), list[tuple[int, object]](), 0
    rows: dict[int, int] = {}
    for row, (peer, what) in enumerate(does, 1):
        effect: Effect | EncodedReply
        if what == "bytes":
            effect = EncodedReply(peer, str(row).encode())
            gate.hold_reply(peer, effect.data, row)
        else:
            effect = {"ack": ack(peer, row), "pong": pong(peer, row), "drop": Drop(peer, str(row))}[
                what
            ]
            left += [(row, each) for each in gate.hold([effect], row)]
        rows[id(effect)] = row
        written = row
        if commits and commits[0] <= written:
            upto = commits.pop(0)
            due = gate.committed(upto)
            assert all(not isinstance(each, Reply) or each.message.id <= upto for each in due)
            left += [(upto, each) for each in due]
    left += [(written, each) for each in gate.committed(written)]
    assert gate.waiting == 0
    assert len(left) == len(does)
    for peer in (1, 2, 3):
        order = [
            int(each.data) if isinstance(each, EncodedReply) else each.message.id
            for _row, each in left
            if not isinstance(each, Drop) and each.peer == peer and "Pong" not in repr(each)
        ]
        assert order == sorted(order)


def test_levels_have_names() -> None:
    assert Acks.named("durable") is Acks.DURABLE
    with pytest.raises(UsageError, match="applied, written, durable, replicated"):
        Acks.named("safe")
