"""Share memory between processes: anonymous, sealed, freed with its last user.

A `Segment` has no name. A process that receives its file descriptor, beside a message over a Unix
socket, can map it, and only read it: the seal ``F_SEAL_FUTURE_WRITE`` forbids every writable shared
mapping and every write but those of the mapping that was there before, also after the descriptor
has been reopened through ``/proc``. The system frees the memory when the last mapping and
descriptor are closed, also by the death of a process. Since it cannot shrink, no access to a
mapping can fault.

A fork gets a private copy of each segment, as of all other memory.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import weakref
from typing import Any, Protocol

import numpy as np

from aiops.common import forks
from aiops.model.arena import Arena, aligned
from aiops.model.layout import Bytes, Layout

_SIZE_SEALS = ("F_SEAL_SHRINK", "F_SEAL_GROW")
_FUTURE_WRITE = 0x10  # F_SEAL_FUTURE_WRITE, which `fcntl` has from Python 3.14 on; Linux 5.1
_MAP_FIXED = 0x10  # on every processor that Linux runs Python on; `mmap` does not offer it


def available() -> bool:
    """Return whether this system supports such memory, as Linux does."""
    return hasattr(os, "memfd_create") and os.path.isdir("/proc/self/fd")


_LIBC: Any = ctypes.CDLL(None) if available() else None  # loaded here: in a fork it might not be


class Segment:
    """Memory of this process that other processes can map.

    Parameters
    ----------
    nbytes
        Its size in bytes, more than 0.

    Attributes
    ----------
    data
        Its bytes, uint8[nbytes], at first all zero; only this process can write to them (with
        Linux before 5.1 other processes of its user can, too).
    fd
        A file descriptor to pass on, which permits reading only.

    Raises
    ------
    MemoryError
        When the system has no more memory.
    """

    __slots__ = ("__weakref__", "data", "fd")

    def __init__(self, nbytes: int) -> None:
        import fcntl

        try:
            mine = os.memfd_create("aiops", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
            try:
                os.ftruncate(mine, nbytes)
                seals = sum(getattr(fcntl, name) for name in _SIZE_SEALS)
                fcntl.fcntl(mine, fcntl.F_ADD_SEALS, seals)
                self.data: Bytes = np.frombuffer(mmap.mmap(mine, nbytes), np.uint8)
                with contextlib.suppress(OSError):  # Linux before 5.1 has no such seal
                    fcntl.fcntl(mine, fcntl.F_ADD_SEALS, _FUTURE_WRITE)
                fcntl.fcntl(mine, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SEAL)
                self.fd: int = os.open(f"/proc/self/fd/{mine}", os.O_RDONLY | os.O_CLOEXEC)
            finally:
                os.close(mine)
        except OSError as error:
            raise MemoryError(f"no shared memory of {nbytes} bytes: {error.strerror}") from None
        weakref.finalize(self, os.close, self.fd)
        forks.note(self)

    def forked(self) -> None:
        """Map it privately, at the same address: what a fork writes there, others must not read."""
        _map_over(self.data, mmap.MAP_PRIVATE, self.fd)


def leave_shared(data: Bytes) -> None:
    """Have shared memory be this process's own, in a fork, at the same address and as it is now."""
    now = data.copy()
    _map_over(data, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, -1)
    data[:] = now


def _map_over(data: Bytes, flags: int, fd: int) -> None:
    """Map other memory, from its beginning on, where an array lies."""
    _LIBC.mmap.restype = ctypes.c_void_p
    _LIBC.mmap(
        ctypes.c_void_p(data.ctypes.data),
        ctypes.c_size_t(len(data)),
        mmap.PROT_READ | mmap.PROT_WRITE,
        flags | _MAP_FIXED,
        fd,
        ctypes.c_long(0),
    )


def attached(fd: int, nbytes: int, *, private: bool) -> Bytes:
    """Map the segment of another process, uint8[nbytes], and close its descriptor.

    ``private``: the array is writable, and no other process sees what is written; otherwise it is
    read-only.

    Raises
    ------
    ValueError
        When the descriptor is not of sealed memory, or that has fewer bytes; the text tells which.
    """
    import fcntl

    try:
        try:
            seals = fcntl.fcntl(fd, fcntl.F_GET_SEALS)
        except OSError:
            raise ValueError("its descriptor is not one of sealed memory") from None
        if not seals & fcntl.F_SEAL_SHRINK:
            raise ValueError("its memory may shrink: it is not sealed")
        if not 0 < nbytes <= os.fstat(fd).st_size:
            raise ValueError(f"its memory has {os.fstat(fd).st_size} bytes, not {nbytes}")
        try:
            if private:
                mapping = mmap.mmap(fd, nbytes, mmap.MAP_PRIVATE, mmap.PROT_READ | mmap.PROT_WRITE)
            else:
                populate = getattr(mmap, "MAP_POPULATE", 0)
                mapping = mmap.mmap(fd, nbytes, mmap.MAP_SHARED | populate, mmap.PROT_READ)
        except (OSError, OverflowError) as error:
            raise ValueError(f"its memory of {nbytes} bytes cannot be mapped: {error}") from None
    finally:
        os.close(fd)
    return np.frombuffer(mapping, np.uint8)


class Attach(Protocol):
    """Maps the next segment that the other side sent, as `attached` does."""

    def __call__(self, nbytes: int, *, private: bool) -> Bytes:
        """Return its bytes, uint8[nbytes]."""


class Memory:
    """Makes arenas in the memory of this process; `SharedMemory` makes them in segments."""

    def arena(self, layout: Layout) -> Arena:
        """Return an arena with uninitialised values."""
        return Arena(layout, aligned(layout.nbytes))

    def room(self, nbytes: int) -> Bytes:
        """Return uninitialised memory for the data of `holding`."""
        return aligned(nbytes)

    def holding(self, layout: Layout, data: Bytes) -> Arena:
        """Return an arena of ``data``, which belongs to the arena from then on."""
        return Arena(layout, data)

    def buffer(self, nbytes: int) -> Bytes:
        """Return a receive buffer, uint8[nbytes], uninitialised."""
        return aligned(nbytes)

    def attached(self, attach: Attach, nbytes: int) -> Bytes:
        """Map a segment that a worker lends its gradients in, by a call of ``attach``."""
        return attach(nbytes, private=True)


_SMALL = 16 * 1024
"""Bytes of a model; a smaller one is sent as quickly as its memory is mapped."""


class SharedMemory(Memory):
    """Makes each arena of at least 16 KiB in a segment of its own."""

    def __init__(self) -> None:
        self._room: Segment | None = None  # the last one that was made for `holding`

    def arena(self, layout: Layout) -> Arena:
        """Return an arena with uninitialised values."""
        if layout.nbytes < _SMALL:
            return super().arena(layout)
        segment = Segment(layout.nbytes)
        return Arena(layout, segment.data, segment)

    def room(self, nbytes: int) -> Bytes:
        """Return the memory of a segment, if it is that of an arena, which is not copied then."""
        if nbytes < _SMALL:
            return super().room(nbytes)
        self._room = Segment(nbytes)
        return self._room.data

    def holding(self, layout: Layout, data: Bytes) -> Arena:
        """Return an arena with the values of ``data``, copied unless it is the last `room`."""
        if layout.nbytes < _SMALL:
            return super().holding(layout, data)
        segment, self._room = self._room, None
        if segment is not None and segment.data is data:
            return Arena(layout, data, segment)
        made = self.arena(layout)
        made.data[:] = data
        return made
