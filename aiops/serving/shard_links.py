"""Connect a lead to its followers: send its orders, and pass their messages on."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Container, Mapping, Sequence
from functools import partial
from typing import Any

from aiops._version import __version__
from aiops.common.failure_waits import FailureWaits
from aiops.engine.events import Event, Lost, Order, Reported
from aiops.errors import (
    AiopsError,
    ConnectionLost,
    DeadlineExceeded,
    RemoteProtocolError,
    RolledBack,
    Unavailable,
    UsageError,
    refusal,
)
from aiops.net.dns import addresses, first_reached
from aiops.net.environment import Environment
from aiops.net.tls import TlsTarget
from aiops.net.transport import MessageTransport
from aiops.shards.common_moment import CommonMoment
from aiops.shards.reports import check_state
from aiops.wire import handshake
from aiops.wire.connection import Connection, Limits
from aiops.wire.messages import PROTOCOL, Challenge, Error, Leave, Message, Ping, Pong
from aiops.wire.server_messages import LeadHello, RollBack, ShardState, ShardWelcome
from aiops.wire.sinks import Sink

_log = logging.getLogger("aiops.server")

_LIMITS = Limits(header=64 << 20)

_PAUSE, _LONGEST_PAUSE = 0.05, 1.0  # seconds between two attempts to connect to a lost follower
_RETURN = 60.0  # seconds that a follower may take to start, or to go back to an earlier moment
_ASKED_AGAIN = 1.0  # seconds after which one that has not gone back is asked again


class FollowerLink:
    """The lead's record of one follower, beside its connection."""

    def __init__(self, name: str, link: MessageTransport, hello: LeadHello, now: float) -> None:
        self.name, self.link, self.hello = name, link, hello
        self.challenge: Challenge | None = None
        self.linked = False  # it was reached
        self.state: ShardState | None = None  # that it has said it holds
        self.attached = False  # it is led
        self.lost: AiopsError | None = None  # why it is gone
        self.last_in = (now, 0)  # when bytes last came, and how many had come by then
        self.pinged = False


class ShardLinks:
    """A lead's connections to all its followers.

    Parameters
    ----------
    addresses
        Host and port of each follower, from the first.
    token, run
        The secret that the lead and its followers share; the name of their run.
    policy, settings
        The lead's algorithm.
    waits
        The silence after which a follower is pinged, and after which it is lost.
    env
        The lead's clock and entropy.
    sink_for
        Returns the sink of payloads, given the shard's number and the message.
    post
        Handles an event: a follower's message, or that it is gone.
    refusal
        Returns why a follower with some state cannot be led; None if it can.
    generation
        Returns the number of this start of a lead with a state, and None for one without. With a
        state, a follower that is lost is connected to again.
    prove
        Returns the proof of a lead of this generation; empty: there is none yet.
    stop
        Begins to end the server with an error.
    standby
        Whether this is the standby of a lead, and those are the standbys of its followers.
    tls
        Returns how to connect to a host by TLS; None: plain TCP.
    place
        Returns the number of a shard's place, the newest that is known.
    late
        Returns the followers that owe an answer for too long, each with the reason.
    """

    def __init__(
        self,
        addresses: Sequence[tuple[str, int]],
        token: str | None,
        run: str,
        policy: str,
        settings: Mapping[str, Any],
        waits: FailureWaits,
        env: Environment,
        sink_for: Callable[[int, Message], Sink],
        post: Callable[[Event], None],
        refusal: Callable[[int, ShardState], AiopsError | None],
        generation: Callable[[], int | None],
        prove: Callable[[int], bytes],
        stop: Callable[[BaseException], None],
        *,
        standby: bool = False,
        tls: Callable[[str], TlsTarget] | None = None,
        place: Callable[[int], int] = lambda shard: 0,
        late: Callable[[float, FailureWaits], Mapping[int, str]] = lambda now, waits: {},
    ) -> None:
        self._standby, self._tls, self._place, self._late = standby, tls, place, late
        self._addresses, self._token, self._run = list(addresses), token, run
        self._policy, self._settings = policy, settings
        self._waits, self._env, self._sink_for, self._post = waits, env, sink_for, post
        self._followers: dict[int, FollowerLink] = {}  # by shard, the number of their connections
        self._changed = asyncio.Event()  # a follower is attached, or lost
        self._sweeper: asyncio.TimerHandle | None = None
        self._refusal, self._generation, self._stop = refusal, generation, stop
        self._prove = prove
        self._patience = 0.0
        self._leading = False  # from `lead` on
        self._moved = asyncio.Event()  # a follower has another address
        self._epochs = 0
        self._attempts: dict[int, asyncio.Task[None]] = {}  # to connect again, by shard
        self._ending = self._hurries = False

    async def connect(self, patience: float) -> Mapping[int, ShardState]:
        """Connect to all followers, each within ``patience`` seconds; return what they hold.

        They are given no orders before `lead`. Those of a lead with a state may be starting too:
        it tries for a minute to connect.

        Raises
        ------
        UsageError
            When one cannot be reached, or refuses this lead; the error names it.
        ConnectionLost
            When this server is to end meanwhile.
        """
        self._patience = patience
        for shard in range(1, len(self._addresses) + 1):
            try:
                await self._attach_first(shard)
            except UsageError:
                raise
            except (OSError, AiopsError) as error:
                why = str(error) or f"no answer in {patience:g} s"
                if self._hurries:
                    name = self._followers[shard].name
                    raise ConnectionLost(
                        f"asked to end while it waited for {name} ({why})"
                    ) from None
                raise UsageError(
                    f"{self._followers[shard].name} cannot be had ({why}): start it with"
                    " --follower, and with this server's policy and token"
                ) from None
        return {
            shard: follower.state
            for shard, follower in self._followers.items()
            if follower.state is not None
        }

    async def roll_back(self, rows: Mapping[int, int]) -> None:
        """Have followers go back to rows of this lead's journal, and wait until they have.

        ``rows``: that of each, by shard.

        Raises
        ------
        UsageError
            When one does not come back in a minute.
        """
        going = [asyncio.ensure_future(self._go_back(*each)) for each in rows.items()]
        try:
            await asyncio.gather(*going)
        finally:
            for each in going:
                each.cancel()

    async def _go_back(self, shard: int, row: int) -> None:
        """Have a follower go back to a row; it may be lost at any time, before the order too."""
        name = self._followers[shard].name
        _log.error("%s goes back to row %d of this server's journal", name, row)
        try:
            async with asyncio.timeout(_RETURN):
                while not self._ending:
                    follower = self._followers[shard]
                    if follower.link.wire.state == "lead open" and follower.state is not None:
                        if not CommonMoment({shard: follower.state}).ahead(row):
                            return
                        follower.link.send(follower.link.wire.send(RollBack(0, row)))
                        await self._until_lost(follower)
                        if follower.lost is None:  # its disk is full, say: it is asked again
                            continue
                    await self._attach_again(shard)
        except TimeoutError:
            raise UsageError(
                f"{name} was to go back to an earlier moment that all servers of the model have,"
                f" and did not come back in {_RETURN:g} s: see its log, start it again, and then"
                " this server"
            ) from None

    async def _until_lost(self, follower: FollowerLink) -> None:
        """Wait until a follower is lost, but not longer than until it is to be asked again."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_ASKED_AGAIN):
                while follower.lost is None:
                    self._changed.clear()
                    await self._changed.wait()

    def lead(self, rolled_back: Container[int]) -> None:
        """Begin to give orders.

        ``rolled_back``: followers that may have gone back further than they were asked to.

        Raises
        ------
        UsageError, RolledBack
            When one cannot be led; when this server has to go back further as well.
        """
        self._leading = True
        for shard, follower in self._followers.items():
            if follower.lost is not None:  # meanwhile
                self._lose(follower, follower.lost)
                continue
            try:
                self._take(follower)
            except RolledBack as error:
                if shard in rolled_back:
                    raise
                raise UsageError(str(error)) from None
        self._sweep(asyncio.get_running_loop())

    def begin(self, patience: float) -> None:
        """Begin to connect to all followers, each of whose attempts may take ``patience`` seconds.

        One that cannot be reached, or refuses, is reported as lost, and is tried again.
        """
        self._patience, self._leading = patience, True
        for shard in range(1, len(self._addresses) + 1):
            self._attempts[shard] = asyncio.ensure_future(self._attach_again(shard))
        self._sweep(asyncio.get_running_loop())

    def _take(self, follower: FollowerLink) -> None:
        """Lead a follower, or raise why that cannot be."""
        shard, state = follower.link.number, follower.state
        assert state is not None, "it has said it"
        error = self._refusal(shard, state)
        if error is not None:
            follower.link.fault(error)
            raise error
        follower.attached = True
        self._changed.set()
        self._post(Reported(self._env.now(), shard, state, None))

    async def _attach_first(self, shard: int) -> None:
        """Connect to a follower that has not been led by this start yet."""
        loop, pause = asyncio.get_running_loop(), _PAUSE
        until = loop.time() + (_RETURN if self._generation() is not None else 0.0)
        while True:
            try:
                await self._attach(shard)
                return
            except (OSError, ConnectionLost, Unavailable) as error:
                if self._hurries or loop.time() + pause >= until:
                    raise
                if pause == _PAUSE:
                    name, why = self._followers[shard].name, str(error) or "no answer"
                    _log.warning("%s cannot be had (%s): it is waited for", name, why)
            await self._pause(pause)
            pause = min(2 * pause, _LONGEST_PAUSE)

    async def _attach(self, shard: int) -> None:
        """Connect to a follower, and wait until it has said what state it holds."""
        host, port = self._addresses[shard - 1]
        follower = self._followers[shard] = self._follower(shard, host, port)
        until = asyncio.get_running_loop().time() + self._patience
        try:
            async with asyncio.timeout(self._patience):
                await self._reach(follower.link, host, port, until)
                while not self._settled(follower):
                    if follower.lost is not None:
                        raise follower.lost
                    self._changed.clear()
                    await self._changed.wait()
        except BaseException:
            if not self._settled(follower) and follower.lost is None and follower.linked:
                follower.link.fault(ConnectionLost("it has not answered in time"))
            raise

    def _settled(self, follower: FollowerLink) -> bool:
        """Return whether a follower is where an attempt to connect to it was to lead."""
        return follower.attached or (follower.state is not None and not self._leading)

    def move(self, shard: int, host: str, port: int) -> None:
        """Reach a follower at another address from here on: it was started again."""
        self._addresses[shard - 1] = host, port
        self._moved.set()

    def give(self, shard: int, host: str, port: int) -> None:
        """Reach another server in a lost follower's place from here on, and that one no more."""
        self._addresses[shard - 1] = host, port
        attempt = self._attempts.pop(shard, None)
        if attempt is not None:  # it may be connecting to a machine that does not answer
            attempt.cancel()
        self._attempts[shard] = asyncio.ensure_future(self._attach_again(shard))

    async def _attach_again(self, shard: int) -> None:
        """Try to connect until a follower is back, with pauses between."""
        pause, said = _PAUSE, ""
        while not self._ending:
            try:
                await self._attach(shard)
                return
            except (OSError, AiopsError) as error:
                why = str(error) or f"no answer in {self._patience:g} s"
                if why != said:
                    _log.warning("%s: %s", self._followers[shard].name, why)
                    self._post(Lost(self._env.now(), shard, why))
                said = why
            await self._pause(pause)
            pause = min(2 * pause, _LONGEST_PAUSE)

    async def _pause(self, seconds: float) -> None:
        """Return after some time, or when a follower has another address."""
        self._moved.clear()
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._moved.wait(), seconds)

    def hurry(self) -> None:
        """Wait no more for followers that do not listen yet: this server is to end."""
        self._hurries = True
        self._moved.set()

    def _follower(self, shard: int, host: str, port: int) -> FollowerLink:
        name = f"shard {shard} of {len(self._addresses) + 1} at {host}:{port}"
        self._epochs += 1
        sink_for = partial(self._sink_for, shard)
        link = MessageTransport(Connection("client", _LIMITS), self, shard, sink_for)
        link.waits = self._waits
        generation = self._generation() or 0
        hello = LeadHello(
            id=0,
            protocol=PROTOCOL,
            client=self._run,
            epoch=self._epochs,
            name=name,
            run=self._run,
            pongs=True,
            nonce=self._env.token_bytes(16),
            agent=f"aiops-python/{__version__}",
            policy=self._policy,
            settings=self._settings,
            generation=generation,
            standby=self._standby,
            lead_proof=self._prove(generation),
            place=self._place(shard),
        )
        return FollowerLink(name, link, hello, self._env.now())

    async def _reach(self, link: MessageTransport, host: str, port: int, until: float) -> None:
        async def reach(address: str) -> None:
            await self._env.dial(lambda: link, address, port, self._tls and self._tls(host))

        left = until - asyncio.get_running_loop().time()
        await first_reached(
            self._env.known_addresses(host) or await addresses(host, left), until, reach
        )

    @property
    def unsent(self) -> bool:
        """True if bytes are still to be sent to a follower."""
        return any(follower.link.unsent for follower in self._followers.values())

    def send(self, order: Order) -> None:
        """Send an order; one to a follower that is gone is dropped."""
        follower = self._followers.get(order.shard)
        if follower is None or not follower.attached:
            return  # it has not said yet what state it holds
        link = follower.link
        if link.wire.state == "lead open":
            link.send(link.wire.send(order.message, order.payloads))

    def end(self, *, leave: bool = True) -> None:
        """End all connections. ``leave``: send `Leave` to the followers, which end too."""
        self._ending = True
        if self._sweeper is not None:
            self._sweeper.cancel()
        for attempt in self._attempts.values():
            attempt.cancel()
        for follower in self._followers.values():
            link = follower.link
            if follower.lost is not None:
                continue
            if link.wire.state == "lead open":
                if leave:
                    link.send(link.wire.send(Leave(0)))
                link.close()
            else:
                link.fault(ConnectionLost("the lead is shutting down"))

    def forked(self) -> None:
        """Let go of all of them in a fork, and connect to none again."""
        self._ending = True
        for follower in self._followers.values():
            follower.link.forked()

    # ------------------------------------------------------------ calls of the transports

    def link_made(self, link: MessageTransport) -> None:
        """Send the lead's hello."""
        self._followers[link.number].linked = True
        link.send(link.wire.send(self._followers[link.number].hello))

    def link_received(self, link: MessageTransport, message: Message, sink: Sink | None) -> None:
        """Handle a follower's message."""
        follower = self._followers[link.number]
        if follower.link is not link:
            return  # of an earlier connection
        try:
            self._handle(follower, link, message, sink)
        except AiopsError as error:
            link.fault(error)

    def _handle(
        self, follower: FollowerLink, link: MessageTransport, message: Message, sink: Sink | None
    ) -> None:
        if isinstance(message, Challenge):
            follower.challenge = message
            proof = handshake.answer(message, follower.hello, self._token, follower.name)
            link.send(link.wire.send(proof))
        elif isinstance(message, ShardWelcome):
            given = follower.challenge, self._token, follower.name
            handshake.check_welcome(message, follower.hello, *given)
        elif isinstance(message, ShardState):
            check_state(message)
            follower.state = message
            self._changed.set()
            if self._leading:
                try:
                    self._take(follower)
                except RolledBack as error:
                    self._stop(error)
                    raise
        elif isinstance(message, Ping):
            if link.wire.state == "lead open":
                link.send(link.wire.send(Pong(message.id)))
        elif isinstance(message, Error) and message.fatal:
            raise refusal(message.code, message.text, message.details)
        elif not isinstance(message, Pong):
            try:
                self._post(Reported(self._env.now(), link.number, message, sink))
            except RemoteProtocolError as error:
                link.fault(error)

    def link_waits(self, link: MessageTransport) -> None:
        """A follower's payloads always have room."""
        raise AssertionError("what followers send has a sink")

    def link_lost(self, link: MessageTransport, error: AiopsError) -> None:
        """Report that a follower is gone, and why."""
        shard = link.number
        follower = self._followers[shard]
        if follower.link is not link:
            return  # an earlier connection, which was not noticed to be gone
        follower.lost = error
        self._changed.set()
        if follower.attached and not self._ending:
            self._lose(follower, error)

    def _lose(self, follower: FollowerLink, error: AiopsError) -> None:
        """Report that a follower is lost, and begin to connect to it again if it keeps a state."""
        shard = follower.link.number
        self._post(Lost(self._env.now(), shard, f"{follower.name} is gone ({error})"))
        if self._generation() is not None:
            self._attempts[shard] = asyncio.ensure_future(self._attach_again(shard))

    # ------------------------------------------------------------ heartbeat

    def _sweep(self, loop: asyncio.AbstractEventLoop) -> None:
        """Ping silent followers; end the connection of one that does not answer."""
        self._sweeper = loop.call_later(min(1.0, self._waits.heartbeat / 4), self._sweep, loop)
        now = self._env.now()
        late = self._late(now, self._waits)
        for follower in self._followers.values():
            link = follower.link
            if follower.lost is not None:
                continue
            came = link.wire.traffic.bytes_in
            if came != follower.last_in[1]:
                follower.last_in, follower.pinged = (now, came), False
            quiet = now - follower.last_in[0]
            if link.number in late and follower.attached:
                link.fault(DeadlineExceeded(late[link.number]))
            elif quiet > self._waits.unanswered:
                link.fault(DeadlineExceeded(f"it has not answered a ping for {quiet:.0f} s"))
            elif (
                quiet >= self._waits.heartbeat
                and not follower.pinged
                and link.wire.state == "lead open"
            ):
                follower.pinged = True
                link.send(link.wire.send(Ping(0)))
