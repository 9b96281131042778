"""The socket at which the other workers of a round reach this one."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Coroutine
from dataclasses import dataclass
from typing import Any

from aiops.client.ring_link import Link, belongs
from aiops.common import forks
from aiops.errors import ConnectionLost, DeadlineExceeded, RemoteProtocolError
from aiops.net.environment import CURRENT_ENVIRONMENT
from aiops.net.tls import TlsPeers
from aiops.wire.ring_messages import RingHello, Round

_MOST_PENDING = 64
"""Connections that may be pending at once: without a hello, or of a round not known here yet."""


@dataclass(slots=True, eq=False)
class _PendingLink:
    """A connection that was accepted, until it is known whether it belongs to a round."""

    link: Link
    hello: RingHello | None = None
    claimed: bool = False


class Listener:
    """The socket at which the other workers of a round reach this one.

    Parameters
    ----------
    host
        The address to listen at; a free port is taken.
    patience
        Seconds that a connection has to send its hello, and then to be claimed by a round.
    tls
        The certificates, if workers speak TLS to each other.
    """

    host: str
    port: int
    tls: TlsPeers | None

    def __init__(self, host: str, patience: float, tls: TlsPeers | None = None) -> None:
        self._socket = CURRENT_ENVIRONMENT.get().listening_socket(host)
        self._socket.setblocking(False)
        self.host, self.port = host, int(self._socket.getsockname()[1])
        self._patience, self.tls = patience, tls
        self._pending: dict[_PendingLink, asyncio.Task[None]] = {}  # the oldest first
        self._arrived = asyncio.Event()
        self._tasks: set[asyncio.Task[None]] = set()
        forks.note(self)
        self._start(self._accept())

    async def expect(self, this_round: Round, left: int, name: str) -> Link:
        """Wait for the worker before this one in the ring; its hello is still to be answered.

        Raises
        ------
        DeadlineExceeded
            When it does not come in time.
        """
        try:
            async with asyncio.timeout(self._patience):
                while (found := self._claim(this_round, left)) is None:
                    self._arrived.clear()
                    await self._arrived.wait()
        except TimeoutError:
            raise DeadlineExceeded(
                f"worker {name} of round {this_round.number} did not come in {self._patience:g} s:"
                " can it reach this worker's address?"
            ) from None
        found.name = name
        return found

    async def close(self) -> None:
        """Stop listening, and close the connections that belong to no round."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._socket.close()

    def forked(self) -> None:
        """Let go of it in a fork."""
        forks.blank(self._socket.fileno())

    def _claim(self, this_round: Round, left: int) -> Link | None:
        for pending in self._pending:
            if pending.hello is not None and belongs(pending.hello, this_round, left):
                pending.claimed = True  # from here on the link is the caller's to close
                self._pending.pop(pending).cancel()
                return pending.link
        return None

    def _start(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def _accept(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                sock, peer = await loop.sock_accept(self._socket)
            except OSError:  # out of open files, say: there will be some again
                await asyncio.sleep(0.1)
                continue
            try:
                link = Link(sock, "server", f"{peer[0]}:{peer[1]}", self._patience)
            except OSError:  # it has gone again
                sock.close()
                continue
            if len(self._pending) >= _MOST_PENDING:
                oldest = next(iter(self._pending))  # the least likely to be a worker
                # The end of the task closes the link, when nothing reads it any more.
                self._pending.pop(oldest).cancel()
            self._keep(_PendingLink(link))

    def _keep(self, pending: _PendingLink) -> None:
        """Receive a peer's hello, and keep it until its round is known here too."""
        self._pending[pending] = task = self._start(self._receive_hello(pending))
        # Not at the end of the task's own work: one that is cancelled at once never begins it.
        task.add_done_callback(lambda _task: self._forget(pending))

    async def _receive_hello(self, pending: _PendingLink) -> None:
        # a peer that sends no hello in time is no worker of a round
        with contextlib.suppress(ConnectionLost, RemoteProtocolError, TimeoutError):
            async with asyncio.timeout(self._patience):
                if self.tls is not None:
                    await pending.link.secure(self.tls.accepting, server_side=True)
                pending.hello = await pending.link.receive_hello()
            self._arrived.set()
            await asyncio.sleep(self._patience)

    def _forget(self, pending: _PendingLink) -> None:
        self._pending.pop(pending, None)
        if not pending.claimed:
            pending.link.close()
