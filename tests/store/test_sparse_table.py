"""Tables in the engine: what a push comes to, exactly once, and what is refused."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from aiops.algorithms import BUILT_IN, find
from aiops.algorithms.asgd import ASGD
from aiops.algorithms.fasgd import FASGD
from aiops.algorithms.model_support import tables_obstacle
from aiops.algorithms.optimizers import OPTIMIZERS, sgd
from aiops.engine.digest import digest
from aiops.engine.events import Left, Received, Stopping
from aiops.errors import DamagedState
from aiops.kernels.row_initialiser import RowInitialiser, first_rows
from aiops.kernels.rule import Rule
from aiops.model.layout import Array
from aiops.model.parts import Part
from aiops.model.tables import NamedTable, Table, Tables, fetch_parts, push_parts
from aiops.store.sparse_table import SparseTable
from aiops.wire import messages
from aiops.wire.messages import Error, FetchRows, Message, PushRows, TableRows
from tests.driven import Driven
from tests.inline import Inline
from tests.recording import Recording
from tests.rows import each_row
from tests.strategies import DETERMINISTIC, cut

TABLE = Table(50, 3, scale=0.5, seed=4)
FIRST = RowInitialiser("uniform", 0.5, 4)
POLICIES = ("asgd", "sasgd", "fasgd")
LAZY = ("momentum", "nesterov", "adagrad", "rmsprop", "adam", "adamw")


class Tabled(Inline):
    """An engine with a model of one table, ``t``, and one worker, peer 1."""

    def __init__(
        self,
        policy: str = "asgd",
        table: Table = TABLE,
        record: bool = False,
        settings: Mapping[str, Any] = MappingProxyType({}),
        **options: Any,
    ) -> None:
        super().__init__(policy, {"lr": 0.5, **settings}, **options)
        self.table = table
        self.record = Recording(policy, self.engine)
        if record:
            self.on_event = self.record.note
        self.join(1)
        self.defined = self.receive(1, messages.Define(1, (), (), Tables({"t": table}).described))

    @property
    def store(self) -> Any:
        return self.engine.tables[0]

    def fetch(self, ids: Any, peer: int = 1) -> Message | None:
        return self.receive(peer, FetchRows(7, 0, fetch_parts(self.table, len(ids))), packed(ids))

    def values(self, ids: Any) -> Array:
        """The rows, as a fetch brings them."""
        answer = self.fetch(ids)
        assert isinstance(answer, TableRows), answer
        return self.brought()

    def brought(self, peer: int = 1) -> Array:
        return np.frombuffer(self.rows[peer][-1], self.table.dtype).reshape(-1, self.table.width)

    def push_rows(
        self,
        ids: Any,
        grads: Any,
        version: int | None = None,
        *,
        wanted: Any = (),
        seq: int | None = None,
        peer: int = 1,
    ) -> Message | None:
        if seq is None:
            seq = self.seqs[peer] = self.seqs.get(peer, 0) + 1
        version = self.store.version if version is None else version
        parts = push_parts(self.table, len(ids), len(wanted))
        data = packed(ids) + packed(wanted) + np.asarray(grads, self.table.dtype).tobytes()
        return self.receive(peer, PushRows(1000 * peer + seq, seq, 0, version, parts), data)


def packed(ids: Any) -> bytes:
    return np.asarray(ids, "<i8").tobytes()


def ones(count: int, value: float = 1.0) -> Array:
    return np.full((count, 3), value, np.float32)


class Oracle:
    """Every row and its state, updated one by one as the rule's equations say."""

    def __init__(self, policy: str, rows: int, settings: Mapping[str, Any] | None = None) -> None:
        self.algorithm = find(policy).make({"lr": 0.5, **(settings or {})})
        self.updates = 0
        rule = self.algorithm.rule()
        self.function = rule.function
        self.constants = {k: np.float32(v) for k, v in rule.constants.items()}
        self.w = first_rows(FIRST, np.arange(rows), 3, np.dtype(np.float32))
        self.state = [np.full((rows, 3), v, np.float32) for v in rule.state.values()]

    def push(self, ids: Array, grads: Array, staleness: int) -> None:
        step = np.float32(0.5 * self.algorithm.modulation(staleness))
        self.updates += 1
        scalars = [np.float32(scalar) for scalar in self.algorithm.row_scalars(self.updates)]
        for row in dict.fromkeys(ids.tolist()):
            total = np.zeros(3, np.float32)
            for grad in grads[ids == row]:
                total += grad
            arrays = [self.w, *self.state]
            new = self.function(
                *(self.w[row], total, *(s[row] for s in self.state), step, *scalars),
                **self.constants,
            )
            for array, value in zip(arrays, new, strict=True):
                array[row] = value


class TestPush:
    @each_row("backend", ["numpy", "numba"])
    @each_row("policy", POLICIES)
    def test_rows_are_updated_by_the_rule_and_no_others(self, policy: str, backend: str) -> None:
        inline, oracle = Tabled(policy, backend=backend), Oracle(policy, 50)
        rng = np.random.default_rng(3)
        for count in (1, 20, 80, 7, 30):
            ids = rng.integers(0, 50, count)
            grads = rng.standard_normal((count, 3)).astype(np.float32)
            stale = int(rng.integers(0, inline.store.version + 1))
            answer = inline.push_rows(ids, grads, inline.store.version - stale)
            assert isinstance(answer, TableRows)
            assert (answer.version, answer.staleness) == (inline.store.version, stale)
            oracle.push(ids, grads, stale)
            got = inline.values(np.arange(50))
            assert got.tobytes() == oracle.w.tobytes()

    @each_row("backend", ["numpy", "numba"])
    @each_row("optimizer", LAZY)
    def test_every_optimiser_is_lazy(self, optimizer: str, backend: str) -> None:
        settings = {"optimizer": optimizer, "weight_decay": 0.25}
        inline = Tabled(settings=settings, backend=backend)
        oracle = Oracle("asgd", 50, settings)
        rng = np.random.default_rng(4)
        for count in (1, 20, 7, 30):
            ids = rng.integers(0, 50, count)
            grads = rng.standard_normal((count, 3)).astype(np.float32)
            assert isinstance(inline.push_rows(ids, grads), TableRows)
            oracle.push(ids, grads, 0)
            assert inline.values(np.arange(50)).tobytes() == oracle.w.tobytes()

    @pytest.mark.parametrize("name", ["sgd", "adagrad", "adam"])
    @pytest.mark.filterwarnings("ignore:Sparse invariant checks:UserWarning")  # torch's Adagrad
    def test_it_equals_the_optimiser_of_sparse_gradients_in_torch(self, name: str) -> None:
        torch = pytest.importorskip("torch")
        settings = {"optimizer": name, "lr": 0.1, "eps": 1e-30}  # whose place differs in torch
        inline = Tabled(settings=settings, table=Table(50, 3, "float64", seed=4))
        layer = torch.nn.Embedding(50, 3, sparse=True, dtype=torch.float64)
        with torch.no_grad():
            layer.weight.copy_(torch.from_numpy(inline.values(np.arange(50)).copy()))
        kinds = {"sgd": "SGD", "adagrad": "Adagrad", "adam": "SparseAdam"}
        eps = {} if name == "sgd" else {"eps": 1e-30}
        peer = getattr(torch.optim, kinds[name])(list(layer.parameters()), lr=0.1, **eps)
        rng = np.random.default_rng(5)
        for count in (3, 20, 1, 30):
            ids, slopes = rng.integers(0, 50, count), rng.standard_normal((count, 3))
            peer.zero_grad()
            (layer(torch.from_numpy(ids)) * torch.from_numpy(slopes)).sum().backward()
            peer.step()
            inline.push_rows(ids, slopes)
            theirs = layer.weight.detach().numpy()
            np.testing.assert_allclose(inline.values(np.arange(50)), theirs, rtol=1e-12, atol=1e-14)

    def test_an_answer_brings_the_rows_after_the_push(self) -> None:
        inline = Tabled()
        before = inline.values([4, 5])
        answer = inline.push_rows([4], ones(1), wanted=[5, 4, 5])
        assert isinstance(answer, TableRows)
        assert answer.parts == (Part(0, 3, "raw", 36, 1),)
        np.testing.assert_array_equal(inline.brought(), [before[1], before[0] - 0.5, before[1]])

    def test_fetching_neither_stores_nor_counts(self) -> None:
        inline = Tabled()
        inline.values(np.arange(50))
        assert (inline.store.made, inline.store.version) == (0, 0)
        inline.push_rows([3, 3, 9], ones(3))
        [line] = inline.engine.report()["tables"]
        assert (line["made"], line["version"], line["rows_pushed"]) == (2, 1, 3)
        assert line["bytes"] == 2 * 12
        ids, rows = inline.store.stored()
        assert ids.tolist() == [3, 9]
        np.testing.assert_array_equal(rows, inline.values([3, 9]))

    def test_a_push_larger_than_any_before(self) -> None:
        inline = Tabled(table=Table(5000, 3))
        for count in (10, 4000):
            ids = np.arange(count)
            before = inline.values(ids)
            inline.push_rows(ids, np.ones((count, 3), np.float32))
            np.testing.assert_array_equal(inline.values(ids), before - np.float32(0.5))

    def test_float64(self) -> None:
        inline = Tabled(table=Table(50, 3, "float64", "zeros"))
        inline.push_rows([1, 1], np.full((2, 3), 1e-9))
        np.testing.assert_array_equal(inline.values([1]), np.full((1, 3), -0.5 * 2e-9))


class TestOrder:
    def test_rows_are_not_read_while_they_are_written(self) -> None:
        inline = Tabled(hold=True)
        first = first_rows(FIRST, np.array([2]), 3, np.dtype(np.float32))
        inline.push_rows([2], ones(1))
        assert inline.fetch([2]) is None
        assert inline.push_rows([2], ones(1), version=0) is None
        assert not inline.engine.idle
        for _ in range(3):
            inline.run_kernel()
        assert inline.engine.idle
        np.testing.assert_array_equal(inline.brought(), first - np.float32(0.5))
        answers = [m for m in inline.said[1] if isinstance(m, TableRows)]
        assert [(m.version, m.staleness) for m in answers] == [(1, 0), (1, 0), (2, 1)]

    def test_tables_and_tensors_take_turns(self) -> None:
        inline = Inline("asgd", {"lr": 0.5}, hold=True)
        inline.join(1)
        part = Part(0, 12, "raw", 12, 0)
        described = Tables({"t": TABLE}).described
        define = messages.Define(1, (("w", "float32", (3,)),), (part,), described)
        inline.receive(1, define, bytes(12))
        assert inline.push(1, {"w": np.ones(3, np.float32)}, 0) is None
        push = PushRows(2, 2, 0, 0, push_parts(TABLE, 1, 0))
        assert inline.receive(1, push, packed([1]) + ones(1).tobytes()) is None
        assert inline.push(1, {"w": np.ones(3, np.float32)}, 0, seq=3) is None
        for _ in range(3):
            inline.run_kernel()
        kinds = [m.kind for m in inline.said[1][-3:]]
        assert kinds == ["ack", "rows", "ack"]
        assert (inline.version, inline.engine.tables[0].version) == (2, 1)


class TestExactlyOnce:
    def test_a_repeated_push_is_answered_from_memory(self) -> None:
        inline = Tabled("sasgd")
        inline.push_rows([1], ones(1))
        reply = inline.push_rows([1], ones(1), version=0)
        after = inline.values([1])
        inline.push_rows([2], ones(1))
        again = inline.push_rows([1], ones(1), version=0, seq=2)
        assert isinstance(reply, TableRows)
        assert isinstance(again, TableRows)
        assert (again.version, again.staleness) == (reply.version, reply.staleness) == (2, 1)
        np.testing.assert_array_equal(inline.values([1]), after)
        assert inline.store.version == 3

    def test_a_repeated_exchange_brings_the_rows_as_they_are_now(self) -> None:
        inline = Tabled()
        inline.push_rows([1], ones(1), wanted=[1])
        inline.push_rows([1], ones(1))
        answer = inline.push_rows([1], ones(1), version=0, wanted=[1], seq=1)
        assert isinstance(answer, TableRows)
        assert (answer.version, answer.staleness) == (2, 0)
        np.testing.assert_array_equal(inline.brought(), inline.values([1]))
        assert inline.store.version == 2

    def test_a_push_repeated_while_it_waits_is_applied_once(self) -> None:
        inline = Tabled(hold=True)
        inline.push_rows([1], ones(1), wanted=[1])
        inline.post(Left(inline.now, 1))
        inline.join(2, client="client-1", epoch=2)
        assert inline.push_rows([1], ones(1), version=0, wanted=[1], seq=1, peer=2) is None
        inline.run_kernel()
        assert inline.engine.idle
        assert isinstance(inline.said[2][-1], TableRows)
        assert inline.said[2][-1].id == 2001
        assert 2 in inline.rows
        assert inline.store.version == 1

    def test_a_repetition_that_names_another_table_changes_nothing(self) -> None:
        """What is pushed, and where, was fixed and checked when it first came."""
        inline = Tabled(hold=True)
        inline.push_rows([1], ones(1), version=0, seq=1)
        inline.push_rows([2], ones(1), version=0, seq=2)
        inline.receive(1, PushRows(9, 2, 999, 0, ()))
        inline.run_kernel()
        inline.run_kernel()
        assert inline.store.version == 2
        said = inline.said[1][-1]
        assert isinstance(said, TableRows)
        assert said.id == 9

    def test_a_repeated_refusal_is_the_same(self) -> None:
        inline = Tabled()
        bad = inline.push_rows([1], ones(1, np.nan))
        again = inline.push_rows([1], ones(1), seq=1)
        assert isinstance(bad, Error)
        assert isinstance(again, Error)
        assert again.text == bad.text

    def test_the_numbers_are_those_of_all_pushes(self) -> None:
        inline = Tabled()
        inline.push_rows([1], ones(1), seq=5)
        answer = inline.push_rows([1], ones(1), seq=4)
        assert isinstance(answer, Error)
        assert "older than what the server remembers" in answer.text
        dense = messages.Push(9, 5, False, -1, ())
        assert isinstance(inline.receive(1, dense), Error)
        assert inline.store.version == 1


class TestRefused:
    @pytest.fixture
    def inline(self) -> Any:
        """A table with a push in it; nothing that a test does may change it or leak a buffer."""
        inline = Tabled("fasgd")
        inline.push_rows([1, 2], ones(2))
        inline.join(2, role="observer")
        before = inline.store.digest(), inline.store.version
        yield inline
        assert (inline.store.digest(), inline.store.version) == before
        assert inline.engine.admission.pool.out == 0
        assert inline.engine.idle

    @pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf, 1e18, -2e20])
    def test_a_value_that_no_model_survives(self, inline: Tabled, value: float) -> None:
        grads = ones(3)
        grads[1, 2] = value
        answer = inline.push_rows([4, 5, 6], grads)
        assert isinstance(answer, Error)
        assert answer.code == "bad-push"
        assert "'t': the gradient of row 5 (number 1 of the push) holds" in answer.text
        assert "in column 2" in answer.text

    def test_values_that_add_up_to_one(self, inline: Tabled) -> None:
        answer = inline.push_rows([4, 7, 7], ones(3, 6e17), wanted=[1])
        assert isinstance(answer, Error)
        assert "the gradients of row 7 (first at 1 of the push) add up" in answer.text
        assert inline.engine.report()["refused"] == {"bad-push": 1}

    @pytest.mark.parametrize("id", [-1, 50, 2**62, -(2**63)])
    def test_an_id_out_of_range(self, inline: Tabled, id: int) -> None:
        for answer in (
            inline.fetch([0, id]),
            inline.push_rows([0, id], ones(2)),
            inline.push_rows([0], ones(1), wanted=[3, id]),
        ):
            assert isinstance(answer, Error)
            assert f"has no row {id} (it is number 1 of the ids)" in answer.text

    def test_a_version_that_does_not_exist_yet(self, inline: Tabled) -> None:
        answer = inline.push_rows([1], ones(1), version=2)
        assert isinstance(answer, Error)
        assert "at version 2, but the server is at 1" in answer.text

    def test_an_observer_reads_and_does_not_push(self, inline: Tabled) -> None:
        answer = inline.push_rows([1], ones(1), peer=2)
        assert isinstance(answer, Error)
        assert "observer" in answer.text
        assert isinstance(inline.fetch([1], peer=2), TableRows)

    @pytest.mark.parametrize(
        "message",
        [
            FetchRows(1, 1, fetch_parts(TABLE, 1)),
            PushRows(1, 9, 1, 0, (Part(0, 1, "raw", 8, 0),)),
            PushRows(1, 9, 0, 0, (Part(0, 1, "raw", 8, 0),)),
            FetchRows(1, 0, (Part(0, 2, "raw", 8, 0),)),
            FetchRows(1, 0, (Part(0, 1, "zip", 8, 0),)),
            FetchRows(1, 0, ()),
            PushRows(1, 9, 0, 0, ()),
        ],
    )
    def test_parts_that_lie(self, inline: Tabled, message: Any) -> None:
        answer = inline.receive(1, message, bytes(sum(part.nbytes for part in message.parts)))
        assert isinstance(answer, Error)
        assert answer.code == "bad-push"

    def test_a_server_that_is_going_down(self, inline: Tabled) -> None:
        member = inline.engine.membership.at(1)
        assert member is not None
        before = member.last_seq, list(member.answers)
        inline.post(Stopping(inline.now))
        answer = inline.push_rows([1], ones(1))
        assert isinstance(answer, Error)
        assert answer.code == "unavailable"
        assert (member.last_seq, list(member.answers)) == before, "it may be sent again"

    def test_before_there_is_a_model(self) -> None:
        inline = Inline("asgd")
        inline.join(1)
        for message in (
            FetchRows(1, 0, fetch_parts(TABLE, 1)),
            PushRows(1, 1, 0, 0, push_parts(TABLE, 1, 0)),
        ):
            data = bytes(sum(part.nbytes for part in message.parts))
            answer = inline.receive(1, message, data)
            assert isinstance(answer, Error)
            assert answer.code == "not-ready"


class TestReceiving:
    """Bytes on their way in: in whatever pieces, and when they end early or find no room."""

    IDS, WANTED = np.array([3, 9, 3]), np.array([9])
    GRADS = np.arange(9, dtype=np.float32).reshape(3, 3)

    def frame(self, grads: Array = GRADS, ids: Any = IDS, wanted: Any = WANTED) -> bytes:
        speaker = Driven("client", lambda message: None)
        speaker.state = "open"
        parts = push_parts(TABLE, len(ids), len(wanted))
        payloads = [packed(ids), packed(wanted), grads.tobytes()]
        message = PushRows(1, 1, 0, 0, parts)
        return b"".join(speaker.send(message, [[memoryview(p)] for p in payloads]))

    @staticmethod
    def listener(inline: Tabled) -> Driven:
        wire = Driven("server", inline.engine.admission.sink_for)
        wire.state = "open"
        return wire

    @staticmethod
    def feed(wire: Driven, pieces: list[bytes]) -> list[Any]:
        heard = []
        for piece in pieces:
            while piece:
                view = wire.next_buffer()[: len(piece)]
                view[:], piece = piece[: len(view)], piece[len(view) :]
                heard += wire.take(len(view))
        return heard

    @DETERMINISTIC
    @given(st.lists(st.integers(1, 60), max_size=8), st.sampled_from(("good", "value", "id")))
    def test_in_whatever_pieces_it_comes(self, sizes: list[int], kind: str) -> None:
        inline, grads, ids = Tabled(), self.GRADS.copy(), self.IDS.copy()
        if kind == "value":
            grads[2, 1] = np.nan
        if kind == "id":
            ids[1] = 50
        frame = self.frame(grads, ids)
        [(message, sink)] = self.feed(self.listener(inline), cut(frame, sizes))
        assert sink.pushed.tolist() == ids.tolist()
        assert sink.wanted.tolist() == self.WANTED.tolist()
        np.testing.assert_array_equal(sink.grads, grads)
        assert (sink.fault is None) == (kind == "good")
        inline.post(Received(inline.now, 1, message, sink))
        assert isinstance(inline.said[1][-1], TableRows if kind == "good" else Error)
        assert inline.engine.admission.pool.out == 0

    def test_a_connection_lost_midway_gives_the_buffer_back(self) -> None:
        inline, frame = Tabled(), self.frame()
        for length in range(len(frame)):
            wire = self.listener(inline)
            assert not self.feed(wire, [frame[:length]])
            wire.lost()
            assert inline.engine.admission.pool.out == 0

    def test_who_finds_no_room_waits_and_comes_in_turn(self) -> None:
        inline = Tabled()
        pool = inline.engine.admission.row_pool
        pool.bound = 4096
        taken = pool.take(4096)
        assert taken is not None
        wire = self.listener(inline)
        assert not self.feed(wire, [self.frame()])
        assert wire.waiting
        heard: list[Any] = []
        pool.wait(lambda: heard.extend(wire.resume()) or not wire.waiting)
        pool.give(taken)
        [(message, sink)] = heard
        inline.post(Received(inline.now, 1, message, sink))
        assert isinstance(inline.said[1][-1], TableRows)

    def test_room_that_is_let_go_elsewhere_is_found_by_the_next_who_asks(self) -> None:
        """A large answer is sent from its buffer; its bytes may be let go on any thread."""
        inline = Tabled()
        message = FetchRows(1, 0, fetch_parts(TABLE, 5))
        sink: Any = inline.engine.admission.sink_for(message)
        sink.view(0, 0)[:] = packed(range(5))
        sink.filled(0, 0, 40)
        sink.out[:] = 7
        view = sink.answer_later().data
        sink.free()
        pool = inline.engine.admission.row_pool
        assert pool.out == 4096
        assert bytes(view) == np.full(15, 7, np.float32).tobytes()
        del view, sink
        pool.settle()
        assert pool.out == 0


class TestDefine:
    @pytest.mark.parametrize("policy", ["hardsync", "softsync"])
    def test_a_policy_that_collects_takes_no_tables(self, policy: str) -> None:
        inline = Inline(policy, workers=2)
        inline.join(1)
        answer = inline.receive(1, messages.Define(1, (), (), Tables({"t": TABLE}).described))
        assert isinstance(answer, Error)
        assert "cannot have the table 't'" in answer.text
        assert f"{policy} collects gradients" in answer.text
        assert inline.engine.store is None

    def test_a_rule_with_state_has_to_say_that_it_may_skip_rows(self) -> None:
        from examples.custom_algorithm import Signum

        why = tables_obstacle(Signum())
        assert why is not None
        assert "state would stand still" in why
        assert all(tables_obstacle(find(policy).make({})) is None for policy in POLICIES)

    @each_row(
        ("policy", "reason"),
        [
            ("ringmaster", "or leaves some out"),
            ("dcasgd", "does not keep rows that it has sent"),
            ("easgd", "does not say that it suits rows"),
        ],
    )
    def test_what_makes_no_sense_is_refused_with_its_reason(self, policy: str, reason: str) -> None:
        why = tables_obstacle(find(policy).make({}))
        assert why is not None
        assert reason in why
        assert "choose" in why.lower()

    def test_a_policy_that_makes_workers_wait_counts_pushes_of_tensors(self) -> None:
        ssp = find("ssp").make({})
        assert tables_obstacle(ssp) is None
        inline = Inline("ssp", {"optimizer": "adam"})
        inline.join(1)
        answer = inline.receive(1, messages.Define(1, (), (), Tables({"t": TABLE}).described))
        assert isinstance(answer, Error)
        assert "a model of tables alone has none: add a tensor" in answer.text

    def test_under_ssp_rows_are_answered_at_once_and_tensors_within_the_bound(self) -> None:
        inline = Inline("ssp", {"optimizer": "adam", "s": 0})
        inline.join(1)
        inline.join(2)
        part, described = Part(0, 12, "raw", 12, 0), Tables({"t": TABLE}).described
        define = messages.Define(1, (("w", "float32", (3,)),), (part,), described)
        inline.receive(1, define, bytes(12))
        for peer in (1, 2):
            push = PushRows(1, 1, 0, 0, push_parts(TABLE, 1, 1))
            rows = packed([1]) + packed([1]) + ones(1).tobytes()
            assert isinstance(inline.receive(peer, push, rows), TableRows)
        assert inline.engine.tables[0].version == 2
        assert inline.push(1, {"w": np.ones(3, np.float32)}, 0, seq=2) is None, "it is ahead"
        fetch = FetchRows(7, 0, fetch_parts(TABLE, 1))
        assert isinstance(inline.receive(1, fetch, packed([1])), TableRows)
        assert inline.push(2, {"w": np.ones(3, np.float32)}, 0, seq=2) is not None
        assert [m.kind for m in inline.said[1]].count("ack") == 1

    @each_row("name", sorted(BUILT_IN))
    def test_every_algorithm_takes_tables_or_says_why_not(self, name: str) -> None:
        why = tables_obstacle(find(name).make({}))
        assert (why is None) if name in POLICIES else (why is None or name in why)

    def test_all_optimisers(self) -> None:
        for optimizer in OPTIMIZERS:
            settings = {"optimizer": optimizer, "weight_decay": 0.1}
            assert tables_obstacle(find("asgd").make(settings)) is None

    def test_a_derived_algorithm_with_another_rule_has_to_say_so(self) -> None:
        class Other(ASGD):
            def rule(self) -> Rule:
                return FASGD().rule()

        why = tables_obstacle(Other())
        assert why is not None
        assert "does not say that it suits rows" in why

    @each_row("policy", POLICIES)
    def test_clipping_is_over_whole_gradients(self, policy: str) -> None:
        for settings in ({"clip": 1.0}, {"per_tensor": "clip=1@t*"}):
            why = tables_obstacle(find(policy).make(settings), ["a", "t1", "t2"])
            assert why is not None
            assert f"--set 'clip=0@{'a,t1,t2' if 'clip' in settings else 't1,t2'}'" in why
        strange = ["emb[0]", "a b", *(f"t{n:02}" for n in range(20))]
        why = tables_obstacle(find(policy).make({"clip": 1.0}), strange)
        assert why is not None
        assert "--set 'clip=0@a?b,emb[[]0],t00," in why
        assert why.endswith("t05' and so on, for 22 tables")
        assert tables_obstacle(find(policy).make({"clip": 1.0})) is not None
        for settings in ({"per_tensor": "clip=1@w"}, {"clip": 1.0, "per_tensor": "clip=0@t*"}):
            assert tables_obstacle(find(policy).make(settings), ["t1", "t2"]) is None

    def test_other_tensors_may_be_clipped(self) -> None:
        inline = Inline("asgd", {"lr": 1.0, "clip": 1.0, "per_tensor": "clip=0@t"})
        inline.join(1)
        part, described = Part(0, 12, "raw", 12, 0), Tables({"t": TABLE}).described
        define = messages.Define(1, (("w", "float32", (3,)),), (part,), described)
        inline.receive(1, define, bytes(12))
        inline.push(1, {"w": np.full(3, 2.0, np.float32)}, 0)
        np.testing.assert_allclose(inline.params()["w"], -np.full(3, 3**-0.5), rtol=1e-6)
        fetch = FetchRows(7, 0, fetch_parts(TABLE, 1))

        def row() -> Array:
            assert isinstance(inline.receive(1, fetch, packed([1])), TableRows)
            return np.frombuffer(inline.rows[1][-1], np.float32).copy()

        before = row()
        rows = packed([1]) + packed([]) + ones(1, 2.0).tobytes()
        push = PushRows(1, 2, 0, 0, push_parts(TABLE, 1, 0))
        inline.receive(1, push, rows)
        np.testing.assert_allclose(row(), before - 2, rtol=1e-6)

    def test_the_learning_rate_follows_its_schedule(self) -> None:
        """By the table's own updates."""
        inline = Tabled()
        inline.engine.training.table_requests._rates = lambda update: 2.0**-update  # type: ignore[union-attr]
        before = inline.values([1])
        for _ in range(3):
            inline.push_rows([1], ones(1))
        np.testing.assert_allclose(inline.values([1]), before - 1.75, rtol=1e-6)

    def test_a_model_may_be_tables_alone(self) -> None:
        inline = Tabled()
        assert isinstance(inline.defined, messages.Model)
        assert inline.defined.created
        assert inline.defined.tables == Tables({"t": TABLE}).described
        inline.join(3)
        welcome = inline.said[3][-1]
        assert isinstance(welcome, messages.Welcome)
        assert welcome.tables == inline.defined.tables

    @each_row(
        ("tables", "said"),
        [
            ({"t": Table(50, 4)}, "the width of its table 't' is 3, not 4"),
            ({}, "a model has 1 to"),
            ({"t": TABLE, "u": TABLE}, "it has no table 'u'"),
        ],
    )
    def test_another_table_is_refused(self, tables: Any, said: str) -> None:
        inline = Tabled()
        answer = inline.receive(1, messages.Define(2, (), (), Tables(tables).described))
        assert isinstance(answer, Error)
        assert said in answer.text

    def test_a_table_that_is_none(self) -> None:
        inline = Inline("asgd")
        inline.join(1)
        for row, said in (
            (("t", 0, 3, "float32", "zeros", 0.0, 0), "rows must be a whole number from 1 to"),
            (("t", 3, 3, "int8", "zeros", 0.0, 0), "must be float32 or float64, not 'int8'"),
        ):
            answer = inline.receive(1, messages.Define(1, (), (), (row,)))
            assert isinstance(answer, Error)
            assert said in answer.text
        assert inline.engine.store is None

    def test_all_rows_count_towards_the_largest_model(self) -> None:
        inline = Tabled(max_model=599)
        assert isinstance(inline.defined, Error)
        assert "tables of 600 bytes" in inline.defined.text
        assert isinstance(Tabled(max_model=600).defined, messages.Model)


class TestReplay:
    @each_row("backend", ["numpy", "numba"])
    @each_row("policy", POLICIES)
    def test_a_recorded_run_ends_with_the_same_bits(self, policy: str, backend: str) -> None:
        again = self.record(policy).replay(backend)
        assert again.complete
        assert again.engine.tables[0].version == 9
        assert again.engine.tables[0].made > 20

    def test_another_gradient_is_noticed(self) -> None:
        record = self.record("asgd")
        mark, other = np.float32(0.123).tobytes(), np.float32(0.124).tobytes()
        assert sum(bytes(frame.payload).count(mark) for frame in record.frames) == 1
        record.frames = [
            replace(frame, payload=memoryview(bytes(frame.payload).replace(mark, other)))
            for frame in record.frames
        ]
        with pytest.raises(DamagedState, match="not those that the recorded run ended with"):
            record.replay()

    @staticmethod
    def record(policy: str) -> Recording:
        inline = Tabled(policy, record=True)
        inline.join(2)
        rng = np.random.default_rng(1)
        for number in range(10):
            ids, wanted = rng.integers(0, 50, 9), rng.integers(0, 50, number)
            grads = rng.standard_normal((9, 3)).astype(np.float32)
            if number == 3:
                grads[0] = 0.123, np.nan, 1
            if number == 4:
                grads[1, 1] = 0.123
            peer = 1 + number % 2
            version = max(0, inline.store.version - number % 3)
            inline.push_rows(ids, grads, version, wanted=wanted, peer=peer)
            inline.fetch(ids)
        inline.push_rows([1, 1], ones(2, 9e17))
        inline.record.end(inline.now)
        assert digest(inline.engine)
        return inline.record


def test_ids_chosen_to_collide_are_sorted_instead() -> None:
    """The same bits as ever, in no more than a moment: hashing gives up."""
    pytest.importorskip("numba")
    golden, rows = 0x9E37_79B9_7F4A_7C15, 1 << 20
    everything = np.arange(rows, dtype=np.uint64)
    with np.errstate(over="ignore"):
        slots = (everything * np.uint64(golden)) >> np.uint64(64 - 13)
    ids = everything[np.argsort(slots, kind="stable")][:4096].astype(np.int64)
    grads = np.random.default_rng(0).normal(size=(len(ids), 2)).astype(np.float32)
    stored = []
    for backend in ("numpy", "numba"):
        table = NamedTable("t", 0, Table(rows, 2))
        store = SparseTable(table, Rule(sgd), backend)
        assert store.update(ids, grads, 0.5).tolist() == [-1, 4096, 4096]
        stored.append(store.digest())
    assert stored[0] == stored[1]


def test_a_small_table_has_no_huge_pages_to_make() -> None:
    """However it happens to lie in memory."""
    for rows in range(6000, 6400, 16):
        store = SparseTable(NamedTable("t", 0, Table(rows, 64)), Rule(sgd), "numpy")
        store._pages.count_updates(1 << 20)


@pytest.mark.parametrize("backend", ["numpy", "numba"])
def test_a_row_that_would_be_infinite_changes_nothing(backend: str) -> None:
    if backend == "numba":
        pytest.importorskip("numba")
    named = NamedTable("t", 0, Table(10, 2))
    store = SparseTable(named, Rule(sgd), backend)
    ids = np.array([3, 5, 3])
    before = store.digest()
    grads = np.ones((3, 2), np.float32)
    grads[1, 1] = 9e17
    assert store.update(ids, grads, 1e25).tolist() == [1, -1, 0]
    assert store.digest() == before
    assert store.update(ids, grads, 1.0).tolist() == [-1, 2, 2]
