"""Real processes: started, stopped, killed."""

from __future__ import annotations

import contextlib
import os
import re
import select
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from aiops.client import Client
from aiops.errors import Refused, Unauthorised, Unavailable, UsageError
from aiops.model.tables import Table
from aiops.serving.config import Config
from aiops.serving.shard_processes import FOLLOWERS_SETTINGS, ShardProcesses
from tests.rows import each_row
from tests.support import PATIENCE, Process, assert_same, server_process
from tests.zygote import NESTED

FLAGS = ("--policy", "asgd", "--lr", "1", "--kernels", "numpy", "--shard-bytes", "1")
MODEL = {
    "w": np.arange(60, dtype=np.float32).reshape(20, 3),
    "b": np.arange(7, dtype=np.float64),
}


def ones(times: float = 1) -> dict[str, np.ndarray]:
    return {name: np.full(a.shape, times, a.dtype) for name, a in MODEL.items()}


@pytest.mark.slow
def test_stopped_it_saves_all_of_it_and_ends_with_status_0(tmp_path: Path) -> None:
    init, save = tmp_path / "init.safetensors", tmp_path / "save.safetensors"
    save_file(MODEL, init)
    flags = (*FLAGS, "--shards", "3", "--init", str(init), "--save", str(save))
    with server_process(*flags, env={"AIOPS_TOKEN": "secret"}) as server:
        with pytest.raises(Unauthorised):
            Client(server.url, token="guess")
        with Client(server.url, role="worker", token="secret") as client:
            params = client.fetch()
            assert_same(params, MODEL)
            client.push(params, ones())
            client.exchange(params, ones(2))
            assert [line["version"] for line in client.stats()["shards"]] == [2, 2, 2]
        server.signal(signal.SIGTERM)
        status, _out, log = server.end()
    assert status == 0, log
    assert_same(load_file(save), {name: a - 3 for name, a in MODEL.items()})
    for pid in re.findall(r"is process (\d+)", log):
        assert not Path(f"/proc/{pid}").exists()


@pytest.mark.slow
def test_when_all_are_asked_to_end_the_lead_still_saves_all_of_it(tmp_path: Path) -> None:
    """As systemd does, which asks every process of a service."""
    save = tmp_path / "save.safetensors"
    with server_process(*FLAGS, "--shards", "2", "--save", str(save), env={NESTED: "1"}) as server:
        with Client(server.url, role="worker") as client:
            params = client.define(MODEL)
            client.exchange(params, ones())
        assert server.popen.stderr is not None
        log = ""
        while "asked to end" not in log:
            line = server.popen.stderr.readline()
            found = re.search(r"shard 1 of 2 is process (\d+)", line)
            if found is not None:
                os.kill(int(found[1]), signal.SIGTERM)
            log += line
        server.signal(signal.SIGTERM)
        status, _out, rest = server.end()
    assert status == 0, log + rest
    assert_same(load_file(save), {name: a - 1 for name, a in MODEL.items()})


@pytest.mark.slow
def test_a_follower_that_is_asked_twice_does_not_wait_for_its_lead() -> None:
    follower = Process("-m", "aiops.server", "--port", "0", "--follower", *FLAGS)
    try:
        named = follower.line().removeprefix("aiops://")
        with server_process(*FLAGS, "--followers", named) as server:
            follower.signal(signal.SIGTERM)
            assert follower.popen.stderr is not None
            while "asked to end" not in follower.popen.stderr.readline():
                pass
            follower.signal(signal.SIGTERM)
            assert follower.end()[0] == 0
            server.signal(signal.SIGTERM)
            assert server.end()[0] == 0
    finally:
        follower.kill()


@pytest.mark.slow
def test_a_shard_that_is_killed_is_named_and_the_others_go_on() -> None:
    with server_process(*FLAGS, "--shards", "3", env={NESTED: "1"}) as server:
        with Client(server.url, role="worker", timeout=10) as client:
            params = client.define(MODEL)
            client.exchange(params, ones())
            assert server.popen.stderr is not None
            log, pids = "", dict[str, str]()
            while len(pids) < 2:
                log += server.popen.stderr.readline()
                pids = dict(re.findall(r"shard (\d) of 3 is process (\d+)", log))
            os.kill(int(pids["2"]), signal.SIGKILL)
            client.timeout = 1.0  # the time for which a refusal is waited out
            for _ in range(2):
                with pytest.raises(Unavailable, match="shard 2 of 3"):
                    client.exchange(params, ones())
            with pytest.raises(Unavailable, match="shard 2 of 3"):
                client.fetch()
            assert [bool(line["gone"]) for line in client.stats()["shards"]] == [0, 0, 1]
        server.signal(signal.SIGTERM)
        status, _out, rest = server.end()
    assert status == 0
    assert "shard 2 of 3" in rest
    for pid in pids.values():
        assert not Path(f"/proc/{pid}").exists()


@pytest.mark.slow
def test_a_shard_that_falls_silent_is_given_up() -> None:
    flags = (*FLAGS, "--shards", "2", "--failure-timeout", "0.1")
    with server_process(*flags) as server:
        with Client(server.url, role="worker", timeout=PATIENCE) as client:
            params = client.define(MODEL)
            assert server.popen.stderr is not None
            found = None
            while found is None:
                line = server.popen.stderr.readline()
                found = re.search(r"shard 1 of 2 is process (\d+)", line)
            pid = int(found[1])
            os.kill(pid, signal.SIGSTOP)
            client.timeout = 3.0
            with pytest.raises(Unavailable, match=r"shard 1 of 2 .* has not answered a ping"):
                client.exchange(params, ones())
        server.signal(signal.SIGTERM)
        assert server.end()[0] == 0
    assert not Path(f"/proc/{pid}").exists()


@pytest.mark.slow
def test_followers_that_were_started_by_themselves() -> None:
    followers = [Process("-m", "aiops.server", "--port", "0", "--follower", *FLAGS) for _ in "ab"]
    try:
        urls = [follower.line() for follower in followers]
        a, b = (url.removeprefix("aiops://") for url in urls)
        with pytest.raises(Refused, match="connect to its lead"):
            Client(urls[0])
        with server_process(*FLAGS, "--followers", f"{a},{b}") as server:
            with Client(f"{server.url}+{a}+{b}", role="worker") as client:
                params = client.define(MODEL)
                client.exchange(params, ones())
                assert_same(params, {name: a - 1 for name, a in MODEL.items()})
            with pytest.raises(Unauthorised, match="has 3 shards, not the 2"):
                Client(f"{server.url}+{a}")
            server.signal(signal.SIGTERM)
            assert server.end()[0] == 0
        assert [follower.end()[0] for follower in followers] == [0, 0]
    finally:
        for follower in followers:
            follower.kill()


@pytest.mark.slow
@pytest.mark.parametrize("transport", [(), ("--no-shm",)], ids=["shared memory", "tcp"])
def test_rows_on_all_shards_are_those_of_one_server(transport: tuple[str, ...]) -> None:
    found = list[np.ndarray]()
    for flags in [(), ("--shards", "3", "--spread-tables")]:
        tables = {"words": Table(10_000, 4, init="normal", seed=1)}
        draw = np.random.default_rng(0)
        with (
            server_process(*FLAGS, "--set", "optimizer=adam", *transport, *flags) as server,
            Client(server.url, role="worker") as client,
        ):
            client.define(MODEL, tables)
            for step in range(1, 11):
                ids = draw.integers(0, 10_000, 50)
                receipt = client.push_rows("words", ids, client.fetch_rows("words", ids))
                assert (receipt.version, receipt.used) == (step, True)
            found.append(client.fetch_rows("words", np.arange(10_000)).copy())
    assert np.array_equal(*found)


@pytest.mark.slow
def test_a_follower_of_another_policy_is_refused() -> None:
    follower = Process("-m", "aiops.server", "--port", "0", "--follower", "--policy", "fasgd")
    try:
        named = follower.line().removeprefix("aiops://")
        server = Process("-m", "aiops.server", "--port", "0", *FLAGS, "--followers", named)
        status, out, log = server.end()
        assert (status, out) == (64, "")
        assert "shard 1 of 2 at 127.0.0.1" in log
        assert "start both with the same" in log
    finally:
        follower.kill()


@pytest.mark.slow
def test_a_follower_ends_when_its_lead_is_killed() -> None:
    follower = Process("-m", "aiops.server", "--port", "0", "--follower", *FLAGS)
    try:
        named = follower.line().removeprefix("aiops://")
        with server_process(*FLAGS, "--followers", named) as server:
            server.signal(signal.SIGKILL)
            status, _out, log = follower.end()
        assert status == 69
        assert "its lead is gone" in log
    finally:
        follower.kill()


WAITS = """
import os, sys
if ("--follower" in sys.argv) == {follower}:
    with open(os.environ["HERE"], "w") as here:
        here.write(str(os.getpid()))
    with open(os.environ["ON"]):
        pass
from aiops.algorithms.asgd import ASGD as Waits
"""
"""A policy whose import says that it has begun, and goes on when it is told to: never."""


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "pidfd_open"), reason="it waits for a child's child")
@pytest.mark.parametrize("follower", [True, False])
def test_followers_end_when_their_lead_is_killed_before_it_reached_them(
    follower: bool, tmp_path: Path
) -> None:
    """While the follower imports its policy; and while the lead does, and the follower listens."""
    here, on = tmp_path / "here", tmp_path / "on"
    os.mkfifo(here)
    os.mkfifo(on)
    (tmp_path / "waits.py").write_text(WAITS.format(follower=follower))
    env = {"PYTHONPATH": str(tmp_path), "HERE": str(here), "ON": str(on)}
    flags = ("--policy", "waits:Waits", "--lr", "1", "--kernels", "numpy", "--shards", "2")
    lead = Process("-m", "aiops.server", "--port", "0", *flags, env=env)
    try:
        pid = int(here.read_text())
        if not follower:
            assert lead.popen.stderr is not None
            found = None
            while found is None:
                line = lead.popen.stderr.readline()
                found = re.search(r"shard 1 of 2 is process (\d+)", line)
            pid = int(found[1])
        handle = os.pidfd_open(pid)
        try:
            assert not select.select([handle], [], [], 0)[0], "it is there"
            lead.signal(signal.SIGKILL)
            assert select.select([handle], [], [], PATIENCE)[0], "it has not ended"
        finally:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(handle, signal.SIGKILL)
            os.close(handle)
    finally:
        lead.kill()


@pytest.mark.parametrize(
    ("flags", "text"),
    [
        (("--bandwidth-budget", "3KB/s"), "too small for 2 servers"),
        (("--record", "run", "--state", "state"), "take --keep-journal"),
        (("--follower",), "a follower has no followers"),
        (("--followers", "a:1,b:2"), "--shards 2 takes 1 followers"),
    ],
)
def test_what_does_not_work_yet_is_refused_at_the_start(flags: tuple[str, ...], text: str) -> None:
    process = Process(
        "-m", "aiops.server", "--port", "0", *FLAGS, "--shards", "2", *flags, env={NESTED: "1"}
    )
    try:
        status, out, log = process.end()
        assert (status, out) == (64, "")
        assert text in log
    finally:
        process.kill()


def test_an_address_twice_is_refused() -> None:
    with pytest.raises(UsageError, match="twice"):
        Client("aiops://127.0.0.1:1,127.0.0.1:1")


@each_row(
    ("processors", "settings", "threads"),
    [
        (8, {"shards": 3}, 2),
        (64, {"shards": 2}, 4),
        (2, {"shards": 4}, 1),
        (8, {"shards": 3, "threads": 7}, 7),
        (8, {}, None),
        (8, {"shards": 2, "followers": ["elsewhere:1"]}, None),
    ],
)
def test_processes_of_one_machine_share_its_processors(
    processors: int,
    settings: dict[str, Any],
    threads: int | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("aiops.net.cpu_count.usable", lambda: processors)
    config = ShardProcesses(Config(**settings)).config
    assert config.threads == threads
    found = [flag for flag in config.flags(FOLLOWERS_SETTINGS) if flag.startswith("--threads")]
    assert found == ([f"--threads={threads}"] if threads else [])
