"""Memory in which one client and its server exchange messages without a socket: a mailbox.

A client makes it: sealed anonymous memory that both sides map and write to, and a *bell*, a
descriptor that the client writes to when the server sleeps. Compiled code knows what lies where
(``aiops/compiled/mailbox.h``), and neither side believes what it finds there.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import sys
import weakref

import numpy as np

from aiops.common import forks
from aiops.model.layout import Bytes
from aiops.model.shared_memory import leave_shared

_PAGE = 4096
_OPEN, _PAYLOADS = 512, 3 * _PAGE  # where that word, and the payloads, lie
MOST = _PAYLOADS + (2 << 20)
"""The most bytes of a mailbox."""


def size_of(nbytes: int) -> int:
    """Return the bytes of a mailbox for messages with payloads of ``nbytes``."""
    return _PAYLOADS + 2 * _in_pages(nbytes)


def _in_pages(nbytes: int) -> int:
    return -(-nbytes // _PAGE) * _PAGE


class Mailbox:
    """A mailbox that this process has mapped.

    Attributes
    ----------
    data
        Its bytes, uint8, which the other side may change at any time.
    bell
        The descriptor of its bell.
    """

    __slots__ = ("__weakref__", "bell", "data")

    def __init__(self, data: Bytes, bell: int) -> None:
        self.data, self.bell = data, bell

    @property
    def is_open(self) -> bool:
        """True while the server answers what is posted."""
        return int(self.data[_OPEN : _OPEN + 4].view(np.uint32)[0]) == 1

    def pushed(self, nbytes: int) -> Bytes:
        """Return where the payload of a push lies."""
        return self.data[_PAYLOADS : _PAYLOADS + nbytes]

    def answered(self, nbytes: int) -> Bytes:
        """Return where that of an answer lies."""
        begin = _PAYLOADS + _in_pages(nbytes)
        return self.data[begin : begin + nbytes]

    @classmethod
    def make(cls, nbytes: int) -> tuple[Mailbox, int]:
        """Make one for payloads of ``nbytes``; return it, and the descriptor of its memory.

        The caller closes that. The bell is closed when the memory is of no use any more.

        Raises
        ------
        OSError
            When the system has no memory or no descriptors for it.
        """
        import fcntl

        size = size_of(nbytes)
        fd = os.memfd_create("aiops", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(fd, size)
            sealed = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, sealed)
            data: Bytes = np.frombuffer(mmap.mmap(fd, size), np.uint8)
            bell = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        except BaseException:
            os.close(fd)
            raise
        weakref.finalize(data, os.close, bell)
        made = cls(data, bell)
        forks.note(made)
        return made, fd

    def forked(self) -> None:
        """Leave the memory to the parent: what a fork writes there, a gradient say, is its own."""
        leave_shared(self.data)

    @classmethod
    def take(cls, fds: list[int], nbytes: int) -> Mailbox | None:
        """Map one that a client has made, given its descriptors; None: it is none.

        The bell belongs to the caller then, and the memory is closed. Otherwise all are.
        """
        found = None
        with contextlib.suppress(OSError, ValueError):
            if len(fds) == 2 and 0 < nbytes <= MOST and _are_sound(fds[0], fds[1], nbytes):
                found = cls(np.frombuffer(mmap.mmap(fds[0], nbytes), np.uint8), fds[1])
        for fd in fds if found is None else fds[:1]:
            os.close(fd)
        return found


def _are_sound(memory: int, bell: int, nbytes: int) -> bool:
    """Return whether descriptors are of memory that no access to can fault, and of a bell.

    Memory has pages of the usual size, since there may be no more of others. A bell is an eventfd,
    because to watch a descriptor can call what is behind it.
    """
    import fcntl

    if not fcntl.fcntl(memory, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK:
        return False
    usual = os.fstatvfs(memory).f_bsize == mmap.PAGESIZE
    is_bell = os.readlink(f"/proc/self/fd/{bell}") == "anon_inode:[eventfd]"
    return usual and os.fstat(memory).st_size >= nbytes and is_bell


def supported() -> bool:
    """Return whether this system has what mailboxes are made of."""
    return sys.platform == "linux" and hasattr(os, "eventfd") and hasattr(os, "memfd_create")
