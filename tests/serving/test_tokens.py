"""Tokens of a file, on a real server: roles, rotation without a restart, revocation."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import ssl
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from aiops.cli import token as commands
from aiops.cli.asking import asked
from aiops.client.sync.client import Client
from aiops.client.sync.worker import Worker
from aiops.common import urls
from aiops.errors import Unauthorised, UsageError
from aiops.serving.config import Config
from aiops.serving.token_file import TokenFile, filter_of
from aiops.wire.admin_messages import Done, Drain, Pause
from aiops.wire.messages import Ping, Pong
from tests.certificates import ours
from tests.peers import Peer, eventually, frame, serving
from tests.rows import each_row
from tests.support import PATIENCE, ServerThread, server_process


def made(
    file: Path, name: str, role: str, capsys: pytest.CaptureFixture[str], **quotas: Any
) -> str:
    """Make a token as the command does, and return it."""
    commands.new(file, name, role, **quotas)
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


def test_untrusted_tokens_turn_the_filters_on(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "tokens.toml"
    made(file, "colleague", "train", capsys)
    assert filter_of("auto", None) == filter_of("auto", file) == "off"
    token = made(file, "volunteer", "train", capsys, untrusted=True)
    assert (filter_of("auto", file), filter_of("off", file)) == ("robust", "off")
    assert "untrusted = true" in file.read_text()
    with (
        ServerThread(policy="asgd", kernels="numpy", tokens=file) as server,
        Worker(server.url, {"w": np.zeros(3, np.float32)}, token=token) as worker,
    ):
        assert worker.stats()["filter"]["filter"] == "robust"
        receipt = worker.step({"w": np.ones(3, np.float32)})
        assert (receipt.used, receipt.why[:12]) == (False, "the first 16")
    with pytest.raises(UsageError, match="an admin is trusted"):
        commands.new(file, "chief", "admin", untrusted=True)


class TestQuotas:
    """Over its quota a token's connections are read later; nothing is refused."""

    @pytest.mark.parametrize("no_shm", [True, False])
    def test_requests(
        self, no_shm: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        file = tmp_path / "tokens.toml"
        slow = made(file, "slow", "train", capsys, requests_per_second=10)
        free = made(file, "free", "observe", capsys)
        model = {"w": np.zeros(3, np.float32)}
        with (
            ServerThread(policy="asgd", kernels="numpy", tokens=file, no_shm=no_shm) as server,
            Worker(server.url, model, token=slow) as worker,
        ):
            began = time.monotonic()
            # Most of them go the short way; where others want the processor, one takes 20 ms.
            for _ in range(14):
                worker.step({"w": np.ones(3, np.float32)})
            assert time.monotonic() - began > 0.25
            with Client(server.url, token=free) as client:
                rows = {row["name"]: row for row in client.stats()["tokens"]}
            assert rows["slow"]["requests_per_second"] == 10
            assert rows["slow"]["waited"] > 0
            assert rows["free"]["waited"] == 0

    def test_requests_that_come_in_one_piece_wait_their_turn(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        file = tmp_path / "tokens.toml"
        slow = made(file, "slow", "observe", capsys, requests_per_second=50)
        with (
            ServerThread(policy="asgd", kernels="numpy", tokens=file) as server,
            Peer(server.url, "observer", token=slow) as peer,
        ):
            peer.send(b"".join(frame(Ping(id)) for id in range(1, 101)))
            for _ in range(51):
                assert isinstance(peer.receive(), Pong)
            answered = server.call(lambda s: [p.link.pumped for p in s.connections.peers.values()])
            assert answered[0] < 90 * len(frame(Pong(100))) + 600  # and the welcome
            for _ in range(20):  # they are read later
                assert isinstance(peer.receive(), Pong)

    def test_bytes_both_ways_of_all_connections(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        file = tmp_path / "tokens.toml"
        token = made(file, "slow", "train", capsys, bytes_per_second="8MB/s")
        model = {"w": np.zeros(1 << 18, np.float32)}
        with (
            ServerThread(policy="asgd", kernels="numpy", tokens=file, no_shm=True) as server,
            Worker(server.url, model, token=token) as one,
            Worker(server.url, model, token=token) as other,
        ):
            began = time.monotonic()
            for _ in range(3):  # 2 MiB each, of which 8 MB are there at once
                for worker in (one, other):
                    worker.step({"w": np.ones(1 << 18, np.float32)})
            assert time.monotonic() - began > 0.15

    def test_a_long_wait_is_no_silence(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        file = tmp_path / "tokens.toml"
        token = made(file, "slow", "observe", capsys, requests_per_second=5)
        with (
            ServerThread(
                policy="asgd", kernels="numpy", tokens=file, failure_timeout=0.02
            ) as server,
            Peer(server.url, "observer", token=token, pongs=True) as peer,
        ):
            peer.send(b"".join(frame(Ping(id)) for id in range(1, 10)))
            found = [peer.receive() for _ in range(8)]  # 0.4 s, longer than a silence may last
            assert found[-1].id == 8


class TestProcesses:
    """The same with a server that is a process."""

    def test_sighup_what_ends_a_connection_and_drain(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        file, name = tmp_path / "tokens.toml", "chief"
        chief = made(file, name, "admin", capsys)
        short = made(file, "short", "observe", capsys)
        with server_process("--policy", "asgd", "--tokens", str(file)) as server:
            with Client(server.url, token=short) as client:
                asked(server.url, Pause(1, "now"), Done, chief, PATIENCE)
                demoted(file)
                server.signal(signal.SIGHUP)
                eventually(lambda: not directs(server.url, chief), "the file was read")
                client.ping()
                expired(file)
                with pytest.raises(Unauthorised, match="the token 'short' has expired"):
                    eventually(lambda: client.ping() < 0, "its connection ended")
            other = made(file, "other", "admin", capsys)
            server.signal(signal.SIGHUP)  # at once: its log, which is not read, has a line for each
            eventually(lambda: directs(server.url, other), "the file was read")
            asked(server.url, Drain(1), Done, other, PATIENCE)  # as SIGTERM does
            status, _out, err = server.end()
        assert status == 0
        assert "token 'chief' has changed: train" in err
        assert "asked to end by token 'other'" in err


def demoted(file: Path) -> None:
    """Change the file's admin, so that nothing but its content tells."""
    before = file.stat()
    file.write_text(file.read_text().replace('"admin"', '"train"'))
    os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))


def expired(file: Path) -> None:
    """Have the time of the last token be over."""
    with file.open("a") as end:
        end.write("expires = 2001-01-01T00:00:00Z\n")


def directs(url: str, token: str) -> bool:
    """Return whether a token is one of an administrator."""
    with contextlib.suppress(Unauthorised):
        return bool(asked(url, Pause(1, ""), Done, token, PATIENCE))
    return False


def train(worker: Worker) -> None:
    while True:
        worker.step({"w": np.ones(3, np.float32)})


def admits(url: str, token: str) -> bool:
    with contextlib.suppress(Unauthorised), Client(url, token=token) as client:
        return client.ping() >= 0
    return False


@pytest.mark.parametrize("tls", [False, True])
def test_a_thousand_idle_strangers_keep_no_token_holder_out(tls: bool) -> None:
    """They say nothing, or half of a hello, or begin a TLS handshake and do not go on."""
    token = "open sesame"
    flags = [f"--tls-cert={ours().server}"] if tls else []
    begun = _client_hello(ours().ca) if tls else b"\xce\x00\x00\x01\x00" + bytes(100)
    with (
        serving(
            "--policy=asgd", "--max-connections=4", *flags, env={"AIOPS_TOKEN": token}
        ) as server,
        contextlib.ExitStack() as stack,
    ):
        for number in range(1000):  # more than the pools have places
            idle = stack.enter_context(socket.create_connection(urls.parse(server.url), PATIENCE))
            idle.sendall(begun[: (0, len(begun) // 2, len(begun))[number % 3]])
        given = ours().anonymous if tls else None
        with Client(server.url, token=token, tls=given, timeout=PATIENCE) as client:
            client.ping()
        assert len(os.listdir(f"/proc/{server.popen.pid}/fd")) < 600


def _client_hello(ca: Path) -> bytes:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.load_verify_locations(ca)
    outward = ssl.MemoryBIO()
    with contextlib.suppress(ssl.SSLWantReadError):
        context.wrap_bio(ssl.MemoryBIO(), outward, server_hostname="127.0.0.1").do_handshake()
    return outward.read()


@each_row("mode", [0o644, 0o620, 0o604])
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
