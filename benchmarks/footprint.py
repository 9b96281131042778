"""The memory that processes hold, as the kernel counts it (Linux)."""

from __future__ import annotations

import re
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple, Self

import aiops
from aiops.algorithms import find
from aiops.common.closing import Closing
from aiops.errors import AiopsError, UsageError

_HEADER = re.compile(r"[0-9a-f]+-[0-9a-f]+ \S+ ([0-9a-f]+) \S+ (\d+) *(.*)")
_SEGMENT = "/memfd:"


class Footprint(NamedTuple):
    """Bytes: processes' own, and those in shared segments that they have mapped."""

    own: int
    """Their proportional set size (PSS), but for the segments."""
    segments: int
    """Each once and in full, however many processes have mapped it."""

    @property
    def total(self) -> int:
        """Both."""
        return self.own + self.segments


def check(policy: str) -> None:
    """Raise UsageError unless a server's memory can be measured here, under a policy."""
    algorithm = find(policy)()
    if algorithm.barrier or algorithm.plan(None).get("routine", "direct") != "direct":
        raise UsageError(
            f"under {policy} workers train by themselves, or wait for each other: choose a policy"
            " under which they push every gradient, and go on"
        )
    if sys.platform != "linux":
        raise UsageError("how much memory a process holds is read from Linux's /proc")


def held(*pids: int) -> Footprint:
    """Return what processes hold now, all of them together.

    The sum that ``smaps_rollup`` has counts half a segment that two have mapped, so the mappings
    are gone through one by one.
    """
    own, segments = 0, dict[tuple[str, str], int]()
    segment: tuple[str, str] | None = None
    lines = (line for pid in pids for line in Path(f"/proc/{pid}/smaps").read_text().splitlines())
    for line in lines:
        if header := _HEADER.fullmatch(line):
            offset, inode, path = header.groups()
            segment = (inode, offset) if path.startswith(_SEGMENT) else None
        elif segment is None and line.startswith("Pss:"):
            own += _bytes(line)
        elif segment is not None and line.startswith("Rss:"):
            segments[segment] = max(segments.get(segment, 0), _bytes(line))
    return Footprint(own, sum(segments.values()))


def forget_peak(pid: int) -> None:
    """Have `peak` begin from here."""
    Path(f"/proc/{pid}/clear_refs").write_text("5")


def peak(pid: int) -> int:
    """Return the most bytes that a process has had in memory since `forget_peak`."""
    status = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(_bytes(line) for line in status if line.startswith("VmHWM"))


def family(*pids: int) -> list[int]:
    """Return processes and all that descend from them: a server and its shards."""
    parents = dict[int, int]()
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):  # it has ended meanwhile
            fields = stat.read_text().rpartition(")")[2].split()
            parents[int(stat.parent.name)] = int(fields[1])
    found = [*pids]
    for one in found:
        found += [child for child, parent in parents.items() if parent == one]
    return found


def _bytes(line: str) -> int:
    return int(line.split()[1]) << 10


class Sample(NamedTuple):
    """A server's memory at a time, and its statistics of versions."""

    seconds: float
    own: int
    segments: int
    alive: int
    spare: int


class Watch(Closing):
    """Takes samples of a server's memory in a thread, until it is left.

    Parameters
    ----------
    pids
        The server's processes.
    url
        Where it is asked for its statistics.
    interval
        Seconds between samples.
    timeout
        Seconds that the server has to answer.
    asked
        Samples for which it is asked once: one that knows thousands of clients has much to say.

    Attributes
    ----------
    samples
        As they come.
    """

    def __init__(
        self,
        pids: Sequence[int],
        url: str,
        interval: float,
        timeout: float = 60.0,
        asked: int = 1,
    ) -> None:
        self.samples: list[Sample] = []
        self._pids, self._url, self._interval, self._timeout = pids, url, interval, timeout
        self._asked = asked
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._look, daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def close(self) -> None:
        """Take no more samples."""
        self._over.set()
        self._thread.join()

    def abandon(self) -> None:
        """The same, but do not wait for a server that ends only after this has returned."""
        self._over.set()
        self._thread.join(0.1)

    def _look(self) -> None:
        begin = time.perf_counter()
        try:
            with aiops.Client(self._url, timeout=self._timeout) as client:
                while True:
                    if not len(self.samples) % self._asked:
                        stats = client.stats()
                    holds, now = held(*self._pids), time.perf_counter() - begin
                    versions = stats["versions_alive"], stats["versions_spare"]
                    self.samples.append(Sample(now, *holds, *versions))
                    if self._over.wait(self._interval):
                        return
        except (AiopsError, OSError):  # it has ended: its clients will report that
            return
