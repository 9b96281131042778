"""A session's traffic with the other shards of a model, sans-I/O.

A model on one server has no branches and no placement. On several, requests go to the lead and
answers come from it; their headers announce the parts on the other shards, which travel on the
branches as portions. An answer is complete when all of its portions are in place.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from aiops.client.params import Params
from aiops.client.receive_params import ParameterSink, PortionSink
from aiops.client.request_kinds import Request
from aiops.client.shard_channel import ShardChannel
from aiops.errors import Refused, RemoteProtocolError, Unauthorised, UsageError
from aiops.kernels.parallel import ParallelMap
from aiops.model.layout import Layout
from aiops.model.parts import Parts
from aiops.model.placement import Placement
from aiops.wire.connection import Buffer, Connection, SinkFor
from aiops.wire.messages import Message, Push, ShardParts
from aiops.wire.sinks import Discard, Sink

if TYPE_CHECKING:
    from aiops.client.session import Session
    from aiops.wire.fields import ShardTable


class Shards:
    """The other shards of one session.

    Parameters
    ----------
    session
        The session, which is with the lead.
    wire
        Makes this side's end of a connection.
    parallel_map
        Copies a lent model in parallel.

    Attributes
    ----------
    branches
        The present connections to those shards that hold, or may hold, a part of the model.
    host
        The lead's.
    followers
        Host and port of each other shard, if the URL names them.
    placement
        The division of the model, if not all of it lies on the lead.
    """

    def __init__(
        self, session: Session, wire: Callable[[SinkFor], Connection], parallel_map: ParallelMap
    ) -> None:
        self._session, self._make_wire, self._parallel_map = session, wire, parallel_map
        self.branches: list[ShardChannel] = []
        self.host = ""
        self.followers: tuple[tuple[str, int], ...] = ()
        self.placement: Placement | None = None
        self._used: list[int] = []  # those that hold any of the model
        self._intos: dict[int, ParameterSink] = {}  # answers of which portions may come
        self._partial: dict[int, tuple[Message, ParameterSink]] = {}  # answers that lack portions

    # ------------------------------------------------------------ the connections

    def branch_off(self, shards: ShardTable, *, defined: bool) -> None:
        """Make branches to the other shards; of a defined model, to those that hold a part of it.

        Raises
        ------
        Unauthorised
            When the user named others, or another number of them.
        """
        where = [(host or self.host, port) for host, port, _start in shards]
        if self.followers and len(self.followers) != len(where):
            raise Unauthorised(
                f"{self._session.server} has {len(where) + 1} shards, not the"
                f" {len(self.followers) + 1} of this URL: name all of them, the lead first, or the"
                " lead alone"
            )
        where = list(self.followers) or where
        self.branches = [
            ShardChannel(self._session, shard, host, port, self._make_wire)
            for shard, (host, port) in enumerate(where, 1)
        ]
        if defined:
            self._leave_unused()

    def _leave_unused(self) -> None:
        """Drop the branches to shards that hold no part of the model."""
        self.branches = [branch for branch in self.branches if branch.shard in self._used]

    @property
    def attached(self) -> bool:
        """True once every branch has been welcomed."""
        return all(branch.attached for branch in self.branches)

    @property
    def unattached(self) -> str:
        """The shards that are not attached yet, for error texts."""
        return ", ".join(branch.server for branch in self.branches if not branch.attached)

    def resume(self) -> None:
        """Go on with portions that may have a sink now that the lead has sent more."""
        for branch in self.branches:
            branch.resume()

    def lost(self) -> None:
        """Forget all branches: the connections to all shards end together."""
        for branch in self.branches:
            branch.lost()
        self.branches = []
        self._partial.clear()
        self._intos.clear()

    # ------------------------------------------------------------ the model

    def learn(self, server: str, layout: Layout, shards: ShardTable) -> bool:
        """Learn where the model lies; return whether that is another place than before.

        Raises
        ------
        RemoteProtocolError
            When it cannot lie there.
        """
        before, self._used, self.placement = self.placement, [], None
        if shards:
            try:
                placement = Placement(layout, [0, *(row[2] for row in shards)])
            except UsageError as error:
                raise RemoteProtocolError(f"{server} describes {error}") from None
            self._used = placement.used[1:]
            if self._used:  # else it is as on one server
                self.placement = placement
        self._leave_unused()
        edges = None if self.placement is None else self.placement.edges
        return edges != (None if before is None else before.edges)

    # ------------------------------------------------------------ pushes

    def push(self, push: Push, payloads: Sequence[Sequence[memoryview]]) -> list[Buffer]:
        """Send the others their portions of a push, all at once; return what the lead is sent."""
        assert self.placement is not None
        divided = self.placement.divide(push.parts, payloads)
        parts = self.placement.announced([pieces for pieces, _views in divided])
        mine = divided[0][1]
        views = [*mine, *([()] * (len(parts) - len(mine)))]
        for branch in self.branches:
            pieces, theirs = divided[branch.shard]
            if pieces:
                branch.push(ShardParts(push.id, 0, tuple(pieces)), theirs)
        return self._session.wire.send(replace(push, parts=parts), views)

    # ------------------------------------------------------------ answers

    def sink_for(self, request: Request, id: int, parts: Parts) -> ParameterSink:
        """Make room for an answer of the lead's, of which the others send their portions.

        Raises
        ------
        RemoteProtocolError
            When it cannot be right.
        """
        placement, server = self.placement, self._session.server
        assert placement is not None
        try:
            pieces = placement.announced_pieces(parts, increments=True)
        except Refused as error:
            raise RemoteProtocolError(f"{server} sent {error}") from None
        whole = tuple(part for theirs in pieces for part in theirs)
        assert isinstance(request.into, Params)
        asked = request.have, request.wants
        into = ParameterSink(request.into, whole, *asked, server, self._parallel_map, placement.all)
        into.missing = {shard for shard in range(1, len(pieces)) if pieces[shard]}
        self._intos[id] = into
        return into

    def portion_sink_for(self, shard: int, portion: ShardParts) -> Sink | None:
        """Return where a portion of an answer goes; None before the lead announces it.

        Raises
        ------
        RemoteProtocolError
            When it is another one than the lead has announced.
        """
        if not self._session.waits_for(portion.id):
            return Discard()
        into = self._intos.get(portion.id)
        if into is None:
            return None
        assert self.placement is not None
        low, high = self.placement.edges[shard : shard + 2]
        expected = [n for n, part in enumerate(into.parts) if low <= part.start < high]
        if shard not in into.missing or not into.announced(expected, portion.parts):
            raise RemoteProtocolError(
                f"shard {shard} of {self._session.server} sent other parts than its lead announced"
            )
        return PortionSink(into, expected[0])

    def hear_portion(self, shard: int, portion: ShardParts, sink: Sink | None) -> None:
        """Note that a portion is in place; after the last one the answer is given out."""
        into = self._intos.get(portion.id)
        if into is None or not isinstance(sink, PortionSink):
            return
        into.missing.discard(shard)
        if not into.missing and portion.id in self._partial:
            message, whole = self._partial.pop(portion.id)
            self._session.hear_answer(message, whole)

    def complete(self, message: Message, sink: Sink | None) -> Message | None:
        """Return an answer with all of its parts; None if portions of it are still to come."""
        if isinstance(sink, ParameterSink) and sink.missing:
            self._partial[message.id] = message, sink
            return None
        self._intos.pop(message.id, None)
        if self.placement is not None and isinstance(sink, ParameterSink):
            return replace(message, parts=sink.parts)  # type: ignore[call-arg]
        return message

    @property
    def coming(self) -> Collection[int]:
        """The requests whose answers lack portions."""
        return self._partial.keys()

    @property
    def late(self) -> tuple[int, str] | None:
        """The first request that lacks portions, and the shards that owe them, for error texts."""
        for id, (_message, into) in self._partial.items():
            if into.missing:
                late = [branch.server for branch in self.branches if branch.shard in into.missing]
                return id, ", ".join(late)
        return None
