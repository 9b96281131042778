"""Rounds that are settled: all members take the mean over, or none, and examples count with it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from aiops.engine.round_votes import MOST_KEPT, RoundVotes
from aiops.wire.data_messages import GivenTask, TakeTask
from aiops.wire.messages import Leave
from aiops.wire.ring_messages import JoinRound, Round, RoundSettled, SettleRound
from tests.inline import Inline
from tests.rows import each_row

W = {"w": np.zeros(3, np.float32)}
GRACE, INTERVAL, DEADLINE = 1.0, 0.5, 30.0


def gathered(*peers: int, **settings: Any) -> Inline:
    """Workers that have taken one average, each with a task of 10 examples."""
    inline = Inline(
        "average", {"interval": INTERVAL, "grace": GRACE, **settings}, worker_deadline=DEADLINE
    )
    inline.define(W)
    for peer in peers:
        inline.join(peer)
    for peer in peers:  # the first are alone; from then on they wait for each other
        ready(inline, peer, settles=False)
    inline.wait(GRACE + INTERVAL)
    join(inline, *peers, settles=False)
    for peer in peers:
        answer = inline.receive(peer, TakeTask(2, "d", 100, 1, 0, 0, 1, 10, False, "", (), ()))
        assert isinstance(answer, GivenTask)
    return inline


def ready(inline: Inline, peer: int, *, settles: bool = True, rounds: int = 1) -> None:
    digest, nonce = inline.engine.defined_store.layout.digest, bytes([peer]) * 16
    message = JoinRound(3, "10.0.0.1", 1000 + peer, rounds, digest, nonce, b"", settles)
    inline.receive(peer, message)


def join(inline: Inline, *peers: int, settles: bool = True) -> Round:
    """Have these be ready together; return the round of the last."""
    for peer in peers:
        ready(inline, peer, settles=settles)
    inline.wait(GRACE + INTERVAL)
    found = inline.said[peers[-1]][-1]
    assert isinstance(found, Round)
    assert len(found.members) == len(peers)
    assert found.settles is settles
    return found


def report(
    inline: Inline, peer: int, number: int, *tasks: int, whole: bool = True
) -> RoundSettled | None:
    """Report a round with the first half of some tasks."""
    ranges = tuple((task, 10 * (task - 1), 10 * task - 5) for task in tasks)
    answer = inline.receive(peer, SettleRound(4, number, whole, ranges))
    assert answer is None or isinstance(answer, RoundSettled)
    return answer


def seen(inline: Inline) -> int:
    [row] = inline.engine.report()["data_sets"]
    count: int = row["seen"]
    return count


TAKEN, VOID = RoundSettled(4, True, True, False), RoundSettled(4, False, False, False)
OUTDATED = RoundSettled(4, False, False, True)


def test_the_last_report_settles_it() -> None:
    inline = gathered(1, 2)
    number = join(inline, 1, 2).number
    assert report(inline, 1, number, 1) is None
    assert seen(inline) == 0
    assert report(inline, 2, number, 2) == TAKEN
    assert inline.said[1][-1] == TAKEN
    assert seen(inline) == 10
    assert report(inline, 1, number) == TAKEN  # its connection was lost, say


@each_row("how", ["gives up", "leaves", "joins another"])
def test_one_member_that_fails_voids_it(how: str) -> None:
    inline = gathered(1, 2, 3)
    number = join(inline, 1, 2, 3).number
    report(inline, 1, number, 1)
    if how == "gives up":
        assert report(inline, 2, number, whole=False) == VOID
    elif how == "leaves":
        inline.receive(2, Leave(5))
    else:
        ready(inline, 2)
    assert inline.said[1][-1] == VOID
    assert report(inline, 3, number, 3) == VOID
    assert seen(inline) == 0


def test_an_example_of_another_worker_voids_it() -> None:
    inline = gathered(1, 2)
    number = join(inline, 1, 2).number
    report(inline, 1, number, 2)  # which is the other's
    assert report(inline, 2, number, 2) == VOID
    assert inline.said[1][-1] == OUTDATED
    assert seen(inline) == 0
    again = join(inline, 1, 2).number
    report(inline, 1, again, 1)
    assert report(inline, 2, again, 2) == TAKEN


def test_a_stranger_to_the_round_settles_nothing() -> None:
    inline = gathered(1, 2, 3)
    number = join(inline, 1, 2, 3).number
    inline.join(4)
    assert report(inline, 4, number) == VOID
    assert report(inline, 1, number + 7, 1) == VOID
    assert seen(inline) == 0


@pytest.mark.parametrize("learnt", [True, False])
def test_a_model_that_is_gone_with_its_last_worker_is_named(learnt: bool) -> None:
    inline = gathered(1)
    if learnt:
        report(inline, 1, join(inline, 1).number, 1)
    inline.receive(1, Leave(5))
    for peer in (2, 3):
        inline.join(peer)
        ready(inline, peer, settles=False, rounds=0)
    inline.wait(GRACE + INTERVAL)
    for peer in (2, 3):  # their first round has failed
        ready(inline, peer, settles=False, rounds=0)
    assert len(inline.notes) == learnt, "it is said once"
    assert all("the model with them" in note for note in inline.notes)


def test_alone_it_counts_only_if_no_other_worker_averages() -> None:
    inline = gathered(1)
    assert report(inline, 1, join(inline, 1).number, 1) == TAKEN
    assert seen(inline) == 5

    inline = gathered(1, 2)  # the other one is at a long step
    not_counted = RoundSettled(4, True, False, False)
    assert report(inline, 1, join(inline, 1).number, 1) == not_counted
    assert seen(inline) == 0
    inline.wait(DEADLINE)
    assert report(inline, 1, join(inline, 1).number, 1) == TAKEN


def test_state() -> None:
    inline = gathered(1, 2)
    taken = join(inline, 1, 2).number
    report(inline, 1, taken, 1)
    report(inline, 2, taken, 2)
    number = join(inline, 1, 2).number
    report(inline, 1, number)
    fresh = Inline("average", {"interval": INTERVAL, "grace": GRACE}).engine.rendezvous
    fresh.restore(inline.engine.rendezvous.state())
    assert fresh.state() == inline.engine.rendezvous.state()
    assert [effect.message for effect in fresh.left(2, 9.0)] == [VOID]  # type: ignore[union-attr]


def test_it_keeps_a_bounded_number_of_outcomes() -> None:
    votes = RoundVotes()
    for number in range(2 * MOST_KEPT):
        votes.open(number, (1,), counts=True)
        votes.report(1, SettleRound(1, number, True, ()), lambda seen: ())
    opened, taken = votes.state()
    assert not opened
    assert list(taken) == list(range(MOST_KEPT, 2 * MOST_KEPT))
