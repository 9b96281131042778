"""Memory that several processes see: anonymous, sealed against shrinking, gone with its last user.

A `Segment` has no name. Whoever holds its file descriptor (which travels beside a message, over a
Unix socket) may map it; when the last mapping and descriptor are gone, by whatever death, the
system takes the memory back. Since it cannot shrink, no access to a mapping can fault.
"""

from __future__ import annotations

import mmap
import os
import weakref

import numpy as np

from aiops.model.arena import Arena, aligned
from aiops.model.layout import Bytes, Layout

_SEALED = ("F_SEAL_SHRINK", "F_SEAL_GROW", "F_SEAL_SEAL")


def available() -> bool:
    """Return whether this system has such memory (Linux does)."""
    return hasattr(os, "memfd_create") and os.path.isdir("/proc/self/fd")


class Segment:
    """Memory of this process that others may be shown.

    Parameters
    ----------
    nbytes
        Its size, more than 0.

    Attributes
    ----------
    data
        Its bytes, at first all zero, to be written to by this process alone.
    fd
        A file descriptor to be passed on: whoever has it may read.

    Raises
    ------
    MemoryError
        When the system has no more.
    """

    __slots__ = ("__weakref__", "data", "fd")

    def __init__(self, nbytes: int) -> None:
        import fcntl

        try:
            mine = os.memfd_create("aiops", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
            try:
                os.ftruncate(mine, nbytes)
                seals = sum(getattr(fcntl, name) for name in _SEALED)
                fcntl.fcntl(mine, fcntl.F_ADD_SEALS, seals)
                self.data: Bytes = np.frombuffer(mmap.mmap(mine, nbytes), np.uint8)
                self.fd = os.open(f"/proc/self/fd/{mine}", os.O_RDONLY | os.O_CLOEXEC)
            finally:
                os.close(mine)
        except OSError as error:
            raise MemoryError(f"no shared memory of {nbytes} bytes: {error.strerror}") from None
        weakref.finalize(self, os.close, self.fd)


def attached(fd: int, nbytes: int, *, private: bool) -> Bytes:
    """Map another process's segment, and close its descriptor.

    ``private``: the array may be written to, and nobody else sees it; otherwise it is read-only.

    Raises
    ------
    ValueError
        When it is no such memory, or has fewer bytes; the text says which.
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


class Memory:
    """This process's own memory, as what arenas are made of.

    `SharedMemory` makes them where others can be shown them.
    """

    def arena(self, layout: Layout) -> Arena:
        """Return an arena whose values mean nothing."""
        return Arena(layout, aligned(layout.nbytes))

    def holding(self, layout: Layout, data: Bytes) -> Arena:
        """Return an arena with these values, which are its own from here on."""
        return Arena(layout, data)

    def buffer(self, nbytes: int) -> Bytes:
        """Return room for something to be received."""
        return aligned(nbytes)


_SMALL = 16 * 1024
"""A smaller model is not worth being shown: it is sent as quickly."""


class SharedMemory(Memory):
    """Makes each arena in a segment of its own, if it is worth that."""

    def arena(self, layout: Layout) -> Arena:
        """Return an arena whose values mean nothing."""
        if layout.nbytes < _SMALL:
            return super().arena(layout)
        segment = Segment(layout.nbytes)
        return Arena(layout, segment.data, segment)

    def holding(self, layout: Layout, data: Bytes) -> Arena:
        """Return an arena with these values: a copy, if others can be shown it."""
        if layout.nbytes < _SMALL:
            return super().holding(layout, data)
        made = self.arena(layout)
        made.data[:] = data
        return made
