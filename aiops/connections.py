"""A server's connections: greeted, listened to, and dropped when they stall."""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Callable
from functools import partial

from aiops.config import Config
from aiops.errors import AiopsError, Unavailable
from aiops.events import Event, Joined, Left, Received
from aiops.handshake import Greeter
from aiops.intake import Intake
from aiops.lending import Shared
from aiops.link import Link
from aiops.machine import Measure, unmeasured
from aiops.messages import Error, Message, Release, Share
from aiops.paced import PacedLink
from aiops.pacing import Pacing
from aiops.peer import Peer
from aiops.samehost import peer_process, welcome
from aiops.spin import Lookout
from aiops.surroundings import Surroundings
from aiops.wire import Sink, Wire

_log = logging.getLogger("aiops.server")


class Connections:
    """All connections of one server, and what it knows of each.

    Parameters
    ----------
    config
        The server's: its token, its deadlines, how many connections it takes.
    intake
        The engine's: where payloads are received.
    here
        The server's clock and entropy.
    pacing
        Its bandwidth budget, if it has one.
    post
        Told who has joined, what each says, and who is gone.
    gone
        Called after a connection is.
    measure
        Counts the time spent on what comes.

    Attributes
    ----------
    peers
        Those that are there, by number.
    most
        How many there may be.
    """

    def __init__(
        self,
        config: Config,
        intake: Intake,
        here: Surroundings,
        pacing: Pacing | None,
        post: Callable[[Event], None],
        gone: Callable[[], None],
        measure: Measure = unmeasured,
    ) -> None:
        self._config, self._intake, self._here, self._pacing = config, intake, here, pacing
        self._post, self._gone, self._now = post, gone, here.now
        self._measure = measure
        self.peers: dict[int, Peer] = {}
        self._numbers = 0
        self.most = config.max_connections
        if pacing is not None:
            self.most = min(self.most, pacing.most)
        self._lookout = Lookout(here.spin())
        self._sweeper: asyncio.TimerHandle | None = None

    def accept(self) -> Link:
        """Return the protocol of a new connection."""
        wire = Wire("server", self._intake.place)
        if self._pacing is None:
            return self._counted(Link(wire, self))
        return self._counted(PacedLink(wire, self, self._pacing.pacer))

    def _counted(self, link: Link) -> Link:
        if self._measure is not unmeasured:
            link.buffer_updated = self._measure("receive", link.buffer_updated)  # type: ignore[method-assign]
        return link

    async def accept_near(self, loop: asyncio.AbstractEventLoop, sock: socket.socket) -> None:
        """Begin a connection within this machine."""
        side = welcome(sock)
        if side is None:  # it is gone again
            sock.close()
            return
        link = self._counted(Link(Wire("server", self._intake.place), self))
        link.wire.shared = Shared(partial(side.attach, private=True), side.pass_on)
        link.side, link.peer_name = side, f"process {peer_process(sock)} on this machine"
        await loop.connect_accepted_socket(lambda: link, sock)

    def begin(self, loop: asyncio.AbstractEventLoop) -> None:
        """Sweep, now and every so often: drop those who stall, ping those who are silent."""
        config = self._config
        shortest = min(config.hello_deadline, config.stall_deadline, config.heartbeat)
        self._sweeper = loop.call_later(min(1.0, shortest / 4), self.begin, loop)
        now = self._now()
        crowded = [pool.waiting > 0 for pool in self._intake.pools]
        for peer in list(self.peers.values()):
            error = peer.judge(config, now, *crowded)
            if error is not None:
                _log.warning("dropping %s: %s", peer.link.peer_name, error)
                peer.link.fault(error)

    def end(self, error: AiopsError) -> None:
        """End all of them because of an error; each goes as the loop comes round to it."""
        if self._sweeper is not None:
            self._sweeper.cancel()
        for peer in list(self.peers.values()):
            peer.link.fault(error)

    @property
    def unsent(self) -> bool:
        """Whether something is still to be sent to anybody."""
        return any(peer.link.unsent for peer in self.peers.values())

    @property
    def sent(self) -> int:
        """Bytes that those who are there have taken."""
        return sum(peer.link.sent for peer in self.peers.values())

    # ------------------------------------------------------------ what links tell

    def link_made(self, link: Link) -> None:
        """Greet a new connection, or refuse one too many."""
        self._numbers += 1
        link.number = self._numbers
        greeter = Greeter(self._config.token, self._here.token_bytes(16))
        self.peers[link.number] = Peer(link, greeter, self._now())
        if len(self.peers) > self.most:
            text = f"the server has its {self.most} connections already"
            link.send(link.wire.send(Error(0, Unavailable.code, text, {}, True)))
            link.close()

    def link_heard(self, link: Link, messages: list[tuple[Message, Sink | None]]) -> None:
        """Pass messages on to the engine, those before the welcome to the greeter."""
        peer = self.peers[link.number]
        now = self._now()
        for message, sink in messages:
            if isinstance(message, Release):
                peer.given_back(message.id)
            elif isinstance(message, Share):
                pass  # its wire has seen to it
            elif peer.joined:
                self._post(Received(now, link.number, message, sink))
            else:
                self._greet(peer, message)
        self._lookout.heard()

    def _greet(self, peer: Peer, message: Message) -> None:
        link, greeter = peer.link, peer.greeter
        answer = greeter.greet(message)
        if answer is not None:
            link.send(link.wire.send(answer))
            if isinstance(answer, Error):
                _log.warning("%s refused: %s", link.peer_name, answer.text)
                link.close()
            return
        assert greeter.hello is not None
        peer.joined = True
        hello = greeter.hello
        if isinstance(link, PacedLink):
            link.joined(hello.client)
        _log.info("%s %r joined from %s", hello.role, hello.name, link.peer_name)
        traffic = link.wire.traffic
        self._post(Joined(self._now(), link.number, hello, greeter.proof, traffic))

    def link_stuck(self, link: Link) -> None:
        """Let a peer wait in line for a receive buffer."""
        self._intake.lacking.wait(link.resume)

    def link_lost(self, link: Link, error: AiopsError) -> None:
        """Tell the engine that a connection is gone."""
        peer = self.peers.pop(link.number, None)
        if peer is None:
            return
        peer.lost()
        hello = peer.greeter.hello
        who = f"{hello.role} {hello.name!r}" if hello else "a stranger"
        _log.info("%s at %s is gone: %s", who, link.peer_name, error)
        if peer.joined:
            self._post(Left(self._now(), link.number))
        self._gone()
