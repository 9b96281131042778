"""Faults of a disk, on demand: a program or a process asks for a `FaultyDisk`.

A server process is given one by ``AIOPS_FAULTS`` (`from_text`), and the servers that a program
makes by `crash_at`.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from aiops.errors import UsageError, nearest
from aiops.net.disk import Disk
from aiops.net.environment import CURRENT_ENVIRONMENT
from aiops.net.faulty_disk import FaultyDisk

VARIABLE = "AIOPS_FAULTS"
"""The environment variable that gives a server's process a disk with faults."""

_READ: Mapping[str, Callable[[str], Any]] = {
    **dict.fromkeys(("crash", "power", "tear"), str),
    **dict.fromkeys(("full", "sync_fails", "seed"), int),
    **dict.fromkeys(("slow", "flip"), float),
}
"""The faults, and what reads what follows each."""


def crash_at(point: str, count: int = 1) -> FaultyDisk:
    """End this process when a server of it reaches a point for the ``count``-th time.

    Call it before the server is made, in the same thread. The process ends by SIGKILL: without a
    server under test it is a child process of the test.

    >>> disk = crash_at("journal.synced", 37)
    >>> disk.reached["journal.synced"]
    0

    Parameters
    ----------
    point
        One of `points`.
    count
        1: the first time.

    Returns
    -------
    FaultyDisk
        The disk of servers that are made from now on.

    Raises
    ------
    UsageError
        When there is no such point, or the count is not positive.
    """
    env = CURRENT_ENVIRONMENT.get()
    disk = FaultyDisk(env.disk)
    disk.crash_at(point, count)
    CURRENT_ENVIRONMENT.set(replace(env, disk=disk))
    return disk


def from_text(text: str, disk: Disk | None = None) -> FaultyDisk:
    """Return the disk that a text describes (``AIOPS_FAULTS``).

    >>> disk = from_text("power=journal.written:37 seed=5 tear")
    >>> disk.lose_unsynced, disk.tear
    (True, True)

    Parameters
    ----------
    text
        Items, with spaces between them: ``crash=POINT:COUNT``, ``power=POINT:COUNT`` (the same, and
        what is not synced is lost), ``full=BYTES``, ``slow=SECONDS``, ``sync_fails=NUMBER``,
        ``tear``, ``flip=PROBABILITY``, ``seed=NUMBER``.
    disk
        The disk behind it; default: that of the operating system.

    Raises
    ------
    UsageError
        When the text is not so.
    """
    given = dict[str, Any]()
    for item in text.split():
        name, _equals, value = item.partition("=")
        if name not in _READ:
            raise UsageError(f"{VARIABLE}: no fault is called {name!r}; {nearest(name, _READ)}")
        try:
            given[name] = _READ[name](value)
        except ValueError:
            kind = "a whole number" if _READ[name] is int else "a number"
            raise UsageError(f"{VARIABLE}: {name}= is followed by {kind}, not {value!r}") from None
    try:
        made = FaultyDisk(
            disk,
            seed=given.get("seed", 0),
            full_at=given.get("full"),
            slow=given.get("slow", 0.0),
            sync_fails_at=given.get("sync_fails"),
            lose_unsynced="power" in given,
            tear="tear" in given,
            flip=given.get("flip", 0.0),
        )
        for name in ("crash", "power"):
            if name in given:
                point, _colon, count = given[name].partition(":")
                made.crash_at(point, int(count or 1))
    except ValueError as error:
        raise UsageError(f"{VARIABLE}={text!r}: {error}") from None
    return made


def use_environment_variable() -> None:
    """Give the servers of this process the disk of ``AIOPS_FAULTS``, if it is set.

    Raises
    ------
    UsageError
        When the variable cannot be read.
    """
    text = os.environ.get(VARIABLE)
    if text:
        env = CURRENT_ENVIRONMENT.get()
        CURRENT_ENVIRONMENT.set(replace(env, disk=from_text(text, env.disk)))
