"""The state of a run that a server keeps in its folder, the standbys it feeds, and its claim to it.

`RunState` is there also when a server keeps no state: then it has no files, and each of its
properties says so.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from aiops.common import generations
from aiops.common.generations import generation_text
from aiops.durable.commit_gate import Acks
from aiops.durable.follower_recorder import FollowerReplayer, check_follower
from aiops.durable.lead_recorder import LeadReplayer
from aiops.durable.recovery import Recovered, Replayer, check_begin
from aiops.engine.engine import Engine
from aiops.engine.events import Committed, Effect, Event
from aiops.errors import Refused, Superseded, UsageError
from aiops.net.environment import Environment
from aiops.net.tls import TlsTarget
from aiops.serving.acceptor import Acceptor, Coordinator
from aiops.serving.config import Config
from aiops.serving.standby.feeds import StandbyFeeds
from aiops.serving.standby.fencing import fence
from aiops.serving.state.kept_state import KeptState
from aiops.serving.state.shard_states import FollowerState, LeadState
from aiops.serving.state.snapshot_requests import OnSnapshot
from aiops.serving.state.state_copies import StateCopies, fetch
from aiops.serving.state.state_files import Clock, StateFiles
from aiops.shards.common_moment import CommonMoment
from aiops.shards.follower import Follower
from aiops.shards.lead import Lead
from aiops.state.frames import JournalFrame
from aiops.wire.messages import Hello
from aiops.wire.server_messages import Greeting
from aiops.wire.standby_messages import Fence, StandbyHello

_log = logging.getLogger("aiops.server")

_OLD_COPY = ", or began with an older copy of its state"


def open_files(config: Config, env: Environment, run: str, shards: int) -> StateFiles | None:
    """Open the folder of the state of a server with these settings; None: it keeps none.

    ``run``: the run's name, if it begins. ``shards``: the servers of its model.
    """
    if config.state_folder is None:
        return None
    shard = None if config.follower else (0, shards)
    holder, salt = f"process {os.getpid()}", partial(env.randbelow, 1 << 32)
    given: dict[str, Any] = {"keep": config.keep_journal}
    if config.state_copy is not None:
        given["prepare"] = partial(fetch, config.state_folder, config.state_copy)
    return StateFiles(*(config.state_folder, env.disk, holder, run, salt, shard), **given)


class RunState:
    """The state that one server keeps, from its recovery to its end.

    Parameters
    ----------
    config, env, clock
        The server's settings, surroundings and clock.
    files
        The folder; None: it keeps no state.
    coordinator, engine
        What decides; the engine is None on a follower.
    connections
        The server's.
    post, perform
        Handle an event; carry out an effect.
    supersede, stop_with
        End because another server has the run; end with an error.

    Attributes
    ----------
    kept
        The state, once it has been recovered.
    next_term
        Whether a start is to begin the term of a standby that was promoted.
    starts_alone
        Whether it is known to have no standby.
    lacks
        Once it has ended: what the state that it has left does not have, or an empty text.
    """

    # Those that compiled code reads: `aiops.compiled`.
    __slots__ = ("__dict__", "__weakref__", "kept")

    def __init__(
        self,
        config: Config,
        env: Environment,
        clock: Clock,
        files: StateFiles | None,
        coordinator: Coordinator,
        engine: Engine | None,
        connections: Acceptor,
        post: Callable[[Event], None],
        perform: Callable[[Effect], Any],
        supersede: Callable[..., None],
        stop_with: Callable[[BaseException | None], None],
    ) -> None:
        self.files = files
        self.kept: KeptState | FollowerState | None = None
        self.next_term = self.starts_alone = False
        self.lacks = ""
        self._config, self._env, self._clock = config, env, clock
        self._coordinator, self._engine, self._connections = coordinator, engine, connections
        self._post, self._perform = post, perform
        self._supersede, self._stop_with = supersede, stop_with
        self._feeds: StandbyFeeds | None = None  # once there is a journal
        self._copies: StateCopies | None = None  # while it serves
        self._fencing: asyncio.Task[None] | None = None  # of the servers whose standby it was
        self._over = False  # it has left the folder

    # ------------------------------------------------------------ what it tells

    @property
    def generation(self) -> int:
        """The generation of the run; 0 without a state."""
        return 0 if self.files is None else self.files.generation

    @property
    def proof(self) -> bytes:
        """Proves to other servers of the run that its generation has begun; empty without state."""
        return b"" if self.files is None else self.files.claims.proof

    @property
    def alone(self) -> bool:
        """True if no acknowledgement waits for a standby: there is none that has all rows."""
        return self.starts_alone if self._feeds is None else self._feeds.replication.fallen

    @property
    def holds(self) -> bool:
        """True if answers wait for the disk or a standby."""
        return self.kept is not None and bool(self.kept.recorder.holds)

    @property
    def feeds_behind(self) -> bool:
        """True if a standby does not have all rows yet."""
        return self._feeds is not None and self._feeds.behind

    def report(self) -> dict[str, Any] | None:
        """Return what statistics tell of the state; None: there is none."""
        state, feeds = self.kept, self._feeds
        if state is None:
            return None
        found = state.report()
        if self._copies is not None:
            found["copy"] = self._copies.report()
        return found if feeds is None else {**found, **feeds.report(state.recorder.acks)}

    def lead_generation(self) -> int | None:
        """Return the generation of this start, which may not have begun; None without a state."""
        if self.files is None:
            return None
        if self.next_term and self.kept is None:
            return generations.next_term(self.generation, 0)
        return self.generation + (self.kept is None)

    def lead_proof(self, generation: int) -> bytes:
        """Return the proof for followers of a lead of this generation; empty without a state."""
        return b"" if self.files is None else self.files.claims.lead_proof(generation)

    # ------------------------------------------------------------ recovery

    def replayer(
        self, run: str, on_loop: Callable[..., object] | None = None
    ) -> Replayer | FollowerReplayer:
        """Return what replays rows to the coordinator, instead of a start; see `Server`."""
        perform = self._perform
        warm = partial(on_loop, perform) if on_loop else perform
        coordinator = self._coordinator
        if isinstance(coordinator, Follower):
            return FollowerReplayer(coordinator, run, warm)
        if isinstance(coordinator, Lead):
            return LeadReplayer(coordinator, warm)
        assert self._engine is not None, "a server that is no follower has an engine"
        return Replayer(self._engine, warm)

    def recover(self, replayer: Replayer | FollowerReplayer) -> Recovered | None:
        """Bring the coordinator to the state that is kept, instead of a start."""
        files = self.files
        if files is None:
            return None
        if isinstance(replayer, FollowerReplayer):
            return files.recover_follower(self._coordinator, replayer)  # type: ignore[arg-type]
        assert self._engine is not None, "a server that is no follower has an engine"
        return files.recover(self._engine, self._config.policy, replayer=replayer)

    def check_begin(self, frame: JournalFrame) -> None:
        """Check that a state's first row is of a server with these settings; see `check_begin`."""
        where = str(self._config.state_folder)
        if isinstance(self._coordinator, Follower):
            check_follower(frame, self._coordinator, where)
        else:
            assert self._engine is not None, "a server that is no follower has an engine"
            check_begin(frame, self._config.policy, self._engine, where)

    def go_back(
        self, files: StateFiles, lead: Lead, states: Mapping[int, Any]
    ) -> tuple[Recovered | None, dict[int, int]]:
        """Bring a lead to the newest moment that its followers' states all have.

        Returns
        -------
        tuple
            What was recovered, and by followers' numbers the rows that each has beyond the moment.

        Raises
        ------
        UsageError
            When the states are of different runs, or have no moment in common.
        """
        moment = CommonMoment(states, files.generations.history)
        if files.generations.back_to is not None:  # an administrator has it go back
            moment.end = min(moment.end, files.generations.back_to)
        if why := lead.readmission.strangers(moment):
            raise UsageError(why)
        recovered = self.recover(LeadReplayer(lead, self._perform, moment))
        ahead = moment.ahead(0 if recovered is None else recovered.row)
        files.claim()  # or followers would have gone back for a server that serves no client
        return recovered, ahead

    def keep(
        self, files: StateFiles, loop: asyncio.AbstractEventLoop, recovered: Recovered | None
    ) -> KeptState | FollowerState:
        """Return the state, which is kept from here on, once the caller has set `kept` to it."""
        config, coordinator, perform = self._config, self._coordinator, self._perform
        given = config.policy, config.acknowledgement, self._clock, self._post

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
                promoted=self.next_term,
            )
        else:
            assert self._engine is not None, "a server that is no follower has an engine"
            state = KeptState(
                *(files, self._engine, *given, post_threadsafe, perform, recovered),
                promoted=self.next_term,
            )
        if config.acknowledgement > Acks.APPLIED:
            self._feeds = self._connections.standbys = StandbyFeeds(
                *(files, state, config.acknowledgement, config.standby_deadline, self._env),
                *(self._committed, self._connections.link_lost, self._supersede),
                alone=self.starts_alone,
            )
            state.keep_for(self._feeds.first_needed)
            if isinstance(coordinator, Follower):
                coordinator.state_report = lambda: self.report() or {}
        return state

    # ------------------------------------------------------------ while it runs

    def begin(self, loop: asyncio.AbstractEventLoop) -> None:
        """Write snapshots from here on, make copies of them, and feed standbys."""
        folder, copy = self._config.state_folder, self._config.state_copy
        if isinstance(self.kept, KeptState) and folder is not None and copy is not None:
            self._copies = copies = StateCopies(folder, copy, self._env.now)
            self.kept.saved = copies.saved
            copies.begin()
        if self.kept is not None:
            self.kept.begin(loop, self._config.snapshot_every)
        if self._feeds is not None:
            self._feeds.begin(loop)

    def fence_predecessors(
        self,
        loop: asyncio.AbstractEventLoop,
        url: str,
        run: str,
        tls: Callable[[str], TlsTarget] | None,
    ) -> None:
        """Have the servers end whose standby this one was; ``url``: its own."""
        if self.files is not None and self.files.generations.predecessors:
            given = self._env, self._config.token, self.files.generations.predecessors, url, run
            self._fencing = loop.create_task(fence(*given, self.generation, self.proof, tls))

    def _journalled(self, event: Event) -> None:
        """Handle an event of the journal's thread."""
        synced = isinstance(event, Committed) and self._config.acknowledgement >= Acks.DURABLE
        if synced and self._feeds is not None:
            self._committed(self._feeds.synced_here(event.row))  # type: ignore[union-attr]
        else:
            self._post(event)

    def _committed(self, row: int) -> None:
        if self._config.acknowledgement >= Acks.DURABLE:
            self._post(Committed(self._env.now(), row))

    # ------------------------------------------------------------ what administrators ask for

    def take_snapshot(self, answer: OnSnapshot) -> bool:
        """Have a snapshot be taken, and ``answer`` called then; return False without a state."""
        if not isinstance(self.kept, KeptState):
            return False
        self.kept.take_snapshot(answer)
        return True

    def note_rollback(self, version: int) -> bool:
        """Write that the next start goes back to a version; return False without a state.

        Raises
        ------
        Refused
            When it cannot go back to that.
        """
        state, feeds = self.kept, self._feeds
        if not isinstance(state, KeptState):
            return False
        if isinstance(state, LeadState) and feeds is not None and feeds.any:
            raise Refused(
                "a model on several servers that have standbys does not go back yet: end the"
                " standbys, ask again, and start them in empty folders"
            )
        state.note_rollback(version)
        return True

    # ------------------------------------------------------------ whose run it is

    def refusal(self, hello: Greeting) -> str:
        """Return the reason for which a client's claim is refused, or an empty text."""
        if self.files is None or not isinstance(hello, Hello | StandbyHello):
            return ""
        return self.files.claims.refusal(hello)

    def superseded_by(self, message: Fence) -> bool:
        """Return True if the sender of this message has the run rightly."""
        return self.files is not None and self.files.claims.supersedes(message)

    def fence_refusal(self, message: Fence) -> str:
        """Return the reason for which such a message changes nothing, or an empty text."""
        return "" if self.files is None else self.files.claims.refusal(message)

    def superseded(self, generation: int, primary: str) -> Superseded:
        """Note that another server has the run; return the error that tells peers so.

        Parameters
        ----------
        generation
            That server's.
        primary
            Its URL, or an empty text if that is not known.
        """
        if self.files is not None:
            try:
                self.files.note_successor(generation, primary)
            except OSError as why:
                _log.error("a later start here will not know it: %s", why.strerror or why)
        return Superseded(
            f"this server was superseded by {primary or 'another one'} of its run (generation"
            f" {generation_text(generation)}){'' if primary else _OLD_COPY}: to be of use it may"
            f" start with --standby {primary or 'and the URL of that'}",
            generation=generation,
            primary=primary,
        )

    # ------------------------------------------------------------ its end

    def stop(self) -> None:
        """Begin no more snapshots."""
        if self.kept is not None:
            self.kept.stop()

    async def end_copies(self) -> None:
        """Make a last copy of the state, once it has been left whole."""
        if self._copies is not None:
            await self._copies.end()

    def end_feeds(self) -> None:
        """Feed no standby any more, and fence none."""
        if self._feeds is not None:
            self._feeds.end()
        if self._fencing is not None:
            self._fencing.cancel()

    def end(self, *, trusted: bool) -> None:
        """Close the journal, and let another server have the folder, once.

        ``trusted``: whether the state may be written as it is; not after an update that failed.
        """
        if self._over:
            return
        self._over = True
        if self.kept is not None:
            self.lacks = self.kept.end(trusted=trusted)
        elif self.files is not None:
            self.files.close()
