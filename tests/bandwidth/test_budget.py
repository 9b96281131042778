"""The bandwidth budget: what crosses, who is refused, who is let wait."""

from __future__ import annotations

import asyncio
import contextlib
import io
import struct
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console
from safetensors.numpy import save_file

import aiops
from aiops import testing
from aiops.bandwidth.token_bucket import Budget
from aiops.cli.stats import tables
from aiops.common import urls
from aiops.engine.engine import Engine
from aiops.engine.events import BudgetTick
from aiops.errors import BadPush, ConflictError, ConnectionLost, Unavailable, UsageError
from aiops.net.paced_transport import PacedTransport
from aiops.net.transport import MessageTransport
from aiops.serving.config import Config
from aiops.serving.server import Server
from aiops.wire.messages import Ack, Fetch, FetchedParams
from tests.inline import Inline
from tests.recording import replayed
from tests.support import PATIENCE, ServerThread, assert_same, server_process

KB = 1000


class Counter:
    """What every socket of a server moves, and when by the server's own reading of the clock.

    The bytes are counted a second time where they move, so that none can go around the budget.
    """

    def __init__(self) -> None:
        self.moved: list[tuple[float, int, int]] = []  # when, on which connection, how many bytes
        self.read = self.written = 0

    def busiest(self, flow: int | None = None) -> int:
        """Return the most bytes in any window of one second."""
        assert sum(nbytes for _when, _flow, nbytes in self.moved) == self.read + self.written
        items = [(t, n) for t, whose, n in self.moved if flow is None or whose == flow]
        most = total = first = 0
        for when, nbytes in items:
            total += nbytes
            while items[first][0] < when - 1.0:
                total -= items[first][1]
                first += 1
            most = max(most, total)
        return most


@pytest.fixture
def counter(monkeypatch: pytest.MonkeyPatch) -> Counter:
    counter = Counter()
    crossed, received, set_up = (
        Budget.crossed,
        PacedTransport.buffer_updated,
        PacedTransport._set_up,
    )

    def noted(self: Budget, flow: int, nbytes: int, now: float) -> None:
        counter.moved.append((now, flow, nbytes))
        crossed(self, flow, nbytes, now)

    def buffer_updated(self: PacedTransport, nbytes: int) -> None:
        counter.read += nbytes
        received(self, nbytes)

    def wrapped(self: PacedTransport, transport: Any) -> None:
        write = transport.write

        def counted(data: Any) -> None:
            counter.written += len(data)
            write(data)

        transport.write = counted
        set_up(self, transport)

    monkeypatch.setattr(Budget, "crossed", noted)
    monkeypatch.setattr(PacedTransport, "buffer_updated", buffer_updated)
    monkeypatch.setattr(PacedTransport, "_set_up", wrapped)
    return counter


def model(nbytes: int, value: float = 0.0) -> dict[str, Any]:
    return {"w": np.full(nbytes // 4, value, np.float32)}


class Busy:
    """Workers in threads that exchange all the time until they are told to stop."""

    def __init__(self, url: str, nbytes: int) -> None:
        self._url, self._nbytes = url, nbytes
        self._threads: list[threading.Thread] = []
        self._stop = threading.Event()
        self.exchanges: list[int] = []
        self._made = threading.Condition()
        self.errors: list[BaseException] = []

    def join(self) -> None:
        number = len(self.exchanges)
        self.exchanges.append(0)
        thread = threading.Thread(target=self._run, args=(number,), daemon=True)
        self._threads.append(thread)
        thread.start()

    def wait_for(self, exchanges: int) -> None:
        """Wait until each has made so many."""
        with self._made:
            done = self._made.wait_for(lambda: min(self.exchanges) >= exchanges, PATIENCE)
        assert done

    def end(self) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join(PATIENCE)
            assert not thread.is_alive()
        assert not self.errors

    def _run(self, number: int) -> None:
        try:
            with aiops.Client(self._url, role="worker", name=f"w{number}") as client:
                params = client.define(model(self._nbytes))
                gradients = model(self._nbytes, 1.0)
                while not self._stop.is_set():
                    client.exchange(params, gradients)
                    with self._made:
                        self.exchanges[number] += 1
                        self._made.notify_all()
        except BaseException as error:
            self.errors.append(error)


async def exchange(url: str, nbytes: int, until: float) -> int:
    """Be such a worker in virtual time, until that time; return how many exchanges it made."""
    made = 0
    async with aiops.AsyncClient(url, role="worker") as client:
        params = await client.define(model(nbytes))
        while asyncio.get_running_loop().time() < until:
            await client.exchange(params, model(nbytes, 1.0))
            made += 1
    return made


def utilisation(server: Server) -> float:
    """Return the share of the budget that crossed while bytes waited."""
    share: float | None = server.engine.report()["budget"]["utilisation"]
    assert share is not None, "nobody ever waited"
    return share


def serve(policy: str = "asgd", **settings: Any) -> contextlib.AbstractAsyncContextManager[Server]:
    return aiops.serve(policy=policy, kernels="numpy", **settings)


async def connection(url: str) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """Connect to a server without a client."""
    return await asyncio.open_connection(*urls.parse(url))


class TestCeiling:
    @testing.virtual()
    async def test_no_second_sees_more_and_little_is_left(self, counter: Counter) -> None:
        async with serve(bandwidth_budget="1MB/s") as server:
            workers = [exchange(server.url, 200 * KB, 20.0) for _ in range(3)]
            assert min(await asyncio.gather(*workers)) >= 10
            assert utilisation(server) >= 0.9
        assert counter.busiest() <= 1000 * KB

    @pytest.mark.slow
    def test_over_sockets_of_the_machine(self, counter: Counter) -> None:
        """Where what there is to read is asked of the kernel."""
        with ServerThread(policy="asgd", bandwidth_budget="400KB/s") as server:
            workers = Busy(server.url, 40 * KB)
            for _ in range(3):
                workers.join()
            workers.wait_for(2)
            workers.end()
        assert counter.busiest() <= 400 * KB

    def test_workers_that_join_and_leave(self, counter: Counter) -> None:
        async def main() -> float:
            async with serve(bandwidth_budget="1MB/s") as server:
                untils = [10.0]
                working = [asyncio.create_task(exchange(server.url, 50 * KB, untils[0]))]
                for second in range(1, 6):
                    await asyncio.sleep(1.0)
                    untils.append(10.0 if second > 4 else 5.0 + second)
                    working.append(asyncio.create_task(exchange(server.url, 50 * KB, untils[-1])))
                await asyncio.sleep(4.5)
                share = utilisation(server)
                assert min(await asyncio.gather(*working)) >= 1
                return share

        assert testing.run(main()) >= 0.7
        assert counter.busiest() <= 1000 * KB

    @testing.virtual()
    async def test_strangers_count(self, counter: Counter) -> None:
        """Who has not joined is held to the ceiling too, and keeps nobody out for ever."""
        async with serve(bandwidth_budget="20KB/s") as server:
            strangers = [await connection(server.url) for _ in range(30)]
            for _reader, writer in strangers:
                writer.write(b"\xce" + struct.pack(">I", 4000) + bytes(3000))
            async with aiops.AsyncClient(server.url) as client:
                report = await client.stats()
            for _reader, writer in strangers:
                writer.close()
        assert counter.busiest() <= 20 * KB
        assert counter.read + counter.written >= 40 * KB  # it had to hold
        assert report["budget"]["bytes_per_second"] == 20 * KB

    @testing.virtual()
    async def test_one_worker_is_held_to_its_own_budget(self, counter: Counter) -> None:
        async with serve(bandwidth_budget="1MB/s", worker_budget="200KB/s") as server:
            workers = [asyncio.create_task(exchange(server.url, 50 * KB, 10.0)) for _ in range(3)]
            await testing.until(lambda: len(server.connections.peers) == 3, "all are there")
            flows = [peer.link.flow for peer in server.connections.peers.values()]
            assert min(await asyncio.gather(*workers)) >= 10
            assert utilisation(server) >= 0.7
        for flow in flows:
            assert counter.busiest(flow) <= 200 * KB

    @testing.virtual()
    async def test_a_worker_that_connects_again_has_no_new_budget(self, counter: Counter) -> None:
        async with serve(worker_budget="50KB/s") as server:
            with testing.network().at("alice"):
                client = await aiops.AsyncClient(server.url, role="worker").connect()
            await client.define(model(8 * KB))
            for _ in range(12):
                await client.fetch()
                testing.network().cut("alice")
            await client.close()
        assert len({flow for _when, flow, _nbytes in counter.moved}) > 3
        assert counter.busiest() <= 50 * KB

    @pytest.mark.slow
    def test_the_other_event_loop(self) -> None:
        """The server as a process, which runs on uvloop where that is installed."""
        with server_process("--policy", "asgd", "--bandwidth-budget", "1MB/s") as server:
            workers = Busy(server.url, 100 * KB)
            for _ in range(3):
                workers.join()
            with aiops.Client(server.url) as client:
                workers.wait_for(2)
                budget = client.stats()["budget"]
            workers.end()
        assert 0 < budget["peak"] <= 1000 * KB

    def test_where_nobody_can_tell_what_there_is_to_read(self, counter: Counter) -> None:
        """As on systems without FIONREAD: idle connections take nothing from those that talk."""

        async def main() -> float:
            async with (
                serve(bandwidth_budget="200KB/s") as server,
                contextlib.AsyncExitStack() as stack,
            ):
                for number in range(20):
                    idle = aiops.AsyncClient(server.url, name=f"idle-{number}")
                    await stack.enter_async_context(idle)
                workers = [exchange(server.url, 20 * KB, 20.0) for _ in range(3)]
                assert min(await asyncio.gather(*workers)) >= 1
                return utilisation(server)

        assert testing.run(main()) >= 0.7
        assert counter.busiest() <= 200 * KB

    @testing.virtual()
    async def test_connections_that_wait_hold_none_of_it(self, counter: Counter) -> None:
        """More of them than could be granted what is read at a time."""
        async with serve(bandwidth_budget="100KB/s") as server:
            await asyncio.gather(*(exchange(server.url, 8 * KB, 10.0) for _ in range(12)))
            assert utilisation(server) >= 0.9
        assert counter.busiest() <= 100 * KB

    def test_without_a_budget_nothing_is_in_the_way(self) -> None:
        with ServerThread(policy="asgd") as server, aiops.Client(server.url) as client:
            kinds = server.call(
                lambda s: {type(peer.link) for peer in s.connections.peers.values()}
            )
            assert client.stats()["budget"] is None
            assert "seconds_per_byte" not in client.plan
        assert kinds == {MessageTransport}


class TestShown:
    def test_the_table_of_statistics(self) -> None:
        inline = Inline("fasgd", budget=1000 * KB, worker_budget=300 * KB, gate="bfasgd")
        inline.define({"w": np.zeros(10, np.float32)})
        inline.join(1)
        assert "used while bytes waited" not in shown(inline)
        inline.post(BudgetTick(2.0, 27 * KB, 270 * KB, 290 * KB, 500 * KB, 1, True))
        text = shown(inline)
        assert "budget  1.0 MB/s, 300 kB/s each  last second 270 kB, busiest 290 kB" in text
        assert "90.0% used while bytes waited" in text
        assert "c_push 0  c_fetch 0" in text

    def test_without_a_budget(self) -> None:
        inline = Inline("asgd")
        assert "budget" not in shown(inline)


def shown(inline: Inline) -> str:
    console = Console(width=200, record=True, file=io.StringIO())
    console.print(tables("aiops://localhost", inline.engine.report()))
    return console.export_text()


class TestWhole:
    @testing.virtual()
    async def test_a_model_of_more_than_a_second_arrives_whole(self, counter: Counter) -> None:
        arrays = {f"w{i}": np.random.default_rng(i).random(10_000, np.float32) for i in range(4)}
        async with (
            serve(bandwidth_budget="100KB/s") as server,
            aiops.AsyncClient(server.url, role="worker") as client,
        ):
            assert_same(await client.define(arrays), arrays)
        assert counter.busiest() <= 100 * KB
        assert asyncio.get_running_loop().time() > 1

    @testing.virtual()
    async def test_who_is_paced_is_neither_dropped_nor_gives_up(self) -> None:
        """Seconds for an answer, where a stall is half a second, and so is the patience."""
        settings = {"stall_deadline": 0.5, "min_rate": 100 * KB, "worker_deadline": 0.1}

        async def define(url: str) -> Any:
            async with aiops.AsyncClient(url, role="worker", timeout=0.5) as client:
                return await client.define(model(30 * KB, 1.0))

        async with serve(bandwidth_budget="60KB/s", **settings) as server:
            found = await asyncio.gather(*(define(server.url) for _ in range(3)))
            assert asyncio.get_running_loop().time() > 2
        for params in found:
            assert_same(params, model(30 * KB, 1.0))

    @testing.virtual()
    async def test_who_stalls_by_itself_is_dropped_all_the_same(self) -> None:
        async with serve(bandwidth_budget="1MB/s", stall_deadline=20.0) as server:
            reader, writer = await connection(server.url)
            writer.write(b"\xce" + struct.pack(">I", 4000) + bytes(10))
            with contextlib.suppress(ConnectionResetError):
                assert await reader.read() == b""
            assert 10 <= asyncio.get_running_loop().time() <= 20.5
            writer.close()


class TestRefused:
    def test_a_tensor_that_takes_too_long(self) -> None:
        with ServerThread(policy="asgd", bandwidth_budget="500KB/s") as server:
            server.call(lambda s: setattr(s.engine.admission, "budget", 1 * KB))
            with aiops.Client(server.url, role="worker") as client:
                with pytest.raises(BadPush, match=r"'w' has 70000 bytes.* is 1\.22KB/s"):
                    client.define(model(70_000))
                client.define({"a": model(35_000)["w"][:5000], "b": model(20_000)["w"]})

    def test_a_model_to_begin_with(self, tmp_path: Path) -> None:
        path = tmp_path / "model.safetensors"
        save_file(model(70_000), str(path))
        with pytest.raises(ConflictError, match=r"'w' has 70000 bytes.* is 1\.22KB/s"):
            ServerThread(policy="asgd", bandwidth_budget="1KB/s", init=path).__enter__()

    @pytest.mark.parametrize("name", ["bandwidth_budget", "worker_budget"])
    def test_a_budget_that_is_none(self, name: str) -> None:
        flag = "--" + name.replace("_", "-")
        for text in ("much", "2M", "1B/s"):
            with pytest.raises(UsageError, match=flag):
                Config(**{name: text})

    def test_a_worker_with_more_than_there_is(self) -> None:
        with pytest.raises(UsageError, match="--worker-budget 2MB/s is more than"):
            Config(bandwidth_budget="1MB/s", worker_budget="2MB/s")

    @testing.virtual()
    async def test_more_connections_than_a_budget_has_bytes_for(self) -> None:
        async with serve(bandwidth_budget="1KB/s") as server:
            assert server.connections.most == 55
            server.connections.most = 1
            async with aiops.AsyncClient(server.url):
                with pytest.raises((Unavailable, ConnectionLost)):
                    await aiops.AsyncClient(server.url, timeout=1.0).connect()


class TestEngine:
    @pytest.mark.parametrize("codecs", [(), ("int8",)], ids=["raw", "coded"])
    def test_answers_bring_the_constants(self, codecs: tuple[str, ...]) -> None:
        inline = Inline("fasgd", budget=1000 * KB, gate="bfasgd", fetch_codec=codecs)
        inline.define({"w": np.zeros(10, np.float32)})
        inline.join(1)
        for tick in range(300):
            inline.post(BudgetTick(2.0 + tick / 10, 96 * KB, 960 * KB, 990 * KB, 500 * KB, 1, True))
        ack = inline.push(1, {"w": np.ones(10, np.float32)})
        assert isinstance(ack, Ack)
        assert inline.engine.budget is not None
        assert ack.gate == inline.engine.budget.constants(ack.vbar)
        assert ack.gate[0] > 0
        params = inline.receive(1, Fetch(7, -1, coded=bool(codecs)))
        assert isinstance(params, FetchedParams)
        assert params.gate == ack.gate

    def test_without_a_budget_there_are_none(self) -> None:
        inline = Inline("fasgd")
        inline.define({"w": np.zeros(10, np.float32)})
        inline.join(1)
        ack = inline.push(1, {"w": np.ones(10, np.float32)})
        assert isinstance(ack, Ack)
        assert ack.gate == ()

    def test_the_gate_is_steered_and_a_replay_steers_the_same(
        self, tmp_path: Path, counter: Counter
    ) -> None:
        path = tmp_path / "run.journal"

        async def step(url: str, until: float) -> None:
            """Be a worker whose gate says what travels, with mini-batches of 5 ms."""
            gradients = model(20 * KB, 1.0)
            async with aiops.AsyncWorker(url, model(20 * KB)) as worker:
                while asyncio.get_running_loop().time() < until:
                    await asyncio.sleep(0.005)
                    await worker.step(gradients)

        async def main() -> tuple[Engine, dict[str, Any]]:
            settings = {"gate": "bfasgd", "record": path, "bandwidth_budget": "500KB/s"}
            async with serve("fasgd", **settings) as server:
                workers = [asyncio.create_task(step(server.url, 10.0)) for _ in range(3)]
                budget = server.engine.budget
                assert budget is not None
                await testing.until(lambda: budget.depth > 1, "the gate is closed by a step")
                gate = server.engine.report()["budget"]
                await asyncio.gather(*workers)
                return server.engine, gate

        engine, gate = testing.run(main())
        assert gate["c_push"] == gate["c_fetch"] > 0
        assert counter.busiest() <= 500 * KB
        assert engine.budget is not None
        again = replayed(path)
        assert again.complete
        assert again.engine.budget is not None
        assert again.engine.budget.depth == engine.budget.depth
        assert again.engine.report()["budget"] == engine.report()["budget"]
        assert engine.budget.report(None)["peak"] > 0
