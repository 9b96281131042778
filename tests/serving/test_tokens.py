"""Tokens of a file, on a real server: roles, rotation without a restart, revocation."""

from __future__ import annotations

import contextlib
from pathlib import Path

import numpy as np
import pytest

from aiops.cli import token as commands
from aiops.client.sync.client import Client
from aiops.client.sync.worker import Worker
from aiops.errors import Unauthorised, UsageError
from aiops.serving.config import Config
from aiops.serving.token_file import TokenFile
from tests.peers import Peer, eventually
from tests.support import ServerThread


def made(file: Path, name: str, role: str, capsys: pytest.CaptureFixture[str]) -> str:
    """Make a token as the command does, and return it."""
    commands.new(file, name, role)
    return capsys.readouterr().out.strip()


def test_roles_rotation_and_revocation(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "tokens.toml"
    reader, trainer = (made(file, name, name, capsys) for name in ("observe", "train"))
    model = {"w": np.zeros(3, np.float32)}
    with ServerThread(policy="asgd", kernels="numpy", tokens=file) as server:
        with Worker(server.url, model, token=trainer) as worker:
            worker.step({"w": np.ones(3, np.float32)})
            with Client(server.url, token=reader) as client:
                rows = {row["name"]: row for row in client.stats()["tokens"]}
                assert rows["train"]["connections"] == rows["observe"]["connections"] == 1
            with pytest.raises(Unauthorised, match="'observe' has the role 'observe'"):
                Worker(server.url, model, token=reader)
            later = made(file, "later", "train", capsys)  # the server is not started again
            eventually(lambda: admits(server.url, later), "the file was read again")
            commands.revoke("train", file)
            with pytest.raises(Unauthorised, match="the token 'train' was revoked"):
                train(worker)
        assert not admits(server.url, trainer)
        file.write_text("[[")
        assert admits(server.url, later), "a file that is broken changes nothing"


def train(worker: Worker) -> None:
    while True:
        worker.step({"w": np.ones(3, np.float32)})


def admits(url: str, token: str) -> bool:
    with contextlib.suppress(Unauthorised), Client(url, token=token) as client:
        return client.ping() >= 0
    return False


def test_idle_strangers_keep_no_token_holder_out() -> None:
    with (
        ServerThread(
            policy="asgd", kernels="numpy", token="open sesame", max_connections=4
        ) as server,
        contextlib.ExitStack() as stack,
    ):
        for _ in range(300):  # more than the pool has places
            stack.enter_context(Peer(server.url, greet=False))
        with Client(server.url, token="open sesame", timeout=5.0) as client:
            client.ping()
        assert server.call(lambda s: len(s.connections.peers)) <= 257


@pytest.mark.parametrize("mode", [0o644, 0o620, 0o604])
def test_a_file_that_others_can_read_is_refused(
    tmp_path: Path, mode: int, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "tokens.toml"
    made(file, "a", "admin", capsys)
    assert file.stat().st_mode & 0o777 == 0o600
    file.chmod(mode)
    with pytest.raises(UsageError, match=r"open to other users .*: chmod 600"):
        TokenFile(file, None).read()


def test_servers_of_a_run_need_a_token_of_their_own(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="give each of them the same --token"):
        Config(tokens=tmp_path / "t", shards=2)
    assert Config(tokens=tmp_path / "t", shards=2, token="x").sharded
    assert Config(tokens=tmp_path / "t", host="0.0.0.0").token is None
