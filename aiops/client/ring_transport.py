"""The sockets of a round: to the next worker of the ring, and from the one before."""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import socket
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from dataclasses import dataclass
from typing import Any

from aiops.averaging.ring_allreduce import Piece, Ring, proof, proves
from aiops.common import forks, urls
from aiops.errors import ConnectionLost, DeadlineExceeded, RemoteProtocolError, Unauthorised
from aiops.model.parts import Part
from aiops.net.environment import CURRENT_ENVIRONMENT
from aiops.net.socket_options import tune
from aiops.wire.connection import Connection, Limits, Messages, with_sinks
from aiops.wire.messages import Error, Message
from aiops.wire.ring_messages import RingChunk, RingHello, Round
from aiops.wire.sinks import Sink
from aiops.wire.state_machine import Side
from aiops.wire.traffic import Traffic

_LIMITS = Limits(header=4 << 10, parts=1)
_MOST_PENDING = 64
"""Connections that may be pending at once: without a hello, or of a round not known here yet."""


class _Landing(Sink):
    """The sink of one chunk: straight into its place, and into the mean when it is whole."""

    def __init__(self, ring: Ring, message: RingChunk, out: asyncio.Queue[Piece]) -> None:
        [self._part], self._hop = message.parts, message.hop
        self._ring, self._out = ring, out
        if self._part.codec != "raw" or self._part.nbytes != self._part.stop - self._part.start:
            raise RemoteProtocolError("a chunk's payload must be its bytes as they are")
        self._view = ring.room(self._part.start, self._part.stop, self._hop)

    def view(self, part: int, offset: int) -> memoryview:
        return self._view[offset:]

    def filled(self, part: int, offset: int, nbytes: int) -> None:
        if offset + nbytes == len(self._view):
            onward = self._ring.received(self._part.start, self._hop)
            if onward is not None:
                self._out.put_nowait(onward)

    def abandoned(self) -> None:
        pass


def _too_early(message: Message) -> Sink:
    raise RemoteProtocolError("a chunk came before its round began")


class Link:
    """One connection between two workers; every wait has a deadline and names the other."""

    def __init__(self, sock: socket.socket, side: Side, name: str, patience: float) -> None:
        sock.setblocking(False)
        tune(sock)
        self.sock, self.name, self.patience = sock, name, patience
        self.wire = Connection(side, _LIMITS)
        forks.note(self)

    async def receive(self, sink_for: Callable[[Message], Sink] = _too_early) -> Messages:
        """Receive what there is, or wait for something; return the messages now whole."""
        loop = asyncio.get_running_loop()
        receiving = loop.sock_recv_into(self.sock, self.wire.next_buffer())
        count = await self._bounded(receiving, "sent nothing")
        if not count:
            raise ConnectionLost(f"worker {self.name} went away in the midst of an average")
        try:
            return with_sinks(self.wire, self.wire.received(count), sink_for)
        except RemoteProtocolError as error:
            raise RemoteProtocolError(f"worker {self.name}: {error}") from None

    async def send(self, message: Message, payloads: Sequence[Sequence[memoryview]] = ()) -> None:
        """Send a message."""
        loop = asyncio.get_running_loop()
        for buffer in self.wire.send(message, payloads):
            await self._bounded(loop.sock_sendall(self.sock, buffer), "took nothing")

    async def receive_hello(self) -> RingHello:
        """Wait for the first message of the other side."""
        while True:
            for message, _sink in await self.receive():
                if isinstance(message, RingHello):
                    return message
                text = message.text if isinstance(message, Error) else f"said {message.kind!r}"
                raise RemoteProtocolError(f"worker {self.name} did not greet, but {text}")

    async def _bounded(self, waiting: Awaitable[Any], what: str) -> Any:
        try:
            async with asyncio.timeout(self.patience):
                return await waiting
        except TimeoutError:
            raise DeadlineExceeded(
                f"worker {self.name} {what} for {self.patience:g} s in the midst of an average:"
                " is it stopped, or behind a firewall?"
            ) from None
        except OSError as error:
            raise ConnectionLost(f"worker {self.name}: {error.strerror or error}") from None

    def close(self) -> None:
        """End the connection; what was sent still arrives."""
        self.wire.lost()
        self.sock.close()

    def forked(self) -> None:
        """Let go of it in a fork."""
        forks.blank(self.sock.fileno())


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
    """

    def __init__(self, host: str, patience: float) -> None:
        self._socket = CURRENT_ENVIRONMENT.get().listening_socket(host)
        self._socket.setblocking(False)
        self.host, self.port = host, int(self._socket.getsockname()[1])
        self._patience = patience
        self._pending: dict[_PendingLink, asyncio.Task[None]] = {}  # the oldest first
        self._arrived = asyncio.Event()
        self._tasks: set[asyncio.Task[None]] = set()
        forks.note(self)
        self._start(self._accept())

    async def expect(self, this_round: Round, left: int, name: str) -> Link:
        """Wait for the worker before this one in the ring, and answer its hello.

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
        reply = proof(this_round.secret, "server", this_round.number, this_round.rank)
        try:
            await found.send(RingHello(0, this_round.number, this_round.rank, reply))
        except BaseException:
            found.close()
            raise
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
            hello = pending.hello
            if (
                hello is not None
                and (hello.number, hello.rank) == (this_round.number, left)
                and proves(hello.proof, this_round.secret, "client", this_round.number, left)
            ):
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
                pending.hello = await pending.link.receive_hello()
            self._arrived.set()
            await asyncio.sleep(self._patience)

    def _forget(self, pending: _PendingLink) -> None:
        self._pending.pop(pending, None)
        if not pending.claimed:
            pending.link.close()


async def _call(this_round: Round, right: int, host: str, port: int, patience: float) -> Link:
    """Connect to the next worker of the ring, and exchange hellos.

    Raises
    ------
    ConnectionLost, DeadlineExceeded
        When it cannot be reached.
    Unauthorised
        When the peer there cannot prove the round's secret; nothing else is sent to it.
    """
    loop = asyncio.get_running_loop()
    name = urls.write(host, port).removeprefix("aiops://")
    sock = None
    try:
        async with asyncio.timeout(patience):
            # Never a name: the loop would look it up in a thread that nothing can end.
            sock = CURRENT_ENVIRONMENT.get().unconnected_socket(str(ipaddress.ip_address(host)))
            sock.setblocking(False)
            await loop.sock_connect(sock, (host, port))
    except ValueError:
        raise RemoteProtocolError(f"the server told of a worker {name}: no IP address") from None
    except OSError as error:  # a TimeoutError is one
        if sock is not None:
            sock.close()
        why = error.strerror or str(error) or f"no answer in {patience:g} s"
        raise ConnectionLost(f"worker {name} cannot be reached from here: {why}") from None
    except BaseException:
        if sock is not None:
            sock.close()
        raise
    try:
        link = Link(sock, "client", name, patience)
    except OSError as error:
        sock.close()
        raise ConnectionLost(f"worker {name}: {error.strerror or error}") from None
    try:
        mine = proof(this_round.secret, "client", this_round.number, this_round.rank)
        await link.send(RingHello(0, this_round.number, this_round.rank, mine))
        reply = await link.receive_hello()
        if (reply.number, reply.rank) != (this_round.number, right) or not proves(
            reply.proof, this_round.secret, "server", this_round.number, right
        ):
            raise Unauthorised(
                f"worker {name} does not know the secret of round {this_round.number}", worker=name
            )
    except BaseException:
        link.close()
        raise
    return link


async def take_part(
    this_round: Round, ring: Ring, listener: Listener, patience: float, traffic: Traffic
) -> None:
    """Carry out one round with the workers that the server told of.

    Parameters
    ----------
    this_round, ring
        The round's members, and this worker's part of the ring.
    listener
        Where this worker is reached.
    patience
        Seconds that a wait for another worker may last.
    traffic
        What was sent and received is added to it.

    Raises
    ------
    ConnectionLost, DeadlineExceeded, RemoteProtocolError, Unauthorised
        Naming the worker that this round failed at.
    """
    size = len(this_round.members)
    left, right = (this_round.rank - 1) % size, (this_round.rank + 1) % size
    names = [
        urls.write(host, port).removeprefix("aiops://") for host, port, _ in this_round.members
    ]
    host, port, _counts = this_round.members[right]
    links: list[Link] = []

    async def expect() -> Link:
        links.append(link := await listener.expect(this_round, left, names[left]))
        return link

    async def call() -> Link:
        links.append(link := await _call(this_round, right, host, port, patience))
        return link

    try:
        before, after = await _both(expect(), call())
        await _pass_on(ring, before, after, this_round.number)
    finally:
        for link in links:
            counted = link.wire.traffic
            traffic.bytes_in += counted.bytes_in
            traffic.bytes_out += counted.bytes_out
            link.close()


async def _pass_on(ring: Ring, before: Link, after: Link, number: int) -> None:
    """Receive, add and send on until all of the mean is there, and all of it is sent."""
    out: asyncio.Queue[Piece] = asyncio.Queue()  # of views: what waits here costs no memory
    for piece in ring.begin():
        out.put_nowait(piece)

    def sink_for(message: Message) -> Sink:
        assert isinstance(message, RingChunk), "the wire's table lets nothing else through"
        return _Landing(ring, message, out)

    async def receive() -> None:
        while not ring.done:
            for _message, sink in await before.receive(sink_for):
                if sink is None:
                    raise RemoteProtocolError(f"worker {before.name} sent a chunk of nothing")

    async def send() -> None:
        for _ in range(ring.to_send):
            piece = await out.get()
            nbytes = piece.stop - piece.start
            part = Part(piece.start, piece.stop, "raw", nbytes, number)
            await after.send(RingChunk(0, piece.hop, (part,)), [[piece.view]])

    await _both(receive(), send())


async def _both(first: Any, second: Any) -> Any:
    """Wait for both; when one fails, end the other, and raise what it failed with."""
    tasks = [asyncio.ensure_future(first), asyncio.ensure_future(second)]
    try:
        return await asyncio.gather(*tasks)
    except BaseException:
        for task in tasks:
            task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.wait(tasks)
        raise
