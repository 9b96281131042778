"""A session's traffic with the other shards of a model, sans-I/O.

A model on one server has no channels and no placement. On several, requests go to the lead and
answers come from it; their headers announce the parts on the other shards, which travel on the
channels as portions. An answer is complete when all of its portions are in place.

Where the rows of tables lie on all shards, a request about rows is one to each of them, under the
same id and, if it is a push, the same sequence number. It is answered when all have answered.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from aiops.client.handshake import Identity
from aiops.client.outbox import Lending, Outbox
from aiops.client.pending import APPLIED, PendingRequests
from aiops.client.receive_params import ParameterSink, PortionSink
from aiops.client.request_kinds import RowsRequest
from aiops.client.rows import FetchedRowsSink
from aiops.client.server_info import ServerInfo
from aiops.client.shard_channel import ShardChannel
from aiops.common import urls
from aiops.common.urls import ServerAddress
from aiops.errors import RemoteProtocolError, Unauthorised, Unavailable
from aiops.model.placement import Placement
from aiops.wire.connection import Connection
from aiops.wire.messages import Error, Message, Push, TableRows, Welcome
from aiops.wire.server_messages import ShardParts
from aiops.wire.sinks import Discard, Sink
from aiops.wire.traffic import Traffic

Payloads = Sequence[Sequence[memoryview]]


@dataclass(slots=True)
class _RowAnswers:
    """The answers of all shards to one request about rows."""

    missing: set[int]
    found: dict[int, TableRows | Error] = field(default_factory=dict)
    into: FetchedRowsSink | None = None

    def whole(self) -> TableRows | Error:
        """Return them as one: the lead's clock, and the largest staleness; or the refusal.

        A refusal that passes has the request sent again: a shard that has applied its share then
        answers from memory. If one has, the refusal says so.
        """
        answers = [answer for _shard, answer in sorted(self.found.items())]
        errors = [each for each in answers if isinstance(each, Error)]
        rows = [each for each in answers if isinstance(each, TableRows)]
        if errors:
            first = next((each for each in errors if each.code != Unavailable.code), errors[0])
            return replace(first, details={**first.details, APPLIED: True}) if rows else first
        if self.into is not None:
            self.into.versions = [each.version for each in rows]
        parts = tuple(part for each in rows for part in each.parts)
        staleness = max(each.staleness for each in rows)
        return replace(rows[0], staleness=staleness, parts=parts)


class Shards:
    """The other shards of one session.

    Parameters
    ----------
    identity
        The client's.
    info
        The server, as far as it is known.
    pending
        The session's requests.
    wire
        Makes this side's end of a connection.
    traffic
        Counts the bytes of all channels.
    on_welcomed
        Called with the number of the last push of rows that counts on a shard, and the shard's
        name.
    on_attached
        Called when the last channel is attached.
    on_answer
        Called with the answer to a request about rows, once all shards have answered.

    Attributes
    ----------
    lead
        The address of the lead, and those of the other shards if the URL names them.
    host
        The lead's at present: it may have moved (`aiops.net.moved_servers`), with its followers.
    channels
        The present connections to those shards that hold, or may hold, a part of the model.
    """

    host: str
    lead: ServerAddress

    def __init__(
        self,
        identity: Identity,
        info: ServerInfo,
        pending: PendingRequests,
        wire: Callable[[], Connection],
        traffic: Traffic,
        *,
        on_welcomed: Callable[[int, str], None],
        on_attached: Callable[[], None],
        on_answer: Callable[[Message, Sink | None], None],
    ) -> None:
        self._identity, self._info, self._pending = identity, info, pending
        self._on_answer, self._on_welcomed = on_answer, on_welcomed
        self._make_wire, self._traffic, self._on_attached = wire, traffic, on_attached
        self.lead, self.host = ServerAddress("", 0), ""
        self.channels: list[ShardChannel] = []
        self._partial: dict[int, tuple[Message, ParameterSink]] = {}  # answers that lack portions
        self._row_answers: dict[int, _RowAnswers] = {}  # by request, until all have come

    # ------------------------------------------------------------ the connections

    def open_channels(self, welcome: Welcome) -> None:
        """Make channels to the other shards; of a defined model, to those that hold a part of it.

        Raises
        ------
        Unauthorised
            When the user named others, or another number of them.
        """
        where = [(host or self.host, port) for host, port, _start in welcome.shards]
        followers = self.lead.followers
        if followers and len(followers) != len(where):
            raise Unauthorised(
                f"{self._info.url} has {len(where) + 1} shards, not the {len(followers) + 1} of"
                f" {urls.write_all([self.lead])}: name all of them, the lead first, or the lead"
                " alone; servers that may take each other's place are separated by commas"
            )
        _client, epoch = self._info.connection
        run = welcome.run, welcome.generation
        self.channels = [
            ShardChannel(self, shard, host, port, self._identity, epoch, run)
            for shard, (host, port) in enumerate(followers or where, 1)
        ]
        if welcome.model:
            self.leave_unused()

    def leave_unused(self) -> None:
        """Drop the channels to shards that hold no part of the model."""
        placement, spread = self._info.placement, self._info.rows.shards
        used = [] if placement is None else placement.used
        used = used if spread == 1 else list(range(spread))
        self.channels = [channel for channel in self.channels if channel.shard in used]

    def connection(self) -> Connection:
        """Return this side's end of a new connection; the bytes of all are counted together."""
        wire = self._make_wire()
        wire.traffic = self._traffic
        return wire

    @property
    def attached(self) -> bool:
        """True once every channel has been welcomed."""
        return all(channel.attached for channel in self.channels)

    @property
    def unattached(self) -> str:
        """The shards that are not attached yet, for error texts."""
        return ", ".join(channel.server for channel in self.channels if not channel.attached)

    def channel_attached(self, server: str, last_seq: int) -> None:
        """Note that a shard has been attached."""
        self._on_welcomed(last_seq, server)
        if self.attached:
            self._on_attached()

    def resume(self) -> None:
        """Go on with portions that may have a sink now that the lead has sent more."""
        for channel in self.channels:
            channel.resume()

    def lost(self) -> None:
        """Forget all channels: the connections to all shards end together."""
        for channel in self.channels:
            channel.lost()
        self.channels = []
        self._partial.clear()
        self._row_answers.clear()

    # ------------------------------------------------------------ pushes

    @property
    def near(self) -> bool:
        """True if a shard with a channel is on this machine, and memory is shared with it."""
        return any(channel.wire.shared is not None for channel in self.channels)

    def push(
        self, placement: Placement, push: Push, payloads: Payloads, outbox: Outbox
    ) -> tuple[Push, Sequence[Sequence[memoryview]], list[Lending]]:
        """Send the others their portions of a push, all at once.

        Returns what the lead is sent, and what the others were lent from ``outbox``.
        """
        divided = placement.divide(push.parts, payloads)
        parts = placement.announced([pieces for pieces, _views in divided])
        mine, lent = divided[0][1], list[Lending]()
        for channel in self.channels:
            pieces, theirs = divided[channel.shard]
            if pieces:
                lending = channel.ask(ShardParts(push.id, 0, tuple(pieces)), theirs, outbox)
                lent += [] if lending is None else [lending]
        return replace(push, parts=parts), [*mine, *([()] * (len(parts) - len(mine)))], lent

    def ask_rows(
        self,
        request: RowsRequest,
        id: int,
        outbox: Outbox | None,
        note: Callable[[Message], object],
    ) -> list[Lending]:
        """Send the others their shares of a request about rows; return what they were lent.

        ``outbox``: lends what may be lent; None: all is sent. ``note``: called with each of them.
        """
        lent = list[Lending]()
        answers = {0, *(channel.shard for channel in self.channels)}
        self._row_answers[id] = _RowAnswers(answers, into=request.asked.into)
        for channel in self.channels:
            message = request.share_of(channel.shard, id)
            lending = channel.ask(message, request.shares[channel.shard].payloads, outbox)
            lent += [] if lending is None else [lending]
            note(message)
        return lent

    # ------------------------------------------------------------ answers

    def sink_for(self, shard: int, portion: ShardParts) -> Sink | None:
        """Return the sink of a portion of an answer; None before the lead announces it.

        Raises
        ------
        RemoteProtocolError
            When it is another one than the lead has announced.
        """
        if portion.id not in self._pending.by_id:
            return Discard()
        into, placement = self._pending.arriving(portion.id), self._info.placement
        if into is None or placement is None:
            return None
        low, high = placement.edges[shard : shard + 2]
        expected = [n for n, part in enumerate(into.parts) if low <= part.start < high]
        if shard not in into.missing or not into.announced(expected, portion.parts):
            raise RemoteProtocolError(
                f"shard {shard} of {self._info.url} sent other parts than its lead announced"
            )
        return PortionSink(into, expected[0])

    def portion_arrived(self, shard: int, portion: ShardParts, sink: Sink | None) -> None:
        """Note that a portion is in place; after the last one the answer is given out."""
        into = self._pending.arriving(portion.id)
        if into is None or not isinstance(sink, PortionSink):
            return
        into.missing.discard(shard)
        if not into.missing and portion.id in self._partial:
            message, whole = self._partial.pop(portion.id)
            self._pending.resolve(with_all_parts(message, whole), whole)

    def rows_sink(self, shard: int, message: TableRows) -> Sink:
        """Return the sink of the rows that a shard sends."""
        return self._pending.rows_sink(shard, message)

    def rows_answered(self, shard: int, answer: TableRows | Error) -> None:
        """Note that a shard has answered a request about rows; give out the answer of all."""
        whole = self._note_rows(shard, answer)
        if whole is not None:
            self._on_answer(whole, None)

    def _note_rows(self, shard: int, answer: TableRows | Error) -> TableRows | Error | None:
        answers = self._row_answers.get(answer.id)
        if answers is None or shard not in answers.missing:
            raise RemoteProtocolError(f"shard {shard} answered {answer.id}, which it was not asked")
        answers.missing.discard(shard)
        answers.found[shard] = answer
        if answers.missing:
            return None
        del self._row_answers[answer.id]
        return answers.whole()

    def complete(self, message: Message, sink: Sink | None) -> Message | None:
        """Return an answer with all of its parts; None if some of it is still to come."""
        if message.id in self._row_answers and isinstance(message, TableRows | Error):
            return self._note_rows(0, message)
        if not isinstance(sink, ParameterSink):
            return message
        if sink.missing:
            self._partial[message.id] = message, sink
            return None
        return with_all_parts(message, sink)

    @property
    def late(self) -> tuple[int, str] | None:
        """The first request that lacks portions, and the shards that owe them, for error texts."""
        for id, (_message, into) in self._partial.items():
            if into.missing:
                late = [each.server for each in self.channels if each.shard in into.missing]
                return id, ", ".join(late)
        for id, answers in self._row_answers.items():
            late = [each.server for each in self.channels if each.shard in answers.missing]
            if late:
                return id, ", ".join(late)
        return None


def with_all_parts(message: Message, sink: ParameterSink) -> Message:
    """Return a lead's answer with the parts as all shards have sent them."""
    return replace(message, parts=sink.parts)  # type: ignore[call-arg]
