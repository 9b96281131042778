"""A standby: a server that is fed another's journal, until it takes its place.

It listens from the start. `StandbyDesk` answers its clients, `StandbyCopy` keeps its state, and
this shell connects them with the primary. When it is promoted, its `Server` begins to serve with
the engine and the files that the standby has, at the same address.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
import os
import socket
from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import Any, TypeVar

from aiops._version import __version__
from aiops.algorithms import find
from aiops.common import urls
from aiops.common.gathering import Gathering, gathered
from aiops.common.generations import generation_text
from aiops.durable.shard_standbys import FollowerStandbyDesk, ShardCopy, check_place
from aiops.durable.standby import (
    BytesSink,
    StandbyDesk,
    goes_on,
    longest,
    refused_promotion,
)
from aiops.engine.engine import Engine
from aiops.engine.events import Drop, Effect, Event, Reply
from aiops.errors import (
    AiopsError,
    ConnectionLost,
    Refused,
    RemoteProtocolError,
    Unauthorised,
    UsageError,
)
from aiops.net.environment import CURRENT_ENVIRONMENT
from aiops.serving import rollback
from aiops.serving.acceptor import Acceptor
from aiops.serving.config import Config
from aiops.serving.members import Members
from aiops.serving.port import (
    Listener,
    Port,
    certificates,
    close_listener,
    reload_certificates,
)
from aiops.serving.server import Server
from aiops.serving.standby.copy import StandbyCopy, serving_config
from aiops.serving.standby.link import OutgoingLink, observer
from aiops.serving.standby.places import take_place
from aiops.serving.standby.shard_standbys import ShardStandbys
from aiops.shards.lead import Lead
from aiops.wire.messages import PROTOCOL, Message, Welcome
from aiops.wire.sinks import Discard, Sink
from aiops.wire.standby_messages import (
    JournalRows,
    Promoted,
    RowsKept,
    SnapshotPart,
    StandbyHello,
    StandbyWelcome,
)

T = TypeVar("T")

_log = logging.getLogger("aiops.server")

_PAUSE, _LONGEST_PAUSE = 0.1, 2.0
"""Seconds between attempts to reach the primary: the first, and the longest."""

_UNBOUND = 100
"""Hundredths of a second in which the port of a listener that was closed becomes free."""

_ANSWERED = 0.5
"""Seconds that clients of the standby get to read their last answers."""


class StandbyServer:
    """A standby of the running event loop, as ``aiops.serve(standby=...)`` gives it.

    Parameters
    ----------
    config
        Its settings; those that decide about the model are the primary's.

    Attributes
    ----------
    url
        The URL that it is reached at, once it listens.
    on_promotion
        Called before the standbys of followers become followers.
    server
        The server that it has become; None: it has not been promoted.
    metrics_url
        The URL of its `Monitoring`, if it was told.

    Raises
    ------
    UsageError, ConflictError
        When the settings cannot work.
    """

    def __init__(self, config: Config) -> None:
        if config.standby is None or config.state is None:
            raise UsageError("a standby has a primary and a state: give it --standby and --state")
        self._folder = config.state_folder or config.state
        self._config, self._env = config, CURRENT_ENVIRONMENT.get()
        self._primaries = [server.url for server in urls.parse_all(config.standby)]
        self._primary = self._primaries[0]
        self._tls = certificates(config)
        self._target = None if self._tls is None else self._tls.target
        options, algorithm = config.options(), find(config.policy).make(config.settings())
        self._blank = Engine(algorithm, options)  # answers while there is no other
        self._named = algorithm.name, algorithm.settings()
        self.url: str = ""
        self.metrics_url: str = ""
        self.on_promotion: Callable[[], None] = lambda: None
        self._shards: ShardStandbys | None = None  # of a lead, once its run is known
        self.server: Server | None = None
        self._over = asyncio.Event()  # set when it has become a server, or has ended
        self._copy: StandbyCopy | None = None
        self._open: OutgoingLink | None = None  # to a primary
        self._link: OutgoingLink | None = None  # the same, once it has welcomed this standby
        self._why = "it has not been reached yet"  # the reason for which there is no feed
        self._was_fed = False  # in this start, so the token was right
        self._ending = False
        self._promotion: list[tuple[int, int]] | None = None  # the requests for it
        self._alone = False  # it is to take the place of its follower, and no other is promoted
        self._not_taken = ""  # why it has not got that place, as it has said last
        self._resumes = 0  # the number of that place, if its lead looks for it there already
        self._epoch = 0
        self._client = self._env.token_bytes(8).hex()
        self._interrupted = asyncio.Event()
        self._left = asyncio.Event()  # set when a client is gone
        self._desk: StandbyDesk
        if config.follower:
            self._desk = FollowerStandbyDesk(
                *(self._held, self._keep, config.standby, self._asked, self._asked_alone),
                *(self._resume_place, self.stop, self._report),
            )
        else:
            self._desk = StandbyDesk(self._engine, self._report, config.standby, self._asked)
        self.connections = Acceptor(
            *(config, self._desk, self._env, None, self._post, self._left.set),
            *(lambda steady, nbytes: None, lambda peer: lambda message: Discard()),
        )
        self.connections.log_level = logging.DEBUG  # workers of a lost primary ask every 0.3 s
        self._listener: Listener | None = None
        self._port: socket.socket | None = None  # while it is promoted

    # ------------------------------------------------------------ life

    async def start(self) -> str:
        """Listen, and read the state that there is; return the URL."""
        loop, config = asyncio.get_running_loop(), self._config
        given = self.connections, self._tls, config.hello_deadline
        own = Port(config.host, config.port, *given)
        self._listener = listener = await own.bind(loop, None, None)
        await own.listen(listener)
        host, port = listener.sockets[0].getsockname()[:2]
        self.url = urls.write(host, port, tls=config.tls)
        try:
            self._copy = StandbyCopy(
                *(serving_config(config, port), self._folder, self._env.disk),
                *(lambda: self._env.randbelow(1 << 32), self._tell, self._saved),
            )
            self.connections.begin(loop)
            await self._copy.open()
        except BaseException:
            self._close()
            raise
        self._reach_followers()
        return self.url

    async def serve(self) -> None:
        """Follow the primary, and once promoted serve, until `stop` is called and all is closed.

        Raises as `stand_by` does, and as `aiops.serving.server.Server.serve`.
        """
        try:
            self.server = server = await self.stand_by()
            self._over.set()
            if server is not None:
                self._present(server)
                await rollback.serve(server, self._again, self._present, lambda: self._ending)
        finally:
            self._over.set()

    def _present(self, server: Server) -> None:
        self.server = server
        if self._ending:
            server.stop()

    def _again(self) -> Server:
        """Return a server of the state, at the same address."""
        return Server(serving_config(self._config, urls.parse(self.url)[1]))

    async def promoted(self) -> Server:
        """Return the server that it has become, once it has been promoted.

        Raises
        ------
        ConnectionLost
            When it has ended instead.
        """
        await self._over.wait()
        if self.server is None:
            raise ConnectionLost(f"the standby at {self.url} has ended, and was not promoted")
        return self.server

    async def stand_by(self) -> Server | None:
        """Follow the primary until this standby is promoted, or is to end.

        Returns
        -------
        Server or None
            The server that it has become, which listens already; None: it has ended.

        Raises
        ------
        DamagedState
            When the primary's rows give other results here.
        UsageError
            When the primary has other settings, or the state cannot be written; when this start has
            not been fed yet, and no primary that there is takes its token.
        """
        pause, said = _PAUSE, dict[str, str]()
        try:
            while True:
                refused = dict[str, str]()
                for url in self._primaries:
                    if self._ending:
                        return None
                    if self._promotion is None and self._had_place:
                        self._promote(alone=True)
                    if self._promotion is not None:
                        server = await self._promoted(self._promotion)
                        if server is not None:
                            return server
                        self._promotion = None
                    try:
                        await self._follow(url)
                    except UsageError:
                        raise
                    except (AiopsError, OSError) as error:
                        if isinstance(error, Unauthorised):
                            refused[url] = str(error)
                        self._why = str(error)
                        fed, self._link = self._link is not None, None
                        if fed:
                            pause = _PAUSE
                        if self._why != said.get(url) and not (self._ending or self._promotion):
                            said[url] = self._why
                            _log.warning("no feed: %s", self._why)
                if len(refused) == len(self._primaries) and not self._was_fed:
                    each = "; ".join(f"{url}: {why}" for url, why in refused.items())
                    raise UsageError(f"--standby {each}")
                await self._pause(pause)
                pause = min(2 * pause, _LONGEST_PAUSE)
        finally:
            self._close()

    def stop(self) -> None:
        """End, as a standby or as the server that it has become."""
        self._ending = True
        if self.server is not None:
            self.server.stop()
        self._interrupt(ConnectionLost("this standby is shutting down"))

    def stop_with_lead(self) -> None:
        """End as `stop`, but a follower that it has become ends as `Server.stop_with_lead`."""
        if self.server is None:
            self.stop()
        else:
            self._ending = True
            self.server.stop_with_lead()

    def forked(self) -> None:
        """Be no standby any more in a fork, nor the server that it has become."""
        if self._shards is not None:
            self._shards.forked()
        if self.server is not None:
            self.server.forked()

    @property
    def whole(self) -> bool:
        """True if it has a whole state of its primary, so that it can be promoted."""
        return self._copy is not None and self._copy.whole

    @property
    def generation(self) -> int:
        """That of its primary when it was fed last; 0: it has not been."""
        return self._copy.position.generation if self._copy is not None else 0

    def promote(self) -> None:
        """Become the server; the standby of a follower takes its place, if the lead gives it."""
        self._promote(alone=self._config.follower)

    def _promote(self, *, alone: bool, resumes: int = 0) -> None:
        if self._promotion is None:
            self._promotion, self._alone, self._resumes = [], alone, resumes
        self._interrupt(ConnectionLost("this standby is promoted"))

    def _interrupt(self, error: AiopsError) -> None:
        self._interrupted.set()
        if self._open is not None:
            self._open.fault(error)

    async def _pause(self, seconds: float) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._interrupted.wait()

    def _close(self) -> None:
        if self._listener is not None:
            self._listener.close()
        self.connections.end(ConnectionLost("this standby is shutting down"))
        if self._shards is not None:
            self._shards.end()
        if self._copy is not None:
            self._copy.close()

    def reload(self) -> None:
        """Read certificates and tokens again, as `aiops.serving.server.Server.reload`."""
        if self.server is None:
            reload_certificates(self._tls)
            self.connections.reload_tokens()
        else:
            self.server.reload()

    # ------------------------------------------------------------ the feed

    async def _follow(self, url: str) -> None:
        """Take what a primary sends, until the connection ends or is ended."""
        copy, config, env = self._made, self._config, self._env
        self._interrupted.clear()
        if self._ending or self._promotion is not None:
            return
        if config.follower:
            url = await self._uninterrupted(self._address_of_shard(url))
        link = self._open = OutgoingLink(env, url, config.token, self._sink_for, self._target)
        self._epoch += 1
        held = copy.position
        hello = StandbyHello(
            id=0,
            protocol=PROTOCOL,
            client=self._client,
            epoch=self._epoch,
            name=urls.address(*urls.parse(self.url)),
            pongs=True,
            nonce=env.token_bytes(16),
            agent=f"aiops-python/{__version__}",
            run=held.run,
            generation=held.generation,
            row=held.row,
            generation_proof=held.proof,
        )
        try:
            welcome = await self._uninterrupted(link.open(hello, config.hello_deadline))
            if not isinstance(welcome, StandbyWelcome):
                raise RemoteProtocolError(f"{url}: {welcome.kind!r} is no welcome")
            if self._interrupted.is_set():
                return
            shards = None if config.follower else config.options().shards
            check_place(welcome, config.shard or 0, shards, url)
            again = not goes_on(held, welcome, url)
            copy.begin(welcome, again=again)
            self._link, self._primary, self._why, self._was_fed = link, url, "", True
            self._reach_followers()
            what = "a snapshot" if welcome.snapshot else f"row {welcome.row + 1:,}"
            _log.info("fed by %s, from %s on", url, what)
            self._tell()
            while True:
                message, sink = await link.receive(config.waits.unanswered / 3)
                await self._take(message, sink)
        finally:
            link.close()

    async def _address_of_shard(self, url: str) -> str:
        """Return the URL of the follower that this is the standby of, given that of its lead."""
        config, shard = self._config, self._config.shard or 0
        for server in urls.parse_all(config.standby or ""):
            if server.url == url and len(server.followers) >= shard:
                return urls.write(*server.followers[shard - 1], tls=server.tls)
        lead = OutgoingLink(self._env, url, config.token, tls=self._target)
        try:
            welcome = await lead.open(observer(self._env, "aiops"), config.hello_deadline)
        finally:
            lead.close()
        table = welcome.shards if isinstance(welcome, Welcome) else ()
        if len(table) < shard:
            raise ConnectionLost(f"{url} has no shard {shard} at present")
        host, port, _start = table[shard - 1]
        return urls.write(host or urls.parse(url)[0], port, tls=urls.is_tls(url))

    async def _uninterrupted(self, opening: Coroutine[Any, Any, T]) -> T:
        """Return what a coroutine returns, unless this standby is to end or is promoted first."""
        opened = asyncio.ensure_future(opening)
        interrupted = asyncio.ensure_future(self._interrupted.wait())
        try:
            await asyncio.wait({opened, interrupted}, return_when=asyncio.FIRST_COMPLETED)
            if not opened.done():
                raise ConnectionLost("no primary is looked for any more")
            return opened.result()
        finally:
            opened.cancel()
            interrupted.cancel()

    async def _take(self, message: Message, sink: Sink | None) -> None:
        copy = self._made
        data = sink.data if isinstance(sink, BytesSink) else memoryview(b"")
        if isinstance(message, JournalRows):
            await copy.take_rows(message, data, self._tell)
        elif isinstance(message, SnapshotPart):
            await copy.take_snapshot(message, data)
        else:
            raise RemoteProtocolError(f"{message.kind!r} is not for a standby")
        self._tell()

    def _sink_for(self, message: Message) -> Sink:
        most = longest(self._config.max_model)
        if isinstance(message, JournalRows):
            return BytesSink(message, most)
        if isinstance(message, SnapshotPart):
            start = message.parts[0].start if message.parts else 0
            return BytesSink(message, most, start)
        raise RemoteProtocolError(f"{message.kind!r} is not for a standby")

    def _tell(self) -> None:
        """Tell the primary what there is."""
        copy = self._made
        if self._link is not None:
            synced = 0 if copy.pending else copy.synced  # nothing is safe without the snapshot
            self._link.send(RowsKept(0, copy.row, synced, min(copy.applied, copy.row)))

    @property
    def _made(self) -> StandbyCopy:
        if self._copy is None:
            raise LookupError("it has not been started")
        return self._copy

    # ------------------------------------------------------------ promotion

    def _asked(self, peer: int, id: int, *, alone: bool = False) -> None:
        """Note a request to be promoted; ``alone``: without those of the other servers."""
        copy = self._made
        if not copy.whole:
            why = f"this standby cannot be promoted: it has no whole state of {self._primary} yet"
            self._reply(peer, refused_promotion(id, why))
            return
        self._promote(alone=alone)
        if self._promotion is not None:
            self._promotion.append((peer, id))

    def _asked_alone(self, peer: int, id: int) -> None:
        """Note a request that the standby of a follower takes its place."""
        self._asked(peer, id, alone=True)

    def _resume_place(self, number: int) -> None:
        """Be the follower for which the lead looks here."""
        if self._made.whole:
            self._promote(alone=number > 0, resumes=number)

    @property
    def _had_place(self) -> bool:
        """True if it was the follower, and no other has fed it since: it asks for that by itself.

        Its lead looks for it where it was, and it may have another address now.
        """
        copy, config = self._made, self._config
        return config.follower and copy.whole and copy.place_of(config.shard or 0) > 0

    async def _have_place(self, asked: list[tuple[int, int]]) -> bool:
        """Ask the lead for the place of the follower; return whether this standby has it."""
        copy, config = self._made, self._config
        try:
            held, number = copy.state(), self._resumes
            if not number:
                given = self._env, self._primaries, config.token, self._target, *held
                number = await take_place(*given, self.url, config.hello_deadline)
            copy.note_place(held[0].shard, number)
        except (AiopsError, OSError) as error:
            why = f"this standby has not taken the place of its follower: {error}"
            if why != self._not_taken:
                self._not_taken = why
                _log.error("%s", why)
            for peer, id in asked:
                self._reply(peer, refused_promotion(id, why))
            return False
        return True

    async def _promoted(self, asked: list[tuple[int, int]]) -> Server | None:
        """Become the server, and tell those who asked; None: there is no whole state."""
        if not self._made.whole:
            _log.error("this standby cannot be promoted: it has no whole state yet")
            return None
        if self._alone and not await self._have_place(asked):
            return None
        try:
            return await self._promoted_with_port(asked)
        finally:
            if self._port is not None:
                self._port.close()
                self._port = None

    def _hold_port(self) -> None:
        """Keep the port until the server has it: another process may take one that is free."""
        sockets = self._listener.sockets if self._listener is not None else ()
        if len(sockets) == 1 and sockets[0].fileno() >= 0:  # a simulated one has none
            self._port = socket.socket(fileno=os.dup(sockets[0].fileno()))

    async def _promoted_with_port(self, asked: list[tuple[int, int]]) -> Server | None:
        copy, config = self._made, self._config
        self._hold_port()
        if self._shards is not None:
            try:
                await self._shards.check()
                self.on_promotion()
                await self._shards.promote()
            except Refused as error:
                _log.error("%s", error)
                for peer, id in asked:
                    self._reply(peer, refused_promotion(id, str(error)))
                return None
        # A follower's old lead is told by its lead, and ends it.
        fenced = () if config.follower else self._primaries
        above = self._desk.above if isinstance(self._desk, FollowerStandbyDesk) else 0
        server, recovered = copy.promoted(fenced, placed=self._alone, above=above)
        if self._listener is not None:
            await close_listener(self._listener)
        host, port = urls.parse(self.url)
        for _ in range(_UNBOUND):  # the event loop may close the listener later
            if self._port is not None or self._env.free_port(host, port):
                break
            await asyncio.sleep(0.01)
        try:
            if config.sharded:
                # The followers may be at other moments: all go back to the newest that all have.
                server.discard()
                server = await rollback.start(self._next, lambda: self._ending, next_term=True)
            else:
                server.socket = self._port.dup() if self._port is not None else None
                await server.start(recovered)
        except UsageError as error:  # the port is gone, or the disk refuses
            state = "" if self._shards is not None else " its state is a standby's as before:"
            text = (
                f"this standby was not promoted, and ends: {error};{state} start it again with"
                " --standby, on another --port, and promote it then"
            )
            for peer, id in asked:
                self._reply(peer, refused_promotion(id, text))
            raise UsageError(text) from None
        self.server = server  # a follower may be started again from here on
        generation, version = server.run_state.generation, server.version
        _log.warning("promoted: generation %s, version %d", generation_text(generation), version)
        for peer, id in asked:
            self._reply(peer, Promoted(id, generation, version))
        for other in list(self.connections.peers.values()):
            other.link.close()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_ANSWERED):  # the server serves meanwhile
                while self.connections.peers:
                    self._left.clear()
                    await self._left.wait()
        return server

    def _next(self) -> Server:
        """Return a server of the state, which is to tell the primaries that it is one."""
        server = self._again()
        if server.run_state.files is not None:
            server.run_state.files.predecessors = tuple(self._primaries)
        if self._port is not None:
            server.socket = self._port.dup()
        return server

    # ------------------------------------------------------------ clients

    def _engine(self) -> Engine:
        server = self._copy.server if self._copy is not None else None
        return self._blank if server is None or self._config.follower else server.engine

    def gather(self, shown: int) -> Gathering[Mapping[str, Any]]:
        """Return the statistics for metrics, as `Server.gather` does.

        They are empty until it has started.
        """
        if self.server is not None:
            return (yield from self.server.gather(shown))
        return {} if self._copy is None else (yield from self._gather(shown))

    def members(self, most: int) -> Members:
        """Return the clients of its primary for the live page: the rows of this many at most."""
        if self.server is not None:
            return self.server.members(most)
        return Members.of(self._engine(), self._engine().now, most)

    def administrator(self, token: str) -> str:
        """Return the name of a token that is shown as it is; raises `Unauthorised`."""
        return self.connections.access.administrator(token)

    async def take_snapshot(self, by: str) -> str:
        """Take a snapshot for an administrator on the live page, once it is promoted."""
        return await self._in_charge().take_snapshot(by)

    def send_away(self, by: str, client: str) -> str:
        """Send a client away for an administrator on the live page, once it is promoted."""
        return self._in_charge().send_away(by, client)

    def _in_charge(self) -> Server:
        if self.server is None:
            raise Refused(f"this server is a standby of {self._primary}: ask that one")
        return self.server

    def norms(self) -> Callable[[], list[float]] | None:
        """Return what computes the parameters' norms by tensor, once it is promoted."""
        return None if self.server is None else self.server.norms()

    @property
    def not_ready(self) -> str:
        """The reason for which it takes no pushes; empty: it was promoted, and takes them."""
        if self.server is not None:
            return self.server.not_ready
        return f"it is a standby of {self._primary}"

    def _report(self) -> Mapping[str, Any]:
        return gathered(self._gather())

    def _gather(self, shown: int | None = None) -> Gathering[Mapping[str, Any]]:
        """Return the statistics of the engine, and the standby's own."""
        state = self._state_report()
        if self._shards is not None:
            state["shards"] = self._shards.report()
        found = yield from self._engine().gather(shown)
        return {**found, "state": state}

    def _state_report(self) -> dict[str, Any]:
        copy, config = self._made, self._config
        held = copy.position
        return {
            "folder": str(self._folder),
            "run": held.run,
            "generation": held.generation,
            "row": copy.row,
            "acks": config.acknowledgement.name.lower(),
            "ended": "",
            "standby_of": self._primary,
            "synced": copy.synced,
            "applied": copy.applied,
            "behind_rows": max(0, copy.newest - copy.applied),
            "no_feed": self._why,
        }

    # ------------------------------------------------------------ with shards

    def _reach_followers(self) -> None:
        """Begin to connect the standby of a lead to those of its followers, if its run is known."""
        copy = self._made
        if self._shards is not None or not self._config.sharded or not copy.position.run:
            return
        self._shards = ShardStandbys(
            *(self._config, self._env, copy.position.run, *self._named),
            *(lambda: copy.fed_by, copy.lead_proof, self._servers, copy.keep),
            *(self._target, copy.place_of),
        )
        self._shards.begin(copy.cuts)

    def _servers(self) -> Sequence[int]:
        """Return the shards that have a part of the model."""
        server = self._made.server
        lead = server.coordinator if server is not None else None
        return lead.sets.servers if isinstance(lead, Lead) else ()

    def follower_moved(self, shard: int, port: int) -> None:
        """Reach a follower, or its standby, at another port: it was started again."""
        followers = [*self._config.followers]
        followers[shard - 1] = f":{port}"
        self._config = dataclasses.replace(self._config, followers=followers)
        if self.server is not None:
            self.server.follower_moved(shard, port)
            return
        if self._shards is not None:
            self._shards.move(shard, urls.local_address(self._config.host), port)
        if self._copy is not None:
            self._copy.follower_moved(shard, port)

    def _saved(self, cut: int) -> None:
        """Note that there is a snapshot of a row of the lead's journal."""
        if self._shards is not None:
            self._shards.saved(cut)
        elif isinstance(self._desk, FollowerStandbyDesk):
            self._perform(self._desk.saved(cut))

    def _keep(self, cuts: Sequence[int]) -> None:
        self._made.keep(cuts)

    def _held(self) -> ShardCopy:
        """Return what the standby of a follower has."""
        copy, config = self._made, self._config
        server = copy.server
        if server is None or server.run_state.files is None:  # it is being read, or there is none
            return ShardCopy("", config.shard or 0, 0, 0, (), False, self._state_report())
        files = server.run_state.files
        given = copy.position.run, *files.place, server.version
        facts = self._state_report(), files.generations.secret, copy.place_of(files.place[0])
        return ShardCopy(*given, copy.cuts, copy.whole, *facts, copy.led_by)

    def _post(self, event: Event) -> None:
        """Have the desk handle an event, and carry out its effects."""
        self._perform(self._desk.handle(event))

    def _perform(self, effects: Sequence[Effect]) -> None:
        for effect in effects:
            if isinstance(effect, Reply):
                self._reply(effect.peer, effect.message)
            elif isinstance(effect, Drop):
                peer = self.connections.peers.get(effect.peer)
                if peer is not None:
                    peer.link.close()

    def _reply(self, number: int, message: Message) -> None:
        peer = self.connections.peers.get(number)
        if peer is not None and peer.link.wire.state != "closed":
            peer.link.send(peer.link.wire.send(message))
