"""The memory benchmark: what a server holds, beside what it needs.

    python -m benchmarks.memory [--size 1GiB] [--workers 2] [--transports tcp,views]
                                [--policy asgd] [--seconds 10] [--json out.json] [--plot out.png]

A server process and ``--workers`` worker processes that exchange as fast as they can, as in
`benchmarks.exchange`, while the server's memory is looked at many times a second: its own pages,
and the shared segments that it has mapped, each once and in full. ``tcp``, ``same-host`` (the
workers have arrays of their own), ``views`` (they read the server's) and ``shards`` (two of them,
over TCP, counted together) are measured one after the other. The bound is the sum of

* the parameters: room for one version that is being made, or waits to be,
* the versions that are alive, the current one among them (as ``aiops stats`` has it; the most that
  were seen; it does not count the room, and ``spare`` are more of that),
* the optimiser's state,
* a receive buffer for each worker, but for no more than four (in shared memory: the workers'
  gradients, which the server reads where they are),
* the program itself: what a server of the same settings holds whose model is tiny.

``peak / bound`` should be no more than 1.1, and ``drift``, the mean of the last quarter of the time
beside that of the first, about 0. Up to 64 MiB all parameters are checked in the end.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from rich.table import Table

from aiops.algorithms import find
from aiops.errors import UsageError, nearest
from aiops.lab.figures import Figure, Panel, Series
from aiops.lab.processes import ProcessFailed
from aiops.lab.run_record import machine, record
from benchmarks import footprint, report
from benchmarks.compare import Cell
from benchmarks.footprint import Sample, Watch, family
from benchmarks.peers import base
from benchmarks.peers.base import Job
from benchmarks.peers.policy import LEFT_OUT
from benchmarks.peers.team import Team
from benchmarks.sizes import GIB, KIB, MIB, format_size, size_flag

PEERS: Mapping[str, tuple[str, int]] = {
    "tcp": ("aiops", 1),
    "same-host": ("shared", 1),
    "views": ("views", 1),
    "shards": ("aiops", 2),
}
"""The peers of the exchange benchmark, by transport, and on how many shards each is."""
BUFFERS = 4
"""Receive buffers that a server has room for, at most."""
_GOAL = 1.1
_TINY = 4 * KIB
_CHECKED = 64 * MIB
_COPIES = 3  # of the model in a worker's process: parameters, gradient, and one in making


@dataclass(frozen=True)
class Options:
    """The options of the benchmark; ``size`` is bytes of parameters."""

    size: Annotated[int, "of the parameters", size_flag] = GIB
    workers: int = 2
    transports: Annotated[tuple[str, ...], "transports"] = tuple(PEERS)
    policy: str = "asgd"
    seconds: Annotated[float, "per transport"] = 10.0
    interval: Annotated[float, "seconds between samples"] = 0.1
    deadline: Annotated[float, "seconds of any one step"] = 300.0

    def check(self) -> None:
        """Raise UsageError when an option makes no sense, or the machine is too small."""
        if min(self.workers, self.seconds, self.interval, self.deadline) <= 0:
            raise UsageError("workers, seconds, interval and deadline are positive")
        for name in self.transports:
            if name not in PEERS:
                raise UsageError(f"no transport is called {name!r}; {nearest(name, PEERS)}")
        if self.policy in LEFT_OUT:
            raise UsageError(f"{self.policy} cannot be measured here: {LEFT_OUT[self.policy]}")
        footprint.check(self.policy)
        wanted = self.size * (self.states + 2 + BUFFERS + _COPIES * self.workers)
        free = _available()
        if wanted > free:
            raise UsageError(
                f"a model of {format_size(self.size)} and {self.workers} workers may take"
                f" {wanted / GIB:.1f} GiB, and {free / GIB:.1f} are free: choose a smaller --size"
                " or fewer --workers"
            )

    @property
    def states(self) -> int:
        """The number of arrays of the model's size that the policy's rule keeps."""
        return len(find(self.policy)().rule().state)


def _available() -> int:
    lines = Path("/proc/meminfo").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("MemAvailable"))


def run(options: Options, log: Callable[[str], None] = lambda line: None) -> dict[str, Any]:
    """Measure, and return the report: a cell per transport, with every sample.

    Raises
    ------
    UsageError
        When an option makes no sense.
    """
    options.check()
    about, found = machine(), []
    for transport in options.transports:
        log(f"measuring {format_size(options.size)} over {transport}")
        cell: dict[str, Any] = {"cell": transport, "transport": transport, "failed": None}
        try:
            program = _program(options, transport)
            samples, cycles = _watched(options, transport)
            cell |= {"cycles": cycles, **_figures(options, program, samples)}
        except ProcessFailed as error:
            log(f"{transport} failed: {error}")
            cell["failed"] = str(error)
        found.append(cell)
    return record("benchmark", "memory", options, {"cells": found}, about)


@contextmanager
def _team(options: Options, transport: str, size: int, workers: int) -> Iterator[Team]:
    """Run a server and workers that have met."""
    name, shards = PEERS[transport]
    peer = base.load(name)
    settings = {**peer.SETTINGS, "policy": options.policy, "shards": shards}
    with ExitStack() as stack:
        job = Job(name, size // 4, workers, settings)
        team = Team(job, options.deadline, peer.ENVIRONMENT, transport)
        stack.callback(team.kill)
        team.launch()
        team.connect()
        yield team


def _program(options: Options, transport: str) -> int:
    """Return what a server holds that has next to no parameters, but all its code."""
    with _team(options, transport, _TINY, 1) as team:
        team.run(50)
        held = footprint.held(*family(team.server_process())).total
        team.close()
    return held


def _watched(options: Options, transport: str) -> tuple[list[Sample], int]:
    """Have the workers exchange for a while; return what was seen, and how many cycles."""
    with _team(options, transport, options.size, options.workers) as team:
        team.run(2)  # what is made once is made
        pids = family(team.server_process())
        with Watch(pids, team.address, options.interval, options.deadline) as watch:
            cycles, begin = 1, time.perf_counter()
            # Never without a sample, and never more than what the check can count.
            while time.perf_counter() - begin < options.seconds or not watch.samples:
                if team.total + cycles * options.workers > base.MAX_CYCLES:
                    break
                before = time.perf_counter()
                team.run(cycles)
                if time.perf_counter() - before < min(1.0, options.seconds / 10):
                    cycles *= 2
        if options.policy == "asgd" and options.size <= _CHECKED:
            team.finish()
        else:
            team.close()
        if not watch.samples:
            raise ProcessFailed("the server told nothing of itself while it was watched")
        return watch.samples, team.total


def _figures(options: Options, program: int, samples: Sequence[Sample]) -> dict[str, Any]:
    totals = [sample.own + sample.segments for sample in samples]
    alive = max(sample.alive for sample in samples)
    buffers = min(BUFFERS, options.workers)
    bound = program + options.size * (1 + alive + options.states + buffers)
    quarter = max(1, len(totals) // 4)
    first, last = statistics.fmean(totals[:quarter]), statistics.fmean(totals[-quarter:])
    return {
        "program_bytes": program,
        "state_bytes": options.size * options.states,
        "buffer_bytes": options.size * buffers,
        "versions_alive": alive,
        "versions_spare": max(sample.spare for sample in samples),
        "bound_bytes": bound,
        "peak_bytes": max(totals),
        "peak_of_bound": max(totals) / bound,
        "drift": last / first - 1,
        "samples": [sample._asdict() for sample in samples],
    }


def table(result: Mapping[str, Any]) -> Table:
    """Make the table of a report."""
    rows = []
    for cell in result["cells"]:
        if cell["failed"]:
            rows.append([cell["transport"], "failed", *["-"] * (len(_COLUMNS) - 2)])
            continue
        rows.append(
            [
                *(cell["transport"], f"{cell['cycles']:,}", f"{len(cell['samples']):,}"),
                *(str(cell["versions_alive"]), str(cell["versions_spare"])),
                *(_mib(cell[f"{what}_bytes"]) for what in ("state", "buffer", "program")),
                *(_mib(cell["bound_bytes"]), _mib(cell["peak_bytes"])),
                *(f"{cell['peak_of_bound']:.2f}", f"{cell['drift']:+.1%}"),
            ]
        )
    options = result["options"]
    title = (
        f"A server's memory in MiB: {options['policy']}, {format_size(options['size'])} of"
        f" parameters, {options['workers']} workers, {options['seconds']:g} s"
    )
    return report.table(title, _COLUMNS, rows)


_COLUMNS = (
    *("transport", "exchanges", "samples", "versions", "spare", "state", "buffers", "program"),
    *("bound", "peak", "peak / bound", "drift"),
)


def _mib(nbytes: float) -> str:
    return report.amount(nbytes / MIB)


def failures(result: Mapping[str, Any]) -> list[str]:
    """Return one line per transport that failed."""
    return [f"{cell['cell']}: {cell['failed']}" for cell in result["cells"] if cell["failed"]]


def notes(result: Mapping[str, Any]) -> Iterator[str]:
    """Yield notes on the goal, for below the table."""
    shares = [cell["peak_of_bound"] for cell in result["cells"] if not cell["failed"]]
    if shares:
        yield f"the peak is at most {max(shares):.2f} times the bound (asked: {_GOAL})"


def cells(result: Mapping[str, Any]) -> Iterator[Cell]:
    """Yield what can be compared with another run's: the peak beside the bound."""
    options = result["options"]
    for cell in result["cells"]:
        if not cell["failed"]:
            size = format_size(options["size"])
            where = f"{cell['cell']}, {options['policy']}, {size}, {options['workers']} workers"
            yield Cell.once(where, "peak", cell["peak_of_bound"], beside="bound", less=True)


def figure(result: Mapping[str, Any]) -> Figure:
    """Draw memory over time, below its bound, a panel per transport."""
    panels = []
    for cell in result["cells"]:
        samples = cell.get("samples", ())
        seconds = [sample["seconds"] for sample in samples]
        held = [(sample["own"] + sample["segments"]) / MIB for sample in samples]
        bound = cell.get("bound_bytes", 0) / MIB
        lines = [
            Series("bound", seconds, [[bound] * len(seconds)]),
            Series("held", seconds, [held]),
        ]
        top = 1.1 * max(bound, *held, 1.0)
        panels.append(Panel(cell["transport"], "seconds", "MiB", lines, bottom=0, top=top))
    size = format_size(result["options"]["size"])
    return Figure(f"A server's memory, {size} of parameters", panels, min(max(len(panels), 1), 2))


def main(argv: Sequence[str] | None = None) -> None:
    """Run from the command line; exits with 1 when something failed, 2 when an option is wrong."""
    report.command(Options(), run, table, argv, drawn=figure, failures=failures, notes=notes)


if __name__ == "__main__":
    main()
