"""Workers that average under TLS, over real sockets: directly, and through a relay that listens."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import socket
from collections.abc import AsyncIterator
from typing import Any

import numpy as np
import pytest

import aiops
from aiops.client import AsyncModelAverager
from aiops.client.ring_link import connect
from aiops.common.tls_files import Tls
from aiops.errors import AiopsError, UsageError
from aiops.net.environment import CURRENT_ENVIRONMENT
from aiops.net.tls import TlsPeers
from aiops.serving.relay import Relay, RelaySettings
from tests.certificates import foreign, ours
from tests.support import PATIENCE, ServerThread

VALUE, ASKED = np.float32(1.2345), {"interval": 1000.0, "grace": 100.0, "stall": 5.0}


class NatSocket(socket.socket):
    """A socket of a worker that reaches the relay only."""

    relay = 0

    def connect(self, address: Any) -> None:
        if address[1] != self.relay:
            raise ConnectionRefusedError
        super().connect(address)


@contextlib.asynccontextmanager
async def relaying() -> AsyncIterator[tuple[str, bytearray]]:
    """A relay that all connections of workers lead through, and the bytes that it passes on."""
    loop, passed = asyncio.get_running_loop(), bytearray()
    listener = socket.create_server(("127.0.0.1", 0))
    relay, send, env = (
        Relay(listener, RelaySettings()),
        loop.sock_sendall,
        CURRENT_ENVIRONMENT.get(),
    )
    NatSocket.relay = listener.getsockname()[1]

    async def sendall(sock: Any, data: Any) -> None:
        if any(sock is peer.sock for peer in relay._peers.values()):
            passed.extend(data)
        await send(sock, data)

    loop.sock_sendall = sendall  # type: ignore[method-assign, assignment]
    near_only = dataclasses.replace(env, unconnected_socket=lambda host: NatSocket())
    token = CURRENT_ENVIRONMENT.set(near_only)
    task = asyncio.create_task(relay.run())
    try:
        yield f"127.0.0.1:{NatSocket.relay}", passed
    finally:
        CURRENT_ENVIRONMENT.reset(token)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def _joined(averager: AsyncModelAverager) -> None:
    """Wait until it has sent its first `join_round`."""
    async with asyncio.timeout(PATIENCE):
        while averager._core._client.info.layout is None:  # noqa: ASYNC110
            await asyncio.sleep(0.01)


async def averaged(url: str, *tls: Tls | None) -> tuple[list[Any], list[AsyncModelAverager]]:
    """Have a worker for each of these average; return the models and the averagers."""
    params = [{"w": np.zeros(3000, np.float32)} for _ in tls]
    averagers: list[AsyncModelAverager] = []
    async with contextlib.AsyncExitStack() as stack:
        for given, files in zip(params, tls, strict=True):
            averager = AsyncModelAverager(url, given, tls=files, timeout=PATIENCE)
            coming = asyncio.create_task(stack.enter_async_context(averager))
            await _joined(averager)
            await asyncio.gather(coming, *(other.average() for other in averagers))
            averagers.append(averager)
        for number, given in enumerate(params):
            given["w"][:] = VALUE * 2 * number
        await asyncio.gather(*(one.average() for one in averagers))
        return [given["w"] for given in params], averagers


@pytest.mark.parametrize("encrypted", [False, True])
def test_a_relay_sees_values_without_tls_only(encrypted: bool) -> None:
    async def main() -> None:
        tls = ours().settings() if encrypted else {}
        async with relaying() as (address, passed):
            with ServerThread(policy="average", set=ASKED, relay=address, **tls) as server:
                files = ours().tls if encrypted else None
                models, averagers = await averaged(server.url, files, files)
                assert server.url.startswith("aiops+tls://") is encrypted
        for model in models:
            np.testing.assert_array_equal(model, VALUE)
        assert all(one.stats.relayed == one.stats.rounds > 0 for one in averagers)
        assert len(passed) > 2 * 4 * 3000
        values = np.full(16, VALUE, np.float32).tobytes()
        assert (values in passed) is not encrypted

    asyncio.run(main())


def test_workers_at_a_plain_url_that_reach_a_tls_server_by_its_unix_socket(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """They speak TLS to each other, too: the server says so, whatever their URL."""
    monkeypatch.delenv("AIOPS_NO_SHM", raising=False)
    files = {"AIOPS_TLS_CA": ours().ca, "AIOPS_TLS_CERT": ours().client}
    for name, path in files.items():
        monkeypatch.setenv(name, str(path))

    async def main() -> None:
        async with relaying() as (address, passed):
            given = {"relay": address, **ours().settings()}
            with ServerThread(policy="average", set=ASKED, **given) as server:
                plain = server.url.replace("aiops+tls://", "aiops://")
                models, averagers = await averaged(plain, None, None)
        for model in models:
            np.testing.assert_array_equal(model, VALUE)
        assert all(one.stats.relayed == one.stats.rounds > 0 for one in averagers)
        assert len(passed) > 2 * 4 * 3000
        assert np.full(16, VALUE, np.float32).tobytes() not in passed

    asyncio.run(main())


def test_three_workers_of_which_none_is_behind_a_relay() -> None:
    async def main() -> None:
        with ServerThread(policy="average", set=ASKED, **ours().settings()) as server:
            models, averagers = await averaged(server.url, *[ours().tls] * 3)
        for model in models:
            np.testing.assert_allclose(model, 2 * VALUE, rtol=1e-6)
        assert all(one.stats.failed == 0 < one.stats.rounds for one in averagers)

    asyncio.run(main())


async def refused(port: int, tls: Tls | None) -> bool:
    """Connect to a worker's port as a stranger; return whether it is left without an answer."""
    link = await connect("127.0.0.1", port, "victim", PATIENCE)
    try:
        if tls is not None:
            await link.secure(TlsPeers(tls).dialling, server_side=False)
        await link.receive()
    except AiopsError:
        return True
    finally:
        link.close()
    return False


def test_a_stranger_at_a_worker_s_port_is_left() -> None:
    """One of the plain wire, and one with a certificate of another CA."""

    async def main() -> None:
        quick = {**ASKED, "stall": 0.5}
        with ServerThread(policy="average", set=quick, **ours().settings()) as server:
            async with AsyncModelAverager(server.url, {"w": np.zeros(3)}, tls=ours().tls) as one:
                loop = one._core.loop
                assert loop is not None
                port = loop.rounds._listener.port
                mixed = aiops.Tls(ca=ours().ca, cert=foreign().client)
                assert await refused(port, mixed)
                assert await refused(port, aiops.Tls(ca=foreign().ca, cert=ours().client))
                assert await refused(port, None)

    asyncio.run(main())


def test_each_side_s_tls_is_kept_to(monkeypatch: pytest.MonkeyPatch) -> None:
    """The URL's and the server's, where a Unix socket takes both."""
    for name in ("AIOPS_NO_SHM", "AIOPS_TLS_CA", "AIOPS_TLS_CERT"):
        monkeypatch.delenv(name, raising=False)

    async def average(url: str, tls: Tls | None) -> None:
        async with AsyncModelAverager(url, {"w": np.zeros(3)}, tls=tls, timeout=PATIENCE):
            pass

    with ServerThread(policy="average", set=ASKED, **ours().settings()) as server:
        plain = server.url.replace("aiops+tls://", "aiops://")
        with pytest.raises(UsageError, match="set AIOPS_TLS_CA, AIOPS_TLS_CERT"):
            asyncio.run(average(plain, None))
    with ServerThread(policy="average", set=ASKED) as server:
        encrypted = server.url.replace("aiops://", "aiops+tls://")
        with pytest.raises(UsageError, match="in the open: start it with --tls-cert"):
            asyncio.run(average(encrypted, ours().tls))


def test_what_each_needs() -> None:
    with pytest.raises(UsageError, match="set AIOPS_TLS_CA, AIOPS_TLS_CERT and AIOPS_TLS_KEY"):
        AsyncModelAverager("aiops+tls://127.0.0.1:1", {"w": np.zeros(3)}, tls=ours().anonymous)
