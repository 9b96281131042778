"""A relay: pass bytes between workers of a ring that cannot reach each other.

Each connection has a task. It carries out the handshake (`aiops.averaging.relay`), waits until the
other end of its connection is there, and then passes on what comes to that; the task of the other
end does the same in the other direction. A chunk of bytes is received only when the last one has
been sent on, so a receiver that is slow slows its sender down, and a pair needs two buffers of
64 KiB, whatever it carries.

Every wait has a deadline: for the handshake, for the other end, and for a byte in either direction.
The number of connections is bounded; when it is reached, the oldest that has not been admitted
makes room for a new one.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
from collections.abc import Coroutine
from dataclasses import dataclass
from typing import Any

from aiops.averaging.relay import Claim, Meetings, RelayHandshake
from aiops.common import urls
from aiops.errors import AiopsError, ConnectionLost, RemoteProtocolError, UsageError
from aiops.net.environment import CURRENT_ENVIRONMENT
from aiops.net.socket_options import tune
from aiops.wire.connection import Connection, Limits
from aiops.wire.messages import Error, Message

_BUFFER = 64 * 1024  # bytes, in each direction of a pair
_LIMITS = Limits(header=4 << 10, parts=0)
_PAUSE = 0.1  # seconds until the next try, where no file can be opened

_log = logging.getLogger("aiops.relay")


@dataclass(frozen=True, kw_only=True)
class RelaySettings:
    """The settings of a relay.

    Attributes
    ----------
    token
        What the servers share with it whose rings it admits; None: all rings are admitted.
    most
        The most connections at once. A ring of n workers needs up to 2n: one of each worker at
        each of its two connections.
    hello_deadline
        Seconds that a connection has to be admitted.
    meeting_deadline
        Seconds that one waits for its other end.
    idle_deadline
        Seconds after which a pair ends through which no byte has passed.
    """

    token: str | None = None
    most: int = 1024
    hello_deadline: float = 10.0
    meeting_deadline: float = 30.0
    idle_deadline: float = 60.0

    def __post_init__(self) -> None:
        """Check the settings."""
        if self.token == "":
            raise UsageError("the relay's token is empty: give a real one, or none")
        if self.most < 2:
            raise UsageError(f"a relay needs 2 connections at least, not {self.most}")
        for name in ("hello_deadline", "meeting_deadline", "idle_deadline"):
            value = getattr(self, name)
            if not 0 < value < 1e9:
                flag = name.replace("_", "-")
                raise UsageError(f"--{flag} must be more than 0 seconds, not {value}")

    def check_host(self, host: str) -> None:
        """Refuse to serve other machines without a token.

        Raises
        ------
        UsageError
            When it would.
        """
        if self.token is None and not urls.is_loopback(host):
            raise UsageError(
                f"refusing to relay on {host} without a token: any process there could use this"
                " relay. Set AIOPS_RELAY_TOKEN (openssl rand -hex 16 makes a good one), here and"
                " for the server, or listen on 127.0.0.1"
            )


class _Peer:
    """One connection to the relay."""

    def __init__(self, number: int, sock: socket.socket, handshake: RelayHandshake) -> None:
        self.number, self.sock, self.handshake = number, sock, handshake
        self.wire = Connection("server", _LIMITS)
        self.met: asyncio.Future[_Pair] = asyncio.get_running_loop().create_future()
        self.task: asyncio.Task[None] | None = None

    async def receive(self) -> list[Message]:
        """Wait for bytes; return the messages that are whole now."""
        count = await asyncio.get_running_loop().sock_recv_into(self.sock, self.wire.next_buffer())
        if not count:
            raise ConnectionLost("it closed the connection")
        return [message for message, _sink in self.wire.received(count)]

    async def send(self, message: Message) -> None:
        """Send a message."""
        for buffer in self.wire.send(message):
            await asyncio.get_running_loop().sock_sendall(self.sock, buffer)


class _Pair:
    """Two connections that belong together.

    Attributes
    ----------
    last
        The loop's time when a byte passed last.
    bytes
        Those that have passed.
    over
        Set when either direction ends; then both do.
    """

    def __init__(self, first: _Peer, second: _Peer) -> None:
        self._peers = first, second
        self.last = asyncio.get_running_loop().time()
        self.bytes = 0
        self.over = asyncio.Event()
        self._ready = asyncio.Barrier(2)

    async def pass_on(self, source: _Peer) -> None:
        """Pass on what comes from one of them, until it has ended."""
        loop = asyncio.get_running_loop()
        target = self._peers[source is self._peers[0]]
        await source.send(source.handshake.ready())
        await self._ready.wait()  # nothing may come before a relay_ready
        buffer = memoryview(bytearray(_BUFFER))
        with contextlib.suppress(OSError):  # either end is gone, which ends the pair
            while count := await loop.sock_recv_into(source.sock, buffer):
                self.last = loop.time()
                await loop.sock_sendall(target.sock, buffer[:count])
                self.last = loop.time()
                self.bytes += count


class Relay:
    """A relay that listens.

    Parameters
    ----------
    listener
        A socket that listens.
    settings
        The settings.

    Attributes
    ----------
    pairs
        Pairs so far.
    """

    def __init__(self, listener: socket.socket, settings: RelaySettings) -> None:
        listener.setblocking(False)
        self._listener, self._settings = listener, settings
        self._env = CURRENT_ENVIRONMENT.get()
        self._meetings = Meetings()
        self._peers: dict[int, _Peer] = {}  # by number, the oldest first
        self._number = 0
        self._open: set[_Pair] = set()
        self._passed_on = 0  # by pairs that are over
        self.pairs = 0

    @property
    def connections(self) -> int:
        """The connections that are open."""
        return len(self._peers)

    @property
    def waiting(self) -> int:
        """The connections that wait for their other end."""
        return len(self._meetings)

    @property
    def passed_on(self) -> int:
        """The bytes passed on so far, in either direction."""
        return self._passed_on + sum(pair.bytes for pair in self._open)

    async def run(self) -> None:
        """Accept connections until cancelled; then close all."""
        loop = asyncio.get_running_loop()
        try:
            while True:
                try:
                    sock, address = await loop.sock_accept(self._listener)
                except OSError:  # out of open files, say: there will be some again
                    await asyncio.sleep(_PAUSE)
                    continue
                self._begin(sock, f"{address[0]}:{address[1]}")
        finally:
            self._listener.close()
            tasks = [peer.task for peer in self._peers.values() if peer.task is not None]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    # ------------------------------------------------------------ inside

    def _begin(self, sock: socket.socket, name: str) -> None:
        """Begin with a new connection, if there is room for one."""
        try:
            sock.setblocking(False)
            tune(sock)
        except OSError:  # it has gone again
            sock.close()
            return
        if len(self._peers) >= self._settings.most and not self._make_room():
            _log.warning("%s refused: there are %d connections", name, len(self._peers))
            sock.close()
            return
        self._number += 1
        handshake = RelayHandshake(self._settings.token or "", self._env.token_bytes(16))
        peer = _Peer(self._number, sock, handshake)
        self._peers[peer.number] = peer
        peer.task = asyncio.get_running_loop().create_task(self._serve(peer, name))
        # Not at the end of the task's own work: one that is cancelled at once never begins it.
        peer.task.add_done_callback(lambda _task: self._end(peer))

    def _make_room(self) -> bool:
        """End the oldest connection that has not been admitted, if there is one."""
        for peer in self._peers.values():
            if peer.handshake.claim is None:
                self._drop(peer)
                return True
        return False

    def _drop(self, peer: _Peer) -> None:
        """End a connection: it counts no more, and is closed when nothing reads it."""
        self._peers.pop(peer.number, None)
        if peer.task is not None:
            peer.task.cancel()

    def _end(self, peer: _Peer) -> None:
        self._peers.pop(peer.number, None)
        if peer.handshake.claim is not None:
            self._meetings.leave(peer.number, peer.handshake.claim)
        if peer.met.done() and not peer.met.cancelled():
            pair = peer.met.result()
            pair.over.set()
            if pair in self._open:
                self._open.remove(pair)
                self._passed_on += pair.bytes
        peer.wire.lost()
        peer.sock.close()

    async def _serve(self, peer: _Peer, name: str) -> None:
        """Carry out the handshake, meet the other end, and pass on what comes."""
        settings = self._settings
        try:
            async with asyncio.timeout(settings.hello_deadline):
                claim = await self._admit(peer)
            async with asyncio.timeout(settings.meeting_deadline):
                pair = await self._meet(peer, claim)
            await self._until_over(pair, pair.pass_on(peer))
        except TimeoutError:
            _log.info("%s: no hello, or no other end, in time", name)
        except OSError as error:
            _log.info("%s: %s", name, error.strerror or error)
        except AiopsError as error:
            _log.info("%s: %s", name, error)

    async def _admit(self, peer: _Peer) -> Claim:
        """Carry out the handshake.

        Raises
        ------
        RemoteProtocolError
            When the connection is not admitted; it has been told why.
        """
        while peer.handshake.claim is None:
            for message in await peer.receive():
                answer = peer.handshake.receive(message)
                if answer is None:
                    continue
                await peer.send(answer)
                if isinstance(answer, Error):
                    raise RemoteProtocolError(f"refused: {answer.text}")
        return peer.handshake.claim

    async def _meet(self, peer: _Peer, claim: Claim) -> _Pair:
        """Wait for the other end, or be it."""
        found, replaced = self._meetings.arrive(peer.number, claim)
        if replaced is not None:
            self._drop(self._peers[replaced])
        if found is not None:
            other = self._peers[found]
            pair = _Pair(other, peer)
            self.pairs += 1
            self._open.add(pair)
            other.met.set_result(pair)
            peer.met.set_result(pair)
            return pair
        # It may say nothing before it is told that the other end is there; but it may leave.
        leaving = asyncio.ensure_future(peer.receive())
        try:
            either: set[asyncio.Future[Any]] = {leaving, peer.met}
            await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
        finally:
            leaving.cancel()
            await asyncio.wait({leaving})
        if not leaving.cancelled():
            if leaving.exception() is None:
                raise RemoteProtocolError("it spoke before the other end was there")
            leaving.result()
        return peer.met.result()

    async def _until_over(self, pair: _Pair, passing: Coroutine[Any, Any, None]) -> None:
        """Run one direction of a pair until either is over, or no byte has passed for too long."""
        loop, patience = asyncio.get_running_loop(), self._settings.idle_deadline
        work = loop.create_task(passing)
        over = loop.create_task(pair.over.wait())
        try:
            while not (work.done() or over.done()):
                left = pair.last + patience - loop.time()
                if left <= 0:
                    raise ConnectionLost(f"no byte has passed for {patience:g} s")
                both: set[asyncio.Task[Any]] = {work, over}
                await asyncio.wait(both, timeout=left, return_when=asyncio.FIRST_COMPLETED)
            if work.done():
                work.result()
        finally:
            pair.over.set()
            work.cancel()
            over.cancel()
            await asyncio.gather(work, over, return_exceptions=True)
