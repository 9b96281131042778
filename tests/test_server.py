"""A server's life: how it starts, what it says, how it ends, and the files it reads and writes."""

from __future__ import annotations

import asyncio
import json
import os
import resource
import signal
import socket
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import aiops
from aiops import keeping, messages
from aiops.client import Client, Worker
from aiops.errors import ConflictError, ConnectionLost, Unavailable, UsageError
from aiops.files import read_model, write_model
from aiops.journal import replay
from aiops.layout import Array
from aiops.store import Job
from tests.peers import Peer, Process, eventually, frame, serving
from tests.proxy import Proxy
from tests.support import PATIENCE, ServerThread, assert_same

DRAIN = ("--drain-deadline", "600")
"""A server that waited for its clients, rather than for progress, would not end within a test."""

SIGNALS = [signal.SIGTERM, signal.SIGINT]


def ones(params: Any, times: float = 1) -> dict[str, Array]:
    return {name: np.full_like(array, times) for name, array in params.items()}


def quiet(stderr: str) -> bool:
    """Say whether nothing went wrong inside."""
    return not any(word in stderr for word in ("Traceback", "Exception", " ERROR "))


@pytest.mark.slow
class TestProcess:
    @pytest.mark.parametrize("number", SIGNALS)
    def test_a_life(self, number: signal.Signals) -> None:
        with serving("--policy", "asgd", "--set", "lr=1") as server:
            assert server.url.startswith("aiops://127.0.0.1:")
            with Worker(server.url, {"w": np.zeros(3, np.float32)}, name="w") as worker:
                worker.step(ones(worker.params))
                assert server.stop(number) == 0
            assert server.popen.stdout is not None
            assert server.popen.stdout.read() == b"", "stdout has the URL and nothing else"
            stderr = server.stderr()
            assert f"serving asgd at {server.url}" in stderr
            assert "worker 'w' joined" in stderr
            assert stderr.splitlines()[-1].endswith("stopped")
            assert quiet(stderr)

    def test_two_signals_are_as_good_as_one(self) -> None:
        with serving("--policy", "asgd") as server:
            server.popen.send_signal(signal.SIGINT)
            assert server.stop(signal.SIGTERM) == 0
            assert quiet(server.stderr())

    @pytest.mark.parametrize("number", SIGNALS)
    def test_an_answer_that_nobody_reads_holds_up_nothing(self, number: signal.Signals) -> None:
        with (
            serving("--policy", "asgd", *DRAIN) as server,
            Client(server.url, role="worker") as definer,
            Peer(server.url, "observer", receive_buffer=1 << 14) as reader,
        ):
            params = definer.define({"w": np.zeros(16 << 20, np.float32)})
            reader.send(frame(messages.Fetch(1, -1)))
            reader.sock.recv(1)  # the answer has begun
            definer.fetch(params)
            assert server.stop(number) == 0
            assert quiet(server.stderr())

    @pytest.mark.parametrize("number", SIGNALS)
    def test_who_waits_at_a_barrier_is_told(self, number: signal.Signals) -> None:
        with (
            serving("--policy", "hardsync", "--workers", "3", *DRAIN) as server,
            Client(server.url) as observer,
            ThreadPoolExecutor(2) as pool,
        ):

            def work() -> str:
                with Worker(server.url, {"w": np.zeros(3, np.float32)}) as worker:
                    with pytest.raises(Unavailable) as caught:
                        worker.step(ones(worker.params))
                    return str(caught.value)

            told = [pool.submit(work) for _ in range(2)]
            eventually(lambda: observer.stats()["waiting"] == 2, "both wait")
            assert server.stop(number) == 0
            for future in told:
                assert "shutting down; the step was not made" in future.result(PATIENCE)
            assert quiet(server.stderr())

    def test_an_answer_that_is_read_slowly_is_finished(self) -> None:
        start = np.arange(2 << 20, dtype=np.float32)
        with serving("--policy", "asgd") as server, Client(server.url, role="worker") as definer:
            definer.define({"w": start})
            with Proxy(server.url) as proxy, Client(proxy.url) as reader:
                proxy.throttle("down", 8 << 20)
                begun = proxy.stall("down", after=1 << 20)
                with ThreadPoolExecutor(1) as pool:
                    fetched = pool.submit(reader.fetch)
                    begun.wait()
                    server.popen.send_signal(signal.SIGTERM)
                    begun.release()
                    np.testing.assert_array_equal(fetched.result(PATIENCE)["w"], start)
            assert server.popen.wait(PATIENCE) == 0

    def test_json_logs(self) -> None:
        flags = ("--policy", "asgd", "--log-format", "json", "--log-level", "debug")
        with serving(*flags, env={"AIOPS_TOKEN": "open sesame"}) as server:
            with Worker(server.url, {"w": np.zeros(3, np.float32)}, token="open sesame") as worker:
                worker.step(ones(worker.params))
            with pytest.raises(aiops.errors.Unauthorised):
                Client(server.url, token="barley\n\x1b[31m")
            with Peer(server.url, greet=False) as stranger:
                stranger.send(b"GET / HTTP/1.1\r\n\r\n")
                assert stranger.dropped()
            assert server.stop() == 0
            rows = [json.loads(line) for line in server.stderr().splitlines()]
        assert {"time", "level", "logger", "text"} <= set.intersection(*map(set, rows))
        assert {row["level"] for row in rows} >= {"info", "warning"}
        said = "\n".join(row["text"] for row in rows)
        for expected in (
            "serving asgd",
            "joined",
            "the token is wrong",
            "does not speak",
            "stopped",
        ):
            assert expected in said

    def test_logs_can_be_silenced(self) -> None:
        with serving("--policy", "asgd", "--log-level", "error") as server:
            with Client(server.url) as client:
                client.ping()
            assert server.stop() == 0
            assert server.stderr() == ""

    def test_it_takes_the_open_files_that_it_needs(self) -> None:
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (64, hard))
        try:
            process = Process("--port", "0", "--policy", "asgd", "--kernels", "numpy")
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        try:
            peers = [Peer(process.url, "observer") for _ in range(100)]
            assert isinstance(peers[-1].ask(messages.Ping(1)), messages.Pong)
            for peer in peers:
                peer.close()
            assert process.stop() == 0
            assert quiet(process.stderr())
        finally:
            process.close()

    def test_a_model_survives_its_server(self, tmp_path: Path) -> None:
        """Trained, saved at the end, read by the next server, and trained on."""
        path = tmp_path / "new folder" / "model.safetensors"
        start: dict[str, Array] = {
            "double": np.arange(3, dtype=np.float64),
            "single": np.arange(6, dtype=np.float32).reshape(2, 3),
            "half": np.arange(4, dtype=np.float16),
            "brain": np.arange(5).astype(ml_dtypes.bfloat16),
            "scalar": np.array(7, np.float32),
            "empty": np.zeros((0, 2), np.float32),
        }
        flags = ("--policy", "asgd", "--set", "lr=1", "--save", str(path))
        with serving(*flags) as server:
            with Worker(server.url, start) as worker:
                for _ in range(3):
                    worker.step(ones(worker.params))
            assert server.stop() == 0
            assert f"version 3 saved to {path}" in server.stderr()
        saved = read_model(path)
        assert_same(saved, worker.params)
        assert list(path.parent.iterdir()) == [path], "nothing half done is left behind"
        with serving("--policy", "asgd", "--set", "lr=1", "--init", str(path)) as server:
            with Worker(server.url, start) as worker:
                assert worker.version == 0
                assert_same(worker.params, saved)
                worker.step(ones(worker.params))
                expected = {name: array - array.dtype.type(4) for name, array in start.items()}
                assert_same(worker.params, expected)
            assert server.stop() == 0

    def test_a_recorded_run_ends_whole(self, tmp_path: Path) -> None:
        path = tmp_path / "run.journal"
        with (
            serving("--policy", "fasgd", "--record", str(path)) as server,
            Worker(server.url, {"w": np.ones(9, np.float32)}) as worker,
        ):
            for step in range(5):
                worker.step(ones(worker.params, step))
            assert server.stop() == 0, "with the worker still there"
            assert quiet(server.stderr())
        with path.open("rb") as file:
            replayed = replay(file, backend="numpy")
        assert replayed.complete
        store = replayed.engine.store
        assert store is not None
        assert store.version == 5
        np.testing.assert_array_equal(store.current.arena.views["w"], worker.params["w"])


@pytest.fixture
def server() -> Iterator[ServerThread]:
    with ServerThread(policy="asgd", set={"lr": 1}, kernels="numpy") as running:
        yield running


class TestListening:
    def test_a_port_in_use(self, server: ServerThread, tmp_path: Path) -> None:
        port = int(server.url.rpartition(":")[2])
        journal = tmp_path / "run.journal"
        with (
            pytest.raises(UsageError, match=rf"cannot listen on 127.0.0.1:{port}.*in use"),
            ServerThread(policy="asgd", port=port, record=journal),
        ):
            pass

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
                    Client(server.url)
                second.ping()
            eventually(lambda: server.call(lambda s: len(s._peers)) == 0, "both are gone")
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

        monkeypatch.setattr(keeping, "write_model", slow)
        settings: dict[str, Any] = {"save": path, "save_every": 0.001, "set": {"lr": 1}}
        with ServerThread(policy="asgd", kernels="numpy", **settings) as server:
            with Worker(server.url, {"w": np.zeros(3, np.float32)}) as worker:
                assert begun.wait(PATIENCE)
                worker.step(ones(worker.params))
            server.call(lambda s: s.stop())
            server.call(lambda s: asyncio.get_running_loop().call_soon(go_on.set))
        assert versions == [0, 1]
        np.testing.assert_array_equal(read_model(path)["w"], [-1, -1, -1])

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


class TestFailure:
    @pytest.mark.parametrize("count", [10, 3 << 20], ids=["inline", "on the applier's thread"])
    def test_a_kernel_that_fails_ends_the_server(
        self, count: int, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """The parameters may be half written: going on would be a lie."""

        def fail(job: Job) -> Any:
            raise ArithmeticError("a kernel failed")

        with (  # noqa: PT012  (it is the end of the server that raises)
            pytest.raises(ArithmeticError, match="a kernel failed"),
            ServerThread(policy="asgd", kernels="numpy") as server,
            Client(server.url, role="worker", timeout=1.0) as client,
        ):
            server.call(lambda s: s.engine.plan.update(patience=0.0))
            params = client.define({"w": np.zeros(count, np.float32)})
            client.exchange(params, ones(params))
            monkeypatch.setattr(Job, "run", fail)
            with pytest.raises(ConnectionLost):
                client.exchange(params, ones(params))


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
                row = rows[worker._talk.name]
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

    def test_both_ends_of_a_socket_are_tuned(self, server: ServerThread) -> None:
        with Client(server.url) as client:
            sock = client._socket
            assert sock is not None
            assert sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
            assert sock.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
            [link] = server.call(lambda s: [peer.link for peer in s._peers.values()])
            other = link.transport.get_extra_info("socket")
            assert other.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
            assert other.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
