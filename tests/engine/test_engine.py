"""The engine: who is answered what, and when."""

from __future__ import annotations

import numpy as np
import pytest

from aiops.engine.events import Resumed, Stopping
from aiops.errors import ConflictError
from aiops.model.layout import Array
from aiops.model.parts import Part
from aiops.wire import messages
from aiops.wire.decoding import decode
from aiops.wire.encoding import encode
from aiops.wire.messages import Ack, Error, Fetch, FetchedParams, Model, Report, Welcome
from aiops.wire.ring_messages import JoinRound
from tests.inline import Inline
from tests.rows import each_row

W = {"w": np.zeros(3, np.float32)}
G = {"w": np.ones(3, np.float32)}


def running(policy: str, workers: int = 2, hold: bool = False, **settings: object) -> Inline:
    needs = policy in ("hardsync", "softsync")
    inline = Inline(policy, settings, hold=hold, workers=workers if needs else None)
    inline.define(W)
    for peer in range(1, workers + 1):
        inline.join(peer)
    return inline


class TestModel:
    def test_welcome_says_what_to_do(self) -> None:
        inline = running("hardsync", admission="reject")
        welcome = inline.said[1][0]
        assert isinstance(welcome, Welcome)
        assert welcome.policy == "hardsync"
        assert welcome.plan["recompute"] is True
        assert welcome.settings["admission"] == "reject"
        assert welcome.model == (("w", "float32", (3,), 0),)

    def test_the_first_offer_defines_and_later_ones_are_compared(self) -> None:
        inline = Inline("asgd")
        for peer in (1, 2, 3):
            inline.join(peer)
        define = messages.Define(9, (("w", "float32", (3,)),), (Part(0, 12, "raw", 12, 0),))
        first = inline.receive(1, define, np.arange(3, dtype=np.float32).tobytes())
        second = inline.receive(2, define, np.zeros(3, np.float32).tobytes())
        assert isinstance(first, Model)
        assert first.created
        assert isinstance(second, Model)
        assert not second.created
        np.testing.assert_array_equal(inline.params()["w"], [0, 1, 2])
        other = messages.Define(9, (("w", "float32", (4,)),), (Part(0, 16, "raw", 16, 0),))
        refused = inline.receive(3, other, bytes(16))
        assert isinstance(refused, Error)
        assert "its 'w' has shape (3,), not (4,)" in refused.text

    def test_a_model_with_bad_values_is_refused_and_another_may_come(self) -> None:
        inline = Inline("asgd")
        inline.join(1)
        define = messages.Define(9, (("w", "float32", (3,)),), (Part(0, 12, "raw", 12, 0),))
        refused = inline.receive(1, define, np.array([0, np.nan, 0], np.float32).tobytes())
        assert isinstance(refused, Error)
        assert "'w' holds nan at [1]" in refused.text
        assert isinstance(inline.receive(1, define, bytes(12)), Model)

    def test_nothing_works_before_the_model(self) -> None:
        inline = Inline("asgd")
        inline.join(1)
        for ask in (Fetch(1, -1), messages.Describe(2)):
            answer = inline.receive(1, ask)
            assert isinstance(answer, Error)
            assert answer.code == "not-ready"

    def test_observers_define_and_push_nothing(self) -> None:
        inline = running("asgd")
        inline.join(7, role="observer")
        answer = inline.push(7, G)
        assert isinstance(answer, Error)
        assert "observer" in answer.text
        assert inline.version == 0
        offered = inline.receive(7, messages.Define(1, (("w", "float32", (3,)),), ()))
        assert isinstance(offered, Error)


class TestReading:
    def test_an_unchanged_model_is_not_sent_again(self) -> None:
        inline = running("asgd")
        full, unchanged = inline.receive(1, Fetch(1, -1)), inline.receive(1, Fetch(2, 0))
        assert isinstance(full, FetchedParams)
        assert isinstance(unchanged, FetchedParams)
        assert (len(full.parts), len(unchanged.parts)) == (1, 0)

    def test_a_fetch_during_an_update_in_place_waits_for_it(self) -> None:
        inline = running("asgd", hold=True)
        inline.push(1, G)
        assert inline.receive(2, Fetch(5, -1)) is None
        inline.run_kernel()
        answer = inline.said[2][-1]
        assert isinstance(answer, FetchedParams)
        assert answer.version == 1

    def test_a_fetch_during_an_update_out_of_place_does_not_wait(self) -> None:
        inline = running("asgd", hold=True)
        inline.receive(2, Fetch(5, -1))  # its lease is still held
        inline.push(1, G)
        answer = inline.receive(2, Fetch(6, -1))
        assert isinstance(answer, FetchedParams)
        assert answer.version == 0
        inline.run_kernel()
        assert inline.version == 1

    def test_a_reader_that_left_is_not_answered(self) -> None:
        inline = running("asgd", hold=True)
        inline.push(1, G)
        inline.receive(2, Fetch(5, -1))
        before = len(inline.said[2])
        inline.leave(2)
        inline.run_kernel()
        assert len(inline.said[2]) == before

    def test_an_exchange_brings_the_parameters(self) -> None:
        inline = running("asgd", lr=1.0)
        ack = inline.push(1, G, fetch=True)
        assert isinstance(ack, Ack)
        assert [part.version for part in ack.parts] == [1]


class TestPushes:
    def test_staleness_is_counted_per_push(self) -> None:
        inline = running("asgd", workers=3)
        for peer, version in ((1, 0), (2, 0), (3, 0), (1, 1)):
            inline.push(peer, G, version)
        assert [inline.acks(p)[-1].staleness for p in (1, 2, 3)] == [2, 1, 2]
        assert inline.engine.training.updates.maker.staleness.bins == {0: 1, 1: 1, 2: 2}
        assert inline.engine.report()["mean_staleness"] == 1.25

    def test_a_histogram_has_an_end_and_its_mean_is_exact(self) -> None:
        inline = running("asgd", lr=1e-6)
        for _ in range(3001):
            inline.push(1, G)
        for version in range(1500):
            inline.push(2, G, version)
        found = inline.engine.training.updates.maker.staleness.bins
        assert found[0] == 3001
        assert set(found) == {0, 2048}, "3001 updates ahead, and one more with every push"
        assert inline.engine.report()["mean_staleness"] == 1500 * 3001 / 4501

    def test_a_version_from_the_future_is_refused(self) -> None:
        inline = running("asgd")
        answer = inline.push(1, G, version=3)
        assert isinstance(answer, Error)
        assert "'w' was computed at version 3, but the server is at 0" in answer.text
        assert inline.version == 0

    @each_row("value", [np.nan, np.inf, -np.inf, 1e18])
    def test_bad_values_are_refused_whole(self, value: float) -> None:
        inline = running("fasgd")
        inline.push(1, G)
        before, state = inline.params(), [a.copy() for a in inline.engine.store.state[0]]  # type: ignore[union-attr]
        answer = inline.push(1, {"w": np.array([1, value, 1], np.float32)})
        assert isinstance(answer, Error)
        assert answer.code == "bad-push"
        assert "'w' holds" in answer.text
        np.testing.assert_array_equal(inline.params()["w"], before["w"])
        for now, then in zip(inline.engine.store.state[0], state, strict=True):  # type: ignore[union-attr]
            np.testing.assert_array_equal(now, then)
        assert inline.engine.admission.pool.out == 0

    def test_updates_are_one_at_a_time_and_in_order(self) -> None:
        inline = running("asgd", workers=3, hold=True)
        for peer in (1, 2, 3):
            inline.push(peer, G, 0)
        assert [len(inline.acks(p)) for p in (1, 2, 3)] == [0, 0, 0]
        for done in (1, 2, 3):
            inline.run_kernel()
            assert [len(inline.acks(p)) for p in (1, 2, 3)] == [int(p <= done) for p in (1, 2, 3)]
        assert inline.outstanding is None

    def test_every_receive_buffer_comes_back(self) -> None:
        inline = running("softsync", workers=3, n=1)
        for _ in range(7):
            for peer in (1, 2, 3):
                inline.push(peer, G)
        assert inline.engine.admission.pool.out == 0
        assert inline.engine.idle

    def test_partial_pushes_age_only_what_they_touch(self) -> None:
        inline = Inline("sasgd", {"lr": 1.0})
        inline.define({"a": np.zeros(1, np.float32), "b": np.zeros(3, np.float32)})
        inline.join(1)
        inline.join(2)
        one, three = np.ones(1, np.float32), np.ones(3, np.float32)
        for _ in range(4):
            inline.push(1, {"a": one})
        inline.push(2, {"a": one, "b": three}, version=0)
        ack = inline.acks(2)[-1]
        assert (ack.staleness, ack.mean_staleness) == (4, 1.0)  # 4 on 4 bytes, 0 on 12
        params = inline.params()
        assert params["a"][0] == pytest.approx(-4.25)  # α/τ on its own staleness
        np.testing.assert_array_equal(params["b"], -1)
        assert inline.version == 5


class TestExactlyOnce:
    def test_a_push_repeated_after_its_answer_is_answered_from_memory(self) -> None:
        inline = running("asgd", lr=1.0)
        inline.push(1, G, seq=1)
        inline.leave(1)
        inline.join(11, client="client-1")
        welcome = inline.said[11][0]
        assert isinstance(welcome, Welcome)
        assert welcome.last_seq == 1
        again = inline.push(11, G, 0, seq=1, fetch=True)
        assert isinstance(again, Ack)
        assert again.staleness == 0
        assert again.parts
        assert inline.version == 1

    def test_a_push_repeated_before_its_answer_is_answered_once_on_the_new_connection(self) -> None:
        inline = running("asgd", hold=True)
        inline.push(1, G, seq=1)
        inline.leave(1)
        inline.join(11, client="client-1")
        assert inline.push(11, G, 0, seq=1) is None
        inline.run_kernel()
        assert inline.acks(1) == []
        assert len(inline.acks(11)) == 1
        assert inline.version == 1
        assert inline.engine.admission.pool.out == 0

    def test_who_said_goodbye_asks_no_more_what_became_of_its_pushes(self) -> None:
        inline = running("asgd")
        inline.push(1, G, seq=1)
        inline.push(2, G, seq=1)
        inline.leave(1)
        inline.receive(2, messages.Leave(5))
        kept = {member.client: len(member.answers) for member in inline.engine.membership}
        assert (kept["client-1"], kept["client-2"]) == (1, 0)
        inline.join(12, client="client-2")
        assert isinstance(inline.push(12, G, 0, seq=1), Error)
        assert inline.version == 2, "it was applied once all the same"

    def test_a_refusal_is_remembered_too(self) -> None:
        inline = running("asgd")
        bad = {"w": np.full(3, np.nan, np.float32)}
        inline.push(1, bad, seq=1)
        again = inline.push(1, G, seq=1)
        assert isinstance(again, Error)
        assert inline.version == 0

    def test_a_push_too_old_to_remember_is_not_applied(self) -> None:
        inline = running("asgd")
        for seq in range(1, 101):
            inline.push(1, G, seq=seq)
        answer = inline.push(1, G, seq=1)
        assert isinstance(answer, Error)
        assert "older than what the server remembers" in answer.text
        assert inline.version == 100

    def test_a_new_connection_of_a_client_replaces_its_old_one(self) -> None:
        inline = running("asgd")
        inline.join(11, client="client-1")
        assert inline.dropped == [1]
        assert len(inline.engine.membership.present()) == 2

    def test_a_connection_that_was_replaced_is_answered_no_more(self) -> None:
        """Not even before its end is handled: its number may be another's after a restart."""
        inline = running("asgd", hold=True)
        inline.push(1, G, seq=1)
        assert inline.receive(1, Fetch(5, -1)) is None
        inline.join(11, client="client-1")
        inline.run_kernel()
        assert inline.acks(1) == []
        assert not any(isinstance(said, FetchedParams) for said in inline.said[1])
        assert isinstance(inline.push(11, G, 0, seq=1), Ack)
        assert inline.version == 1

    def test_an_older_connection_that_comes_late_replaces_nothing(self) -> None:
        inline = running("asgd")
        inline.join(11, client="client-1", epoch=3)
        inline.join(12, client="client-1", epoch=2)
        assert inline.dropped == [1, 12]
        assert 12 not in inline.said
        inline.push(11, G)
        assert inline.version == 1


class TestBarrier:
    def test_all_are_answered_when_the_last_has_pushed(self) -> None:
        inline = running("hardsync", workers=3, lr=1.0)
        for value, peer in ((1, 1), (2, 2)):
            assert inline.push(peer, {"w": np.full(3, value, np.float32)}) is None
        inline.push(3, {"w": np.full(3, 6, np.float32)})
        assert [len(inline.acks(p)) for p in (1, 2, 3)] == [1, 1, 1]
        np.testing.assert_array_equal(inline.params()["w"], -3)

    @pytest.mark.parametrize("way", ["leave", "say goodbye"])
    def test_a_worker_that_goes_is_not_waited_for(self, way: str) -> None:
        inline = running("hardsync", workers=3)
        inline.push(1, G)
        inline.push(2, G)
        if way == "leave":
            inline.leave(3)
        else:
            inline.receive(3, messages.Leave(5))
        assert len(inline.acks(1)) == len(inline.acks(2)) == 1
        assert inline.version == 1

    def test_a_worker_that_goes_while_the_last_gradient_is_being_added(self) -> None:
        inline = running("hardsync", workers=2, hold=True, lr=1.0)
        inline.push(1, G)
        inline.leave(2)
        inline.run_kernel()  # the sum
        inline.run_kernel()  # the step
        assert len(inline.acks(1)) == 1
        np.testing.assert_array_equal(inline.params()["w"], -1)

    def test_a_silent_worker_is_waited_for_until_the_deadline(self) -> None:
        inline = running("hardsync", workers=2)
        inline.push(1, G)
        inline.wait(299)
        assert inline.acks(1) == []
        inline.wait(1.5)
        assert len(inline.acks(1)) == 1
        assert "'w2' has not pushed for 300 s" in inline.notes[0]
        assert inline.push(2, G) is None  # it takes part again, and waits for the first
        inline.push(1, G)
        assert len(inline.acks(2)) == 1

    def test_workers_that_never_came_are_waited_for_until_the_deadline(self) -> None:
        inline = Inline("hardsync", workers=3, worker_deadline=10.0)
        inline.define(W)
        inline.join(1)
        inline.join(2)
        inline.push(1, G)
        inline.push(2, G)
        inline.wait(9)
        assert inline.version == 0
        inline.wait(1.5)
        assert inline.version == 1
        assert "1 of 3 workers have not come" in inline.notes[0]

    def test_observers_are_not_waited_for(self) -> None:
        inline = running("hardsync", workers=1)
        inline.join(9, role="observer")
        inline.push(1, G)
        assert inline.version == 1

    def test_a_late_worker_takes_part_from_its_first_round(self) -> None:
        inline = running("hardsync", workers=2)
        inline.push(1, G)
        inline.join(3)
        inline.push(2, G)
        assert inline.version == 0
        inline.push(3, G)
        assert inline.version == 1

    def test_a_second_gradient_in_a_round_is_refused(self) -> None:
        inline = running("hardsync", workers=2)
        inline.push(1, G)
        answer = inline.push(1, G)
        assert isinstance(answer, Error)
        assert "one gradient per worker and round" in answer.text

    def test_reject_wants_a_stale_gradient_again(self) -> None:
        inline = running("hardsync", workers=2, admission="reject", lr=1.0)
        inline.push(1, G, 0)
        inline.push(1, G, 0)
        refused = inline.push(2, G, 0, fetch=True)
        assert isinstance(refused, Error)
        assert refused.code == "stale"
        assert refused.version == 1
        assert [part.version for part in refused.parts] == [1]
        assert inline.engine.report()["refused"] == {"stale": 1}
        inline.push(2, G, 1)
        inline.push(1, G, 1)
        assert inline.version == 2

    def test_stopping_answers_those_who_wait(self) -> None:
        inline = running("hardsync", workers=2)
        inline.push(1, G)
        inline.post(Stopping(inline.now))
        assert inline.errors(1)[-1].code == "unavailable"
        answer = inline.push(2, G)
        assert isinstance(answer, Error)
        assert answer.code == "unavailable"


class TestResumed:
    """A server that is started again numbers its connections from 1, as the one before."""

    @pytest.mark.parametrize("policy", ["ssp", "hardsync"])
    def test_nothing_is_answered_to_earlier_connections(self, policy: str) -> None:
        settings = {"s": 0} if policy == "ssp" else {}
        inline = running(policy, **settings)
        inline.push(2, G, fetch=True)
        assert len(inline.said[2]) == 1, "its answer is held: worker 1 has not pushed"
        before = {peer: len(said) for peer, said in inline.said.items()}
        inline.post(Resumed(inline.now, 2))
        assert {peer: len(said) for peer, said in inline.said.items()} == before
        assert inline.engine.membership.peers() == []
        inline.join(2, client="client-2", epoch=2)
        answer = inline.push(2, G, seq=1, fetch=True)
        assert isinstance(answer, Ack), "its answer is remembered"
        assert inline.engine.membership.at(2).pushes == 1  # type: ignore[union-attr]

    def test_nor_are_rounds_of_averaging(self) -> None:
        """Two workers are ready, and the third, for whom they wait, is gone first."""
        inline = running("average", workers=3)
        for peer in (2, 3):
            digest = inline.engine.defined_store.layout.digest
            inline.receive(peer, JoinRound(7, "127.0.0.1", 4000 + peer, 0, digest, b"n" * 16))
        before = {peer: len(said) for peer, said in inline.said.items()}
        inline.post(Resumed(inline.now, 2))
        assert {peer: len(said) for peer, said in inline.said.items()} == before


class TestDraining:
    """`unavailable` uses up no sequence number: the push is sent again, and then counts."""

    def test_a_new_push(self) -> None:
        inline = running("asgd")
        inline.push(1, G)
        inline.post(Stopping(inline.now))
        for _ in range(2):
            answer = inline.push(1, G, seq=2)
            assert isinstance(answer, Error)
            assert answer.code == "unavailable"
        member = inline.engine.membership.at(1)
        assert member is not None
        assert (member.last_seq, list(member.answers)) == (1, [1])
        assert inline.engine.admission.pool.out == 0

    def test_a_gradient_to_apply_again(self) -> None:
        inline = Inline("fasgd", gate="bfasgd:c_push=0.1,skipped=reapply")
        inline.define(W)
        inline.join(1)
        inline.push(1, G)
        inline.post(Stopping(inline.now))
        inline.receive(1, messages.Reapply(9, 2, False, -1))
        member = inline.engine.membership.at(1)
        assert member is not None
        assert (member.last_seq, inline.errors(1)[-1].code) == (1, "unavailable")

    def test_a_push_before_there_is_a_model(self) -> None:
        inline = Inline("asgd")
        inline.join(1)
        inline.receive(1, messages.Push(1, 1, False, -1))
        inline.post(Stopping(inline.now))
        inline.receive(1, messages.Push(2, 2, False, -1))
        assert [error.code for error in inline.errors(1)] == ["not-ready", "unavailable"]
        member = inline.engine.membership.at(1)
        assert member is not None
        assert member.last_seq == 1

    def test_a_push_that_is_held_stays_refused(self) -> None:
        """Its gradient is in the sum: pushed again, it would count twice."""
        inline = running("hardsync", workers=2)
        inline.push(1, G)
        inline.post(Stopping(inline.now))
        inline.push(1, G, seq=1)
        assert [error.code for error in inline.errors(1)] == ["unavailable", "unavailable"]
        member = inline.engine.membership.at(1)
        assert member is not None
        assert member.last_seq == 1

    def test_a_push_that_is_held_stays_held_if_the_state_is_kept(self) -> None:
        inline = running("hardsync", workers=2)
        inline.push(1, G)
        inline.post(Stopping(inline.now, kept=True))
        assert not inline.said.get(1, [])[1:]
        assert isinstance(inline.push(2, G), Error)
        assert inline.engine.report()["waiting"] == 1
        assert inline.push(1, G, seq=1) is None, "it is pending, and not counted again"
        inline.leave(2)  # the barrier waits for the first worker only, as after a restart
        assert [ack.version for ack in inline.acks(1)] == [1]

    def test_a_model_that_comes_meanwhile(self) -> None:
        inline = Inline("asgd")
        inline.join(1)
        inline.post(Stopping(inline.now))
        inline.define(W)
        answer = inline.push(1, G)
        assert isinstance(answer, Error)
        assert answer.code == "unavailable"


class TestReaders:
    """A reader may end at any time, so whether there are any is a part of each event."""

    def test_what_was_found_counts_and_not_what_is_there(self) -> None:
        inline = running("asgd", hold=True)
        for leased, in_place in ((False, True), (True, False)):
            store = inline.engine.defined_store
            seq = store.version + 1
            inline.on_event = lambda _event, leased=leased: leased
            inline.push(1, G, seq=seq)
            assert store.busy is in_place
            assert store.readable is not in_place
            inline.run_kernel()

    def test_a_reader_that_ends_after_it_was_found(self) -> None:
        inline = running("asgd", hold=True)
        store = inline.engine.defined_store
        lease = store.lease()
        assert inline.engine.freeze()
        lease.release()
        inline.on_event = lambda _event: True
        inline.push(1, G)
        assert store.readable, "the update goes elsewhere"
        inline.on_event = lambda _event: inline.engine.freeze()
        inline.run_kernel()
        inline.push(1, G)
        assert not store.readable, "the new version has never had a reader"

    def test_without_a_model_there_are_none(self) -> None:
        assert not Inline("asgd").engine.freeze()


def test_barriers_need_to_know_how_many() -> None:
    with pytest.raises(ConflictError, match="--workers N"):
        Inline("hardsync")
    with pytest.raises(ConflictError, match="n = 5 groups cannot be made of 4 workers"):
        Inline("softsync", {"n": 5}, workers=4)


def test_statistics() -> None:
    inline = running("fasgd")
    inline.push(1, G)
    report = inline.receive(2, messages.Stats(4))
    assert isinstance(report, Report)
    content = report.report
    assert content["version"] == 1
    assert content["staleness"] == {"0": 1}
    assert 0 < content["vbar"] < 1
    assert [w["pushes"] for w in content["workers"]] == [1, 0]
    assert decode(encode(report)).id == 4


def test_memory_of_departed_clients_is_bounded() -> None:
    inline = Inline("asgd")
    inline.define(W)
    for peer in range(1, 5001):
        inline.join(peer)
        inline.leave(peer)
    assert len(list(inline.engine.membership)) <= 4097


def test_params_and_gradients_of_several_dtypes() -> None:
    arrays: dict[str, Array] = {"a": np.ones(2, np.float64), "b": np.ones((2, 2), np.float16)}
    inline = Inline("asgd", {"lr": 0.5})
    inline.define(arrays)
    inline.join(1)
    inline.push(1, arrays)
    params = inline.params()
    np.testing.assert_array_equal(params["a"], 0.5)
    np.testing.assert_array_equal(params["b"], 0.5)


HALF = {"a": np.zeros(3, np.float32), "h": np.zeros(3, np.float16)}


class TestResultsThatAreNotFinite:
    """An update with a result that is infinite, or not a number, is refused whole."""

    @pytest.mark.parametrize(("policy", "optimizer"), [("asgd", "sgd"), ("asgd", "adam")])
    def test_a_large_rate_makes_no_model_infinite(self, policy: str, optimizer: str) -> None:
        inline = running(policy, lr=1e30, optimizer=optimizer)
        before = inline.params()
        large = {"w": np.full(3, 9e17, np.float32)}
        for _ in range(3):
            inline.push(1, large)
        assert all(np.isfinite(inline.params()["w"]))
        if optimizer == "sgd":
            refused = inline.errors(1)[-1]
            assert refused.code == "bad-push"
            assert refused.details["tensor"] == "w"
            assert inline.version == 0
            assert inline.engine.report()["gradients"] == 0
            np.testing.assert_array_equal(inline.params()["w"], before["w"])
            assert isinstance(inline.push(1, {"w": np.full(3, 1e-30, np.float32)}), Ack)

    def test_a_half_precision_tensor_is_named(self) -> None:
        inline = Inline("asgd", {"lr": 1.0})
        inline.define(HALF)
        inline.join(1)
        fine = {"a": np.ones(3, np.float32), "h": np.full(3, 6e4, np.float16)}
        assert isinstance(inline.push(1, fine), Ack)
        before = inline.params()
        refused = inline.push(1, fine)
        assert isinstance(refused, Error)
        assert refused.details["tensor"] == "h"
        for name, array in inline.params().items():
            np.testing.assert_array_equal(array, before[name])
        assert isinstance(inline.push(1, {"a": np.ones(3, np.float32)}), Ack)

    def test_those_that_wait_for_the_step_are_refused_with_it(self) -> None:
        inline = running("hardsync", lr=1e30)
        large = {"w": np.full(3, 9e17, np.float32)}
        assert inline.push(1, large) is None
        assert isinstance(inline.push(2, large), Error)
        assert [error.details["tensor"] for error in inline.errors(1)] == ["w"]
        assert inline.version == 0
        small = {"w": np.full(3, 1e-30, np.float32)}
        inline.push(1, small)
        assert isinstance(inline.push(2, small), Ack)
        np.testing.assert_allclose(inline.params()["w"], -1)

    def test_the_log_tells_of_gradients_that_were_acknowledged_before(self) -> None:
        inline = running("softsync", lr=1e30)
        large = {"w": np.full(3, 9e17, np.float32)}
        assert isinstance(inline.push(1, large), Ack)
        assert isinstance(inline.push(2, large), Error)
        assert "these 2 pushes" in inline.notes[-1]
        assert inline.version == 0

    def test_a_fetch_that_waited_for_a_refused_update_is_answered(self) -> None:
        inline = running("asgd", hold=True, lr=1e30)
        inline.push(1, {"w": np.full(3, 9e17, np.float32)})
        assert inline.receive(2, Fetch(5, -1)) is None
        inline.run_kernel()
        answer = inline.said[2][-1]
        assert isinstance(answer, FetchedParams)
        assert answer.version == 0
