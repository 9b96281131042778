"""The links benchmark: one model on 1, 2 and 4 servers, each with a network link of its own.

    python -m benchmarks.links [--size 256MiB] [--servers 1,2,4] [--workers 8] [--rate 1gbit]
                               [--seconds 60] [--json out.json]

A model is spread over servers when one network card is too slow for it. So each server is in a
network namespace of its own, behind a link that a token bucket (``tc tbf``) limits to ``--rate`` in
each direction; all workers are in another namespace, whose link has no limit. An exchange is a push
of the whole model and a fetch of the new parameters, so the model crosses once in each direction.
It is counted by the bytes that the servers' links have moved, TCP's own headers included: half of
both directions together, divided by the size. ``of the links`` is what crosses in one direction, as
a share of what the links can carry.
``busy`` is the share of all processors' time that the machine worked meanwhile: servers, workers
and the simulated network are on one machine, and where it comes near 100 % the processors are the
limit, and not the links.

The time that counts begins when each worker has made an exchange. It needs Linux, root, and ``ip``
and ``tc`` of iproute2. The namespaces are removed in the end.
"""

from __future__ import annotations

import json
import os
import secrets
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from rich.table import Table

from aiops.errors import UsageError
from aiops.lab.processes import ONE_THREAD, ChildProcess, clean_environment, command
from aiops.lab.run_record import machine, record
from aiops.lab.training_run import START_DEADLINE
from benchmarks import report
from benchmarks.compare import Cell
from benchmarks.sizes import MIB, format_size, parse_size

_PORT = 7171
_NET = "10.77.0"  # in namespaces of their own: no other machine is on it
_PATIENCE = 900.0  # seconds that a worker has for its first exchange
_GOALS = {2: 1.8, 4: 3.4}
"""The goals for the exchanges a second of several servers, beside those of one."""


@dataclass(frozen=True)
class Options:
    """The options of the benchmark; the size is that of the model in bytes."""

    size: Annotated[int, "of the model", parse_size] = 256 * MIB
    servers: Annotated[tuple[int, ...], "numbers of servers"] = (1, 2, 4)
    workers: Annotated[int, "worker processes"] = 8
    rate: Annotated[str, "of each server's link, as tc writes it"] = "1gbit"
    seconds: Annotated[float, "that are measured"] = 60.0

    def check(self) -> None:
        """Raise UsageError when an option makes no sense."""
        if min(*self.servers, self.workers) < 1 or not self.seconds > 0:
            raise UsageError("numbers of servers, of workers and of seconds are positive")
        if self.size % 4096 or self.size < 4096 * max(self.servers):
            raise UsageError("--size is a multiple of 4 KiB, at least that for each server")


def missing() -> str | None:
    """Return why it cannot run here; None: it can."""
    if os.name != "posix" or os.geteuid() != 0:
        return "network namespaces need root"
    lacking = [name for name in ("ip", "tc") if shutil.which(name) is None]
    return f"{' and '.join(lacking)} of iproute2 must be installed" if lacking else None


def run(options: Options, log: Callable[[str], None] = lambda line: None) -> dict[str, Any]:
    """Measure, and return the report: a row for each number of servers.

    Raises
    ------
    UsageError
        When an option makes no sense, or this system cannot have the namespaces.
    """
    options.check()
    why = missing()
    if why is not None:
        raise UsageError(f"aiops bench links: {why}")
    about, rows = machine(), list[dict[str, Any]]()
    for servers in options.servers:
        log(f"measuring {format_size(options.size)} on {servers} servers")
        with network(servers, options.rate) as hosts:
            early, late = _measured(options, hosts)
        rows.append({"servers": servers, **figures(early, late, options.size)})
        log(f"{rows[-1]['per_second']:.3f} exchanges/s, busy {rows[-1]['busy']:.0%}")
    link = link_rate(options.rate)
    for row in rows:
        row["x"] = row["per_second"] / rows[0]["per_second"] * rows[0]["servers"]
        row["of_link"] = row["bytes_per_second"] / (link * row["servers"])
    return record("benchmark", "links", options, {"rows": rows}, about)


@dataclass(frozen=True)
class Counters:
    """The state of the links and of the processors at a time.

    ``seconds``: of the monotonic clock; ``moved``: bytes of all servers' links, both ways;
    ``busy``, ``idle``: seconds of all processors together.
    """

    seconds: float
    moved: int
    busy: float
    idle: float

    @classmethod
    def now(cls, hosts: Sequence[str]) -> Counters:
        """Read them; ``hosts``: the servers' namespaces."""
        moved = 0
        for host in hosts:
            text = _run("ip", "-json", "-s", "-n", host, "link", "show", "dev", "eth0")
            [device] = json.loads(text)
            moved += sum(device["stats64"][way]["bytes"] for way in ("rx", "tx"))
        fields = Path("/proc/stat").read_text().splitlines()[0].split()[1:9]
        ticks = [int(field) / os.sysconf("SC_CLK_TCK") for field in fields]
        idle = ticks[3] + ticks[4]
        return cls(time.monotonic(), moved, sum(ticks) - idle, idle)


def figures(early: Counters, late: Counters, size: int) -> dict[str, float]:
    """Return what has happened between two moments."""
    seconds, busy, idle = (
        getattr(late, name) - getattr(early, name) for name in ("seconds", "busy", "idle")
    )
    each_way = (late.moved - early.moved) / 2 / seconds
    return {
        "per_second": each_way / size,
        "bytes_per_second": each_way,
        "seconds": seconds,
        "busy": busy / max(busy + idle, 1e-9),
    }


def link_rate(text: str) -> float:
    """Return a rate that ``tc`` understands in bytes per second.

    >>> link_rate("1gbit"), link_rate("100mbit")
    (125000000.0, 12500000.0)
    """
    for unit, bits in (("gbit", 1e9), ("mbit", 1e6), ("kbit", 1e3)):
        number = text.removesuffix(unit)
        if number != text and number.replace(".", "", 1).isdigit():
            return float(number) * bits / 8
    raise UsageError(f"--rate {text!r}: write it as tc does, such as 1gbit or 100mbit")


# ---------------------------------------------------------------- the network


@contextmanager
def network(servers: int, rate: str) -> Iterator[list[str]]:
    """Make a namespace for each server, behind a link, and one for all workers; remove them.

    Yields their names, that of the workers last. Host n has the address ``10.77.0.n``, from 1. They
    are joined by a bridge in one more namespace.
    """
    link_rate(rate)
    tag = f"aiops{os.getpid()}"
    hosts, switch = [f"{tag}h{n}" for n in range(1, servers + 2)], f"{tag}sw"
    made = list[str]()
    try:
        for name in (switch, *hosts):
            _ip("netns", "add", name)
            made.append(name)
            _ip("-n", name, "link", "set", "lo", "up")
        _ip("-n", switch, "link", "add", "br0", "type", "bridge")
        _ip("-n", switch, "link", "set", "br0", "up")
        for number, host in enumerate(hosts, 1):
            port = f"p{number}"
            pair = ("link", "add", port, "netns", switch, "type", "veth", "peer", "name", "eth0")
            _ip(*pair, "netns", host)
            _ip("-n", switch, "link", "set", port, "master", "br0", "up")
            _ip("-n", host, "addr", "add", f"{_NET}.{number}/24", "dev", "eth0")
            _ip("-n", host, "link", "set", "eth0", "up")
            if number <= servers:
                for inside, device in ((host, "eth0"), (switch, port)):
                    _limit(inside, device, rate)
        yield hosts
    finally:
        for name in reversed(made):
            subprocess.run(("ip", "netns", "del", name), check=False, capture_output=True)


def _limit(namespace: str, device: str, rate: str) -> None:
    # A queue as switches have. A longer one (50 ms: 6 MB) delays acknowledgements by as much as a
    # connection's window lasts, and one server then uses 0.82 of its link in place of 0.91.
    limits = ("rate", rate, "burst", "256kb", "latency", "10ms")
    _run("tc", "-n", namespace, "qdisc", "add", "dev", device, "root", "tbf", *limits)


def _ip(*words: str) -> None:
    _run("ip", *words)


def _run(*words: str) -> str:
    done = subprocess.run(words, check=False, capture_output=True, text=True, timeout=30)
    if done.returncode:
        raise UsageError(
            f"{' '.join(words)}: {done.stderr.strip()}: this system cannot have the namespaces"
        )
    return done.stdout


# ---------------------------------------------------------------- servers and workers


def _measured(options: Options, hosts: Sequence[str]) -> tuple[Counters, Counters]:
    """Run servers and workers; return the counters when all are at work, and some time later."""
    environment = {**clean_environment(), **ONE_THREAD, "AIOPS_TOKEN": secrets.token_hex(16)}
    flags = ("--policy=asgd", "--set=lr=0.01", f"--port={_PORT}", "--shard-bytes=1")
    followers, workers = range(2, len(hosts)), hosts[-1]

    def child(name: str, host: str, module: str, *arguments: str, grace: float = 5) -> ChildProcess:
        words = ("ip", "netns", "exec", host, *command(module, *arguments))
        return ChildProcess(name, words, environment=environment, lines=True, grace=grace)

    with ExitStack() as stack:

        def server(number: int, *more: str) -> str:
            given = (f"--host={_NET}.{number}", *flags, "--log-level=warning", *more)
            made = child(f"server {number}", hosts[number - 1], "aiops.server", *given)
            return stack.enter_context(made).first_line(START_DEADLINE)

        for number in followers:
            server(number, "--follower")
        named = [f"--followers={_NET}.{number}:{_PORT}" for number in followers]
        url = server(1, *named)
        given = url, str(options.size // 4)
        team = [
            stack.enter_context(
                child(f"worker {number}", workers, "benchmarks.links_worker", *given)
            )
            for number in range(options.workers)
        ]
        for worker in team:
            worker.first_line(_PATIENCE)
        early = Counters.now(hosts[:-1])
        time.sleep(options.seconds)
        late = Counters.now(hosts[:-1])
        for worker in team:
            if worker.popen.poll() is not None:
                raise UsageError(f"{worker.name} ended with status {worker.popen.poll()}")
        return early, late


# ---------------------------------------------------------------- the report


def table(result: Mapping[str, Any]) -> Table:
    """Make the table of a report."""
    options = result["options"]
    title = (
        f"{format_size(options['size'])}, {options['workers']} workers, a link of"
        f" {options['rate']} for each server"
    )
    rows = [
        [
            *(str(row["servers"]), f"{row['per_second']:.3f}", f"{row['x']:.2f}"),
            f"{row['bytes_per_second'] / 1e6:.0f}",
            *(f"{row['of_link']:.0%}", f"{row['busy']:.0%}"),
        ]
        for row in result["rows"]
    ]
    columns = ("servers", "exchanges/s", "x", "MB/s each way", "of the links", "busy")
    return report.table(title, columns, rows)


def notes(result: Mapping[str, Any]) -> Iterator[str]:
    """Yield notes on the goals, for below the table."""
    for row in result["rows"]:
        goal = _GOALS.get(row["servers"])
        if goal is not None:
            yield f"{row['servers']} servers: {row['x']:.2f} times one (asked: {goal})"


def cells(result: Mapping[str, Any]) -> Iterator[Cell]:
    """Yield what can be compared with another run's."""
    size = format_size(result["options"]["size"])
    for row in result["rows"]:
        where = f"{size}, {row['servers']} servers of {result['options']['rate']}"
        yield Cell.once(where, "of the links", row["of_link"])


def main(argv: Sequence[str] | None = None) -> None:
    """Run from the command line; exits with 2 when an option is wrong."""
    report.command(Options(), run, table, argv, notes=notes)


if __name__ == "__main__":
    main()
