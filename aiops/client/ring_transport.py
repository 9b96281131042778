"""One round: connections to both neighbours, directly or through a relay, and chunks."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Coroutine, Sequence
from itertools import chain
from typing import Any

from aiops.averaging.ring_allreduce import Piece, Ring
from aiops.averaging.routes import Address, Routes
from aiops.client.ring_link import Link, belongs, connect, unknown
from aiops.client.ring_listener import Listener
from aiops.client.ring_relay import through_relay
from aiops.common import urls
from aiops.errors import AiopsError, RemoteProtocolError
from aiops.model.parts import Part
from aiops.wire.messages import Message
from aiops.wire.ring_messages import RingChunk, Round
from aiops.wire.ring_proofs import ChunkSeal
from aiops.wire.sinks import Sink
from aiops.wire.traffic import Traffic


class ChunkLanding(Sink):
    """The sink of one chunk: straight into its place, and into the mean when it is whole.

    Parameters
    ----------
    ring, message
        This worker's part of the ring, and the chunk that is coming.
    send_on
        Is given the chunk that follows from it, if any.
    seal
        Checks chunks that came through a relay; None: it came directly.

    Raises
    ------
    RemoteProtocolError
        When it is not what is expected next.
    """

    def __init__(
        self,
        ring: Ring,
        message: RingChunk,
        send_on: Callable[[Piece], None],
        seal: ChunkSeal | None,
    ) -> None:
        [self._part], self._hop = message.parts, message.hop
        self._ring, self._send_on, self._seal, self._sealed = ring, send_on, seal, message.seal
        part = self._part
        self._view = ring.room(part.start, part.stop, self._hop, part.codec, part.nbytes)

    def view(self, part: int, offset: int) -> memoryview:
        """Return where these bytes belong."""
        return self._view[offset:]

    def filled(self, part: int, offset: int, nbytes: int) -> None:
        """Process the chunk when it is whole."""
        if offset + nbytes == len(self._view):
            if self._seal is not None:
                self._seal.check(self._sealed, self._part, self._hop, self._view)
            onward = self._ring.received(self._part.start, self._hop)
            if onward is not None:
                self._send_on(onward)

    def abandoned(self) -> None:
        """Do nothing: the round is void."""


class Neighbours:
    """The connections of one worker in one round: from the worker before it, and to the next.

    Parameters
    ----------
    this_round
        The round's members.
    listener
        Where this worker is reached.
    patience
        Seconds that a wait for another worker may last.
    routes
        How the members were reached before.
    """

    def __init__(
        self, this_round: Round, listener: Listener, patience: float, routes: Routes
    ) -> None:
        self._round, self._listener = this_round, listener
        self._patience, self._routes = patience, routes
        self._made: list[list[Link]] = []  # all that were begun, by neighbour

    async def before(self) -> Link:
        """Return the connection from the worker before this one, its hello answered."""
        this_round, made = self._round, self._begin()
        left = (this_round.rank - 1) % len(this_round.members)
        name = self._name(left)

        async def direct() -> Link:
            made.append(found := await self._listener.expect(this_round, left, name))
            return found

        async def relayed() -> Link:
            found = await self._relayed(left, False, name, made)
            if not belongs(await found.receive_hello(), this_round, left):
                raise unknown(found, this_round)
            return found

        # Only the one that is chosen is answered: the other side takes what is answered.
        found = await self._reached(self._member(left), direct, relayed, made)
        await found.answer(this_round)
        return found

    async def after(self) -> Link:
        """Return the connection to the next worker, which has answered its hello."""
        this_round, made = self._round, self._begin()
        right = (this_round.rank + 1) % len(this_round.members)
        name, (host, port) = self._name(right), self._member(right)
        tls = self._listener.tls

        async def direct() -> Link:
            made.append(found := await connect(host, port, name, self._patience))
            if tls is not None:
                await found.secure(tls.dialling, server_side=False)
            await found.greet(this_round, right)
            return found

        async def relayed() -> Link:
            found = await self._relayed(this_round.rank, True, name, made)
            await found.greet(this_round, right)
            return found

        return await self._reached((host, port), direct, relayed, made)

    def close(self, traffic: Traffic) -> None:
        """Close all connections, and add what crossed them."""
        for link in chain.from_iterable(self._made):
            counted = link.wire.traffic
            traffic.bytes_in += counted.bytes_in
            traffic.bytes_out += counted.bytes_out
            link.close()

    async def _relayed(self, sender: int, sends: bool, name: str, made: list[Link]) -> Link:
        where = self._round, sender, sends, name, self._patience, made
        return await through_relay(*where, self._listener.tls)

    def _begin(self) -> list[Link]:
        made: list[Link] = []
        self._made.append(made)
        return made

    async def _reached(
        self,
        member: Address,
        direct: Callable[[], Coroutine[Any, Any, Link]],
        relayed: Callable[[], Coroutine[Any, Any, Link]],
        made: Sequence[Link],
    ) -> Link:
        """Return the connection that is there first: a direct one, or one through the relay."""
        if not self._round.relay:
            return await direct()
        tasks = [asyncio.ensure_future(direct())]
        try:
            await asyncio.wait(tasks, timeout=self._routes.head_start(member))
            if not _succeeded(tasks[0]):
                tasks.append(asyncio.ensure_future(relayed()))
            waiting = {task for task in tasks if not task.done()}
            while waiting and not any(map(_succeeded, tasks)):
                _, waiting = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)
        successes = [task.result() for task in tasks if _succeeded(task)]
        if not successes:
            raise _neither(*(task.exception() for task in tasks))
        for link in made:
            if link is not successes[0]:
                link.close()
        self._routes.note(member, successes[0].seal is not None)
        return successes[0]

    def _member(self, rank: int) -> Address:
        host, port, _counts = self._round.members[rank]
        return host, port

    def _name(self, rank: int) -> str:
        return urls.address(*self._member(rank))


def _succeeded(task: asyncio.Task[Link]) -> bool:
    return task.done() and not task.cancelled() and task.exception() is None


def _neither(direct: BaseException | None, relayed: BaseException | None) -> BaseException:
    """Return the error of a worker that is reached neither directly nor through the relay."""
    if isinstance(direct, AiopsError) and isinstance(relayed, AiopsError):
        text = f"{direct}; nor does it come through the relay: {relayed}"
        return type(direct)(text, **direct.details)
    return direct or relayed or asyncio.CancelledError()


async def take_part(
    this_round: Round,
    ring: Ring,
    listener: Listener,
    patience: float,
    traffic: Traffic,
    routes: Routes,
) -> int:
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
    routes
        How members were reached before, where there is a relay.

    Returns
    -------
    The number of this worker's connections, of two, that led through the relay.

    Raises
    ------
    ConnectionLost, DeadlineExceeded, RemoteProtocolError, Unauthorised
        Naming the worker that this round failed at.
    """
    neighbours = Neighbours(this_round, listener, patience, routes)
    try:
        before, after = await _both(neighbours.before(), neighbours.after())
        await _pass_on(ring, before, after, this_round.number)
    finally:
        neighbours.close(traffic)
    return (before.seal is not None) + (after.seal is not None)


async def _pass_on(ring: Ring, before: Link, after: Link, number: int) -> None:
    """Receive, add and send on until all of the mean is there, and all of it is sent."""
    out: asyncio.Queue[Piece] = asyncio.Queue()  # of views: what waits here costs no memory
    for piece in ring.begin():
        out.put_nowait(piece)

    def sink_for(message: Message) -> Sink:
        assert isinstance(message, RingChunk), "the wire's table lets nothing else through"
        return ChunkLanding(ring, message, out.put_nowait, before.seal)

    async def receive() -> None:
        while not ring.done:
            for _message, sink in await before.receive(sink_for):
                if sink is None:
                    raise RemoteProtocolError(f"worker {before.name} sent a chunk of nothing")

    async def send() -> None:
        for _ in range(ring.to_send):
            piece = await out.get()
            part = Part(piece.start, piece.stop, piece.codec, piece.view.nbytes, number)
            sealed = b"" if after.seal is None else after.seal.of(part, piece.hop, piece.view)
            await after.send(RingChunk(0, piece.hop, (part,), sealed), [[piece.view]])

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
