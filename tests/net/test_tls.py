"""TLS on real sockets: every client, errors in words, certificates read again."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import ssl
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import aiops
from aiops.common import urls
from aiops.common.urls import parse_all, write_all
from aiops.errors import AiopsError, ConflictError, Unauthorised, Untrusted, UsageError
from aiops.net import tls_listener
from aiops.net.tls import TlsClient, TlsServer
from aiops.net.tls_socket import TlsSocket
from aiops.serving.config import Config
from tests.certificates import foreign, ours
from tests.support import PATIENCE, ServerThread

START = {"w": np.zeros(300_000, np.float32), "b": np.zeros(3, np.float32)}
STEPS = 6


@pytest.fixture(autouse=True)
def over_tcp(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have clients on this machine use TCP."""
    monkeypatch.setenv("AIOPS_NO_SHM", "1")


@pytest.fixture(scope="module")
def server() -> Iterator[ServerThread]:
    with ServerThread(policy="asgd", lr=0.5, no_shm=True, **ours().settings()) as running:
        yield running


def gradients(params: Any) -> dict[str, np.ndarray]:
    return {name: params[name] - 1 for name in params}


def trained(url: str, tls: aiops.Tls | None) -> Any:
    with aiops.Worker(url, START, tls=tls, timeout=PATIENCE) as worker:
        for _ in range(STEPS):
            worker.step(gradients)
        return {name: np.array(worker.params[name]) for name in worker.params}


async def trained_async(url: str, tls: aiops.Tls | None) -> Any:
    async with aiops.AsyncWorker(url, START, tls=tls, timeout=PATIENCE) as worker:
        for _ in range(STEPS):
            await worker.step(gradients)
        return {name: np.array(worker.params[name]) for name in worker.params}


def reached(kind: str, url: str, tls: aiops.Tls | None) -> Any:
    if kind == "blocking":
        return trained(url, tls)
    return asyncio.run(trained_async(url, tls))


def pinged(kind: str, url: str) -> None:
    """Connect in a short time."""

    async def ping() -> None:
        async with aiops.AsyncClient(url, tls=ours().tls, timeout=0.5) as client:
            await client.ping()

    if kind == "asyncio":
        asyncio.run(ping())
    else:
        aiops.Client(url, tls=ours().tls, timeout=0.5).close()


CLIENTS = ("blocking", "asyncio")


class TestTraining:
    @pytest.mark.parametrize("client", CLIENTS)
    @pytest.mark.parametrize("shards", [1, 2])
    def test_the_parameters_are_those_of_plain_tcp(self, client: str, shards: int) -> None:
        found = []
        for settings, tls in (({}, None), (ours().settings(), ours().tls)):
            given = {"policy": "asgd", "lr": 0.5, "shards": shards, "shard_bytes": 1, **settings}
            with ServerThread(**given) as running:
                found.append(reached(client, running.url, tls))
        plain, encrypted = found
        for name in START:
            np.testing.assert_array_equal(plain[name], encrypted[name])

    def test_files_come_from_the_environment(
        self, server: ServerThread, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("AIOPS_TLS_CA", str(ours().ca))
        monkeypatch.setenv("AIOPS_TLS_CERT", str(ours().client))
        monkeypatch.setenv("AIOPS_URL", server.url)
        with aiops.Client(timeout=PATIENCE) as client:
            assert client.ping() > 0
            assert not client.near

    def test_a_large_model_survives(self) -> None:
        values = {"w": np.random.default_rng(1).standard_normal(3_000_000).astype(np.float32)}
        with (
            ServerThread(policy="asgd", lr=1.0, **ours().settings(mutual=False)) as running,
            aiops.Client(
                running.url, role="worker", tls=ours().anonymous, timeout=PATIENCE
            ) as client,
        ):
            params = client.define(values)
            client.exchange(params, values)
            np.testing.assert_array_equal(params["w"], np.zeros_like(values["w"]))

    def test_alternatives(self, server: ServerThread) -> None:
        with socket.socket() as unused:
            unused.bind(("127.0.0.1", 0))
            closed = urls.address(*unused.getsockname())
            url = f"aiops+tls://{closed},{urls.address(*urls.parse(server.url))}"
            with aiops.Client(url, tls=ours().tls, timeout=PATIENCE) as client:
                client.ping()


class TestRefusals:
    @pytest.mark.parametrize("client", CLIENTS)
    def test_no_certificate(self, server: ServerThread, client: str) -> None:
        with pytest.raises(Untrusted, match="AIOPS_TLS_CERT and AIOPS_TLS_KEY"):
            reached(client, server.url, ours().anonymous)

    @pytest.mark.parametrize("client", CLIENTS)
    def test_a_foreign_certificate(self, server: ServerThread, client: str) -> None:
        tls = aiops.Tls(ca=ours().ca, cert=foreign().client)
        with pytest.raises(Untrusted, match="does not know the issuer"):
            reached(client, server.url, tls)

    @pytest.mark.parametrize("client", CLIENTS)
    def test_an_expired_certificate(self, server: ServerThread, client: str) -> None:
        expired = ours().issue("expired", "worker.test", expired=True)
        with pytest.raises(Untrusted, match="has expired"):
            reached(client, server.url, aiops.Tls(ca=ours().ca, cert=expired))

    @pytest.mark.parametrize("client", CLIENTS)
    def test_a_server_of_another_ca(self, server: ServerThread, client: str) -> None:
        with pytest.raises(Untrusted, match="not issued by a CA that is known here"):
            reached(client, server.url, foreign().tls)

    @pytest.mark.parametrize("client", CLIENTS)
    @pytest.mark.parametrize("wrong", ["expired", "other-name"])
    def test_a_server_with_a_wrong_certificate(self, client: str, wrong: str) -> None:
        hosts = ("127.0.0.1",) if wrong == "expired" else ("elsewhere.test",)
        cert = ours().issue(wrong, *hosts, expired=wrong == "expired")
        text = "has expired" if wrong == "expired" else "for other names"
        with (
            ServerThread(policy="asgd", tls_cert=cert) as running,
            pytest.raises(Untrusted, match=text),
        ):
            reached(client, running.url, ours().anonymous)

    @pytest.mark.parametrize("client", CLIENTS)
    def test_a_plain_client(self, server: ServerThread, client: str) -> None:
        with pytest.raises(Unauthorised, match=r"connect to aiops\+tls://"):
            reached(client, server.url.replace("+tls", ""), None)

    @pytest.mark.parametrize("client", CLIENTS)
    def test_a_server_without_tls(self, client: str) -> None:
        with ServerThread(policy="asgd") as running:
            url = running.url.replace("aiops:", "aiops+tls:")

            with pytest.raises(AiopsError, match="without --tls-cert"):
                pinged(client, url)

    def test_tls_1_2(self, server: ServerThread) -> None:
        context = ssl.create_default_context(cafile=ours().ca)
        context.load_cert_chain(ours().client)
        context.maximum_version = ssl.TLSVersion.TLSv1_2
        with (
            socket.create_connection(urls.parse(server.url), PATIENCE) as sock,
            pytest.raises(ssl.SSLError, match=r"PROTOCOL_VERSION|protocol version"),
        ):
            context.wrap_socket(sock, server_hostname="127.0.0.1")

    def test_tls_files_for_a_plain_url(self) -> None:
        with pytest.raises(UsageError, match=r"for aiops\+tls"):
            aiops.Client("aiops://host", tls=ours().tls)


class TestStrangers:
    def test_idle_ones_are_ended(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(tls_listener, "HANDSHAKES", 4)
        given = {**ours().settings(), "hello_deadline": PATIENCE}
        with ServerThread(policy="asgd", **given) as running, contextlib.ExitStack() as stack:
            where = urls.parse(running.url)
            idle = [
                stack.enter_context(socket.create_connection(where, PATIENCE)) for _ in range(9)
            ]
            trained(running.url, ours().tls)
            assert idle[0].recv(1) == b""

    def test_a_handshake_has_a_deadline(self) -> None:
        given = {**ours().settings(), "hello_deadline": 0.1}
        with (
            ServerThread(policy="asgd", **given) as running,
            socket.create_connection(urls.parse(running.url), PATIENCE) as idle,
        ):
            assert idle.recv(1) == b""


class TestReload:
    def test_new_connections_have_the_new_certificate(
        self, tmp_path: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        cert = tmp_path / "server.pem"
        cert.write_bytes(ours().server.read_bytes())
        with ServerThread(policy="asgd", tls_cert=cert) as running:
            with aiops.Client(running.url, tls=ours().anonymous, timeout=PATIENCE) as client:
                cert.write_bytes(foreign().server.read_bytes())
                reload(running)
                client.ping()  # the connection that there was goes on
            with pytest.raises(Untrusted):
                aiops.Client(running.url, tls=ours().anonymous, timeout=PATIENCE)
            cert.write_text("nothing")
            with caplog.at_level(logging.ERROR):
                reload(running)
            assert "stay as they were" in caplog.text
            aiops.Client(running.url, tls=foreign().anonymous, timeout=PATIENCE).close()


def reload(running: ServerThread) -> None:
    done = threading.Event()

    def call() -> None:
        assert running.server is not None
        running.server.reload()
        done.set()

    assert running._loop is not None
    running._loop.call_soon_threadsafe(call)
    assert done.wait(PATIENCE)


class TestSettings:
    @pytest.mark.parametrize(
        ("settings", "text"),
        [
            ({"tls_ca": "ca"}, "give that, too"),
            ({"tls_key": "key"}, "give that, too"),
            ({"tls_cert": "cert", "shards": 2}, "needs --tls-ca"),
            ({"tls_cert": "cert", "policy": "average"}, "--tls-ca, too"),
            ({"tls_cert": "cert", "host": "0.0.0.0"}, "without a token"),
            ({"standby": "aiops+tls://a", "state": "s"}, "needs --tls-cert"),
            ({"standby": "a", "state": "s", "tls_cert": "c", "tls_ca": "c"}, "both speak TLS"),
        ],
    )
    def test_what_cannot_work(self, settings: dict[str, Any], text: str) -> None:
        named = {
            name: Path(value) if name in ("tls_cert", "tls_key", "tls_ca", "state") else value
            for name, value in settings.items()
        }
        with pytest.raises((UsageError, ConflictError), match=text):
            Config(**named)

    def test_certificates_of_clients_stand_in_for_a_token(self) -> None:
        Config(host="0.0.0.0", tls_cert=Path("cert"), tls_ca=Path("ca"))

    def test_files_that_cannot_be_used(self, tmp_path: Path) -> None:
        bad = tmp_path / "bad.pem"
        with pytest.raises(UsageError, match="No such file"):
            TlsServer(bad, None, None)
        bad.write_text("nothing")
        with pytest.raises(UsageError, match="not a certificate"):
            TlsServer(bad, None, None)
        with pytest.raises(UsageError, match="no certificates in PEM"):
            TlsClient(aiops.Tls(ca=bad))
        with pytest.raises(UsageError, match="without a certificate"):
            aiops.Tls(key=bad)

    def test_urls(self) -> None:
        url = "aiops+tls://a:7171+f:7171,b:7171"
        servers = parse_all(url)
        assert all(server.tls for server in servers)
        assert write_all(servers) == url
        assert servers[0].url == "aiops+tls://a:7171"
        assert not parse_all("aiops://a")[0].tls


class TestSocket:
    """The face of a socket: what is not sent is sent next, and what was read ahead is pending."""

    @pytest.fixture
    def ends(self) -> Iterator[tuple[TlsSocket, ssl.SSLSocket]]:
        ours_end, theirs = socket.socketpair()
        context = TlsServer(ours().server, None, None).context
        plain = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        plain.load_cert_chain(ours().server)
        plain.num_tickets = context.num_tickets
        client = TlsSocket(ours_end, TlsClient(ours().anonymous).target("localhost"), "it")
        made: list[ssl.SSLSocket] = []
        thread = threading.Thread(
            target=lambda: made.append(plain.wrap_socket(theirs, server_side=True))
        )
        thread.start()
        client.handshake(lambda: PATIENCE)
        client.settimeout(None)  # as a connection does
        thread.join()
        yield client, made[0]
        client.close()
        made[0].close()

    def test_read_ahead(self, ends: tuple[TlsSocket, ssl.SSLSocket]) -> None:
        client, server = ends
        server.sendall(b"abcdef")
        room = bytearray(2)
        assert client.recv_into(room) == 2
        assert client.pending
        rest = bytearray(4)
        assert client.recv_into(rest, 0, socket.MSG_WAITALL) == 4
        assert bytes(room + rest) == b"abcdef"
        assert not client.pending
        with pytest.raises(BlockingIOError):
            client.recv_into(rest, 0, socket.MSG_DONTWAIT)
        server.close()
        assert client.recv_into(rest) == 0

    def test_a_full_socket(self, ends: tuple[TlsSocket, ssl.SSLSocket]) -> None:
        client, server = ends
        data = np.random.default_rng(2).bytes(3 << 20)
        left, refused = memoryview(data), 0
        received = bytearray()
        while left:
            try:
                left = left[client.sendmsg([left], (), socket.MSG_DONTWAIT) :]
            except BlockingIOError:
                refused += 1
                received += server.recv(1 << 16)
        assert refused
        while len(received) < len(data):
            received += server.recv(1 << 16)
        assert bytes(received) == data


def test_an_authority_is_made_by_the_command(tmp_path: Path) -> None:
    from typer.testing import CliRunner

    from aiops.cli import tls as command

    def run(*words: str) -> Any:
        return CliRunner().invoke(command.app, list(words))

    folder = tmp_path / "tls"
    assert run("init", str(folder), "--host", "db.test").exit_code == 0
    assert (folder / "ca.key").stat().st_mode & 0o777 == 0o600
    assert isinstance(run("init", str(folder)).exception, UsageError)
    assert run("client", str(folder), "alice").exit_code == 0
    assert isinstance(run("client", str(folder), "alice").exception, UsageError)
    assert isinstance(run("client", str(folder), "../x").exception, UsageError)
    made = {f"tls_{name}": folder / file for name, file in FILES.items()}
    tls = aiops.Tls(ca=folder / "ca.pem", cert=folder / "alice.pem", key=folder / "alice.key")
    with ServerThread(policy="asgd", **made) as running:
        trained(running.url, tls)
        impostor = aiops.Tls(folder / "ca.pem", folder / "ca.pem", folder / "ca.key")
        with pytest.raises(Untrusted):
            trained(running.url, impostor)
    # A client's certificate is not a server's.
    with (
        ServerThread(
            policy="asgd", tls_cert=folder / "alice.pem", tls_key=folder / "alice.key"
        ) as running,
        pytest.raises(Untrusted),
    ):
        trained(running.url, tls)


FILES = {"cert": "server.pem", "key": "server.key", "ca": "ca.pem"}
