"""Decide whether a server can be led, given the state that it holds.

A follower comes for the first time, comes back, or is a standby that asks for a lost one's place.
Each says what it holds (`ShardState`), and nothing changes before that has been compared with what
the lead has.
"""

from __future__ import annotations

from aiops.errors import AiopsError, RolledBack, UsageError
from aiops.model.parts import LARGEST
from aiops.shards.common_moment import CommonMoment, History
from aiops.shards.followers import Followers
from aiops.shards.sharded_model import ShardedModel
from aiops.wire.server_messages import ShardState


class Readmission:
    """The servers that one lead can go on with.

    Parameters
    ----------
    followers
        Those that it has, or has lost.
    run
        The run that it leads.
    kept
        Whether it keeps a state.

    Attributes
    ----------
    model
        That which it has; None: it has none yet.
    history
        The generations of its state; empty: it keeps none.
    """

    def __init__(self, followers: Followers, run: str, *, kept: bool) -> None:
        self._followers, self._run, self._kept = followers, run, kept
        self.model: ShardedModel | None = None
        self.history: History = ()

    def refusal(self, shard: int, state: ShardState) -> AiopsError | None:
        """Return why a follower with this state cannot be led; None if it can.

        `RolledBack`: the lead has to begin again, at an earlier moment that both have.
        """
        moment, model = CommonMoment({shard: state}, self.history), self.model
        why = self._mismatch(shard, state) or self.strangers(moment)
        if why:
            return UsageError(why)
        if not self._kept or model is None:
            return None
        if moment.ahead(LARGEST) or not model.fits(shard, state):
            return RolledBack(
                f"{self._followers.name(shard)} is at version {state.version:,}, and its lead at"
                f" {model.version:,}, or it lacks its part of a push that its lead has: it has"
                " lost its newest rows, or is of another time (of a copy). All servers of the"
                " model go back to the newest moment that they have together: start this one again",
                shard=shard,
            )
        return None

    def place_refusal(self, state: ShardState) -> str:
        """Return why a follower's standby that holds this cannot have its place; empty: it can.

        It can if the follower is lost, and the standby has all that any server relies on. None
        does on rows of tables: a client is told of its pushes that the standby lacks.
        """
        if not self._kept or state.shard not in self._followers.all:
            return f"this server leads no shard {state.shard} with a state"
        name = self._followers.name(state.shard)
        if state.shard not in self._followers.lost:
            return f"{name} is there: a standby takes the place of a server that its lead has lost"
        error = self.refusal(state.shard, state)
        if isinstance(error, RolledBack):
            return (
                f"this standby has not got all that {name} had told the other servers, so"
                " acknowledged pushes would be lost: start that server again from its state, or"
                " promote the standby of the lead, which tells workers what they lose"
            )
        return "" if error is None else str(error)

    def strangers(self, moment: CommonMoment) -> str:
        """Return why no moment is that of all of some followers; empty: one may be."""
        names = ", ".join(self._followers.name(shard) for shard in moment.strange)
        return names and (
            f"{names}: its last lead is none that this one knows of, so their rows may be others"
            " under the same numbers: give all servers of the model states of one time, or have a"
            " standby fetch its own again, into an empty folder"
        )

    def _mismatch(self, shard: int, state: ShardState) -> str:
        """Return why a state is not one of this run and place; empty: it is."""
        run, shards, name = self._run, len(self._followers) + 1, self._followers.name(shard)
        if state.kept != self._kept:
            with_state, without = ("its lead", name) if self._kept else (name, "its lead")
            return f"{with_state} keeps a state and {without} does not: give both --state, or none"
        if not state.run:
            lacks = self.model is not None and shard not in self.model.loads
            lacks = lacks and "reached" not in state.holds  # else it has lost it
            if not lacks:
                return ""
            return (
                f"{name} has no state, and its lead has one of run {run}: put back its folder, or"
                " begin a new run in other folders"
            )
        if (state.run, state.shard, state.shards) != (run, shard, shards):
            return (
                f"{name} holds shard {state.shard} of {state.shards} of run {state.run}, and is to"
                f" be shard {shard} of {shards} of run {run}: give each server the state it wrote"
            )
        if self.model is None:
            return f"{name} holds a model, and its lead has none: give both the states of one time"
        return ""
