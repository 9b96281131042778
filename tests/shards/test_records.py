"""Runs on several shards that are recorded, and replayed from their first rows."""

from __future__ import annotations

import json
import os
import shutil
import signal
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file
from typer.testing import CliRunner

from aiops.cli.main import app
from aiops.client import Client, Worker
from aiops.errors import ConflictError, DamagedState, UsageError
from aiops.net.disk import SystemDisk
from aiops.serving.config import Config
from aiops.state.directory import StateListing, journal_name
from tests.shards.test_kept_shards import FORKED, Log
from tests.support import PATIENCE, Process, ServerThread, assert_same, server_process

MODEL = {
    "w": np.linspace(-1, 1, 60).astype(np.float32).reshape(20, 3),
    "b": np.linspace(0, 1, 7),
}
PLAIN: dict[str, Any] = {"policy": "fasgd", "lr": 0.01, "kernels": "numpy", "shard_bytes": 1}
WORKERS, STEPS = 2, 8


def gradients(seed: int) -> dict[str, Any]:
    rng = np.random.default_rng(seed)
    return {name: rng.normal(size=a.shape).astype(a.dtype) for name, a in MODEL.items()}


def replayed(folder: Path, status: int = 0, kernels: str = "numpy") -> dict[str, Any]:
    """Return what ``aiops replay`` prints of a folder, and the model that it saves."""
    out = folder.parent / "replayed.safetensors"
    flags = ["replay", folder, "--save", out, "--json", "--kernels", kernels]
    result = CliRunner().invoke(app, [*map(str, flags)])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    assert result.exit_code == status, result.output
    found: dict[str, Any] = json.loads(result.stdout)
    return {**found, "model": load_file(out)}


def train(url: str, index: int, half: threading.Event) -> None:
    """Take steps; ``half``: set when some are taken, and some are left."""
    with Worker(url, MODEL, name=f"w{index}", timeout=PATIENCE) as worker:
        for step in range(STEPS):
            if step == STEPS // 2:
                half.set()
            worker.step(gradients(100 * index + step))


@pytest.mark.slow
@pytest.mark.parametrize(
    "policy",
    [
        ("fasgd", "--lr", "0.01"),
        ("softsync", "--set", "n=2", "--lr", "0.1", "--workers", "2"),
        ("dcasgd", "--lr", "0.1"),  # followers hold versions
        ("asgd", "--set", "optimizer=adam", "--set", "clip=1", "--lr", "0.01"),  # two rounds
        ("hardsync", "--lr", "0.1", "--workers", "2", "--push-codec", "int8"),
    ],
    ids=lambda policy: policy[0],
)
def test_processes_that_were_killed_replay_to_the_same_bits(
    policy: tuple[str, ...], tmp_path: Path
) -> None:
    """Snapshots are taken meanwhile, and remove no row; one follower is killed, then the lead."""
    state, save = tmp_path / "state", tmp_path / "save.safetensors"
    flags = ("--policy", *policy, "--kernels", "numpy", "--shard-bytes", "1", "--no-shm")
    flags += ("--shards", "3", "--state", str(state), "--keep-journal", "--snapshot-every", "0.05")
    for start in range(2):
        with server_process(*flags, "--save", str(save), env=FORKED) as server:
            log = Log(server)
            half = threading.Event()
            given = [(server.url, 10 * start + index, half) for index in range(WORKERS)]
            threads = [threading.Thread(target=train, args=each) for each in given]
            for thread in threads:
                thread.start()
            assert half.wait(PATIENCE)
            if not start:
                os.kill(log.pid(1), signal.SIGKILL)
            for thread in threads:
                thread.join()
            server.signal(signal.SIGTERM if start else signal.SIGKILL)
            assert start == 0 or server.popen.wait(PATIENCE) == 0
    found = replayed(state)
    assert found["complete"], found
    assert_same(found["model"], load_file(save))
    for shard in range(3):
        names = [path.name for path in (state / f"shard-{shard}").iterdir()]
        assert StateListing(names).segments[0] == 1
        assert StateListing(names).snapshots


@pytest.mark.slow
def test_a_record_of_processes(tmp_path: Path) -> None:
    """Each start has a folder of its own."""
    record, save = tmp_path / "record", tmp_path / "save.safetensors"
    flags = ("--policy", "asgd", "--lr", "1", "--kernels", "numpy", "--shard-bytes", "1")
    flags += ("--shards", "2", "--record", str(record), "--save", str(save))
    for folder in (record, record.with_name("record.2")):
        with server_process(*flags, env=FORKED) as server:
            train(server.url, 0, threading.Event())
            server.signal(signal.SIGTERM)
            assert server.end()[0] == 0
        found = replayed(folder)
        assert (found["complete"], found["version"]) == (True, STEPS)
        assert_same(found["model"], load_file(save))


class Recorded:
    """A run of three servers in this process whose journals are kept."""

    def __init__(self, folder: Path, **settings: Any) -> None:
        self.folder, self.settings = folder, {**PLAIN, **settings}

    def train(self, steps: int) -> Any:
        """Take steps; return the parameters."""
        given = {"shards": 3, "state": self.folder, "keep_journal": True, **self.settings}
        with ServerThread(**given) as server, Client(server.url, role="worker", name="w") as client:
            params = client.define(MODEL)
            for _ in range(steps):
                client.exchange(params, gradients(client.fetch(params).version))
            return {name: a.copy() for name, a in params.numpy().items()}

    def path(self, shard: int, row: int = 1) -> Path:
        return self.folder / f"shard-{shard}" / journal_name(row)


@pytest.fixture
def recorded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Recorded:
    monkeypatch.setattr(SystemDisk, "segment", 1 << 13)
    return Recorded(tmp_path / "state")


def test_rows_before_snapshots_are_kept_and_replayed(recorded: Recorded) -> None:
    for steps in (12, 3, 3, 3):
        params = recorded.train(steps)
    digests = set()
    for kernels in ("numpy", "numba"):
        found = replayed(recorded.folder, kernels=kernels)
        assert (found["version"], found["complete"], found["damage"]) == (21, True, "")
        assert_same(found["model"], params)
        digests.add(found["sha256"])
    assert len(digests) == 1
    for shard in range(3):
        assert recorded.path(shard).exists()


def test_the_digest_is_that_of_one_server(recorded: Recorded, tmp_path: Path) -> None:
    """The same pushes give the same parameters, whatever number of servers they lie on."""
    recorded.train(5)
    alone = Recorded(tmp_path / "alone", shards=1)
    alone.train(5)
    assert replayed(recorded.folder)["sha256"] == replayed(alone.folder)["sha256"]


def test_without_kept_journals_the_replay_begins_with_the_oldest_snapshots(
    recorded: Recorded,
) -> None:
    recorded.settings["keep_journal"] = False
    for _ in range(4):
        params = recorded.train(6)
    assert not recorded.path(0).exists()
    assert not recorded.path(2).exists()
    found = replayed(recorded.folder)
    assert (found["version"], found["complete"]) == (24, True)
    assert_same(found["model"], params)


def test_a_record_is_a_state_of_its_own(tmp_path: Path) -> None:
    recorded = Recorded(tmp_path / "unused", state=None, keep_journal=False)
    recorded.settings["record"] = tmp_path / "run"
    for folder in (tmp_path / "run", tmp_path / "run.2"):
        params = recorded.train(4)
        found = replayed(folder)
        assert (found["version"], found["complete"]) == (4, True)
        assert_same(found["model"], params)


def test_a_start_that_fails_leaves_no_folder(tmp_path: Path) -> None:
    """Within a program, and as processes: the model that it is to begin with is not there."""
    record, init = tmp_path / "run", tmp_path / "none.safetensors"
    settings = {**PLAIN, "shards": 2, "record": record, "init": init}
    with pytest.raises(UsageError, match=r"none\.safetensors"), ServerThread(**settings):
        pass
    assert not record.exists()
    flags = ("--policy", "asgd", "--kernels", "numpy", "--shards", "2", "--port", "0")
    given = *flags, "--record", str(record), "--init", str(init)
    process = Process("-m", "aiops.server", *given, env=FORKED)
    try:
        status, out, log = process.end()
        assert (status, out) == (66, "")
        assert "none.safetensors" in log
    finally:
        process.kill()
    assert not record.exists()


def test_damage_of_the_lead_ends_the_replay_and_of_a_follower_refuses_it(
    recorded: Recorded,
) -> None:
    """Of the lead's rows those before are a moment of the model; a follower has no other moment."""
    recorded.settings["acks"] = "durable"  # else it is as if torn
    recorded.train(12)
    whole = recorded.path(0).read_bytes()
    damaged = bytearray(whole)
    damaged[len(damaged) // 2] ^= 1
    recorded.path(0).write_bytes(damaged)
    found = replayed(recorded.folder, status=1)
    assert "journal-" in found["damage"]
    assert not found["complete"]
    assert 0 < found["version"] < 12
    recorded.path(0).write_bytes(whole)
    kept = recorded.path(2).read_bytes()
    damaged = bytearray(kept)
    damaged[len(damaged) // 2] ^= 1
    recorded.path(2).write_bytes(damaged)
    with pytest.raises(DamagedState, match="shard-2: journal-"):
        replayed(recorded.folder)


def test_what_has_no_replay(recorded: Recorded, tmp_path: Path) -> None:
    recorded.train(3)
    with pytest.raises(UsageError, match=r"only all servers together .*aiops replay"):
        replayed(recorded.folder / "shard-1")
    shutil.rmtree(recorded.folder / "shard-2")
    with pytest.raises(UsageError, match="lacks the folder of shard 2 of 3"):
        replayed(recorded.folder)
    with pytest.raises(ConflictError, match="followers that are started by themselves"):
        Config(record=tmp_path / "r", followers=["a:1"])
    with pytest.raises(ConflictError, match="--record is the lead's"):
        Config(record=tmp_path / "r", follower=True)
