"""The server: an asyncio shell around the engine. ``python -m aiops.server --policy fasgd``.

It moves bytes, keeps time, runs kernels on its applier thread (they release the GIL, so fetches and
pushes go on meanwhile), and carries out what the engine decides.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
import weakref
from collections import deque
from collections.abc import AsyncIterator, Callable
from functools import partial
from typing import Any

from aiops import address
from aiops.algorithms import find
from aiops.applier import Applier
from aiops.bucket import Budget
from aiops.config import Config
from aiops.engine import Engine
from aiops.errors import (
    AiopsError,
    ConnectionLost,
    Unavailable,
    UsageError,
    nearest,
)
from aiops.events import (
    Applied,
    Apply,
    Drop,
    Event,
    Joined,
    Left,
    Note,
    Paced,
    Received,
    Reply,
    Shares,
    Stopping,
    Tick,
    WakeAt,
    Warm,
)
from aiops.handshake import Greeter
from aiops.keeping import Keeping
from aiops.layout import Ints
from aiops.link import Link
from aiops.messages import Error, Message
from aiops.paced import PacedLink, Pacer
from aiops.peer import Peer
from aiops.rowsintake import RowsIncoming
from aiops.sockets import narrow
from aiops.surroundings import SURROUNDINGS, Surroundings
from aiops.wire import SMALL, Sink, Wire

_log = logging.getLogger("aiops.server")

_HEADER = 1024
"""More than the header of an answer that brings rows has."""

_BACKLOG = 1024

_UNMOVED = 0.5
"""Seconds: answers of which nothing was read for so long do not hold up the end of a server."""

_PACED_EVERY = 0.1
"""Seconds between two looks at what crosses under a budget."""

_CONNECTION = 16
"""Bytes per second that a budget must have per connection: each holds a grant of one byte."""

_SPARE_FILES = 64
"""Open files that a server needs beside its connections."""


class Server:
    """One server.

    Parameters
    ----------
    config
        See `Config`.

    Raises
    ------
    UsageError, ConflictError
        When the settings cannot work; before anything is opened.
    """

    def __init__(self, config: Config) -> None:
        self.config = config
        self._here = here = SURROUNDINGS.get()
        self._now = here.now
        algorithm = find(config.policy).make(config.settings())
        options = dataclasses.replace(config.options(), run=here.token_bytes(8).hex())
        self.engine = Engine(algorithm, options)
        self._peers: dict[int, Peer] = {}
        self._numbers = 0
        self._events: deque[Event] = deque()
        self._handling = False
        self._applier: Applier | None = None
        self._warm = self._broken = False
        self._loop: asyncio.AbstractEventLoop | None = None
        self._listener: asyncio.Server | None = None
        self._sweeper: asyncio.TimerHandle | None = None
        self._tick: asyncio.TimerHandle | None = None
        self._keeping = Keeping(config, self.engine, self._now)
        self._ended: asyncio.Future[None] | None = None
        self._changed: Callable[[], None] = lambda: None
        self._spin = here.spin()
        self._looking = self._heard = False  # for a next message, and whether one came meanwhile
        self._pacer = _pacer_of(config, here)
        self._pacing: asyncio.TimerHandle | None = None
        self._spent = 0  # bytes that had crossed under the budget at the last look
        self._idle = True  # nothing was on its way then
        self._most = config.max_connections
        if self._pacer is not None:
            self._most = min(self._most, self._pacer.narrowed // _CONNECTION)

    # ------------------------------------------------------------ life

    async def start(self) -> str:
        """Open everything and listen; return the URL to join."""
        self._loop = asyncio.get_running_loop()
        self._ended = self._loop.create_future()
        self._applier = self._here.applier(self._loop, self._applier_failed)
        try:
            model = self._keeping.open()
            if model is not None:
                self.post(model)
            self._listener = await self._listen()
        except BaseException:
            self._applier.close()
            self._keeping.abandon()
            raise
        self._keeping.begin(self._loop)
        for pool in self.engine.intake.pools:
            pool.wake = partial(self._loop.call_soon_threadsafe, pool.settle)
        self._sweep()
        if self._pacer is not None:
            self._look_at_pace(self._pacer)
        return self.url

    async def _listen(self) -> asyncio.Server:
        assert self._loop is not None
        host, port = self.config.host, self.config.port
        try:
            listener = await self._loop.create_server(
                self._accept, host, port, backlog=_BACKLOG, start_serving=False
            )
            if self._pacer is not None:  # a window is announced before a connection is accepted
                for sock in listener.sockets:
                    narrow(sock, self._pacer.narrowed)
            await listener.start_serving()
        except OSError as error:
            why = error.strerror or error
            raise UsageError(f"cannot listen on {host}:{port}: {why}") from None
        return listener

    @property
    def url(self) -> str:
        """The URL to join."""
        assert self._listener is not None
        host, port = self._listener.sockets[0].getsockname()[:2]
        return address.write(host, port)

    async def serve(self) -> None:
        """Run until `stop` is called and everything is drained; then save and close."""
        assert self._ended is not None
        try:
            await self._ended
        finally:
            await self._close()

    def stop(self) -> None:
        """Begin to end: take no more pushes, answer who waits, then close."""
        if self._ended is not None and not self._ended.done():
            self._ended.set_result(None)

    async def _close(self) -> None:
        """Drain: let the outstanding update finish, send every answer, save, close."""
        assert self._loop is not None
        if self._listener is not None:
            self._listener.close()
        self._keeping.stop()
        if not self._broken:
            self.post(Stopping(self._now()))
            await self._drain()
        for handle in (self._sweeper, self._tick, self._pacing):
            if handle is not None:
                handle.cancel()
        for peer in list(self._peers.values()):
            peer.link.fault(ConnectionLost("the server is shutting down"))
        until = self._loop.time() + _UNMOVED
        while self._peers and self._loop.time() < until:  # each goes as the loop comes round to it
            await self._change(0.05)
        if self._pacer is not None:
            self._pacer.stop()
        for pool in self.engine.intake.pools:
            pool.wake = None
        if self._applier is not None:
            self._applier.close()
        await self._keeping.end()

    async def _drain(self) -> None:
        """Wait until everything is answered and sent, or those who are to read it do not."""
        assert self._loop is not None
        moved = began = self._loop.time()
        sent = -1
        while not self.engine.idle or any(peer.link.unsent for peer in self._peers.values()):
            now, before = self._loop.time(), sent
            sent = sum(peer.link.sent for peer in self._peers.values())
            if sent != before or not self.engine.idle:
                moved = now
            if now - began >= self.config.drain_deadline or now - moved >= _UNMOVED:
                return
            await self._change(0.05)

    async def _change(self, seconds: float) -> None:
        """Wait until something happens, or that long."""
        changed = asyncio.Event()
        self._changed = changed.set
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(changed.wait(), seconds)

    # ------------------------------------------------------------ events and effects

    def post(self, event: Event) -> None:
        """Have the engine handle an event, and carry out what follows.

        What follows may bring further events at once (an update done in place, a buffer that came
        back and let a waiting peer go on): they queue behind this one.
        """
        self._events.append(event)
        if self._handling:
            return
        self._handling = True
        try:
            while self._events:
                event = self._events.popleft()
                if self._keeping.journal is not None:
                    self._keeping.journal.note(event)
                for effect in self.engine.handle(event):
                    _PERFORM[type(effect)](self, effect)
        finally:
            self._handling = False
        self._changed()

    def _reply(self, effect: Reply) -> None:
        if effect.rows is not None:
            self._reply_rows(effect, effect.rows)
            return
        peer = self._peers.get(effect.peer)
        lease = effect.lease
        if peer is None or peer.link.wire.state == "closed":
            if lease is not None:
                lease.release()
            return
        if lease is None:
            peer.link.send(peer.link.wire.send(effect.message))
            return
        parts = effect.message.parts  # type: ignore[attr-defined]
        if sum(part.nbytes for part in parts) < SMALL // 2:  # it is copied at once
            peer.link.send(peer.link.wire.send(effect.message, lease.glimpses(parts)))
            lease.release()
            return
        payloads = lease.payloads(parts)
        buffers = peer.link.wire.send(effect.message, payloads)
        del payloads
        lease.release()
        peer.link.send(buffers, lease)

    def _reply_rows(self, effect: Reply, rows: RowsIncoming) -> None:
        """Send rows from the buffer that they were gathered in."""
        peer = self._peers.get(effect.peer)
        if peer is None or peer.link.wire.state == "closed":
            rows.free()
            return
        view = rows.answer
        if len(view) <= SMALL - _HEADER:  # it is copied at once
            peer.link.send(peer.link.wire.send(effect.message, [[view]]))
            rows.free()
            return
        whole = rows.answer_later()
        peer.rows = weakref.ref(whole)
        buffers = peer.link.wire.send(effect.message, [[whole.data]])
        del whole
        peer.link.send(buffers)

    def _apply(self, effect: Apply) -> None:
        assert self._applier is not None
        if not self._warm or effect.job.cost > self._applier.at_once:
            done = partial(self._applied, effect.ticket)
            self._applier.submit(effect.run, effect.job.cost, done)
            return
        try:
            sums = effect.run()
        except BaseException as error:
            self._applier_failed(error)
        else:
            self._events.append(Applied(self._now(), effect.ticket, sums))

    def _warm_up(self, effect: Warm) -> None:
        assert self._applier is not None
        self._applier.submit(effect.run, 0, self._warmed)

    def _warmed(self, _nothing: None) -> None:
        self._warm = True

    def _applied(self, ticket: int, sums: Ints) -> None:
        self.post(Applied(self._now(), ticket, sums))

    def _applier_failed(self, error: BaseException) -> None:
        """An update failed midway: the parameters cannot be trusted any more."""
        self._broken = True
        if self._ended is not None and not self._ended.done():
            self._ended.set_exception(error)

    def _drop(self, effect: Drop) -> None:
        peer = self._peers.get(effect.peer)
        if peer is not None:
            _log.debug("closing %s: %s", peer.link.peer_name, effect.why)
            peer.link.close()

    def _wake_at(self, effect: WakeAt) -> None:
        assert self._loop is not None
        if self._tick is not None:
            self._tick.cancel()
        delay = max(0.0, effect.time - self._now())
        self._tick = self._loop.call_later(delay, lambda: self.post(Tick(self._now())))

    def _share(self, effect: Shares) -> None:
        if self._pacer is not None:
            for number, weight in effect.weights:
                peer = self._peers.get(number)
                if peer is not None and isinstance(peer.link, PacedLink):
                    self._pacer.budget.weigh(peer.link.flow, weight)

    def _note(self, effect: Note) -> None:
        _log.warning("%s", effect.text)

    # ------------------------------------------------------------ connections

    def _accept(self) -> Link:
        wire = Wire("server", self.engine.intake.place)
        return Link(wire, self) if self._pacer is None else PacedLink(wire, self, self._pacer)

    def link_made(self, link: Link) -> None:
        """Greet a new connection, or refuse one too many."""
        self._numbers += 1
        link.number = self._numbers
        greeter = Greeter(self.config.token, self._here.token_bytes(16))
        self._peers[link.number] = Peer(link, greeter, self._now())
        if len(self._peers) > self._most:
            text = f"the server has its {self._most} connections already"
            link.send(link.wire.send(Error(0, Unavailable.code, text, {}, True)))
            link.close()

    def link_heard(self, link: Link, messages: list[tuple[Message, Sink | None]]) -> None:
        """Pass messages on to the engine, those before the welcome to the greeter."""
        peer = self._peers[link.number]
        now = self._now()
        for message, sink in messages:
            if peer.joined:
                self.post(Received(now, link.number, message, sink))
            else:
                self._greet(peer, message)
        self._heard = self._looking
        if not self._looking and self._spin.begin():
            self._looking = True
            assert self._loop is not None
            self._loop.call_soon(self._look)

    def _look(self) -> None:
        """Have the loop look for messages a while before it sleeps for them."""
        assert self._loop is not None
        if self._heard:
            self._heard = False
            self._spin.found()
            self._spin.begin()
        if self._spin.again():
            self._loop.call_soon(self._look)
        else:
            self._looking = False

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
        self.post(Joined(self._now(), link.number, hello, greeter.proof, traffic))

    def link_stuck(self, link: Link) -> None:
        """Let a peer wait in line for a receive buffer."""
        self.engine.intake.lacking.wait(link.resume)

    def link_lost(self, link: Link, error: AiopsError) -> None:
        """Tell the engine that a connection is gone."""
        peer = self._peers.pop(link.number, None)
        if peer is None:
            return
        hello = peer.greeter.hello
        who = f"{hello.role} {hello.name!r}" if hello else "a stranger"
        _log.info("%s at %s is gone: %s", who, link.peer_name, error)
        if peer.joined:
            self.post(Left(self._now(), link.number))
        self._changed()

    # ------------------------------------------------------------ the bandwidth budget

    def _look_at_pace(self, pacer: Pacer) -> None:
        """Tell the engine now and then what crosses."""
        assert self._loop is not None
        self._pacing = self._loop.call_later(_PACED_EVERY, self._look_at_pace, pacer)
        budget, now, total = pacer.budget, self._now(), pacer.budget.total
        crossed, self._spent = budget.spent - self._spent, budget.spent
        second, peak = (total.used(now), total.peak) if total is not None else (0, 0)
        busy, pressed = pacer.busy(), pacer.pressed()
        idle, self._idle = self._idle, not (crossed or second or busy)
        if not (idle and self._idle):  # there is nothing new about nothing
            self.post(Paced(now, crossed, second, peak, budget.wanted, busy, pressed))

    # ------------------------------------------------------------ deadlines

    def _sweep(self) -> None:
        """Look at every peer now and then: drop those who stall, ping those who are silent."""
        assert self._loop is not None
        config = self.config
        shortest = min(config.hello_deadline, config.stall_deadline, config.heartbeat)
        self._sweeper = self._loop.call_later(min(1.0, shortest / 4), self._sweep)
        now = self._now()
        crowded = [pool.waiting > 0 for pool in self.engine.intake.pools]
        for peer in list(self._peers.values()):
            error = peer.judge(config, now, *crowded)
            if error is not None:
                _log.warning("dropping %s: %s", peer.link.peer_name, error)
                peer.link.fault(error)


_PERFORM: dict[type[Any], Callable[[Server, Any], None]] = {
    Reply: Server._reply,
    Apply: Server._apply,
    Warm: Server._warm_up,
    Drop: Server._drop,
    WakeAt: Server._wake_at,
    Note: Server._note,
    Shares: Server._share,
}


def _pacer_of(config: Config, here: Surroundings) -> Pacer | None:
    """Return what paces the connections of a server with a bandwidth budget."""
    total, each = config.budgets()
    rates = [rate for rate in (total, each) if rate is not None]
    if not rates:
        return None
    return Pacer(Budget(total, each, here.now()), here.now, min(rates))


@contextlib.asynccontextmanager
async def serve(**settings: Any) -> AsyncIterator[Server]:
    """Run a server inside this event loop, for as long as the ``async with`` block lasts.

    ::

        async with aiops.serve(policy="fasgd", port=0) as server:
            print(server.url)

    Parameters
    ----------
    settings
        The fields of `aiops.config.Config`; ``set`` may be a dict of the policy's settings, a codec
        may be given alone.

    Raises
    ------
    UsageError, ConflictError
        When the settings cannot work.
    """
    chosen = settings.get("set")
    if isinstance(chosen, dict):
        settings["set"] = [f"{key}={value}" for key, value in chosen.items()]
    for name in ("push_codec", "fetch_codec"):
        if isinstance(settings.get(name), str):
            settings[name] = [settings[name]]
    try:
        config = Config(**settings)
    except TypeError:
        known = Config.__dataclass_fields__
        unknown = next(key for key in settings if key not in known)
        raise UsageError(
            f"a server has no setting {unknown!r}; {nearest(unknown, known)}"
        ) from None
    server = Server(config)
    await server.start()
    running = asyncio.ensure_future(server.serve())
    try:
        yield server
    finally:
        server.stop()
        await running


def _with_room(config: Config) -> Config:
    """Let this process have an open file per connection; if it may not, lower the limit."""
    try:
        import resource
    except ImportError:  # not on Windows
        return config
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = config.max_connections + _SPARE_FILES
    if soft == resource.RLIM_INFINITY or wanted <= soft:
        return config
    most = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
    if most == wanted:
        return config
    allowed = max(1, most - _SPARE_FILES)
    _log.warning("at most %d connections: this process may open %d files", allowed, most)
    return dataclasses.replace(config, max_connections=allowed)


async def run(config: Config, announce: Callable[[str], None]) -> None:
    """Run a server until a signal ends it; ``announce`` is given the URL when it listens."""
    import signal

    server = Server(_with_room(config))
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, server.stop)
    announce(await server.start())
    await server.serve()


if __name__ == "__main__":
    from aiops.cli import server_main

    server_main()
