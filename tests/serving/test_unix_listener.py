"""Clients on this machine, when there is no descriptor for one."""

from __future__ import annotations

import asyncio
import errno
import os
import socket

import pytest

from aiops.net.unix_socket import welcome
from aiops.serving.unix_listener import UnixListener

pytestmark = pytest.mark.skipif(not hasattr(socket, "AF_UNIX"), reason="Unix sockets")


class Scarce(socket.socket):
    """A listening socket that has no descriptor for the first connection, at the first attempt."""

    attempts = 0
    attempted: asyncio.Event

    def accept(self) -> tuple[socket.socket, object]:
        self.attempts += 1
        self.attempted.set()
        if self.attempts == 1:
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        return super().accept()


def test_a_connection_for_which_there_is_no_descriptor_is_accepted_later(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The event loop did nothing else meanwhile."""

    async def main() -> None:
        accepted = asyncio.get_running_loop().create_future()

        async def accept(sock: socket.socket) -> None:
            accepted.set_result(sock)

        listening = Scarce(socket.AF_UNIX, socket.SOCK_STREAM)
        listening.attempted = asyncio.Event()
        listening.bind(f"\0aiops-test/{os.getpid()}")
        listening.listen()
        listening.setblocking(False)
        listener = UnixListener(lambda host, port: listening, accept)
        listener.begin([("127.0.0.1", 1)])
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as client:
            client.connect(listening.getsockname())
            await listening.attempted.wait()
            for _ in range(100):
                await asyncio.sleep(0)
            assert listening.attempts == 1
            (await asyncio.wait_for(accepted, 20.0)).close()
            assert listening.attempts == 2
        listener.end()

    monkeypatch.setattr("aiops.serving.unix_listener._PAUSE", 0.05)
    asyncio.run(main())


def test_there_is_no_descriptor_for_the_side_channel(monkeypatch: pytest.MonkeyPatch) -> None:
    """It was an exception of a task, which the log had."""

    def none() -> tuple[socket.socket, socket.socket]:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    ours, theirs = socket.socketpair()
    monkeypatch.setattr("socket.socketpair", none)
    with ours, theirs:
        assert welcome(ours) is None
