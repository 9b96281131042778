"""Servers that are full, shut down, come back, or stop answering; networks that fail and heal.

Most of it happens in virtual time, or over sockets in memory; each kind once on real sockets.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import random
import select
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import uvloop

import aiops
from aiops import AsyncClient, AsyncWorker, Client, Worker, testing
from aiops.client import backoff
from aiops.client.asyncio.connection import AsyncConnection
from aiops.client.backoff import ATTEMPT
from aiops.client.pending import given_up
from aiops.client.sync import dialling
from aiops.engine.events import Stopping
from aiops.errors import (
    BadPush,
    ConnectionLost,
    DeadlineExceeded,
    Refused,
    Unauthorised,
    Unavailable,
)
from aiops.net.environment import CURRENT_ENVIRONMENT
from aiops.wire.messages import Ack, Error, Message, Push
from aiops.wire.sinks import Sink
from tests.client.test_session import ONES, Server, ready, stepped, values
from tests.memory import URL, MemoryServer, patch_select, without_waiting
from tests.memory_loop import Awaited
from tests.peers import eventually
from tests.rows import each_row
from tests.support import PATIENCE, Process, ServerThread, server_process

MODEL = {"w": np.zeros(3, np.float32)}
STEP = {"w": np.ones(3, np.float32)}
SHORT = 0.5
"""Seconds of an attempt on real sockets; `ATTEMPT` where the clock is virtual."""

SETTINGS: dict[str, Any] = {"policy": "asgd", "kernels": "numpy", "set": {"lr": 1.0}}


def now() -> float:
    return asyncio.get_running_loop().time()


def port_of(url: str) -> int:
    return int(url.rpartition(":")[2])


def black_hole() -> None:
    """Have the clients made from here on connect as a kernel does: what is lost is sent again.

    A request to connect is repeated after 1, 3, 7, ... seconds, and not when the network heals.
    """
    env, network = CURRENT_ENVIRONMENT.get(), testing.network()

    async def dial(factory: Callable[[], Any], host: str, port: int) -> Any:
        pause = 1.0
        while network.host("alice").silent:
            await asyncio.sleep(pause)
            pause *= 2
        return await env.dial(factory, host, port)

    CURRENT_ENVIRONMENT.set(dataclasses.replace(env, dial=dial))


class TestNetwork:
    """A network that fails for a while: trust.md, 7."""

    @each_row("seed", range(20))
    @each_row("fault", ["lost on the way", "cut"])
    def test_a_step_is_over_two_seconds_after_it_heals(self, fault: str, seed: int) -> None:
        """The default time-out is 60 s; the network fails for any time below that."""

        async def main() -> None:
            network, chance = testing.network(), random.Random(seed)
            async with aiops.serve(**SETTINGS) as server:
                with network.at("alice"):
                    black_hole()
                    worker = await AsyncWorker(server.url, MODEL).connect()
                    network.silence("alice")
                    network.cut("alice")
                    step = asyncio.ensure_future(worker.step(STEP))
                    await asyncio.sleep(chance.uniform(0.1, 59.0))
                    assert not step.done()
                    network.restore("alice")
                    healed = now()
                    if fault == "cut":
                        network.cut("alice")
                    assert (await step).version == 1
                    assert now() - healed < 2.0
                    await worker.close()

        testing.run(main(), seed=seed)

    @testing.virtual()
    async def test_an_address_that_does_not_answer_leaves_time_to_the_next(self) -> None:
        network = testing.network()
        env = CURRENT_ENVIRONMENT.get()

        async def dial(factory: Callable[[], Any], host: str, port: int) -> Any:
            if host == "127.0.0.66":
                await asyncio.sleep(1e6)
            return await env.dial(factory, "127.0.0.1", port)

        async with aiops.serve(**SETTINGS) as server:
            known = dataclasses.replace(
                env, dial=dial, known_addresses=lambda host: ("127.0.0.66", "127.0.0.1")
            )
            CURRENT_ENVIRONMENT.set(known)
            with network.at("alice"):
                async with AsyncClient(f"aiops://name:{port_of(server.url)}") as client:
                    await client.ping()
        assert now() == ATTEMPT

    def test_a_network_that_does_not_heal(self) -> None:
        async def main() -> None:
            async with aiops.serve(**SETTINGS) as server:
                network = testing.network()
                with network.at("alice"):
                    black_hole()
                    network.silence("alice")
                    client = AsyncClient(server.url, timeout=20.0)
                    with pytest.raises(
                        ConnectionLost, match=r"cannot be reached \(no answer in time"
                    ):
                        await client.connect()
                    assert 18 < now() <= 20

        testing.run(main())


class TestStopped:
    """A process that is stopped, or busy: its kernel takes connections, and it answers nothing."""

    @contextlib.contextmanager
    def mute(self) -> Iterator[str]:
        with testing.network().at("mute"):
            listener = testing.network().listen(asyncio.Protocol)
        yield f"mute:{listener.port}"
        listener.close()

    @testing.virtual()
    async def test_another_server_is_tried(self) -> None:
        with self.mute() as mute:
            async with aiops.serve(**SETTINGS) as server:
                url = f"aiops://{mute},{server.url.removeprefix('aiops://')}"
                async with AsyncClient(url) as client:
                    assert now() == ATTEMPT
                    assert client.url == url
                    await client.ping()

    @testing.virtual()
    async def test_the_error_says_that_it_sends_no_welcome(self) -> None:
        with self.mute() as mute:
            client = AsyncClient(f"aiops://{mute}", timeout=30.0)
            with pytest.raises(DeadlineExceeded, match="did not send its welcome"):
                await client.connect()
            assert 20 < now() <= 30

    @each_row("busy", [0.5, 1.4, 1.6, 2.9, 5.5])
    def test_a_server_that_takes_long_to_welcome_is_joined_all_the_same(self, busy: float) -> None:
        """It may be busy with its many clients, which must not all leave just before."""

        async def main() -> None:
            network = testing.network()
            with network.at("server"):
                serving = aiops.serve(**SETTINGS)
                server = await serving.__aenter__()
            network.host("server").latency = busy / 4  # to connect and to be welcomed: a half each
            with network.at("alice"):
                env = CURRENT_ENVIRONMENT.get()

                async def dial(factory: Callable[[], Any], host: str, port: int) -> Any:
                    network.host("server").latency = 0.0
                    try:
                        return await env.dial(factory, host, port)
                    finally:
                        network.host("server").latency = busy / 2

                CURRENT_ENVIRONMENT.set(dataclasses.replace(env, dial=dial))
                async with AsyncClient(server.url) as client:
                    await client.ping()
            await serving.__aexit__(None, None, None)

        testing.run(main())


class TestFull:
    """A server that has all the connections that it may have: trust.md, 9."""

    @testing.virtual()
    async def test_a_client_waits_until_there_is_room(self) -> None:
        async with aiops.serve(max_connections=1, **SETTINGS) as server:
            first = await AsyncClient(server.url).connect()
            second = AsyncClient(server.url, timeout=30.0)
            connecting = asyncio.ensure_future(second.connect())
            await asyncio.sleep(10)
            assert not connecting.done()
            await first.close()
            await connecting
            assert now() < 11.1
            await second.ping()
            await second.close()

    @testing.virtual()
    async def test_it_raises_the_servers_sentence_when_there_is_none(self) -> None:
        async with aiops.serve(max_connections=1, **SETTINGS) as server, AsyncClient(server.url):
            second = AsyncClient(server.url, timeout=30.0)
            with pytest.raises(Unavailable, match="the server has its 1 connections already"):
                await second.connect()
            assert 28 < now() <= 30
            with pytest.raises(Unavailable, match="the server has its 1 connections already"):
                await second.connect()

    def test_a_blocking_client(self) -> None:
        with ServerThread(max_connections=1, **SETTINGS) as server, ThreadPoolExecutor() as pool:
            first = Client(server.url)
            with pytest.raises(Unavailable, match="the server has its 1 connections already"):
                Client(server.url, timeout=0.3)
            second = pool.submit(Client, server.url, timeout=PATIENCE)
            first.close()
            with second.result(PATIENCE) as client:
                assert client.ping() > 0

    @pytest.mark.parametrize("new_loop", [asyncio.new_event_loop, uvloop.new_event_loop])
    def test_before_the_hello_is_heard(
        self, new_loop: Callable[[], asyncio.AbstractEventLoop], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Within one machine a hello cannot be sent to a server that has closed the connection."""
        real = AsyncConnection.connection_made

        def when_it_is_closed(self: AsyncConnection, transport: asyncio.BaseTransport) -> None:
            closed = select.poll()
            closed.register(transport.get_extra_info("socket").fileno(), select.POLLHUP)
            assert closed.poll(1e3 * PATIENCE)
            real(self, transport)

        async def main(url: str) -> None:
            monkeypatch.setattr(AsyncConnection, "connection_made", when_it_is_closed)
            with pytest.raises(Unavailable, match="has its 1 connections already"):
                await AsyncClient(url, timeout=0.3).connect()

        with (
            ServerThread(max_connections=1, **SETTINGS) as server,
            Client(server.url),
            asyncio.Runner(loop_factory=new_loop) as runner,
        ):
            runner.run(main(server.url))

    @testing.virtual()
    async def test_other_refusals_are_raised_at_once(self) -> None:
        async with aiops.serve(token="s3cret", **SETTINGS) as server:
            with pytest.raises(Unauthorised):
                await AsyncClient(server.url, token="wrong").connect()
            async with AsyncWorker(server.url, MODEL, token="s3cret") as worker:
                with pytest.raises(BadPush):
                    await worker.step({"w": np.full(3, np.nan, np.float32)})
        assert now() == 0


class TestShuttingDown:
    """A server that shuts down, and its successor."""

    @testing.virtual()
    async def test_workers_wait_for_the_successor(self) -> None:
        """One waits at a barrier and is refused, another is between two steps."""
        settings = {"policy": "hardsync", "workers": 2, "kernels": "numpy", "set": {"lr": 1.0}}
        async with aiops.serve(**settings) as server:
            port = port_of(server.url)
            one = await AsyncWorker(server.url, MODEL).connect()
            two = await AsyncWorker(server.url, MODEL).connect()
            step = asyncio.ensure_future(one.step(STEP))
            await testing.until(lambda: server.engine.report()["waiting"] == 1, "it waits")
        await asyncio.sleep(30)
        assert not step.done()
        async with aiops.serve(port=port, **settings):
            back = now()
            assert not (await step).used, "the gradient belonged to other parameters"
            assert now() - back < 2
            steps = await asyncio.gather(one.step(STEP), two.step(STEP))
            assert [receipt.used for receipt in steps] == [True, False]
            steps = await asyncio.gather(one.step(STEP), two.step(STEP))
            await one.close()
            await two.close()

    @testing.virtual()
    async def test_there_is_none(self) -> None:
        """The server's own sentence is raised; that push is known not to have been applied."""
        async with aiops.serve(policy="hardsync", workers=2, kernels="numpy") as server:
            worker = await AsyncWorker(server.url, MODEL, timeout=20.0).connect()
            step = asyncio.ensure_future(worker.step(STEP))
            await testing.until(lambda: server.engine.report()["waiting"] == 1, "it waits")
        with pytest.raises(
            Unavailable, match=r"the step was not made; since then it cannot be reached \(Connect"
        ):
            await step
        assert 18 < now() <= 21
        await worker.close()

    @pytest.mark.slow
    def test_processes(self) -> None:
        flags = ("--policy", "asgd", "--set", "lr=1", "--kernels", "numpy")
        with (
            ThreadPoolExecutor() as pool,
            server_process(*flags) as server,
            Worker(server.url, MODEL) as worker,
        ):
            port = server.url.rpartition(":")[2]
            worker.step(STEP)
            server.signal(signal.SIGTERM)
            assert server.end()[0] == 0
            steps = pool.submit(lambda: [worker.step(STEP).used for _ in range(3)])
            again = Process("-m", "aiops.server", *flags, "--port", port)
            try:
                assert again.line() == worker.url
                assert steps.result(PATIENCE) == [False, True, True]
                np.testing.assert_array_equal(worker.params["w"], -3)
                worker.close()
            finally:
                again.kill()


class Refusing:
    """Refuses the next answers to pushes of a `MemoryServer`, as one that shuts down does."""

    def __init__(self, server: MemoryServer, times: int) -> None:
        self.left, self.asked = times, list[int]()
        server.answer = self._answer

    def _answer(self, message: Message) -> Message:
        if not isinstance(message, Ack):
            return message
        self.asked.append(message.id)
        if not self.left:
            return message
        self.left -= 1
        return Error(message.id, "unavailable", "the server takes no pushes now", {}, False)


@pytest.fixture
def memory(monkeypatch: pytest.MonkeyPatch) -> Iterator[MemoryServer]:
    patch_select(monkeypatch)
    server = MemoryServer()
    yield server
    server.close()


class TestRequests:
    """Requests that a connected server cannot take now."""

    @pytest.mark.parametrize("steady", [False, True])
    @pytest.mark.parametrize("face", ["blocking", "asyncio"])
    def test_a_push_is_sent_again_under_its_number(
        self, memory: MemoryServer, face: str, steady: bool
    ) -> None:
        """The engine has applied it at the first sending, so a new number would apply it twice."""
        client: Any
        if face == "blocking":
            client = memory.call(Client, URL, role="worker")
            without_waiting(client)
        else:
            client = Awaited(memory, None, lambda connection: None)
        params = client.define(MODEL)
        for _ in range(3 if steady else 0):
            client.exchange(params, STEP)
        refusing, before = Refusing(memory, 3), params.version
        assert client.exchange(params, STEP).version == before + 1
        assert len(refusing.asked) == 4
        assert client.exchange(params, STEP).version == before + 2
        np.testing.assert_array_equal(params["w"], -0.5 * params.version)
        assert len(memory.sockets) == 1, "the connection is the same"
        client.close()

    @pytest.mark.parametrize("face", ["blocking", "asyncio"])
    def test_it_is_given_up_when_the_time_is_up(self, memory: MemoryServer, face: str) -> None:
        client: Any
        if face == "blocking":
            client = memory.call(Client, URL, role="worker")
            clock = list(np.arange(0.0, 1000.0, 5.0))
            client._connection._repetitions.pause = Clock(client, clock).pause
            without_waiting(client)
        else:
            client = Awaited(memory, None, lambda connection: None)
        params = client.define(MODEL)
        refusing = Refusing(memory, 10**6)
        with pytest.raises(Unavailable, match=f"^{URL}: the server takes no pushes now$"):
            client.push(params, STEP)
        assert len(refusing.asked) > 5
        assert client.ping() >= 0
        assert len(memory.sockets) == 1
        client.close()

    def test_pushes_keep_their_order(self) -> None:
        """The second is under way when the first is refused; the third is made meanwhile."""
        server = FullServer()
        pair, params = ready(server)
        server.full = True
        one, two = pair.requests.push(ONES, params, None), pair.requests.push(ONES, params, None)
        pair.settle()
        three, ping = pair.requests.push(ONES, params, None), pair.requests.ping()
        server.full = False
        pair.settle()
        assert ping.done
        assert not any(push.done for push in (one, two, three))
        pair.session.ask_refused()
        pair.settle()
        assert [each.value().version for each in (one, two, three)] == [1, 2, 3]
        assert server.params() == stepped(3)

    @each_row("seed", range(50))
    def test_and_over_lost_connections(self, seed: int) -> None:
        chance, server = random.Random(seed), FullServer()
        pair, params = ready(server)
        pushes = []
        for _ in range(60):
            server.full = chance.random() < 0.5
            match chance.randrange(5):
                case 0 | 1:
                    pushes.append(pair.requests.push(ONES, params, None))
                case 2:
                    pair.session.ask_refused()
                case 3:
                    pair.cut()
                    pair.connect()
                case _:
                    pair.settle()
        server.full = False
        pair.settle()
        pair.session.ask_refused()
        pair.settle()
        assert [push.value().version for push in pushes] == [*range(1, len(pushes) + 1)]
        fetched = pair.room()
        pair.ask(pair.requests.fetch(fetched))
        assert values(fetched) == stepped(len(pushes))

    def test_an_error_that_says_refused_is_known_to_be(self) -> None:
        """A push that may have been applied must not be taken back."""
        full, server = Unavailable("full"), FullServer()
        pair, params = ready(server)
        fetch, push = pair.requests.fetch(params), pair.requests.push(ONES, params, None)
        assert given_up(fetch, full) is full
        unknown = given_up(push, full)
        assert isinstance(unknown, ConnectionLost)
        assert not isinstance(unknown, Refused)
        assert str(unknown).startswith("full; whether it has applied the push")
        server.full = True
        pair.settle()
        assert given_up(push, full) is full
        later = pair.requests.push(ONES, params, None)
        pair.cut()
        pair.session.pending.fail(ConnectionLost("gone"))
        for each in (push, later):
            assert isinstance(each.error, Unavailable)
            assert str(each.error).endswith("not now; since then it cannot be reached (gone)")


class Clock:
    """The pauses of a blocking client by a clock of its own."""

    def __init__(self, client: Client, times: list[float]) -> None:
        self._pause, self._times = client._connection._repetitions.pause, times

    def pause(self, _now: float, refusal: Unavailable, timeout: float) -> float:
        return self._pause(self._times.pop(0) / 5, refusal, timeout)


class FullServer(Server):
    """A server in memory that takes pushes or does not."""

    full = False

    def _take(self, message: Message, sink: Sink | None) -> None:
        if self.full and isinstance(message, Push):
            self.say(Error(message.id, "unavailable", "not now", {}, False))
        else:
            super()._take(message, sink)


class TestAlternatives:
    """``aiops://a,b``: servers of which one is used."""

    @contextlib.asynccontextmanager
    async def two(self) -> Any:
        network, servers, exits = testing.network(), [], contextlib.AsyncExitStack()
        async with exits:
            for name in "ab":
                with network.at(name):
                    servers.append(
                        await exits.enter_async_context(
                            aiops.serve(host="0.0.0.0", port=7, token="t", **SETTINGS)
                        )
                    )
            yield servers

    @testing.virtual()
    async def test_the_first_that_welcomes_is_used_until_it_ends(self) -> None:
        network, url = testing.network(), "aiops://a:7,b:7"
        async with self.two() as (a, b):
            with network.at("alice"):
                worker = await AsyncWorker(url, MODEL, token="t").connect()
                await worker.step(STEP)
                assert [len(s.connections.peers) for s in (a, b)] == [1, 0]
                network.kill("a")
                assert not (await worker.step(STEP)).used
                assert [len(s.connections.peers) for s in (a, b)] == [0, 1]
                network.revive("a")
                network.cut("alice")
                assert (await worker.step(STEP)).used
                assert [len(s.connections.peers) for s in (a, b)] == [0, 1], "b was the last"
                network.kill("b")
                assert not (await worker.step(STEP)).used
                assert [len(s.connections.peers) for s in (a, b)] == [1, 0]
                assert worker.url == url
                assert now() < 1
                await worker.close()

    @testing.virtual()
    async def test_one_that_is_full_is_passed_over(self) -> None:
        async with self.two() as (a, _b):
            a.connections.most = 0
            with testing.network().at("alice"):
                async with AsyncClient("aiops://a:7,b:7", token="t") as client:
                    assert now() == 0
                    assert client._session.server == "aiops://b:7"

    @testing.virtual()
    async def test_one_that_takes_no_push_is_left(self) -> None:
        async with self.two() as (a, b):
            with testing.network().at("alice"):
                worker = await AsyncWorker("aiops://a:7,b:7", MODEL, token="t").connect()
                a.post(Stopping(now()))
                assert not (await worker.step(STEP)).used, "it is another run"
                assert [len(s.connections.peers) for s in (a, b)] == [0, 1]
                await worker.close()

    def test_a_blocking_worker(self) -> None:
        with ServerThread(**SETTINGS) as a, ServerThread(**SETTINGS) as b:
            url = f"{a.url},{b.url.removeprefix('aiops://')}"
            with Worker(url, MODEL, timeout=PATIENCE) as worker:
                worker.step(STEP)
                assert a.call(lambda s: len(s.connections.peers)) == 1
                a.stop()
                assert not worker.step(STEP).used
                assert b.call(lambda s: len(s.connections.peers)) == 1
                assert worker.url == url

    @pytest.mark.parametrize("shards", [1, 2])
    def test_a_blocking_worker_that_is_refused(self, shards: int) -> None:
        """On shards it is welcomed by a lead before it is ready; the refusal is the last lead's."""
        settings = {**SETTINGS, "shards": shards}
        with ServerThread(**settings) as a, ServerThread(**settings) as b:
            url = f"{a.url},{b.url.removeprefix('aiops://')}"
            with Worker(url, MODEL, timeout=PATIENCE) as worker:
                worker.step(STEP)
                a.call(lambda s: s.post(Stopping(s._now())))
                assert [worker.step(STEP).used for _ in range(2)] == [False, True]
                assert b.call(lambda s: s.version) == 1


@pytest.mark.slow
class TestSockets:
    """Real sockets: the kernel of a host that is out of reach, and of a stopped process."""

    def test_a_host_that_does_not_answer(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """When the queue of those to be accepted is full, a kernel answers no request to connect.

        Each attempt is limited, so the client is asking again when there is a server.
        """
        monkeypatch.setattr(dialling, "ATTEMPT", SHORT)
        attempts = threading.Semaphore(0)
        env = CURRENT_ENVIRONMENT.get()

        def unconnected(host: str) -> socket.socket:
            attempts.release()
            return env.unconnected_socket(host)

        def connect(url: str) -> Client:
            changed = dataclasses.replace(
                env, unconnected_socket=unconnected, connect_unix=lambda host, port: None
            )
            CURRENT_ENVIRONMENT.set(changed)
            return Client(url, timeout=PATIENCE)

        with contextlib.ExitStack() as stack:
            full = stack.enter_context(socket.create_server(("127.0.0.1", 0), backlog=0))
            for _ in range(4):
                other = stack.enter_context(socket.socket())
                other.setblocking(False)
                other.connect_ex(full.getsockname())
            port = full.getsockname()[1]
            pool = stack.enter_context(ThreadPoolExecutor())
            connecting = pool.submit(connect, f"aiops://127.0.0.1:{port}")
            for _ in range(3):
                assert attempts.acquire(timeout=PATIENCE), "an attempt takes all the time"
            full.close()
            server = stack.enter_context(ServerThread(port=port, **SETTINGS))
            with connecting.result(PATIENCE) as client:
                assert client.url == server.url
                assert client.ping() > 0

    @pytest.mark.parametrize("near", [True, False])
    @pytest.mark.parametrize("face", ["blocking", "asyncio"])
    def test_a_process_that_is_stopped(
        self, face: str, near: bool, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(backoff, "ATTEMPT", SHORT)
        if not near:
            monkeypatch.setenv("AIOPS_NO_SHM", "1")
        flags = ("--policy", "asgd", "--kernels", "numpy")
        with server_process(*flags) as one, ServerThread(**SETTINGS) as two:
            one.signal(signal.SIGSTOP)
            both = f"{one.url},{two.url.removeprefix('aiops://')}"
            assert joined(face, both) == two.url
            with ThreadPoolExecutor() as pool:
                begun = time.monotonic()
                waiting = pool.submit(joined, face, one.url)
                eventually(lambda: time.monotonic() - begun > 2 * SHORT, "it tries for a while")
                assert not waiting.done()
                one.signal(signal.SIGCONT)
                assert waiting.result(PATIENCE) == one.url


def joined(face: str, url: str) -> str:
    """Join a server, and return the URL of the one that was joined."""
    if face == "blocking":
        with Client(url, timeout=PATIENCE) as client:
            return client._session.server

    async def main() -> str:
        async with AsyncClient(url, timeout=PATIENCE) as client:
            return client._session.server

    return asyncio.run(main())
