"""Decide when the next snapshot is due."""

from __future__ import annotations

from aiops.common.frozen import value

_ROW, _BYTES, _TOUCHED = 200e-6, 1e9, 4e9
"""Seconds that a row's decisions take, and bytes per second: of the journal, of updates.

A processor of its own needs a third of the first; one that others share, 220 to 350 µs.
"""

_REPLAY = 1.0
"""Seconds of replay: with more, a start takes noticeably longer."""

_JOURNAL = 128 << 20
"""Bytes of a journal: its segments are used again and again, and stay in the system's cache."""

_PAUSES, _WRITINGS = 10.0, 3.0
"""The time from one snapshot to the next, at least, in pauses of training and in times of writing:
so these take a tenth and a third of the time at most."""

_FIRST = 2.0
"""Seconds from a start, in which clients that have waited for it come first."""

_RETRY = 10.0
"""Seconds after which a snapshot that failed is tried again, at most."""


@value
class Unsaved:
    """The work of a replay: rows, their bytes, and the bytes that updates touch.

    ``files``: bytes of the segments of earlier starts, which have room for more rows than they
    hold.
    """

    rows: int
    nbytes: int
    touched: int
    files: int = 0

    @property
    def seconds(self) -> float:
        """The time that it takes, roughly."""
        return self.rows * _ROW + self.nbytes / _BYTES + self.touched / _TOUCHED


class SnapshotRule:
    """The times at which snapshots are taken.

    One is due every so often, if anything has happened; and sooner when to replay what has happened
    since the last one takes more than a second, or the journal has grown long. The second rule does
    not apply before ten times as long as the last one kept updates waiting has passed since it
    began, and three times as long as it took to be written. So the journal and the time of a start
    are bounded, by what the machine does in that time, and snapshots take a bounded part of it.
    Nor does it apply in the first two seconds of a server.

    Each start begins a segment. When those of earlier starts are as long together as a journal may
    be, one is due at once: a server that is killed again and again would fill the disk.

    Parameters
    ----------
    every
        Seconds.
    now
        The time, at the server's start.
    """

    def __init__(self, every: float, now: float) -> None:
        self._every = every
        self._next, self._not_before = now + every, now + _FIRST
        self._retry = now

    def due(self, now: float, unsaved: Unsaved) -> bool:
        """Return whether a snapshot is to be taken now, if none is being taken or written."""
        if not unsaved.rows:
            return False
        if unsaved.files > _JOURNAL and now >= self._retry:
            return True
        long = unsaved.seconds > _REPLAY or unsaved.nbytes > _JOURNAL
        return now >= self._next or (now >= self._not_before and long)

    def at_once(self, now: float) -> None:
        """Have one be due now."""
        self._next = now

    def written(self, now: float, pause: float, writing: float) -> None:
        """Note that one is written, for how long updates waited, and how long it took to write."""
        self._next = max(now, now + self._every - writing)
        self._not_before = now - writing + max(_PAUSES * pause, _WRITINGS * writing)

    def failed(self, now: float) -> None:
        """Note that one is not written."""
        self._next = self._not_before = self._retry = now + min(self._every, _RETRY)
