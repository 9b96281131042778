"""Read a state directory: its files, what is whole of each, and the state that they lead to."""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import count, takewhile
from pathlib import Path
from typing import Any

from aiops.algorithms import find
from aiops.engine.captured_evaluation import CapturedEvaluation
from aiops.engine.events import Options
from aiops.errors import DamagedState, UsageError
from aiops.model.arena import Arena
from aiops.model.layout import Layout
from aiops.model.placement import Placement
from aiops.net.environment import CURRENT_ENVIRONMENT
from aiops.serving.config import shard_folder
from aiops.serving.state.snapshot_reader import is_snapshot, opened_snapshot
from aiops.state.directory import (
    GENERATION_FILE,
    IDENTITY_FILE,
    GenerationFile,
    StateIdentity,
    StateListing,
    foreign,
    journal_name,
    snapshot_name,
)
from aiops.state.frames import END, HEAD, SegmentScan, never_reached
from aiops.state.journal_scan import called_synced
from aiops.state.snapshot_file import SnapshotFile, SnapshotHeader

_SMALL = 1 << 20  # bytes: more than `identity` and `generation` can have


@dataclass(slots=True)
class FileStatus:
    """A file of a state, and what is whole of it.

    ``first`` and ``last`` are rows: of a snapshot only the last. ``why`` is empty for a whole file.
    ``ends``: rows between this segment and the next are missing, so the journal ends in this one.
    ``gap``: the first and the last of such rows, if a later snapshot has what they did.
    """

    name: str
    nbytes: int
    kind: str
    generation: int | None = None
    first: int | None = None
    last: int | None = None
    versions: list[int] | None = None
    torn: int = 0
    why: str = ""
    ends: bool = False
    gap: tuple[int, int] | None = None


def is_one_file(path: Path) -> bool:
    """Return whether a path is a snapshot file, and not a directory.

    Raises
    ------
    UsageError
        When it is another file.
    """
    if not path.is_file():
        return False
    try:
        if is_snapshot(path):
            return True
    except OSError as error:
        raise UsageError(f"{path}: {error.strerror}") from None
    raise UsageError(
        f"{path} is neither the --state of a server nor a snapshot file", damaged=str(path)
    )


def shard_folders(path: Path) -> list[Path]:
    """Return the folders of a run's shards, the lead's first; empty: it is one server's state."""
    numbered = (path / shard_folder(shard) for shard in count()) if path.is_dir() else ()
    return list(takewhile(Path.is_dir, numbered))


def exported_set(path: Path, row: int | None) -> tuple[dict[str, Any], int, int]:
    """Return the model of the newest moment of which all servers of it have a snapshot.

    Parameters
    ----------
    path
        The folder with those of all shards.
    row
        The row of the lead's journal that the snapshots are to be of. None: of the newest set.

    Returns
    -------
    tuple
        Its tensors by name, the row, and the version.

    Raises
    ------
    UsageError
        When there is no such set.
    DamagedState
        When a snapshot of it is damaged.
    """
    lead, *followers = map(StateFolder, shard_folders(path))
    cuts = [each.cuts() for each in followers]
    for cut in lead.listing.snapshots if row is None else (row,):
        try:
            found = _model_at(lead, followers, [each.get(cut) for each in cuts], cut)
        except _NoHead:
            continue
        if found is not None:
            return found, cut, lead.versions(cut)[0]
    of = "of one moment" if row is None else f"of row {row:,} of the lead's journal"
    raise UsageError(
        f"{path} has no snapshots {of} on all servers of the model (each has its first soon after"
        " its start): start the servers with this --state, which go back to the newest moment that"
        " all have, and with --save"
    )


class _NoHead(DamagedState):
    """The head of the lead's snapshot is damaged: an earlier set is to be looked for."""


def _model_at(
    lead: StateFolder, followers: Sequence[StateFolder], rows: Sequence[int | None], cut: int
) -> dict[str, Any] | None:
    """Return the tensors of a set of snapshots; None: it is not whole.

    ``rows``: of the followers' snapshots, by shard; None where there is none.
    """
    try:
        with lead.snapshot(cut) as file:
            header = file.header
    except DamagedState as error:
        raise _NoHead(str(error)) from None
    layout = described_layout(header)
    options = Options(**header.settings["options"])
    placement, arena = Placement.even(layout, options.shards, options.shard_bytes), Arena(layout)
    check_folders(lead.path.parent, followers, placement)
    evaluation = evaluation_of(header, layout)
    spread = options.spread_tables and bool(header.owners["model"][1])
    if any(
        rows[n - 1] is None for n in (range(1, len(placement)) if spread else placement.used[1:])
    ):
        return None
    for shard in placement.used:
        folder, row = (followers[shard - 1], rows[shard - 1]) if shard else (lead, cut)
        assert row is not None, "it was looked for"
        with folder.snapshot(row) as file:
            name = str(folder.path / snapshot_name(row))
            why = foreign(name, file.header.origin, (header.run, shard, options.shards))
            if why or file.header.versions[:1] != header.versions[:1]:
                raise DamagedState(why or f"{name} is of another version than the lead's")
            low, high = placement.edges[shard : shard + 2]
            data = file.array("params").reshape(-1).view("uint8")
            if len(data) < high - low:
                raise DamagedState(f"{name} is damaged: its parameters have {len(data):,} bytes")
            arena.data[low:high] = data[: high - low]
            if evaluation is not None and low < high:
                mine = Arena(placement.layouts[shard], arena.data[low:high])
                evaluation.move(mine, file.array, int(placement.firsts[shard]))
    return arena.views


def check_folders(path: Path, followers: Sequence[StateFolder], placement: Placement) -> None:
    """Check that all followers that hold a part of a model have their folders beside the lead's.

    Raises
    ------
    UsageError
        When one has not.
    """
    for shard in placement.used[1:]:
        if shard > len(followers):
            raise UsageError(
                f"{path} lacks the folder of shard {shard} of {len(placement)}: copy it from its"
                f" host to {path / shard_folder(shard)}, of the same time"
            )


def evaluation_of(header: SnapshotHeader, layout: Layout) -> CapturedEvaluation | None:
    """Return what brings a snapshot's parameters to where the model is evaluated.

    None: they are there already; or the policy is not installed here, so they stay as workers are
    sent them.

    Raises
    ------
    DamagedState
        When it has not what that takes.
    """
    settings = dict(header.settings.get("algorithm", {}))
    policy = str(settings.pop("policy", ""))
    if ":" in policy:  # a file to be exported is not what decides which module is imported
        return None
    try:
        algorithm = find(policy).make(settings)
    except UsageError:
        return None
    if algorithm.rule().offset is None:
        return None
    try:
        return CapturedEvaluation(algorithm, header, layout)
    except (LookupError, TypeError, ValueError) as error:
        raise DamagedState(f"the snapshot's values of its server are none: {error!r}") from None


def described_layout(header: SnapshotHeader) -> Layout:
    """Return the layout of the whole model of a snapshot.

    Raises
    ------
    UsageError
        When it has none.
    DamagedState
        When it is none.
    """
    model = header.owners.get("model")
    if model is None:
        raise UsageError("the snapshot has no parameters: no model was defined, or it is no server")
    try:
        tensors, _tables = model
        return Layout([(name, dtype, shape) for name, dtype, shape in tensors], empty=True)
    except (TypeError, ValueError) as error:
        raise DamagedState(f"the snapshot's model is damaged: {error}") from None


def snapshot_status(path: Path, *, thorough: bool) -> dict[str, Any]:
    """Return what a snapshot file on its own is; ``why`` is empty for a whole file.

    ``thorough``: compare all bytes with their checksums, and not only header and footer.

    Raises
    ------
    UsageError
        When it cannot be read.
    """
    found: dict[str, Any] = {"file": str(path), "kind": None, "row": None, "versions": None}
    found |= {"arrays": 0, "nbytes": path.stat().st_size, "wrote": {}, "why": ""}
    try:
        with opened_file(path) as file:
            header = file.header
            found |= {"kind": header.kind, "row": header.row, "versions": list(header.versions)}
            found |= {"arrays": len(file.arrays), "wrote": dict(header.wrote)}
            if thorough:
                file.verify(CURRENT_ENVIRONMENT.get().parallel_map)
    except UsageError as error:
        found["why"] = str(error)
    return found


@contextmanager
def opened_file(path: Path) -> Iterator[SnapshotFile]:
    """Open a snapshot file.

    Raises
    ------
    UsageError
        When it cannot be read.
    DamagedState
        When it is no whole snapshot.
    """
    try:
        with opened_snapshot(path) as file:
            yield file
    except OSError as error:
        raise UsageError(f"{path}: {error.strerror}") from None


class StateFolder:
    """A state directory, for reading.

    Parameters
    ----------
    path
        The directory. A server may be using it: what it adds meanwhile is not seen.

    Raises
    ------
    UsageError
        When it holds no state.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            with os.scandir(path) as entries:
                self.sizes = {each.name: each.stat().st_size for each in entries if each.is_file()}
        except OSError as error:
            raise UsageError(f"{path}: {error.strerror}") from None
        self.listing = StateListing(self.sizes)
        if not (IDENTITY_FILE in self.sizes or self.listing.snapshots or self.listing.segments):
            if shards := shard_folders(path):
                names = ", ".join(str(each) for each in shards)
                raise UsageError(f"{path} is the --state of several shards: give one of {names}")
            raise UsageError(
                f"{path} is not the --state of a server: it has none of its files",
                damaged=str(path),
            )

    def identity(self) -> StateIdentity:
        """Return the run whose state it is."""
        return StateIdentity.unpack(self._small(IDENTITY_FILE))

    def generations(self) -> GenerationFile:
        """Return the generations so far."""
        return GenerationFile.unpack(self._small(GENERATION_FILE))

    def _small(self, name: str) -> bytes:
        try:
            with (self.path / name).open("rb") as file:
                return file.read(_SMALL)
        except OSError as error:
            raise UsageError(f"{self.path / name}: {error.strerror}") from None

    @contextmanager
    def segment(self, first: int, *, payloads: bool = True) -> Iterator[SegmentScan]:
        """Open the segment that begins with a row; its frames are of use until it is closed."""
        name = journal_name(first)
        with self._open(name) as file:
            if not os.fstat(file).st_size:
                raise DamagedState(f"{name} is damaged: it is empty", file=name)
            until = self.listing.until(first)
            rest = [other for other in self.listing.segments if other > first]
            called = partial(called_synced, self._mapped, rest)
            yield SegmentScan(
                *(_mapping(file), name),
                first=first,
                until=until,
                called_synced=called,
                payloads=payloads,
            )

    def _mapped(self, name: str) -> memoryview:
        with self._open(name) as file:
            return _mapping(file)

    @contextmanager
    def snapshot(self, row: int) -> Iterator[SnapshotFile]:
        """Open the snapshot of a row."""
        with opened_file(self.path / snapshot_name(row)) as file:
            yield file

    @contextmanager
    def _open(self, name: str) -> Iterator[int]:
        try:
            file = os.open(self.path / name, os.O_RDONLY)
        except OSError as error:
            raise UsageError(f"{self.path / name}: {error.strerror}") from None
        try:
            yield file
        finally:
            os.close(file)

    def cuts(self) -> dict[int, int]:
        """Return the rows of a follower's snapshots, by the row of the lead's that each is of."""
        found = dict[int, int]()
        for row in self.listing.snapshots:
            try:
                with self.snapshot(row) as file:
                    cut = file.header.owners.get("cut")
            except DamagedState:
                continue
            if type(cut) is int:
                found.setdefault(cut, row)
        return found

    def versions(self, row: int) -> list[int]:
        """Return the versions of a snapshot."""
        with self.snapshot(row) as file:
            return [*file.header.versions]

    def newest(self) -> int | None:
        """Return the row of the newest snapshot whose head is whole, or None."""
        for row in self.listing.snapshots:
            try:
                with self.snapshot(row):
                    return row
            except DamagedState:
                continue
        return None

    def files(self, *, thorough: bool) -> Iterator[FileStatus]:
        """Yield the status of each snapshot and each segment, the oldest first.

        ``thorough``: compare all bytes with their checksums, and not only the heads of files and
        the rows.
        """
        origin = self.identity().origin
        for row in reversed(self.listing.snapshots):
            yield self._snapshot_status(row, origin, thorough)
        for first in self.listing.segments:
            yield self._segment_status(first, origin, thorough)

    def _snapshot_status(
        self, row: int, origin: tuple[str, int, int], thorough: bool
    ) -> FileStatus:
        name = snapshot_name(row)
        found = FileStatus(name, self.sizes[name], "snapshot", last=row)
        try:
            with self.snapshot(row) as file:
                found.generation = file.header.generation
                found.versions = list(file.header.versions)
                found.why = foreign(name, file.header.origin, origin)
                if file.header.row != row:
                    found.why = f"{name} is of row {file.header.row:,}"
                if thorough:
                    file.verify(CURRENT_ENVIRONMENT.get().parallel_map)
        except UsageError as error:
            found.why = str(error)
        return found

    def _segment_status(
        self, first: int, origin: tuple[str, int, int], thorough: bool
    ) -> FileStatus:
        name = journal_name(first)
        found = FileStatus(name, self.sizes[name], "journal", first=first)
        try:
            if first != self.listing.segments[0] and never_reached(self._mapped(name), first):
                rest = [other for other in self.listing.segments if other > first]
                if called_synced(self._mapped, rest, first) is None:
                    found.last, found.ends, found.torn = first - 1, True, HEAD
                    return found
            with self.segment(first, payloads=thorough) as scan:
                found.generation, found.last = scan.head.generation, first - 1
                found.why = foreign(name, scan.head.origin, origin)
                for frame in scan:
                    found.last = frame.number
                found.torn, found.ends = scan.torn, scan.short
        except UsageError as error:
            found.gap = self.gap_of(first, error)
            found.ends, found.why = found.gap is not None, "" if found.gap else str(error)
        return found

    def gap_of(self, first: int, error: UsageError) -> tuple[int, int] | None:
        """Return the rows that a segment lacks, if that is no damage: a later snapshot has them.

        A journal ends when its disk is full. When there is room again, another one begins, behind a
        snapshot: what lies between was never journalled.

        Parameters
        ----------
        first
            The first row of the segment.
        error
            The one that the reading of its rows has raised.

        Returns
        -------
        tuple or None
            The first and the last of these rows; None: the segment is damaged.
        """
        until, found = self.listing.until(first), error.details
        if until is None or found.get("later", 0) < until:  # also if its own rows tell
            return None
        row, at = found["row"], found["at"]
        if any(self._mapped(journal_name(first))[at : at + len(END)]) or not self._covered(until):
            return None
        return row, until - 1

    def _covered(self, row: int) -> bool:
        """Return whether a snapshot whose head is whole has all rows before this one."""
        newest = self.newest()
        return newest is not None and newest >= row - 1

    def outcome(self, files: list[FileStatus]) -> dict[str, Any]:
        """Return the state that a server would resume with, from the status of all files.

        Its keys are ``snapshot`` (a row, or None for the empty state), ``versions``, ``row`` (the
        newest), ``void`` (the names of segments that follow rows that are lost), and ``why``: the
        reason that there is none, or an empty text.
        """
        whole = [each for each in files if each.kind == "snapshot" and not each.why]
        base = whole[-1] if whole else None
        start = base.last if base is not None and base.last is not None else 0
        found: dict[str, Any] = {"snapshot": start if whole else None, "row": start, "why": ""}
        found["void"] = []
        found["versions"] = base.versions if base is not None else None
        if not whole and not self.listing.segments:
            return found | {"why": "no snapshot is whole, and there is no journal"}
        try:
            needed = self.listing.segments_after(start)
        except DamagedState as error:
            return found | {"why": str(error)}
        ended = False
        for each in files:
            if each.kind == "journal" and each.first in needed:
                if ended:
                    found["void"].append(each.name)
                    continue
                found["row"] = max(found["row"], each.last or 0)
                found["why"] = found["why"] or each.why
                ended = each.ends
        return found


def _mapping(file: int) -> memoryview:
    """Return a file's bytes; the mapping is closed when the last view of it is gone."""
    if not os.fstat(file).st_size:
        return memoryview(b"")
    return memoryview(mmap.mmap(file, 0, access=mmap.ACCESS_READ))
