"""A server's life: how it starts, what it says, how it ends, and the files it reads and writes."""

from __future__ import annotations

import asyncio
import math
import os
import socket
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import uvloop

import aiops
from aiops.algorithms.base import Algorithm, Decision, Policy
from aiops.algorithms.optimizers import sgd
from aiops.client import Client, Worker
from aiops.engine.events import CopyDue
from aiops.errors import ConflictError, ConnectionLost, Unavailable, UsageError
from aiops.kernels.rule import Rule
from aiops.model.layout import Array
from aiops.serving import persistence
from aiops.serving.port import Port
from aiops.serving.safetensors_io import read_model, write_model
from aiops.serving.state.state_files import StateFiles
from aiops.store.parameters import UpdateJob
from aiops.store.updater import Updater
from tests.peers import eventually
from tests.proxy import Proxy
from tests.support import PATIENCE, ServerThread


def ones(params: Any, times: float = 1) -> dict[str, Array]:
    return {name: np.full_like(array, times) for name, array in params.items()}


@pytest.fixture
def server() -> Iterator[ServerThread]:
    with ServerThread(policy="asgd", set={"lr": 1}, kernels="numpy") as running:
        yield running


def test_a_warning_of_the_run_is_logged_once_though_the_server_starts_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """One that follows from the settings is logged at each start, as these are given again."""
    given = {"policy": "fasgd", "set": {"lr": 0.5}, "kernels": "numpy", "state": tmp_path}
    for start in range(2):
        with (
            ServerThread(**given, push_codec=("topk:0.5",)) as server,
            Client(server.url, role="worker", name="w") as client,
        ):
            params = client.define({"w": np.zeros(8, np.float32)})
            for _ in range(200 if not start else 1):
                client.exchange(params, ones(params, 1e-5))
            near = client.stats()["warnings"]
            assert ["within 10 %" in text for text in near] == [False, True]
    logged = [each.getMessage() for each in caplog.records if each.levelname == "WARNING"]
    assert [text in near for text in logged] == [True] * 3
    assert ["within 10 %" in text for text in logged] == [False, True, False]


class TestListening:
    @pytest.mark.parametrize("loop", [asyncio.new_event_loop, uvloop.new_event_loop])
    def test_a_port_that_is_lost_before_it_listens(
        self,
        loop: Callable[[], asyncio.AbstractEventLoop],
        tmp_path: Path,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        """Another server was bound to it too, and was the first to listen: no generation begins."""
        bind, others = Port.bind, list[socket.socket]()

        async def late(self: Port, *given: Any) -> asyncio.Server:
            listener = await bind(self, *given)
            others.append(socket.create_server(listener.sockets[0].getsockname()))
            return listener

        async def main() -> None:
            async with aiops.serve(policy="asgd", port=0, state=tmp_path / "s"):
                pass

        monkeypatch.setattr(Port, "bind", late)
        with (
            asyncio.Runner(loop_factory=loop) as runner,
            pytest.raises(UsageError, match=r"cannot listen on 127.0.0.1:0: .*in use"),
        ):
            runner.run(main())
        others[0].close()
        assert "generation" not in [path.name for path in (tmp_path / "s").iterdir()]

    @pytest.mark.parametrize("loop", [asyncio.new_event_loop, uvloop.new_event_loop])
    def test_the_port_is_held_when_a_generation_begins(
        self,
        loop: Callable[[], asyncio.AbstractEventLoop],
        tmp_path: Path,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        """Another server cannot bind to it any more, and a client's connection is not refused."""
        begin, clients = StateFiles.begin_rows, list[socket.socket]()
        with socket.create_server(("127.0.0.1", 0)) as other:
            port = other.getsockname()[1]

        def begun(self: StateFiles, *given: Any, **flags: Any) -> Any:
            found = begin(self, *given, **flags)
            with pytest.raises(OSError, match="in use"):
                socket.create_server(("127.0.0.1", port))
            clients.append(socket.create_connection(("127.0.0.1", port), PATIENCE))
            return found

        async def main() -> None:
            async with aiops.serve(policy="asgd", port=port, state=tmp_path / "s") as server:
                clients[0].setblocking(False)
                running = asyncio.get_running_loop()
                async with asyncio.timeout(PATIENCE):  # it is accepted, and closed for what it says
                    await running.sock_sendall(clients[0], bytes(64))
                    await running.sock_recv(clients[0], 1)
                assert server.url.endswith(str(port))

        monkeypatch.setattr(StateFiles, "begin_rows", begun)
        with asyncio.Runner(loop_factory=loop) as runner:
            runner.run(main())
        clients[0].close()

    def test_a_port_in_use(self, server: ServerThread, tmp_path: Path) -> None:
        port = int(server.url.rpartition(":")[2])
        journal = tmp_path / "run.journal"
        with (
            pytest.raises(UsageError, match=rf"cannot listen on 127.0.0.1:{port}.*in use"),
            ServerThread(policy="asgd", port=port, record=journal),
        ):
            pass
        assert not journal.exists()

    def test_over_ipv6(self) -> None:
        with ServerThread(policy="asgd", host="::1") as server:
            assert server.url.startswith("aiops://[::1]:")
            with Client(server.url) as client:
                assert client.url == server.url
                client.ping()

    def test_beyond_loopback_with_a_token(self) -> None:
        with ServerThread(policy="asgd", host="0.0.0.0", token="open sesame") as server:
            port = server.url.rpartition(":")[2]
            with Client(f"aiops://127.0.0.1:{port}", token="open sesame") as client:
                client.ping()

    def test_settings_that_do_not_exist(self) -> None:
        with (
            pytest.raises(UsageError, match="no setting 'polcy'; did you mean 'policy'"),
            ServerThread(polcy="asgd"),
        ):
            pass

    def test_settings_that_conflict(self) -> None:
        with pytest.raises(ConflictError, match="--workers N"), ServerThread(policy="hardsync"):
            pass

    @pytest.mark.filterwarnings("error")
    async def test_inside_an_event_loop(self) -> None:
        async with (
            aiops.serve(policy="asgd", port=0, set={"lr": 1}, kernels="numpy") as server,
            aiops.AsyncClient(server.url, role="worker") as client,
        ):
            params = await client.define({"w": np.zeros(3, np.float32)})
            assert (await client.exchange(params, ones(params))).version == 1
            url = server.url
        with pytest.raises(ConnectionLost):
            async with aiops.AsyncClient(url, timeout=0.2):
                pass

    def test_too_many_connections(self) -> None:
        with ServerThread(policy="asgd", max_connections=2) as server:
            with Client(server.url), Client(server.url) as second:
                with pytest.raises(Unavailable, match="has its 2 connections already"):
                    Client(server.url, timeout=0.2)
                second.ping()
            eventually(
                lambda: server.call(lambda s: len(s.connections.peers)) == 0, "both are gone"
            )
            with Client(server.url) as client:
                client.ping()


class TestSaving:
    def test_every_so_often(self, tmp_path: Path) -> None:
        """What can be read meanwhile is always one whole version."""
        path = tmp_path / "model.safetensors"
        settings: dict[str, Any] = {"save": path, "save_every": 0.005, "set": {"lr": 1}}
        with (
            ServerThread(policy="asgd", kernels="numpy", **settings) as server,
            Worker(server.url, {"w": np.zeros(20_000, np.float32)}) as worker,
        ):
            seen: set[float] = set()

            def look() -> bool:
                worker.step(ones(worker.params))
                if path.exists():
                    found = read_model(path)["w"]
                    assert (found == found[0]).all()
                    seen.add(float(found[0]))
                return len(seen) >= 3

            eventually(look, "three different versions have been saved")
            last = worker.version
        np.testing.assert_array_equal(read_model(path)["w"], np.full(20_000, -last))

    def test_a_slow_write_does_not_overtake_the_last(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        path = tmp_path / "model.safetensors"
        begun, go_on = threading.Event(), threading.Event()
        versions: list[int] = []

        def slow(where: Path, arrays: Any, version: int, tables: Any) -> None:
            if not begun.is_set():
                begun.set()
                assert go_on.wait(PATIENCE)
            write_model(where, arrays, version, tables)
            versions.append(version)

        monkeypatch.setattr(persistence, "write_model", slow)
        settings: dict[str, Any] = {"save": path, "save_every": 0.001, "set": {"lr": 1}}
        with ServerThread(policy="asgd", kernels="numpy", **settings) as server:
            with Worker(server.url, {"w": np.zeros(3, np.float32)}) as worker:
                assert begun.wait(PATIENCE)
                worker.step(ones(worker.params))
            server.call(lambda s: s.stop())
            server.call(lambda s: asyncio.get_running_loop().call_soon(go_on.set))
        assert versions == [0, 1]
        np.testing.assert_array_equal(read_model(path)["w"], [-1, -1, -1])

    def test_a_copy_that_nothing_waits_for_is_let_go(self) -> None:
        """An earlier start of a server with a state may have requested it."""
        with (
            ServerThread(policy="asgd", kernels="numpy", set={"lr": 1}) as server,
            Worker(server.url, {"w": np.zeros(3, np.float32)}) as worker,
        ):
            worker.step(ones(worker.params))
            server.call(lambda s: s.post(CopyDue(s._now())))
            worker.step(ones(worker.params))
            assert worker.stats()["versions_alive"] == 1

    def test_no_model_no_file(self, tmp_path: Path) -> None:
        path = tmp_path / "model.safetensors"
        with ServerThread(policy="asgd", save=path, save_every=0.001):
            pass
        assert list(tmp_path.iterdir()) == []

    def test_a_place_that_cannot_be_written_is_found_out_at_once(self, tmp_path: Path) -> None:
        (tmp_path / "file").write_text("")
        for path in (tmp_path / "file" / "m.safetensors", Path("/proc/m.safetensors")):
            with (
                pytest.raises(UsageError, match=f"cannot write the model to {path}"),
                ServerThread(policy="asgd", save=path),
            ):
                pass

    def test_a_file_that_is_no_model(self, tmp_path: Path) -> None:
        path = tmp_path / "model.safetensors"
        path.write_bytes(os.urandom(100))
        with (
            pytest.raises(UsageError, match="not a safetensors file"),
            ServerThread(policy="asgd", init=path),
        ):
            pass

    def test_an_initial_model_must_be_the_workers(self, tmp_path: Path) -> None:
        path = tmp_path / "model.safetensors"
        write_model(path, {"w": np.arange(3, dtype=np.float32)}, 9)
        with ServerThread(policy="asgd", init=path) as server:
            with Client(server.url) as observer:
                np.testing.assert_array_equal(observer.fetch()["w"], [0, 1, 2])
            with pytest.raises(aiops.errors.BadPush, match=r"'w' has shape \(3,\), not \(4,\)"):
                Worker(server.url, {"w": np.zeros(4, np.float32)})

    def test_a_pattern_without_a_tensor_refuses_the_model(self, tmp_path: Path) -> None:
        path = tmp_path / "model.safetensors"
        write_model(path, {"norm.bias": np.zeros(1, np.float32)}, 9)
        wrong, what = {"lr": "0@*nrom*"}, r"'\*nrom\*' of --set lr=0@\*nrom\*; did you mean '{}'\?"
        with (
            pytest.raises(aiops.errors.ConflictError, match=what.format("norm.bias")),
            ServerThread(policy="asgd", init=path, set=wrong),
        ):
            pass
        given, table = {"norm.x": np.zeros(2)}, aiops.Table(9, 2)
        with ServerThread(policy="asgd", set=wrong) as server:
            with pytest.raises(aiops.errors.BadPush, match=what.format("norm.x")):
                Worker(server.url, given)
            with Worker(server.url, given, tables={"is.nrom": table}) as worker:
                before = worker.fetch_rows("is.nrom", [3])
                worker.push_rows("is.nrom", [3], np.ones((1, 2), np.float32))
                np.testing.assert_array_equal(worker.fetch_rows("is.nrom", [3]), before)


class TestFailure:
    @pytest.mark.parametrize(
        ("count", "ask"),
        [(10, Client.exchange), (10, Client.push), (3 << 20, Client.exchange)],
        ids=["the short way", "inline", "on the update thread"],
    )
    def test_a_kernel_that_fails_ends_the_server(
        self, count: int, ask: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """The parameters may be half written: going on would be a lie."""

        def fail(*_arguments: object) -> Any:
            raise ArithmeticError("a kernel failed")

        with (  # noqa: PT012  (it is the end of the server that raises)
            pytest.raises(ArithmeticError, match="a kernel failed"),
            ServerThread(policy="asgd", kernels="numpy") as server,
            Client(server.url, role="worker") as client,
        ):
            server.call(lambda s: s.engine.plan.update(patience=0.0))
            params = client.define({"w": np.zeros(count, np.float32)})
            client.exchange(params, ones(params))
            client.timeout = 1.0
            monkeypatch.setattr(UpdateJob, "run", fail)
            monkeypatch.setattr(Updater, "whole", fail)
            with pytest.raises(
                (Unavailable, ConnectionLost), match=r"error of its own .*ArithmeticError: a kernel"
            ):
                ask(client, params, ones(params))

    @pytest.mark.parametrize("near", [True, False])
    @pytest.mark.parametrize(
        ("policy", "why"),
        [
            ("Failing", r"failing: push\(\) fails with ZeroDivisionError: .*test_server.py, line"),
            ("Undecided", r"undecided: its policy's push\(\) returned True; it must return a Dec"),
        ],
    )
    def test_a_policy_that_fails_ends_the_server_and_its_clients_learn_why(
        self, policy: str, why: str, near: bool, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """They wait for a successor; if there is none, the error has the server's reason.

        The worker's push may have been applied, so its error is no refusal. The observer was idle
        when the server ended: it reads the reason with its next call.
        """
        if not near:
            monkeypatch.setenv("AIOPS_NO_SHM", "1")
        learnt = False
        with (  # noqa: PT012  (it is the end of the server that raises)
            pytest.raises(UsageError, match=why),
            ServerThread(policy=f"{__name__}:{policy}", kernels="numpy") as server,
            Client(server.url) as observer,
            Worker(server.url, {"w": np.zeros(3, np.float32)}) as worker,
        ):
            observer.ping()
            observer.timeout = worker._client.timeout = 0.5
            with pytest.raises(ConnectionLost, match=why):
                worker.step({"w": np.ones(3, np.float32)})
            server.stop()
            with pytest.raises(Unavailable, match=why):
                observer.stats()
            learnt = True
        assert learnt  # the error of the server's end would hide one of these lines

    @pytest.mark.parametrize("ask", [Client.exchange, Client.push])
    def test_a_modulation_that_is_no_number_ends_the_server_and_changes_no_parameter(
        self, ask: Callable[..., Any]
    ) -> None:
        why = "unfinished: the modulation for a staleness of 5 is nan; it must be a finite number"
        kept = None
        with (  # noqa: PT012  (it is the end of the server that raises)
            pytest.raises(UsageError, match=why),
            ServerThread(policy=f"{__name__}:Unfinished", kernels="numpy") as server,
            Client(server.url, role="worker", name="slow") as slow,
            Client(server.url, role="worker", name="fast") as fast,
        ):
            old = slow.define({"w": np.zeros(3, np.float32)})
            params = fast.define({"w": np.zeros(3, np.float32)})
            for _ in range(5):
                fast.exchange(params, ones(params))
            store = server.call(lambda s: s.engine.training.store)
            slow.timeout = 0.5
            with pytest.raises((ConnectionLost, Unavailable), match=why):
                ask(slow, old, ones(old))
            kept = store.version, store.current.arena.data.view(np.float32)[:3].tolist()
        assert kept == (5, pytest.approx([-0.5] * 3))


@dataclass(frozen=True, kw_only=True)
class Failing(Algorithm):
    """One that has a mistake in it.

    Settings
    --------
    lr : float, default 0.1
        Learning rate.
    """

    name = "failing"
    lr: float = 0.1

    def rule(self) -> Rule:
        return Rule(sgd)

    def policy(self, workers: int | None) -> Policy:
        return FailingPolicy()


class FailingPolicy(Policy):
    def push(self, worker: int, staleness: int) -> Decision:
        return Decision(use=True, divide=int(1 / staleness))


@dataclass(frozen=True, kw_only=True)
class Undecided(Failing):
    """One whose policy returns no decisions.

    Settings
    --------
    lr : float, default 0.1
        Learning rate.
    """

    name = "undecided"

    def policy(self, workers: int | None) -> Policy:
        return UndecidedPolicy()


class UndecidedPolicy(Policy):
    def push(self, worker: int, staleness: int) -> Decision:
        return True  # type: ignore[return-value]


@dataclass(frozen=True, kw_only=True)
class Unfinished(Algorithm):
    """One whose modulation is no number for a staleness that is not tried before the run.

    Settings
    --------
    lr : float, default 0.1
        Learning rate.
    """

    name = "unfinished"
    lr: float = 0.1

    def modulation(self, staleness: int) -> float:
        return math.nan if staleness == 5 else 1.0


class TestStats:
    def test_every_push_is_counted(self, server: ServerThread) -> None:
        random = np.random.default_rng(5)
        workers = [Client(server.url, role="worker", name=f"w{index}") for index in range(4)]
        try:
            params = [worker.define({"w": np.zeros(5, np.float32)}) for worker in workers]
            expected: dict[str, int] = {}
            for version in range(1, 101):
                index = int(random.integers(4))
                send = workers[index].exchange if random.integers(2) else workers[index].push
                receipt = send(params[index], ones(params[index]))
                tau = str(receipt.staleness)
                expected[tau] = expected.get(tau, 0) + 1
                assert receipt.version == version
            with Client(server.url) as observer:
                stats = observer.stats()
                again = observer.stats()
            assert stats["staleness"] == expected
            assert sum(stats["staleness"].values()) == stats["gradients"] == 100
            total = sum(int(tau) * count for tau, count in expected.items())
            assert stats["mean_staleness"] == pytest.approx(total / 100)
            rows = {row["name"]: row for row in stats["workers"] if row["role"] == "worker"}
            assert sum(row["pushes"] for row in rows.values()) == 100
            for worker in workers:
                row = rows[worker._session.identity.name]
                assert (row["bytes_fetched"], row["bytes_pushed"]) == worker.traffic
            assert again["staleness"] == expected
        finally:
            for worker in workers:
                worker.close()

    def test_refusals_are_counted_apart(self, server: ServerThread) -> None:
        with Client(server.url, role="worker", name="w") as worker:
            params = worker.define({"w": np.zeros(5, np.float32)})
            for _ in range(3):
                with pytest.raises(aiops.errors.BadPush):
                    worker.push(params, ones(params, np.nan))
            worker.push(params, ones(params))
            stats = worker.stats()
        assert stats["staleness"] == {"0": 1}
        assert stats["refused"] == {"bad-push": 3}
        [row] = [row for row in stats["workers"] if row["name"] == "w"]
        assert (row["pushes"], row["refused"]) == (1, 3)

    def test_bytes_go_on_over_connections(self, server: ServerThread) -> None:
        """A client that comes back is the same worker, on the same line of the statistics."""
        with Proxy(server.url) as proxy, Client(proxy.url, role="worker", name="w") as worker:
            params = worker.define({"w": np.zeros(5, np.float32)})
            for _ in range(3):
                proxy.cut_all()
                worker.exchange(params, ones(params))
            with Client(server.url) as observer:
                [row] = [row for row in observer.stats()["workers"] if row["name"] == "w"]
            assert row["pushes"] == 3
            assert row["present"]
            assert row["bytes_fetched"] >= worker.traffic[0]

    def test_both_ends_of_a_socket_are_tuned(
        self, server: ServerThread, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("AIOPS_NO_SHM", "1")
        with Client(server.url) as client:
            sock = client._connection.short.socket
            assert sock is not None
            assert sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
            assert sock.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
            [link] = server.call(lambda s: [peer.link for peer in s.connections.peers.values()])
            other = link.transport.get_extra_info("socket")
            assert other.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
            assert other.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)


class TestThreads:
    def test_as_many_as_it_is_told_share_a_large_update(self) -> None:
        """Two pieces of it wait for each other, so no thread could do them all alone."""
        for threads in (1, 2):
            both = threading.Barrier(threads)
            with ServerThread(policy="asgd", kernels="numpy", threads=threads) as server:
                parallel_map = server.call(lambda s: s.engine.machine.parallel_map)
                parallel_map([lambda barrier=both: barrier.wait(PATIENCE)] * threads)

    @pytest.mark.parametrize("threads", [0, -1])
    def test_less_than_one_is_refused(self, threads: int) -> None:
        with (
            pytest.raises(UsageError, match="--threads must be more than 0"),
            ServerThread(threads=threads),
        ):
            pass
