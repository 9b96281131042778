"""Count the processors that this process may use, and share them between processes.

A machine's processors are not all a process's own: it may be bound to some of them (`taskset`, a
container's cpuset), and a container usually has a quota of their time instead (``docker --cpus``,
a Kubernetes limit), which `os.cpu_count` does not see.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterator
from math import inf
from pathlib import Path

__all__ = ["BLAS", "leave_blas_alone", "quota", "run_as_batch", "share", "usable"]

BLAS = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")
"""The variables that bound the threads of NumPy's and PyTorch's matrix products, read at import."""


def usable(me: Path = Path("/proc/self")) -> int:
    """Return the number of threads of this process that can run at the same time, at least 1.

    A quota is rounded down: a process that exceeds it is stopped until its period (a tenth of a
    second, usually) is over, in the middle of whatever it does.
    """
    try:
        bound = len(os.sched_getaffinity(0))
    except AttributeError:  # not Linux
        bound = os.cpu_count() or 1
    return max(1, int(min(bound, quota(me))))


def leave_blas_alone() -> None:
    """Have NumPy, if it is imported later, start no threads for matrix products.

    A server computes no matrix products, and its workers may be on the same machine. Variables
    that are set already stay as they are.
    """
    for name in BLAS:
        os.environ.setdefault(name, "1")


def share(processes: int) -> int:
    """Return the threads that each of ``processes`` on this machine may have, at least 1."""
    return max(1, usable() // processes)


def run_as_batch() -> None:
    """Have this process, when it is woken, wait for its turn instead of interrupting another.

    A server that answers many workers wakes each of them. Where they outnumber the processors, a
    worker that it has just woken takes its processor in one of five exchanges, while the others
    wait for their answers. As batch processes (sched(7)) they do not: 32 workers on two processors
    then make 1.2 times as many exchanges of 4 KiB. Processors are shared as before. All threads of
    this process are batch, and those and the processes that it starts later. Other systems than
    Linux have no such class.
    """
    if hasattr(os, "SCHED_BATCH"):
        try:
            threads = os.listdir("/proc/self/task")
        except OSError:  # no /proc here
            threads = ["0"]  # this one
        for thread in threads:
            with contextlib.suppress(ProcessLookupError):  # it has just ended
                os.sched_setscheduler(int(thread), os.SCHED_BATCH, os.sched_param(0))


def quota(me: Path = Path("/proc/self")) -> float:
    """Return the processors' time that the control groups of a process allow; inf: no limit.

    Groups of both versions count, and the groups around them, as far as this process can see them.
    A file that cannot be read sets no limit.
    """
    try:
        return min(_quotas(me), default=inf)
    except (OSError, ValueError):
        return inf


def _quotas(me: Path) -> Iterator[float]:
    groups = {}
    for line in (me / "cgroup").read_text().splitlines():
        _number, controllers, path = line.split(":", 2)
        for controller in controllers.split(","):
            groups[controller] = path
    for line in (me / "mountinfo").read_text().splitlines():
        before, _, after = line.partition(" - ")
        root, point = before.split()[3:5]
        kind, _source, options = after.split()[:3]
        controller = "" if kind == "cgroup2" else "cpu"
        if kind not in ("cgroup", "cgroup2") or controller not in ("", *options.split(",")):
            continue
        if controller not in groups:
            continue
        read = _second if kind == "cgroup2" else _first
        for folder in _folders(_plain(point), _plain(root), groups[controller]):
            limit = read(folder)
            if limit is not None:
                yield limit


def _folders(point: Path, root: Path, group: str) -> Iterator[Path]:
    """Yield the folder of a group where it is mounted, and those of the groups around it."""
    try:
        inner = Path(group).relative_to(root)
    except ValueError:  # mounted from another part of the tree: only the mount is visible
        inner = Path()
    folder = point / inner
    yield folder
    while folder != point:
        folder = folder.parent
        yield folder


def _second(folder: Path) -> float | None:
    """Return the limit of a group of the second version."""
    try:
        most, period = (folder / "cpu.max").read_text().split()
    except FileNotFoundError:  # the uppermost group has none
        return None
    return None if most == "max" else int(most) / int(period)


def _first(folder: Path) -> float | None:
    """Return the limit of a group of the first version."""
    try:
        most = int((folder / "cpu.cfs_quota_us").read_text())
        period = int((folder / "cpu.cfs_period_us").read_text())
    except FileNotFoundError:
        return None
    return None if most <= 0 else most / period


def _plain(text: str) -> Path:
    """Return a path as mountinfo writes it, with ``\\040`` for a space."""
    return Path(re.sub(r"\\([0-7]{3})", lambda found: chr(int(found[1], 8)), text))
