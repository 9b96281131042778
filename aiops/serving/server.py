"""The server: an asyncio shell around the engine.

It moves bytes, keeps time, and runs kernels on its update thread. They release the GIL, so that
fetches and pushes go on meanwhile. A `Server` opens its files, listens, has the engine handle one
event after the other, drains and closes. The `Acceptor` posts the events of connections, the
`EffectRunner` carries out the engine's effects. `RunState` has what a server keeps of its run,
`Port` the port, and `Draining` the waits at the end.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import socket
import threading
from collections import deque
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from aiops._version import __version__
from aiops.algorithms import find
from aiops.common import forks, urls
from aiops.durable.commit_gate import EncodedReply
from aiops.durable.follower_recorder import FollowerReplayer
from aiops.durable.recorder import Supersede
from aiops.durable.recovery import Recovered, Replayer
from aiops.engine.engine import Engine
from aiops.engine.events import (
    Effect,
    End,
    Event,
    Initialised,
    JournalEnded,
    SetBudget,
    Stopping,
)
from aiops.engine.steady import ExchangeRecord, Steady
from aiops.engine.steady_rows import SteadyRows
from aiops.errors import ConnectionLost, Refused, RolledBack, Superseded, UsageError
from aiops.model.shared_memory import Memory, SharedMemory
from aiops.net.environment import CURRENT_ENVIRONMENT
from aiops.serving.acceptor import Acceptor, Coordinator
from aiops.serving.administration import Administration
from aiops.serving.config import Config
from aiops.serving.draining import Draining
from aiops.serving.effects import EffectRunner
from aiops.serving.memory_bound import Holdings, MemoryBound
from aiops.serving.pacing import Pacing
from aiops.serving.persistence import Persistence
from aiops.serving.port import (
    Listener,
    Port,
    certificates,
    close_listener,
    reload_certificates,
)
from aiops.serving.profiling import Profile
from aiops.serving.run_state import RunState, open_files
from aiops.serving.shard_links import ShardLinks
from aiops.serving.standby.places import FollowerPlaces
from aiops.serving.state.shard_states import LeadState
from aiops.serving.state.state_files import Clock, StateFiles
from aiops.serving.token_file import filter_of
from aiops.serving.unix_listener import UnixListener
from aiops.shards.budget_shares import first_share
from aiops.shards.collecting import Collecting
from aiops.shards.follower import Follower
from aiops.shards.lead import Lead
from aiops.state.frames import JournalFrame
from aiops.store.resources import Resources, unmeasured
from aiops.wire.admin_messages import ADMIN_REQUESTS
from aiops.wire.connection import SinkFor
from aiops.wire.messages import Error, Message
from aiops.wire.sinks import Sink
from aiops.wire.standby_messages import Fence, TakePlace

_log = logging.getLogger("aiops.server")

_LONGEST_REASON = 200  # characters of an error that are sent to peers
_LEAD_ENDS = 60.0  # seconds that a follower that is asked to end waits for its lead to do so


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
    on_taken
        Called with a shard whose place a server has that the settings do not name: a standby.
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
        clock = Clock(env.now)
        self._env = env = env if config.state is None else dataclasses.replace(env, now=clock)
        self._now = env.now
        self._tls = certificates(config)
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
        files = open_files(config, env, run, options.shards)
        options = dataclasses.replace(
            options,
            run=run if files is None else files.run,
            filter=filter_of(config.filter, config.tokens),
        )
        lead: Lead | None = None
        engine: Engine | None = None
        self._coordinator: Coordinator
        if config.follower:
            follower = Follower(algorithm, options, machine, kept=files is not None)
            self._coordinator = follower
            sinks_of, admission = follower.sinks_of, follower.admission
        else:
            try:
                engine = Engine(algorithm, options, machine, self._statistics)
            except BaseException:  # settings that cannot work: another server may have the state
                if files is not None:
                    files.close()
                raise
            self._coordinator = self._engine = engine
            sinks_of, admission = self._engine.sinks_of, self._engine.admission
            if config.sharded:
                lead = Lead(self._engine, config.reach(), kept=files is not None)
                self._coordinator = lead
                sinks_of = partial(self._sinks_of, lead)
        self._handle = machine.measure("policy", self._coordinator.handle)
        self.connections = Acceptor(
            *(config, self._coordinator, env, pacing, self.post, self._note_change),
            *(self._exchange, sinks_of, machine),
        )
        rule = algorithm.rule()
        holdings = Holdings(
            connections=config.max_connections,
            states=len(rule.state),
            reads=bool(rule.reads),
            near=near,
            tls=self._tls is not None,
            kept=files is not None,
            gathered=algorithm.trimming(options.workers).gathered,
        )
        self._memory = MemoryBound(holdings, options, admission, self.connections.answers)
        self._run_state = run_state = RunState(
            *(config, env, clock, files, self._coordinator, engine, self.connections),
            *(self.post, self._perform, self.supersede, self._stop_with),
        )
        self.connections.control, self.connections.refusal = self._control, run_state.refusal
        self._administration: Administration | None = None
        if engine is not None:
            self._administration = Administration(
                *(engine, self.connections, run_state, self._now, self.post, self.stop),
                *(self._roll_back, partial(self._send_away, lead)),
            )
        links = None if lead is None else self._links_of(lead, options.run)
        self._links = links
        self.on_taken: Callable[[int], None] = lambda shard: None
        self._places: FollowerPlaces | None = None  # of a lead with a state
        if lead is not None and links is not None and files is not None:
            self._places = FollowerPlaces(lead, links, files, config, self._now)
            self._places.on_taken = lambda shard: self.on_taken(shard)
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
        given = self.connections, self._tls, config.hello_deadline
        self._port = Port(config.host, config.port, *given)
        self._listener: Listener | None = None  # once it listens
        self._draining = Draining(
            self._coordinator, self.connections, run_state, config.drain_deadline
        )
        self._ending = asyncio.Event()
        self._error: BaseException | None = None  # with which it ends
        self._broken = False  # an update failed midway: the parameters cannot be trusted any more
        self._forked = False  # this is a copy of it, in a fork
        forks.note(self)

    def _links_of(self, lead: Lead, run: str) -> ShardLinks:
        """Return a lead's connections to its followers, not opened yet."""
        config, algorithm = self.config, self._engine.algorithm
        return ShardLinks(
            config.follower_addresses(),
            *(config.token, run, algorithm.name, algorithm.settings()),
            *(config.waits, self._env),
            lead.sink_for_follower,
            self.post,
            lead.readmission.refusal,
            self._run_state.lead_generation,
            self._run_state.lead_proof,
            self._stop_with,
            tls=None if self._tls is None else self._tls.target,
            place=lambda shard: lead.followers.places.get(shard, 0),
            late=lead.late,
        )

    def follower_moved(self, shard: int, port: int) -> None:
        """Reach a follower on this machine at another port from here on: it was started again."""
        if self._places is not None and self._places.is_taken(shard):
            self.on_taken(shard)
        elif self._links is not None and isinstance(self._coordinator, Lead):
            self._coordinator.followers.move(shard, "", port)
            self._links.move(shard, urls.local_address(self.config.host), port)

    def _statistics(self) -> Mapping[str, Any]:
        """Return the shell's part of the statistics."""
        return {
            "profile": self._profile.report() if self._profile is not None else None,
            "memory": self._memory.report(),
            "file_errors": self._persistence.errors() if self._persistence is not None else [],
            "state": self.state_report(),
            "tokens": self.connections.access.report(),
            "waits": self.config.waits.table(),
            "corrupted": self.connections.corrupted,
            "aiops": __version__,
            "time": self._env.wall_clock(),
        }

    def state_report(self) -> dict[str, Any] | None:
        """Return what statistics tell of the state that it keeps; None: it keeps none."""
        return self._run_state.report()

    @property
    def engine(self) -> Engine:
        """The engine that decides, unless this server is a follower."""
        return self._engine

    @property
    def state_files(self) -> StateFiles | None:
        """The folder of the state that it keeps, if it keeps one."""
        return self._run_state.files

    @property
    def run(self) -> str:
        """The name of the run; of a follower, that of its state."""
        if isinstance(self._coordinator, Follower):
            files = self._run_state.files
            return self._coordinator.run or ("" if files is None else files.run)
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
        return self._run_state.generation

    @property
    def generation_proof(self) -> bytes:
        """Proves to other servers of the run that its generation has begun; empty without state."""
        return self._run_state.proof

    @property
    def alone(self) -> bool:
        """True if no acknowledgement waits for a standby: there is none that has all rows."""
        return self._run_state.alone

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
        run_state, files, pacing = self._run_state, self._run_state.files, self._pacing
        run_state.next_term = next_term = next_term or promoted is not None
        run_state.starts_alone = alone or next_term
        loop = asyncio.get_running_loop()
        preparation = self._coordinator.preparation()  # before peers can connect and wait for it
        prepared = False
        listener: Listener | None = None
        try:
            rate = None if pacing is None else pacing.pacer.narrowed
            listener = await self._port.bind(loop, self.socket, rate)
            if files is not None:
                files.claim = partial(self._port.claim, listener)
                if not next_term:
                    files.check_not_superseded()
                if files.generation:  # then there are updates to be repeated, at once
                    self._runner.gentle = False
                    self._runner.perform(preparation)
                    prepared = True
            resumes = files is not None and files.generation > 0
            # A mistake in --init begins no state.
            model = None if resumes else self._initial_model()
            if self._places is not None and not next_term:
                self._places.restore()
            if self._links is not None:
                await self._begin_to_lead(self._links, loop)
            elif files is not None:
                self._keep(files, loop, promoted)
            if self._pacing is not None and (resumes or next_term):
                self._pacing.owe()
            if self._persistence is not None:
                self._persistence.open()
            if resumes:
                model = self._initial_model()
            if model is not None:
                self.post(model)
            self._listener, self._runner.gentle = listener, True
            await self._port.listen(listener)
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
            self._run_state.end(trusted=not self._broken)
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
        run_state.begin(loop)
        host, self.port = listener.sockets[0].getsockname()[:2]
        self.url = urls.write(host, self.port, tls=self._tls is not None)
        self._warn_of_clear_text(host)
        if not self.config.follower:
            for text in self._engine.warnings.cautions:
                _log.warning("%s", text)
        self._memory.log()
        tls = None if self._tls is None else self._tls.target
        run_state.fence_predecessors(loop, self.url, self.run, tls)
        if self._places is not None:
            self._places.begin()
        return self.url

    def _warn_of_clear_text(self, host: str) -> None:
        if self._tls is None and not self.config.follower and not urls.is_loopback(host):
            _log.warning(
                "parameters, gradients and rows travel unencrypted beyond this machine (the token"
                " itself is never sent): --tls-cert encrypts them"
            )

    def reload(self) -> None:
        """Read again the certificates, for the connections made from here on, and the tokens.

        A file that cannot be used is logged, and all stay as they are.
        """
        reload_certificates(self._tls)
        self.connections.reload_tokens()

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

    async def _begin_to_lead(self, links: ShardLinks, loop: asyncio.AbstractEventLoop) -> None:
        """Connect to the followers, and go back with them to the newest moment that all have.

        They go back first. If this server began another history before, and ended then, rows of two
        histories would have the same numbers. Standbys that were promoted are at the moments up to
        which each was fed.
        """
        files, lead = self._run_state.files, self._coordinator
        states, ahead = await links.connect(self.config.hello_deadline), dict[int, int]()
        if files is not None and isinstance(lead, Lead):
            recovered, ahead = self._run_state.go_back(files, lead, states)
            await links.roll_back(ahead)
            self._keep(files, loop, recovered)
        links.lead(ahead)

    def _keep(
        self, files: StateFiles, loop: asyncio.AbstractEventLoop, recovered: Recovered | None
    ) -> None:
        """Bring the engine to the state that is kept, and have its events journalled."""
        state = self._run_state.keep(files, loop, recovered)
        self._handle = self._machine.measure("policy", state.recorder.handle)
        self._runner.actions.update(state.actions(self._send_encoded, self._superseded))
        if isinstance(state, LeadState):
            state.resume()
        self._run_state.kept = state

    def _control(self, number: int, message: Message) -> None:
        """Handle what is asked of this server itself."""
        if isinstance(message, ADMIN_REQUESTS) and self._administration is not None:
            self._administration.handle(number, message)
            return
        peer = self.connections.peers[number]
        if isinstance(message, TakePlace) and self._places is not None:
            peer.link.send(peer.link.wire.send(self._places.answer(message)))
            return
        text = "this server is no standby, and no other has its run"
        if isinstance(message, TakePlace):
            text = "this server leads no followers with states"
        if isinstance(message, Fence):
            if self._run_state.superseded_by(message):
                self.supersede(message.generation, message.primary)
                return
            text = self._run_state.fence_refusal(message) or text
        answer = Error(message.id, Refused.code, text, {}, False)
        peer.link.send(peer.link.wire.send(answer))

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
        if self._broken or self._run_state.kept is None:
            return
        self._broken = True
        self._run_state.stop()
        error = self._run_state.superseded(generation, primary)
        self.connections.refuse(str(error), Superseded.code, error.details)
        self._stop_with(error)

    def _send_away(self, lead: Lead | None, client: str, why: str) -> None:
        """Have the followers of this server take a client no more."""
        for order in () if lead is None else lead.send_away(client, why):
            self._perform(order)

    def _roll_back(self, why: str) -> None:
        """End at once, to begin again from the snapshot that was noted, and write nothing more."""
        if self._broken:
            return
        self._broken = True
        self._run_state.stop()
        self.connections.refuse(f"{why}: what followed is lost; connect again")
        self._stop_with(RolledBack(why))

    def replayer(self, on_loop: Callable[..., object] | None = None) -> Replayer | FollowerReplayer:
        """Return what replays rows to the engine, instead of `start`.

        ``on_loop``: has a function called by the event loop, if the replay is on another thread.
        """
        return self._run_state.replayer(self.run, on_loop)

    def recover(self, replayer: Replayer | FollowerReplayer) -> Recovered | None:
        """Bring the engine to the state that is kept, instead of `start`; see `StateFiles`."""
        return self._run_state.recover(replayer)

    def check_begin(self, frame: JournalFrame) -> None:
        """Check that a state's first row is of a server with these settings; see `check_begin`."""
        self._run_state.check_begin(frame)

    def discard(self) -> None:
        """Let go of everything, instead of `start`."""
        self._runner.close()
        self._run_state.end(trusted=not self._broken)

    def _send_encoded(self, effect: EncodedReply) -> None:
        peer = self.connections.peers.get(effect.peer)
        if peer is not None:
            peer.link.send([effect.data])

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
                    self._run_state.end(trusted=not self._broken)

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
        self._run_state.stop()
        self.connections.refuse(
            f"the server is ending because of an error of its own ({_brief(error)}), which its log"
            " has in full"
        )
        self._stop_with(error)

    async def _close(self) -> None:
        """Drain: let the outstanding update finish, send every answer, save, close."""
        if self._listener is not None:
            await close_listener(self._listener)
        if self._unix_listener is not None:
            self._unix_listener.end()
        if self._persistence is not None:
            self._persistence.stop()
        self._run_state.stop()
        if not self._broken:
            until = asyncio.get_running_loop().time() + self.config.drain_deadline
            self.post(Stopping(self._now(), kept=self._run_state.kept is not None))
            await self._draining.answered()
            if self._error is None:
                await self._draining.last_set(until, lambda: self._broken)
        self._runner.stop()
        self._run_state.end_feeds()
        if self._pacing is not None:
            self._pacing.stop()
        if self._broken:  # peers have been sent an error, and close when they have read it
            await self._draining.all_gone()
        self.connections.end(ConnectionLost("the server is shutting down"))
        await self._draining.all_gone()
        if self._pacing is not None:
            self._pacing.pacer.stop()
        for pool in self._coordinator.pools:
            pool.wake = None
        self._runner.close()
        try:
            if self._persistence is not None:
                await self._persistence.end()
        finally:
            self._run_state.end(trusted=not self._broken)
            await self._run_state.end_copies()
            if self._links is not None:
                self._links.end(leave=not isinstance(self._error, RolledBack))
            if self._profile is not None:
                self._profile.write()
        if self._run_state.lacks and self._error is None:
            raise UsageError(self._run_state.lacks)

    def _note_change(self) -> None:
        changed = self._draining.changed
        if changed is not None:
            changed.set()

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
        changed = self._draining.changed
        if changed is not None:
            changed.set()

    def _exchange(self, way: Steady | SteadyRows, nbytes: int) -> bytes | memoryview | None:
        """Answer a steady exchange or a message about rows; None: it goes the general way."""
        runner, files, state = self._runner, self._persistence, self._run_state.kept
        if self._handling or self._broken or way.cost > runner.at_once:
            return None
        if state is not None:
            record: ExchangeRecord | None = state.record
        else:
            record = files.exchanges if files is not None else None
        answer: bytes | memoryview | None
        try:
            if isinstance(way, Steady):
                answer = way.exchange(nbytes, self._now(), record)
            elif state is not None or record is not None:  # rows have no row of a record of theirs
                return None
            else:
                answer = way.exchange(nbytes, self._now())
        except Exception as error:
            self._failed(error)
            return b""
        if answer:
            busy_poll = self.connections.busy_poll
            busy_poll.received = True
            if busy_poll.idle:
                busy_poll.begin()
            if state is not None and state.recorder.hold(way.peer, bytes(answer)):
                return b""
        return answer

    def _perform(self, effect: Effect) -> None:
        """Carry out an effect that no event has caused."""
        self._runner.perform(effect)

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
