"""Faults of a disk, on demand: a program or a process asks for a `FaultyDisk`.

A server process is given one by ``AIOPS_FAULTS`` (`from_text`), and the servers that a program
makes by `crash_at`.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import replace

from aiops.errors import UsageError, nearest
from aiops.net.disk import Disk
from aiops.net.environment import CURRENT_ENVIRONMENT
from aiops.net.faulty_disk import FaultyDisk

VARIABLE = "AIOPS_FAULTS"

_NUMBERS: Mapping[str, type[int] | type[float]] = {
    "full": int,
    "sync_fails": int,
    "seed": int,
    "slow": float,
    "flip": float,
}
"""The faults that have a number, and of which kind."""
"""The environment variable that gives a server's process a disk with faults."""


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
    names = ("crash", "power", "full", "slow", "sync_fails", "tear", "flip", "seed")
    given = {}
    for item in text.split():
        name, _equals, value = item.partition("=")
        if name not in names:
            raise UsageError(f"{VARIABLE}: no fault is called {name!r}; {nearest(name, names)}")
        if name in _NUMBERS and not _is_number(value, _NUMBERS[name]):
            kind = "a whole number" if _NUMBERS[name] is int else "a number"
            raise UsageError(f"{VARIABLE}: {name}= is followed by {kind}, not {value!r}")
        given[name] = value
    try:
        made = FaultyDisk(
            disk,
            seed=int(given.get("seed", 0)),
            full_at=int(given["full"]) if "full" in given else None,
            slow=float(given.get("slow", 0.0)),
            sync_fails_at=int(given["sync_fails"]) if "sync_fails" in given else None,
            lose_unsynced="power" in given,
            tear="tear" in given,
            flip=float(given.get("flip", 0.0)),
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


def _is_number(text: str, kind: type[int] | type[float]) -> bool:
    try:
        kind(text)
    except ValueError:
        return False
    return True
