"""Copy a state to a store and back, as a process of its own: ``python -m ... fetch FOLDER URL``.

A server has this done by a process for each copy: the store's client (`pyarrow.fs`) waits as long
as it likes, and nothing but the end of its process makes it give up; it is loaded while it is
needed, and takes no time from the server's event loop.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import sys
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

from aiops.errors import AiopsError, DamagedState, UsageError
from aiops.state.copies import (
    BegunMark,
    CopyManifest,
    StoreListing,
    begun_name,
    candidates,
    copy_name,
    data_name,
    goes_on_from,
    latest,
    prefers_store,
)
from aiops.state.directory import (
    GENERATION_FILE,
    IDENTITY_FILE,
    LOCK,
    PART,
    GenerationFile,
    StateIdentity,
    StateListing,
    snapshot_name,
)
from aiops.state.snapshot_file import SnapshotFile

_PIECE = 4 << 20  # bytes that are read and written at once
_SMALL = 1 << 20  # bytes of a manifest, at most


class CopyStore:
    """A folder of a store that `pyarrow.fs` knows.

    Parameters
    ----------
    url
        ``s3://bucket/path``, ``gs://bucket/path``, ``file:///path``...
    moved
        Called when a piece of an object has been read or written.

    Raises
    ------
    UsageError
        When it is none, or there is no pyarrow.
    """

    def __init__(self, url: str, moved: Callable[[], object] = lambda: None) -> None:
        try:
            import pyarrow
            import pyarrow.fs
        except ImportError:
            raise UsageError("--state-copy needs pyarrow: pip install 'aiops-ps[copies]'") from None
        try:
            self._files, path = pyarrow.fs.FileSystem.from_uri(url)
        except (pyarrow.ArrowException, OSError, ValueError) as error:
            raise UsageError(f"it is no store: {error}") from None
        self._moved = moved
        self._path: str = path.rstrip("/")
        self._selector = pyarrow.fs.FileSelector(self._path, allow_not_found=True)
        self._no_file = pyarrow.fs.FileType.NotFound
        bucket = self._path.partition("/")[0]
        if bucket:  # else it is a local path
            if self._files.get_file_info(bucket).type == self._no_file:
                raise UsageError(f"there is no bucket {bucket!r}")
        else:
            self._files.create_dir(self._path, recursive=True)

    def listing(self) -> StoreListing:
        """Return its objects."""
        infos = self._files.get_file_info(self._selector)
        return StoreListing({info.base_name: int(info.size or 0) for info in infos})

    def get(self, name: str) -> bytes:
        """Return the bytes of a small object."""
        with self._files.open_input_stream(f"{self._path}/{name}") as stream:
            found: bytes = stream.read(_SMALL)
            return found

    def pieces(self, name: str) -> Iterator[bytes]:
        """Yield the bytes of an object."""
        with self._files.open_input_stream(f"{self._path}/{name}") as stream:
            while piece := stream.read(_PIECE):
                self._moved()
                yield piece

    def put(self, name: str, pieces: Iterable[bytes]) -> None:
        """Write an object."""
        with self._files.open_output_stream(f"{self._path}/{name}") as stream:
            for piece in pieces:
                stream.write(piece)
                self._moved()

    def remove(self, name: str) -> None:
        """Remove an object, if it is there."""
        with contextlib.suppress(FileNotFoundError):
            self._files.delete_file(f"{self._path}/{name}")

    def all_of(
        self, names: list[str], unpack: Callable[[bytes, str], Any], say: Callable[[str], object]
    ) -> list[Any]:
        """Return these small objects; one that is damaged, or has just gone, is left out."""
        found = []
        for name in names:
            try:
                found.append(unpack(self.get(name), name))
            except (DamagedState, FileNotFoundError) as error:
                say(f"{name} is not used: {error}")
        return found


class _Hashed:
    """Passes pieces on, with their number of bytes and their SHA-256."""

    def __init__(self, pieces: Iterator[bytes]) -> None:
        self._pieces, self._digest, self.nbytes = pieces, hashlib.sha256(), 0

    def __iter__(self) -> Iterator[bytes]:
        for piece in self._pieces:
            self._digest.update(piece)
            self.nbytes += len(piece)
            yield piece

    @property
    def sha256(self) -> bytes:
        return self._digest.digest()


def fetch(folder: Path, store: CopyStore, where: str) -> dict[str, Any]:
    """Bring a folder to the newest whole copy, unless it holds a state as new.

    Returns
    -------
    dict
        ``row``: that of the copy (0: there was none yet); empty: the folder stays as it is.
        ``notes``: sentences for the log.

    Raises
    ------
    AiopsError, OSError
        When it cannot be told, or no copy is whole.
    """
    notes = list[str]()
    listing = store.listing()
    names = [begun_name(generation) for generation in listing.begun[:1]]
    marks = store.all_of(names, BegunMark.unpack, notes.append)
    names = [copy_name(*each) for each in listing.copies]
    manifests = store.all_of(names, CopyManifest.unpack, notes.append)
    mark = latest([*marks, *(manifest.begun for manifest in manifests)])
    if not prefers_store(_local(folder), mark, where):
        return {"notes": notes}
    assert mark is not None, "it is preferred"
    found = candidates(manifests, listing, mark)
    if listing.copies and not found:
        raise DamagedState(
            f"{where} has {len(listing.copies)} copies, and none from which a start could go on:"
            f" {'; '.join(notes) or 'their snapshots are not whole'}"
        )
    aside = _set_aside(folder)
    if aside is not None:
        notes.append(f"what was in {folder}, of an earlier generation, is in {aside}")
    row = _download(folder, store, found, notes, where)
    _write(folder / IDENTITY_FILE, [mark.identity])
    _write(folder / GENERATION_FILE, [mark.generations])  # last: now it is a state as new
    return {"row": row, "notes": notes}


def _local(folder: Path) -> tuple[StateIdentity, GenerationFile] | None:
    """Return whose state a folder holds, and its generations; None: it holds none."""
    try:
        identity = StateIdentity.unpack((folder / IDENTITY_FILE).read_bytes())
    except FileNotFoundError:
        return None
    try:
        return identity, GenerationFile.unpack((folder / GENERATION_FILE).read_bytes())
    except FileNotFoundError:
        return identity, GenerationFile(0)


def _set_aside(folder: Path) -> Path | None:
    """Move a folder's files into one beside it; return that, or None if there were no files."""
    folder.mkdir(parents=True, exist_ok=True)
    names = [name for name in os.listdir(folder) if name != LOCK]
    if not any(not name.endswith(PART) for name in names):
        return None
    number = 1
    while (aside := folder.with_name(f"{folder.name}.aside-{number}")).exists():
        number += 1
    aside.mkdir()
    for name in names:
        (folder / name).rename(aside / name)
    return aside


def _download(
    folder: Path, store: CopyStore, found: list[CopyManifest], notes: list[str], where: str
) -> int:
    """Download the first of these copies that is whole; return its row, 0 if there are none."""
    for each in found:
        name = data_name(each.generation, each.row)
        part, hashed = folder / f"fetched{PART}", _Hashed(store.pieces(name))
        _write_part(part, hashed)
        if hashed.sha256 == each.sha256:
            part.rename(folder / snapshot_name(each.row))
            return each.row
        notes.append(f"{name} is not what was written: its checksum is wrong")
    if found:
        raise DamagedState(f"{where} has no copy that is whole: {'; '.join(notes)}")
    return 0


def _write_part(path: Path, pieces: Iterable[bytes]) -> None:
    with path.open("wb") as file:
        for piece in pieces:
            file.write(piece)
        file.flush()
        os.fsync(file.fileno())


def _write(path: Path, pieces: Iterable[bytes]) -> None:
    """Replace a file: at any moment it is the old one or the new one."""
    part = path.with_name(f"{path.name}{PART}")
    _write_part(part, pieces)
    part.rename(path)
    descriptor = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def send(folder: Path, store: CopyStore, where: str) -> dict[str, Any]:
    """Have the store know a folder's generation, and hold its newest snapshot.

    Returns
    -------
    dict
        ``version``: that of the newest copy's model, if there is one. ``nbytes``: of what was sent.

    Raises
    ------
    AiopsError, OSError
        When it cannot be done, or another server has the run.
    """
    local = _local(folder)
    if local is None:
        raise UsageError(f"{folder} holds no state")
    generations = local[1]
    # As bytes that are whole: a server replaces these files, and never writes into them.
    mark = BegunMark((folder / IDENTITY_FILE).read_bytes(), generations.pack())
    listing = store.listing()
    if listing.begun[:1] > (generations.generation,):
        raise UsageError(
            f"a later server of run {local[0].run} has begun from a copy: this one's are not taken"
        )
    if generations.generation not in listing.begun:
        store.put(begun_name(generations.generation), [mark.pack()])
    copied, nbytes = _send_newest(folder, store, listing, mark), 0
    if copied is not None:
        nbytes = copied.nbytes
        listing = store.listing()
    for name in listing.removable(generations):
        store.remove(name)
    if copied is None and listing.copies:
        name = copy_name(*listing.copies[0])
        copied = CopyManifest.unpack(store.get(name), name)
    return {"nbytes": nbytes, **({} if copied is None else {"version": copied.version})}


def _send_newest(
    folder: Path, store: CopyStore, listing: StoreListing, mark: BegunMark
) -> CopyManifest | None:
    """Send a folder's newest snapshot; return its manifest, None: there is nothing new."""
    generations = mark.file
    while True:
        rows = StateListing(os.listdir(folder)).snapshots
        if not rows:
            return None
        row = rows[0]
        for generation, its in listing.copies:
            if its == row and goes_on_from(row, generation, generations):
                return None
        try:
            file = (folder / snapshot_name(row)).open("rb")
        except FileNotFoundError:  # a newer one has come, and this one has gone
            continue
        with file:
            read = partial(_read_at, file.fileno())
            head = SnapshotFile(read, os.fstat(file.fileno()).st_size, file.name).header
            hashed = _Hashed(iter(partial(file.read, _PIECE), b""))
            store.put(data_name(generations.generation, row), hashed)
            if not _is_at(folder / snapshot_name(row), file.fileno()):
                continue  # a server writes over a snapshot that is not needed any more
        version = head.versions[0] if head.versions else 0
        made = CopyManifest(
            generations.generation, row, version, hashed.nbytes, hashed.sha256, mark
        )
        store.put(copy_name(made.generation, row), [made.pack()])
        return made


def _read_at(descriptor: int, offset: int, into: memoryview) -> int:
    return os.preadv(descriptor, [into], offset)


def _is_at(path: Path, descriptor: int) -> bool:
    """Return whether an open file still has this name."""
    try:
        return os.path.samestat(path.stat(), os.fstat(descriptor))
    except FileNotFoundError:
        return False


def main() -> None:
    """Do what the arguments say.

    It prints a dot for each piece that moves, then a line of JSON: the result, or the error's text.
    """
    order, folder, url, where = sys.argv[1:]
    os.nice(10)
    status = 0
    try:
        store = CopyStore(url, partial(os.write, 1, b"."))
        done = {"fetch": fetch, "send": send}[order](Path(folder), store, where)
    except (AiopsError, OSError) as error:
        done, status = {"error": str(error)}, 1
    print(f"\n{json.dumps(done)}", flush=True)
    os._exit(status)  # the store's client may have threads that wait


if __name__ == "__main__":
    main()
