"""The meeting point: who is told of whom, when; the server's clock is the test's."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest

from aiops.algorithms.average import Average
from aiops.engine.events import Stopping
from aiops.errors import UsageError
from aiops.wire.messages import Error, Fetch, Leave, Message
from aiops.wire.ring_messages import JoinRound, Round
from tests.inline import Inline
from tests.rows import each_row

W = {"w": np.zeros(3, np.float32)}
INTERVAL, GRACE = 0.5, 1.0

_ids = itertools.count(1)


def gathered(*peers: int, **settings: Any) -> Inline:
    inline = Inline("average", {"interval": INTERVAL, "grace": GRACE, **settings})
    inline.define(W)
    for peer in peers:
        inline.join(peer)
    return inline


def meet(inline: Inline, peer: int, rounds: int = 1, **changes: Any) -> Message | None:
    assert inline.engine.store is not None
    fields: dict[str, Any] = {
        "host": "10.0.0.1",
        "port": 1000 + peer,
        "rounds": rounds,
        "digest": inline.engine.store.layout.digest,
        "nonce": bytes([peer]) * 16,
        **changes,
    }
    return inline.receive(peer, JoinRound(next(_ids), **fields))


def last(inline: Inline, peer: int) -> Round:
    found = inline.said[peer][-1]
    assert isinstance(found, Round)
    return found


def rounds(inline: Inline, peer: int) -> list[Round]:
    return [said for said in inline.said[peer] if isinstance(said, Round)]


def ports(found: Round) -> list[int]:
    return [port for _host, port, _counts in found.members]


def settled(*peers: int, **settings: Any) -> Inline:
    """Workers that have all been in a round."""
    inline = gathered(*peers, **settings)
    for peer in peers:
        meet(inline, peer)
    inline.wait(GRACE + INTERVAL)
    for peer in peers:
        meet(inline, peer)
    if "group" not in settings:
        assert ports(last(inline, peers[0])) == [1000 + peer for peer in peers]
    return inline


class TestWhoIsIn:
    def test_all_who_are_ready_are_told_at_once_and_the_same(self) -> None:
        inline = settled(1, 2, 3)
        assert meet(inline, 2) is None
        assert meet(inline, 3) is None
        meet(inline, 1)
        found = [last(inline, peer) for peer in (1, 2, 3)]
        assert [one.rank for one in found] == [0, 1, 2]
        assert len({(one.number, one.members, one.secret) for one in found}) == 1
        assert ports(found[0]) == [1001, 1002, 1003]
        assert all(counts for _host, _port, counts in found[0].members)

    def test_every_round_has_a_number_and_a_secret_of_its_own(self) -> None:
        inline = settled(1, 2)
        for _ in range(5):
            meet(inline, 1)
            meet(inline, 2)
        found = rounds(inline, 1)
        assert len({one.number for one in found}) == len(found)
        assert len({one.secret for one in found}) == len(found)
        assert all(len(one.secret) == 32 for one in found)

    def test_who_is_alone_is_told_at_once(self) -> None:
        inline = gathered(1)
        found = meet(inline, 1, rounds=0)
        assert isinstance(found, Round)
        assert found.members == (("10.0.0.1", 1001, True),)

    def test_who_never_averaged_is_not_waited_for(self) -> None:
        inline = gathered(1, 2, 3)
        inline.join(9, role="observer")
        assert isinstance(meet(inline, 1), Round)

    def test_a_straggler_is_waited_for_once(self) -> None:
        inline = settled(1, 2, 3)
        meet(inline, 1)
        inline.wait(0.4)
        meet(inline, 2)
        inline.wait(GRACE - 0.1)
        assert len(rounds(inline, 1)) == 2
        inline.wait(0.2)
        assert ports(last(inline, 1)) == ports(last(inline, 2)) == [1001, 1002]
        meet(inline, 2)
        meet(inline, 1)
        assert len(rounds(inline, 1)) == 4, "the straggler is not waited for again"

    def test_a_straggler_that_is_back_is_in_the_next_round_and_waited_for_again(self) -> None:
        inline = settled(1, 2, 3)
        meet(inline, 1)
        meet(inline, 2)
        inline.wait(GRACE + 0.1)
        meet(inline, 3)
        meet(inline, 1)
        meet(inline, 2)
        assert ports(last(inline, 3)) == [1001, 1002, 1003]
        meet(inline, 1)
        meet(inline, 2)
        assert len(rounds(inline, 1)) == 4
        meet(inline, 3)
        assert len(rounds(inline, 1)) == 5

    def test_nobody_waits_for_ever(self) -> None:
        inline = settled(1, 2)
        meet(inline, 1)
        inline.wait(INTERVAL + GRACE - 0.1)
        assert len(rounds(inline, 1)) == 2
        inline.wait(0.2)
        assert ports(last(inline, 1)) == [1001]
        assert ports(meet(inline, 1)) == [1001]  # type: ignore[arg-type]

    @pytest.mark.parametrize("way", ["cut", "goodbye"])
    def test_who_leaves_is_not_waited_for(self, way: str) -> None:
        inline = settled(1, 2, 3)
        meet(inline, 1)
        meet(inline, 2)
        if way == "cut":
            inline.leave(3)
        else:
            inline.receive(3, Leave(1))
        assert ports(last(inline, 1)) == [1001, 1002]

    def test_who_leaves_while_ready_is_in_no_round(self) -> None:
        inline = settled(1, 2, 3)
        meet(inline, 3)
        meet(inline, 1)
        inline.leave(3)
        meet(inline, 2)
        assert ports(last(inline, 1)) == [1001, 1002]

    def test_a_client_that_came_back_is_there_once(self) -> None:
        inline = settled(1, 2)
        meet(inline, 1)
        inline.join(11, client="client-1", epoch=2)
        meet(inline, 11)
        meet(inline, 2)
        assert ports(last(inline, 2)) == [1002, 1011]


class TestWithdrawing:
    def test_who_withdraws_is_answered_and_not_waited_for(self) -> None:
        inline = settled(1, 2, 3)
        meet(inline, 1)
        before = len(inline.said[1])
        inline.receive(1, JoinRound(77, "", 0, 2, b"", b"n" * 16))
        assert [one.members for one in rounds(inline, 1)[before - 1 :]] == [(), ()]
        assert inline.said[1][-1].id == 77
        meet(inline, 2)
        meet(inline, 3)
        assert ports(last(inline, 2)) == [1002, 1003]

    def test_who_comes_back_is_waited_for(self) -> None:
        inline = settled(1, 2)
        inline.receive(1, JoinRound(77, "", 0, 2, b"", b"n" * 16))
        assert ports(meet(inline, 2)) == [1002]  # type: ignore[arg-type]
        meet(inline, 1)
        meet(inline, 2)
        assert ports(last(inline, 1)) == [1001, 1002]

    def test_withdrawing_completes_a_round_of_the_others(self) -> None:
        inline = settled(1, 2, 3)
        meet(inline, 2)
        meet(inline, 3)
        inline.receive(1, JoinRound(77, "", 0, 2, b"", b"n" * 16))
        assert ports(last(inline, 2)) == [1002, 1003]


class TestNewcomers:
    def test_a_newcomer_does_not_count_beside_those_who_have_averaged(self) -> None:
        inline = settled(1, 2)
        inline.join(3)
        meet(inline, 3, rounds=0)
        meet(inline, 1)
        meet(inline, 2)
        assert [counts for *_, counts in last(inline, 3).members] == [True, True, False]

    def test_it_counts_from_its_second_round_on(self) -> None:
        inline = settled(1)
        inline.join(2)
        meet(inline, 2, rounds=0)
        meet(inline, 1)
        meet(inline, 2, rounds=1)
        meet(inline, 1)
        assert [counts for *_, counts in last(inline, 2).members] == [True, True]

    def test_one_whose_first_round_failed_is_still_new(self) -> None:
        inline = settled(1)
        inline.join(2)
        for _ in range(2):
            meet(inline, 2, rounds=0)
            meet(inline, 1)
            assert [counts for *_, counts in last(inline, 2).members] == [True, False]

    def test_the_first_is_the_founder(self) -> None:
        """However close they come: the one whose request is first begins, the others follow it."""
        inline = gathered(1, 2, 3)
        for peer in (2, 1, 3):
            meet(inline, peer, rounds=0)
        assert last(inline, 2).members == (("10.0.0.1", 1002, True),)
        assert len(rounds(inline, 1)) == 0
        meet(inline, 2, rounds=1)
        assert [counts for *_, counts in last(inline, 1).members] == [False, True, False]

    def test_all_count_when_all_are_new(self) -> None:
        inline = gathered(1, 2, 3)
        for peer in (1, 2, 3):
            meet(inline, peer, rounds=0)
        inline.leave(1)  # the founder
        assert [counts for *_, counts in last(inline, 2).members] == [True, True]

    def test_newcomers_have_nothing_to_begin_with_while_the_others_are_away(self) -> None:
        inline = settled(1)
        inline.receive(1, JoinRound(77, "", 0, 2, b"", b"n" * 16))  # evaluating, say
        inline.join(2)
        inline.join(3)
        meet(inline, 2, rounds=0)
        meet(inline, 3, rounds=0)
        assert rounds(inline, 2) == rounds(inline, 3) == []
        inline.wait(INTERVAL + GRACE + 0.1)
        assert last(inline, 2).members == last(inline, 3).members == ()
        meet(inline, 2, rounds=0)
        meet(inline, 3, rounds=0)
        meet(inline, 1)
        assert [counts for *_, counts in last(inline, 2).members] == [True, False, False]


class TestRefusals:
    @each_row(
        ("changes", "words"),
        [
            ({"digest": b"other"}, "is not the one that the others average"),
            ({"host": ""}, "no address to be reached at"),
            ({"host": "worker-1"}, "must be an IP address"),
            ({"host": "fe80::1%eth0"}, "must be an IP address"),
            ({"host": "0.0.0.0"}, "must be an IP address"),
            ({"port": 65536}, "no address to be reached at"),
        ],
    )
    def test_who_cannot_take_part_is_told_why(self, changes: dict[str, Any], words: str) -> None:
        inline = gathered(1)
        answer = meet(inline, 1, **changes)
        assert isinstance(answer, Error)
        assert words in answer.text
        assert inline.engine.rendezvous.report()["averaging"] == 0

    @pytest.mark.parametrize(("first", "second"), [("127.0.0.1", "10.0.0.2"), ("::2", "::1")])
    def test_loopback_beside_other_addresses_is_refused(self, first: str, second: str) -> None:
        inline = gathered(1, 2)
        assert isinstance(meet(inline, 1, host=first), Round)
        answer = meet(inline, 2, host=second)
        assert isinstance(answer, Error)
        assert f"at {second} and another one at {first}" in answer.text
        assert "pass host=" in answer.text
        inline.leave(1)
        assert isinstance(meet(inline, 2, host=second), Round)

    def test_a_second_request_takes_the_place_of_the_first(self) -> None:
        inline = settled(1, 2)
        meet(inline, 1)
        answer = meet(inline, 1, port=1111)
        assert isinstance(answer, Round)
        assert (answer.number, answer.members) == (0, ())
        meet(inline, 2)
        assert ports(last(inline, 1)) == [1111, 1002]
        assert last(inline, 1).id > answer.id

    def test_observers_other_policies_and_models_that_are_not_there(self) -> None:
        inline = gathered()
        inline.join(9, role="observer")
        assert "observer" in meet(inline, 9).text  # type: ignore[union-attr]
        other = Inline("asgd")
        other.define(W)
        other.join(1)
        assert "--policy average" in meet(other, 1).text  # type: ignore[union-attr]
        empty = Inline("average")
        empty.join(1)
        answer = empty.receive(1, JoinRound(1, "h", 1, 0, b"", b"n" * 16))
        assert isinstance(answer, Error)
        assert answer.code == "not-ready"

    def test_a_gradient_is_refused_with_what_to_do(self) -> None:
        inline = gathered(1)
        answer = inline.push(1, {"w": np.ones(3, np.float32)})
        assert isinstance(answer, Error)
        assert "aiops.client.ModelAverager" in answer.text
        assert isinstance(inline.receive(1, Fetch(9, -1)), Message)
        assert inline.version == 0

    def test_stopping_answers_those_who_wait(self) -> None:
        inline = settled(1, 2)
        meet(inline, 1)
        inline.post(Stopping(inline.now))
        assert inline.errors(1)[-1].code == "unavailable"
        answer = meet(inline, 2)
        assert isinstance(answer, Error)
        assert answer.code == "unavailable"


def test_statistics() -> None:
    inline = settled(1, 2)
    meet(inline, 1)
    before = inline.engine.report()["averages"]
    assert (before["averaging"], before["ready"]) == (2, 1)
    meet(inline, 2)
    assert inline.engine.report()["averages"]["rounds"] == before["rounds"] + 1


def test_same_events_same_answers() -> None:
    said = []
    for _ in range(2):
        inline = settled(1, 2, 3)
        for peer in (3, 1):
            meet(inline, peer)
        inline.wait(GRACE + 0.1)
        said.append([(one.members, one.secret) for one in rounds(inline, 1)])
    assert said[0] == said[1]


@each_row("setting", [{"interval": -1}, {"grace": 0}, {"warmup": -1}, {"lr": 0}])
def test_bad_settings_are_refused(setting: dict[str, Any]) -> None:
    with pytest.raises(UsageError):
        Average.make(setting)


class TestGroups:
    """Rings of a subset: every worker is in one ring, and in another one the next time."""

    @staticmethod
    def rings(inline: Inline, *peers: int) -> list[list[int]]:
        """Have all of them ask, and return the ports of each ring, in order."""
        for peer in peers:
            meet(inline, peer)
        found = {last(inline, peer).number: ports(last(inline, peer)) for peer in peers}
        return [found[number] for number in sorted(found)]

    def test_each_worker_is_in_one_ring_of_at_most_four(self) -> None:
        inline = settled(*range(1, 11), group=4)
        found = self.rings(inline, *range(1, 11))
        assert sorted(map(len, found)) == [3, 3, 4]
        assert sorted(itertools.chain(*found)) == [1000 + peer for peer in range(1, 11)]
        told = [last(inline, peer) for peer in range(1, 11)]
        assert len({one.secret for one in told}) == len({one.number for one in told}) == 3
        for peer, one in enumerate(told, 1):
            assert ports(one)[one.rank] == 1000 + peer

    def test_as_many_as_fit_in_one_ring_are_one(self) -> None:
        inline = settled(1, 2, 3, group=3)
        assert self.rings(inline, 1, 2, 3) == [[1001, 1002, 1003]]

    def test_membership_is_mixed_so_that_all_pairs_meet(self) -> None:
        inline, pairs = settled(*range(1, 9), group=2), set()
        for _ in range(40):
            pairs |= {tuple(ring) for ring in self.rings(inline, *range(1, 9))}
        assert len(pairs) == 8 * 7 // 2

    def test_the_seed_decides_who_is_with_whom_and_nothing_else_does(self) -> None:
        def drawn(seed: int) -> list[list[int]]:
            inline = settled(*range(1, 9), group=2, seed=seed)
            return [ring for _ in range(5) for ring in self.rings(inline, *range(1, 9))]

        assert drawn(1) == drawn(1)
        assert drawn(1) != drawn(2)

    def test_a_restored_server_draws_what_it_would_have_drawn(self) -> None:
        inline = settled(*range(1, 9), group=2)
        self.rings(inline, *range(1, 9))
        twin = settled(*range(1, 9), group=2)
        twin.engine.rendezvous.restore(inline.engine.rendezvous.state())
        assert self.rings(twin, *range(1, 9)) == self.rings(inline, *range(1, 9))

    def test_models_come_together_as_fast_as_the_page_says(self) -> None:
        """Of the variance about the mean a round leaves (n/K − 1)/(n − 1) on average."""
        size, group, kept = 16, 4, []
        inline = settled(*range(1, size + 1), group=group)
        rng = np.random.default_rng(0)
        for _ in range(60):
            values = rng.normal(size=size)
            before = values.var()
            for ring in self.rings(inline, *range(1, size + 1)):
                members = [port - 1001 for port in ring]
                values[members] = values[members].mean()
            kept.append(values.var() / before)
        assert np.mean(kept) == pytest.approx((size / group - 1) / (size - 1), rel=0.15)

    def test_founders_form_one_ring_of_the_group_size_and_the_others_follow_it(self) -> None:
        peers = range(1, 8)
        inline = gathered(*peers, group=2)
        for peer in peers:
            meet(inline, peer, rounds=0)  # the first is answered alone, and then goes
        inline.leave(1)
        begun: dict[int, int] = {}  # the number of the round in which a worker got the model
        for _ in range(9):
            for peer in set(peers) - {1}:
                found = last(inline, peer)
                assert len(found.members) <= 2
                if found.members and peer not in begun:
                    assert [counts for *_at, counts in found.members].count(True) >= 1
                    begun[peer] = found.number
            if len(begun) == 6:
                break
            for peer in sorted(set(peers) - {1}):
                meet(inline, peer, rounds=int(peer in begun))
        founders = [peer for peer in begun if begun[peer] == min(begun.values())]
        assert len(founders) == 2
        assert sorted(begun) == [2, 3, 4, 5, 6, 7]

    def test_founders_of_whom_all_fit_in_one_ring_all_count(self) -> None:
        inline = gathered(*range(1, 5), group=3)
        for peer in range(1, 5):
            meet(inline, peer, rounds=0)
        inline.leave(1)
        assert ports(last(inline, 2)) == [1002, 1003, 1004]
        assert all(counts for _host, _port, counts in last(inline, 2).members)

    def test_founders_whose_round_failed_are_founders_again(self) -> None:
        inline = gathered(*range(1, 6), group=2)
        for peer in range(1, 6):
            meet(inline, peer, rounds=0)
        inline.leave(1)
        assert sum(bool(last(inline, peer).members) for peer in range(2, 6)) == 2
        for peer in range(2, 6):
            meet(inline, peer, rounds=0)
        again = [last(inline, peer) for peer in range(2, 6)]
        found = [one for one in again if one.members]
        assert len(found) == 2
        assert all(counts for one in found for *_at, counts in one.members)

    def test_newcomers_are_with_a_worker_that_has_a_model(self) -> None:
        inline = settled(1, 2, group=2)
        for peer in range(3, 9):
            inline.join(peer)
            meet(inline, peer, rounds=0)
        meet(inline, 1)
        meet(inline, 2)
        told = [last(inline, peer) for peer in range(1, 9)]
        rings = {one.number: one.members for one in told if one.members}
        assert [sorted(counts for *_at, counts in ring) for ring in rings.values()] == [
            [False, True],
            [False, True],
        ]
        assert sum(not one.members for one in told) == 4, "they ask again"

    @each_row("settings", [{"group": 1}, {"group": -2}, {"seed": -1}])
    def test_settings_that_cannot_work(self, settings: dict[str, int]) -> None:
        with pytest.raises(UsageError, match=next(iter(settings))):
            Average(**settings)


class TestBase:
    """Differences to a common mean are sent if there is one, and a codec for them."""

    MEAN, OTHER = b"m" * 32, b"o" * 32

    def told(self, *have: bytes, rounds: int = 1, codec: str = "int8") -> bytes:
        inline = Inline(
            "average",
            {"interval": INTERVAL, "grace": GRACE},
            push_codec=(codec,),
        )
        inline.define(W)
        for peer in (1, 2):
            inline.join(peer)
            meet(inline, peer)
        inline.wait(GRACE + INTERVAL)
        meet(inline, 1, have=have[0])
        meet(inline, 2, have=have[1], rounds=rounds)
        assert len(last(inline, 2).members) == 2
        return last(inline, 2).base

    def test_all_have_it(self) -> None:
        assert self.told(self.MEAN, self.MEAN) == self.MEAN

    def test_not_all_have_it(self) -> None:
        assert self.told(self.MEAN, self.OTHER) == b""
        assert self.told(self.MEAN, b"") == b""
        assert self.told(b"", b"") == b""

    def test_the_model_of_one_does_not_count(self) -> None:
        assert self.told(self.MEAN, self.MEAN, rounds=0) == b""

    def test_there_is_no_codec(self) -> None:
        assert self.told(self.MEAN, self.MEAN, codec="raw") == b""


class TestBudget:
    """Under a budget each round has the codec with which rounds can be an interval apart."""

    def told(self, budget: int, peers: int = 2, **options: Any) -> tuple[bytes, str]:
        settings = {"interval": INTERVAL, "grace": GRACE}
        inline = Inline("average", settings, worker_budget=budget, **options)
        inline.define({"w": np.zeros(1000, np.float32), "wide": np.zeros(50)})
        for rounds in (0, 1):
            for peer in range(peers):
                if not rounds:
                    inline.join(peer)
                meet(inline, peer, rounds=rounds, have=b"m" * 32 * rounds)
            inline.wait(GRACE + INTERVAL)
            if not rounds:
                assert last(inline, 0).codec == "", "founders have no mean"
        found = last(inline, 0)
        assert len(found.members) == peers
        return found.base, found.codec

    @each_row(
        ("peers", "budget", "codec"),
        [
            (2, 17_600, ""),  # 4,400 bytes each way, twice a second
            (2, 17_599, "bf16"),
            (2, 9_600, "bf16"),
            (2, 9_599, "int8"),
            (2, 1_000, "int8"),
            (4, 17_600, "bf16"),  # half as much again
        ],
    )
    def test_the_gentlest_that_keeps_it(self, peers: int, budget: int, codec: str) -> None:
        assert self.told(budget, peers) == (b"m" * 32 if codec else b"", codec)

    def test_a_codec_that_is_given(self) -> None:
        assert self.told(1000, push_codec=("bf16",)) == (b"m" * 32, "bf16")
        assert self.told(1000, push_codec=("raw",)) == (b"", "")

    def test_a_server_that_goes_on_knows_the_model(self) -> None:
        inline = Inline("average", {"interval": INTERVAL, "grace": GRACE}, worker_budget=1000)
        inline.define({"w": np.zeros(1000, np.float32)})
        inline.join(1)
        meet(inline, 1)
        known, again = inline.engine.rendezvous.state(), Inline("average", worker_budget=1000)
        assert dict(known["lengths"])["bf16"] == 2000
        again.engine.rendezvous.restore(known)
        assert again.engine.rendezvous.state() == known
