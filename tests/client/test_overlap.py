"""``overlap``: exchanges beside computing, on real sockets, and with faults in virtual time."""

from __future__ import annotations

import asyncio
import inspect
import time
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest

from aiops import AsyncWorker, Client, Worker, testing
from aiops.client import variables
from aiops.errors import BadPush, ConnectionLost, UsageError
from aiops.model.layout import Array
from aiops.serving.server import Server
from aiops.testing import ServerMachine
from tests import transports
from tests.certificates import ours
from tests.proxy import Proxy
from tests.rows import each_row
from tests.seeds import seeds
from tests.support import PATIENCE, ServerThread

START: dict[str, Array] = {"w": np.zeros(8, np.float32), "b": np.zeros(3, np.float64)}
DEPTHS = [1, 2]
STEPS = 12


def ones(params: Mapping[str, Array], times: float = 1) -> dict[str, Array]:
    return {name: np.full_like(array, times) for name, array in params.items()}


def serve(policy: str = "asgd", **settings: Any) -> ServerThread:
    options = {key: settings.pop(key) for key in ("gate", "push_codec", "state") if key in settings}
    return ServerThread(policy=policy, kernels="numpy", set={"lr": 1.0, **settings}, **options)


def value_of(server: ServerThread) -> float:
    with Client(server.url) as client:
        return float(client.fetch()["w"][0])


def gradients_at(server: ServerThread) -> int:
    return int(server.call(lambda s: s.engine.report()["gradients"]))


@each_row("transport", transports.TRANSPORTS)
@each_row("depth", DEPTHS)
def test_every_gradient_counts_once(
    depth: int, transport: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    transports.choose(transport, monkeypatch)
    with serve() as server:
        with Worker(server.url, START, overlap=depth) as worker:
            mine = ones(START)
            for step in range(STEPS):
                mine["w"][:] = 1  # the caller's: what is under way is a copy
                receipt = worker.step(mine)
                mine["w"][:] = np.nan
                assert not receipt.pushed
                assert -step - 1 <= worker.params["w"][0] <= depth - step - 1
                assert worker.params["w"][0] == worker.params["b"][0] == -worker.version
        assert gradients_at(server) == STEPS
        assert value_of(server) == -STEPS


@pytest.mark.parametrize("depth", DEPTHS)
def test_gradients_in_the_workers_room(depth: int) -> None:
    with serve() as server:
        with Worker(server.url, START, overlap=depth) as worker:
            for _ in range(STEPS):
                room = worker.room()
                for array in room.values():
                    array[...] = 1
                worker.step(room)
            assert worker.refresh() == STEPS
        assert value_of(server) == -STEPS


@pytest.mark.parametrize("depth", DEPTHS)
def test_over_tls(depth: int) -> None:
    """In records, of which many make up a gradient, both ways at once."""
    start = {"w": np.zeros(300_000, np.float32)}
    server = ServerThread(
        policy="asgd", kernels="numpy", set={"lr": 1.0}, **ours().settings(mutual=False)
    )
    with server, Worker(server.url, start, overlap=depth, tls=ours().anonymous) as worker:
        for _ in range(STEPS):
            worker.step(ones(start))
        assert worker.refresh() == STEPS
        assert (worker.params["w"] == -STEPS).all()


@pytest.mark.parametrize("depth", DEPTHS)
async def test_in_an_event_loop(depth: int) -> None:
    with serve() as server:
        async with AsyncWorker(server.url, START, overlap=depth) as worker:
            for _ in range(STEPS):
                receipt = await worker.step(ones)
                assert not receipt.pushed
        assert gradients_at(server) == STEPS
        assert value_of(server) == -STEPS


@pytest.mark.parametrize("kind", [Worker, AsyncWorker])
def test_a_gradient_is_sent_while_the_last_answer_comes(
    kind: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Although it is larger than what servers keep unsent otherwise while they read from a peer."""
    monkeypatch.setenv("AIOPS_NO_SHM", "1")
    start = {"w": np.zeros(6 << 18, np.float32)}

    def pause(server: Server, paused: bool) -> None:
        for peer in server.connections.peers.values():
            if paused:
                peer.link.pause_writing()
            else:
                peer.link.resume_writing()

    async def train(server: ServerThread) -> None:
        worker: Any = kind(server.url, start, overlap=2)
        if kind is AsyncWorker:
            await worker.connect()
        server.call(lambda s: pause(s, True))
        for _ in range(2):
            pushed = worker.step(ones(start))
            if kind is AsyncWorker:
                await pushed
        version = -1
        while version < 2:  # the second has come, and the first has not been answered
            await asyncio.sleep(0.001)
            version = gradients_at(server)
            assert worker.params.version == 0
            assert not worker._steps._background[-1][1].over
        server.call(lambda s: pause(s, False))
        closed = worker.close()
        if kind is AsyncWorker:
            await closed
        assert worker.params.version == 2

    with serve() as server:
        asyncio.run(asyncio.wait_for(train(server), PATIENCE))


@pytest.mark.parametrize("codec", ["topk:0.3", "onebit", "int8"])
@pytest.mark.parametrize("depth", DEPTHS)
def test_what_codecs_leave_out_is_fed_back_in_the_same_order(depth: int, codec: str) -> None:
    """The server's parameters are those of a worker that waits, to the last bit."""
    rng = np.random.default_rng(5)
    start = {"w": np.zeros((64, 16), np.float32)}
    given = [{"w": rng.standard_normal((64, 16)).astype(np.float32)} for _ in range(STEPS)]
    found = []
    for overlap in (0, depth):
        with serve(push_codec=(codec,)) as server:
            with Worker(server.url, start, overlap=overlap) as worker:
                for gradients in given:
                    worker.step(gradients)
            found.append(server.call(lambda s: s.engine.store.current.arena.views["w"].tobytes()))
    assert found[0] == found[1]


@each_row("skipped", ["accumulate", "reapply", "discard"])
def test_behind_a_gate(skipped: str) -> None:
    gate = f"periodic:k_push=3,k_fetch=2,combine=sum,skipped={skipped}"
    with serve(gate=gate) as server:
        with Worker(server.url, START, overlap=True) as worker:
            for _ in range(STEPS):
                worker.step(ones(worker.params))
        assert gradients_at(server) == (STEPS if skipped == "reapply" else STEPS // 3)
        assert value_of(server) == (-STEPS // 3 if skipped == "discard" else -STEPS)


def test_downpour_does_not_wait_for_a_fetch() -> None:
    with serve("downpour", n_push=2, n_fetch=2) as server:
        with Worker(server.url, START, overlap=True) as worker:
            for step in range(1, STEPS + 1):
                assert not worker.step(ones(worker.params)).pushed
                np.testing.assert_array_equal(worker.params["w"], -step)
        assert value_of(server) == -STEPS


def test_what_a_server_refuses_is_told_by_the_next_call() -> None:
    with serve() as server:
        with Worker(server.url, START, overlap=True) as worker:
            worker.step(ones(START))
            bad = ones(START)
            bad["w"][2] = np.nan
            worker.step(bad)
            with pytest.raises(BadPush, match=r"step 2, whose push .*'w'"):
                worker.push_rest()
            worker.step(ones(START))
            worker.step(bad)
            worker._background.done.wait()  # type: ignore[union-attr]
            with pytest.raises(BadPush, match="step 4"):
                worker.step(ones(START))
            worker.step(bad)
            with pytest.raises(BadPush, match="step 5"):
                worker.close()
        assert value_of(server) == -2


@pytest.mark.parametrize("kind", [Worker, AsyncWorker])
async def test_a_step_that_tells_it_does_not_count_in_the_momentum(kind: Any) -> None:
    start = {"w": np.zeros((8, 8), np.float32), "b": np.zeros(3, np.float32)}

    async def called(result: Any) -> Any:
        return await result if inspect.isawaitable(result) else result

    def momentum(worker: Any) -> Array:
        array: Array = worker._steps._directions.arrays()["w"].copy()
        return array

    with ServerThread(policy="schedule-free", kernels="numpy") as server:
        worker = kind(server.url, start, overlap=True)
        if kind is AsyncWorker:
            await worker.connect()
        bad = ones(start)
        bad["b"][2] = np.nan
        await called(worker.step(bad))
        async with asyncio.timeout(PATIENCE):
            while not worker._steps._background[0][1].over:  # noqa: ASYNC110 (a thread ends it)
                await asyncio.sleep(0)
        before = momentum(worker)
        with pytest.raises(BadPush, match="step 1"):
            await called(worker.step(ones(start, 7)))
        np.testing.assert_array_equal(momentum(worker), before)
        await called(worker.step(ones(start, 7)))
        assert (momentum(worker) != before).all()
        await called(worker.close())


@pytest.mark.parametrize("depth", DEPTHS)
def test_ctrl_c_does_not_wait_for_a_slow_link(depth: int) -> None:
    """A gradient of 400 kB takes a hundred seconds to be sent."""
    start = {"w": np.zeros(100_000, np.float32)}
    with serve() as server:
        with Worker(server.url, start):
            pass
        with Proxy(server.url) as link:
            worker = Worker(link.url, start, overlap=depth)
            link.throttle("up", 4_000)
            for _ in range(depth):
                worker.step(ones(start))
            began = time.monotonic()
            with pytest.raises(KeyboardInterrupt), worker:
                raise KeyboardInterrupt
            assert time.monotonic() - began < PATIENCE
            worker._thread.join(PATIENCE)
            assert not worker._thread.is_alive()
        assert gradients_at(server) == 0


class TestFaults:
    @pytest.mark.parametrize("transport", ["tcp", "near", "shards"])
    @pytest.mark.parametrize("depth", DEPTHS)
    def test_connections_that_are_lost(
        self, depth: int, transport: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """What is under way is sent again, in order: none is lost, none overtakes another."""
        transports.choose(transport, monkeypatch)

        def cut(server: Server) -> None:
            for peer in list(server.connections.peers.values()):
                peer.link.fault(ConnectionLost("cut"))

        with serve() as server:
            with Worker(server.url, START, overlap=depth) as worker:
                for step in range(STEPS):
                    worker.step(ones(START))
                    if step % 3 == 2:
                        server.call(cut)
            assert gradients_at(server) == STEPS
            assert value_of(server) == -STEPS

    @pytest.mark.parametrize("seed", seeds(4))
    @pytest.mark.parametrize("depth", DEPTHS)
    def test_a_server_that_dies_and_comes_back(self, depth: int, seed: int) -> None:
        """What was under way is sent again under its numbers: each gradient counts once."""

        async def train(url: str) -> None:
            async with AsyncWorker(url, START, overlap=depth, timeout=60) as worker:
                for _ in range(40):
                    await asyncio.sleep(0.01)
                    receipt = await worker.step(ones(START))
                    assert receipt.used

        async def main() -> None:
            machine = ServerMachine(
                policy="asgd", set={"lr": 1.0}, state="state", acks="durable",
                snapshot_every=0.1, seed=seed,
            )  # fmt: skip
            await machine.start()
            training = asyncio.create_task(train(machine.url))
            for point in ("journal.torn", "journal.synced", "journal.synced"):
                machine.crash_at(point, 3 + seed, power=True)
                await testing.until(lambda: not machine.running or training.done(), "a crash")
                if machine.running:
                    break
                await machine.start()
            await training
            engine = machine.server.engine
            assert engine.report()["version"] == 40
            assert (engine.defined_store.current.arena.views["w"] == -40).all()
            await machine.stop()

        testing.run(main(), seed=seed)


class TestSettings:
    def test_by_the_environment(self, monkeypatch: pytest.MonkeyPatch) -> None:
        assert variables.overlap(None, {}) == 0
        assert variables.overlap(None, {"AIOPS_OVERLAP": "2"}) == 2
        assert variables.overlap(False, {"AIOPS_OVERLAP": "2"}) == 0
        assert variables.overlap(True, {}) == 1
        monkeypatch.setenv("AIOPS_OVERLAP", "1")
        with serve() as server, Worker(server.url, START) as worker:
            assert not worker.step(ones(START)).pushed

    @each_row("wrong", [-1, 9, 1.5, "2"])
    def test_numbers_that_cannot_be(self, wrong: Any) -> None:
        with pytest.raises(UsageError, match=r"overlap is .*: give False"):
            Worker("aiops://127.0.0.1:1", START, overlap=wrong)
        with pytest.raises(UsageError, match=r"overlap is .*: give False"):
            AsyncWorker("aiops://127.0.0.1:1", START, overlap=wrong)
        with pytest.raises(UsageError, match="AIOPS_OVERLAP is 'many': give"):
            variables.overlap(None, {"AIOPS_OVERLAP": "many"})

    def test_policies_that_wait_refuse_it(self) -> None:
        waits = r"does not work with overlap: .* waits for other"
        server = ServerThread(policy="hardsync", workers=1, kernels="numpy")
        with server, pytest.raises(UsageError, match=waits):
            Worker(server.url, START, overlap=True)

    def test_the_servers_memory_is_of_no_use(self) -> None:
        with serve() as server, pytest.raises(UsageError, match="arrays of its own"):
            Worker(server.url, START, overlap=True, views=True)


class TestFrameworks:
    """Gradients live in the framework's memory, which it uses again; parameters come into its."""

    def test_torch(self) -> None:
        torch = pytest.importorskip("torch")
        from aiops.client.torch import RemoteOptimizer

        with serve() as server:
            weight = torch.nn.Parameter(torch.zeros(4))
            with RemoteOptimizer([("w", weight)], server.url, overlap=2) as optimizer:
                for step in range(STEPS):
                    optimizer.zero_grad(set_to_none=False)
                    weight.sum().backward()
                    optimizer.step()
                    assert -step - 1 <= float(weight.detach()[0]) <= 1 - step
                assert optimizer.refresh() == STEPS
                assert weight.tolist() == [-STEPS] * 4
            assert gradients_at(server) == STEPS

    def test_jax(self) -> None:
        jax = pytest.importorskip("jax")
        from aiops.client.jax import RemoteTree

        with serve() as server:
            with RemoteTree({"w": jax.numpy.zeros(4)}, server.url, overlap=2) as tree:
                for step in range(STEPS):
                    tree.step(jax.grad(lambda params: params["w"].sum())(tree.params))
                    assert -step - 1 <= float(tree.params["w"][0]) <= 1 - step
                assert tree.refresh() == STEPS
                assert tree.params["w"].tolist() == [-STEPS] * 4
            assert gradients_at(server) == STEPS
