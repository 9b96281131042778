"""Judge what was measured of a machine and of a server: facts in, findings with advice out."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from aiops.common import formatting, urls
from aiops.common.frozen import value
from aiops.common.launchers import URL, WorkerPlace, job_port

GOOD, NOTE, BROKEN = "good", "note", "broken"

_CLOCK = 1.0  # seconds by which the logs of two machines can still be compared
_LITTLE = 512 << 20  # bytes of memory that a worker with its libraries needs at least
_COPIES = 4  # of the model: parameters, gradients, room for both directions
_DISK = 8  # models: two snapshots with an optimiser's state, and the journal between
_LEAST_DISK = 1 << 30
_FAR = ("nfs", "nfs4", "cifs", "smb3", "lustre", "ceph", "gpfs", "beegfs", "glusterfs", "9p")
_GONE = ("tmpfs", "ramfs")


@value
class Finding:
    """One thing that was examined.

    Attributes
    ----------
    what
        The thing, in a word or two.
    state
        `GOOD`; `NOTE`: it works, and may surprise; `BROKEN`: it cannot work.
    text
        What was found.
    advice
        What to do; empty where there is nothing.
    """

    what: str
    state: str
    text: str
    advice: str = ""


@value
class Reach:
    """An attempt to reach one server of a URL.

    Attributes
    ----------
    url
        Its address.
    stages
        By name, the seconds of those that were passed: ``address``, ``connect``, ``welcome``.
    ip
        The address that its name has; None: not found.
    error
        The reason why it went no further; empty: it went through.
    refused
        The token was wrong or missing.
    round_trip
        Seconds of the shortest of some pings.
    clock
        Seconds by which the server's clock is ahead; None: it does not tell.
    near
        Memory is shared with it.
    report
        Its statistics.
    """

    url: str
    stages: Mapping[str, float]
    ip: str | None = None
    error: str = ""
    refused: bool = False
    round_trip: float | None = None
    clock: float | None = None
    near: bool = False
    report: Mapping[str, Any] | None = None


@value
class Machine:
    """The facts of this machine.

    Attributes
    ----------
    processors
        That this process may use.
    memory
        Bytes that are available to it.
    descriptors
        Soft and hard limit of open files; None: no limit.
    packages
        Versions of installed packages by name.
    math_threads
        By variable: the number of threads that is set, as text.
    shared_memory
        "": it works; else why not.
    port, port_free
        The port that a server would take here, and whether it is free.
    token
        There is one.
    version
        That of aiops.
    """

    processors: int
    memory: int
    descriptors: tuple[int | None, int | None]
    packages: Mapping[str, str]
    math_threads: Mapping[str, str]
    shared_memory: str
    port: int
    port_free: bool
    token: bool
    version: str


@value
class StateDisk:
    """The disk of a folder for ``--state``.

    Attributes
    ----------
    folder
        As it was given.
    error
        Why nothing can be written there; empty: it can.
    free
        Bytes.
    kind
        The type of its file system; empty: not known.
    sync
        Seconds that a small write takes until it is on the disk.
    """

    folder: str
    error: str = ""
    free: int = 0
    kind: str = ""
    sync: float = 0.0


def judge_place(place: WorkerPlace) -> Iterator[Finding]:
    """Say what is wrong with the launcher's variables."""
    for fault in place.faults:
        yield Finding("launcher", BROKEN, fault)
    if place.launcher and place.workers is None:
        yield Finding(
            "launcher",
            NOTE,
            f"{place.launcher} does not tell how many workers there are",
            "set WORLD_SIZE to their number",
        )
    if place.url is None:
        yield Finding(
            "server",
            NOTE,
            "no server is named, and no launcher tells where rank 0 is",
            f"set {URL}=aiops://HOST:PORT, or MASTER_ADDR to rank 0's machine for `aiops join`; on"
            " one machine use `aiops run`",
        )


def judge_reach(reach: Reach, place: WorkerPlace, machine: Machine) -> Iterator[Finding]:
    """Say how far a server was reached, and what it tells."""
    took = ", ".join(f"{name} {formatting.seconds(s)}" for name, s in reach.stages.items())
    if reach.error:
        yield Finding(
            "server",
            BROKEN,
            f"{reach.url}: {reach.error}" + (f" (after {took})" if took else ""),
            _unreached(reach, place),
        )
        return
    assert reach.report is not None
    trip = (
        "" if reach.round_trip is None else f"; a ping takes {formatting.seconds(reach.round_trip)}"
    )
    yield Finding("server", GOOD, f"{reach.url} at {reach.ip}: {took}{trip}")
    yield from _judge_report(reach.report, machine)
    if reach.clock is not None:
        ahead = "ahead" if reach.clock > 0 else "behind"
        text = f"the server's is {formatting.seconds(abs(reach.clock))} {ahead}"
        if abs(reach.clock) > _CLOCK:
            advice = "aiops does not need equal clocks, your logs do: run chrony or NTP"
            yield Finding("clocks", NOTE, text, advice)
        else:
            yield Finding("clocks", GOOD, text)
    if urls.is_loopback(reach.ip or "") and not reach.near and not machine.shared_memory:
        yield Finding(
            "shared memory",
            NOTE,
            "the server is on this machine, and memory is not shared with it",
            "run both under one user and in one container; the server may have --no-shm, or shards",
        )


def _unreached(reach: Reach, place: WorkerPlace) -> str:
    if reach.refused:
        return "set AIOPS_TOKEN to the same value here and for the server"
    host = urls.parse(reach.url)[0]
    source = place.sources.get("url", "")
    if "address" not in reach.stages:
        where = f"{source} names the machine" if source else "check the name"
        return f"{where}: is {host!r} known to the name server, or in /etc/hosts, here?"
    if "connect" not in reach.stages:
        hint = (
            ""
            if source == URL
            else f"; rank 0's server, of `aiops join`, has port {job_port(place.job)}"
        )
        return (
            "is the server running (`aiops serve` prints its URL), does it listen beyond loopback"
            f" (--host 0.0.0.0), and does the firewall let its port through{hint}?"
        )
    return "something else may listen on that port, or the server is overloaded: `aiops stats`"


def _judge_report(report: Mapping[str, Any], machine: Machine) -> Iterator[Finding]:
    theirs = report.get("aiops")
    if theirs is None or theirs == machine.version:
        told = "" if theirs is None else ", like the server's"
        yield Finding("versions", GOOD, f"aiops {machine.version}{told}")
    else:
        yield Finding(
            "versions",
            NOTE,
            f"aiops {machine.version} here, {theirs} on the server",
            "they understand each other, and may differ in what they can do: install one version",
        )
    errors = report.get("file_errors") or ()
    for sentence in errors:
        yield Finding("server's files", BROKEN, str(sentence), "make room on the server's disk")
    if waits := report.get("waits"):
        text = ", ".join(f"{name} {seconds:g} s" for name, seconds in waits.items())
        yield Finding("waits", GOOD, text)
    if corrupted := report.get("corrupted"):
        text = f"{corrupted:,} connections to the server ended with a wrong checksum"
        yield Finding("network", NOTE, text, "a cable, a card or memory between is faulty")


def judge_machine(machine: Machine, workers: int, model: int) -> Iterator[Finding]:
    """Say what this machine is good for.

    ``workers``: that share it; ``model``: bytes of the model, 0 if it is not known.
    """
    yield _judge_threads(machine, workers)
    yield _judge_memory(machine, workers, model)
    yield from _judge_packages(machine.packages)
    if machine.shared_memory:
        advice = "workers on the server's machine use TCP, which copies more"
        yield Finding("shared memory", NOTE, machine.shared_memory, advice)
    else:
        yield Finding("shared memory", GOOD, "available")
    yield _judge_descriptors(*machine.descriptors)
    if machine.port_free:
        yield Finding("port", GOOD, f"{machine.port} is free for a server here")
    else:
        yield Finding(
            "port",
            NOTE,
            f"{machine.port} is taken on this machine",
            "if that is not the server that you mean, give another one another --port",
        )
    if machine.token:
        yield Finding("token", GOOD, "set")
    else:
        yield Finding(
            "token",
            NOTE,
            "AIOPS_TOKEN is not set: servers here listen on loopback only",
            "for several machines: export AIOPS_TOKEN=$(openssl rand -hex 16), the same on all",
        )


def _judge_threads(machine: Machine, workers: int) -> Finding:
    of = f"{workers} worker{'s' * (workers > 1)} on {machine.processors} processors"
    share = max(1, machine.processors // workers)
    numbers = [int(text) for text in machine.math_threads.values() if text.isdigit()]
    advice = f"set OMP_NUM_THREADS={share}, as `aiops run` and `aiops join` do"
    if not numbers and workers > 1:
        each = f"each starts {machine.processors} threads for its mathematics"
        return Finding("threads", NOTE, f"{of}: {each}", advice)
    if numbers and max(numbers) > share:
        return Finding("threads", NOTE, f"{of}, with {max(numbers)} threads each", advice)
    return Finding("threads", GOOD, of + (f", with {max(numbers)} threads each" if numbers else ""))


def _judge_memory(machine: Machine, workers: int, model: int) -> Finding:
    need = workers * (_LITTLE + _COPIES * model)
    text = f"{formatting.nbytes(machine.memory)} available"
    if machine.memory >= need:
        return Finding("memory", GOOD, text)
    count = f"{workers} worker{'s' * (workers > 1)}"
    return Finding(
        "memory",
        NOTE,
        f"{text}; {count} may need {formatting.nbytes(need)}",
        "run fewer workers on this machine, or give its container more",
    )


def _judge_packages(packages: Mapping[str, str]) -> Iterator[Finding]:
    shown = ", ".join(f"{name} {version}" for name, version in packages.items())
    missing = [name for name in ("numba", "uvloop", "safetensors") if name not in packages]
    if missing:
        yield Finding(
            "packages",
            NOTE,
            f"{', '.join(missing)} not installed ({shown})",
            "a server is slower without numba and uvloop, and writes no file without safetensors:"
            " pip install 'aiops-ps[server]'",
        )
    else:
        yield Finding("packages", GOOD, shown)
    cupy = [name for name in packages if name.startswith("cupy")]
    text = ", ".join(cupy) if cupy else "no CuPy: the server's model is in the host's memory"
    yield Finding("GPU of a server", GOOD, text)


def _judge_descriptors(soft: int | None, hard: int | None) -> Finding:
    if hard is None or hard >= 4096:
        return Finding("open files", GOOD, f"{soft or 'no limit'}, at most {hard or 'any number'}")
    return Finding(
        "open files",
        NOTE,
        f"at most {hard}, and a server needs one for each connection",
        "raise the limit (ulimit -n, LimitNOFILE=), or give it fewer --max-connections",
    )


def judge_state(disk: StateDisk, model: int) -> Iterator[Finding]:
    """Say whether a folder is fit for ``--state``; ``model``: as above."""
    if disk.error:
        advice = "give the server a folder that its user may write to"
        yield Finding("state", BROKEN, f"{disk.folder}: {disk.error}", advice)
        return
    need = max(_LEAST_DISK, _DISK * model)
    text = (
        f"{disk.folder}: {formatting.nbytes(disk.free)} free"
        + (f" on {disk.kind}" if disk.kind else "")
        + f", a synced write takes {formatting.seconds(disk.sync)}"
    )
    if disk.free < need:
        advice = f"make room: snapshots and the journal may need {formatting.nbytes(need)}"
        yield Finding("state", NOTE, text, advice)
    elif disk.kind in _GONE:
        advice = "it is memory, and gone when the machine restarts: take a folder on a disk"
        yield Finding("state", NOTE, text, advice)
    elif disk.kind in _FAR:
        yield Finding(
            "state",
            NOTE,
            text,
            "two servers on different machines must never use one folder: see that the scheduler"
            " starts the second one after the first has ended",
        )
    else:
        yield Finding("state", GOOD, text)
