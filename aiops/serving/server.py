"""The server: an asyncio shell around the engine.

It moves bytes, keeps time, and runs kernels on its update thread. They release the GIL, so that
fetches and pushes go on meanwhile. A `Server` opens its files, listens, has the engine handle one
event after the other, drains and closes. The `Acceptor` posts the events of connections, the
`EffectRunner` carries out the engine's effects.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import errno
import logging
import os
import socket
import threading
from collections import deque
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from aiops._version import __version__
from aiops.algorithms import find
from aiops.common import forks, generations, urls
from aiops.common.generations import generation_text
from aiops.durable.commit_gate import Acks, EncodedReply
from aiops.durable.follower_recorder import FollowerReplayer, check_follower
from aiops.durable.lead_recorder import LeadReplayer
from aiops.durable.recorder import Supersede
from aiops.durable.recovery import Recovered, Replayer, check_begin
from aiops.engine.engine import Engine
from aiops.engine.events import (
    Committed,
    End,
    Event,
    Initialised,
    JournalEnded,
    SetBudget,
    Stopping,
)
from aiops.engine.steady import ExchangeRecord, Steady
from aiops.errors import ConnectionLost, Refused, RolledBack, Superseded, UsageError
from aiops.model.shared_memory import Memory, SharedMemory
from aiops.net.environment import CURRENT_ENVIRONMENT
from aiops.net.socket_options import narrow, unpace
from aiops.serving.acceptor import Acceptor, Coordinator
from aiops.serving.config import Config
from aiops.serving.effects import EffectRunner
from aiops.serving.pacing import Pacing
from aiops.serving.persistence import Persistence
from aiops.serving.profiling import Profile
from aiops.serving.shard_links import ShardLinks
from aiops.serving.standby.feeds import StandbyFeeds
from aiops.serving.standby.fencing import fence
from aiops.serving.state.kept_state import KeptState
from aiops.serving.state.shard_states import FollowerState, LeadState
from aiops.serving.state.state_files import Clock, StateFiles
from aiops.serving.unix_listener import UnixListener
from aiops.shards.budget_shares import first_share
from aiops.shards.collecting import Collecting
from aiops.shards.common_moment import CommonMoment
from aiops.shards.follower import Follower
from aiops.shards.lead import Lead
from aiops.state.frames import JournalFrame
from aiops.store.resources import Resources, unmeasured
from aiops.wire.connection import SinkFor
from aiops.wire.messages import Error, Hello, Message
from aiops.wire.server_messages import Greeting
from aiops.wire.sinks import Sink
from aiops.wire.standby_messages import Fence, StandbyHello

_log = logging.getLogger("aiops.server")

_BACKLOG = 1024

_OLD_COPY = ", or began with an older copy of its state"
_LONGEST_REASON = 200  # characters of an error that are sent to peers
_LEAD_ENDS = 60.0  # seconds that a follower that is asked to end waits for its lead to do so
_UNMOVED = 0.5
"""Seconds without progress after which unsent answers do not delay a server's end."""


class Server:
    """One server of the running event loop.

    Parameters
    ----------
    config
        The settings.

    Attributes
    ----------
    url, port
        The URL that workers connect to and the port that it listens on, once it does (`start`).
    socket
        Bound to its address already, instead of one that `start` binds; None: it binds one.

    Raises
    ------
    UsageError, ConflictError
        When the settings cannot work; before anything is opened.
    """

    def __init__(self, config: Config) -> None:
        self.config = config
        self.url, self.port = "", config.port
        env = CURRENT_ENVIRONMENT.get()
        self._clock = clock = Clock(env.now)
        self._env = env = env if config.state is None else dataclasses.replace(env, now=clock)
        self._now = env.now
        algorithm = find(config.policy).make(config.settings())
        options = config.options()
        pacing = Pacing.of(*first_share(options), env, self.post)
        near = pacing is None and not config.no_shm and env.listen_unix is not None
        relaxed = config.consistency == "relaxed"  # replies are of the memory as it is then
        self._profile = Profile(config.profile) if config.profile is not None else None
        memory = SharedMemory() if near and not relaxed else Memory()
        device = env.device(config.device)
        if device is not None:
            from aiops.store.cuda_backend import PageLocked

            memory = PageLocked(memory, device)
        measure = self._profile.measure if self._profile is not None else unmeasured
        parallel_map = (
            env.parallel_map if config.threads is None else env.parallel_map_of(config.threads)
        )
        self._machine = machine = Resources(
            memory, parallel_map, measure, device, later=True, guard=threading.Lock
        )
        run = env.token_bytes(8).hex()
        self._state_files: StateFiles | None = None
        self._state: KeptState | FollowerState | None = None  # once it has been recovered
        self._lacks = ""  # what the state that it has left does
        self._state_over = False  # it has left it
        self._feeds: StandbyFeeds | None = None  # once there is a journal
        self._alone = False  # it is known to have no standby
        self._next_term = False  # it is to begin one
        self._fencing: asyncio.Task[None] | None = None  # of the servers whose standby it was
        kept, shard = config.state_folder, None if config.follower else (0, options.shards)
        if kept is not None:
            holder, salt = f"process {os.getpid()}", partial(env.randbelow, 1 << 32)
            self._state_files = StateFiles(
                *(kept, env.disk, holder, run, salt, shard), keep=config.keep_journal
            )
            run = self._state_files.run
        options = dataclasses.replace(options, run=run)
        links: ShardLinks | None = None
        lead: Lead | None = None
        self._coordinator: Coordinator
        if config.follower:
            follower = Follower(algorithm, options, machine, kept=kept is not None)
            self._coordinator = follower
            sinks_of = follower.sinks_of
        else:
            try:
                engine = Engine(algorithm, options, machine, self._statistics)
            except BaseException:  # settings that cannot work: another server may have the state
                self._end_state()
                raise
            self._coordinator = self._engine = engine
            sinks_of = self._engine.sinks_of
            if config.sharded:
                lead = Lead(self._engine, config.reach(), kept=kept is not None)
                self._coordinator = lead
                sinks_of = partial(self._sinks_of, lead)
                links = self._links_of(lead, options.run)
        self._links = links
        self._handle = machine.measure("policy", self._coordinator.handle)
        self.connections = Acceptor(
            *(config, self._coordinator, env, pacing, self.post, self._note_change),
            *(self._exchange, sinks_of, machine.measure),
        )
        self.connections.control, self.connections.refusal = self._control, self._refusal
        self._unix_listener: UnixListener | None = None
        if near and env.listen_unix is not None:
            self._unix_listener = UnixListener(env.listen_unix, self.connections.accept_near)
        self._persistence: Persistence | None = None
        if not config.follower:
            collect = partial(self._collect, lead) if lead is not None else None
            self._persistence = Persistence(config, self._engine, self._now, collect)
        self._runner = EffectRunner(
            *(asyncio.get_running_loop(), env, self.connections, self.post),
            *(self._failed, self._end, links, machine),
        )
        self._runner.actions[SetBudget] = self._pace
        self._events: deque[Event] = deque()
        self._handling = False
        self.socket: socket.socket | None = None
        self._listener: asyncio.Server | None = None  # once it listens
        self._ending = asyncio.Event()
        self._error: BaseException | None = None  # with which it ends
        self._broken = False  # an update failed midway: the parameters cannot be trusted any more
        self._forked = False  # this is a copy of it, in a fork
        self._changed: asyncio.Event | None = None  # set when something happens
        forks.note(self)

    def _links_of(self, lead: Lead, run: str) -> ShardLinks:
        """Return a lead's connections to its followers, not opened yet."""
        config, algorithm = self.config, self._engine.algorithm
        return ShardLinks(
            config.follower_addresses(),
            *(config.token, run, algorithm.name, algorithm.settings()),
            *(config.heartbeat, self._env),
            lead.sink_for_follower,
            self.post,
            lead.refusal,
            self._lead_generation,
            self._lead_proof,
            self._stop_with,
        )

    def _lead_generation(self) -> int | None:
        """Return the generation of this start, which may not have begun; None without a state."""
        if self._state_files is None:
            return None
        if self._next_term and self._state is None:
            return generations.next_term(self.generation, 0)
        return self.generation + (self._state is None)

    def _lead_proof(self, generation: int) -> bytes:
        """Return the proof for followers of a lead of this generation; empty without a state."""
        return b"" if self._state_files is None else self._state_files.claims.lead_proof(generation)

    def follower_moved(self, shard: int, port: int) -> None:
        """Reach a follower on this machine at another port from here on: it was started again."""
        if self._links is not None and isinstance(self._coordinator, Lead):
            self._coordinator.move(shard, "", port)
            self._links.move(shard, urls.local_address(self.config.host), port)

    def _statistics(self) -> Mapping[str, Any]:
        """Return the shell's part of the statistics."""
        return {
            "profile": self._profile.report() if self._profile is not None else None,
            "file_errors": self._persistence.errors() if self._persistence is not None else [],
            "state": self.state_report(),
            "aiops": __version__,
            "time": self._env.wall_clock(),
        }

    def state_report(self) -> dict[str, Any] | None:
        """Return what statistics tell of the state that it keeps; None: it keeps none."""
        state, feeds = self._state, self._feeds
        if state is None:
            return None
        found = state.report()
        return found if feeds is None else {**found, **feeds.report(state.recorder.acks)}

    @property
    def engine(self) -> Engine:
        """The engine that decides, unless this server is a follower."""
        return self._engine

    @property
    def state_files(self) -> StateFiles | None:
        """The folder of the state that it keeps, if it keeps one."""
        return self._state_files

    @property
    def run(self) -> str:
        """The name of the run; of a follower, that of its state."""
        if isinstance(self._coordinator, Follower):
            return self._coordinator.run or (self._state_files.run if self._state_files else "")
        return self._engine.options.run

    @property
    def coordinator(self) -> Coordinator:
        """The engine, the lead or the follower, which decides."""
        return self._coordinator

    @property
    def version(self) -> int:
        """The version of the model, or of the follower's part of it."""
        follower = self._coordinator
        if isinstance(follower, Follower):
            return 0 if follower.shard is None else follower.shard.version
        return self._engine.version

    @property
    def generation(self) -> int:
        """The generation of the run; 0 without a state."""
        return 0 if self._state_files is None else self._state_files.generation

    @property
    def generation_proof(self) -> bytes:
        """Proves to other servers of the run that its generation has begun; empty without state."""
        return b"" if self._state_files is None else self._state_files.claims.proof

    @property
    def alone(self) -> bool:
        """True if no acknowledgement waits for a standby: there is none that has all rows."""
        return self._alone if self._feeds is None else self._feeds.replication.fallen

    @property
    def warm(self) -> bool:
        """True if all kernels are ready."""
        return self._runner.warm

    # ------------------------------------------------------------ life

    async def start(
        self,
        promoted: Recovered | None = None,
        *,
        next_term: bool = False,
        alone: bool = False,
    ) -> str:
        """Open everything and listen; return the URL that workers connect to.

        ``promoted``: the state to which a standby has brought the engine, if it was one.
        ``next_term``: it was a standby, and its state is read again.
        ``alone``: it had no standby when it ended to go back, so it does not wait for one.
        """
        next_term = self._next_term = next_term or promoted is not None
        self._alone = alone or next_term
        loop = asyncio.get_running_loop()
        preparation = self._coordinator.preparation()  # before peers can connect and wait for it
        prepared = False
        listener: asyncio.Server | None = None
        try:
            listener = await self._bound(loop)
            if self._state_files is not None:
                self._state_files.claim = partial(self._claim, listener)
                if not next_term:
                    self._state_files.check_not_superseded()
                if self._state_files.generation:  # then there are updates to be repeated, at once
                    self._runner.gentle = False
                    self._runner.perform(preparation)
                    prepared = True
            resumes = self._state_files is not None and self._state_files.generation > 0
            # A mistake in --init begins no state.
            model = None if resumes else self._initial_model()
            if self._links is not None:
                await self._begin_to_lead(self._links, loop, next_term=next_term)
            elif self._state_files is not None:
                self._state = self._recovered(
                    *(self._state_files, loop, promoted), next_term=next_term
                )
            if self._pacing is not None and (resumes or next_term):
                self._pacing.owe()
            if self._persistence is not None:
                self._persistence.open()
            if resumes:
                model = self._initial_model()
            if model is not None:
                self.post(model)
            self._listener, self._runner.gentle = listener, True
            await self._listen(listener)
        except BaseException as error:
            self._listener = None
            if listener is not None:
                listener.close()
            if self._links is not None:  # standbys that became followers can be led later
                self._links.end(leave=not (next_term or isinstance(error, RolledBack)))
            self._runner.close()
            preparation.over()
            if self._persistence is not None:
                self._persistence.discard()
            self._end_state()
            raise
        if self._persistence is not None:
            self._persistence.begin(loop)
        for pool in self._coordinator.pools:
            pool.wake = partial(loop.call_soon_threadsafe, pool.settle)
        self.connections.begin(loop)
        if self._unix_listener is not None:
            self._unix_listener.begin(sock.getsockname()[:2] for sock in listener.sockets)
        if self._pacing is not None:
            self._pacing.begin(loop)
        if not prepared:
            self._runner.perform(preparation)
        if self._state is not None:
            self._state.begin(loop, self.config.snapshot_every)
        if self._feeds is not None:
            self._feeds.begin(loop)
        host, self.port = listener.sockets[0].getsockname()[:2]
        self.url = urls.write(host, self.port)
        if self._state_files is not None and self._state_files.generations.predecessors:
            predecessors = self._state_files.generations.predecessors
            given = self._env, self.config.token, predecessors, self.url, self.run
            self._fencing = loop.create_task(fence(*given, self.generation, self.generation_proof))
        return self.url

    def _initial_model(self) -> Initialised | None:
        """Return the model of `--init`, or None: there is none, or the state has one already."""
        path = self.config.init
        if self._persistence is None or path is None:
            return None
        if self._engine.training is not None:
            _log.warning(
                "%s has a model already, at version %s, and goes on with it: --init %s is not read",
                *(self.config.state, f"{self._engine.version:,}", path),
            )
            return None
        return self._persistence.initial_model(path)

    async def _begin_to_lead(
        self, links: ShardLinks, loop: asyncio.AbstractEventLoop, *, next_term: bool
    ) -> None:
        """Connect to the followers, and go back with them to the newest moment that all have.

        They go back first. If this server began another history before, and ended then, rows of two
        histories would have the same numbers. Standbys that were promoted are at the moments up to
        which each was fed.
        """
        files, lead = self._state_files, self._coordinator
        states, ahead = await links.connect(self.config.hello_deadline), dict[int, int]()
        if files is not None and isinstance(lead, Lead):
            moment = CommonMoment(states, files.generations.history)
            if why := lead.refused(moment):
                raise UsageError(why)
            recovered = self.recover(LeadReplayer(lead, self._runner.perform, moment))
            row = 0 if recovered is None else recovered.row
            ahead = moment.ahead(row)
            files.claim()  # or followers would have gone back for a server that serves no client
            await links.roll_back(ahead)
            self._state = self._recovered(files, loop, recovered, next_term=next_term)
        links.lead(ahead)

    def _recovered(
        self,
        files: StateFiles,
        loop: asyncio.AbstractEventLoop,
        recovered: Recovered | None,
        *,
        next_term: bool,
    ) -> KeptState | FollowerState:
        """Bring the engine to the state that is kept, and have its events journalled."""
        state = self._kept_state(files, loop, recovered, next_term=next_term)
        self._handle = self._machine.measure("policy", state.recorder.handle)
        self._runner.actions.update(state.actions(self._send_encoded, self._superseded))
        if isinstance(state, LeadState):
            state.resume()
        return state

    def _kept_state(
        self,
        files: StateFiles,
        loop: asyncio.AbstractEventLoop,
        recovered: Recovered | None,
        *,
        next_term: bool,
    ) -> KeptState | FollowerState:
        config, coordinator, perform = self.config, self._coordinator, self._runner.perform
        given = config.policy, config.acknowledgement, self._clock, self.post

        def post_threadsafe(event: Event) -> object:
            return loop.call_soon_threadsafe(self._journalled, event)

        state: KeptState | FollowerState
        if isinstance(coordinator, Follower):
            mine = files, coordinator, config.acknowledgement, self._clock
            state = FollowerState(
                *(*mine, post_threadsafe, perform, self._stop_with, recovered),
            )
        elif isinstance(coordinator, Lead):
            state = LeadState(
                *(coordinator, files, *given, post_threadsafe, perform, recovered),
                promoted=next_term,
            )
        else:
            state = KeptState(
                *(files, self._engine, *given, post_threadsafe, perform, recovered),
                promoted=next_term,
            )
        if config.acknowledgement > Acks.APPLIED:
            self._feeds = self.connections.standbys = StandbyFeeds(
                *(files, state, config.acknowledgement, config.standby_deadline, self._env),
                *(self._committed, self.connections.link_lost, self.supersede),
                alone=self._alone,
            )
            state.keep_for(self._feeds.first_needed)
            if isinstance(coordinator, Follower):
                coordinator.state_report = lambda: self.state_report() or {}
        return state

    def _journalled(self, event: Event) -> None:
        """Handle an event of the journal's thread."""
        synced = isinstance(event, Committed) and self.config.acknowledgement >= Acks.DURABLE
        if synced and self._feeds is not None:
            self._committed(self._feeds.synced_here(event.row))  # type: ignore[union-attr]
        else:
            self.post(event)

    def _committed(self, row: int) -> None:
        if self.config.acknowledgement >= Acks.DURABLE:
            self.post(Committed(self._now(), row))

    def _control(self, number: int, message: Message) -> None:
        """Handle what is asked of this server itself."""
        text, files = "this server is no standby, and no other has its run", self._state_files
        if files is not None and isinstance(message, Fence):
            if files.claims.supersedes(message):
                self.supersede(message.generation, message.primary)
                return
            text = files.claims.refusal(message) or text
        peer = self.connections.peers[number]
        answer = Error(message.id, Refused.code, text, {}, False)
        peer.link.send(peer.link.wire.send(answer))

    def _refusal(self, hello: Greeting) -> str:
        """Return the reason for which a client's claim is refused, or an empty text."""
        if self._state_files is None or not isinstance(hello, Hello | StandbyHello):
            return ""
        return self._state_files.claims.refusal(hello)

    def _superseded(self, effect: Supersede) -> None:
        self.supersede(effect.generation)

    def supersede(self, generation: int, primary: str = "") -> None:
        """End at once, and acknowledge nothing more: another server has this run now.

        Parameters
        ----------
        generation
            That server's.
        primary
            Its URL, if that is known.
        """
        if self._broken or self._state is None:
            return
        self._broken = True
        self._state.stop()
        if self._state_files is not None:
            try:
                self._state_files.note_successor(generation, primary)
            except OSError as why:
                _log.error("a later start here will not know it: %s", why.strerror or why)
        error = Superseded(
            f"this server was superseded by {primary or 'another one'} of its run (generation"
            f" {generation_text(generation)}){'' if primary else _OLD_COPY}: to be of use it may"
            f" start with --standby {primary or 'and the URL of that'}",
            generation=generation,
            primary=primary,
        )
        self.connections.refuse(str(error), Superseded.code, error.details)
        self._stop_with(error)

    def replayer(self, on_loop: Callable[..., object] | None = None) -> Replayer | FollowerReplayer:
        """Return what replays rows to the engine, instead of `start`.

        ``on_loop``: has a function called by the event loop, if the replay is on another thread.
        """
        perform = self._runner.perform
        warm = partial(on_loop, perform) if on_loop else perform
        coordinator = self._coordinator
        if isinstance(coordinator, Follower):
            return FollowerReplayer(coordinator, self.run, warm)
        if isinstance(coordinator, Lead):
            return LeadReplayer(coordinator, warm)
        return Replayer(self._engine, warm)

    def recover(self, replayer: Replayer | FollowerReplayer) -> Recovered | None:
        """Bring the engine to the state that is kept, instead of `start`; see `StateFiles`."""
        files = self._state_files
        if files is None:
            return None
        if isinstance(replayer, FollowerReplayer):
            return files.recover_follower(self._coordinator, replayer)  # type: ignore[arg-type]
        return files.recover(self._engine, self.config.policy, replayer=replayer)

    def check_begin(self, frame: JournalFrame) -> None:
        """Check that a state's first row is of a server with these settings; see `check_begin`."""
        where = str(self.config.state_folder)
        if isinstance(self._coordinator, Follower):
            check_follower(frame, self._coordinator, where)
        else:
            check_begin(frame, self.config.policy, self._engine, where)

    def discard(self) -> None:
        """Let go of everything, instead of `start`."""
        self._runner.close()
        self._end_state()

    def _send_encoded(self, effect: EncodedReply) -> None:
        peer = self.connections.peers.get(effect.peer)
        if peer is not None:
            peer.link.send([effect.data])

    def _end_state(self) -> None:
        """Close the journal, and let another server have the folder, once."""
        if self._state_over:
            return
        self._state_over = True
        if self._state is not None:
            self._lacks = self._state.end(trusted=not self._broken)
        elif self._state_files is not None:
            self._state_files.close()

    async def _bound(self, loop: asyncio.AbstractEventLoop) -> asyncio.Server:
        """Return what has the port, and does not listen yet: clients would wait in vain."""
        host, port = self.config.host, self.config.port
        given: dict[str, Any] = {"host": host, "port": port}
        if self.socket is not None:
            given = {"sock": self.socket}
        try:
            listener = await loop.create_server(
                self.connections.accept, **given, backlog=_BACKLOG, start_serving=False
            )
        except OSError as error:
            raise self._no_port(error) from None
        for sock in listener.sockets:
            unpace(sock, sock.getsockname()[0])
            if self._pacing is not None:  # a window is announced before a peer is accepted
                narrow(sock, self._pacing.pacer.narrowed)
        return listener

    def _claim(self, listener: asyncio.Server) -> None:
        """Take the port for good: as long as no socket listens, another process may bind to it too.

        The system holds connections until `_listen` accepts them. So this is called when that is
        near: just before the generation begins, by which a server fences those before it.
        """
        try:
            for sock in listener.sockets:
                if sock.fileno() >= 0:  # a simulated one has none
                    with socket.socket(fileno=os.dup(sock.fileno())) as same:
                        same.listen(_BACKLOG)
        except OSError as error:
            raise self._no_port(error) from None

    async def _listen(self, listener: asyncio.Server) -> None:
        try:
            before = [sock.fileno() for sock in listener.sockets]
            await listener.start_serving()
            if [sock and sock.fileno() for sock in listener.sockets] != before:
                # uvloop raises nothing: it closes those that could not listen.
                raise OSError(errno.EADDRINUSE, os.strerror(errno.EADDRINUSE))
        except OSError as error:
            raise self._no_port(error) from None

    def _no_port(self, error: OSError) -> UsageError:
        where = f"{self.config.host}:{self.config.port}"
        return UsageError(f"cannot listen on {where}: {error.strerror or error}")

    async def serve(self) -> None:
        """Run until `stop` is called and everything is drained; then save and close."""
        try:
            await self._ending.wait()
            if self._error is not None:
                raise self._error
        finally:
            if not self._forked:
                try:
                    await self._close()
                finally:  # it may be cancelled, and the loop closed
                    self._runner.end_warming()
                    self._end_state()

    async def until_ending(self) -> None:
        """Return when it begins to end: by `stop`, or by itself."""
        await self._ending.wait()

    def stop(self) -> None:
        """Begin to end: take no more pushes, answer open requests, then close."""
        self._ending.set()
        if self._links is not None:
            self._links.hurry()

    def stop_with_lead(self) -> None:
        """Begin to end as `stop`, but a follower that has a lead ends with it, or a minute later.

        A service manager often ends all processes of a service at once, and a lead needs its
        followers until it has saved the model.
        """
        if isinstance(self._coordinator, Follower) and self._coordinator.led:
            _log.info("asked to end: its lead has %g s to end first", _LEAD_ENDS)
            asyncio.get_running_loop().call_later(_LEAD_ENDS, self.stop)
        else:
            self.stop()

    def forked(self) -> None:
        """Serve no more in a fork: the port, the connections and the files are the parent's."""
        self._forked = self._broken = True
        for sock in self._listener.sockets if self._listener is not None else ():
            forks.blank(sock.fileno())
        if self._unix_listener is not None:
            self._unix_listener.forked()
        self.connections.forked()
        if self._links is not None:
            self._links.forked()
        if self._persistence is not None:
            self._persistence.forked()

    def _end(self, effect: End) -> None:
        """End as the coordinator has decided, with an error if there is a reason."""
        self._stop_with(ConnectionLost(effect.why) if effect.why else None)

    def _stop_with(self, error: BaseException | None) -> None:
        """Begin to end with an error, unless it is ending already."""
        if not self._ending.is_set():
            self._error = error
        self.stop()

    def _failed(self, error: BaseException) -> None:
        """End because of an internal error: the state that it left may be inconsistent."""
        if self._broken:
            return
        self._broken = True
        if self._state is not None:
            self._state.stop()
        self.connections.refuse(
            f"the server is ending because of an error of its own ({_brief(error)}), which its log"
            " has in full"
        )
        self._stop_with(error)

    async def _close(self) -> None:
        """Drain: let the outstanding update finish, send every answer, save, close."""
        if self._listener is not None:
            self._listener.close()
        if self._unix_listener is not None:
            self._unix_listener.end()
        if self._persistence is not None:
            self._persistence.stop()
        if self._state is not None:
            self._state.stop()
        if not self._broken:
            until = asyncio.get_running_loop().time() + self.config.drain_deadline
            self.post(Stopping(self._now(), kept=self._state is not None))
            await self._drain()
            await self._take_last_set(until)
        self._runner.stop()
        if self._feeds is not None:
            self._feeds.end()
        if self._fencing is not None:
            self._fencing.cancel()
        if self._pacing is not None:
            self._pacing.stop()
        if self._broken:  # peers have been sent an error, and close when they have read it
            await self._all_gone()
        self.connections.end(ConnectionLost("the server is shutting down"))
        await self._all_gone()
        if self._pacing is not None:
            self._pacing.pacer.stop()
        for pool in self._coordinator.pools:
            pool.wake = None
        self._runner.close()
        try:
            if self._persistence is not None:
                await self._persistence.end()
        finally:
            self._end_state()
            if self._links is not None:
                self._links.end(leave=not isinstance(self._error, RolledBack))
            if self._profile is not None:
                self._profile.write()
        if self._lacks and self._error is None:
            raise UsageError(self._lacks)

    async def _drain(self) -> None:
        """Wait until everything is answered and sent, or peers have stopped reading."""
        loop, connections = asyncio.get_running_loop(), self.connections
        moved = began = loop.time()
        sent = -1
        state = self._state
        while (
            not self._coordinator.idle
            or connections.unsent
            or (state is not None and state.recorder.holds)
            or (self._feeds is not None and self._feeds.behind)
        ):
            now, before = loop.time(), sent
            sent = connections.sent
            if sent != before or not self._coordinator.idle:
                moved = now
            if state is not None and state.recorder.holds:
                moved = now  # the disk has its time
            if now - began >= self.config.drain_deadline or now - moved >= _UNMOVED:
                return
            await self._change(0.05)

    async def _take_last_set(self, until: float) -> None:
        """Have all servers of a sharded model write their states, until a time at most."""
        state, loop = self._state, asyncio.get_running_loop()
        if not isinstance(state, LeadState) or self._error is not None:
            return
        while loop.time() < until and state.take_last() and not self._broken:
            await self._change(0.05)
        state.report_last()

    async def _all_gone(self) -> None:
        """Wait until no connection is left, for at most half a second."""
        loop = asyncio.get_running_loop()
        until = loop.time() + _UNMOVED
        while self.connections.peers and loop.time() < until:
            await self._change(0.05)

    async def _change(self, seconds: float) -> None:
        """Wait until an event is handled or a connection ends, for at most ``seconds``."""
        self._changed = changed = asyncio.Event()
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(changed.wait(), seconds)

    def _note_change(self) -> None:
        if self._changed is not None:
            self._changed.set()

    # ------------------------------------------------------------ events and effects

    def post(self, event: Event) -> None:
        """Have the engine handle an event, and carry out its effects.

        Effects may post further events at once (an update done on the event loop, a buffer that
        came back and let a waiting peer go on). They queue behind this one.
        """
        if self._broken:
            return
        self._events.append(event)
        if self._handling:
            return
        actions = self._runner.actions
        self._handling = True
        try:
            while self._events:
                event = self._events.popleft()
                files = self._persistence
                if files is None or files.note is None:
                    effects = self._handle(event)
                else:  # there is one server, so `_handle` is its engine's
                    effects = self._handle(event, files.note(event))
                for effect in effects:
                    happened = actions[type(effect)](effect)
                    if isinstance(happened, JournalEnded):  # before the answers to this event
                        for other in self._handle(happened):
                            actions[type(other)](other)
                    elif happened is not None:
                        self._events.append(happened)
        except Exception as error:  # a policy's, say: clients would repeat the push that raises it
            if self._listener is None:  # `start` has not finished, and fails
                raise
            self._events.clear()
            self._failed(error)
        finally:
            self._handling = False
        if self._changed is not None:
            self._changed.set()

    def _exchange(self, steady: Steady, nbytes: int) -> bytes | None:
        """Answer a steady exchange; None: it goes the general way."""
        runner, files, state = self._runner, self._persistence, self._state
        if self._handling or self._broken or steady.cost > runner.at_once:
            return None
        if state is not None:
            record: ExchangeRecord | None = state.record
        else:
            record = files.exchanges if files is not None else None
        try:
            answer = steady.exchange(nbytes, self._now(), record)
        except Exception as error:
            self._failed(error)
            return b""
        if answer:
            busy_poll = self.connections.busy_poll
            busy_poll.received = True
            if busy_poll.idle:
                busy_poll.begin()
            if state is not None and state.recorder.hold(steady.peer, answer):
                return b""
        return answer

    @property
    def _pacing(self) -> Pacing | None:
        return self.connections.pacing

    def _pace(self, effect: SetBudget) -> None:
        """Keep to this server's share of the bandwidth budget."""
        pacing = self._pacing
        if pacing is not None:
            pacing.change(effect.total, effect.each)
        else:
            pacing = Pacing.of(effect.total, effect.each, self._env, self.post)
            assert pacing is not None, "there is a budget"
            if self._unix_listener is not None:  # what is lent would not be counted
                self._unix_listener.end()
            if self.generation:  # a follower that goes on from its state
                pacing.owe()
            pacing.begin(asyncio.get_running_loop())
        self.connections.pace(pacing)

    def _sinks_of(self, lead: Lead, peer: int) -> SinkFor:
        """Return a lead's function for the sinks of a connection; its orders are carried out."""

        def sink_for(message: Message) -> Sink | None:
            sink, orders = lead.sink_for(peer, message)
            for order in orders:
                self._runner.perform(order)
            return sink

        return sink_for

    def _collect(self, lead: Lead) -> Collecting | None:
        """Begin to collect the model from all shards; None while it cannot be read."""
        collecting = lead.collect()
        for order in collecting.orders if collecting is not None else ():
            self._runner.perform(order)
        return collecting


def _brief(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"[:_LONGEST_REASON]
