"""The worker follows its client plan by itself: local steps, overlap, what is left at the end."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

from aiops.client import Client, Worker
from aiops.errors import BadPush, ConnectionLost, Unavailable, UsageError
from aiops.model.layout import Array
from tests.peers import eventually
from tests.rows import each_row
from tests.support import PATIENCE, ServerThread

START = {"w": np.zeros(8, np.float32), "b": np.zeros(3, np.float64)}


def ones(params: Mapping[str, Array], times: float = 1) -> dict[str, Array]:
    return {name: np.full_like(array, times) for name, array in params.items()}


def serve(policy: str, workers: int = 1, **settings: Any) -> ServerThread:
    return ServerThread(
        policy=policy, workers=workers, set=settings, kernels="numpy", worker_deadline=PATIENCE
    )


def version_of(server: ServerThread) -> int:
    return int(server.call(lambda s: s.engine.report()["version"]))


def value_of(server: ServerThread) -> float:
    return float(server.call(lambda s: s.engine.store.current.arena.views["w"][0]))


def waiting_at(server: ServerThread) -> int:
    return int(server.call(lambda s: s.engine.report()["waiting"]))


def present_at(server: ServerThread) -> int:
    return len(server.call(lambda s: s.engine.membership.present()))


class TestLocalSteps:
    def test_downpour_pushes_the_sum_and_fetches_now_and_then(self) -> None:
        with serve("downpour", lr=1, n_push=2, n_fetch=4) as server:
            with Worker(server.url, START) as worker:
                receipts = []
                for step in range(1, 9):
                    receipts.append(worker.step(ones(worker.params)))
                    np.testing.assert_array_equal(worker.params["w"], -step)
                assert [receipt.pushed for receipt in receipts] == [False, False, False, True] * 2
                assert worker.last == receipts[-1]
            assert version_of(server) == 4
            assert value_of(server) == -8

    def test_some_tensors_may_have_no_gradient(self) -> None:
        with serve("downpour", lr=1, n_push=2, n_fetch=2) as server:
            with Worker(server.url, START) as worker:
                worker.step({"w": np.ones(8, np.float32)})
                worker.step({"w": np.ones(8, np.float32)})
                np.testing.assert_array_equal(worker.params["w"], -2)
                np.testing.assert_array_equal(worker.params["b"], 0)
                worker.step({"b": np.ones(3)})
                worker.step({"w": np.ones(8, np.float32)})
                np.testing.assert_array_equal(worker.params["b"], -1)
            assert value_of(server) == -3

    @each_row(
        ("policy", "settings", "value"),
        [
            ("downpour", {"lr": 1, "n_push": 5, "n_fetch": 5}, -7),
            ("diloco", {"local_steps": 5, "inner": "sgd", "inner_lr": 1, "optimizer": "sgd"}, -7),
            ("no-delay", {"lr": 1, "tau_max": 4}, -7),
            ("no-delay", {"lr": 1, "tau_max": 4, "variant": 2}, -7),
            ("ssp", {"lr": 1, "get_model_frequency": 5}, -7),
        ],
    )
    def test_closing_pushes_the_rest(
        self, policy: str, settings: dict[str, Any], value: float
    ) -> None:
        if policy == "diloco":
            settings = {**settings, "lr": 1}
        with serve(policy, **settings) as server:
            with Worker(server.url, START) as worker:
                for _ in range(7):
                    worker.step(ones(worker.params))
            assert value_of(server) == pytest.approx(value)

    def test_an_error_in_the_loop_pushes_nothing_more(self) -> None:
        with serve("downpour", lr=1, n_push=5, n_fetch=5) as server:

            def fail() -> None:
                with Worker(server.url, START) as worker:
                    worker.step(ones(worker.params))
                    raise ZeroDivisionError

            with pytest.raises(ZeroDivisionError):
                fail()
            assert version_of(server) == 0

    def test_a_bad_gradient_costs_nothing(self) -> None:
        with serve("downpour", lr=1, n_push=2, n_fetch=2) as server:
            with Worker(server.url, START) as worker:
                bad = ones(worker.params)
                bad["w"][3] = np.nan
                with pytest.raises(BadPush, match="'w' holds nan at element 3"):
                    worker.step(bad)
                with pytest.raises(UsageError, match="shape"):
                    worker.step({"w": np.ones(5, np.float32)})
                with pytest.raises(UsageError, match="no gradient"):
                    worker.step({})
                np.testing.assert_array_equal(worker.params["w"], 0)
                worker.step(ones(worker.params))
                worker.step(ones(worker.params))
            assert value_of(server) == -2

    def test_refresh_keeps_local_steps(self) -> None:
        settings = {"local_steps": 10, "inner": "sgd", "inner_lr": 1, "k": 1}
        with serve("fedbuff", **settings) as server:
            with Worker(server.url, START) as worker, Worker(server.url, START) as other:
                worker.step(ones(worker.params))
                for _ in range(10):
                    other.step(ones(other.params))
                assert worker.refresh() == 1
                np.testing.assert_array_equal(worker.params["w"], -11)
            assert value_of(server) == -11

    def test_elastic_workers_go_to_the_centre_when_they_refresh(self) -> None:
        with serve("easgd", lr=1, p=2, kappa=0.25) as server:
            with Worker(server.url, START) as worker:
                worker.step(ones(worker.params))
                worker.step(ones(worker.params))
                np.testing.assert_allclose(worker.params["w"], -1.5)
                worker.refresh()
                np.testing.assert_allclose(worker.params["w"], -0.5)
            assert value_of(server) == -0.5

    def test_parameters_of_16_bits_have_a_master(self) -> None:
        """Steps too small for float16 add up."""
        start = {"w": np.full(4, 1, np.float16)}
        with serve(
            "diloco", local_steps=64, inner="sgd", inner_lr=1e-4, optimizer="sgd", lr=1
        ) as s:
            with Worker(s.url, start) as worker:
                for _ in range(64):
                    worker.step({"w": np.ones(4, np.float16)})
            assert value_of(s) == np.float16(1 - 64e-4)


class TestOverlap:
    def test_the_merge_overlaps_compute(self) -> None:
        """With the other at rest, a worker goes on for τ_max steps, and then waits for it."""
        two = serve("no-delay", workers=2, lr=1, tau_max=4)
        with two as server, Worker(server.url, START) as fast, Worker(server.url, START) as slow:
            for _ in range(3):
                receipt = fast.step(ones(fast.params))
                assert not receipt.pushed
            assert fast.idle_seconds < 0.5 * PATIENCE
            with ThreadPoolExecutor() as pool:
                waiting = pool.submit(lambda: fast.step(ones(fast.params)))
                eventually(lambda: waiting_at(server) == 1, "the first push")
                assert not waiting.done()
                slow.step(ones(slow.params))
                waiting.result(PATIENCE)
            # Both gave one step; the three that the fast one has taken since are its own.
            np.testing.assert_array_equal(fast.params["w"], -1 - 3)

    def test_idle_time_is_told_apart_from_compute(self) -> None:
        two = serve("no-delay", workers=2, lr=1, tau_max=2)
        with two as server, Worker(server.url, START) as fast, Worker(server.url, START) as slow:
            release = threading.Event()

            def work() -> None:
                release.wait(PATIENCE)
                slow.step(ones(slow.params))

            with ThreadPoolExecutor() as pool:
                working = pool.submit(work)
                fast.step(ones(fast.params))
                before = fast.idle_seconds
                assert fast._background is not None
                done = fast._background.done

                def wait(seconds: float | None = None, wait: Any = done.wait) -> Any:
                    threading.Timer(0.2, release.set).start()  # not before the step waits
                    return wait(seconds)

                done.wait = wait  # type: ignore[method-assign]
                fast.step(ones(fast.params))
                working.result(PATIENCE)
            assert fast.idle_seconds - before >= 0.15

    def test_closing_does_not_wait_when_the_loop_failed(self) -> None:
        """Ctrl-C with a push in the background that the barrier holds."""
        with serve("no-delay", workers=2, lr=1, tau_max=8) as server:
            slow = Worker(server.url, START)
            worker = Worker(server.url, START)
            worker.step(ones(worker.params))
            eventually(lambda: waiting_at(server) == 1, "the first push")
            began = time.monotonic()
            with pytest.raises(KeyboardInterrupt), worker:
                raise KeyboardInterrupt
            assert time.monotonic() - began < PATIENCE, "the barrier's is 300 s"
            slow.step(ones(slow.params))
            slow.close()
            assert value_of(server) == -1  # the mean of both: what was handed over counts

    def test_a_failed_push_is_told_by_the_step_after_it(self) -> None:
        with serve("no-delay", workers=2, lr=1, tau_max=2) as server:
            worker, other = Worker(server.url, START), Worker(server.url, START)
            worker._client.timeout = 1.0
            worker.step(ones(worker.params))
            eventually(lambda: waiting_at(server) == 1, "the first push")
            background = worker._background
        assert background is not None
        assert background.done.wait(PATIENCE)
        with pytest.raises(Unavailable, match="shutting down"):
            worker.step(ones(worker.params))
        np.testing.assert_array_equal(worker.params["w"], -1)  # nothing of this step was done
        for each in (worker, other):
            each.close(flush=False)

    def test_interrupting_a_call(self) -> None:
        with serve("hardsync", workers=2) as server:
            client = Client(server.url, role="worker")
            params = client.define(START)
            with ThreadPoolExecutor() as pool:
                waiting = pool.submit(lambda: client.exchange(params, ones(params)))
                eventually(lambda: waiting_at(server) == 1, "the first push")
                client.interrupt()
                with pytest.raises(ConnectionLost, match="interrupted"):
                    waiting.result(PATIENCE)
            client.close()


class TestNobodyKnows:
    """A wait that is broken off tells nothing of the push: it is asked again, not pushed again."""

    def test_a_broken_wait_does_not_double_the_push(self) -> None:
        settings = {"local_steps": 1, "inner": "sgd", "inner_lr": 1, "optimizer": "sgd", "lr": 1}
        with serve("diloco", workers=2, **settings) as server:
            worker, other = Worker(server.url, START), Worker(server.url, START)
            with ThreadPoolExecutor() as pool:
                waiting = pool.submit(lambda: worker.step(ones(worker.params)))
                eventually(lambda: waiting_at(server) == 1, "the first push")
                sock = worker._client._connection.short.socket
                assert sock is not None
                worker._client._session.info.plan["patience"] = 0.0  # type: ignore[index]
                worker._client.interrupt()
                with pytest.raises(ConnectionLost):
                    waiting.result(PATIENCE)
                worker._client._connection.dialler.interrupted = False
                other.step(ones(other.params))
            assert value_of(server) == -1
            with ThreadPoolExecutor() as pool:
                again = pool.submit(lambda: worker.step(ones(worker.params)))
                eventually(lambda: waiting_at(server) == 1, "the second push")
                other.step(ones(other.params))
                again.result(PATIENCE)
            assert value_of(server) == -2
            np.testing.assert_array_equal(worker.params["w"], -2)
            for each in (worker, other):
                each.close()

    @each_row(
        ("policy", "settings"),
        [
            ("downpour", {"lr": 1, "n_push": 2, "n_fetch": 4}),
            ("fedbuff", {"local_steps": 4, "inner_lr": 1, "k": 1}),
            ("no-delay", {"lr": 1, "tau_max": 3}),
        ],
    )
    def test_a_server_that_lost_its_model_gets_every_step_once(
        self, policy: str, settings: dict[str, Any]
    ) -> None:
        with serve(policy, **settings) as server:
            worker = Worker(server.url, START)
            for _ in range(5):
                worker.step(ones(worker.params))
            port = int(server.url.rpartition(":")[2])
        again = ServerThread(policy=policy, set=settings, workers=1, kernels="numpy", port=port)
        with again as server:
            with worker:
                for _ in range(6):
                    worker.step(ones(worker.params))
                np.testing.assert_array_equal(worker.params["w"], -11)
            assert value_of(server) == -11


class TestPlans:
    @each_row("policy", ["easgd", "no-delay", "downpour", "diloco"])
    def test_a_bare_gradient_is_not_pushed(self, policy: str) -> None:
        with serve(policy) as server, Client(server.url, role="worker") as client:
            params = client.define(START)
            with pytest.raises(UsageError, match=r"use aiops\.Worker"):
                client.push(params, ones(params))
            with pytest.raises(UsageError, match=r"use aiops\.Worker"):
                client.exchange(params, ones(params))
            assert version_of(server) == 0

    def test_a_plan_that_is_not_known(self, monkeypatch: pytest.MonkeyPatch) -> None:
        from aiops.algorithms.asgd import ASGD

        plan: Callable[..., Any] = lambda self, workers: {"routine": "telepathy"}  # noqa: E731
        monkeypatch.setattr(ASGD, "plan", plan)
        with serve("asgd") as server:
            with pytest.raises(UsageError, match="the routine 'telepathy'"):
                Worker(server.url, START)
            eventually(lambda: not present_at(server), "its goodbye")

    def test_too_many_fragments(self) -> None:
        match = "4 fragments, but it has only 2 tensors"
        streaming = serve("diloco", local_steps=4, fragments=4)
        with streaming as server, pytest.raises(UsageError, match=match):
            Worker(server.url, START)
