"""The acks benchmark: the price of ``--state`` at each level of ``--acks``, beside no state.

    python -m benchmarks.acks [--sizes 4KiB,1MiB] [--workers 1,4] [--codecs raw,int8,topk:0.01]
                              [--acks applied,written,durable] [--folder FOLDER] [--rounds 5]
                              [--seconds 0.4] [--json out.json] [--plot out.png]

For every size, number of workers and codec of gradients there are a server without a state and one
with a state at each level, each a process of its own with its own workers, over TCP. They take
turns in interleaved rounds; ``x none`` is exchanges a second beside the server without a state in
the same round, ``x applied`` beside the level ``applied``, which keeps snapshots and no journal.
Snapshots are taken as in use: when the journal has grown, and every half minute. MiB/s are of the
model, each way, before any codec. The journal's bytes per exchange are those of its rows of pushes
and updates, as far as no snapshot has covered them, read from the folder in the end.

The states lie in a temporary folder, by default below ``/var/tmp``, which is on a disk on most
systems; the report names the folder's file system, and how long an fdatasync takes there after a
write of 4 KiB and of each size, into a preallocated file as the journal is.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Annotated, Any

from rich.table import Table

from aiops.cli.state_folder import StateFolder
from aiops.codecs import find
from aiops.errors import UsageError, nearest
from aiops.lab.figures import Figure, Panel, Series
from aiops.lab.run_record import machine, record
from aiops.net.disk import SystemDisk
from aiops.state.frames import JournalFrame
from aiops.state.row_kinds import RowKind, row_fields
from aiops.wire.decoding import decode
from aiops.wire.messages import Push
from benchmarks import plots, report
from benchmarks.compare import Cell
from benchmarks.peers import kept
from benchmarks.peers.base import Job
from benchmarks.peers.kept import RAW
from benchmarks.peers.turn import MeasuringTime, Turn, beside, contest
from benchmarks.sizes import KIB, MIB, format_size, parse_size, short_size

LEVELS = ("applied", "written", "durable")
"""Of acknowledgements, that a single server has."""
NONE = "none"
"""The contender without a state."""
TEMPORARY = "temporary"
_ON_DISK = Path("/var/tmp")  # is to outlive a restart, so it is not in memory
_SYNCS = 30  # of each size
_EXCHANGE = {RowKind.STEADY, RowKind.APPLIED}  # rows of exchanges, whatever they hold


@dataclass(frozen=True)
class Options(MeasuringTime):
    """The options of the benchmark; sizes are bytes per model."""

    sizes: Annotated[tuple[int, ...], "of the model", parse_size] = (4 * KIB, MIB)
    workers: tuple[int, ...] = (1, 4)
    codecs: Annotated[tuple[str, ...], "of gradients"] = (RAW, "int8", "topk:0.01")
    acks: Annotated[tuple[str, ...], "levels"] = LEVELS
    folder: Annotated[str, "in which the states are kept while they are measured"] = TEMPORARY

    def check(self) -> None:
        """Raise UsageError when an option makes no sense."""
        super().check()
        if not (self.sizes and self.workers and self.codecs) or min(self.workers) < 1:
            raise UsageError("sizes, workers and codecs are needed, and workers are positive")
        for name in self.acks:
            if name not in LEVELS:
                raise UsageError(f"no level of --acks is {name!r}; {nearest(name, LEVELS)}")
        for name in self.codecs:
            if name != RAW:
                find(name)
        if self.folder != TEMPORARY and not Path(self.folder).is_dir():
            raise UsageError(f"--folder {self.folder}: there is no such folder")

    def place(self) -> Path:
        """Return the folder in which the states are kept."""
        if self.folder != TEMPORARY:
            return Path(self.folder).resolve()
        return _ON_DISK if _ON_DISK.is_dir() else Path(tempfile.gettempdir())


def run(options: Options, log: Callable[[str], None] = lambda line: None) -> dict[str, Any]:
    """Measure, and return the report: a cell per size, number of workers and codec, and in it
    ``contenders``, by level.

    Raises
    ------
    UsageError
        When an option makes no sense.
    """
    options.check()
    about, found, place = machine(), [], options.place()
    try:
        scratch = tempfile.TemporaryDirectory(prefix="aiops-acks-", dir=place)
    except OSError as error:
        raise UsageError(f"--folder {place}: {error.strerror}") from None
    with scratch as name:
        syncs = {size: _syncs(Path(name), size) for size in sorted({4 * KIB, *options.sizes})}
        for size, workers, codec in product(options.sizes, options.workers, options.codecs):
            cell = f"{format_size(size)}, {plots.crowd(workers)}, {codec}"
            log(f"measuring {cell}")
            with tempfile.TemporaryDirectory(dir=name) as folder:
                states = {level: Path(folder, level) for level in options.acks}
                jobs = _jobs(size, workers, codec, states)
                contenders = contest(jobs, options, log, _compare)
                for level, state in states.items():
                    if not contenders[level]["failed"]:
                        contenders[level] |= journalled(state)
            for figures in contenders.values():
                _add_mib(figures, size)
            found.append(
                {
                    "cell": cell,
                    "size": size,
                    "workers": workers,
                    "codec": codec,
                    "contenders": contenders,
                }
            )
    disk = {
        "folder": str(place),
        "file_system": file_system(place),
        "fdatasync_ms": {str(size): spread for size, spread in syncs.items()},
    }
    return record("benchmark", "acks", options, {"disk": disk, "cells": found}, about)


def _jobs(size: int, workers: int, codec: str, states: Mapping[str, Path]) -> dict[str, Job]:
    settings = {**kept.SETTINGS, "codec": codec}
    each = {NONE: settings} | {
        level: {**settings, "acks": level, "state": str(folder)} for level, folder in states.items()
    }
    return {name: Job(kept.__name__, size // 4, workers, given) for name, given in each.items()}


def _compare(turns: Mapping[str, Turn]) -> None:
    for name in (NONE, LEVELS[0]):
        if name in turns:
            beside(name)(turns)


def _add_mib(figures: dict[str, Any], size: int) -> None:
    """Replace the throughput of both ways together by MiB/s each way."""
    figures.pop("gb_per_second", None)
    for one in figures["rounds"]:
        del one["gb_per_second"]
    if rate := figures.get("cycles_per_second"):
        figures["mib_per_second"] = {key: value * size / MIB for key, value in rate.items()}


def journalled(folder: Path) -> dict[str, float]:
    """Return what a state's journal took for each push: ``journal_bytes`` and ``journal_rows``.

    Of the rows that snapshots have not covered; without any, nothing.

    Raises
    ------
    RuntimeError
        When a server could not resume with it.
    """
    state = StateFolder(folder)
    outcome = state.outcome(list(state.files(thorough=False)))
    if outcome["why"]:
        raise RuntimeError(f"the state that was measured is not whole: {outcome['why']}")
    rows = nbytes = pushes = 0
    for first in state.listing.segments:
        with state.segment(first, payloads=False) as scan:
            for frame in scan:
                if _of_exchange(frame):
                    rows, nbytes = rows + 1, nbytes + frame.end - frame.at
                    pushes += frame.kind != RowKind.APPLIED
    return {"journal_bytes": nbytes / pushes, "journal_rows": rows / pushes} if pushes else {}


def _of_exchange(frame: JournalFrame) -> bool:
    """Tell whether a row is a push or an update; a message may also be a model's definition."""
    if frame.kind != RowKind.RECEIVED:
        return frame.kind in _EXCHANGE
    message = row_fields(frame.kind, frame.row, "the journal")["message"]
    return isinstance(message, bytes) and isinstance(decode(message), Push)


def file_system(folder: Path, mounts: Path = Path("/proc/mounts")) -> str:
    """Return the type of a folder's file system, or ``unknown`` where the system does not tell."""
    best, found = -1, "unknown"
    try:
        lines = mounts.read_text().splitlines()
    except OSError:
        return found
    for line in lines:
        point, kind = line.split()[1:3]
        if folder.is_relative_to(point) and len(point) >= best:  # of two there, the later is seen
            best, found = len(point), kind
    return found


def _syncs(folder: Path, size: int) -> dict[str, float]:
    """Return the spread, in milliseconds, of fdatasyncs after writes of a size."""
    data, times = bytes(size), []
    path = folder / "syncs"
    disk = SystemDisk()
    file = disk.create(path, _SYNCS * size)
    try:
        for number in range(_SYNCS):
            file.write([data], number * size)
            begin = time.perf_counter()
            file.sync()
            times.append((time.perf_counter() - begin) * 1e3)
    finally:
        file.close()
        disk.remove(path)
    return report.spread(times)


def table(result: Mapping[str, Any]) -> Table:
    """Make the table of a report."""
    rows: list[list[str]] = []
    for cell in result["cells"]:
        head = [format_size(cell["size"]), str(cell["workers"]), cell["codec"]]
        for name, figures in cell["contenders"].items():
            mib = figures.get("mib_per_second")
            nbytes = figures.get("journal_bytes")
            rows.append(
                [
                    *(*head, name, *report.throughput(figures)),
                    report.amount(mib["median"]) if mib else "-",
                    *(report.times(figures, key) for key in ("x_none", "x_applied")),
                    *(f"{figures[key]:,.0f}" if key in figures else "-" for key in _POINTS),
                    f"{nbytes:,.0f}" if nbytes else "-",
                ]
            )
            head = [""] * 3
        rows.append([])
    columns = (
        *("size", "workers", "gradients", "acks", *report.THROUGHPUT, "MiB/s"),
        *("x none", "x applied", "p50 µs", "p99 µs", "journal B"),
    )
    title = (
        "Exchanges with a state, by what an acknowledgement waits for; medians over"
        f" {result['options']['rounds']} rounds"
    )
    return report.table(title, columns, rows, text_columns=4)


_POINTS = ("p50_us", "p99_us")


def notes(result: Mapping[str, Any]) -> Iterator[str]:
    """Yield the folder, its file system and the time of an fdatasync, for below the table."""
    disk = result["disk"]
    syncs = (
        f"{spread['median']:.2f} ms after {format_size(int(size))}"
        f" ({spread['min']:.2f} to {spread['max']:.2f})"
        for size, spread in disk["fdatasync_ms"].items()
    )
    yield f"states in {disk['folder']} ({disk['file_system']}); fdatasync {', '.join(syncs)}"


def cells(result: Mapping[str, Any]) -> Iterator[Cell]:
    """Yield what can be compared with another run's: each level beside no state."""
    for cell in result["cells"]:
        for name, figures in cell["contenders"].items():
            where = f"{cell['cell']}, {name}"
            if name == NONE and "cycles_per_second" in figures:
                yield Cell.of(where, "exchanges/s", figures["cycles_per_second"])
            elif "x_none" in figures:
                yield Cell.of(where, "exchanges/s", figures["x_none"], beside="no state")
            if "journal_bytes" in figures:
                nbytes = figures["journal_bytes"]
                yield Cell.once(where, "journal bytes per exchange", nbytes, less=True)


def figure(result: Mapping[str, Any]) -> Figure:
    """Draw each level's exchanges beside no state's, a panel per codec."""
    levels = list(result["options"]["acks"])
    panels = []
    for codec in result["options"]["codecs"]:
        lines = []
        for cell in result["cells"]:
            if cell["codec"] == codec:
                label = f"{short_size(cell['size'])}, {plots.crowd(cell['workers'])}"
                found = [cell["contenders"][level] for level in levels]
                line = plots.rounds(label, found, "x_none")
                lines.append(Series(label, line.x, line.ys, kind="rows", median=True))
        panels.append(Panel(f"gradients {codec}", "x no state", "", lines, bottom=0, ticks=levels))
    return Figure("Exchanges a second with a state, beside none", panels, len(panels))


def main(argv: Sequence[str] | None = None) -> None:
    """Run from the command line; exits with 1 when something failed, 2 when an option is wrong."""
    report.command(Options(), run, table, argv, drawn=figure, failures=report.failures, notes=notes)


if __name__ == "__main__":
    main()
