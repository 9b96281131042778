"""The exchange benchmark: aiops beside its peers, doing exactly the same work.

    python -m benchmarks.exchange [--sizes 4KiB,1MiB] [--workers 1,4] [--rounds 5]
                                  [--peers raw,aiops,pyzmq] [--settings raw.sndbuf=262144]
                                  [--json out.json] [--plot out.png]

The peers meet over loopback TCP or, with ``--peers same-host``, in shared memory. One cycle is a
push of a float32 gradient of S bytes, plain SGD on the server, and the new parameters in the
worker's own array; `benchmarks.peers.base` states the rules and how each peer is checked. For every
size and number of workers, all peers are started and then take turns: a round runs each for a
number of cycles that was calibrated to take a fraction of a second, in an order that rotates, so
that a drift of the machine meets them all alike. GB/s counts both directions, also where nothing is
moved. The columns ``x`` are ratios within a round, which a peer has to others of its group; all
figures are medians over the rounds.

* Over TCP: ``x raw`` (plain sockets), and ``x best`` (the best of pyzmq, gloo, gRPC and torch RPC;
  not of MPI, whose processes take a core each to wait in).
* In shared memory: ``x memcpy`` (one process that does all the work alone), ``x mpi``, ``x ray``.

Measure on an idle machine. On a busy one the kernel may put a server and its worker on the same
core, which makes small exchanges several times quicker and large ones slower, for all peers.
There the processor time of a cycle says more: that of all processes that serve, and a worker's.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from importlib.util import find_spec
from typing import Annotated, Any, TypeAlias

from rich.table import Table

from aiops.errors import UsageError, nearest
from aiops.lab.figures import Figure, Panel
from aiops.lab.run_record import machine, record
from benchmarks import plots, report
from benchmarks.compare import Cell
from benchmarks.peers import base
from benchmarks.peers.base import Job, Setting
from benchmarks.peers.turn import MeasuringTime, compare, contest
from benchmarks.sizes import KIB, MIB, format_size, parse_size, short_size

OURS = ("aiops", "shared", "room", "views", "cuda", "tls", "checksums")
"""The peers that are aiops."""


Change: TypeAlias = tuple[str, str, Setting]
"""A setting of a peer that is changed: the peer's name, the setting's, its value."""


def read_change(text: str) -> Change:
    """Read a change of a peer's setting, ``raw.sndbuf=262144``; UsageError if it is none."""
    match = re.fullmatch(r"([\w.]+)\.(\w+)=(\w+)", text)
    if not match:
        raise UsageError(f"setting {text!r} cannot be read; write it like raw.sndbuf=262144")
    peer, name, value = match.groups()
    number = value.isdigit() or value in ("true", "false")
    return peer, name, json.loads(value) if number else value


GROUPS: Mapping[str, Sequence[str]] = {"tcp": tuple(base.TCP), "same-host": tuple(base.SAME_HOST)}
"""Words that stand for several peers."""


@dataclass(frozen=True)
class Options(MeasuringTime):
    """The options of the benchmark. Sizes are bytes per gradient, times are seconds."""

    sizes: Annotated[tuple[int, ...], "gradient sizes", parse_size] = (
        *(4 * KIB, 64 * KIB),
        *(MIB, 16 * MIB, 64 * MIB),
    )
    workers: Annotated[tuple[int, ...], "numbers of workers"] = (1, 4)
    peers: Annotated[
        tuple[str, ...], f"{', '.join(base.MODULES)}, a.module, or a group: {', '.join(GROUPS)}"
    ] = ("tcp",)
    whole: Annotated[bool, "peers too deliver whole versions, as aiops always does"] = False
    batch: Annotated[bool, "workers are batch processes, as `aiops run` starts many"] = False
    settings: Annotated[tuple[Change, ...], "settings of peers: PEER.NAME=VALUE", read_change] = ()


def run(options: Options, log: Callable[[str], None] = lambda line: None) -> dict[str, Any]:
    """Measure, and return the report (see `benchmarks.report` for its ``machine``).

    ``cells`` has one entry per size and number of workers; in it, per peer, every round's figures,
    their medians and spreads, how the workers' parameters read at the end, and ``failed`` with a
    sentence when the peer was killed or its parameters were wrong.

    Raises:
        UsageError: a peer, a setting or a number makes no sense.

    """
    names = [each for name in options.peers for each in GROUPS.get(name, (name,))]
    options = replace(options, peers=tuple(names))
    changes: dict[str, dict[str, Setting]] = {}
    for peer, name, value in options.settings:
        changes.setdefault(peer, {})[name] = value
    settings = _settings(options, changes)
    about = machine()
    reasons = {name: base.load(name).missing() for name in options.peers}
    skipped = {name: reason for name, reason in reasons.items() if reason}
    for name, reason in skipped.items():
        log(f"skipping {name}: {reason}")
    names = [name for name in options.peers if name not in skipped]
    cells = []
    for size in options.sizes:
        for workers in options.workers:
            log(f"measuring {format_size(size)} x {workers}: {', '.join(names)}")
            jobs = {
                name: Job(name, size // 4, workers, settings[name], options.batch) for name in names
            }
            peers = contest(jobs, options, log, compare)
            cells.append({"size": size, "workers": workers, "peers": peers})
    return record(
        "benchmark",
        "exchange",
        asdict(options) | {"settings": changes},
        {
            "peers": {
                name: {"settings": settings[name], "environment": dict(base.load(name).ENVIRONMENT)}
                for name in names
            },
            "skipped": skipped,
            "cells": cells,
        },
        about,
    )


def _settings(
    options: Options, changes: Mapping[str, Mapping[str, Setting]]
) -> dict[str, dict[str, Setting]]:
    """Check the options; return every peer's settings with the changes asked for, by peer."""
    for name in [*options.peers, *changes]:
        if name not in base.MODULES and not _is_module(name):
            raise UsageError(f"unknown peer {name!r}; {nearest(name, [*base.MODULES, *GROUPS])}")
    numbers = [*options.sizes, *options.workers, options.rounds, options.seconds, options.deadline]
    if not options.peers or min(numbers) <= 0 or any(size % 4 for size in options.sizes):
        raise UsageError(
            "the benchmark needs at least one peer, and positive sizes (multiples of 4 bytes),"
            f" workers, rounds and times; got {options}"
        )
    chosen: dict[str, dict[str, Setting]] = {}
    for name in options.peers:
        known = base.load(name).SETTINGS
        wanted = changes.get(name, {})
        for key in wanted.keys() - known.keys():
            raise UsageError(f"{name} has no setting {key!r}; {nearest(key, known)}")
        chosen[name] = {**known, "whole": options.whole or known["whole"], **wanted}
    return chosen


def _is_module(name: str) -> bool:
    """Return whether a peer is named as a user's own module, ``package.module``."""
    try:
        return "." in name and find_spec(name) is not None
    except ImportError:
        return False


_COLUMNS = (
    *("size", "workers", "peer", "reads"),
    *("cycles/s", "GB/s", "GB/s min-max"),
    *report.POINTS,
    *("server's CPU µs", "worker's"),
)


def table(result: Mapping[str, Any]) -> Table:
    """Make the table of a report, with those ratios that any peer has."""
    ratios = [
        ratio
        for ratio in base.RATIOS
        if any(ratio.key in peer for cell in result["cells"] for peer in cell["peers"].values())
    ]
    columns = [*_COLUMNS, *(f"x {ratio.name}" for ratio in ratios)]
    rows: list[list[str]] = []
    for cell in result["cells"]:
        head = [format_size(cell["size"]), str(cell["workers"])]
        for name, figures in cell["peers"].items():
            rows.append([*head, name, *_row(figures, [ratio.key for ratio in ratios])])
            head = ["", ""]
        rows.append([])
    title = "Exchange: push a gradient, SGD, new parameters in place; medians over the rounds"
    return report.table(title, columns, rows, text_columns=4)


def _row(figures: Mapping[str, Any], ratios: Sequence[str]) -> list[str]:
    if "gb_per_second" not in figures:
        return ["failed", *["-"] * (5 + len(report.PERCENTILES) + len(ratios))]
    gb = figures["gb_per_second"]
    return [
        figures["reads"],
        report.amount(figures["cycles_per_second"]["median"]),
        f"{gb['median']:.2f}",
        f"{gb['min']:.2f}-{gb['max']:.2f}",
        *report.points(figures),
        *(_processor(figures, side) for side in ("server", "worker")),
        *(report.times(figures, key) for key in ratios),
    ]


def _processor(figures: Mapping[str, Any], side: str) -> str:
    """Write the processor time of a cycle, in the program and in the kernel."""
    if f"{side}_cpu_us" not in figures:
        return "-"
    total, kernel = (figures[f"{side}_{what}_us"]["median"] for what in ("cpu", "kernel"))
    return f"{total - kernel:,.0f} + {kernel:,.0f}"


def failures(result: Mapping[str, Any]) -> list[str]:
    """Return one line per peer and cell that failed."""
    return [
        f"{format_size(cell['size'])} x {cell['workers']}: {figures['failed']}"
        for cell in result["cells"]
        for figures in cell["peers"].values()
        if figures["failed"]
    ]


def cells(result: Mapping[str, Any]) -> Iterator[Cell]:
    """Yield what can be compared with another run's: our throughput beside each measure of it."""
    for cell in result["cells"]:
        for name, figures in cell["peers"].items():
            if name not in OURS or "cycles_per_second" not in figures:
                continue
            where = f"{format_size(cell['size'])} x {cell['workers']}, {name}"
            ratios = [ratio for ratio in base.RATIOS if ratio.key in figures]
            for ratio in ratios:
                yield Cell.of(where, "cycles/s", figures[ratio.key], beside=ratio.name)
            if not ratios:
                yield Cell.of(where, "cycles/s", figures["cycles_per_second"])
            for key, what in (("server_cpu_us", "server's CPU µs"), ("worker_cpu_us", "worker's")):
                if key in figures:
                    yield Cell.of(where, what, figures[key], less=True)


def figure(result: Mapping[str, Any]) -> Figure:
    """Draw throughput against size and workers, latencies of small exchanges, processor time."""
    found = {(cell["size"], cell["workers"]): cell["peers"] for cell in result["cells"]}
    sizes, workers = (list(dict.fromkeys(key[axis] for key in found)) for axis in (0, 1))
    names = list(dict.fromkeys(name for peers in found.values() for name in peers))
    written = [short_size(size) for size in sizes]

    def panel(
        title: str,
        label: str,
        keys: Sequence[Any],
        ticks: Sequence[str],
        log: str,
        figure: tuple[str, str] = ("gb_per_second", "GB/s, both ways"),
    ) -> Panel:
        cells = [found[key] for key in keys]
        lines = [
            plots.rounds(name, [cell.get(name, {}) for cell in cells], figure[0]) for name in names
        ]
        bottom = None if log else 0.0
        return Panel(title, label, figure[1], lines, log, bottom, ticks=ticks)

    panels = [
        panel(
            plots.crowd(count),
            "gradient, bytes",
            [(size, count) for size in sizes],
            written,
            "y",  # a thousand times as much of some as of others
        )
        for count in workers
    ]
    if len(workers) > 1:
        panels += [
            panel(
                format_size(size),
                "workers",
                [(size, count) for count in workers],
                [str(count) for count in workers],
                "",
            )
            for size in sizes
        ]
    panels += [
        plots.latencies(f"{format_size(sizes[0])}, {plots.crowd(count)}", peers)
        for (size, count), peers in found.items()
        if size == sizes[0]
    ]
    if any("cpu_us" in one for one in _rounds(result)):
        panels += [
            panel(
                f"processor time, {plots.crowd(count)}",
                "gradient, bytes",
                [(size, count) for size in sizes],
                written,
                "y",
                ("cpu_us", "µs of a cycle, server and worker"),
            )
            for count in workers
        ]
    return Figure("Exchange: push a gradient, SGD, new parameters", panels, min(len(panels), 3))


def _rounds(result: Mapping[str, Any]) -> Iterator[Mapping[str, float]]:
    for cell in result["cells"]:
        for figures in cell["peers"].values():
            yield from figures["rounds"]


def _near(result: Mapping[str, Any]) -> bool:
    return set(result["options"]["peers"]) <= {*base.SAME_HOST, *base.GPU}


def _notes(result: Mapping[str, Any]) -> list[str]:
    return [
        "reads: a worker's parameters were whole, of mixed versions, or torn inside a number",
        "CPU: of a cycle, in the programs + in the kernel; of all processes that serve",
    ]


def main(argv: Sequence[str] | None = None) -> None:
    """Run from the command line; exits with 1 when a peer failed, 2 when an option is wrong."""
    report.command(
        Options(), run, table, argv, drawn=figure, failures=failures, notes=_notes, near=_near
    )


if __name__ == "__main__":
    main()
