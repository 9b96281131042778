"""Who takes part, and what a report says of them: `aiops.engine.membership`."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aiops.common.gathering import SLICE, gathered
from aiops.engine import membership
from aiops.engine.membership import Membership
from aiops.wire.fields import MAX_LOGGED
from aiops.wire.messages import Log
from aiops.wire.traffic import Traffic

NOW = 0.0


def met(clients: int) -> Membership:
    """A crew that so many clients have come to; connection and client have the same number."""
    found = Membership(None, 10.0)
    for number in range(clients):
        found.join(number, f"client-{number}", 1, f"w{number}", True, Traffic())
    return found


def test_a_report_has_a_line_for_everybody_who_is_here_and_for_the_last_who_left() -> None:
    everybody = met(membership.SHOWN + 20)
    for number in (3, 1, *range(4, membership.SHOWN + 10), 2):  # all but 0, and nine too many
        everybody.leave(number)
    lines, without = everybody.lines(NOW)
    assert without == 9
    shown = [line["name"] for line in lines]
    here = {f"w{number}" for number in (0, *range(membership.SHOWN + 10, membership.SHOWN + 20))}
    assert {line["name"] for line in lines if line["present"]} == here
    assert len(shown) == len(here) + membership.SHOWN
    assert "w2" in shown  # it came early, but left last
    assert not {"w3", "w1"} & set(shown)  # nor others who left before
    assert [line["worker"] for line in lines] == sorted(line["worker"] for line in lines)


def test_a_few_all_have_a_line() -> None:
    few = met(3)
    few.leave(1)
    lines, without = few.lines(NOW)
    assert ([line["present"] for line in lines], without) == ([True, False, True], 0)


def logs(found: Membership, client: int, now: float = NOW, **values: float) -> None:
    member = found.at(client)
    assert member is not None
    found.log(now, member, Log(0, tuple(values.items())))


def test_what_a_client_logs_is_bounded() -> None:
    found = met(1)
    member = found.at(0)
    assert member is not None
    member.log(NOW, Log(0, (("loss", 0.5),), 5.0, 1.0))
    member.log(NOW, Log(0, (("accuracy", 0.5),)))
    assert (member.compute, member.idle) == (5.0, 1.0), "they stay where it does not say"
    for k in range(100):
        logs(found, 0, **{f"n{k}": 1.0})
    assert [*member.logged] == [f"n{k}" for k in range(100 - MAX_LOGGED, 100)]
    logs(found, 0, n99=1.1e300)
    assert "n99" not in member.logged, "it is left out"


def test_a_row_is_a_copy_which_another_thread_may_read() -> None:
    found = met(1)
    member = found.at(0)
    assert member is not None
    member.log(NOW, Log(0, (("loss", 1.0),)))
    row = found.rows(1)[0]
    member.log(NOW, Log(0, (("loss", 2.0), ("accuracy", 0.5))))
    assert row[-1] == {"loss": 1.0}


def test_rows_are_of_those_who_are_here_workers_first() -> None:
    found = met(4)
    found.join(9, "watcher", 1, "watcher", False, Traffic())
    found.leave(1)
    assert [row[:3] for row in found.rows(10)] == [
        (1, "w0", "worker"),
        (3, "w2", "worker"),
        (4, "w3", "worker"),
        (5, "watcher", "observer"),
    ]
    assert len(found.rows(2)) == 2


def test_clients_that_never_pushed_are_forgotten_before_those_that_did(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A worker that comes back is told what it has pushed; observers come and go."""
    monkeypatch.setattr(membership, "DEPARTED", 3)
    found = Membership(None, 1.0)
    for number in range(2):
        found.join(number, f"worker-{number}", 1, "w", True, Traffic())[0].last_seq = 5
        found.leave(number)
    for number in range(2, 9):
        found.join(number, f"observer-{number}", 1, "o", False, Traffic())
        found.leave(number)
    assert [m.client for m in found] == ["worker-0", "worker-1", "observer-7", "observer-8"]
    found.join(9, "worker-9", 1, "w", True, Traffic())[0].last_seq = 1
    found.leave(9)
    found.join(10, "worker-10", 1, "w", True, Traffic())[0].last_seq = 1
    found.leave(10)
    found.join(11, "observer-11", 1, "o", False, Traffic())
    known = [m.client for m in found if m.peer is None]
    assert known == ["worker-1", "worker-9", "worker-10"], "of these the first goes first"


def test_who_left_first_is_forgotten_first_whenever_they_came() -> None:
    found = met(2)
    found.leave(1)
    found.leave(0)
    for number in range(2, membership.DEPARTED + 1):
        found.join(number, f"client-{number}", 1, "w", True, Traffic())
        found.leave(number)
    assert len(list(found)) == membership.DEPARTED + 1
    found.join(-1, "another", 1, "w", True, Traffic())
    kept = [member.name for member in found]
    assert "w0" in kept
    assert "w1" not in kept


@given(st.floats(0, 1e6), st.floats(1e-3, 1e4))
def test_a_worker_is_overdue_at_the_time_of_its_deadline(since: float, deadline: float) -> None:
    """Exactly then: a tick that came a rounding error early would ask for the same time again."""
    crew = Membership(None, deadline)
    crew.join(1, "client", 1, "w", True, Traffic())
    due = crew.next_deadline(since, frozenset())
    assert due is not None
    assert crew.overdue(due, since, frozenset())
    assert not crew.overdue(math.nextafter(due, 0.0), since, frozenset())


def test_the_lines_of_metrics_are_those_of_the_first_who_are_here_and_sums_of_the_rest() -> None:
    found = met(5)
    found.leave(1)
    found.join(9, "watcher", 1, "watcher", False, Traffic())
    for number, member in enumerate(found.present()):
        member.pushes, member.staleness, member.answered = 10**number, number, 5.0 - number
        member.traffic.received("push", 8, 2 * number)
    silent = found.at(4)
    assert silent is not None
    silent.excused = True
    lines = gathered(found.present_lines(7.0, 2))
    assert [line["name"] for line in lines["workers"]] == ["w0", "w2"]
    others = lines["others"]
    assert (others["workers"], others["staleness"]) == (2, 3)
    assert others["seconds_since_answer"] == 5.0
    assert lines["worker_counts"] == {"active": 3, "silent": 1, "observer": 1}
    assert gathered(found.present_lines(7.0, 4))["others"]["workers"] == 0
    assert gathered(found.present_lines(7.0, 0))["workers"] == []


def test_a_client_that_comes_or_goes_in_a_pause_is_counted_as_it_was() -> None:
    found = met(3 * SLICE)
    for number in range(3 * SLICE):
        carry(found, number, 8 + number)
    whole = found.ledger()
    seen: list[dict[str, Any]] = []

    def gather() -> Iterator[None]:
        seen.append((yield from found.gather_ledger(tensors=True)))

    for pause, _ in enumerate(gather(), 1):
        found.leave(pause)  # it was counted
        found.leave(3 * SLICE - pause)  # it is yet to be
        found.join(1000 + pause, f"new {pause}", 1, "new", True, Traffic())
    assert pause == 3
    assert seen == [whole]


def carry(found: Membership, number: int, nbytes: int) -> None:
    member = found.at(number)
    assert member is not None
    member.traffic.received("push", 0, nbytes)


def test_what_observers_have_cost_is_kept_when_they_are_forgotten(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(membership, "DEPARTED", 3)
    found = Membership(None, 1.0)
    for number in range(9):
        found.join(number, f"observer-{number}", 1, "o", False, Traffic())
        carry(found, number, 10**number)
        assert found.ledger()["observers"]["pushed"] == int("1" * (number + 1))
        found.leave(number)
    assert found.ledger()["observers"]["pushed"] == 111_111_111
    again = Membership(None, 1.0)
    again.restore(found.state(lambda lease: 0), lambda number: pytest.fail("there is no lease"))
    assert again.ledger() == found.ledger()


@given(st.data())
def test_sums_over_members_are_the_same_whenever_they_were_added_up_last(
    data: st.DataObject,
) -> None:
    """A report keeps the sums of those that have left; one that never did adds up all anew."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(membership, "DEPARTED", 3)
        found, peers, epoch = Membership(None, 1.0), dict[int, int](), 0
        for step in range(data.draw(st.integers(1, 60))):
            client = data.draw(st.integers(0, 3))
            peer = peers.get(client)
            match data.draw(st.sampled_from(["join", "leave", "carry", "shards", "report"])):
                case "join":
                    epoch += 1
                    worker = client % 3 > 0
                    found.join(step, f"{client}", epoch, "w", worker, Traffic())
                    peers[client] = step
                case "leave" if peer is not None:
                    found.leave(peers.pop(client))
                case "carry" if peer is not None:
                    carry(found, peer, 10)
                case "shards":
                    counted = Traffic()
                    counted.received("push", 0, step)
                    found.counted_by_shards({f"{client}": counted})
                case "report":
                    found.ledger()
        kept = found.ledger()
        found._gone = None
        assert found.ledger() == kept


def test_a_report_does_not_add_up_those_that_have_left(monkeypatch: pytest.MonkeyPatch) -> None:
    found = met(50)
    for number in range(40):
        carry(found, number, 5)
        found.leave(number)
    found.ledger()
    added, add = [], membership.GoneTraffic.add
    monkeypatch.setattr(
        membership.GoneTraffic, "add", lambda sums, each: (added.append(each), add(sums, each))
    )
    assert found.ledger()["pushed"]["bytes"] == 200
    assert len(added) == 10, "those that are connected"


def test_the_sums_of_one_that_is_back_are_not_counted_twice() -> None:
    found = met(2)
    carry(found, 0, 100)
    found.leave(0)
    assert found.ledger()["pushed"]["bytes"] == 100
    found.join(7, "client-0", 2, "w0", True, Traffic())
    carry(found, 7, 10)
    assert found.ledger()["pushed"]["bytes"] == 110
    found.counted_by_shards({"client-0": Traffic(5, 0)})
    found.leave(7)
    assert found.ledger()["pushed"]["bytes"] == 115
    found.counted_by_shards({"client-0": Traffic(6, 0)})
    assert found.ledger()["pushed"]["bytes"] == 116


def labels(found: Membership) -> dict[int, str]:
    lines = gathered(found.present_lines(NOW, 100))["workers"]
    return {line["worker"]: line["label"] for line in lines}


def test_a_worker_keeps_its_label_whoever_of_its_name_comes_and_goes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(membership, "DEPARTED", 2)
    found = Membership(None, 1.0)
    found.join(1, "watcher", 1, "w", False, Traffic())
    for peer in (2, 3):
        found.join(peer, f"client-{peer}", 1, "w", True, Traffic())
    assert labels(found) == {2: "w", 3: "w (#3)"}
    found.leave(2)
    assert labels(found) == {3: "w (#3)"}
    again = Membership(None, 1.0)
    again.restore(found.state(lambda lease: 0), lambda number: pytest.fail("there is no lease"))
    assert labels(again) == {3: "w (#3)"}
    found.join(4, "client-2", 2, "w", True, Traffic())
    found.join(5, "client-5", 1, "w", True, Traffic())
    assert labels(found) == {2: "w", 3: "w (#3)", 4: "w (#4)"}
    found.leave(4)
    for peer in (6, 7, 8):  # so that the first is forgotten
        found.join(peer, f"client-{peer}", 1, "x", True, Traffic())
        found.leave(peer)
    found.join(9, "client-9", 1, "w", True, Traffic())
    assert labels(found) == {3: "w (#3)", 4: "w (#4)", 8: "w"}
