"""The ledger: every byte is counted once, under the tensor and the reason that it belongs to."""

from __future__ import annotations

import json
import random
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from aiops.bandwidth.byte_accounting import SHOWN, Ledger
from aiops.client import Client, Worker
from aiops.errors import UsageError
from aiops.model.layout import MAX_PART, Layout, split
from aiops.model.parts import Part, Parts, Wants
from aiops.model.tables import Table
from aiops.serving.run_files import LedgerFile
from aiops.state.plain import pack, unpack
from aiops.wire.messages import (
    Ack,
    Error,
    Fetch,
    FetchedParams,
    Message,
    Push,
    PushRows,
    Reapply,
    TableRows,
)
from tests.inline import Inline
from tests.peers import eventually
from tests.proxy import Proxy
from tests.rows import each_row
from tests.support import ServerThread

MODEL = {
    "a": np.zeros((4, 5), np.float32),
    "b": np.zeros(3, np.float32),
    "c": np.zeros(7, np.float32),
}
LAYOUT = Layout.of(MODEL)
A, B, C = 80, 12, 28
WHOLE = (Part(0, A + B + C, "raw", A + B + C, 0),)


def push(seq: int, parts: Parts, *, fetch: bool = True, count: int = 1, wants: Wants = ()) -> Push:
    return Push(seq, seq, fetch, 0, parts, wants, count=count)


def ack(id: int, parts: Parts = (), *, used: bool = True) -> Ack:
    return Ack(id, 1, 1, used, 0, 0.0, None, b"", parts)


def exchange(ledger: Ledger, request: Message, answer: Message) -> None:
    ledger.asked(request)
    ledger.answered(answer)


def column(ledger: Ledger, name: str) -> dict[str, int]:
    """Return one reason's bytes by tensor."""
    tensors = ledger.tensors()
    return dict(zip(tensors["names"], tensors[name], strict=True))


def nothing_is_lost(direction: Mapping[str, Any]) -> None:
    """Expect the parts of a direction to add up to what crossed, by two independent counts."""
    parts = ("payload", "model", "rows", "other", "overhead", "unfinished")
    assert sum(direction[name] for name in parts) == direction["bytes"]
    assert min(direction[name] for name in parts) >= 0


class TestByTensor:
    def test_whole_models_are_distributed_when_asked(self) -> None:
        ledger = Ledger(LAYOUT)
        for seq in (1, 2, 3):
            exchange(ledger, push(seq, WHOLE), ack(seq, WHOLE))
        assert column(ledger, "pushed") == {"a": 3 * A, "b": 3 * B, "c": 3 * C}
        assert column(ledger, "fetched") == column(ledger, "pushed")
        brief = ledger.brief()
        assert (brief["pushed"], brief["pushed_raw"]) == (360, 360)
        assert (brief["not_modified"], brief["not_wanted"], brief["skipped"]) == (0, 0, 0)

    def test_runs_of_tensors(self) -> None:
        ledger = Ledger(LAYOUT)
        parts = (Part(0, A, "raw", A, 3), Part(A + B, A + B + C, "raw", C, 2))
        exchange(ledger, push(1, parts), ack(1, (Part(A, A + B + C, "raw", B + C, 4),)))
        assert column(ledger, "pushed") == {"a": A, "b": 0, "c": C}
        assert column(ledger, "fetched") == {"a": 0, "b": B, "c": C}
        assert column(ledger, "not_modified") == {"a": A, "b": 0, "c": 0}

    def test_a_tensor_in_several_parts(self) -> None:
        big = Layout([("big", "float32", (MAX_PART // 2,)), ("small", "float32", (1,))])
        ledger = Ledger(big)
        ledger.asked(push(1, tuple(split(0, big.nbytes, "raw", 0))))
        assert column(ledger, "pushed") == {"big": 2 * MAX_PART, "small": 4}

    def test_empty_tensors_have_no_bytes(self) -> None:
        layout = Layout([(n, "float32", (s,)) for n, s in (("x", 0), ("y", 2), ("z", 0))])
        ledger = Ledger(layout)
        exchange(ledger, push(1, (Part(0, 8, "bf16", 4, 0),)), ack(1, (Part(0, 8, "raw", 8, 1),)))
        assert column(ledger, "pushed") == {"x": 0, "y": 4, "z": 0}
        assert column(ledger, "fetched") == {"x": 0, "y": 8, "z": 0}
        assert column(ledger, "not_modified") == {"x": 0, "y": 0, "z": 0}

    def test_a_codec_is_shown_beside_what_it_spares(self) -> None:
        ledger = Ledger(LAYOUT)
        parts = (Part(0, A, "int8", 25, 0), Part(A, A + B, "raw", B, 0))
        exchange(ledger, push(1, parts), ack(1))
        assert column(ledger, "pushed") == {"a": 25, "b": B, "c": 0}
        assert column(ledger, "pushed_raw") == {"a": A, "b": B, "c": 0}

    def test_several_increments_spare_one_tensor(self) -> None:
        ledger = Ledger(LAYOUT)
        increments = (Part(0, A, "int8", 25, 1), Part(0, A, "int8", 25, 2))
        exchange(ledger, Fetch(1, 0), FetchedParams(1, 2, increments))
        assert column(ledger, "fetched")["a"] == 50
        assert column(ledger, "fetched_raw")["a"] == A

    @each_row(
        "answer",
        [
            (),
            WHOLE,
            (
                Part(0, A, "int8", 25, 1),
                Part(0, A, "int8", 25, 1),
                Part(A, A + B + C, "raw", B + C, 1),
            ),
            (Part(0, A, "int8", 25, 1), Part(A, A + B, "raw", B, 1)),
        ],
        ids=len,
    )
    @each_row("parts", [WHOLE, (Part(0, A, "int8", 25, 0), Part(A, A + B + C, "raw", B + C, 0))])
    def test_many_exchanges_are_counted_at_once(self, answer: Parts, parts: Parts) -> None:
        """As each by itself, but for requests that are open."""
        one, many = Ledger(LAYOUT, own=True), Ledger(LAYOUT, own=True)
        for seq in range(1, 8):
            exchange(one, push(seq, parts), ack(seq, answer))
        many.exchanged(2, True, parts, 2, answer)
        many.exchanged(7, True, parts, 5, answer)
        assert many.report() == one.report()
        for ledger in (one, many):
            exchange(ledger, push(7, parts), ack(7, answer))
            exchange(ledger, Reapply(8, 8, True, 0), ack(8, answer))
            assert ledger.unfetched == 0
        assert many.report() == one.report(), "the last push is known"
        assert pack(many.state()["tallies"]) == pack(one.state()["tallies"])

    def test_answers_that_are_all_different_take_no_room(self) -> None:
        """As increments of the largest elements are, whose places vary in length."""
        one, many = Ledger(LAYOUT), Ledger(LAYOUT)
        for seq in range(1, 1001):
            answer = (Part(0, A, "topk", seq, 1), Part(A, A + B + C, "raw", B + C, 1))
            exchange(one, push(seq, WHOLE), ack(seq, answer))
            many.exchanged(seq, True, WHOLE)
            many.brought(answer)
            assert len(many._brought) < 100
        assert many.report() == one.report()

    def test_thousands_of_tensors_are_summed_up(self) -> None:
        layout = Layout([(f"t{index}", "float32", (1,)) for index in range(SHOWN + 10)])
        ledger = Ledger(layout)
        end = layout.nbytes
        ledger.asked(push(1, (Part(end - 4, end, "raw", 4, 0),)))
        tensors = ledger.tensors()
        assert tensors["names"][0] == f"t{SHOWN + 9}", "the busiest comes first"
        assert (len(tensors["names"]), tensors["more"]) == (SHOWN, 10)
        assert all(len(tensors[name]) == SHOWN for name in tensors if name != "more")


class TestReasons:
    def test_nothing_has_changed(self) -> None:
        ledger = Ledger(LAYOUT)
        exchange(ledger, Fetch(1, 5), FetchedParams(1, 5))
        assert ledger.times["not_modified"] == 1
        assert column(ledger, "not_modified") == {"a": A, "b": B, "c": C}

    def test_some_tensors_are_not_wanted(self) -> None:
        ledger = Ledger(LAYOUT)
        wants = ((0, 2, 1),)
        exchange(ledger, Fetch(1, 1, wants), FetchedParams(1, 5, (Part(A, A + B, "raw", B, 5),)))
        assert column(ledger, "fetched") == {"a": 0, "b": B, "c": 0}
        assert column(ledger, "not_modified") == {"a": A, "b": 0, "c": 0}
        assert column(ledger, "not_wanted") == {"a": 0, "b": 0, "c": C}

    def test_pushes_after_which_nothing_was_fetched(self) -> None:
        """Mini-batches less fetches, in whatever order; the first fetch is no one's."""
        ledger = Ledger(LAYOUT)
        exchange(ledger, Fetch(9, -1), FetchedParams(9, 0, WHOLE))
        for seq in (1, 2, 3):
            exchange(ledger, push(seq, WHOLE, fetch=False), ack(seq))
        exchange(ledger, Fetch(9, 0), FetchedParams(9, 3, WHOLE))
        exchange(ledger, Fetch(9, 3), FetchedParams(9, 3))
        exchange(ledger, push(4, WHOLE, count=2), ack(4, WHOLE))
        assert ledger.unfetched == 2
        assert ledger.brief()["not_wanted"] == 2 * LAYOUT.nbytes
        total = Ledger(LAYOUT)
        total.add(ledger)
        total.add(ledger)
        assert total.times["not_wanted"] == 4
        assert column(total, "not_wanted") == {"a": 4 * A, "b": 4 * B, "c": 4 * C}

    def test_a_push_of_several_mini_batches(self) -> None:
        ledger = Ledger(LAYOUT)
        exchange(ledger, push(1, WHOLE, count=3), ack(1, WHOLE))
        exchange(ledger, push(2, (Part(0, A, "int8", 20, 0),), count=2), ack(2))
        exchange(ledger, push(2, (Part(0, A, "int8", 20, 0),), count=2), ack(2))  # sent again
        assert ledger.times["skipped"] == 3
        assert column(ledger, "skipped") == {"a": 3 * A, "b": 2 * B, "c": 2 * C}

    def test_a_gradient_that_is_applied_again(self) -> None:
        ledger = Ledger(LAYOUT)
        exchange(ledger, push(1, (Part(0, A, "int8", 20, 0),)), ack(1))
        exchange(ledger, push(2, WHOLE), ack(2, used=False))  # it is not what is kept
        exchange(ledger, Reapply(3, 3, True, 0), ack(3, WHOLE))
        exchange(ledger, Reapply(4, 4, True, 0), ack(4, used=False))  # nothing is kept any more
        assert ledger.times["reapplied"] == 1
        assert column(ledger, "reapplied") == {"a": A, "b": 0, "c": 0}

    def test_a_refusal_is_no_answer_about_tensors(self) -> None:
        ledger = Ledger(LAYOUT)
        exchange(ledger, push(1, WHOLE), Error(1, "stale", "", {}, False))
        assert ledger.brief()["not_modified"] == 0
        exchange(ledger, push(2, WHOLE), Error(2, "stale", "", {}, False, 3, WHOLE))
        assert ledger.brief()["fetched"] == LAYOUT.nbytes

    def test_what_a_client_holds_back_it_says_itself(self) -> None:
        ledger = Ledger(LAYOUT, own=True)
        ledger.skipped_push()
        ledger.skipped_push(np.array([0, 2]))
        ledger.skipped_fetch(np.arange(3))
        exchange(ledger, push(1, WHOLE, count=2, fetch=False), ack(1))
        exchange(ledger, push(2, WHOLE, count=1, fetch=False), ack(2))
        assert column(ledger, "skipped") == {"a": 2 * A, "b": B, "c": 2 * C}
        assert column(ledger, "not_wanted") == {"a": A, "b": B, "c": C}
        assert ledger.times == {"skipped": 1, "not_wanted": 1}


class TestEngine:
    def test_the_sum_outlives_those_who_pushed(self) -> None:
        inline = Inline("asgd", {"lr": 1})
        inline.define(MODEL)
        for peer in (1, 2):
            inline.join(peer)
            inline.push(peer, MODEL)
            inline.push(peer, {"b": MODEL["b"]}, fetch=True)
        inline.leave(1)
        report = inline.engine.report()
        assert report["ledger"]["pushed"]["payload"] == 2 * (LAYOUT.nbytes + B)
        tensors = report["ledger"]["tensors"]
        pushed = dict(zip(tensors["names"], tensors["pushed"], strict=True))
        assert pushed == {"a": 2 * A, "b": 4 * B, "c": 2 * C}
        for row in report["workers"]:
            assert row["ledger"]["pushed"] == LAYOUT.nbytes + B
            assert row["ledger"]["fetched"] == LAYOUT.nbytes

    def test_observers_stand_aside(self) -> None:
        inline = Inline("asgd", {"lr": 1})
        inline.define(MODEL)
        inline.join(1, role="observer")
        inline.receive(1, Fetch(1, -1))
        report = inline.engine.report()
        assert report["ledger"]["fetched"]["payload"] == 0
        assert report["workers"][0]["ledger"]["fetched"] == LAYOUT.nbytes

    def test_a_push_that_fits_nothing_is_nobodys(self) -> None:
        inline = Inline("asgd", {"lr": 1})
        inline.define(MODEL)
        inline.join(1)
        odd = push(1, (Part(4, 12, "raw", 8, 0),))
        assert isinstance(inline.receive(1, odd, bytes(8)), Error)
        assert inline.engine.report()["ledger"]["pushed"]["payload"] == 0


class TestExact:
    """Against a proxy that counts what the sockets carry."""

    def test_to_the_byte_from_three_sides(self) -> None:
        with (
            ServerThread(policy="asgd", kernels="numpy") as server,
            Proxy(server.url) as proxy,
        ):
            with Worker(proxy.url, MODEL, tables={"t": Table(9, 2)}) as worker:
                for _ in range(5):
                    worker.step(dict(worker.params))
                worker.fetch_rows("t", [1, 2, 3])
                worker.push_rows("t", [1, 2], np.ones((2, 2), np.float32))
                worker.stats()
            eventually(lambda: server.call(lambda s: not s.connections.peers), "it has left")
            theirs = server.call(lambda s: s.engine.report()["ledger"])
            ours = worker.ledger.report()
            for name, way in (("pushed", "up"), ("fetched", "down")):
                nothing_is_lost(theirs[name])
                nothing_is_lost(ours[name])
                assert theirs[name]["bytes"] == proxy.carried[way] == ours[name]["bytes"]
                for part in ("payload", "model", "rows", "other", "overhead", "overhead_by_kind"):
                    assert theirs[name][part] == ours[name][part], part
                assert theirs[name]["other"] == theirs[name]["unfinished"] == 0
            assert theirs["tensors"] == ours["tensors"]
            assert theirs["pushed"]["payload"] == 5 * LAYOUT.nbytes
            assert theirs["pushed"]["model"] == LAYOUT.nbytes

    @pytest.mark.parametrize("skipped", ["accumulate", "reapply"])
    def test_server_and_worker_agree_on_what_a_gate_holds_back(self, skipped: str) -> None:
        gate = f"periodic:k_push=3,k_fetch=2,skipped={skipped}"
        with ServerThread(policy="asgd", gate=gate, kernels="numpy") as server:
            with Worker(server.url, MODEL) as worker:
                for _ in range(12):
                    worker.step(MODEL)
                theirs = worker.stats()["ledger"]
                ours = worker.ledger.report()
            accumulated = skipped == "accumulate"
            for side in (theirs, ours):
                times = {**side["pushed"]["times"], **side["fetched"]["times"]}
                assert times["skipped"] == (8 if accumulated else 0)
                assert times["reapplied"] == (0 if accumulated else 7)  # the first is always sent
                assert times["not_wanted"] == 6
            assert theirs["tensors"] == ours["tensors"]

    @pytest.mark.parametrize("way", ["up", "down"])
    def test_over_connections_that_are_cut(self, way: Any) -> None:
        size = {"w": np.zeros(50_000, np.float32)}
        with (
            ServerThread(policy="asgd", kernels="numpy") as server,
            Proxy(server.url) as proxy,
        ):
            with Worker(proxy.url, size) as worker:
                worker.step(size)
                for after in (100, 123_456):
                    fault = proxy.cut(way, after)
                    worker.step(size)
                    fault.wait()
                worker.step(size)
            assert proxy.connections == 3
            eventually(lambda: server.call(lambda s: not s.connections.peers), "it has left")
            theirs = server.call(lambda s: s.engine.report()["ledger"])
            ours = worker.ledger.report()
            for side in (theirs, ours):
                nothing_is_lost(side["pushed"])
                nothing_is_lost(side["fetched"])
            received = theirs["pushed"] if way == "up" else ours["fetched"]
            assert received["bytes"] == proxy.carried[way]
            assert received["unfinished"] == 123_456 + 100
            assert (
                received["bytes"] < (ours["pushed"] if way == "up" else theirs["fetched"])["bytes"]
            )

    def test_a_client_that_only_looks(self) -> None:
        with ServerThread(policy="asgd", kernels="numpy") as server, Client(server.url) as client:
            assert client.stats()["ledger"]["pushed"]["bytes"] == 0
            assert client.ledger.report()["fetched"]["overhead_by_kind"].keys() == {
                "welcome",
                "report",
            }


class TestState:
    """A restored ledger goes on as if nothing had happened."""

    def go_on(self, ledger: Ledger, rng: random.Random, first: int) -> None:
        """Count some exchanges of every kind; a request may be left open."""
        half = (Part(0, A, "raw", A, 0), Part(A + B, A + B + C, "int8", 9, 0))
        for seq in range(first, first + 6):
            parts = rng.choice((WHOLE, WHOLE, half))
            match rng.randrange(5):
                case 0:
                    ledger.exchanged(seq, True, WHOLE)
                case 1:
                    ledger.asked(Fetch(seq, 0, ((0, 2, 0),)))
                    ledger.answered(FetchedParams(seq, 3, parts[:1]))
                case 2:
                    ledger.asked(Reapply(seq, seq, True, 0))
                    ledger.answered(ack(seq))
                case 3:
                    table = PushRows(seq, seq, 1, 0, (Part(0, 1, "raw", 8, 0),))
                    exchange(ledger, table, TableRows(seq, 1, 0, (Part(0, 1, "raw", 4, 0),)))
                case _:
                    ledger.asked(push(seq, parts, count=rng.choice((1, 3, 1 << 20))))
                    if rng.random() < 0.5:
                        ledger.answered(ack(seq, parts, used=rng.random() < 0.7))
        if rng.random() < 0.1:
            ledger.settle(Ledger(LAYOUT))

    @each_row("seed", range(20))
    def test_it_counts_alike(self, seed: int) -> None:
        rng, live = random.Random(seed), Ledger(LAYOUT)
        live.traffic.exchanged(("push", 20, 100), ("ack", 9, 100))
        for step in range(8):
            kept = unpack(pack(live.state()), "x")
            restored, again = Ledger(LAYOUT), rng.getrandbits(32)
            restored.restore(kept)
            for ledger in (live, restored):
                self.go_on(ledger, random.Random(again), 1 + 6 * step)
            assert restored.report() == live.report()
            assert pack(restored.state()) == pack(live.state())

    def test_sums_beyond_64_bits_are_kept(self) -> None:
        live, restored = Ledger(LAYOUT), Ledger(LAYOUT)
        exchange(live, push(1, (Part(0, A, "raw", A, 0),), count=1 << 62), ack(1))
        restored.restore(unpack(pack(live.state()), "x"))
        assert int(restored.skipped.by_tensor(LAYOUT)[0]) == A * ((1 << 62) - 1)
        restored.settle(Ledger(LAYOUT))
        settled = Ledger(LAYOUT)
        settled.restore(unpack(pack(restored.state()), "x"))
        assert settled.skipped.nbytes(LAYOUT) == A * ((1 << 62) - 1)


class TestFile:
    def test_the_last_line_has_all_of_it(self, tmp_path: Path) -> None:
        path = tmp_path / "ledger.jsonl"
        with ServerThread(policy="asgd", kernels="numpy", ledger=path) as server:
            with Worker(server.url, MODEL) as worker:
                worker.step(MODEL)
            eventually(lambda: server.call(lambda s: not s.connections.peers), "it has left")
        lines = [json.loads(line) for line in path.read_text().splitlines()]
        assert lines[0]["pushed"]["bytes"] == 0
        assert lines[-1]["pushed"] == worker.ledger.report()["pushed"]
        assert lines[-1]["tensors"]["pushed"] == [A, C, B]
        assert lines == sorted(lines, key=lambda line: float(line["seconds"]))

    def test_a_folder_that_is_not_there(self, tmp_path: Path) -> None:
        with (
            pytest.raises(UsageError, match="No such file"),
            ServerThread(ledger=tmp_path / "none" / "ledger.jsonl"),
        ):
            pass

    @pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a disk that is full")
    def test_a_full_disk_ends_the_file_and_not_the_server(
        self, caplog: pytest.LogCaptureFixture
    ) -> None:
        file = LedgerFile(Path("/dev/full"))
        account = Ledger(LAYOUT).report()
        file.write(0.0, account)
        file.write(1.0, account)
        file.close()
        assert "No space left" in caplog.text
