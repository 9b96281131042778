"""The server: an asyncio shell around the engine.

It moves bytes, keeps time, and runs kernels on its update thread. They release the GIL, so that
fetches and pushes go on meanwhile. A `Server` opens its files, listens, has the engine handle one
event after the other, drains and closes. The `Acceptor` posts the events of connections to the
`EventDispatcher`, the `EffectRunner` carries out the engine's effects. `RunState` has what a server
keeps of its run, `Leading` its followers, `Port` the port, and `Draining` the waits at the end.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import socket
import threading
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from aiops import tracing
from aiops._version import __version__
from aiops.algorithms import find
from aiops.algorithms.checks import failed_part
from aiops.common import forks, urls
from aiops.common.gathering import Gathering, gathered
from aiops.durable.commit_gate import EncodedReply
from aiops.durable.follower_recorder import FollowerReplayer
from aiops.durable.recorder import Supersede
from aiops.durable.recovery import Recovered, Replayer
from aiops.engine.engine import Engine
from aiops.engine.events import (
    Collected,
    Copied,
    Effect,
    End,
    Initialised,
    SetBudget,
    Stopping,
    Warm,
)
from aiops.errors import ConflictError, ConnectionLost, Refused, RolledBack, Superseded, UsageError
from aiops.model.shared_memory import Memory, SharedMemory
from aiops.net.environment import CURRENT_ENVIRONMENT, Environment
from aiops.serving import exchange_trace
from aiops.serving.acceptor import Acceptor, Coordinator
from aiops.serving.administration import Administration
from aiops.serving.config import Config
from aiops.serving.draining import Draining
from aiops.serving.effects import EffectRunner
from aiops.serving.event_dispatcher import EventDispatcher
from aiops.serving.leading import Leading, sinks_with_orders
from aiops.serving.members import Members
from aiops.serving.memory_bound import Holdings, MemoryBound
from aiops.serving.norms import parameter_norms
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
from aiops.serving.state.shard_states import LeadState
from aiops.serving.state.state_files import Clock, StateFiles
from aiops.serving.token_file import filter_of
from aiops.serving.unix_listener import UnixListener
from aiops.shards.budget_shares import first_share
from aiops.shards.follower import Follower
from aiops.shards.lead import Lead
from aiops.store.resources import Resources, unmeasured
from aiops.wire.admin_messages import ADMIN_REQUESTS
from aiops.wire.connection import SinkFor
from aiops.wire.messages import Error, Message
from aiops.wire.standby_messages import Fence, TakePlace

_log = logging.getLogger("aiops.server")

_LONGEST_REASON = 200  # characters of an error that are sent to peers
_LEAD_ENDS = 60.0  # seconds that a follower that is asked to end waits for its lead to do so


class Server:
    """One server of the running event loop, as `aiops.serve` gives it.

    Parameters
    ----------
    config
        The settings.

    Attributes
    ----------
    url, port
        The URL that workers connect to and the port that it listens on, once it does (`start`).
    run_state
        What it keeps of its run.
    metrics_url
        The URL of its `Monitoring`, if it was told.
    on_taken
        Called with a shard whose place a server has that the settings do not name: a standby.
    socket
        Bound to its address already, instead of one that `start` binds; None: it binds one.

    Raises
    ------
    UsageError, ConflictError
        When the settings cannot work; before anything is opened.
    """

    url: str
    port: int
    metrics_url: str

    def __init__(self, config: Config) -> None:
        self.config = config
        self.url, self.port, self.metrics_url = "", config.port, ""
        env = CURRENT_ENVIRONMENT.get()
        clock = Clock(env.now)
        self._env = env = env if config.state is None else dataclasses.replace(env, now=clock)
        self._now = env.now
        self._tls = certificates(config)
        self._dispatcher = dispatcher = EventDispatcher(env.now, self._failed)
        self.post = dispatcher.post
        algorithm = find(config.policy).make(config.settings())
        options = config.options()
        pacing = Pacing.of(*first_share(options), env, self.post)
        near = pacing is None and not config.no_shm and env.listen_unix is not None
        self._profile = Profile(config.profile) if config.profile is not None else None
        self._machine = machine = _resources(config, env, self._profile, near=near)
        tracing.check(config.trace)  # before another server could be kept from the state
        run = env.token_bytes(8).hex()
        files = open_files(config, env, run, options.shards)
        options = dataclasses.replace(
            options,
            run=run if files is None else files.run,
            filter=filter_of(config.filter, config.tokens),
        )
        lead: Lead | None = None
        engine: Engine | None = None
        self._parts: tuple[object, ...] = (algorithm,)  # which users may have written
        self._coordinator: Coordinator
        sinks_of: Callable[[int], SinkFor]
        if config.follower:
            follower = Follower(algorithm, options, machine, kept=files is not None)
            self._coordinator = follower
            sinks_of, admission = follower.sinks_of, follower.admission
        else:
            try:
                engine = Engine(algorithm, options, machine, self._statistics)
                if "average" in engine.plan:
                    _check_model_files(config)
            except BaseException:  # settings that cannot work: another server may have the state
                if files is not None:
                    files.close()
                raise
            self._coordinator = self._engine = engine
            self._parts = algorithm, engine.policy
            sinks_of, admission = self._engine.sinks_of, self._engine.admission
            if config.sharded:
                lead = Lead(self._engine, config.reach(), kept=files is not None)
                self._coordinator = lead
                sinks_of = sinks_with_orders(lead, self._perform)
        self._trace = trace = exchange_trace.start(config, engine, env.trace_clock)
        exchange = dispatcher.exchange if trace is None else trace.exchanging(dispatcher.exchange)
        self.connections = Acceptor(
            *(config, self._coordinator, env, pacing, self.post, dispatcher.note_change),
            *(exchange, sinks_of, machine),
        )
        rule = algorithm.rule()
        holdings = Holdings(
            connections=config.max_connections,
            states=len(rule.state) + (algorithm.sum_momentum(options.workers) is not None),
            reads=bool(rule.reads),
            near=near,
            tls=self._tls is not None,
            kept=files is not None,
            gathered=algorithm.trimming(options.workers).gathered,
            directs=algorithm.sum_momentum(options.workers) is not None,
            evaluates=rule.offset is not None,
            saves=config.save_every is not None,
        )
        self._memory = MemoryBound(holdings, options, admission, self.connections.answers)
        self.run_state = run_state = RunState(
            *(config, env, clock, files, self._coordinator, engine, self.connections),
            *(self.post, self._perform, self.supersede, self._stop_with),
        )
        self.connections.control, self.connections.refusal = self._control, run_state.refusal
        self.on_taken: Callable[[int], None] = lambda shard: None
        self._leading = leading = None
        if lead is not None:
            self._leading = leading = Leading(
                *(lead, config, env, run_state, self._tls, self.post, self._perform),
                *(self._stop_with, lambda shard: self.on_taken(shard)),
            )
        self._administration: Administration | None = None
        if engine is not None:
            send_away = (lambda client, why: None) if leading is None else leading.send_away
            self._administration = Administration(
                *(engine, self.connections, run_state, self._now, self.post, self.stop),
                *(self._roll_back, send_away),
            )
        self._unix_listener: UnixListener | None = None
        if near and env.listen_unix is not None:
            self._unix_listener = UnixListener(env.listen_unix, self.connections.accept_near)
        self._persistence: Persistence | None = None
        if not config.follower:
            collect = None if leading is None else leading.collect
            of_run = config, self._engine, self._now, self.post
            self._persistence = Persistence(*of_run, collect)
        self._runner = EffectRunner(
            *(asyncio.get_running_loop(), env, self.connections, self.post),
            *(self._failed, self._end, None if leading is None else leading.links, machine),
        )
        self._runner.actions[SetBudget] = self._pace
        if self._persistence is not None:
            self._runner.actions[Copied] = self._persistence.copy
            self._runner.actions[Collected] = self._persistence.copy
        kept = self._persistence, run_state
        handle = self._observed(self._coordinator.handle)
        dispatcher.connect(handle, self._runner, *kept, self.connections.busy_poll)
        if trace is None:
            self.connections.short_way = dispatcher.short_way
        self.socket: socket.socket | None = None
        given = self.connections, self._tls, config.hello_deadline
        self._port = Port(config.host, config.port, *given)
        self._listener: Listener | None = None  # once it listens
        self._draining = Draining(
            *(self._coordinator, self.connections, run_state, dispatcher, config.drain_deadline)
        )
        self._ending = asyncio.Event()
        self._error: BaseException | None = None  # with which it ends
        self._before: dict[str, Any] | None = None  # the report of its start
        self._forked = False  # this is a copy of it, in a fork
        forks.note(self)

    def follower_moved(self, shard: int, port: int) -> None:
        """Reach a follower on this machine at another port from here on: it was started again."""
        if self._leading is not None:
            self._leading.moved(shard, port)

    def _observed(self, handle: Callable[..., Any]) -> Callable[..., Any]:
        """Return what decides about events with its time counted and exchanges traced, if asked."""
        measured = self._machine.measure("policy", handle)
        return measured if self._trace is None else self._trace.handling(measured)

    def _statistics(self) -> Mapping[str, Any]:
        """Return the shell's part of the statistics."""
        return {
            "profile": self._profile.report() if self._profile is not None else None,
            "memory": self._memory.report(),
            "file_errors": self._persistence.errors() if self._persistence is not None else [],
            "state": self.run_state.report(),
            "tokens": self.connections.access.report(),
            "waits": self.config.waits.table(),
            "corrupted": self.connections.corrupted,
            "aiops": __version__,
            "time": self._env.wall_clock(),
        }

    def report(self, shown: int) -> Mapping[str, Any]:
        """Return what `gather` does, at one moment."""
        return gathered(self.gather(shown))

    def gather(self, shown: int) -> Gathering[Mapping[str, Any]]:
        """Return its statistics for metrics, with lines of this many workers at most.

        It pauses after each slice of the clients. Those of a lead have the traffic that its
        followers had counted at the call before. It is empty until the server has started; then
        ``before`` has the counts of that time.
        """
        coordinator, before = self._coordinator, self._before
        if before is None:
            return {}
        if isinstance(coordinator, Lead) and not self._dispatcher.broken:
            for effect in coordinator.count_traffic():
                self._perform(effect)
        found = yield from self._gather(shown)
        return {**found, "before": before}

    def members(self, most: int) -> Members:
        """Return its clients for the live page: the rows of this many at most."""
        engine = None if isinstance(self._coordinator, Follower) else self._engine
        return Members.of(engine, self._now(), most)

    def administrator(self, token: str) -> str:
        """Return the name of a token that is shown as it is; raises `Unauthorised`."""
        return self.connections.access.administrator(token)

    async def take_snapshot(self, by: str) -> str:
        """Take a snapshot for the holder of a token, on the live page; return a sentence.

        Raises
        ------
        Refused
            When none can be taken.
        """
        ended: asyncio.Future[tuple[int, str]] = asyncio.get_running_loop().create_future()

        def taken(version: int, why: str) -> None:
            if not ended.done():
                ended.set_result((version, why))

        self._administered().take_snapshot(_on_page(by), taken)
        version, why = await ended
        if why:
            raise Refused(f"no snapshot was taken: {why}")
        return f"a snapshot of version {version:,} was taken"

    def send_away(self, by: str, client: str) -> str:
        """End the connections of a client for the holder of a token, on the live page.

        ``client``: its name, or its number as ``#7``. It returns a sentence.

        Raises
        ------
        Refused
            When there is none of this name or number.
        """
        count = self._administered().kick(client, _on_page(by))
        return f"{client} was sent away, with {count:,} connection{'s' if count > 1 else ''}"

    def _administered(self) -> Administration:
        if self._administration is None:
            raise Refused("this is a follower: ask its lead")
        return self._administration

    def norms(self) -> Callable[[], list[float]] | None:
        """Return what computes the parameters' norms by tensor, as `parameter_norms`.

        Of a model on several servers none has all of it.
        """
        whole = not isinstance(self._coordinator, Follower | Lead)
        return parameter_norms(self._engine) if whole and not self._dispatcher.broken else None

    def _gather(self, shown: int) -> Gathering[dict[str, Any]]:
        coordinator = self._coordinator
        if isinstance(coordinator, Follower):
            return {**self._statistics(), "version": self.version}
        found = yield from self._engine.gather(shown, self._now())
        return coordinator.of_all(found) if isinstance(coordinator, Lead) else found

    @property
    def not_ready(self) -> str:
        """The reason for which it takes no pushes, or not as it should; empty: it takes them."""
        kept, coordinator = self.run_state.kept, self._coordinator
        if self._ending.is_set():
            return "it is ending"
        if self._listener is None:
            return "it is starting"
        if kept is not None and kept.recorder.ended:
            return f"its state is not kept any more: {kept.recorder.ended}"
        if isinstance(coordinator, Follower):
            return "" if coordinator.shard is not None else "it holds no part of a model yet"
        if isinstance(coordinator, Lead) and coordinator.followers.lost:
            return "; ".join(coordinator.followers.lost.values())
        if self._engine.closure.why:
            return self._engine.closure.why
        return "" if self._engine.training is not None else "no worker has defined a model yet"

    @property
    def engine(self) -> Engine:
        """The engine that decides, unless this server is a follower."""
        return self._engine

    @property
    def run(self) -> str:
        """The name of the run; of a follower, that of its state."""
        if isinstance(self._coordinator, Follower):
            files = self.run_state.files
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
        run_state, leading = self.run_state, self._leading
        run_state.next_term = next_term or promoted is not None
        run_state.starts_alone = alone or run_state.next_term
        loop = asyncio.get_running_loop()
        resumes = run_state.generation > 0
        preparation = self._coordinator.preparation()  # before peers can connect and wait for it
        listener = await self._open(preparation, promoted, resumes=resumes)
        if self._persistence is not None:
            self._persistence.begin(loop)
        for pool in self._coordinator.pools:
            pool.wake = partial(loop.call_soon_threadsafe, pool.settle)
        self.connections.begin(loop)
        if self._unix_listener is not None:
            self._unix_listener.begin(sock.getsockname()[:2] for sock in listener.sockets)
        if self._pacing is not None:
            self._pacing.begin(loop)
        if not resumes:
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
        if leading is not None and leading.places is not None:
            leading.places.begin()
        self._before = gathered(self._gather(0))
        if not self.config.follower:
            self._before["members"] = self._engine.membership.counts()
        return self.url

    async def _open(
        self, preparation: Warm, promoted: Recovered | None, *, resumes: bool
    ) -> Listener:
        """Open everything, and listen; let go of all of it again when that fails.

        ``resumes``: it goes on from its state.
        """
        files, pacing, leading = self.run_state.files, self._pacing, self._leading
        next_term = self.run_state.next_term
        listener: Listener | None = None
        try:
            rate = None if pacing is None else pacing.pacer.narrowed
            listener = await self._port.bind(asyncio.get_running_loop(), self.socket, rate)
            if files is not None:
                files.claim = partial(self._port.claim, listener)
                if not next_term:
                    files.check_not_superseded()
            if resumes:  # then there are updates to be repeated, at once
                self._runner.gentle = False
                self._runner.perform(preparation)
            # A mistake in --init begins no state.
            model = None if resumes else self._initial_model()
            if leading is not None:
                if leading.places is not None and not next_term:
                    leading.places.restore()
                await leading.begin(self._keep)
            elif files is not None:
                self._keep(files, promoted)
            if self._pacing is not None and (resumes or next_term):
                self._pacing.owe()
            if self._persistence is not None:
                self._persistence.open()
            if resumes:
                model = self._initial_model()
            if model is not None:
                self.post(model)
            self._listener, self._runner.gentle, self._dispatcher.starting = listener, True, False
            await self._port.listen(listener)
        except BaseException as error:
            self._listener, self._dispatcher.starting = None, True
            if listener is not None:
                listener.close()
            if leading is not None:  # standbys that became followers can be led later
                leading.links.end(leave=not (next_term or isinstance(error, RolledBack)))
            self._runner.close()
            preparation.over()
            if self._persistence is not None:
                self._persistence.discard()
            self.run_state.end(trusted=not self._dispatcher.broken)
            raise
        return listener

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

    def _keep(self, files: StateFiles, recovered: Recovered | None) -> None:
        """Bring the engine to the state that is kept, and have its events journalled."""
        state = self.run_state.keep(files, asyncio.get_running_loop(), recovered)
        self._dispatcher.handle = self._observed(state.recorder.handle)
        self._runner.actions.update(state.actions(self._send_encoded, self._superseded))
        if isinstance(state, LeadState):
            state.resume()
        self.run_state.kept = state

    def _control(self, number: int, message: Message) -> None:
        """Handle what is asked of this server itself."""
        if isinstance(message, ADMIN_REQUESTS) and self._administration is not None:
            self._administration.handle(number, message)
            return
        peer = self.connections.peers[number]
        places = None if self._leading is None else self._leading.places
        if isinstance(message, TakePlace) and places is not None:
            peer.link.send(peer.link.wire.send(places.answer(message)))
            return
        text = "this server is no standby, and no other has its run"
        if isinstance(message, TakePlace):
            text = "this server leads no followers with states"
        if isinstance(message, Fence):
            if self.run_state.superseded_by(message):
                self.supersede(message.generation, message.primary)
                return
            text = self.run_state.fence_refusal(message) or text
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
        if self._dispatcher.broken or self.run_state.kept is None:
            return
        error = self.run_state.superseded(generation, primary)
        self._break_off(error, str(error), Superseded.code, error.details)

    def _roll_back(self, why: str) -> None:
        """End at once, to begin again from the snapshot that was noted, and write nothing more."""
        self._break_off(RolledBack(why), f"{why}: what followed is lost; connect again")

    def replayer(self, on_loop: Callable[..., object] | None = None) -> Replayer | FollowerReplayer:
        """Return what replays rows to the engine, instead of `start`.

        ``on_loop``: has a function called by the event loop, if the replay is on another thread.
        """
        return self.run_state.replayer(self.run, on_loop)

    def discard(self) -> None:
        """Let go of everything, instead of `start`."""
        self._runner.close()
        self.run_state.end(trusted=not self._dispatcher.broken)

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
                    self.run_state.end(trusted=not self._dispatcher.broken)
                    if self._trace is not None:
                        self._trace.end()

    async def until_ending(self) -> None:
        """Return when it begins to end: by `stop`, or by itself."""
        await self._ending.wait()

    def stop(self) -> None:
        """Begin to end: take no more pushes, answer open requests, then close."""
        self._ending.set()
        if self._leading is not None:
            self._leading.links.hurry()

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
        self._forked = self._dispatcher.broken = True
        for sock in self._listener.sockets if self._listener is not None else ():
            forks.blank(sock.fileno())
        if self._unix_listener is not None:
            self._unix_listener.forked()
        self.connections.forked()
        if self._leading is not None:
            self._leading.links.forked()
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
        """End because of an error in its own code, or its algorithm's: its state may be wrong."""
        theirs = failed_part(error, *self._parts)
        if theirs is not None:
            self._break_off(theirs, f"the server is ending: {theirs}"[:_LONGEST_REASON])
            return
        text = (
            f"the server is ending because of an error of its own ({_brief(error)}), which its log"
            " has in full"
        )
        self._break_off(error, text)

    def _break_off(self, error: BaseException, text: str, *given: Any) -> None:
        """End at once, with no further event; ``text``, ``given``: as of `Acceptor.refuse`."""
        if self._dispatcher.broken:
            return
        self._dispatcher.broken = True
        self.run_state.stop()
        self.connections.refuse(text, *given)
        self._stop_with(error)

    async def _close(self) -> None:
        """Drain: let the outstanding update finish, send every answer, save, close."""
        if self._listener is not None:
            await close_listener(self._listener)
        if self._unix_listener is not None:
            self._unix_listener.end()
        if self._persistence is not None:
            self._persistence.stop()
        self.run_state.stop()
        if not self._dispatcher.broken:
            until = asyncio.get_running_loop().time() + self.config.drain_deadline
            self.post(Stopping(self._now(), kept=self.run_state.kept is not None))
            await self._draining.answered()
            if self._error is None:
                await self._draining.last_set(until)
        self._runner.stop()
        self.run_state.end_feeds()
        if self._pacing is not None:
            self._pacing.stop()
        if self._dispatcher.broken:  # peers close once they have read the error that they were sent
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
            self.run_state.end(trusted=not self._dispatcher.broken)
            try:
                await self.run_state.end_copies()
                if self._leading is not None:
                    self._leading.links.end(leave=not isinstance(self._error, RolledBack))
                if self._profile is not None:
                    self._profile.write()
            finally:
                if self._trace is not None:
                    await self._trace.wait_closed()
        if self.run_state.lacks and self._error is None:
            raise UsageError(self.run_state.lacks, unwritten=True)

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
            if self.run_state.generation:  # a follower that goes on from its state
                pacing.owe()
            pacing.begin(asyncio.get_running_loop())
        self.connections.pace(pacing)


def _resources(
    config: Config, env: Environment, profile: Profile | None, *, near: bool
) -> Resources:
    """Return the memory, threads and device of a server; ``near``: of connections by Unix sockets.

    With relaxed consistency replies are of the memory as it is then, so none is shared.
    """
    shared = near and config.consistency != "relaxed"
    memory = SharedMemory() if shared else Memory()
    device = env.device(config.device)
    if device is not None:
        from aiops.store.cuda_backend import PageLocked

        memory = PageLocked(memory, device)
    measure = profile.measure if profile is not None else unmeasured
    parallel_map = (
        env.parallel_map if config.threads is None else env.parallel_map_of(config.threads)
    )
    return Resources(memory, parallel_map, measure, device, later=True, guard=threading.Lock)


def _on_page(by: str) -> str:
    return f"token {by!r}, on the live page"


def _check_model_files(config: Config) -> None:
    """Refuse files of a model for a server whose workers have the model, and average it.

    Raises
    ------
    ConflictError
        When there is one.
    """
    remedies = {
        "init": "give each worker these parameters",
        "save": "have a worker write its own, after a last average()",
    }
    for flag, remedy in remedies.items():
        if getattr(config, flag) is not None:
            raise ConflictError(
                f"under {config.policy} workers have the model, and the server keeps only what the"
                f" first began with: drop --{flag}, and {remedy}"
            )


def _brief(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"[:_LONGEST_REASON]
