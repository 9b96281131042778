"""The files of a state directory: their names, and which of them are needed for what.

::

    identity                        run, shard and shards: written once
    generation                      the server's generation, and the rows at which each began
    snapshot-00000000000000018220   the state after row 18,220
    journal-00000000000000018221    rows from 18,221 on, to the first row of the next segment
    spare-1                         a segment that is not needed, to be overwritten
    LOCK                            held by the server's process
    *.part                          not complete: removed at start
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from itertools import pairwise
from typing import Any

from aiops.common.frozen import value
from aiops.common.generations import next_start, next_term
from aiops.errors import DamagedState
from aiops.state.blocks import GENERATION, IDENTITY, Buffer, pack_block, whole_block
from aiops.state.plain import field

LOCK, IDENTITY_FILE, GENERATION_FILE = "LOCK", "identity", "generation"
SHARD = "shard-"
"""The beginning of the name of a shard's folder, in the folder of all."""

PART = ".part"
"""The end of the name of a file that is not complete."""

MAX_SPARES = 16
"""Segments that are kept to be overwritten, at most: that is faster than making new ones."""

MAX_HISTORY = 64
"""Generations that the file of generations remembers."""

_NUMBERED = re.compile(r"(snapshot|journal)-(\d{20})")
_PLACE = [int, int, str, int]
_SPARE = re.compile(r"spare-([1-9]\d{0,8})")


def snapshot_name(row: int) -> str:
    """Return the name of the snapshot of the state after a row."""
    return f"snapshot-{row:020d}"


def journal_name(first: int) -> str:
    """Return the name of the segment that begins with a row."""
    return f"journal-{first:020d}"


def spare_name(number: int) -> str:
    """Return the name of a spare segment."""
    return f"spare-{number}"


@value
class Removal:
    """Files that a state needs no more, in the order in which they are to go."""

    snapshots: tuple[int, ...]
    segments: tuple[int, ...]


class StateListing:
    """The files of a state directory, by their names alone.

    Parameters
    ----------
    names
        The names of its files, in any order.

    Attributes
    ----------
    snapshots
        Their rows, the newest first.
    segments
        Their first rows, rising.
    spares
        The numbers of spare segments.
    parts
        Names of files that are not complete.
    foreign
        Names that no state has.
    """

    def __init__(self, names: Iterable[str]) -> None:
        found: dict[str, list[int]] = {"snapshot": [], "journal": []}
        spares, parts, foreign = list[int](), list[str](), list[str]()
        for name in sorted(names):
            numbered, spare = _NUMBERED.fullmatch(name), _SPARE.fullmatch(name)
            if numbered:
                found[numbered[1]].append(int(numbered[2]))
            elif spare:
                spares.append(int(spare[1]))
            elif name.endswith(PART):
                parts.append(name)
            elif name not in (LOCK, IDENTITY_FILE, GENERATION_FILE):
                foreign.append(name)
        self.snapshots = tuple(sorted(found["snapshot"], reverse=True))
        self.segments = tuple(sorted(found["journal"]))
        self.spares = tuple(sorted(spares))
        self.parts, self.foreign = tuple(parts), tuple(foreign)

    def segments_after(self, row: int) -> tuple[int, ...]:
        """Return the first rows of the segments that have the rows after ``row``.

        The first of them may begin with earlier rows. There are none when the journal ended before.

        Raises
        ------
        DamagedState
            When there is a journal, and its first segment begins after row ``row + 1``.
        """
        if not self.segments:
            return ()
        before = [first for first in self.segments if first <= row + 1]
        if not before:
            raise DamagedState(
                f"the rows from {row + 1:,} to {self.segments[0] - 1:,} are missing: the first"
                f" segment of the journal is {journal_name(self.segments[0])}",
                row=row + 1,
            )
        return tuple(first for first in self.segments if first >= before[-1])

    def segment_of(self, row: int) -> int | None:
        """Return the first row of the segment that has a row, if it was written, or None."""
        return max((first for first in self.segments if first <= row), default=None)

    def until(self, first: int) -> int | None:
        """Return the first row of the segment after the one that begins with ``first``, or None."""
        return min((other for other in self.segments if other > first), default=None)

    def beside(self, rows: Sequence[int], needed: int) -> Removal:
        """Return the files that can go, when these snapshots and later ones are to stay.

        ``needed``: the first row that one of them refers to. The last segment always stays.
        """
        old = [row for row in self.snapshots if row < max(rows) and row not in rows]
        oldest = min(*rows, needed - 1) + 1
        covered = [first for first, following in pairwise(self.segments) if following <= oldest]
        return Removal(tuple(old[::-1]), tuple(covered))

    def removable(self, keep: int, needed: int | None = None) -> Removal:
        """Return the files that can go, when the last ``keep`` snapshots are to stay.

        The journal stays from the oldest of these on, so that a damaged snapshot costs time and no
        more; ``needed``: the first row that it refers to, if that is an earlier one. The last
        segment always stays. Until there are ``keep`` snapshots nothing goes.
        """
        if len(self.snapshots) < max(keep, 1):
            return Removal((), ())
        old = self.snapshots[max(keep, 1) :]
        oldest = self.snapshots[max(keep, 1) - 1] + 1
        oldest = oldest if needed is None else min(oldest, needed)
        covered = [first for first, following in pairwise(self.segments) if following <= oldest]
        return Removal(old[::-1], tuple(covered))


@value
class StateIdentity:
    """The file `identity`: the run whose state a directory holds, and its shard.

    ``created`` is the time in seconds since 1970, for people. ``record``: it is the record of a
    run, with which no server goes on.
    """

    run: str
    shard: int
    shards: int
    created: float
    record: bool = False

    @property
    def origin(self) -> tuple[str, int, int]:
        """The run, the number of the shard and that of all shards."""
        return self.run, self.shard, self.shards

    def pack(self) -> bytes:
        """Return the file's bytes."""
        found = asdict(self)
        if not self.record:
            del found["record"]
        return pack_block(IDENTITY, found)

    @classmethod
    def unpack(cls, data: Buffer, name: str = IDENTITY_FILE) -> StateIdentity:
        """Return the identity that a file's bytes hold.

        Raises
        ------
        DamagedState, UsageError
            As `whole_block`.
        """
        then = "put back any copy of it, as it never changes, or begin another state"
        found = _file_fields(data, IDENTITY, name, then)
        shard, shards = (field(found, key, int, name) for key in ("shard", "shards"))
        run, created = field(found, "run", str, name), field(found, "created", float, name)
        record = field(found, "record", bool, name) if "record" in found else False
        return cls(run, shard, shards, created, record)


@value
class GenerationStart:
    """The row and the versions (of the model, of each table) at which a generation began."""

    generation: int
    row: int
    versions: tuple[int, ...]


@value
class TakenPlace:
    """The place of a follower that its standby has taken.

    ``number``: the number of a term of its own generations, which the lead chose above those of all
    that had the place before: a standby that has seen this server is fed by none of them. ``host``
    and ``port``: its address in the file of the lead (an empty host is the lead's own); 0: the one
    that the lead's settings name, or this is not the lead's file.
    """

    shard: int
    number: int
    host: str = ""
    port: int = 0


SECRET = 32
"""Bytes of a run's secret."""


@value
class GenerationFile:
    """The file `generation`: the server's generation, where the latest began, and its successor.

    `aiops.common.generations` has how they are numbered. ``superseded_by``: the generation and the
    URL, if that is known, of another server that has the run now; None: this one has it.
    ``secret``: 32 random bytes that all servers of the run share, the key of the proofs of its
    generations; empty before the first. ``predecessors``: the URLs of which one had the run before
    this server, which was its standby; they are told. ``back_to``: the row to which its next start
    goes back (of a follower, a row of its lead's journal); None: it goes on. ``led_by``: of a
    follower, the generation of its last lead, an earlier one of which it refuses; 0: it has had
    none. ``places``: of a lead, those of its followers that their standbys have taken in this term;
    of a follower, the one that it has taken itself.
    """

    generation: int
    starts: Sequence[GenerationStart] = ()
    superseded_by: tuple[int, str] | None = None
    secret: bytes = dataclasses.field(default=b"", repr=False)
    predecessors: Sequence[str] = ()
    back_to: int | None = None
    led_by: int = 0
    places: Sequence[TakenPlace] = ()

    @property
    def history(self) -> tuple[tuple[int, int], ...]:
        """The latest generations, and the row behind which each began."""
        return tuple((start.generation, start.row) for start in self.starts)

    def started(
        self,
        row: int,
        versions: Sequence[int],
        drawn: int = 0,
        *,
        promoted: bool = False,
        predecessors: Sequence[str] = (),
        places: Sequence[TakenPlace] = (),
        above: int = 0,
    ) -> GenerationFile:
        """Return the file of the next generation, which begins after a row at these versions.

        ``drawn``: a random number below `DRAWN`: servers of copies of this state are of different
        generations. ``promoted``: whether the next term begins, which has had no lead yet.
        ``predecessors``, ``places``: of a promotion; a later start has the same. A place has a term
        of its own, which may have begun. ``above``: a generation that a promotion has to be above.
        """
        number = max((place.number for place in places), default=0)
        if promoted and number:
            begun = self.newest >= number
            generation = next_start(self.newest, drawn) if begun else number + drawn
        elif promoted:
            generation = next_term(max(self.newest, above), drawn)
        else:
            generation, predecessors = next_start(self.generation, drawn), self.predecessors
            places = self.places
        start = GenerationStart(generation, row, tuple(versions))
        starts = (*self.starts, start)[-MAX_HISTORY:]
        led_by = 0 if promoted else self.led_by
        told, taken = tuple(predecessors), tuple(places)
        return GenerationFile(generation, starts, None, self.secret, told, None, led_by, taken)

    @property
    def newest(self) -> int:
        """The highest generation of which this server knows."""
        return max(self.generation, self.superseded_by[0] if self.superseded_by else 0)

    def with_place(self, place: TakenPlace) -> GenerationFile:
        """Return the file with the place of a shard, instead of an earlier one."""
        others = (each for each in self.places if each.shard != place.shard)
        return dataclasses.replace(self, places=(*others, place))

    def pack(self) -> bytes:
        """Return the file's bytes."""
        rows = [[start.generation, start.row, list(start.versions)] for start in self.starts]
        found: dict[str, Any] = {"generation": self.generation, "starts": rows}
        if self.secret:
            found["secret"] = self.secret
        if self.superseded_by is not None:
            found["superseded_by"] = [*self.superseded_by]
        if self.predecessors:
            found["predecessors"] = [*self.predecessors]
        if self.back_to is not None:
            found["back_to"] = self.back_to
        if self.led_by:
            found["led_by"] = self.led_by
        if self.places:
            found["places"] = [[p.shard, p.number, p.host, p.port] for p in self.places]
        return pack_block(GENERATION, found)

    @classmethod
    def unpack(cls, data: Buffer, name: str = GENERATION_FILE) -> GenerationFile:
        """Return the generations that a file's bytes hold.

        Raises
        ------
        DamagedState, UsageError
            As `whole_block`.
        """
        then = "put back a copy of the whole folder, or begin another state"
        found = _file_fields(data, GENERATION, name, then)
        starts = []
        for row in field(found, "starts", list, name):
            if type(row) is not list or list(map(type, row)) != [int, int, list]:
                raise DamagedState(f"{name} is damaged: a start is [generation, row, versions]")
            if any(type(version) is not int for version in row[2]):
                raise DamagedState(f"{name} is damaged: a version is an integer")
            starts.append(GenerationStart(row[0], row[1], tuple(row[2])))
        other = None
        if "superseded_by" in found:
            row = field(found, "superseded_by", list, name)
            if list(map(type, row)) != [int, str]:
                raise DamagedState(f"{name} is damaged: a successor is [generation, URL]")
            other = row[0], row[1]
        secret = field(found, "secret", bytes, name) if "secret" in found else b""
        if len(secret) not in (0, SECRET):
            raise DamagedState(f"{name} is damaged: a secret has {SECRET} bytes")
        told = field(found, "predecessors", list, name) if "predecessors" in found else []
        if any(type(url) is not str for url in told):
            raise DamagedState(f"{name} is damaged: a predecessor is a URL")
        number = field(found, "generation", int, name)
        back_to = field(found, "back_to", int, name) if "back_to" in found else None
        led_by = field(found, "led_by", int, name) if "led_by" in found else 0
        rows = field(found, "places", list, name) if "places" in found else []
        if any(type(row) is not list or list(map(type, row)) != _PLACE for row in rows):
            raise DamagedState(f"{name} is damaged: a place is [shard, number, host, port]")
        places = tuple(TakenPlace(*row) for row in rows)
        return cls(number, tuple(starts), other, secret, tuple(told), back_to, led_by, places)


def foreign(name: str, found: tuple[str, int, int], mine: tuple[str, int, int]) -> str:
    """Return the reason for which a file is none of a state's; empty if it is one.

    Parameters
    ----------
    name
        The file's name, or of what else has such a head.
    found, mine
        The run, the number of the shard and that of all shards, of the file and of the state.
    """
    if found == mine:
        return ""
    return f"{name} is of {_place(*found)}, and not of {_place(*mine)}"


def _place(run: str, shard: int, shards: int) -> str:
    return f"run {run}" if shards == 1 else f"shard {shard} of {shards} of run {run}"


def _file_fields(data: Buffer, magic: bytes, name: str, then: str) -> dict[str, object]:
    """Return the map that a file of one block holds; ``then``: what to do if it is damaged."""
    try:
        found = whole_block(data, magic, name)
        if type(found) is not dict:
            raise DamagedState(f"{name} is damaged: it holds no map", file=name)
        return found
    except DamagedState as error:
        text = f"{error}: {then} with what `aiops state export` writes"
        raise DamagedState(text, **error.details) from None
