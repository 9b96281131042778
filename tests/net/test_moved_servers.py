"""A server that is elsewhere now: connections to where it was are given up, though it is silent."""

from __future__ import annotations

import asyncio
import contextlib
import signal
from collections.abc import Iterator

import pytest

import aiops
from aiops.common import urls
from aiops.net import moved_servers
from tests.support import PATIENCE, ServerThread, server_process

SOON = 5.0
"""Seconds: a beat, a connection, and the machine's other work; a client waits for `PATIENCE`."""


@contextlib.contextmanager
def silent_server() -> Iterator[tuple[str, str, contextlib.ExitStack]]:
    """Yield the URLs of a server that can be stopped and of another, and what stops the first."""
    with (
        server_process("--policy", "asgd") as first,
        ServerThread(policy="asgd") as second,
        contextlib.ExitStack() as stop,
    ):
        stop.callback(first.signal, signal.SIGSTOP)
        try:
            yield first.url, second.url, stop
        finally:
            first.signal(signal.SIGCONT)
            moved_servers.note(urls.parse(first.url), urls.parse(first.url))


@pytest.fixture(params=["tcp", "near"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param == "tcp":
        monkeypatch.setenv("AIOPS_NO_SHM", "1")


@pytest.mark.usefixtures("way")
class TestASilentServer:
    def test_a_call_in_a_thread_goes_to_where_it_is(self) -> None:
        with (
            silent_server() as (first, second, stop),
            aiops.Client(first, timeout=PATIENCE) as client,
        ):
            client.ping()
            stop.close()
            moved_servers.note(urls.parse(first), urls.parse(second))
            assert client.ping() < SOON
            assert client.ping() < SOON

    @pytest.mark.parametrize("waits", [False, True])
    def test_one_of_an_event_loop_does(self, waits: bool) -> None:
        async def main(first: str, second: str, stop: contextlib.ExitStack) -> None:
            async with aiops.AsyncClient(first, timeout=PATIENCE) as client:
                await client.ping()
                stop.close()
                asked = asyncio.create_task(client.ping()) if waits else None
                await asyncio.sleep(0)
                await asyncio.to_thread(moved_servers.note, urls.parse(first), urls.parse(second))
                assert await (asked or client.ping()) < SOON

        with silent_server() as given:
            asyncio.run(main(*given))


def test_an_error_names_the_address_that_it_is_of() -> None:
    """A standby at it speaks of the first address as of its primary's."""
    with ServerThread(policy="asgd") as server:
        first = "aiops://127.0.0.1:1"
        moved_servers.note(urls.parse(first), urls.parse(server.url))
        try:
            with (
                aiops.Client(first, timeout=PATIENCE) as client,
                pytest.raises(aiops.errors.NotReady, match=f"^{server.url} \\(for {first}\\): "),
            ):
                client.fetch()
        finally:
            moved_servers.note(urls.parse(first), urls.parse(first))


def test_a_server_that_is_where_it_was_keeps_its_connections() -> None:
    with ServerThread(policy="asgd") as server:
        where = urls.parse(server.url)

        async def main() -> None:
            async with aiops.AsyncClient(server.url, timeout=PATIENCE) as client:
                connection = client._connection
                moved_servers.note(where, where)
                moved_servers.note(("elsewhere", 1), ("nowhere", 2))
                await client.ping()
                assert client._connection is connection

        asyncio.run(main())
        assert moved_servers.present_address("elsewhere", 1) == ("nowhere", 2)
        moved_servers.note(("elsewhere", 1), ("elsewhere", 1))


def test_a_connection_that_was_made_too_late_is_given_up_at_once() -> None:
    """The server was noted to be elsewhere while the connection was being made."""

    class Connection:
        error = ""

        def server_moved(self, error: Exception) -> None:
            self.error = str(error)

    made, first = Connection(), ("a", 1)
    moved_servers.note(first, ("b", 2))
    moved_servers.watch(made, first, first)
    assert "the server of a:1 is at another address now" in made.error
    moved_servers.note(first, first)
