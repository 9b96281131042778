"""The standbys of a sharded model's servers: each is fed by its own, all are promoted together.

The lead's standby is connected to those of the followers, as the lead is to the followers. It knows
what each of them has, has them remove the snapshots that no set needs, and promotes them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import field
from typing import Any

from aiops.common.frozen import value
from aiops.common.generations import term
from aiops.durable.standby import StandbyDesk
from aiops.engine.events import Drop, Effect, Joined, Lost, Order, Received, Reply, Reported
from aiops.errors import RemoteProtocolError, Unavailable, UsageError
from aiops.shards.reports import PLACE, PROMOTED, is_small
from aiops.shards.snapshot_sets import SnapshotSets
from aiops.wire.handshake import proves_generation
from aiops.wire.messages import PROTOCOL, Error, Hello, Leave
from aiops.wire.server_messages import (
    CountTraffic,
    KeepSets,
    LeadHello,
    ShardState,
    ShardWelcome,
    SnapshotSaved,
    TrafficCounted,
)
from aiops.wire.standby_messages import Promote, Promoted, StandbyWelcome


def check_place(welcome: StandbyWelcome, shard: int, shards: int | None, primary: str) -> None:
    """Check that a server has the part of a model that its standby is to have.

    Parameters
    ----------
    welcome, primary
        The server's welcome, and its URL.
    shard, shards
        The standby's shard (0: the lead's), and the number of all; None: as its primary has.

    Raises
    ------
    UsageError
        When it has another one; the text says with what to start.
    """
    count = welcome.shards if shards is None else shards
    if (welcome.shard, welcome.shards) == (shard, count):
        return
    if welcome.shard != shard:
        has = f"shard {welcome.shard} of {welcome.shards}" if welcome.shard else "a lead's part"
        raise UsageError(
            f"{primary} has {has}, and this standby is to be that of shard {shard}: name the run's"
            " lead with --standby, and the shard with --shard"
        )
    if welcome.shards == 1:
        raise UsageError(
            f"{primary} has all of its model, and this standby is to be that of {count} shards:"
            " start it without --shards"
        )
    raise UsageError(
        f"{primary} leads {welcome.shards} shards, and this standby is to be that of {count}: start"
        f" it with --shards {welcome.shards}, or name a standby of each follower with --followers"
    )


@value
class ShardCopy:
    """The copy that a follower's standby has of its primary.

    Attributes
    ----------
    run
        The run; empty: it has nothing yet.
    shard, shards
        The shard, and the number of all.
    version
        Of its part of the model.
    cuts
        The rows of the lead's journal of which it has snapshots.
    whole
        Whether it could be promoted.
    report
        What statistics tell of it.
    secret
        The run's; empty: it has nothing yet.
    place
        The number of the place that it had as a follower, and was not fed by another since; else 0.
    led_by
        The newest generation of a lead of which it has orders, or that has led it.
    """

    run: str
    shard: int
    shards: int
    version: int
    cuts: tuple[int, ...]
    whole: bool
    report: Mapping[str, Any]
    secret: bytes = field(default=b"", repr=False)
    place: int = 0
    led_by: int = 0


class FollowerStandbyDesk(StandbyDesk):
    """Answers the standby of the lead, which is connected to that of a follower, and observers.

    Parameters
    ----------
    held
        Returns what it has at present.
    keep
        Has the copy keep the snapshots of these rows of the lead's journal, and later ones.
    primary
        The URL of the primary's lead.
    promote
        Called with the connection and the id of a request to promote it with all the others.
    take
        Called with the connection and the id of a request that it takes its follower's place alone.
    resume
        Called when the lead looks for a follower here: this server was started as a standby, and is
        to be that. Its argument is the number of the place that it took alone; 0: it took none.
    leave
        Called when the lead's standby has ended.

    Attributes
    ----------
    above
        The number of the follower's place of which the lead's standby knows: a promotion with all
        others is of a later generation, as another server may have had the place meanwhile.
    """

    def __init__(
        self,
        held: Callable[[], ShardCopy],
        keep: Callable[[Sequence[int]], None],
        primary: str,
        promote: Callable[[int, int], None],
        take: Callable[[int, int], None],
        resume: Callable[[int], None],
        leave: Callable[[], None],
        report: Callable[[], Mapping[str, Any]],
    ) -> None:
        super().__init__(lambda: None, report, primary, promote)
        self._held, self._keep, self._leave = held, keep, leave
        self._take, self._resume = take, resume
        self._lead: int | None = None  # the connection of the lead's standby
        self.above = 0

    def _joined(self, event: Joined) -> list[Effect]:
        hello, peer, held = event.hello, event.peer, self._held()
        if isinstance(hello, Hello):
            return super()._joined(event)
        why, code = "", "standby"
        if isinstance(hello, LeadHello) and self._has_place(hello, held):
            why, code = "it begins to be the follower again", Unavailable.code
            self._resume(max(hello.place, held.place))
        elif not isinstance(hello, LeadHello) or not hello.standby:
            why = f"this is the standby of a follower: its lead is {self._primary}"
        elif held.run and hello.run and held.run != hello.run:
            why = f"this standby has a shard of run {held.run}, and its lead's has run {hello.run}"
        elif held.secret and not proves_generation(
            hello.lead_proof, held.secret, held.run, hello.generation, lead=True
        ):
            why = (
                f"a standby of the lead of run {held.run} has said that it is one, without a proof"
                " of it that is right: start it with the state that it wrote"
            )
        if why:
            return [Reply(peer, Error(hello.id, code, why, {}, True)), Drop(peer, why)]
        before, self._lead = self._lead, peer
        self.above = hello.place if isinstance(hello, LeadHello) else 0
        welcome = Reply(peer, ShardWelcome(hello.id, PROTOCOL, event.proof))
        earlier = [] if before is None else [Drop(before, "its lead has a newer connection")]
        return [*earlier, welcome, Reply(peer, self._state(held))]

    def _has_place(self, hello: LeadHello, held: ShardCopy) -> bool:
        """Return whether a lead looks for the follower that this standby is to be.

        It looks for it here because it has given it the place, which this server may not know, as
        it ended before the answer came; or as this server has said, which knows it from before. Or
        the lead is of a later term: this server was promoted with it, ended, and was started as it
        was before.
        """
        if hello.standby or hello.run != held.run or hello.generation < held.led_by:
            return False
        if not (hello.place or held.place) and term(hello.generation) <= term(held.led_by):
            return False
        facts = held.secret, held.run, hello.generation
        return proves_generation(hello.lead_proof, *facts, lead=True)

    def _state(self, held: ShardCopy) -> ShardState:
        place = held.run, held.shard, held.shards, held.version
        return ShardState(0, True, *place, 0, False, {"snapshots": held.cuts})

    def _received(self, event: Received) -> list[Effect]:
        message = event.message
        if event.peer != self._lead and isinstance(message, Promote):
            self._take(event.peer, message.id)
            return []
        if event.peer != self._lead:
            return super()._received(event)
        if isinstance(message, KeepSets):
            self._keep(message.cuts)
            return []
        if isinstance(message, CountTraffic):
            held = self._held()
            state = {**held.report, "whole": held.whole}
            return [Reply(event.peer, TrafficCounted(message.id, {}, state, {}))]
        if isinstance(message, Leave):
            self._leave()
            return []
        return super()._received(event)

    def saved(self, cut: int) -> list[Effect]:
        """Tell the lead's standby of a snapshot that is on the disk."""
        return [] if self._lead is None else [Reply(self._lead, SnapshotSaved(cut, ""))]


class StandbyGroup:
    """Keeps account of the standbys of followers, for that of their lead.

    Parameters
    ----------
    run
        Their run.
    names
        The name of each follower's standby, from the first.
    servers
        Returns the shards that have a part of the model (0: the lead's).

    Attributes
    ----------
    states
        By shard, what its standby has told of itself last.
    promoted
        The followers' standbys that are followers by now.
    """

    def __init__(
        self, run: str, names: Sequence[str], servers: Callable[[], Sequence[int]]
    ) -> None:
        self._run, self._names, self._servers = run, names, servers
        self._sets, self._round = SnapshotSets(), 0
        self._asked: set[int] = set()  # those that are to tell what they have in this round
        self._lost = dict.fromkeys(self._shards, "it has not been reached yet")
        self._refused: dict[int, str] = {}
        self.states: dict[int, Mapping[str, Any]] = {}
        self.promoted: set[int] = set()
        self._placed: set[int] = set()  # of those, the ones that have taken their places alone

    @property
    def _shards(self) -> range:
        return range(1, len(self._names) + 1)

    def handle(self, event: Reported | Lost) -> list[Order]:
        """Take what a follower's standby has said, or that it is gone; return orders."""
        shard = event.shard
        if isinstance(event, Lost):
            if shard not in self.promoted:
                self._lost[shard] = event.why
            return []
        message = event.message
        if isinstance(message, ShardState):
            return self._attached(shard, message)
        elif isinstance(message, SnapshotSaved):
            return self._saved(shard, message.id)
        elif isinstance(message, TrafficCounted):
            if not is_small(message.state):
                raise RemoteProtocolError("traffic_counted: more than statistics tell")
            self.states[shard] = message.state
            if message.id == self._round:
                self._asked.discard(shard)
        elif isinstance(message, Promoted):
            self.promoted.add(shard)
        elif isinstance(message, Error):
            self._refused[shard] = message.text
        return []

    def _attached(self, shard: int, state: ShardState) -> list[Order]:
        """Take what a follower's standby has that is there, and ask how far it is."""
        self._lost.pop(shard, None)
        cuts = state.holds.get("snapshots", ())
        self._sets.holds(shard, cuts)
        self.promoted.discard(shard)
        self._placed.discard(shard)
        if state.holds.get(PROMOTED):
            self.promoted.add(shard)
            if state.holds.get(PLACE):
                self._placed.add(shard)
            return []
        self.states.pop(shard, None)
        self._asked.add(shard)
        return [Order(shard, CountTraffic(self._round))]

    def refusal(self, shard: int, state: ShardState) -> UsageError | None:
        """Return why a follower's standby is not one of these; None if it is."""
        place, name = (state.run, state.shard, state.shards), self._names[shard - 1]
        if not state.run or place == (self._run, shard, len(self._names) + 1):
            return None
        return UsageError(
            f"{name} has shard {state.shard} of {state.shards} of run {state.run}, and is to have"
            f" shard {shard} of {len(self._names) + 1} of run {self._run}: give each standby the"
            " state that it wrote"
        )

    # ------------------------------------------------------------ snapshots

    def holds(self, cuts: Sequence[int]) -> None:
        """Note which snapshots the lead's standby has."""
        self._sets.holds(0, cuts)

    def saved(self, cut: int) -> list[Order]:
        """Note that the lead's standby has a snapshot; return orders, to itself (0) too."""
        return self._saved(0, cut)

    def _saved(self, shard: int, cut: int) -> list[Order]:
        sets = self._sets
        sets.saved(shard, cut, well=True)
        sets.servers = [each for each in self._servers() if each not in self._placed]
        if any(each in self._lost or each in self.promoted for each in sets.servers):
            return []
        kept = sets.kept()
        return [Order(each, KeepSets(0, kept)) for each in sets.servers if kept]

    # ------------------------------------------------------------ promotion

    def ask(self) -> list[Order]:
        """Ask all of them what they have."""
        self._round += 1
        self._refused = {}
        self._asked = {*self._shards} - self._lost.keys() - self.promoted
        return [Order(shard, CountTraffic(self._round)) for shard in sorted(self._asked)]

    @property
    def answered(self) -> bool:
        """True if all that were asked have answered, or are gone."""
        return not self._asked - self._lost.keys() - self.promoted

    @property
    def why_not(self) -> str:
        """The reason for which not all of them can be promoted; empty: they can."""
        for shard in self._shards:
            name = self._names[shard - 1]
            if shard in self.promoted:
                continue
            if shard in self._lost:
                return f"{name} is not there ({self._lost[shard]}): start it first"
            if shard in self._asked:
                return f"{name} has not answered"
            if not self.states.get(shard, {}).get("whole"):
                return f"{name} has no whole state of its primary yet"
        return ""

    def promote(self) -> list[Order]:
        """Have all of them become followers."""
        return [Order(shard, Promote(1)) for shard in self._shards if shard not in self.promoted]

    @property
    def decided(self) -> bool:
        """True if all of them have been promoted, or one will not be."""
        return len(self.promoted) == len(self._names) or bool(self.not_promoted)

    @property
    def not_promoted(self) -> str:
        """The reason for which one of them was not promoted, after the others were told to be."""
        for shard in self._shards:
            why = self._refused.get(shard) or self._lost.get(shard)
            if why and shard not in self.promoted:
                return f"{self._names[shard - 1]} was not promoted: {why}"
        return ""

    def report(self) -> list[dict[str, Any]]:
        """Return the lines of the followers' standbys in the statistics."""
        return [
            {
                "shard": shard,
                "name": self._names[shard - 1],
                "gone": self._lost.get(shard, ""),
                **self.states.get(shard, {}),
            }
            for shard in self._shards
        ]
