"""A standby's decisions: what it takes of a primary, and how it answers clients."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import field
from typing import Any

from aiops.common.frozen import value
from aiops.common.generations import generation_text
from aiops.engine.buffer_pool import BufferPool
from aiops.engine.engine import Engine
from aiops.engine.events import Drop, Effect, Event, Joined, Received, Reply, Warm
from aiops.errors import DamagedState, Refused, RemoteProtocolError
from aiops.state.directory import GenerationFile, GenerationStart, TakenPlace, foreign
from aiops.state.frames import JournalFrame, SegmentScan
from aiops.wire import messages
from aiops.wire.connection import Connection
from aiops.wire.handshake import proves_generation
from aiops.wire.messages import Error, Hello, Log, Ping, Pong, Push, Report, Stats, Welcome
from aiops.wire.sinks import Sink
from aiops.wire.standby_messages import JournalRows, Promote, SnapshotPart, StandbyWelcome

_MOST = 1 << 31
"""Bytes that a primary may announce in one message, beyond a model's."""


@value
class StandbyPosition:
    """The state that a standby holds.

    Attributes
    ----------
    run
        The run; empty: nothing.
    generation
        The primary's, when it was fed last.
    row
        The last row.
    proof
        That of the generation.
    secret
        The run's; empty: it is not known.
    """

    run: str = ""
    generation: int = 0
    row: int = 0
    proof: bytes = b""
    secret: bytes = field(default=b"", repr=False)


def goes_on(held: StandbyPosition, welcome: StandbyWelcome, primary: str) -> bool:
    """Return whether a standby keeps what it holds; False: it drops that, and begins again.

    Raises
    ------
    RemoteProtocolError
        When the welcome does not fit what the standby has said.
    """
    if held.run and welcome.run != held.run:
        raise RemoteProtocolError(
            f"{primary} serves run {welcome.run}, and this state is of run {held.run}: name"
            " another folder with --state"
        )
    if welcome.generation < held.generation:
        raise RemoteProtocolError(
            f"{primary} is of generation {generation_text(welcome.generation)}, and this state of"
            f" {generation_text(held.generation)}: that server was superseded"
        )
    # The standby proves to others what it believes here: they would end for it.
    secret, given = held.secret or welcome.secret, (welcome.run, welcome.generation)
    if secret and not (
        welcome.secret == secret and proves_generation(welcome.generation_proof, secret, *given)
    ):
        raise RemoteProtocolError(
            f"{primary} says that it is of generation {generation_text(welcome.generation)} of run"
            f" {welcome.run}, and its proof of that is not right: see that it is a server of this"
            " run, and that nothing changes what it says on the way"
        )
    return bool(held.row) and welcome.row == held.row and not welcome.snapshot


def generations_of(welcome: StandbyWelcome) -> GenerationFile:
    """Return the primary's generations.

    Raises
    ------
    RemoteProtocolError
        When they are not written so.
    """
    starts = welcome.starts.get("starts")
    found = []
    for start in starts if isinstance(starts, tuple) else ():
        if not (isinstance(start, tuple) and len(start) == 3 and isinstance(start[2], tuple)):
            raise RemoteProtocolError("standby_welcome.starts: [generation, row, versions]")
        generation, row, versions = start
        if any(type(n) is not int or n < 0 for n in (generation, row, *versions)):
            raise RemoteProtocolError("standby_welcome.starts: integers were expected")
        found.append(GenerationStart(generation, row, versions))
    rows, places = welcome.starts.get("places", ()), list[TakenPlace]()
    for row in rows if isinstance(rows, tuple) else ():
        known = isinstance(row, tuple) and [*map(type, row)] == [int, int] and min(row) > 0
        if not (known and row[0] < welcome.shards and len(rows) < welcome.shards):
            raise RemoteProtocolError("standby_welcome.starts: a place is [shard, number]")
        places.append(TakenPlace(*row))
    return GenerationFile(welcome.generation, found, secret=welcome.secret, places=tuple(places))


def starts_of(generations: GenerationFile, shard: int) -> dict[str, Any]:
    """Return a primary's generations as its welcome has them; `generations_of` is the inverse.

    A lead's (``shard`` 0) has the places that standbys of its followers have taken, too: that of
    the lead is to know a server that has lost its place from the one that has it.
    """
    rows = ((start.generation, start.row, start.versions) for start in generations.starts)
    found: dict[str, Any] = {"starts": tuple(rows)}
    if generations.places and not shard:
        found["places"] = tuple((place.shard, place.number) for place in generations.places)
    return found


class BytesSink(Sink):
    """Takes the payloads of one message, one behind the other.

    Parameters
    ----------
    message
        Its parts are bytes ``start`` to ``stop``.
    most
        The most bytes in all.
    start
        The first one's ``start``.

    Attributes
    ----------
    data
        All of them, once the message is complete.

    Raises
    ------
    RemoteProtocolError
        When the parts are not consecutive, or too long.
    """

    def __init__(self, message: JournalRows | SnapshotPart, most: int, start: int = 0) -> None:
        at = start
        for part in message.parts:
            if part.start != at or part.stop - part.start != part.nbytes or part.codec != "raw":
                raise RemoteProtocolError(f"{message.kind}.parts: bytes from {at:,} on belong here")
            at = part.stop
        if at - start > most:
            raise RemoteProtocolError(
                f"{message.kind}.parts: {at - start:,} bytes, at most {most:,} allowed"
            )
        self._begins = [part.start - start for part in message.parts]
        self.data = memoryview(bytearray(at - start))

    def view(self, part: int, offset: int) -> memoryview:
        """Return where these bytes belong."""
        return self.data[self._begins[part] + offset :]

    def filled(self, part: int, offset: int, nbytes: int) -> None:
        """Do nothing: the bytes are checked when all are there."""

    def abandoned(self) -> None:
        """Do nothing: no buffer is held."""


def longest(max_model: int) -> int:
    """Return the most bytes of one message of a primary whose models have at most ``max_model``."""
    return _MOST + 2 * max_model


def rows_in(
    message: JournalRows, data: memoryview, origin: tuple[str, int, int], row: int
) -> list[JournalFrame]:
    """Return the rows of a message.

    Parameters
    ----------
    message, data
        The message, and its payloads.
    origin
        The run that they must be of, the number of the shard and that of all shards.
    row
        The row before the first.

    Raises
    ------
    RemoteProtocolError
        When these are not the rows that come next, or not whole.
    """
    if message.first != row + 1 or not message.first <= message.last <= message.newest:
        raise RemoteProtocolError(
            f"journal_rows: rows {message.first:,} to {message.last:,} of {message.newest:,} behind"
            f" row {row:,}"
        )
    try:
        scan = SegmentScan(data, "journal_rows", first=message.first, until=message.last + 1)
        found = [*scan]
    except DamagedState as error:
        raise RemoteProtocolError(str(error)) from None
    why = foreign("journal_rows", scan.head.origin, origin)
    if why:
        raise RemoteProtocolError(why)
    if scan.row != message.last + 1:
        raise RemoteProtocolError(f"journal_rows: row {scan.row:,} is not whole")
    if scan.end != len(data):
        raise RemoteProtocolError(f"journal_rows: {len(data) - scan.end:,} bytes behind the rows")
    return found


class StandbyDesk:
    """Answers a standby's clients, which may look at it and promote it: events in, effects out.

    Parameters
    ----------
    engine
        Returns the engine that is brought up to date; None: there is none yet.
    report
        Returns the statistics.
    primary
        The primary's URL.

    Attributes
    ----------
    promote
        Called with the connection and the id of a request to promote the standby.
    """

    def __init__(
        self,
        engine: Callable[[], Engine | None],
        report: Callable[[], Mapping[str, Any]],
        primary: str,
        promote: Callable[[int, int], None],
    ) -> None:
        self._engine, self._report, self._primary = engine, report, primary
        self._promote = promote

    def handle(self, event: Event) -> list[Effect]:
        """Handle an event; return its effects, in order."""
        if isinstance(event, Joined):
            return self._joined(event)
        if isinstance(event, Received):
            return self._received(event)
        return []

    def _joined(self, event: Joined) -> list[Effect]:
        hello, peer = event.hello, event.peer
        if not isinstance(hello, Hello) or hello.role != "observer":
            return [Reply(peer, self._error(hello.id, fatal=True)), Drop(peer, "a standby")]
        engine = self._engine()
        store = engine.store if engine is not None else None
        training = engine.training if engine is not None else None
        welcome = Welcome(
            id=hello.id,
            protocol=messages.PROTOCOL,
            run=engine.options.run if engine is not None else "",
            proof=event.proof,
            policy=engine.algorithm.name if engine is not None else "",
            settings=engine.algorithm.settings() if engine is not None else {},
            plan=engine.plan if engine is not None else {},
            version=engine.version if engine is not None else 0,
            model=store.layout.rows if store is not None else (),
            last_seq=0,
            tables=training.tables.described if training is not None else (),
        )
        return [Reply(peer, welcome)]

    def _received(self, event: Received) -> list[Effect]:
        message, peer = event.message, event.peer
        if isinstance(message, Ping):
            return [Reply(peer, Pong(message.id))]
        if isinstance(message, Pong | Log):
            return []
        if isinstance(message, Stats):
            return [Reply(peer, Report(message.id, self._report()))]
        if isinstance(message, Promote):
            self._promote(peer, message.id)
            return []
        return [Reply(peer, self._error(message.id))]

    def _error(self, id: int, *, fatal: bool = False) -> Error:
        text = f"this server is a standby of {self._primary}: connect to that one"
        return Error(id, "standby", text, {"primary": self._primary}, fatal)

    # ------------------------------------------------------------ as a coordinator's

    @property
    def idle(self) -> bool:
        """True: it has nothing under way."""
        return True

    @property
    def pools(self) -> Sequence[BufferPool]:
        """None: payloads are discarded."""
        return ()

    def wait(self, again: Callable[[], bool]) -> None:
        """Never called: what is discarded has room."""

    def steady(self, peer: int, wire: Connection, push: Push, known: Any) -> None:
        """Return None: there is no short way."""

    def steady_rows(self, peer: int, wire: Connection) -> None:
        """Return None: there is no short way."""

    def preparation(self) -> Warm:
        """Return nothing to warm."""
        return Warm(())

    def overdue(self, now: float, patience: Callable[[int], float]) -> list[tuple[int, str]]:
        """Return the connections to drop: none."""
        return []


def refused_promotion(id: int, why: str) -> Error:
    """Return the answer to a promotion that cannot be."""
    return Error(id, Refused.code, why, {}, False)
