"""Copies of a state in a store: their names, which of them is to be gone on with, which can go.

::

    copy-G-R        the manifest of a copy: written last, with the checksum of what it is of
    snapshot-G-R    the bytes of a snapshot, of row R, as a server of generation G had it
    begun-G         generation G of the run has begun, from whatever state

G and R have 20 decimal digits. A store may show an object that was written in part (a client that
fails midway may complete it), so nothing counts that no whole manifest names with its size and its
checksum. A copy that a later generation has not gone on from, since that began before its row, is
of a history that was given up.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from aiops.common.frozen import value
from aiops.errors import DamagedState, UsageError
from aiops.state.blocks import Buffer, pack_block, whole_block
from aiops.state.directory import GenerationFile, StateIdentity
from aiops.state.plain import field

KEPT = 2
"""Copies that stay: if the newest is damaged, the one before it is as good as it was."""

_COPY, _BEGUN = b"aiopsCP\n", b"aiopsCB\n"
_NUMBERS = ("generation", "row", "version", "nbytes")
_NAME = re.compile(r"(copy|snapshot|begun)-(\d{20})(?:-(\d{20}))?")


def copy_name(generation: int, row: int) -> str:
    """Return the name of the manifest of a copy."""
    return f"copy-{generation:020d}-{row:020d}"


def data_name(generation: int, row: int) -> str:
    """Return the name of the snapshot that a copy is of."""
    return f"snapshot-{generation:020d}-{row:020d}"


def begun_name(generation: int) -> str:
    """Return the name of the mark of a generation."""
    return f"begun-{generation:020d}"


@value
class BegunMark:
    """The generations of a run that have begun: the files `identity` and `generation`, as bytes."""

    identity: bytes
    generations: bytes

    @property
    def file(self) -> GenerationFile:
        """The generations."""
        return GenerationFile.unpack(self.generations)

    def pack(self) -> bytes:
        """Return the object's bytes."""
        return pack_block(_BEGUN, {"identity": self.identity, "generations": self.generations})

    @classmethod
    def unpack(cls, data: Buffer, name: str) -> BegunMark:
        """Return the mark that an object's bytes hold.

        Raises
        ------
        DamagedState, UsageError
            As `whole_block`.
        """
        found = _fields(data, _BEGUN, name)
        return cls(field(found, "identity", bytes, name), field(found, "generations", bytes, name))


@value
class CopyManifest:
    """The manifest of a copy: what it is of, and the size and SHA-256 of the snapshot.

    ``version``: that of the model, for people.
    """

    generation: int
    row: int
    version: int
    nbytes: int
    sha256: bytes
    begun: BegunMark

    def pack(self) -> bytes:
        """Return the object's bytes."""
        found: dict[str, Any] = {name: getattr(self, name) for name in _NUMBERS}
        return pack_block(_COPY, {**found, "sha256": self.sha256, "begun": self.begun.pack()})

    @classmethod
    def unpack(cls, data: Buffer, name: str) -> CopyManifest:
        """Return the manifest that an object's bytes hold.

        Raises
        ------
        DamagedState, UsageError
            As `whole_block`.
        """
        found = _fields(data, _COPY, name)
        generation, row, version, nbytes = (field(found, key, int, name) for key in _NUMBERS)
        begun = BegunMark.unpack(field(found, "begun", bytes, name), name)
        sha256 = field(found, "sha256", bytes, name)
        made = cls(generation, row, version, nbytes, sha256, begun)
        if name != copy_name(made.generation, made.row):
            raise DamagedState(f"{name} is damaged: it is of another copy", file=name)
        return made


class StoreListing:
    """The objects of a store.

    Parameters
    ----------
    sizes
        Their bytes, by name.

    Attributes
    ----------
    copies
        Generation and row of each manifest, the newest first.
    begun
        The generations that have a mark, the newest first.
    """

    def __init__(self, sizes: Mapping[str, int]) -> None:
        self._sizes = sizes
        found: dict[str, list[tuple[int, int]]] = {"copy": [], "snapshot": [], "begun": []}
        for name in sizes:
            parts = _NAME.fullmatch(name)
            if parts and (parts[1] == "begun") == (parts[3] is None):
                found[parts[1]].append((int(parts[2]), int(parts[3] or 0)))
        self.copies = tuple(sorted(found["copy"], reverse=True))
        self._data = sorted(found["snapshot"])
        self.begun = tuple(sorted((generation for generation, _ in found["begun"]), reverse=True))

    def is_whole(self, manifest: CopyManifest) -> bool:
        """Return whether the snapshot of a copy is there, with its size."""
        name = data_name(manifest.generation, manifest.row)
        return self._sizes.get(name) == manifest.nbytes

    def removable(self, begun: GenerationFile, keep: int = KEPT) -> list[str]:
        """Return the objects that can go, in the order in which they are to go.

        The last ``keep`` copies of the run's history stay, and the newest mark; what a later server
        has written is its own. A manifest goes before its snapshot, so that none is left that lacks
        it. Snapshots without a manifest that are newer than all copies are being written.
        """
        mine = [each for each in self.copies if each[0] <= begun.generation]
        kept = [each for each in mine if goes_on_from(each[1], each[0], begun)][:keep]
        old = [each for each in mine if each not in kept]
        newest = kept[0] if kept else (0, 0)
        halves = [each for each in self._data if each not in self.copies and each < newest]
        names = [copy_name(*each) for each in reversed(old)]
        names += [data_name(*each) for each in sorted({*old, *halves})]
        return names + [begun_name(generation) for generation in reversed(self.begun[1:])]


def goes_on_from(row: int, generation: int, begun: GenerationFile) -> bool:
    """Return whether a run's history has the state of a row, as a generation had it.

    It has not if a later generation began before that row: the server went back, or another server
    went on from an older state.
    """
    return all(start.row >= row for start in begun.starts if start.generation > generation)


def latest(marks: Iterable[BegunMark]) -> BegunMark | None:
    """Return the mark of the latest generation, or None."""
    return max(marks, key=lambda mark: mark.file.generation, default=None)


def prefers_store(
    local: tuple[StateIdentity, GenerationFile] | None, mark: BegunMark | None, where: str
) -> bool:
    """Return whether a start has to go on from the store, and not from its folder.

    The later generation is gone on with: whatever the folder has beyond it was given up when that
    began. Of the same generation the folder has more, as copies are taken of it.

    Parameters
    ----------
    local
        Of the folder; None: it holds no state.
    mark
        The latest of the store, or None.
    where
        The store, for errors.

    Raises
    ------
    UsageError
        When the two are of different runs.
    """
    if mark is None or local is None:
        return mark is not None
    theirs = StateIdentity.unpack(mark.identity)
    identity, generations = local
    if theirs.origin != identity.origin:
        raise UsageError(
            f"{where} has copies of run {theirs.run}, and the folder of --state holds run"
            f" {identity.run}: name another --state-copy, or another --state"
        )
    return mark.file.generation > generations.generation


def candidates(
    manifests: Sequence[CopyManifest], listing: StoreListing, mark: BegunMark
) -> list[CopyManifest]:
    """Return the copies that a start can go on from, the best first."""
    begun = mark.file
    found = [
        each
        for each in manifests
        if listing.is_whole(each) and goes_on_from(each.row, each.generation, begun)
    ]
    return sorted(found, key=lambda each: (each.generation, each.row), reverse=True)


def _fields(data: Buffer, magic: bytes, name: str) -> dict[str, Any]:
    found = whole_block(data, magic, name)
    if type(found) is not dict:
        raise DamagedState(f"{name} is damaged: it holds no map", file=name)
    return found
