"""Release the objects of a parent process in its forks, and refuse to use them there.

A fork copies the memory and the descriptors of its parent, and none of its threads. Of a connection
that both had, each would take bytes that were meant for the other; a push by the child would have
the number of the parent's next one, and stand for it. So what belongs to one process is noted here
when it is made. In a fork it is told, before anything else runs there: it closes its copies of the
descriptors, makes new the locks that a thread of the parent may have had, and refuses to work.

That takes no call and no look at the process's id afterwards. The parent notices nothing.
"""

from __future__ import annotations

import contextlib
import os
from typing import Protocol
from weakref import WeakSet

from aiops.errors import UsageError


class Owned(Protocol):
    """Something that belongs to one process."""

    def forked(self) -> None:
        """Let go of it: this is a fork of the process that it belongs to.

        It is alone there, on the only thread; it may be told more than once.
        """


_OWNED: WeakSet[Owned] = WeakSet()


def note(thing: Owned) -> None:
    """Have a thing told in every fork, for as long as it is there."""
    _OWNED.add(thing)


def blank(descriptor: int) -> None:
    """Let go of an inherited descriptor: its number stands for /dev/null from here on.

    The parent's connection stays as it is: nothing is sent, and nothing shut down. The number stays
    taken, so that what still refers to it cannot meet another file. That includes an event loop's
    epoll, which both processes share: it knows files by their numbers, and what the child removed
    from it would be removed for its parent. A number below 0, or of nothing, is left alone.
    """
    if descriptor < 0:
        return
    with contextlib.suppress(OSError):  # it is not open; or there are no more descriptors at all
        os.close(descriptor)  # first, so that there is a number for the other
        other = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
        if other != descriptor:
            os.dup2(other, descriptor, inheritable=False)
            os.close(other)


def inherited(what: str) -> UsageError:
    """Return the error with which a thing, such as a ``"worker"``, refuses to work in a fork."""
    return UsageError(
        f"this {what} belongs to the process that made it, and this is a fork of that: make another"
        f" {what} here, in the function that multiprocessing or a DataLoader's worker_init_fn calls"
    )


def _in_child() -> None:
    for thing in list(_OWNED):
        thing.forked()


if hasattr(os, "register_at_fork"):  # where there are forks
    os.register_at_fork(after_in_child=_in_child)
