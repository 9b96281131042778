"""The processor time that processes use, as the kernel counts it (Linux)."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple


class ProcessorTime(NamedTuple):
    """Seconds of a processor."""

    user: float
    kernel: float
    """Of system calls and of what they wait for; told in steps of 10 ms."""

    @property
    def total(self) -> float:
        """Both; told to a microsecond."""
        return self.user + self.kernel


def processor_time(pid: int) -> ProcessorTime | None:
    """Return what all threads of a process have used so far; None where that is not told."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        total = time.clock_gettime(~pid << 3 | 2)  # the clock that `clock_getcpuclockid` names
    except OSError:  # it has ended, or this is another system
        return None
    kernel = min(int(fields[12]) / os.sysconf("SC_CLK_TCK"), total)
    return ProcessorTime(total - kernel, kernel)


class ProcessorMeter:
    """Reads how much processor time some processes have used since the reading before."""

    def __init__(self) -> None:
        self._before: dict[int, ProcessorTime] = {}

    def read(self, pids: Iterable[int]) -> ProcessorTime | None:
        """Return it for these processes together; None where it is told of none.

        Of one that was not there at the reading before it is all that it has used.
        """
        now = {pid: used for pid in pids if (used := processor_time(pid)) is not None}
        before, self._before = self._before, now
        if not now:
            return None
        none = ProcessorTime(0.0, 0.0)
        spent = [(used, before.get(pid, none)) for pid, used in now.items()]
        total = sum(used.total - earlier.total for used, earlier in spent)
        kernel = sum(used.kernel - earlier.kernel for used, earlier in spent)
        kernel = min(kernel, total)  # it is told in steps, and the whole is not
        return ProcessorTime(total - kernel, kernel)
