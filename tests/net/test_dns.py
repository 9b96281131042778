"""Host names that are looked up: slowly, in vain, and with several addresses of which some answer.

The name server is ours: `socket.getaddrinfo`, as `aiops.net.dns` sees it, says what a test wants.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest

from aiops import AsyncClient, Client
from aiops.client.backoff import Attempts
from aiops.common.urls import ServerAddress
from aiops.errors import ConnectionLost
from aiops.net.dns import addresses, addresses_waited_for, first_reached, literal
from aiops.testing import run
from tests.peers import eventually
from tests.support import PATIENCE, ServerThread

Names = Callable[[Callable[[], list[str]]], None]


@pytest.fixture(autouse=True)
def nothing_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("aiops.net.dns._known", {})


@pytest.fixture
def names(monkeypatch: pytest.MonkeyPatch) -> Names:
    """Sets what a look-up returns or raises."""

    def set_(answer: Callable[[], list[str]]) -> None:
        def getaddrinfo(host: str, *_rest: Any, **_options: Any) -> list[Any]:
            assert host == "server.example"
            return [(0, 0, 0, "", (found, 0)) for found in answer()]

        known = {"SOCK_STREAM": socket.SOCK_STREAM, "EAI_AGAIN": socket.EAI_AGAIN}
        module = SimpleNamespace(getaddrinfo=getaddrinfo, **known)
        monkeypatch.setattr("aiops.net.dns.socket", module)

    return set_


@pytest.fixture
def silent(names: Names) -> Iterator[threading.Event]:
    """A name server that says nothing until the test is over."""
    over, asked = threading.Event(), threading.Event()

    def answer() -> list[str]:
        asked.set()
        over.wait(PATIENCE)
        raise socket.gaierror("nobody knows")

    names(answer)
    yield asked
    over.set()


def never() -> None:
    """Nothing ends a wait."""


def waiting(host: str, patience: float) -> tuple[str, ...]:
    return addresses_waited_for(host, patience, never)


def awaiting(host: str, patience: float) -> tuple[str, ...]:
    return asyncio.run(addresses(host, patience))


both = pytest.mark.parametrize("look_up", [waiting, awaiting])


@pytest.mark.parametrize("host", ["127.0.0.1", "::1", "fe80::1%1"])
def test_an_address_is_known(host: str) -> None:
    assert literal(host) == (host,)


def test_a_name_is_not() -> None:
    assert literal("localhost") is None


@both
def test_this_machine_is_found(look_up: Callable[[str, float], tuple[str, ...]]) -> None:
    assert set(look_up("localhost", PATIENCE)) <= {"127.0.0.1", "::1"}


@both
def test_addresses_keep_their_order_and_come_once(
    look_up: Callable[[str, float], tuple[str, ...]], names: Names
) -> None:
    names(lambda: ["203.0.113.2", "203.0.113.1", "203.0.113.2"])
    assert look_up("server.example", PATIENCE) == ("203.0.113.2", "203.0.113.1")


@both
@pytest.mark.parametrize("host", ["x" * 70 + ".example", "a..b"])
def test_what_cannot_be_a_name(look_up: Callable[[str, float], tuple[str, ...]], host: str) -> None:
    with pytest.raises(OSError, match="cannot be looked up: "):
        look_up(host, PATIENCE)


@both
def test_no_answer_in_time(
    look_up: Callable[[str, float], tuple[str, ...]], silent: threading.Event
) -> None:
    with pytest.raises(TimeoutError, match=r"cannot be looked up: no answer in 0\.05 s"):
        look_up("server.example", 0.05)
    assert silent.wait(PATIENCE)


@both
def test_the_last_addresses_are_returned_while_the_name_server_is_silent(
    look_up: Callable[[str, float], tuple[str, ...]], names: Names
) -> None:
    names(lambda: ["203.0.113.2"])
    look_up("server.example", PATIENCE)
    over = threading.Event()

    def silent() -> list[str]:
        over.wait(PATIENCE)
        raise socket.gaierror("it is over")

    names(silent)
    began = time.monotonic()
    assert look_up("server.example", PATIENCE) == ("203.0.113.2",)
    assert time.monotonic() - began < PATIENCE / 2
    over.set()


@both
@pytest.mark.parametrize(("code", "known"), [(socket.EAI_AGAIN, True), (socket.EAI_NONAME, False)])
def test_they_are_if_it_cannot_answer_now_but_not_if_there_is_no_such_host(
    look_up: Callable[[str, float], tuple[str, ...]], names: Names, code: int, known: bool
) -> None:
    def fails() -> list[str]:
        raise socket.gaierror(code, "it says so")

    names(lambda: ["203.0.113.2"])
    look_up("server.example", PATIENCE)
    names(fails)
    if known:
        assert look_up("server.example", PATIENCE) == ("203.0.113.2",)
    else:
        with pytest.raises(OSError, match="cannot be looked up: it says so"):
            look_up("server.example", PATIENCE)


def test_a_wait_can_be_ended(silent: threading.Event) -> None:
    def check() -> None:
        assert silent.wait(PATIENCE)
        raise ConnectionLost("enough")

    with pytest.raises(ConnectionLost, match="enough"):
        addresses_waited_for("server.example", PATIENCE, check)


class TestClients:
    """Both kinds, with a server whose name stands for more than one address."""

    def test_the_next_address_is_tried(self, names: Names) -> None:
        with ServerThread() as server:
            port = server.url.rpartition(":")[2]
            names(lambda: ["127.0.0.77", "127.0.0.1"])
            with Client(f"aiops://server.example:{port}", timeout=PATIENCE) as client:
                assert client.ping() > 0

            async def main() -> float:
                async with AsyncClient(f"aiops://server.example:{port}", timeout=PATIENCE) as ps:
                    return await ps.ping()

            assert asyncio.run(main()) > 0

    @pytest.mark.parametrize("client", [Client, AsyncClient])
    def test_a_name_that_nobody_knows(
        self,
        client: type[Client] | type[AsyncClient],
        names: Names,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        def unknown() -> list[str]:
            raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

        names(unknown)
        pause = Attempts.pause  # the first attempt is the last: none is cut by the deadline
        monkeypatch.setattr(Attempts, "pause", lambda self, _now, why: pause(self, self.until, why))
        with pytest.raises(
            ConnectionLost, match=r"'server\.example' cannot be looked up: Name or service not"
        ):
            connect(client("aiops://server.example:7171", timeout=PATIENCE))

    def test_nothing_waits_for_a_look_up_at_the_end(self, silent: threading.Event) -> None:
        async def main() -> None:
            client = AsyncClient("aiops://server.example:7171", timeout=PATIENCE)
            connecting = asyncio.ensure_future(client.connect())
            await asyncio.to_thread(silent.wait, PATIENCE)
            connecting.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await connecting
            await client.close()

        began = time.monotonic()
        asyncio.run(main())
        assert time.monotonic() - began < PATIENCE / 2


class TestFirst:
    """In virtual time: a silent address sleeps for ever."""

    def reached(self, *hosts: str) -> tuple[str, float]:
        tried: list[str] = []

        async def reach(host: str) -> str:
            tried.append(host)
            if host == "silent":
                await asyncio.sleep(1000)
            if host == "refuses":
                raise ConnectionRefusedError(111, "refused")
            return host

        async def main() -> tuple[str, float]:
            loop = asyncio.get_running_loop()
            async with asyncio.timeout(12):
                found = await first_reached(hosts, loop.time() + 12, reach)
            return found, loop.time()

        try:
            return run(main())
        finally:
            assert tried == list(hosts[: len(tried)])

    def test_the_first_that_answers_is_had(self) -> None:
        assert self.reached("a", "b") == ("a", 0)
        assert self.reached("refuses", "b", "silent") == ("b", 0)

    def test_a_silent_one_leaves_the_others_their_share(self) -> None:
        assert self.reached("silent", "b", "c") == ("b", pytest.approx(4))
        assert self.reached("silent", "silent", "c") == ("c", pytest.approx(8))

    def test_the_last_ones_error_is_told(self) -> None:
        with pytest.raises(ConnectionRefusedError):
            self.reached("silent", "refuses")
        with pytest.raises(TimeoutError):
            self.reached("refuses", "silent")


def test_a_connection_that_is_being_made_can_be_interrupted() -> None:
    with socket.create_server(("127.0.0.1", 0), backlog=0) as full, contextlib.ExitStack() as stack:
        # Nobody accepts: when the line of those who wait is full, a connection is not answered.
        for _ in range(4):
            other = stack.enter_context(socket.socket())
            other.setblocking(False)
            other.connect_ex(full.getsockname())
        server = stack.enter_context(ServerThread())
        client = stack.enter_context(Client(server.url, timeout=PATIENCE))
        client._connection.hang_up()
        client._connection._attempts._servers = (ServerAddress(*full.getsockname()),)
        with ThreadPoolExecutor() as pool:
            waiting = pool.submit(client.ping)
            eventually(
                lambda: client._connection.dialler.socket is not None, "an attempt to connect"
            )
            began = time.monotonic()
            client.interrupt()
            with pytest.raises(ConnectionLost, match="was interrupted"):
                waiting.result(PATIENCE)
            assert time.monotonic() - began < PATIENCE / 2


def connect(client: Client | AsyncClient) -> None:
    """Connect and close, with either kind."""
    if isinstance(client, Client):
        with client:
            client.ping()
        return

    async def main() -> None:
        async with client as ps:
            await ps.ping()

    asyncio.run(main())
