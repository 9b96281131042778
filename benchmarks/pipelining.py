"""The pipelining benchmark: requests over one connection, with one to sixteen of them under way.

    python -m benchmarks.pipelining [--size 4KiB] [--in-flight 1,2,4,8,16]
                                    [--ways push,fetch,exchange] [--transports tcp,same-host]
                                    [--rounds 5] [--seconds 0.4] [--json out.json] [--plot out.png]

A server process, and a client process with one `aiops.AsyncClient` under uvloop: several coroutines
share it, and each asks again as soon as it is answered. For every transport and kind of request the
teams take turns in interleaved rounds; ``x 1`` is throughput beside that of one request under way,
in the same round. All figures are medians over the rounds, percentiles over all requests; a request
waits for those before it, so its latency grows with them. In the end all parameters are
checked to the last bit: every push was applied, and once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

from rich.table import Table

from aiops.errors import UsageError, nearest
from aiops.lab.figures import Figure, Panel
from aiops.lab.run_record import machine, record
from benchmarks import plots, report
from benchmarks.compare import Cell
from benchmarks.peers import lanes
from benchmarks.peers.base import Job
from benchmarks.peers.lanes import WAYS
from benchmarks.peers.turn import MeasuringTime, beside, contest
from benchmarks.sizes import KIB, format_size, size_flag

TRANSPORTS = {"tcp": True, "same-host": False}
"""Over which they meet, and whether the server is told not to share memory."""
_GOAL = 8  # in flight, whose ratio to one is what is asked for


@dataclass(frozen=True)
class Options(MeasuringTime):
    """The options of the benchmark; ``size`` is bytes per model."""

    size: Annotated[int, "of the model", size_flag] = 4 * KIB
    in_flight: Annotated[tuple[int, ...], "requests under way"] = (1, 2, 4, 8, 16)
    ways: Annotated[tuple[str, ...], "requests"] = WAYS
    transports: Annotated[tuple[str, ...], "transports"] = tuple(TRANSPORTS)

    def check(self) -> None:
        """Raise UsageError when an option makes no sense."""
        super().check()
        for name in self.ways:
            if name not in WAYS:
                raise UsageError(f"no request is called {name!r}; {nearest(name, WAYS)}")
        for name in self.transports:
            if name not in TRANSPORTS:
                raise UsageError(f"no transport is called {name!r}; {nearest(name, TRANSPORTS)}")
        if min(self.in_flight) < 1 or 1 not in self.in_flight:
            raise UsageError(
                "--in-flight needs positive numbers, and 1 among them: it is compared with"
            )


def run(options: Options, log: Callable[[str], None] = lambda line: None) -> dict[str, Any]:
    """Measure, and return the report: per transport and kind of request a cell, and in it
    ``contenders``, by how many requests are under way.

    Raises
    ------
    UsageError
        When an option makes no sense.
    """
    options.check()
    about, found = machine(), []
    for transport in options.transports:
        for way in options.ways:
            log(f"measuring {way} over {transport}")
            settings = {**lanes.SETTINGS, "no_shm": TRANSPORTS[transport], "way": way}
            jobs = {
                str(count): Job(
                    "benchmarks.peers.lanes", options.size // 4, 1, {**settings, "lanes": count}
                )
                for count in options.in_flight
            }
            contenders = contest(jobs, options, log, beside("1"))
            for figures in contenders.values():
                figures.pop("gb_per_second", None)  # of an exchange, both ways
            found.append(
                {
                    "cell": f"{way}, {transport}",
                    "transport": transport,
                    "way": way,
                    "size": options.size,
                    "contenders": contenders,
                }
            )
    return record(
        "benchmark",
        "pipelining",
        options,
        {
            "cells": found,
        },
        about,
    )


def table(result: Mapping[str, Any]) -> Table:
    """Make the table of a report."""
    rows: list[list[str]] = []
    for cell in result["cells"]:
        head = [cell["transport"], cell["way"]]
        for name, figures in cell["contenders"].items():
            ratio = report.times(figures, "x_1")
            rows.append([*head, name, *report.throughput(figures), ratio, *report.points(figures)])
            head = ["", ""]
        rows.append([])
    title = (
        f"Requests over one connection, {format_size(result['options']['size'])}; medians over"
        f" {result['options']['rounds']} rounds"
    )
    columns = ("transport", "request", "in flight", *report.THROUGHPUT, "x 1", *report.POINTS)
    return report.table(title, columns, rows, text_columns=2)


def notes(result: Mapping[str, Any]) -> Iterator[str]:
    """Yield notes on the goal, for below the table."""
    ratios = [
        f"{cell['cell']} {report.times(cell['contenders'][str(_GOAL)], 'x_1')}"
        for cell in result["cells"]
        if str(_GOAL) in cell["contenders"]
    ]
    if ratios:
        yield f"{_GOAL} in flight beside one: {'; '.join(ratios)}"


def cells(result: Mapping[str, Any]) -> Iterator[Cell]:
    """Yield what can be compared with another run's: throughput beside one request under way."""
    for cell in result["cells"]:
        for name, figures in cell["contenders"].items():
            where = f"{cell['cell']}, {format_size(cell['size'])}, {name} in flight"
            if name == "1" and "cycles_per_second" in figures:
                yield Cell.of(where, "requests/s", figures["cycles_per_second"])
            elif "x_1" in figures:
                yield Cell.of(where, "requests/s", figures["x_1"], beside="1 in flight")


def figure(result: Mapping[str, Any]) -> Figure:
    """Draw throughput by requests under way, and the latencies of one kind of them."""
    transports = list(dict.fromkeys(cell["transport"] for cell in result["cells"]))
    names = [str(count) for count in result["options"]["in_flight"]]
    panels = []
    for transport in transports:
        lines = [
            plots.rounds(
                cell["way"],
                [cell["contenders"][name] for name in names],
                "cycles_per_second",
                1e-3,
            )
            for cell in result["cells"]
            if cell["transport"] == transport
        ]
        panels.append(
            Panel(transport, "in flight", "thousand requests/s", lines, bottom=0, ticks=names)
        )
    panels += [
        plots.latencies(
            cell["cell"],
            {f"{name} in flight": figures for name, figures in cell["contenders"].items()},
        )
        for cell in result["cells"]
        if cell["way"] == result["options"]["ways"][-1]  # the others' are much the same
    ]
    size = format_size(result["options"]["size"])
    return Figure(f"Requests over one connection, {size}", panels, len(transports))


def main(argv: Sequence[str] | None = None) -> None:
    """Run from the command line; exits with 1 when something failed, 2 when an option is wrong."""
    report.command(Options(), run, table, argv, drawn=figure, failures=report.failures, notes=notes)


if __name__ == "__main__":
    main()
