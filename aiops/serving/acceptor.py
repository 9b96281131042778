"""Accept a server's connections, pass their messages on, and drop those that stall."""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import ssl
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from operator import attrgetter
from typing import Any, Protocol, TypeAlias

from aiops.access.control import AccessControl
from aiops.access.strangers import StrangerPool
from aiops.access.tokens import TokenTable
from aiops.engine.buffer_pool import BufferPool
from aiops.engine.events import Effect, Event, Joined, Left, Received, Warm
from aiops.engine.steady import Steady
from aiops.engine.steady_rows import SteadyRows
from aiops.errors import AiopsError, Corrupted, DeadlineExceeded, Refused, Unavailable
from aiops.net.busy_poll import BusyPoll
from aiops.net.confinement import peer_process
from aiops.net.cpu_count import usable
from aiops.net.environment import Environment
from aiops.net.mailboxes import MailboxTable
from aiops.net.paced_tls import PacedTlsTransport
from aiops.net.paced_transport import PacedTransport
from aiops.net.socket_poller import SocketPoller
from aiops.net.tls import CLOSE_PATIENCE
from aiops.net.transport import MessageTransport
from aiops.net.unix_socket import welcome
from aiops.serving.config import Config
from aiops.serving.newcomers import Newcomers
from aiops.serving.pacing import Pacing
from aiops.serving.peer import Peer
from aiops.serving.profiling import Receiving
from aiops.serving.quota_holds import QuotaHolds
from aiops.serving.shared_bounds import ANSWERS, HEADERS, SharedBound
from aiops.serving.standby.feeds import StandbyFeeds
from aiops.serving.token_file import TokenFile, filter_of
from aiops.store.resources import Resources, unmeasured
from aiops.wire.admin_messages import ADMIN_REQUESTS
from aiops.wire.connection import SMALL, Connection, SinkFor
from aiops.wire.handshake import Admitted, ServerHandshake
from aiops.wire.messages import (
    Error,
    FetchRows,
    Hello,
    Message,
    Push,
    PushRows,
    Release,
    Share,
)
from aiops.wire.server_messages import Greeting, ShardHello
from aiops.wire.shared_payloads import SharedPayloads
from aiops.wire.sinks import Sink
from aiops.wire.standby_messages import Fence, Promote, StandbyHello, TakePlace

_CONTROL = frozenset({Promote, TakePlace, Fence, *ADMIN_REQUESTS})

_SHORTENED = frozenset({Push, FetchRows, PushRows})
"""Requests that there is a short way for."""

_NUMBERS = (1 << 32) - 1
"""Numbers of connections: the row of a steady exchange has 32 bits for them. Then they begin again,
with those that no open connection has; the engine knows nothing more of those that ended."""

_ShortWay: TypeAlias = Callable[[int], bytes | memoryview | None]

_log = logging.getLogger("aiops.server")

_BYTES = attrgetter("nbytes")


class Coordinator(Protocol):
    """Makes a server's decisions: an engine, a lead or a follower."""

    def handle(self, event: Event) -> list[Effect]:
        """Handle an event; return its effects, in order."""

    @property
    def idle(self) -> bool:
        """True if nothing is outstanding and nothing is queued."""

    @property
    def pools(self) -> Sequence[BufferPool]:
        """The pools of receive buffers."""

    def wait(self, again: Callable[[], bool]) -> None:
        """Have ``again`` called when there may be room for a sink; it returns whether it had."""

    def steady(
        self, peer: int, wire: Connection, push: Push, known: Steady | None
    ) -> Steady | None:
        """Return the `Steady` of exchanges like this push of a connection, if it has one."""

    def steady_rows(self, peer: int, wire: Connection) -> SteadyRows | None:
        """Return the `SteadyRows` of a connection, if it can have one."""

    def preparation(self) -> Warm:
        """Return the warming of kernels, which begins when the server listens."""

    def overdue(self, now: float, patience: Callable[[int], float]) -> list[tuple[int, str]]:
        """Return the connections to be dropped, each with the reason as a sentence."""


class Acceptor:
    """All connections of one server, with a `Peer` for each.

    Parameters
    ----------
    config
        The server's settings: token, deadlines, bound on connections.
    coordinator
        Makes the decisions.
    env
        The server's clock and entropy.
    post
        Handles an event: a connection that joined, a message, a connection that is gone.
    gone
        Called after a connection is gone.
    exchange
        Answers a steady exchange or a message about rows, given the number of bytes received;
        returns as `Steady.exchange` does.
    sinks_of
        Returns the function that gives the messages of a connection, given by its number, sinks.
    measure
        Counts the time spent on received bytes.

    Attributes
    ----------
    pacing
        Its bandwidth budget, if it has one. A follower gets one from its lead, for the connections
        that come later.
    access
        Decides what each of them may do.
    most
        Bound on the number of those that are admitted.
    strangers
        Those that are not, which have a bound of their own.
    newcomers
        Those that have not sent a push whole yet, which share few receive buffers.
    answers, headers
        Bounds on what all of them hold together: of answers that are not read, and of headers that
        have come in part.
    peers
        The open connections, by number.
    busy_poll
        Has the loop poll for the next message before it sleeps.
    poller
        Reads connections by compiled code, where it answers their pushes.
    mailboxes
        Those of clients on this machine, in which compiled code answers.
    standbys
        Takes the connections of standbys, if the server has a journal.
    refusal
        As of `ServerHandshake`.
    control
        Handles what is asked of the server itself, given the connection; None: `post` does.
    corrupted
        Connections that ended with a wrong checksum.
    short_way
        Returns what answers a connection's steady exchanges, or its messages about rows: by default
        ``exchange``.
    log_level
        That of the lines which say who joined and who is gone.
    """

    def __init__(
        self,
        config: Config,
        coordinator: Coordinator,
        env: Environment,
        pacing: Pacing | None,
        post: Callable[[Event], None],
        gone: Callable[[], None],
        exchange: Callable[[Steady | SteadyRows, int], bytes | memoryview | None],
        sinks_of: Callable[[int], SinkFor],
        machine: Resources | None = None,
    ) -> None:
        self._config, self._coordinator, self._env = config, coordinator, env
        self._post, self._gone, self._sinks_of, self._now = post, gone, sinks_of, env.now
        machine = machine or Resources()
        self._measure, self._memory = machine.measure, machine.memory
        self.short_way: Callable[[Steady | SteadyRows], _ShortWay] = partial(partial, exchange)
        self.peers: dict[int, Peer] = {}
        self._number = 0  # of the newest connection
        self.standbys: StandbyFeeds | None = None
        self.refusal: Callable[[Greeting], str] = lambda hello: ""
        self.control: Callable[[int, Message], None] | None = None
        self.log_level = logging.INFO
        self.corrupted = 0
        self.pacing: Pacing | None = None
        self.most, self.strangers = config.max_connections, StrangerPool()
        self.answers = SharedBound(
            ANSWERS, _queued, "it reads its answers slowest, and too many are unread", self._links
        )
        self.headers = SharedBound(
            HEADERS, _lengthened, "it began a long header, as too many others did", self._links
        )
        self.newcomers = Newcomers(lambda: coordinator.pools[0].bound, coordinator.wait)
        self._token_file = TokenFile(config.tokens, config.token)
        self.access = AccessControl(self._token_file.read(), env.wall_clock)
        self._filters = filter_of(config.filter, config.tokens) != "off"
        self._quotas = QuotaHolds(self.access, env.now)
        if pacing is not None:
            self.pace(pacing)
        self.busy_poll = BusyPoll(env.spin(), usable())
        self.poller, self.mailboxes = SocketPoller(), MailboxTable()
        self._sweeper: asyncio.TimerHandle | None = None
        self._over: AiopsError | None = None  # the error because of which all have ended

    def accept(self) -> asyncio.BufferedProtocol:
        """Return the protocol of a new connection."""
        return self._counted(self._link())

    def _link(self, context: ssl.SSLContext | None = None) -> MessageTransport:
        """Return the transport of a new connection; of TLS with a budget, with ``context``."""
        self._number = self._number % _NUMBERS + 1
        while self._number in self.peers:
            self._number = self._number % _NUMBERS + 1
        wire = Connection("server")
        wire.on_long = self.headers.grew
        number, sinks = self._number, self._sinks_of(self._number)
        # A follower gives buffers as its lead has them given, and a standby has none to give.
        if self._coordinator.pools and not self._config.follower:
            sinks = partial(self._sink_for, number, sinks)
        given = wire, self, number, sinks
        pacing = self.pacing
        if pacing is None:
            link = MessageTransport(*given)
        elif context is None:
            link = PacedTransport(*given, pacing.pacer)
        else:
            link = PacedTlsTransport(*given, pacing.pacer, context)
        link.waits, link.on_queued = self._config.waits, self.answers.grew
        return link

    def _sink_for(self, number: int, sinks: SinkFor, message: Message) -> Sink | None:
        """Return the sink of a message's payloads; None: no room, or it is not its turn."""
        if type(message) is Push:
            nbytes = sum(map(_BYTES, message.parts))
            if nbytes > SMALL and not self.newcomers.admits(number, nbytes):
                return None
        return sinks(message)

    def _links(self) -> list[MessageTransport]:
        """Return the open connections, the oldest first."""
        return [peer.link for peer in self.peers.values()]

    def pace(self, pacing: Pacing) -> None:
        """Keep the connections that come from here on to a bandwidth budget."""
        self.pacing = pacing
        self.strangers.most = max(1, min(self.strangers.most, pacing.most // 8))
        self.most = min(self._config.max_connections, max(1, pacing.most - self.strangers.most))

    def _counted(self, link: MessageTransport) -> asyncio.BufferedProtocol:
        return link if self._measure is unmeasured else Receiving(link, self._measure)

    def most_handshakes(self) -> int | None:
        """Return the number of TLS handshakes that may be under way; None: there is no bound."""
        return None if self.pacing is None else self.pacing.most_handshakes

    async def accept_tls(
        self, sock: socket.socket, context: ssl.SSLContext, patience: float
    ) -> None:
        """Begin a connection by TLS; return when its handshake is through.

        ``patience``: seconds that it may take.

        Raises
        ------
        OSError
            When it fails (`ssl.SSLError`), or the connection ends.
        """
        loop = asyncio.get_running_loop()
        if self.pacing is None:
            await loop.connect_accepted_socket(
                self.accept,
                sock,
                ssl=context,
                ssl_handshake_timeout=patience,
                ssl_shutdown_timeout=CLOSE_PATIENCE,
            )
            return
        link = self._link(context)
        assert isinstance(link, PacedTlsTransport)
        try:
            await loop.connect_accepted_socket(lambda: self._counted(link), sock)
            await link.secured
        except BaseException:
            if link.transport is not None:
                link.transport.abort()
            raise

    async def accept_near(self, sock: socket.socket) -> None:
        """Begin a connection within this machine."""
        side = welcome(sock)
        if side is None:  # it is gone again
            sock.close()
            return
        link = self._link()
        attach = partial(self._memory.attached, side.attach)
        link.wire.shared = SharedPayloads(attach, side.pass_on, side.take_mailbox)
        link.side, link.peer_name = side, f"process {peer_process(sock)} on this machine"
        await asyncio.get_running_loop().connect_accepted_socket(lambda: self._counted(link), sock)

    def begin(self, loop: asyncio.AbstractEventLoop) -> None:
        """Sweep, now and at intervals: drop peers that stall, ping peers that are silent."""
        config = self._config
        shortest = min(config.hello_deadline, config.stall_deadline, config.failure_timeout)
        self._sweeper = loop.call_later(min(1.0, shortest / 4), self.begin, loop)
        now = self._now()
        self.mailboxes.take_returned()
        self._take_tokens(self._token_file.changed())
        pools = self._coordinator.pools  # of pushes and of rows; a follower has two of each
        crowded = [any(pool.waiting > 0 for pool in pools[kind::2]) for kind in (0, 1)]
        for peer in list(self.peers.values()):
            if peer.meter is not None:  # of a long message, as it comes
                self._quotas.read(peer, 0)
            slow = self.newcomers.waiting > 0 and self.newcomers.is_sending(peer.link.number)
            error = peer.fault(config, now, crowded[0] or slow, crowded[1])
            if error is not None:
                _log.warning("dropping %s: %s", peer.link.peer_name, error)
                peer.link.fault(error)
        for number, why in self._coordinator.overdue(now, self._patience):
            late = self.peers.get(number)
            if late is not None:
                _log.warning("dropping %s: %s", late.link.peer_name, why)
                late.link.fault(DeadlineExceeded(why))

    def reload_tokens(self) -> None:
        """Read the token file again, whether it seems to have changed or not."""
        self._take_tokens(self._token_file.read_again())

    def _take_tokens(self, table: TokenTable | None) -> None:
        """Take changed tokens, if they are; end the connections of those that are of no use."""
        if table is not None:
            for line in self.access.change(table):
                _log.info("%s: %s", self._config.tokens, line)
            self._quotas.measure(self.peers.values())
            if not self._filters and any(token.untrusted for token in table):
                _log.warning(
                    "%s has untrusted tokens, and this server filters no gradients: start it again"
                    " with --filter robust",
                    self._config.tokens,
                )
        for number, why in self.access.ended():
            peer = self.peers.get(number)
            if peer is not None and peer.link.wire.state != "closed":
                _log.warning("ending the connection of %s: %s", peer.link.peer_name, why)
                self.refuse_one(peer, why)

    def refuse_one(self, peer: Peer, why: Refused) -> None:
        """Send a peer a fatal error, and close its connection when it has been sent."""
        link = peer.link
        if link.wire.state != "closed":
            link.send(link.wire.send(Error(0, why.code, str(why), why.details, True)))
        link.close()

    def _patience(self, nbytes: int) -> float:
        """Return the seconds that a transfer of ``nbytes`` may take."""
        return 2 * self._config.stall_deadline + nbytes / max(self._config.min_rate, 1)

    def end(self, error: AiopsError) -> None:
        """End all of them because of an error, also those that the loop has yet to make.

        Each is closed by the loop, soon.
        """
        self._over = error
        if self._sweeper is not None:
            self._sweeper.cancel()
        for peer in list(self.peers.values()):
            peer.link.fault(error)
        self.poller.close()
        self.mailboxes.close()

    def forked(self) -> None:
        """Let go of all of them in a fork."""
        self.poller.forked()
        self.mailboxes.forked()
        for peer in self.peers.values():
            peer.link.forked()

    def refuse(
        self, why: str, code: str = Unavailable.code, details: Mapping[str, Any] | None = None
    ) -> None:
        """Send all of them a fatal error, and close each when it has been sent."""
        for peer in list(self.peers.values()):
            if peer.link.wire.state != "closed":
                peer.link.send(peer.link.wire.send(Error(0, code, why, details or {}, True)))
            peer.link.close()

    @property
    def unsent(self) -> bool:
        """True if bytes are still to be sent to any peer."""
        return any(peer.link.unsent for peer in self.peers.values())

    @property
    def sent(self) -> int:
        """Bytes that the open connections' peers have acknowledged."""
        return sum(peer.link.sent for peer in self.peers.values())

    # ------------------------------------------------------------ calls of the transports

    def link_made(self, link: MessageTransport) -> None:
        """Greet a new connection, or refuse one too many."""
        nonce = self._env.token_bytes(16)
        handshake = ServerHandshake(
            *(self.access.find, nonce),
            follower=self._config.follower,
            stands_by=self._config.standby is not None,
            journal=self.standbys is not None,
            refusal=self.refusal,
            forbids=self._forbids,
        )
        peer = self.peers[link.number] = Peer(link, handshake, self._now())
        if self._over is not None:  # the loop had accepted it before the listener was closed
            link.fault(self._over)
            return
        self.busy_poll.serve(len(self.peers))
        oldest = self.strangers.came(link.number, link.peer_name.rpartition(":")[0])
        if oldest is not None and oldest in self.peers:
            text = "others came while it did not introduce itself"
            self.peers[oldest].link.fault(Unavailable(text))
        full = self._full
        if full is not None:
            self.refuse_one(peer, full)

    @property
    def _full(self) -> Unavailable | None:
        """The refusal of one more client; None: there is room for it."""
        if len(self.peers) - len(self.strangers) < self.most:
            return None
        return Unavailable(f"the server has its {self.most} connections already")

    def _forbids(self, hello: Greeting, key: bytes) -> Refused | None:
        """Return the refusal of a client that knows its token, or None."""
        return self._full or self.access.forbids(hello, key)

    def link_received(self, link: MessageTransport, message: Message, sink: Sink | None) -> None:
        """Pass a message on to the engine, before the welcome to the handshake."""
        peer, kind = self.peers[link.number], type(message)
        if kind is Release:
            peer.given_back(message.id)
        elif kind is Share:
            self._take_mailbox(peer)  # if it is one; else the connection has mapped it
        elif kind in _CONTROL and not self._allows(peer, message):
            pass  # it was told
        elif self.control is not None and kind in _CONTROL:
            self.control(link.number, message)
        elif peer.handshake.admitted is not None:
            self._post(Received(self._now(), link.number, message, sink))
            if kind is Push:
                nbytes = sum(map(_BYTES, message.parts))  # type: ignore[attr-defined]
                if nbytes > SMALL and self.newcomers.sent(link.number, nbytes):
                    asyncio.get_running_loop().call_soon(self.newcomers.go_on)
            if kind in _SHORTENED and not (link.wire.checked or link.paced):
                self._seek_shortcut(peer, message)
        else:
            self._handshake(peer, message)
        if peer.meter is not None:
            self._quotas.read(peer, 1)
        busy_poll = self.busy_poll
        busy_poll.received = True
        if busy_poll.idle:
            busy_poll.begin()

    def _seek_shortcut(self, peer: Peer, message: Message) -> None:
        """Have a connection's further requests of this kind answered at once, if they can be."""
        link = peer.link
        if type(message) is Push:
            steady = self._coordinator.steady(link.number, link.wire, message, peer.steady)
            if steady is None or steady is peer.steady:
                return
            peer.steady = steady
        elif peer.steady_rows is None:
            peer.steady_rows = self._coordinator.steady_rows(link.number, link.wire)
            if peer.steady_rows is None:
                return
        else:
            return
        self._take_shortcut(peer)

    def _allows(self, peer: Peer, message: Message) -> bool:
        """Return whether a peer may ask for what concerns the server itself; refuse it if not."""
        link = peer.link
        why, name = self.access.forbids_request(link.number), self.access.name_of(link.number)
        if why is None:
            _log.info("%s at %s asks for %r", name, link.peer_name, message.kind)
            return True
        _log.warning("%s at %s may not ask for %r", name, link.peer_name, message.kind)
        link.send(link.wire.send(Error(message.id, why.code, str(why), why.details, False)))
        return False

    def _take_shortcut(self, peer: Peer) -> None:
        """Have a connection's exchanges, and messages about rows, answered at once where they can.

        From here on; the model's exchanges are looked for first.
        """
        one, *others = (self._measure("policy", self.short_way(way)) for way in peer.short_ways)
        way = partial(_first_of, one, others[0]) if others else one
        link = peer.link
        link.shortcut = self._quotas.counted(peer, way)
        if peer.steady is not None and link.shortcut == _compiled(peer.steady):
            self.poller.take(link)
            self.mailboxes.open(link, peer)
        else:  # the poller would have Python called for each message, and take one a turn
            link.give_back()

    def _take_mailbox(self, peer: Peer) -> None:
        """Answer in the mailbox that a client has announced, once compiled code answers it.

        It may come before: a worker's first pushes of coded gradients go the general way until the
        codecs' loops are compiled.
        """
        link, shared = peer.link, peer.link.wire.shared
        mailbox = None if shared is None else shared.taken_mailbox()
        if mailbox is None:
            return
        admitted = peer.handshake.admitted
        if admitted is None or getattr(admitted.hello, "role", "") != "worker":  # it pushes nothing
            os.close(mailbox.bell)
            return
        self.mailboxes.take(link, mailbox)
        if peer.steady is not None and link.shortcut == _compiled(peer.steady):
            self.mailboxes.open(link, peer)

    def _handshake(self, peer: Peer, message: Message) -> None:
        link = peer.link
        answer = peer.handshake.receive(message)
        if not isinstance(answer, Admitted):
            link.send(link.wire.send(answer))
            if isinstance(answer, Error):
                _log.warning("%s refused: %s", link.peer_name, answer.text)
                link.close()
            return
        hello = answer.hello
        self.strangers.gone(link.number)
        holder = self.access.admit(link.number, hello, answer.key)
        if isinstance(hello, Hello | ShardHello):  # other servers have none
            self._quotas.measure([peer])
        if isinstance(link, PacedTransport) and not isinstance(hello, Hello | ShardHello):
            link.exempt()  # the budget is of clients
        if isinstance(hello, StandbyHello):
            if self.standbys is not None:
                self.standbys.admit(link, hello, answer.proof)
            return
        if isinstance(link, PacedTransport) and isinstance(hello, Hello | ShardHello):
            link.joined(hello.client)
        by = f" with token {holder!r}" if holder else ""
        _log.log(
            *(self.log_level, "%s %r joined from %s%s"),
            *(hello.role, hello.name, link.peer_name, by),
        )
        traffic = link.wire.traffic
        self._post(Joined(self._now(), link.number, hello, answer.proof, traffic))

    def link_waits(self, link: MessageTransport) -> None:
        """Queue a peer for a receive buffer."""
        if not self.newcomers.waits(link):
            self._coordinator.wait(link.resume)

    def link_lost(self, link: MessageTransport, error: AiopsError) -> None:
        """Report to the engine that a connection is gone."""
        link.shortcut = None
        self.mailboxes.drop(link)
        peer = self.peers.pop(link.number, None)
        if peer is None:
            return
        self.busy_poll.serve(len(self.peers))
        self.strangers.gone(link.number)
        if self.newcomers.gone(link.number):
            asyncio.get_running_loop().call_soon(self.newcomers.go_on)
        self.access.left(link.number)
        peer.lost()
        self._quotas.lost(peer)
        hello = peer.handshake.hello
        name = f"{hello.role} {hello.name!r}" if hello else "an unknown client"
        self.corrupted += isinstance(error, Corrupted)
        _log.log(self.log_level, "%s at %s is gone: %s", name, link.peer_name, error)
        if peer.handshake.admitted is not None and not isinstance(hello, StandbyHello):
            self._post(Left(self._now(), link.number))
        self._gone()


def _compiled(way: Steady) -> _ShortWay | None:
    """Return the short way that compiled code takes alone."""
    return None if way.compiled is None else way.compiled.answer


def _queued(link: MessageTransport) -> int:
    return link.queued


def _lengthened(link: MessageTransport) -> int:
    return link.wire.lengthened


def _first_of(one: _ShortWay, other: _ShortWay, nbytes: int) -> bytes | memoryview | None:
    """Return the answer of the first of two short ways that has one."""
    answer = one(nbytes)
    return other(nbytes) if answer is None else answer
