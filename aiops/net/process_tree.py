"""Find, signal and kill processes with all that they have started; split what they print."""

from __future__ import annotations

import contextlib
import os
import signal
from pathlib import Path


def session(leader: int) -> list[int]:
    """Return the processes in the session that a process leads (Linux; elsewhere none)."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):  # it has ended meanwhile
            _state, _parent, _group, its_session = stat.read_text().rpartition(")")[2].split()[:4]
            if int(its_session) == leader:
                found.append(int(stat.parent.name))
    return found


def having(variable: str) -> list[int]:
    """Return the processes with ``NAME=value`` in their initial environment (Linux; else none).

    It finds those that have left the session of the child that started them.
    """
    found = []
    for file in Path("/proc").glob("[0-9]*/environ"):
        with contextlib.suppress(OSError):  # it has ended meanwhile, or is another user's
            if variable.encode() in file.read_bytes().split(b"\0"):
                found.append(int(file.parent.name))
    return found


def send(pid: int, number: signal.Signals) -> None:
    """Send a signal to a process; one that has ended is not an error."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.kill(pid, number)


def kill_session(leader: int) -> None:
    """Kill the process group of a child, then the processes that left it within its session."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(leader, signal.SIGKILL)
    for pid in session(leader):
        send(pid, signal.SIGKILL)


def busy_seconds(pid: int) -> float | None:
    """Return how long a process's main thread has run, or has waited for a processor to run on.

    None where the system does not tell, or the process has ended.
    """
    try:
        ran, waited = Path(f"/proc/{pid}/schedstat").read_text().split()[:2]
    except (OSError, ValueError):
        return None
    return (int(ran) + int(waited)) / 1e9


class Lines:
    """Splits bytes into lines of text, however they arrive."""

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, chunk: bytes) -> list[str]:
        """Return the lines that a chunk completes; an empty chunk, the end, completes the last."""
        whole = self._rest + chunk + (b"\n" if not chunk and self._rest else b"")
        *lines, self._rest = whole.split(b"\n")
        return [line.decode(errors="replace") for line in lines]
