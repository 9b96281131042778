"""Increments that an async client receives, by compiled code or by the transport.

See `tests.client.asyncio.test_short_way`, of which this is more.
"""

from __future__ import annotations

import array
import asyncio
import fcntl
import os
import socket
import termios
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from aiops.client import AsyncWorker
from aiops.client.asyncio import short_way as module
from aiops.client.coded_answer import CodedAnswer
from aiops.client.steady_increments import IncrementExchange
from aiops.codecs.whole_answer import WholeAnswer
from aiops.compiled import exchange_type
from aiops.errors import ConnectionLost
from aiops.model.parts import LARGEST
from tests.client.asyncio.test_short_way import (
    _PATIENCE,
    LOOPS,
    WAYS,
    Scripted,
    breaking,
    outcome,
    run,
)
from tests.client.sync.test_compiled_exchange import AS_IT_IS, PING, Change, changes, learnt
from tests.client.sync.test_compiled_increments import BAD, bad, form_of
from tests.client.test_steady import INCREMENTS
from tests.memory import patch_select
from tests.rows import each_row
from tests.seeds import examples
from tests.strategies import DETERMINISTIC
from tests.support import ServerThread

pytestmark = pytest.mark.skipif(exchange_type() is None, reason="there was no C compiler")


@pytest.fixture(autouse=True, scope="module")
def _select() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch_select(patch)
        patch.setattr(module, "_LONG", np.inf)  # however busy the machine is
        yield


@settings(DETERMINISTIC, max_examples=examples(60))
@given(
    st.sampled_from(sorted(LOOPS)),
    st.sampled_from(WAYS),
    st.sampled_from(sorted(INCREMENTS)),
    st.sampled_from(["asgd", "fasgd"]),
    changes
    | st.tuples(st.integers(0, 1 << 12), st.binary(min_size=1, max_size=4)).map(
        lambda pair: Change(at=pair[0], put=pair[1])
    ),
    st.integers(0, 2000) | st.sampled_from([40_000, 1 << 20]),
    st.sampled_from(["", "", "end", "reset"]),
    st.integers(0, 3),
)
def test_both_are_one(
    loop: str,
    way: str,
    model: str,
    policy: str,
    change: Change,
    cut: int,
    end: str,
    increments: int,
) -> None:
    outcome(loop, way, model, policy, change, cut, end, increments)


@each_row("loop", LOOPS)
@each_row("way", WAYS)
@each_row("increments", range(4))
def test_each_place_at_which_an_answer_may_break(loop: str, way: str, increments: int) -> None:
    _push, answer, _slots = learnt("both", "asgd", increments)
    head = form_of("both", increments).template.size
    for cut in sorted({0, 1, head - 1, head, head + 1, len(answer) - 1, len(answer)}):
        found = outcome(loop, way, "both", "asgd", AS_IT_IS, cut, "", increments)
        assert "Receipt(version=" in found["result"]
    found = outcome(loop, way, "both", "asgd", AS_IT_IS, head - 1, "end", increments)
    assert found["result"] is ConnectionLost


@each_row("way", WAYS[:2])
@each_row("number", range(6))
def test_each_number_out_of_its_bounds(way: str, number: int) -> None:
    """In an answer of the form that is compared first."""
    value = np.nan if number == 5 else LARGEST + 1
    outcome("asyncio", way, "both", "asgd", Change(number, value), 1 << 20, "end", 1)


@each_row("loop", LOOPS)
@each_row("way", WAYS)
def test_a_ping_behind_the_answer(loop: str, way: str) -> None:
    for increments in range(3):
        change = Change(behind=PING)
        found = outcome(loop, way, "both", "asgd", change, 1 << 20, "", increments)
        assert "Receipt(version=" in found["result"]
        assert len(found["sent"]) > len(learnt("both", "asgd", increments)[0]), "a pong"


@each_row("loop", LOOPS)
@each_row("way", WAYS)
@each_row("name", BAD)
def test_what_is_no_increment_is_refused(loop: str, way: str, name: str) -> None:
    found = outcome(loop, way, "both", "asgd", bad(*BAD[name]), 1 << 20, "", 2)
    assert "Receipt" not in str(found["result"])


def refuse(*given: Any) -> None:
    raise AssertionError("it is Python's")


@each_row("increments", range(4))
@each_row("pieces", [False, True])
def test_they_are_added_by_compiled_code(increments: int, pieces: bool) -> None:
    """Also if they come in pieces; what follows stays in the socket then."""
    push, answer, _slots = learnt("both", "asgd", increments)
    head = form_of("both", increments).template.size

    async def main() -> None:
        for cut in sorted({head, head + 1, len(answer) - 1} & {*range(head, len(answer))}):
            async with Scripted(True, "both") as one:
                one.go("at once")
                one.tell(answer[: cut if pieces else len(answer)])
                rest = answer[cut:] + PING if pieces else b""
                thread = threading.Thread(target=say_then, args=(one, rest))
                with pytest.MonkeyPatch.context() as patch:
                    patch.setattr(CodedAnswer, "add", refuse)
                    patch.setattr(module, "_NAP", int(_PATIENCE * 1e9))
                    thread.start()
                    found = one.begin()
                thread.join()
                assert found.version > 0
                assert one.half.params.version > 0
                came = one.sent()
                while len(came) < len(push) + pieces:  # a pong
                    await asyncio.sleep(0)
                    came += one.sent()
                assert came.startswith(push)

    run("asyncio", main)


def say_then(one: Scripted, rest: bytes) -> None:
    """Say the rest once what was told has been received, and the push has been sent."""
    with socket.socket(fileno=os.dup(one.fd)) as sock:
        one.peer.recv(1, socket.MSG_PEEK)
        left = array.array("i", [1])
        while left[0]:
            fcntl.ioctl(sock, termios.FIONREAD, left)
        one.peer.sendall(rest)


def test_ctrl_c_while_they_are_added() -> None:
    """What compiled code has added is not added again."""

    async def main() -> None:
        for call in ("pull", "push"):
            async with Scripted(True, "both") as one:
                one.go("at once")
                one.short._compile(one.session.steady)
                compiled: Any = one.short._compiled
                one.short._compiled = breaking(compiled, call, False)  # type: ignore[assignment]
                one.tell(learnt("both", "asgd", 2)[1])
                with pytest.raises(KeyboardInterrupt):
                    one.begin()
                assert one.session.pending.by_id == {}
                assert one.half.params.version in ((-1,) if call == "pull" else (-1, 7, 8, 9))
                assert one.connection.ended.done()

    run("asyncio", main)


@each_row("loop", LOOPS)
def test_loops_of_codecs_are_compiled_beside_the_event_loop(
    loop: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of answers as of gradients, and again for a form with another codec."""
    real, threads, ready = CodedAnswer.compiled, [], threading.Event()

    def compiled(self: CodedAnswer) -> Any:
        threads.append(threading.current_thread())
        if len(threads) == len(forms):
            ready.set()
        return real(self)

    async def main() -> None:
        async with Scripted(True, "fetched") as one:
            steady = one.session.steady
            assert isinstance(steady, IncrementExchange)
            forms.extend(steady.answers)
            with monkeypatch.context() as patch:
                patch.setattr(CodedAnswer, "compiled", compiled)
                patch.setattr(WholeAnswer, "is_ready", lambda *_given: False)
                for _ in range(3):
                    one.short._compile(steady)
                    assert one.short._compiled is None
                assert ready.wait(_PATIENCE)
                assert len(threads) == len(forms)
                assert threading.main_thread() not in threads
                ready.clear()
                threads.clear()
                another: Any = IncrementExchange.__new__(IncrementExchange)
                for name in ("_push", "_ack", "room", "_nbytes", "_tensors", "_coded", "answers"):
                    setattr(another, name, getattr(steady, name))
                one.short._compile(another)
                assert ready.wait(_PATIENCE)
            one.short._compile(steady)
            assert one.short._compiled is not None

    forms: list[CodedAnswer] = []
    run(loop, main)


@each_row("loop", LOOPS)
@each_row("codecs", [{"fetch_codec": "int8"}, {"fetch_codec": "bf16", "push_codec": "int8"}])
def test_workers_hold_the_replica(loop: str, codecs: dict[str, str]) -> None:
    """All have the same values of the same version, and few of their exchanges are general."""
    start = {"w": np.zeros(4000, np.float32), "b": np.zeros(3, np.float32)}

    async def main(url: str) -> None:
        async with AsyncWorker(url, start) as first, AsyncWorker(url, start) as second:
            for step in range(60):
                for worker in (first, second):
                    gradient = {n: np.full_like(a, step % 7 - 3) for n, a in start.items()}
                    await worker.step(gradient)
            for worker in (first, second):
                connection = worker._client._connection
                assert connection is not None
                assert isinstance(connection._session.steady, IncrementExchange)
                assert 1 <= len(connection._session.steady.answers) <= 4
                held.append((worker.params.version, worker.params.arena.data.tobytes()))

    held: list[tuple[int, bytes]] = []
    with ServerThread(policy="asgd", set={"lr": 0.01}, **codecs) as server:
        run(loop, lambda: main(server.url))
        replica = server.call(lambda running: running.engine.replica)
        current = replica.current
        assert (current.number, current.arena.data.tobytes()) == max(held)
