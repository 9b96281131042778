"""The policies benchmark: what a step costs under every policy, beside asgd.

    python -m benchmarks.policies [--sizes 4KiB,4MiB] [--policies fasgd,sasgd] [--same-host]
                                  [--rounds 5] [--seconds 0.4] [--json out.json] [--plot out.png]

For every policy a server process and a worker process with the public `aiops.Worker`; a cycle is
one `step` with a gradient that takes no time to compute: a push, an update, a fetch. Policies that
exchange now and then are set to do it in every step (`benchmarks.peers.policy`), so that it is the
policy's mathematics and decisions that differ, on both sides: what local training saves is not
measured here, nor what waiting for others costs. ``average`` is left out, for it has no pushes. All
policies take turns in interleaved rounds; ``x asgd`` is steps a second beside asgd's in the same
round. Figures are medians over the rounds, percentiles over all steps.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

from rich.table import Table

from aiops.algorithms import find
from aiops.errors import UsageError
from aiops.lab.figures import Figure, Panel, Series
from aiops.lab.run_record import machine, record
from benchmarks import plots, report
from benchmarks.compare import Cell
from benchmarks.peers import policy as peer
from benchmarks.peers.base import Job
from benchmarks.peers.turn import MeasuringTime, beside, contest
from benchmarks.sizes import KIB, MIB, format_size, parse_size

_FIRST = "asgd"


@dataclass(frozen=True)
class Options(MeasuringTime):
    """The options of the benchmark; sizes are bytes per gradient, no policies are all of them."""

    sizes: Annotated[tuple[int, ...], "gradient sizes", parse_size] = (4 * KIB, 4 * MIB)
    policies: Annotated[tuple[str, ...], "names; none: all"] = ()
    same_host: Annotated[bool, "share memory instead of TCP"] = False

    def names(self) -> list[str]:
        """Return the policies, asgd first.

        Raises
        ------
        UsageError
            When one does not exist, or cannot be measured.
        """
        self.check()
        for name in self.policies:
            find(name)
            if name in peer.LEFT_OUT:
                raise UsageError(f"{name} cannot be measured here: {peer.LEFT_OUT[name]}")
        return list(dict.fromkeys((_FIRST, *(self.policies or peer.policies()))))


def run(options: Options, log: Callable[[str], None] = lambda line: None) -> dict[str, Any]:
    """Measure, and return the report: per size a cell, and in it ``contenders``, by policy.

    Raises
    ------
    UsageError
        When an option makes no sense.
    """
    names, about, found = options.names(), machine(), []
    left_out = {} if options.policies else dict(peer.LEFT_OUT)
    for name, why in left_out.items():
        log(f"leaving out {name}: {why}")
    for size in options.sizes:
        log(f"measuring {format_size(size)}: {', '.join(names)}")
        settings = {**peer.SETTINGS, "no_shm": not options.same_host}
        jobs = {
            name: Job("benchmarks.peers.policy", size // 4, 1, {**settings, "policy": name})
            for name in names
        }
        contenders = contest(jobs, options, log, beside(_FIRST))
        found.append({"cell": format_size(size), "size": size, "contenders": contenders})
    return record(
        "benchmark",
        "policies",
        options,
        {
            "settings": {name: list(peer.EVERY_STEP.get(name, ())) for name in names},
            "left_out": left_out,
            "cells": found,
        },
        about,
    )


def table(result: Mapping[str, Any]) -> Table:
    """Make the table of a report."""
    rows: list[list[str]] = []
    for cell in result["cells"]:
        head = cell["cell"]
        for name, figures in cell["contenders"].items():
            settings = " ".join(result["settings"][name])
            ratio = figures.get("x_asgd")
            spread = f"{ratio['min']:.2f}-{ratio['max']:.2f}" if ratio else "-"
            ratios = [report.times(figures, "x_asgd"), spread]
            shown = [*report.throughput(figures), *ratios, *report.points(figures)]
            rows.append([head, name, settings, *shown])
            head = ""
        rows.append([])
    where = "in shared memory" if result["options"]["same_host"] else "over TCP"
    title = (
        f"Steps of one worker under every policy, {where}; medians over"
        f" {result['options']['rounds']} rounds"
    )
    columns = (
        *("size", "policy", "settings", *report.THROUGHPUT, "x asgd", "min-max"),
        *report.POINTS,
    )
    return report.table(title, columns, rows, text_columns=3)


def cells(result: Mapping[str, Any]) -> Iterator[Cell]:
    """Yield what can be compared with another run's: each policy's steps beside asgd's."""
    for cell in result["cells"]:
        for name, figures in cell["contenders"].items():
            where = f"{cell['cell']}, {name}" + ", same host" * _near(result)
            if name == _FIRST and "cycles_per_second" in figures:
                yield Cell.of(where, "steps/s", figures["cycles_per_second"])
            elif "x_asgd" in figures:
                yield Cell.of(where, "steps/s", figures["x_asgd"], beside=_FIRST)


def figure(result: Mapping[str, Any]) -> Figure:
    """Draw each policy's steps beside asgd's, a panel per size."""
    names = [name for name in result["settings"] if name != _FIRST]
    panels = []
    for cell in result["cells"]:
        contenders = [cell["contenders"][name] for name in names]
        line = plots.rounds("steps/s beside asgd's", contenders, "x_asgd")
        rows = Series(line.label, line.x, line.ys, kind="rows", median=True)
        panels.append(Panel(cell["cell"], "x asgd", "", [rows], bottom=0, ticks=names))
    return Figure("What a step costs under every policy", panels, len(panels))


def _near(result: Mapping[str, Any]) -> bool:
    return bool(result["options"]["same_host"])


def main(argv: Sequence[str] | None = None) -> None:
    """Run from the command line; exits with 1 when something failed, 2 when an option is wrong."""
    report.command(Options(), run, table, argv, drawn=figure, failures=report.failures, near=_near)


if __name__ == "__main__":
    main()
