"""Bandwidth budgets under TLS, on real sockets: what crosses is counted, encrypted as it is."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
import time
from functools import partial
from typing import Any

import numpy as np
import pytest

import aiops
from aiops.common import urls
from aiops.errors import Untrusted
from aiops.net import tls_listener
from aiops.net.paced_tls import PacedTlsTransport
from aiops.net.socket_options import readable
from aiops.net.tls_listener import _Turns
from tests.certificates import foreign, ours
from tests.net.test_tls import reached
from tests.peers import eventually
from tests.proxy import Proxy
from tests.support import PATIENCE, ServerThread, server_process

KB = 1000
CLIENTS = ("blocking", "asyncio")
FAREWELL = 24
"""Bytes with which TLS announces the end of a connection, to a client that may have gone before."""


@pytest.fixture(autouse=True)
def over_tcp(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have clients on this machine use TCP."""
    monkeypatch.setenv("AIOPS_NO_SHM", "1")


def serving(budget: str = "1GB/s", **settings: Any) -> ServerThread:
    given = {"policy": "asgd", "lr": 0.5, "kernels": "numpy", **ours().settings(), **settings}
    return ServerThread(bandwidth_budget=budget, **given)


def exchanges(url: str, nbytes: int, count: int) -> None:
    """Exchange a model so often."""
    model = {"w": np.zeros(nbytes // 4, np.float32)}
    with aiops.Client(url, role="worker", tls=ours().tls, timeout=PATIENCE) as client:
        params = client.define(model)
        for _ in range(count):
            client.exchange(params, model)


def spent(server: ServerThread) -> int:
    """Return the bytes that the server's budget has counted."""
    found: int = server.call(lambda s: s.connections.pacing.pacer.budget.spent)
    return found


def through_tls(proxy: Proxy) -> str:
    return proxy.url.replace("aiops://", "aiops+tls://")


def gone(server: ServerThread) -> None:
    """Wait until the server has no connection, and its pacer none either."""

    def over(running: Any) -> bool:
        return not running.connections.peers and not running.connections.pacing.pacer._links

    eventually(lambda: server.call(over), "the connections have ended")


def crossed(proxy: Proxy) -> int:
    """Return the bytes that have crossed, once all connections have ended.

    The proxy counts what it has passed on; the server may have had it, and be done, before that.
    """
    eventually(lambda: not proxy._pairs, "the proxy has passed on and counted all")
    return proxy.carried["up"] + proxy.carried["down"]


class TestCeiling:
    @pytest.mark.slow
    def test_no_second_sees_more_and_every_byte_of_tls_is_counted(self) -> None:
        """The bytes are counted a second time outside of the server."""
        with serving("400KB/s") as server, Proxy(server.url) as proxy:
            url = through_tls(proxy)
            workers = [
                threading.Thread(target=exchanges, args=[url, 40 * KB, 3], daemon=True)
                for _ in range(3)
            ]
            for worker in workers:
                worker.start()
            for worker in workers:
                worker.join(PATIENCE)
                assert not worker.is_alive()
            gone(server)
            # On a busy machine the last that a server says may find its client gone,
            # and has not crossed the proxy then.
            assert 0 <= spent(server) - crossed(proxy) <= 3 * (FAREWELL + KB)
            least = 3 * 3 * 2 * 40 * KB
            assert least < crossed(proxy) < 1.4 * least
            peak = server.call(lambda s: s.connections.pacing.pacer.budget.total.peak)
            assert 0 < peak <= 400 * KB

    @pytest.mark.slow
    def test_each_worker_has_its_own(self) -> None:
        with serving("1GB/s", worker_budget="100KB/s") as server:
            begun = time.monotonic()
            exchanges(server.url, 20 * KB, 3)
            took = time.monotonic() - begun
            assert took > (3 * 2 * 20 - 12.5) / 100 - 0.1, "less a burst of an eighth of a second"

    @pytest.mark.slow
    def test_the_other_event_loop(self) -> None:
        """The server as a process, which runs on uvloop where that is installed."""
        flags = [f"--{k.replace('_', '-')}={v}" for k, v in ours().settings().items()]
        with server_process("--policy", "asgd", "--bandwidth-budget", "1MB/s", *flags) as server:
            exchanges(server.url, 100 * KB, 4)
            with aiops.Client(server.url, tls=ours().tls, timeout=PATIENCE) as client:
                budget = client.stats()["budget"]
        assert 0 < budget["peak"] <= 1000 * KB

    @pytest.mark.parametrize("encrypted", [False, True])
    def test_with_checksums_no_byte_counts_twice(self, encrypted: bool) -> None:
        tls = {} if encrypted else {"tls_cert": None, "tls_ca": None}
        with serving(**tls) as server, Proxy(server.url) as proxy:
            url, files = (through_tls(proxy), ours().tls) if encrypted else (proxy.url, None)
            with aiops.Client(url, tls=files, checksums=True, timeout=PATIENCE) as client:
                client.ping()
            gone(server)
            assert 0 <= spent(server) - crossed(proxy) <= FAREWELL * encrypted


class TestTraining:
    @pytest.mark.parametrize("client", CLIENTS)
    @pytest.mark.parametrize("shards", [1, 2])
    def test_the_parameters_are_those_without_a_budget(self, client: str, shards: int) -> None:
        found = []
        for budget in ({}, {"bandwidth_budget": "1GB/s"}):
            given = {"policy": "asgd", "lr": 0.5, "shards": shards, **ours().settings(), **budget}
            with ServerThread(**given) as server:
                found.append(reached(client, server.url, ours().tls))
                if budget and shards == 1:
                    assert server.call(lambda s: type(s.connections._link(s._tls.context))) is (
                        PacedTlsTransport
                    )
        without, within = found
        for name in without:
            np.testing.assert_array_equal(without[name], within[name])

    def test_what_came_with_the_message_that_stops_the_reading_is_read_later(self) -> None:
        """Three pushes come at once; after the first this client is not read from for a moment."""
        model = {"w": np.zeros(2048, np.float32)}

        def link(server: Any) -> Any:
            (peer,) = server.connections.peers.values()
            return peer.link

        async def main(server: ServerThread) -> None:
            async with aiops.AsyncClient(server.url, role="worker", tls=ours().tls) as client:
                params = await client.define(model)
                server.call(lambda s: link(s).hold())
                pushes = [asyncio.create_task(client.push(params, model)) for _ in range(3)]
                came = partial(server.call, lambda s: waiting(link(s)) > 3 * 8192)
                await asyncio.to_thread(eventually, came, "all of them have come")
                server.call(lambda s: setattr(link(s), "_owner", Stopping(link(s)._owner)))
                server.call(lambda s: link(s).release())
                async with asyncio.timeout(4.0):  # before a ping would bring more bytes
                    assert len(await asyncio.gather(*pushes)) == 3

        with serving() as server:
            asyncio.run(asyncio.wait_for(main(server), PATIENCE))


def waiting(link: Any) -> int:
    return readable(link.transport.get_extra_info("socket")) or 0


class Stopping:
    """A transport's owner that has the first message held, and the rest soon read."""

    def __init__(self, owner: Any) -> None:
        self._owner, self._stopped = owner, False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._owner, name)

    def link_received(self, link: Any, message: Any, sink: Any) -> None:
        self._owner.link_received(link, message, sink)
        if not self._stopped:
            self._stopped = True
            link.hold()
            asyncio.get_running_loop().call_later(0.01, link.release)


class TestHandshakes:
    @pytest.mark.parametrize("client", CLIENTS)
    def test_a_client_that_is_not_accepted_is_told_why(self, client: str) -> None:
        with serving() as server:
            with pytest.raises(Untrusted, match="AIOPS_TLS_CERT and AIOPS_TLS_KEY"):
                reached(client, server.url, ours().anonymous)
            tls = aiops.Tls(ca=ours().ca, cert=foreign().client)
            with pytest.raises(Untrusted, match="does not know the issuer"):
                reached(client, server.url, tls)
            reached(client, server.url, ours().tls)
            gone(server)

    def test_one_has_a_deadline(self) -> None:
        with (
            serving(hello_deadline=0.1) as server,
            socket.create_connection(urls.parse(server.url), PATIENCE) as idle,
        ):
            idle.sendall(b"\x16")
            with contextlib.suppress(ConnectionResetError):
                assert idle.recv(1) == b""
            gone(server)

    def test_one_that_is_cut_off_leaves_nothing(self) -> None:
        with serving() as server:
            for _ in range(3):
                with socket.create_connection(urls.parse(server.url), PATIENCE) as cut:
                    cut.sendall(b"\x16\x03\x01\x02\x00")
            reached("blocking", server.url, ours().tls)
            gone(server)

    @pytest.mark.parametrize("begins", [b"", b"\x16"])
    def test_those_that_do_not_go_on_keep_others_out_for_a_moment_only(
        self, begins: bytes, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Silent ones are dropped for others, and those that have begun have a deadline."""
        monkeypatch.setattr(tls_listener, "HANDSHAKES", 4)
        deadline = 0.3 if begins else PATIENCE
        with serving(hello_deadline=deadline) as server, contextlib.ExitStack() as stack:
            for _ in range(9):
                where = urls.parse(server.url)
                stack.enter_context(socket.create_connection(where, PATIENCE)).sendall(begins)
            reached("blocking", server.url, ours().tls)

    @pytest.mark.slow
    def test_a_crowd_takes_turns(self) -> None:
        """All at once would each get so few bytes that their clients begin again, without end."""

        async def joined(url: str) -> None:
            async with aiops.AsyncClient(url, tls=ours().tls, timeout=PATIENCE) as client:
                await client.ping()

        async def main(url: str) -> None:
            await asyncio.gather(*(joined(url) for _ in range(40)))

        with serving("40KB/s") as server:
            asyncio.run(asyncio.wait_for(main(server.url), PATIENCE))
            assert spent(server) < 1.4 * 40 * 4096, "few had to begin again: else it is 1.8 times"


class TestTurns:
    async def test_they_are_taken_in_order(self) -> None:
        turns, order = _Turns(lambda: 2), list[int]()
        ends = [asyncio.Event() for _ in range(5)]

        async def one(number: int) -> None:
            async with turns:
                order.append(number)
                await ends[number].wait()

        tasks = [asyncio.create_task(one(number)) for number in range(5)]
        await asyncio.sleep(0)
        assert order == [0, 1]
        tasks[2].cancel()
        ends[1].set()
        await asyncio.wait([tasks[1]])
        await asyncio.sleep(0)
        assert order == [0, 1, 3]
        ends[0].set()
        await asyncio.wait([tasks[0]])
        tasks[4].cancel()  # just as it is given its turn
        ends[3].set()
        await asyncio.wait(tasks)
        assert turns._under_way == 0
        async with turns, turns:
            assert turns._under_way == 2

    async def test_without_a_bound_none_waits(self) -> None:
        turns = _Turns(lambda: None)
        async with turns, turns, turns:
            assert not turns.bounded
