"""The scale benchmark: one server with 1 to 64 worker processes, and over 1 to 4 shards.

    python -m benchmarks.scale [--sizes 4KiB,1MiB] [--workers 1,4,16,64] [--same-host]
                               [--shards 1,2,4] [--shard-workers 4] [--peers pyzmq,gloo,...]
                               [--rounds 5] [--seconds 1] [--json out.json] [--plot out.png]

A cycle is an exchange, as in `benchmarks.exchange`: a push, plain SGD on the server, the new
parameters in the worker's own array; in the end all parameters are checked. Workers are
processes with the blocking `aiops.Client` and nothing else. For each size all numbers of workers
take turns in interleaved rounds, and then all numbers of shards with ``--shard-workers`` workers
(over TCP). Beside the shards, in the same rounds, as many workers
exchange with the peers of `benchmarks.exchange`: none of these spreads one set of parameters over
several servers, so each has one, and Ray's actor is in shared memory. Throughput is that of all
workers together; ``x`` is the ratio to the row of the count beside it, in the same round; ``p99 /
p50`` says how long the tail is. Figures are medians over the rounds, percentiles over all cycles of
all workers.

64 workers on two cores wait for a core more than for the server: what is asked of them is that they
do not throw the server off its pace.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any

from rich.table import Table

from aiops.errors import UsageError, nearest
from aiops.lab.figures import Figure, Panel, Series
from aiops.lab.run_record import machine, record
from benchmarks import plots, report
from benchmarks.compare import Cell
from benchmarks.peers import base, ours
from benchmarks.peers.base import Job, Setting
from benchmarks.peers.turn import MeasuringTime, beside, contest
from benchmarks.sizes import KIB, MIB, format_size, parse_size

_BESIDE = 4  # workers with whom more of them are compared
_MOST = 64
_KEPT = 0.9  # the goal for the rate of many workers beside that of few
_TAIL = 3.0  # the goal for every p99 beside its median


@dataclass(frozen=True)
class Options(MeasuringTime):
    """The options of the benchmark; sizes are bytes per gradient."""

    seconds: Annotated[float, "a team's time per round"] = 1.0
    deadline: Annotated[float, "seconds before a team is killed"] = 180.0
    sizes: Annotated[tuple[int, ...], "gradient sizes", parse_size] = (4 * KIB, MIB)
    workers: Annotated[tuple[int, ...], "numbers of worker processes"] = (1, 4, 16, 64)
    shards: Annotated[tuple[int, ...], "numbers of server processes"] = (1, 2, 4)
    shard_workers: Annotated[int, "workers on shards"] = 4
    peers: Annotated[tuple[str, ...], "peers beside the shards"] = (
        "pyzmq",
        "gloo",
        "grpc",
        "torch_rpc",
        "ray",
    )
    same_host: Annotated[bool, "share memory instead of TCP"] = False

    def check(self) -> None:
        """Raise UsageError when an option makes no sense."""
        super().check()
        if min(*self.workers, *self.shards, self.shard_workers, 1) < 1:
            raise UsageError("numbers of workers and shards are positive")
        if max(self.shards, default=1) * 4 > min(self.sizes):
            raise UsageError("a gradient has at least one float32 for every shard: larger --sizes")
        for name in self.peers:
            if name not in base.MODULES:
                raise UsageError(f"unknown peer {name!r}; {nearest(name, base.MODULES)}")


def run(options: Options, log: Callable[[str], None] = lambda line: None) -> dict[str, Any]:
    """Measure, and return the report: two cells per size, ``by`` workers and ``by`` shards.

    Their ``contenders`` are by that number, and ``peers`` by name.

    Raises
    ------
    UsageError
        When an option makes no sense.
    """
    options.check()
    about, found = machine(), []
    reasons = {name: base.load(name).missing() for name in options.peers if options.shards}
    skipped = {name: reason for name, reason in reasons.items() if reason}
    for name, reason in skipped.items():
        log(f"skipping {name}: {reason}")
    for size in options.sizes:
        teams: dict[str, tuple[int, dict[str, Job]]] = {}
        if options.workers:
            first = _BESIDE if _BESIDE in options.workers else options.workers[0]
            near = {"no_shm": not options.same_host}
            jobs = {str(count): _job(size, count, near) for count in options.workers}
            teams["workers"] = first, jobs
        if options.shards:
            jobs = {
                str(count): _job(size, options.shard_workers, {"shards": count})
                for count in options.shards
            }
            for name in (name for name in reasons if name not in skipped):
                peer = base.load(name)
                jobs[name] = Job(name, size // 4, options.shard_workers, peer.SETTINGS)
            teams["shards"] = options.shards[0], jobs
        for by, (first, jobs) in teams.items():
            numbers = [name for name in jobs if name.isdigit()]
            others = "".join(f", {name}" for name in jobs if name not in numbers)
            log(f"measuring {format_size(size)} with {', '.join(numbers)} {by}{others}")
            contenders = contest(jobs, options, log, beside(str(first)))
            for figures in contenders.values():
                if "cycles_per_second" in figures:
                    tails = [one["p99_us"] / one["p50_us"] for one in figures["rounds"]]
                    figures["tail"] = report.spread(tails)
            cell = {
                "cell": f"{format_size(size)}, by {by}",
                "size": size,
                "by": by,
                "beside": first,
            }
            peers = {name: contenders.pop(name) for name in options.peers if name in contenders}
            found.append({**cell, "contenders": contenders, "peers": peers})
    return record(
        "benchmark",
        "scale",
        options,
        {
            "skipped": skipped,
            "cells": found,
        },
        about,
    )


def _job(size: int, workers: int, changes: Mapping[str, Setting]) -> Job:
    return Job("aiops", size // 4, workers, {**ours.SETTINGS, **changes})


def all_contenders(cell: Mapping[str, Any]) -> dict[str, Any]:
    """Return the figures of a cell's numbers, and of the peers beside them."""
    return {**cell["contenders"], **cell.get("peers", {})}


def failures(result: Mapping[str, Any]) -> list[str]:
    """Return one line for each that failed."""
    cells = [{**cell, "contenders": all_contenders(cell)} for cell in result["cells"]]
    return report.failures({"cells": cells})


def table(result: Mapping[str, Any]) -> Table:
    """Make the table of a report."""
    rows: list[list[str]] = []
    for cell in result["cells"]:
        head, key = cell["cell"], f"x_{cell['beside']}"
        for name, figures in all_contenders(cell).items():
            gb = figures.get("gb_per_second")
            rows.append(
                [
                    *(head, name, *report.throughput(figures)),
                    f"{gb['median']:.2f}" if gb else "-",
                    *(report.times(figures, key), f"of {cell['beside']}"),
                    *report.points(figures),
                    report.times(figures, "tail"),
                ]
            )
            head = ""
        rows.append([])
    options = result["options"]
    where = "in shared memory" if options["same_host"] else "over TCP"
    title = (
        f"Exchanges of all workers together, {where} (shards: TCP, {options['shard_workers']}"
        f" workers); medians over {options['rounds']} rounds"
    )
    columns = (
        *("size", "count", *report.THROUGHPUT, "GB/s", "x", ""),
        *(*report.POINTS, "p99 / p50"),
    )
    return report.table(title, columns, rows)


def notes(result: Mapping[str, Any]) -> Iterator[str]:
    """Yield notes on the goals, for below the table."""
    cells = [cell for cell in result["cells"] if cell["by"] == "workers"]
    kept = [
        f"{report.times(cell['contenders'][str(_MOST)], f'x_{_BESIDE}')} at"
        f" {format_size(cell['size'])}"
        for cell in cells
        if cell["beside"] == _BESIDE and str(_MOST) in cell["contenders"]
    ]
    if kept:
        yield f"{_MOST} workers beside {_BESIDE}: {', '.join(kept)} (asked: {_KEPT})"
    tails = [
        figures["tail"]["median"]
        for cell in cells
        for figures in cell["contenders"].values()
        if "tail" in figures
    ]
    if tails:
        few = sum(tail <= _TAIL for tail in tails)
        yield (
            f"p99 within {_TAIL:g} times the median in {few} of {len(tails)} cells, at most"
            f" {max(tails):.1f} times"
        )


def cells(result: Mapping[str, Any]) -> Iterator[Cell]:
    """Yield what can be compared with another run's: throughput beside a few, and the tails."""
    for cell in result["cells"]:
        for name, figures in cell["contenders"].items():
            if "cycles_per_second" not in figures:
                continue
            near = _near(result) and cell["by"] == "workers"
            where, key = f"{cell['cell']}, {name}", f"x_{cell['beside']}"
            where += ", same host" * near
            if name == str(cell["beside"]):
                yield Cell.of(where, "cycles/s", figures["cycles_per_second"])
            elif key in figures:
                few = f"{cell['beside']} {cell['by']}"
                yield Cell.of(where, "cycles/s", figures[key], beside=few)
            yield Cell.of(where, "p99", figures["tail"], beside="p50", less=True)


def figure(result: Mapping[str, Any]) -> Figure:
    """Draw throughput against workers and against shards, and latencies, a row for each size."""
    panels = []
    for cell in result["cells"]:
        names, size = list(cell["contenders"]), format_size(cell["size"])
        line = plots.rounds("aiops", list(cell["contenders"].values()), "cycles_per_second")
        lines = [
            line,
            *(_level(name, figures, len(names)) for name, figures in cell.get("peers", {}).items()),
        ]
        title, ylabel = f"{size}, by {cell['by']}", "cycles/s, all workers"
        panels.append(Panel(title, cell["by"], ylabel, lines, bottom=0, ticks=names))
        if cell["by"] == "workers":
            crowds = {plots.crowd(int(name)): each for name, each in cell["contenders"].items()}
            panels.append(plots.latencies(f"{size}, latency", crowds))
    across = len(panels) // len(result["options"]["sizes"])
    columns = across if across > 1 else min(len(panels), 3)
    return Figure("Exchanges with one server, and with several shards", panels, columns)


def _level(name: str, figures: Mapping[str, Any], count: int) -> Series:
    """Draw a peer that has one server, whatever the number of ours."""
    level = plots.rounds(f"{name}, one server", [figures], "cycles_per_second")
    return replace(level, x=range(count), ys=[list(ys) * count for ys in level.ys])


def _near(result: Mapping[str, Any]) -> bool:
    return bool(result["options"]["same_host"])


def main(argv: Sequence[str] | None = None) -> None:
    """Run from the command line; exits with 1 when something failed, 2 when an option is wrong."""
    report.command(
        Options(), run, table, argv, drawn=figure, failures=failures, near=_near, notes=notes
    )


if __name__ == "__main__":
    main()
