"""The hostile benchmark: honest workers beside a crowd that neither reads nor writes as it should.

    python -m benchmarks.hostile [--size 32MiB] [--workers 4] [--readers 400] [--writers 400]
                                 [--rounds 3] [--seconds 10] [--json out.json] [--plot out.png]

A server process, worker processes that exchange without a pause, and a process that has a crowd of
connections: each of the ``--readers`` asks for the parameters and does not read them, each of the
``--writers`` announces a push of the whole gradient and sends it at ``--rate`` bytes per second.
The first crowd is measured apart: the server gets memory for the versions that its readers hold,
which a virtual machine may have to ask its host for, and clears it while workers wait.
The crowd comes together, and ``--again`` connections per second are made again, those that the
server has ended first, then the oldest: so the readers come to hold many versions. In each round
the workers exchange for ``--seconds`` alone, and then for as long beside the crowd. The figures are
the times of exchanges in both, and the server's memory beside the bound that it states.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Annotated, Any

import numpy as np
from rich.table import Table

from aiops.client import Client
from aiops.errors import UsageError
from aiops.lab.figures import Figure, Panel
from aiops.lab.processes import PipedProcess
from aiops.lab.run_record import machine, record
from benchmarks import footprint, plots, report
from benchmarks import hostile_crowd as crowd
from benchmarks.serving import serving
from benchmarks.sizes import MIB, format_size, size_flag


@dataclass(frozen=True)
class Options:
    """The options of the benchmark; ``size`` is bytes of the model."""

    size: Annotated[int, "of the model", size_flag] = 32 * MIB
    workers: int = 4
    readers: int = 400
    writers: int = 400
    rate: Annotated[int, "bytes per second of a writer"] = 2048
    again: Annotated[float, "connections per second that come back"] = 20.0
    policy: str = "asgd"
    live: Annotated[int, "the server's --live-versions"] = 16
    rounds: int = 3
    seconds: Annotated[float, "per round, alone and beside the crowd"] = 10.0

    def check(self) -> None:
        """Raise UsageError when an option makes no sense."""
        if min(self.workers, self.rounds, self.seconds, self.rate, self.live) <= 0:
            raise UsageError("workers, rounds, seconds, rate and live are positive")
        if min(self.readers, self.writers, self.again) < 0:
            raise UsageError("readers, writers and again are not negative")

    @property
    def crowd(self) -> tuple[int, int, int, float]:
        """The crowd's readers and writers, and their rates."""
        return self.readers, self.writers, self.rate, self.again


def run(options: Options, log: Callable[[str], None] = lambda line: None) -> dict[str, Any]:
    """Measure, and return the report: a cell for exchanges alone, and one beside the crowd.

    Raises
    ------
    UsageError
        When an option makes no sense.
    """
    options.check()
    footprint.check(options.policy)
    about = machine()
    times = {name: list[list[float]]() for name in ("before", "first", "alone", "beside")}
    flags = ("--no-shm", f"--live-versions={options.live}")
    with ExitStack() as stack:
        url, pid = stack.enter_context(serving(options.policy, *flags))
        workers = [
            stack.enter_context(PipedProcess("a worker", crowd.work))
            for _ in range(options.workers)
        ]
        for worker in workers:
            worker.send((url, options.size))
        for worker in workers:
            worker.receive()
        _laps(workers, 1.0)
        peaks, back = [], 0
        for number in range(options.rounds + 1):
            log(f"round {number} of {options.rounds}" if number else "the first crowd")
            times["alone" if number else "before"].append(_laps(workers, options.seconds))
            with PipedProcess("the crowd", crowd.stall) as stalled:
                stalled.send((url, options.size, *options.crowd))
                stalled.receive()
                footprint.forget_peak(pid)
                times["beside" if number else "first"].append(_laps(workers, options.seconds))
                peaks.append(footprint.peak(pid))
                stalled.send(None)
                back += stalled.receive()
        with Client(url) as asking:
            found = asking.stats()
    memory = {"peaks": peaks, "bound": found["memory"]["bound"], "terms": found["memory"]["terms"]}
    cells = [_cell(name, times[name]) for name in ("first", "alone", "beside")]
    return record(
        "benchmark",
        "hostile",
        options,
        {
            "cells": cells,
            "ratio": report.spread(_ratios(times["alone"], times["beside"])),
            "first_ratio": _ratios(times["before"], times["first"])[0],
            "memory": memory,
            "readers_cut": found["readers_cut"],
            "came_back": back,
        },
        about,
    )


def _cell(name: str, rounds: Sequence[Sequence[float]]) -> dict[str, Any]:
    every = [seconds for laps in rounds for seconds in laps]
    return {
        "cell": name,
        "exchanges": len(every),
        "median": report.spread([float(np.median(laps)) for laps in rounds]),
        "p99": report.spread([_p99(laps) for laps in rounds]),
        "longest": max(every),
    }


def _ratios(alone: Sequence[Sequence[float]], beside: Sequence[Sequence[float]]) -> list[float]:
    return [_p99(others) / _p99(laps) for laps, others in zip(alone, beside, strict=True)]


def _p99(laps: Sequence[float]) -> float:
    return float(np.percentile(laps, 99))


def _laps(workers: Sequence[PipedProcess], seconds: float) -> list[float]:
    """Have all workers exchange for a while; return the seconds of each exchange."""
    for worker in workers:
        worker.send(seconds)
    return [lap for worker in workers for lap in worker.receive()]


# ---------------------------------------------------------------- what is shown


def table(result: Mapping[str, Any]) -> Table:
    """Return the report as a table."""
    memory, options = result["memory"], result["options"]
    rows = [
        [
            cell["cell"],
            f"{cell['exchanges']:,}",
            *(f"{1e3 * cell[name]['median']:.1f}" for name in ("median", "p99")),
            f"{1e3 * cell['longest']:.1f}",
        ]
        for cell in result["cells"]
    ]
    ratio = result["ratio"]
    title = (
        f"{options['workers']} workers, {format_size(options['size'])}, beside"
        f" {options['readers']} stalled readers and {options['writers']} slow writers, ms;"
        f" p99 / alone {ratio['median']:.2f} ({ratio['min']:.2f} to {ratio['max']:.2f}), beside the"
        f" first crowd {result['first_ratio']:.2f}; memory"
        f" {max(memory['peaks']) / MIB:.0f} MiB of {memory['bound'] / MIB:.0f} MiB at most"
    )
    columns = ("exchanges", "number", "median", "p99", "longest")
    return report.table(title, columns, rows)


def figure(result: Mapping[str, Any]) -> Figure:
    """Draw the times."""
    cells = result["cells"]
    spreads = {
        name: {number: cell[name] for number, cell in enumerate(cells)}
        for name in ("median", "p99")
    }
    panel = Panel(
        *("exchanges of honest workers", "seconds", ""),
        [plots.rows(name, found) for name, found in spreads.items()],
        bottom=0,
        ticks=[cell["cell"] for cell in cells],
    )
    return Figure("Honest workers beside a hostile crowd", [panel], 1)


def main(argv: Sequence[str] | None = None) -> None:
    """Run from the command line; exits with 2 when an option is wrong."""
    report.command(Options(), run, table, argv, drawn=figure)


if __name__ == "__main__":
    main()
