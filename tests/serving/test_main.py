"""A server as a process: its signals, its logs, its open files, and what it leaves behind."""

from __future__ import annotations

import json
import os
import resource
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import aiops
from aiops.cli.exit_status import USAGE
from aiops.client import Client, Worker
from aiops.errors import Unavailable
from aiops.model.layout import Array
from aiops.serving.safetensors_io import read_model
from aiops.wire import messages
from tests.peers import Peer, Process, eventually, frame, serving
from tests.proxy import Proxy
from tests.recording import replayed
from tests.support import PATIENCE, assert_same

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

    def test_one_that_comes_after_the_end_changes_nothing(self) -> None:
        """A launcher signals a process, and its whole group as well."""
        with serving("--policy", "asgd") as server:
            server.popen.send_signal(signal.SIGTERM)
            eventually(lambda: "stopped" in server.stderr(), "its last line")
            while server.popen.poll() is None:
                server.popen.send_signal(signal.SIGTERM)
            assert server.stop() == 0

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
                    worker._client.timeout = 2.0
                    with pytest.raises(Unavailable) as caught:
                        worker.step(ones(worker.params))
                    return str(caught.value)

            futures = [pool.submit(work) for _ in range(2)]
            eventually(lambda: observer.stats()["waiting"] == 2, "both wait")
            assert server.stop(number) == 0
            for future in futures:
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

    def test_too_few_open_files_are_told(self) -> None:
        command = f"ulimit -n 12; exec {sys.executable} -m aiops.server --port 0"
        ended = subprocess.run(["sh", "-c", command], capture_output=True, text=True, timeout=60)
        assert ended.returncode == USAGE
        assert ended.stderr.startswith("aiops: this process may open 12 files, and a server needs")
        assert "ulimit -n" in ended.stderr

    def test_it_takes_the_open_files_that_it_needs(self) -> None:
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        with serving("--policy", "asgd"):  # what starts the processes of tests needs more files
            few = 32 + max(map(int, os.listdir("/proc/self/fd")))  # this process starts another
        resource.setrlimit(resource.RLIMIT_NOFILE, (few, hard))
        try:
            process = Process("--port", "0", "--policy", "asgd", "--kernels", "numpy")
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        try:
            peers = [Peer(process.url, "observer") for _ in range(few + 40)]
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
            "coordinator": np.arange(5).astype(ml_dtypes.bfloat16),
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
        ended = replayed(path, "numpy")
        assert ended.complete
        store = ended.engine.store
        assert store is not None
        assert store.version == 5
        np.testing.assert_array_equal(store.current.arena.views["w"], worker.params["w"])
