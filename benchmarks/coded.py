"""The coded benchmark: exchanges with a codec beside raw ones of the same model.

    python -m benchmarks.coded [--sizes 64KiB,256KiB,1MiB] [--workers 1,4]
                               [--codecs raw/raw,int8/raw,int8/int8] [--rounds 5] [--seconds 0.4]
                               [--json out.json] [--plot out.png]

A codec saves bytes on a slow link. On a fast one it must not cost much: loopback is as fast as a
link can be, so this is what coding costs where it saves nothing. A cycle is an exchange of a
blocking client over TCP. For every size and number of workers there are servers with each pair of
codecs, of gradients and of parameters, each a process of its own with its own workers; they take
turns in interleaved rounds, and ``x raw`` is exchanges a second beside the raw ones of the same
round.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Annotated, Any

from rich.table import Table

from aiops.codecs import find
from aiops.errors import UsageError
from aiops.lab.figures import Figure, Panel, Series
from aiops.lab.run_record import machine, record
from benchmarks import plots, report
from benchmarks.compare import Cell
from benchmarks.peers import kept
from benchmarks.peers.base import Job
from benchmarks.peers.kept import RAW
from benchmarks.peers.turn import MeasuringTime, beside, contest
from benchmarks.sizes import KIB, MIB, format_size, parse_size, short_size

BOTH_RAW = f"{RAW}/{RAW}"
"""What the others are compared with."""


@dataclass(frozen=True)
class Options(MeasuringTime):
    """The options of the benchmark; sizes are bytes per model."""

    sizes: Annotated[tuple[int, ...], "of the model", parse_size] = (64 * KIB, 256 * KIB, MIB)
    workers: tuple[int, ...] = (1, 4)
    codecs: Annotated[tuple[str, ...], "of gradients/of parameters"] = (
        *(BOTH_RAW, "int8/raw", "int8/int8", "bf16/raw", "topk:0.01/raw"),
    )

    def check(self) -> None:
        """Raise UsageError when an option makes no sense."""
        super().check()
        if not (self.sizes and self.workers) or min(self.workers) < 1:
            raise UsageError("sizes and workers are needed, and workers are positive")
        if BOTH_RAW not in self.codecs:
            raise UsageError(f"codecs are compared with {BOTH_RAW}: name it among --codecs")
        for name in self.codecs:
            for codec in _pair(name):
                if codec != RAW:
                    find(codec)


def _pair(name: str) -> tuple[str, str]:
    push, separator, fetch = name.partition("/")
    if not separator:
        raise UsageError(f"{name!r} names one codec: write PUSH/FETCH, such as int8/raw")
    return push, fetch


def run(options: Options, log: Callable[[str], None] = lambda line: None) -> dict[str, Any]:
    """Measure, and return the report: a cell per size and number of workers, and in it
    ``contenders``, by their codecs.

    Raises
    ------
    UsageError
        When an option makes no sense.
    """
    options.check()
    about, found = machine(), []
    for size, workers in product(options.sizes, options.workers):
        cell = f"{format_size(size)}, {plots.crowd(workers)}"
        log(f"measuring {cell}")
        jobs = {}
        for name in options.codecs:
            push, fetch = _pair(name)
            settings = {**kept.SETTINGS, "codec": push, "fetch_codec": fetch}
            jobs[name] = Job(kept.__name__, size // 4, workers, settings)
        contenders = contest(jobs, options, log, lambda turns: beside(BOTH_RAW)(turns))
        found.append({"cell": cell, "size": size, "workers": workers, "contenders": contenders})
    return record("benchmark", "coded", options, {"cells": found}, about)


_BESIDE = f"x_{BOTH_RAW}"


def table(result: Mapping[str, Any]) -> Table:
    """Make the table of a report."""
    rows: list[list[str]] = []
    for cell in result["cells"]:
        head = [format_size(cell["size"]), str(cell["workers"])]
        for name, figures in cell["contenders"].items():
            push, fetch = _pair(name)
            rows.append(
                [
                    *(*head, push, fetch, *report.throughput(figures)),
                    report.times(figures, _BESIDE),
                    *(f"{figures[key]:,.0f}" if key in figures else "-" for key in _POINTS),
                ]
            )
            head = [""] * 2
        rows.append([])
    columns = (
        *("size", "workers", "gradients", "parameters", *report.THROUGHPUT, "x raw"),
        *("p50 µs", "p99 µs"),
    )
    title = f"Exchanges with codecs; medians over {result['options']['rounds']} rounds"
    return report.table(title, columns, rows, text_columns=4)


_POINTS = ("p50_us", "p99_us")


def cells(result: Mapping[str, Any]) -> Iterator[Cell]:
    """Yield what can be compared with another run's: each pair of codecs beside raw."""
    for cell in result["cells"]:
        for name, figures in cell["contenders"].items():
            where = f"{cell['cell']}, {name}"
            if name == BOTH_RAW and "cycles_per_second" in figures:
                yield Cell.of(where, "exchanges/s", figures["cycles_per_second"])
            elif _BESIDE in figures:
                yield Cell.of(where, "exchanges/s", figures[_BESIDE], beside="raw")


def figure(result: Mapping[str, Any]) -> Figure:
    """Draw each pair's exchanges beside raw ones, a panel per number of workers."""
    names = [name for name in result["options"]["codecs"] if name != BOTH_RAW]
    panels = []
    for workers in result["options"]["workers"]:
        lines = []
        for cell in result["cells"]:
            if cell["workers"] == workers:
                label = short_size(cell["size"])
                found = [cell["contenders"][name] for name in names]
                line = plots.rounds(label, found, _BESIDE)
                lines.append(Series(label, line.x, line.ys, kind="rows", median=True))
        panels.append(Panel(plots.crowd(workers), "x raw", "", lines, bottom=0, ticks=names))
    return Figure("Exchanges a second with codecs, beside raw", panels, len(panels))


def main(argv: Sequence[str] | None = None) -> None:
    """Run from the command line; exits with 1 when something failed, 2 when an option is wrong."""
    report.command(Options(), run, table, argv, drawn=figure, failures=report.failures)


if __name__ == "__main__":
    main()
