"""The rules of docs/wire.md in words, each tried on a real server with a client of the page's."""

from __future__ import annotations

import math
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from typing import Any

import numpy as np
import pytest

from aiops.bandwidth import gates
from tests import foreign
from tests.docs.test_wire_examples import connected
from tests.foreign import ForeignClient, Wide
from tests.rows import each_row
from tests.support import ServerThread

NONCE = b"0123456789abcdef"
W, B = struct.pack("<4f", 1, 2, 3, 4), struct.pack("<2f", 5, 6)
MODEL: dict[str, tuple[str, list[int], bytes]] = {
    "w": ("float32", [2, 2], W),
    "b": ("float32", [2], B),
}
ONES = struct.pack("<4f", 1, 1, 1, 1)
WHOLE = [[0, 24, "raw", 24, 0]]


@pytest.fixture(scope="module")
def shared() -> Iterator[ServerThread]:
    """A server without a gate."""
    with ServerThread(policy="asgd", lr=0.5) as server:
        yield server


@pytest.fixture
def server() -> Iterator[ServerThread]:
    """A server whose versions only one test counts."""
    with ServerThread(policy="asgd", lr=0.5) as server:
        yield server


@contextmanager
def worker(
    server: ServerThread, name: str = "w", epoch: int = 1, **changed: Any
) -> Iterator[ForeignClient]:
    """A worker that has defined the model and fetched it."""
    with connected(server.url) as client:
        welcome = client.greet(name, NONCE, epoch=epoch, **changed)
        assert welcome["kind"] == "welcome"
        if not welcome["model"]:
            client.define(MODEL)
        assert client.fetch()["kind"] == "params"
        yield client


def closed(client: ForeignClient) -> bool:
    """Return whether the server has closed a connection without sending anything more."""
    return client._receive(1) == b""


class TestHandshake:
    def test_a_lower_epoch_came_late_and_is_closed_without_an_answer(
        self, server: ServerThread
    ) -> None:
        with worker(server, epoch=2) as first:
            with connected(server.url) as late:
                late.say(
                    "hello",
                    id=0,
                    protocol=4,
                    client="w",
                    epoch=1,
                    name="w",
                    role="worker",
                    pongs=False,
                    nonce=NONCE,
                    agent="late",
                    run="",
                    generation=0,
                    acked=0,
                    generation_proof=b"",
                )
                assert closed(late)
            assert first.ask("ping")["kind"] == "pong"

    @pytest.mark.parametrize("epoch", [2, 3])
    def test_an_equal_or_a_higher_epoch_takes_the_place_of_the_older_connection(
        self, server: ServerThread, epoch: int
    ) -> None:
        with worker(server, epoch=2) as older, worker(server, epoch=epoch) as newer:
            assert closed(older)
            assert newer.ask("ping")["kind"] == "pong"

    def test_when_no_connection_stands_any_epoch_is_accepted(self, server: ServerThread) -> None:
        with worker(server, epoch=7) as client:
            client.say("leave", id=9)
            assert closed(client)
        with worker(server, epoch=1) as client:
            assert client.ask("ping")["kind"] == "pong"

    def test_a_server_that_was_restarted_has_no_model_and_another_run(self) -> None:
        runs = []
        for _start in range(2):
            with (
                ServerThread(policy="asgd", lr=0.5) as server,
                connected(server.url) as client,
            ):
                welcome = client.greet("w", NONCE)
                runs.append(welcome["run"])
                assert (welcome["model"], welcome["version"]) == ([], 0)
                assert client.define(MODEL)["created"] is True
                assert client.push(WHOLE, [ONES + B])["version"] == 1
        assert runs[0] != runs[1]


class TestIntegers:
    def test_any_width_is_accepted(self, server: ServerThread) -> None:
        """In pushes and fetches, whose headers are the most frequent."""
        with worker(server) as client:
            part = [Wide(0), Wide(24), "raw", Wide(24), Wide(0)]
            asked = {"fetch": True, "have": Wide(-1), "wants": [], "coded": False, "lr_factors": []}
            seq, count = Wide(1), Wide(1)
            client._id += 1
            header = {"id": Wide(client._id), "seq": seq, "parts": [part], "count": count, **asked}
            client.say("push", [ONES + B], **header)
            answer, [values] = client.receive()
            assert (answer["kind"], answer["version"]) == ("ack", 1)
            assert values == struct.pack("<6f", 0.5, 1.5, 2.5, 3.5, 2.5, 3)
            assert (
                client.ask("fetch", have=Wide(1), wants=[], coded=False, evaluation=False)["parts"]
                == []
            )


class TestVersions:
    def test_a_push_of_some_tensors_states_their_own_versions(self, server: ServerThread) -> None:
        with worker(server) as client:
            ack = client.exchange({"w": ONES})
            assert (ack["version"], client.versions) == (1, {"w": 1, "b": 0})
            refused = client.push([[16, 24, "raw", 8, 1]], [B])  # the model's version
            assert (refused["code"], refused["details"]["tensor"]) == ("bad-push", "b")
            ack = client.push([[16, 24, "raw", 8, 0]], [B])  # the tensor's own
            assert (ack["kind"], ack["version"], ack["staleness"]) == ("ack", 2, 0)

    def test_parts_of_one_push_may_state_several_versions(self, server: ServerThread) -> None:
        with worker(server) as client:
            client.exchange({"w": ONES})
            ack = client.push([[0, 16, "raw", 16, 0], [16, 24, "raw", 8, 0]], [ONES, B])
            assert (ack["staleness"], ack["mean_staleness"]) == (1, pytest.approx(16 / 24))

    @each_row(
        ("have", "wants"),
        [(99, []), (0, [[0, 2, 99]]), (99, [[0, 1, 99], [1, 2, -1]])],
    )
    def test_a_version_that_the_server_has_not_reached_counts_as_none(
        self, shared: ServerThread, have: int, wants: list[list[int]]
    ) -> None:
        with worker(shared) as client:
            params = client.ask("fetch", have=have, wants=wants, coded=False, evaluation=False)
            assert sum(part[3] for part in params["parts"]) == 24
            assert (
                client.ask(
                    "fetch", have=params["version"], wants=[], coded=False, evaluation=False
                )["parts"]
                == []
            )


class TestCuts:
    @pytest.mark.parametrize(
        "cuts",
        [(4,), (16,), (4, 12, 20), (8, 16)],
        ids=["in a tensor", "between tensors", "in both", "both"],
    )
    def test_raw_parts_may_be_cut_between_elements(
        self, server: ServerThread, cuts: tuple[int, ...]
    ) -> None:
        with worker(server) as client:
            gradient, edges = ONES + B, (0, *cuts, 24)
            ranges = list(pairwise(edges))
            parts = [[start, stop, "raw", stop - start, 0] for start, stop in ranges]
            assert client.push(parts, [gradient[a:b] for a, b in ranges])["kind"] == "ack"
            assert client.fetch()["version"] == 1
            assert client.tensor("w") == struct.pack("<4f", 0.5, 1.5, 2.5, 3.5)


class TestExactlyOnce:
    def test_a_refused_push_has_used_up_its_seq(self, server: ServerThread) -> None:
        bad = struct.pack("<6f", 1, 1, 1, math.nan, 1, 1)
        with worker(server) as client:
            refused = client.push(WHOLE, [bad], seq=1)
            assert (refused["code"], refused["fatal"]) == ("bad-push", False)
        with worker(server, epoch=2) as client:
            again = client.push(WHOLE, [ONES + B], seq=1)  # which would be good
            assert {**again, "id": 0} == {**refused, "id": 0}
            assert client.fetch()["version"] == 0
            assert client.push(WHOLE, [ONES + B], seq=2)["version"] == 1
            late = client.push(WHOLE, [bad], seq=1)
            assert (late["code"], late["version"]) == ("bad-push", 1), "the model's by now"

    def test_a_push_before_the_model_has_used_up_its_seq_too(self, server: ServerThread) -> None:
        with connected(server.url) as client:
            client.greet("w", NONCE)
            assert client.push(WHOLE, [ONES + B], seq=1)["code"] == "not-ready"
            client.define(MODEL)
            assert client.push(WHOLE, [ONES + B], seq=1)["code"] == "not-ready"
            assert client.push(WHOLE, [ONES + B], seq=2)["kind"] == "ack"

    def test_a_seq_may_be_skipped_but_not_go_back(self, server: ServerThread) -> None:
        with worker(server) as client:
            assert client.push(WHOLE, [ONES + B], seq=5)["version"] == 1
            for seq in (0, 3):
                assert client.push(WHOLE, [ONES + B], seq=seq)["code"] == "bad-push"
            assert client.push(WHOLE, [ONES + B], seq=5)["version"] == 1
            assert client.push(WHOLE, [ONES + B], seq=6)["version"] == 2

    def test_after_leave_no_answer_is_remembered(self, server: ServerThread) -> None:
        with worker(server) as client:
            client.push(WHOLE, [ONES + B], seq=1)
            client.say("leave", id=9)
            assert closed(client)
        with worker(server, epoch=2) as client:
            assert client.push(WHOLE, [ONES + B], seq=1)["code"] == "bad-push"
            assert client.fetch()["version"] == 1

    def test_a_repeated_push_brings_the_current_parameters(self, server: ServerThread) -> None:
        with worker(server) as client, worker(server, "other") as other:
            client.push(WHOLE, [ONES + B], seq=1)
            other.push(WHOLE, [ONES + B])
            ack = client.push(WHOLE, [ONES + B], seq=1, fetch=True)
            assert (ack["version"], ack["current"]) == (1, 2)
            assert client.tensor("w") == struct.pack("<4f", 0, 1, 2, 3)


class TestBadPush:
    def requests(self) -> dict[str, tuple[str, list[bytes], dict[str, Any]]]:
        """Requests of a worker that the page lists, as kind, payloads and fields."""
        asked = {
            "fetch": False,
            "have": -1,
            "wants": [],
            "coded": False,
            "count": 1,
            "lr_factors": [],
        }
        whole = ONES + B

        def push(parts: list[list[Any]], *payloads: bytes, **changed: Any) -> Any:
            return "push", list(payloads), {"parts": parts, **asked, **changed}

        huge = struct.pack("<6f", 1, 1, 1, 1, 1, 1e18)
        offer = [["w", "float32", [3]]]
        rows = {"table": 3, "parts": [[0, 1, "raw", 8, 0]]}
        return {
            "a value of 1e18": push(WHOLE, huge),
            "no part": push([]),
            "out of order": push([[16, 24, "raw", 8, 0], [0, 16, "raw", 16, 0]], B, ONES),
            "beyond the model": push([[0, 28, "raw", 28, 0]], whole + b"1234"),
            "half a tensor": push([[0, 8, "raw", 8, 0]], ONES[:8]),
            "another length": push([[0, 24, "raw", 23, 0]], whole[:23]),
            "an unknown codec": push([[0, 16, "zip", 3, 0]], b"123"),
            "no payload of its codec": push([[0, 16, "int8", 3, 0]], b"123"),
            "a base to come": push([[0, 24, "raw", 24, 9]], whole),
            "tensors to come": push(WHOLE, whole, fetch=True, wants=[[0, 3, -1]]),
            "a fetch of tensors to come": (
                *("fetch", []),
                {"have": -1, "wants": [[0, 3, -1]], "coded": False, "evaluation": False},
            ),
            "more factors than tensors": push(WHOLE, whole, lr_factors=[0.5, 0.5, 0.5]),
            "another model": ("define", [], {"tensors": offer, "parts": [], "tables": []}),
            "no such table": ("fetch_rows", [bytes(8)], rows),
        }

    @each_row("which", range(14))
    def test_what_it_covers(self, shared: ServerThread, which: int) -> None:
        with worker(shared, f"worker {which}") as client:
            before = client.version
            _why, (kind, payloads, fields) = list(self.requests().items())[which]
            if kind == "push":
                fields = {**fields, "seq": 1}
            error = client.ask(kind, payloads, **fields)
            assert (error["kind"], error["code"], error["fatal"]) == ("error", "bad-push", False)
            assert client.ask("ping")["kind"] == "pong", "the connection goes on"
            assert client.fetch()["version"] == before

    def test_all_are_tried(self) -> None:
        assert len(self.requests()) == 14

    def test_an_observer_that_pushes_or_defines(self, shared: ServerThread) -> None:
        with worker(shared), worker(shared, "observer", role="observer") as client:
            assert client.push(WHOLE, [ONES + B])["code"] == "bad-push"
            assert client.define(MODEL)["code"] == "bad-push"

    def test_a_model_that_is_too_large(self) -> None:
        with (
            ServerThread(policy="asgd", lr=0.5, max_model=16) as server,
            connected(server.url) as client,
        ):
            client.greet("w", NONCE)
            assert client.define(MODEL)["code"] == "bad-push"


class TestGates:
    def test_reapply_without_a_gate_is_acknowledged_and_not_used(
        self, server: ServerThread
    ) -> None:
        with worker(server) as client:
            client.push(WHOLE, [ONES + B])
            ack = client.reapply()
            assert (ack["kind"], ack["used"], ack["version"]) == ("ack", False, 1)
            assert client.push(WHOLE, [ONES + B], seq=2)["used"] is False, "that was its seq"
            assert client.push(WHOLE, [ONES + B], seq=3)["version"] == 2

    def test_reapply_where_the_server_keeps_gradients(self) -> None:
        with (
            ServerThread(policy="fasgd", gate="bfasgd:c_push=0.1,skipped=reapply") as server,
            worker(server) as client,
        ):
            assert client.reapply()["used"] is False, "nothing was pushed yet"
            client.push(WHOLE, [ONES + B])
            ack = client.reapply()
            assert (ack["used"], ack["version"], ack["staleness"]) == (True, 2, 1)

    @each_row(
        "spec",
        [
            "bfasgd:c_push=0.08,c_fetch=0.125",
            "bfasgd:c_push=0.08,floor_free=true",
            "bfasgd:c_push=7,c_fetch=3,relative=true",
            "bfasgd:c_push=7,relative=true,floor_free=true",
            "periodic:k_push=3,k_fetch=2",
            "constant:p_push=0.25",
        ],
    )
    def test_the_formulas_on_the_page_are_the_gates(self, spec: str) -> None:
        with (
            ServerThread(policy="fasgd", gate=spec) as server,
            connected(server.url) as client,
        ):
            plan = client.greet("w", NONCE)["plan"]
            assert plan["routine"] == "gated"
            ours = gates.find(spec)
            ours = type(ours).from_plan(plan["gate"])
            for step in range(1, 7):
                for vbar in (None, 0.0, 0.02, 3.5):
                    statistic = None if vbar is None else np.array([vbar])
                    for constants in ([], [0.5, 0.25]):
                        expected = ours.chances(step, statistic, tuple(constants))
                        got = foreign.chances(plan["gate"], step, vbar, constants)
                        assert got == pytest.approx([float(np.max(p)) for p in expected])

    def test_the_level_on_the_page_is_the_gates(self) -> None:
        with (
            ServerThread(policy="fasgd", gate="bfasgd:c_push=7,relative=true") as server,
            connected(server.url) as client,
        ):
            announced = client.greet("w", NONCE)["plan"]["gate"]
            ours, level, other = gates.Gate.from_plan(announced), None, None
            for vbar in (1.0, 0.9, 0.1, 0.1, 0.09, 3.0, 2.5, 0.0, 0.0, 0.01):
                statistic = np.array([vbar])
                level = ours.followed(level, statistic)
                assert level is not None
                other = foreign.level(announced, other, vbar)
                assert float(level[0]) == pytest.approx(other)
                expected = ours.chances(1, statistic, (), level)
                got = foreign.chances(announced, 1, vbar, [], other)
                assert got == pytest.approx([float(np.max(p)) for p in expected])

    def test_a_client_without_gates_may_push_every_gradient(self) -> None:
        with (
            ServerThread(policy="fasgd", gate="bfasgd:c_push=9") as server,
            worker(server) as client,
        ):
            for version in (1, 2, 3):
                assert client.exchange({"w": ONES, "b": B})["version"] == version


class TestSharedMemory:
    def test_answers_of_more_than_64_kib_are_lent_and_a_fifth_is_sent(self) -> None:
        nbytes = (1 << 16) + 4
        with ServerThread(policy="asgd", lr=0.5) as server:
            host, port = server.url.removeprefix("aiops://").rsplit(":", 1)
            near = foreign.ForeignNeighbour(host, int(port))
            with near.sock, near.side, near.stream:
                client = near.client
                assert client.greet("near", NONCE)["kind"] == "welcome"
                client.define(
                    {
                        "large": ("float32", [nbytes // 4], bytes(nbytes)),
                        "tiny": ("float16", [2], bytes(4)),
                    }
                )
                for request, lent in enumerate((True, True, True, True, False), 2):
                    client.say(
                        "fetch",
                        id=request,
                        have=-1,
                        wants=[[0, 1, -1]],
                        coded=False,
                        evaluation=False,
                    )
                    header, [payload] = near.receive_raw()
                    assert header["kind"] == "params"
                    assert isinstance(payload, tuple) is lent
                client.say("release", id=3)
                client.say(
                    "fetch", id=7, have=-1, wants=[[0, 1, -1]], coded=False, evaluation=False
                )
                _header, [payload] = near.receive_raw()
                assert isinstance(payload, tuple)
                client.say("release", id=2)
                client.say(
                    "fetch", id=8, have=-1, wants=[[1, 2, -1]], coded=False, evaluation=False
                )
                _header, [payload] = near.receive_raw()
                assert payload == bytes(4), "so small an answer is not lent"
