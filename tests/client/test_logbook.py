"""Numbers that a training loop logs: what is sent of them, and when; and real clients that log."""

from __future__ import annotations

import asyncio
import threading
import time
from typing import Any

import numpy as np
import pytest

import aiops
from aiops.client import AsyncModelAverager
from aiops.client.logbook import LEAST, Logbook
from aiops.errors import UsageError
from aiops.wire.fields import MAX_LOGGED, MAX_LOGGED_NAME
from aiops.wire.messages import Log
from tests.rows import each_row
from tests.support import PATIENCE, ServerThread

MODEL = {"w": np.ones((4, 4), np.float32)}


class TestLogbook:
    def test_a_message_has_means_and_the_next_comes_a_second_later(self) -> None:
        book = Logbook()
        assert book.take(0.0) is None
        for loss in (1.0, 2.0, 6.0):
            book.note({"loss": loss})
        book.note({"accuracy": np.float32(0.5)})
        assert book.wait(0.0) == 0.0
        assert book.take(0.0) == Log(0, (("loss", 3.0), ("accuracy", 0.5)))
        book.note({"loss": 4.0})
        assert book.wait(0.25) == pytest.approx(LEAST - 0.25)
        assert book.take(0.9 * LEAST) is None
        assert book.take(LEAST) == Log(0, (("loss", 4.0),))

    def test_the_rest_is_sent_at_the_end_at_once(self) -> None:
        book = Logbook()
        book.note({"loss": 1.0})
        book.take(0.0)
        assert book.take(None) is None, "there is nothing"
        book.note({"loss": 5.0})
        assert book.take(None) == Log(0, (("loss", 5.0),))

    def test_a_server_that_is_watched_is_told_the_seconds_of_workers_alone(self) -> None:
        book = Logbook()
        book.every = 3.0
        assert book.wait(0.0) is None, "it is no worker"
        book.seconds = lambda: (7.0, 1.0)
        assert book.take(0.0) == Log(0, (), 7.0, 1.0)
        assert book.wait(0.0) == 3.0

    def test_what_is_not_finite_is_left_out(self) -> None:
        book = Logbook()
        book.note({"loss": float("nan"), "norm": np.inf, "rate": 1.0})
        assert book.take(0.0) == Log(0, (("rate", 1.0),))
        book.note({"loss": 1e308, "odd": 10**400})
        for _ in range(3):
            book.note({"norm": 1e300})
        assert book.take(10.0) == Log(0, (("norm", 1e300),)), "means are finite, too"

    def test_seconds_alone_do_not_hold_back_the_first_numbers(self) -> None:
        book = Logbook()
        book.every, book.seconds = 2.0, lambda: (0.5, 0.25)
        assert book.take(0.0) == Log(0, (), 0.5, 0.25)
        book.note({"loss": 1.0})
        assert book.wait(0.1) == 0.0
        assert book.take(0.1) == Log(0, (("loss", 1.0),), 0.5, 0.25)
        book.note({"loss": 2.0})
        assert book.take(1.0) is None
        assert book.take(2.1) == Log(0, (("loss", 2.0),), 0.5, 0.25)

    def test_what_is_refused_takes_no_place(self) -> None:
        book = Logbook()
        for number in range(2 * MAX_LOGGED):
            with pytest.raises(UsageError):
                book.note({f"n{number}": "high"})
        book.note({"loss": 1.0})
        assert book.take(0.0) == Log(0, (("loss", 1.0),))

    def test_without_a_server_few_are_kept(self) -> None:
        book = Logbook()
        for k in range(30_000):
            book.note({"loss": float(k)})
        message = book.take(0.0)
        assert message is not None
        assert message.values == (("loss", pytest.approx(20_000 + 9_999 / 2)),)

    def test_a_loss_of_pytorch_is_taken_as_it_is(self) -> None:
        torch = pytest.importorskip("torch")
        book = Logbook()
        book.note({"loss": torch.tensor(2.0, requires_grad=True).square()})
        assert book.take(0.0) == Log(0, (("loss", 4.0),))
        with pytest.raises(UsageError, match="'loss' is Tensor"):
            book.note({"loss": torch.ones(2)})

    @each_row(
        ("values", "why"),
        [
            ({"loss": "high"}, "'loss' is str"),
            ({"loss": "0.3"}, "'loss' is str"),
            ({"loss": [1.0, 2.0]}, "'loss' is list"),
            ({"": 1.0}, "is printable"),
            ({"lo\nss": 1.0}, "is printable"),
            ({"\ud800": 1.0}, "is printable"),
            ({"é" * (1 + MAX_LOGGED_NAME // 2): 1.0}, "at most 64 bytes"),
            ({f"n{k}": 1.0 for k in range(MAX_LOGGED + 1)}, "at most 16 numbers"),
        ],
    )
    def test_mistakes_are_told(self, values: dict[str, Any], why: str) -> None:
        with pytest.raises(UsageError, match=why):
            Logbook().note(values)

    def test_one_thread_notes_while_another_takes(self) -> None:
        book, total, over = Logbook(), 4000, threading.Event()
        sums: list[float] = []

        def take() -> None:
            clock = 0.0
            while not over.is_set() or book.wait(clock) is not None:
                clock += 2 * LEAST
                message = book.take(clock)
                sums.extend(value for _name, value in message.values) if message else None

        thread = threading.Thread(target=take)
        thread.start()
        for _ in range(total):
            book.note({"loss": 1.0})
        over.set()
        thread.join(PATIENCE)
        assert sums
        assert set(sums) == {1.0}


def report_of(server: ServerThread, name: str) -> dict[str, Any]:
    found: list[dict[str, Any]] = server.call(
        lambda running: [m.report(0.0) for m in running.engine.membership if m.name == name]
    )
    return found[-1]


def test_workers_and_others_log_over_a_real_socket() -> None:
    with ServerThread(policy="asgd", kernels="numpy") as server:
        with aiops.Worker(server.url, MODEL, name="w") as worker:
            for loss in (1.0, 2.0):
                worker.step(MODEL)
                worker.log(loss=loss, rate=0.1)
        found = report_of(server, "w")
        assert found["logged"]["rate"] == pytest.approx(0.1)
        assert 1.0 <= found["logged"]["loss"] <= 2.0
        assert found["compute_seconds"] > 0
        assert found["idle_seconds"] > 0
        with aiops.Client(server.url, name="evaluator") as client:
            client.log(accuracy=0.75)  # before it is connected
            client.log(accuracy=0.85)
            assert client.stats()["logged"]["accuracy"][0] == 0.75, "at once; the rest later"
        assert report_of(server, "evaluator")["logged"] == {"accuracy": 0.85}


async def test_async_workers_log() -> None:
    async with aiops.serve(port=0, policy="asgd", kernels="numpy") as server:
        async with aiops.AsyncWorker(server.url, MODEL, name="w") as worker:
            await worker.step(MODEL)
            worker.log(loss=3.0)
            assert (await worker.stats())["logged"] == {"loss": [3.0, 3.0, 3.0]}
            worker.log(loss=4.0)
        [member] = server.engine.membership
        assert member.logged == {"loss": 4.0}


async def test_any_thread_may_log_for_an_async_worker() -> None:
    async with aiops.serve(port=0, policy="asgd", kernels="numpy") as server:
        async with aiops.AsyncWorker(server.url, MODEL, name="w") as worker:
            await worker.step(MODEL)
            await asyncio.to_thread(worker.log, loss=3.0)
            assert (await worker.stats())["logged"] == {"loss": [3.0, 3.0, 3.0]}
        await asyncio.to_thread(worker.log, loss=4.0)  # it has left


def test_the_next_request_has_what_was_logged_too_early(monkeypatch: pytest.MonkeyPatch) -> None:
    with (
        ServerThread(policy="asgd", kernels="numpy") as server,
        aiops.Client(server.url, name="evaluator") as client,
    ):
        client.stats()
        client.log(accuracy=0.5)
        client.log(loss=2.0)  # within a second
        client._session.book._next_numbers = 0.0  # it is over
        client.ping()
        assert report_of(server, "evaluator")["logged"] == {"accuracy": 0.5, "loss": 2.0}


async def test_an_averager_logs() -> None:
    async with aiops.serve(port=0, policy="average", kernels="numpy") as server:
        async with AsyncModelAverager(server.url, dict(MODEL), name="a") as averager:
            averager.log(loss=2.0)
            await asyncio.sleep(0)  # it is sent by the loop that averages
        [member] = server.engine.membership
        assert member.logged == {"loss": 2.0}


def test_a_worker_whose_server_is_gone_logs_without_an_error() -> None:
    with ServerThread(policy="asgd", kernels="numpy") as server:
        worker = aiops.Worker(server.url, MODEL, timeout=0.2)
        client = aiops.Client(server.url, timeout=0.2)
        client.stats()
    for k in range(10):
        worker.log(loss=float(k))
        client.log(loss=float(k))
    worker.close(flush=False)
    client.close()


def test_a_server_that_is_watched_has_its_workers_say_how_long_they_wait() -> None:
    with (
        ServerThread(policy="asgd", kernels="numpy", dashboard=True) as server,
        aiops.Worker(server.url, MODEL, name="w") as worker,
    ):
        worker.step(MODEL)
        assert worker.plan["log_every"] > 0
        pause, until = threading.Event(), time.monotonic() + PATIENCE
        while report_of(server, "w")["compute_seconds"] is None:
            assert not pause.wait(0.02)
            assert time.monotonic() < until
    with (
        ServerThread(policy="asgd", kernels="numpy") as server,
        aiops.Worker(server.url, MODEL) as worker,
    ):
        assert "log_every" not in worker.plan
