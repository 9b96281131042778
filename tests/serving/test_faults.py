"""Cuts, kills, silence and restarts between honest peers: nothing is lost, nothing doubled."""

from __future__ import annotations

import asyncio
import random
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Any

import numpy as np
import pytest

from aiops import testing
from aiops.client import AsyncWorker, Client, Worker
from aiops.errors import ConnectionLost, DeadlineExceeded
from aiops.model.layout import Array
from aiops.server import serve
from aiops.wire import messages
from tests.adapter import Adapter
from tests.peers import Peer, eventually, frame, push, serving
from tests.proxy import Fault, Proxy
from tests.support import PATIENCE, Process, ServerThread

SIZE = 1 << 20
"""Bytes of the model."""

START = {"w": np.zeros(SIZE // 4, np.float32)}
ONES = {"w": np.ones(SIZE // 4, np.float32)}

POLICIES: dict[str, dict[str, Any]] = {
    "asgd": {"policy": "asgd"},
    "sasgd": {"policy": "sasgd"},
    "fasgd": {"policy": "fasgd"},
    "softsync": {"policy": "softsync", "workers": 3},
    "hardsync wait": {"policy": "hardsync", "workers": 3},
    "hardsync reject": {"policy": "hardsync", "workers": 3, "set": {"admission": "reject"}},
}


def waiting(server: ServerThread) -> int:
    """Return how many workers wait at the barrier."""
    count: int = server.call(lambda s: s.engine.report()["waiting"])
    return count


# ---------------------------------------------------------------- processes that die

HALF_A_PUSH = """
import sys
from tests.peers import Peer, frame, push
peer = Peer(sys.argv[1])
peer.send(frame(push({size}, 1), bytes({size}))[:{size} // 2])
print("half", flush=True)
peer.dropped()
"""

AT_THE_BARRIER = """
import sys, numpy as np
from aiops.client import Worker
with Worker(sys.argv[1], {{"w": np.zeros({size} // 4, np.float32)}}) as worker:
    print("ready", flush=True)
    worker.step({{"w": np.ones({size} // 4, np.float32)}})
"""


def child(code: str, url: str) -> Process:
    """Run a program with a server's URL, and wait for its first line."""
    process = Process("-c", code.format(size=SIZE), url)
    assert process.line() in ("half", "ready")
    return process


def loop(url: str, steps: int) -> int:
    """Train for so many steps; return how many were made."""
    with Worker(url, START) as worker:
        for _ in range(steps):
            worker.step(lambda params: ONES)
        return worker.steps


@pytest.mark.slow
class TestKilled:
    @pytest.mark.parametrize("policy", POLICIES)
    def test_in_the_middle_of_a_push(self, policy: str) -> None:
        """Its half is thrown away, its buffer comes back, and nobody waits for it."""
        with (
            ServerThread(kernels="numpy", **POLICIES[policy]) as server,
            Client(server.url, role="worker") as definer,
        ):
            definer.define(START)
            definer.close()
            process = child(HALF_A_PUSH, server.url)
            try:
                assert server.call(lambda s: s.engine.admission.pool.out) == SIZE
                with ThreadPoolExecutor(2) as pool:
                    loops = [pool.submit(loop, server.url, 6) for _ in range(2)]
                    if policy == "hardsync wait":
                        eventually(lambda: waiting(server) == 2, "both wait for the third")
                    process.signal(signal.SIGKILL)
                    assert [future.result(PATIENCE) for future in loops] == [6, 6]
            finally:
                process.kill()
            buffers = lambda s: s.engine.admission.pool.out  # noqa: E731
            eventually(lambda: server.call(buffers) == 0, "its buffer comes back")

    def test_while_it_waits_at_the_barrier(self) -> None:
        """Its gradient was given, and counts; nobody waits for another."""
        settings = {**POLICIES["hardsync wait"], "set": {"lr": 1}}
        with ServerThread(kernels="numpy", **settings) as server:
            process = child(AT_THE_BARRIER, server.url)
            try:
                eventually(lambda: waiting(server) == 1, "the child waits")
                process.signal(signal.SIGKILL)
                eventually(lambda: server.call(lambda s: not s.connections.peers), "it is gone")
                with ThreadPoolExecutor(2) as pool:
                    loops = [pool.submit(loop, server.url, 4) for _ in range(2)]
                    assert [future.result(PATIENCE) for future in loops] == [4, 4]
            finally:
                process.kill()
            with Client(server.url) as observer:
                assert observer.stats()["gradients"] == 9
                np.testing.assert_array_equal(observer.fetch()["w"], -observer.fetch().version)

    def test_behind_a_stalled_link(self) -> None:
        """The bytes stop, then the process does, and nothing tells the server but its deadline."""
        settings = {**POLICIES["hardsync wait"], "stall_deadline": 0.4}
        with ServerThread(kernels="numpy", **settings) as server, Proxy(server.url) as proxy:
            fault = proxy.stall("up", after=SIZE + SIZE // 2)  # its offer passes, its push does not
            process = child(AT_THE_BARRIER, proxy.url)
            try:
                fault.wait()
                process.signal(signal.SIGKILL)
                with ThreadPoolExecutor(2) as pool:
                    loops = [pool.submit(loop, server.url, 3) for _ in range(2)]
                    assert [future.result(PATIENCE) for future in loops] == [3, 3]
            finally:
                process.kill()

    def test_stopped_in_the_middle_of_a_push(self) -> None:
        """A suspended process holds a buffer and a barrier only until the stall deadline."""
        settings = {**POLICIES["hardsync wait"], "stall_deadline": 0.4}
        with ServerThread(kernels="numpy", **settings) as server:
            with Client(server.url, role="worker") as definer:
                definer.define(START)
            process = child(HALF_A_PUSH, server.url)
            try:
                process.signal(signal.SIGSTOP)
                with ThreadPoolExecutor(2) as pool:
                    loops = [pool.submit(loop, server.url, 3) for _ in range(2)]
                    assert [future.result(PATIENCE) for future in loops] == [3, 3]
                assert server.call(lambda s: s.engine.admission.pool.out) == 0
            finally:
                process.kill()


BLOCKED = {
    "worker": AT_THE_BARRIER,
    "client": """
import sys, numpy as np
from aiops.client import Client
with Client(sys.argv[1], role="worker") as client:
    params = client.define({{"w": np.zeros({size} // 4, np.float32)}})
    print("ready", flush=True)
    client.exchange(params, {{"w": np.ones({size} // 4, np.float32)}})
""",
    "async client": """
import asyncio, sys, numpy as np
from aiops.client import AsyncClient
async def main():
    async with AsyncClient(sys.argv[1], role="worker") as client:
        params = await client.define({{"w": np.zeros({size} // 4, np.float32)}})
        print("ready", flush=True)
        await client.exchange(params, {{"w": np.ones({size} // 4, np.float32)}})
asyncio.run(main())
""",
    "async worker": """
import asyncio, sys, numpy as np
from aiops.client import AsyncWorker
async def main():
    async with AsyncWorker(sys.argv[1], {{"w": np.zeros({size} // 4, np.float32)}}) as worker:
        print("ready", flush=True)
        await worker.step({{"w": np.ones({size} // 4, np.float32)}})
asyncio.run(main())
""",
}


@pytest.mark.slow
class TestCtrlC:
    @pytest.mark.parametrize("code", BLOCKED.values(), ids=BLOCKED)
    @pytest.mark.parametrize("where", ["at the barrier", "sending", "reconnecting"])
    def test_it_ends_a_blocked_client(self, code: str, where: str) -> None:
        settings = {**POLICIES["hardsync wait"], "stall_deadline": 600.0}
        with ServerThread(kernels="numpy", **settings) as server, Proxy(server.url) as proxy:
            fault: Fault | None = None
            if where != "at the barrier":
                fault = proxy.stall("up", after=SIZE + SIZE // 2)
            process = child(code, proxy.url)
            try:
                if fault is None:
                    eventually(lambda: waiting(server) == 1, "it waits")
                else:
                    fault.wait()
                if where == "reconnecting":
                    proxy.refuse()
                process.signal(signal.SIGINT)
                status, _out, err = process.end()
                assert status in (-signal.SIGINT, 130, 1)
                assert err.splitlines()[-1].startswith("KeyboardInterrupt"), err
                assert "Traceback" in err, "Python's own, from where it was"
                assert "ResourceWarning" not in err
            finally:
                process.kill()


# ---------------------------------------------------------------- cut connections

Connect = Callable[..., Any]


class Stepper:
    """A worker with the client's face, as far as an exactly-once test needs it."""

    def __init__(self, url: str, make: Connect = Worker, **arguments: Any) -> None:
        arguments.pop("role", None)
        self._worker = make(url, START, **arguments)

    def __enter__(self) -> Stepper:
        return self

    def __exit__(self, *exc: object) -> None:
        self._worker.__exit__(None, None, None)

    def define(self, arrays: Mapping[str, Array]) -> Any:
        return self._worker.params

    def exchange(self, params: Any, gradients: Mapping[str, Array]) -> Any:
        return self._worker.step(gradients)

    def push(self, params: Any, gradients: Mapping[str, Array]) -> Any:
        return self._worker.step(gradients)

    def fetch(self, params: Any) -> Any:
        self._worker.refresh()
        return params


@pytest.fixture(params=["blocking", "asyncio", "worker", "async worker"])
def connect(request: pytest.FixtureRequest) -> Connect:
    if request.param == "asyncio":
        return lambda url, **arguments: Adapter(asyncio.new_event_loop, url, **arguments)
    if request.param == "async worker":
        make = partial(Adapter, asyncio.new_event_loop, of=AsyncWorker)
        return lambda url, **arguments: Stepper(url, make, **arguments)
    return Client if request.param == "blocking" else Stepper


@pytest.fixture
def server() -> Iterator[ServerThread]:
    with ServerThread(policy="asgd", set={"lr": 1}, kernels="numpy") as running:
        yield running


@pytest.fixture
def proxy(server: ServerThread) -> Iterator[Proxy]:
    with Proxy(server.url) as between:
        yield between


PLACES = [0, 1, 4, 5, 30, 100, 20_000, SIZE // 2, SIZE]


class TestCut:
    @pytest.mark.parametrize(
        ("how", "direction", "after"),
        [
            *(("exchange", direction, after) for direction in ("up", "down") for after in PLACES),
            *(("push", "up", after) for after in PLACES),
            *(("push", "down", after) for after in PLACES if after <= 30),  # its answer is short
        ],
    )
    def test_a_push_is_applied_once(
        self, connect: Connect, server: Any, proxy: Proxy, direction: Any, after: int, how: str
    ) -> None:
        """Wherever it is cut: before the server has it, or before the client has the answer."""
        with connect(proxy.url, role="worker") as client:
            params = client.define(START)
            client.exchange(params, ONES)
            fault = proxy.cut(direction, after)
            receipt = getattr(client, how)(params, ONES)
            assert receipt.version == 2
            fault.wait()
            assert proxy.connections >= 2  # on a busy machine an attempt may take too long
            assert client.exchange(params, ONES).version == 3
            np.testing.assert_array_equal(params["w"], -3)
            stats = server.call(lambda s: s.engine.report())
            assert stats["gradients"] == 3
            assert stats["receive_bytes"] == 0

    @pytest.mark.parametrize("after", PLACES)
    def test_a_fetch_is_one_version(
        self, connect: Connect, server: Any, proxy: Proxy, after: int
    ) -> None:
        """The model changes between the first half and the second."""
        with (
            connect(proxy.url, role="worker") as client,
            Client(server.url, role="worker") as other,
        ):
            params, theirs = client.define(START), other.define(START)
            other.exchange(theirs, ONES)
            fault = proxy.stall("down", after)
            with ThreadPoolExecutor(1) as pool:
                fetched = pool.submit(client.fetch, params)
                fault.wait()
                other.exchange(theirs, ONES)
                proxy.cut_all()
                fault.release()
                assert fetched.result(PATIENCE) is params
            assert proxy.connections >= 2
            assert params.version == 2
            np.testing.assert_array_equal(params["w"], -2)

    @pytest.mark.slow
    def test_a_fetch_that_is_given_up_leaves_a_mark(self, server: Any, proxy: Proxy) -> None:
        """Half of a version is no version; the next fetch brings all of it."""
        server.call(lambda s: s.engine.plan.update(patience=0.0))
        with Client(server.url, role="worker") as other, Client(proxy.url) as client:
            theirs = other.define(START)
            params = client.fetch()
            other.exchange(theirs, ONES)
            fault = proxy.stall("down", SIZE // 2)
            client.timeout = 0.2
            with pytest.raises(DeadlineExceeded):
                client.fetch(params)
            assert params.version == -1
            fault.release()
            client.timeout = PATIENCE
            client.fetch(params)
            assert params.version == 1
            np.testing.assert_array_equal(params["w"], -1)

    def test_a_model_is_defined_once(self, connect: Connect, server: Any, proxy: Proxy) -> None:
        fault = proxy.cut("up", SIZE // 2)
        with connect(proxy.url, role="worker") as client:
            params = client.define(START)
            fault.wait()
            assert params.version == 0
            assert client.exchange(params, ONES).version == 1
        assert server.call(lambda s: s.engine.admission._defining) is False

    @pytest.mark.slow
    def test_again_and_again(self, connect: Connect, server: Any, proxy: Proxy) -> None:
        """Three workers, and a link that breaks wherever it hurts."""
        steps, wanted, places = 20, 5, random.Random(9)
        cuts, enough = 0, threading.Event()

        def work() -> int:
            """Train for some steps, and until the link has broken often enough."""
            done, give_up = 0, time.monotonic() + 2 * PATIENCE
            with connect(proxy.url, role="worker") as client:
                params = client.define(START)
                while done < steps or not (enough.is_set() or time.monotonic() > give_up):
                    client.exchange(params, ONES)
                    assert (params["w"] == params["w"][0]).all()
                    done += 1
            return done

        def saboteur() -> None:
            nonlocal cuts
            while not enough.is_set():
                direction: Any = places.choice(["up", "down"])
                fault = proxy.cut(direction, places.randrange(3 * SIZE))
                while not enough.is_set() and not fault.happened.wait(0.05):
                    pass
                cuts += fault.happened.is_set()
                if cuts >= wanted:
                    enough.set()

        with ThreadPoolExecutor(4) as pool:
            breaking = pool.submit(saboteur)
            try:
                pushes = sum(f.result(3 * PATIENCE) for f in [pool.submit(work) for _ in range(3)])
            finally:
                enough.set()
            breaking.result(PATIENCE)
        assert cuts >= wanted
        with Client(server.url) as observer:
            np.testing.assert_array_equal(observer.fetch()["w"], -pushes)
            assert observer.stats()["gradients"] == pushes


class TestSameClientTwice:
    """A client comes back while the server still believes in its old connection."""

    def test_the_new_connection_takes_the_seat(self, server: ServerThread) -> None:
        payload = ONES["w"].tobytes()
        with Client(server.url, role="worker") as definer:
            definer.define(START)
        whole = frame(push(SIZE, 1), payload)
        with Peer(server.url, client="me") as old:
            old.send(whole[: SIZE // 2])
            with Peer(server.url, client="me") as new:
                assert isinstance(new.ask(push(SIZE, 1), payload), messages.Ack)
                assert old.dropped()
                assert new.welcome is not None
                with Peer(server.url, client="me") as third:
                    assert third.welcome is not None
                    assert third.welcome.last_seq == 1
                    assert isinstance(third.ask(push(SIZE, 1, id=7), payload), messages.Ack)
        stats = server.call(lambda s: s.engine.report())
        assert (stats["version"], stats["gradients"], stats["receive_bytes"]) == (1, 1, 0)

    def test_an_answer_finds_its_way_to_the_new_connection(self) -> None:
        """Its push waits at the barrier; the answer goes to where the client is now."""
        payload = ONES["w"].tobytes()
        with ServerThread(policy="hardsync", workers=2, kernels="numpy") as server:
            with Client(server.url, role="worker") as definer:
                definer.define(START)
            with Peer(server.url, client="a") as old, Peer(server.url, client="b") as other:
                old.send(frame(push(SIZE, 1), payload))
                eventually(lambda: waiting(server) == 1, "it waits")
                with Peer(server.url, client="a") as new:
                    new.send(frame(push(SIZE, 1, fetch=True, id=5), payload))
                    assert isinstance(other.ask(push(SIZE, 1), payload), messages.Ack)
                    answer = new.receive()
                    assert isinstance(answer, messages.Ack)
                    assert (answer.id, answer.version) == (5, 1)
                    assert len(new.payloads[0]) == SIZE


# ---------------------------------------------------------------- silence


def submit(pool: ThreadPoolExecutor, url: str, name: str, steps: int) -> Future[int]:
    def work() -> int:
        with Worker(url, START, name=name) as worker:
            for _ in range(steps):
                worker.step(ONES)
            return worker.version

    return pool.submit(work)


async def train(url: str, name: str, steps: int) -> int:
    """Train in virtual time; return the version in the end."""
    async with AsyncWorker(url, START, name=name) as worker:
        for _ in range(steps):
            await worker.step(ONES)
        return worker.version


class TestSilent:
    def test_a_worker_that_never_pushes(self) -> None:
        """The others wait one deadline for it; when it speaks, it is waited for again."""

        async def main() -> None:
            loop = asyncio.get_running_loop()
            async with (
                serve(kernels="numpy", set={"lr": 1}, policy="hardsync", workers=3) as server,
                AsyncWorker(server.url, START, name="silent") as silent,
            ):
                begun = loop.time()
                loops = [train(server.url, name, 5) for name in ("a", "b")]
                assert await asyncio.gather(*loops) == [5, 5]
                assert loop.time() - begun == server.config.worker_deadline
                rows = {row["name"]: row for row in (await silent.stats())["workers"]}
                assert rows["silent"]["present"]
                assert rows["silent"]["excused"]
                receipt = await silent.step(ONES)
                assert receipt.staleness == 5, "the others have left; it is on its own"
                rows = {row["name"]: row for row in (await silent.stats())["workers"]}
                assert not rows["silent"]["excused"]

        testing.run(main())

    def test_a_worker_that_never_comes(self) -> None:
        async def main() -> None:
            loop = asyncio.get_running_loop()
            async with serve(kernels="numpy", policy="hardsync", workers=3) as server:
                loops = [train(server.url, name, 5) for name in ("a", "b")]
                assert await asyncio.gather(*loops) == [5, 5]
                assert loop.time() >= server.config.worker_deadline

        testing.run(main())

    def test_before_the_deadline_it_is_waited_for(self) -> None:
        settings: dict[str, Any] = {"policy": "hardsync", "workers": 2, "worker_deadline": 600.0}
        with (
            ServerThread(kernels="numpy", set={"lr": 1}, **settings) as server,
            ThreadPoolExecutor(1) as pool,
        ):
            first = submit(pool, server.url, "first", 1)
            eventually(lambda: waiting(server) == 1, "it waits")
            with Worker(server.url, START) as late:
                late.step({"w": 3 * ONES["w"]})
                np.testing.assert_array_equal(late.params["w"], -2)
            assert first.result(PATIENCE) == 1

    def test_observers_are_never_waited_for(self) -> None:
        settings: dict[str, Any] = {"policy": "hardsync", "workers": 1, "worker_deadline": 600.0}
        with (
            ServerThread(kernels="numpy", **settings) as server,
            Client(server.url) as one,
            Client(server.url),
            Worker(server.url, START) as worker,
        ):
            for _ in range(3):
                worker.step(ONES)
                one.fetch()
            assert one.stats()["waited_for"] == [3]


# ---------------------------------------------------------------- restarts


@pytest.mark.slow
class TestRestart:
    def test_a_killed_server_comes_back_without_the_model(self) -> None:
        """It gets that of the worker that waited at its barrier, and training goes on."""
        flags = ("--policy", "hardsync", "--workers", "2", "--kernels", "numpy")
        with ThreadPoolExecutor(1) as pool:
            with serving(*flags) as server, Client(server.url) as observer:
                worker = Worker(server.url, START)
                port = server.url.rpartition(":")[2]
                step = pool.submit(worker.step, ONES)
                eventually(lambda: observer.stats()["waiting"] == 1, "it waits")
                server.popen.kill()
                server.popen.wait(PATIENCE)
            again = Process("-m", "aiops.server", *flags, "--port", port)
            try:
                assert again.line() == worker.url
                assert not step.result(PATIENCE).used
                assert worker.version == 0
                np.testing.assert_array_equal(worker.params["w"], START["w"])
                with Worker(worker.url, START) as other:
                    step = pool.submit(worker.step, ONES)
                    assert other.step(ONES).version == step.result(PATIENCE).version == 1
                worker.close()
            finally:
                again.kill()

    def test_a_killed_server_comes_back_with_a_saved_model(self, tmp_path: Any) -> None:
        """A gradient from before the restart is not applied; after a fetch all is well."""
        path = tmp_path / "model.safetensors"
        flags = ("--policy", "asgd", "--set", "lr=1", "--kernels", "numpy")
        with serving(*flags, "--save", str(path)) as server:
            worker = Worker(server.url, START)
            port = server.url.rpartition(":")[2]
            worker.step(ONES)
            assert server.stop() == 0
        again = Process("-m", "aiops.server", *flags, "--port", port, "--init", str(path))
        try:
            assert again.line() == worker.url
            assert not worker.step(ONES).used
            assert worker.version == 0
            np.testing.assert_array_equal(worker.params["w"], -1)
            worker.step(ONES)
            np.testing.assert_array_equal(worker.params["w"], -2)
            worker.close()
        finally:
            again.kill()

    def test_another_model_of_the_same_version_is_not_taken_for_the_old_one(self) -> None:
        with ServerThread(policy="asgd", set={"lr": 1}) as first:
            port = int(first.url.rpartition(":")[2])
            client = Client(first.url, role="worker")
            params = client.define(START)
            client.exchange(params, ONES)
        with ServerThread(policy="asgd", set={"lr": 1}, port=port) as second:
            with Client(second.url, role="worker") as other:
                held = other.define({"w": START["w"] + 5})
                other.exchange(held, ONES)
            client.fetch(params)
            assert params.version == 1
            np.testing.assert_array_equal(params["w"], held["w"])
            client.close()

    def test_a_server_that_does_not_come_back(self) -> None:
        """The error says so after the client's own time-out, however long a barrier may take."""
        with serving("--policy", "hardsync", "--workers", "2") as server:
            worker = Worker(server.url, START)
            worker._client.timeout = 0.5
            assert worker.plan["patience"] == 300
            with ThreadPoolExecutor(1) as pool, Client(server.url) as observer:
                step = pool.submit(worker.step, ONES)
                eventually(lambda: observer.stats()["waiting"] == 1, "it waits")
                server.popen.kill()
                with pytest.raises(ConnectionLost, match="is the server running"):
                    step.result(PATIENCE)
            worker.close()
