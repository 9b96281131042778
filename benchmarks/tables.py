"""The tables benchmark: rows of an embedding fetched and pushed over loopback TCP.

    python -m benchmarks.tables [--rows 10000000] [--width 16] [--batch 512] [--workers 4]
                                [--policy asgd] [--ways exchange,separate] [--rounds 5]
                                [--seconds 2] [--json out.json] [--plot out.png]
                                [--shards 1,2,4]

``--shards`` servers that the table is spread over (several numbers: each in turn, round by round),
``--workers`` worker processes. A cycle fetches a batch of rows with uniformly random
ids and pushes a gradient for each: as two round trips (``separate``), or as one in which the push
brings the rows of the next batch (``exchange``). Ids are drawn before the clock starts, over the
whole table, so nearly every row is a place in memory that is in no cache. Every row pushed is
counted, and the server's own count must agree. In the first seconds most rows are pushed for the
first time and their pages come from the system; ``--fill`` (the default) has a worker push to all
rows first, so that what is measured is the steady state. On a machine that others use too,
processor time per cycle says more than the rate: the server is one thread, so that a second has
room for as many cycles as that time goes into it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Annotated, Any

import numpy as np

import aiops
from aiops.errors import UsageError
from aiops.lab.figures import Figure, Panel
from aiops.lab.processes import PipedProcess
from aiops.lab.run_record import machine, record
from benchmarks import plots, report
from benchmarks.compare import Cell
from benchmarks.processor_time import ProcessorMeter
from benchmarks.serving import serving
from benchmarks.table_worker import NAME, work

WAYS = ("exchange", "separate")
_GOAL = 2_000_000
_FIGURES = (
    *("rows_per_second", "cycles_per_second", "p50_us", "p99_us"),
    *("server_cpu_us", "worker_cpu_us"),
)


@dataclass(frozen=True)
class Options:
    """The options of the benchmark."""

    rows: int = 10_000_000
    width: int = 16
    batch: int = 512
    workers: int = 4
    policy: str = "asgd"
    ways: Annotated[tuple[str, ...], "ways"] = WAYS
    rounds: int = 5
    seconds: Annotated[float, "per round"] = 2.0
    fill: Annotated[bool, "push to every row before"] = True
    shards: Annotated[tuple[int, ...], "servers"] = (1,)


def run(options: Options, log: Callable[[str], None] = lambda line: None) -> dict[str, Any]:
    """Measure, and return the report: per way the rounds' rows per second, each way.

    Raises
    ------
    UsageError
        When an option makes no sense.
    RuntimeError
        When the server has applied another number of rows than the workers have pushed.
    """
    unknown = set(options.ways) - set(WAYS)
    if unknown or not options.ways or min(options.batch, options.workers, options.rounds) < 1:
        raise UsageError(f"the ways to measure are {', '.join(WAYS)}, and numbers are positive")
    if not options.shards or min(options.shards) < 1:
        raise UsageError("--shards: give numbers of servers, such as 1,2,4")
    about = machine()
    with ExitStack() as stack:
        kinds = [
            (shards, stack.enter_context(_served(shards, options, log)))
            for shards in options.shards
        ]
        found = dict[str, list[dict[str, float]]]()
        for way in options.ways:
            for number in range(options.rounds):
                for shards, (_url, pids, pipes) in kinds:
                    name = _name(way, shards, options)
                    figures = _round(pipes, pids, way, options.seconds, options.batch)
                    found.setdefault(name, []).append(figures)
                    log(f"{name} {number + 1}: {figures['rows_per_second']:,.0f} rows/s each way")
        lines = {shards: _check(url, pipes, options) for shards, (url, _pids, pipes) in kinds}
    ways = {
        name: {
            "rounds": rounds,
            **{key: report.spread([round_[key] for round_ in rounds]) for key in _FIGURES},
        }
        for name, rounds in found.items()
    }
    line = lines[options.shards[0]]
    return record("benchmark", "tables", options, {"ways": ways, "table": line}, about)


def _name(way: str, shards: int, options: Options) -> str:
    return way if options.shards == (1,) else f"{way}, {shards} server{'s' * (shards > 1)}"


@contextmanager
def _served(
    shards: int, options: Options, log: Callable[[str], None]
) -> Iterator[tuple[str, list[int], list[Connection]]]:
    """Yield the URL of a model on several servers, their processes, and workers that are ready."""
    flags = () if shards == 1 else (f"--shards={shards}", "--spread-tables")
    with serving(options.policy, *flags) as (url, server), _workers(url, options) as pipes:
        if options.fill:
            log(f"pushing to every row once, on {shards} server{'s' * (shards > 1)}")
            _fill(url, options)
        yield url, [server, *_children(server)], pipes


def _children(pid: int) -> list[int]:
    """Return the child processes of a process: the followers of a lead."""
    try:
        return [int(n) for n in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except OSError:
        return []


def _table(options: Options) -> aiops.Table:
    return aiops.Table(options.rows, options.width)


def _fill(url: str, options: Options) -> None:
    """Push a zero gradient to every row, so that all of them are stored."""
    with aiops.Worker(url, {}, tables={NAME: _table(options)}, name="filler") as worker:
        step = 1 << 16
        zeros = np.zeros((step, options.width), np.float32)
        for start in range(0, options.rows, step):
            ids = np.arange(start, min(start + step, options.rows))
            worker.push_rows(NAME, ids, zeros[: len(ids)])


def _round(
    pipes: Sequence[Connection], servers: Sequence[int], way: str, seconds: float, batch: int
) -> dict[str, float]:
    """Let all workers go at once for so long; return what they did together."""
    meter = ProcessorMeter()
    meter.read(servers)
    for pipe in pipes:
        pipe.send((way, seconds))
    answers = [pipe.recv() for pipe in pipes]
    spent = meter.read(servers)
    elapsed = max(answer[2] for answer in answers) - min(answer[1] for answer in answers)
    cycles = sum(count for count, *_rest in answers)
    times = np.concatenate([np.asarray(answer[3]) for answer in answers]) * 1e6
    return {
        "cycles_per_second": cycles / elapsed,
        "rows_per_second": cycles * batch / elapsed,
        "p50_us": float(np.percentile(times, 50)),
        "p99_us": float(np.percentile(times, 99)),
        "server_cpu_us": float("nan") if spent is None else spent.total / cycles * 1e6,
        "worker_cpu_us": sum(answer[4] for answer in answers) / cycles * 1e6,
    }


def _check(url: str, pipes: Sequence[Connection], options: Options) -> dict[str, Any]:
    """Compare what the workers have pushed with what the server has applied."""
    for pipe in pipes:
        pipe.send(None)
    pushed = sum(pipe.recv() for pipe in pipes) * options.batch
    with aiops.Client(url) as client:
        [line] = client.stats()["tables"]
    applied = line["rows_pushed"] - (options.rows if options.fill else 0)
    if applied != pushed:
        raise RuntimeError(f"the workers pushed {pushed} rows, the server applied {applied}")
    return dict(line)


@contextmanager
def _workers(url: str, options: Options) -> Iterator[list[Connection]]:
    table = _table(options)
    with ExitStack() as stack:
        pipes = []
        for number in range(options.workers):
            target = partial(work, url, table, options.batch, number)
            pipes.append(stack.enter_context(PipedProcess(f"worker {number}", target)).pipe)
        for pipe in pipes:
            assert pipe.recv() == "ready"
        yield pipes


def table(result: Mapping[str, Any]) -> Any:
    """Make the table of a report."""
    options, rows = result["options"], []
    for way, figures in result["ways"].items():
        rate = figures["rows_per_second"]
        rows.append(
            [
                way,
                f"{rate['median']:,.0f}",
                f"{rate['min']:,.0f}-{rate['max']:,.0f}",
                f"{figures['cycles_per_second']['median']:,.0f}",
                f"{figures['p50_us']['median']:,.0f}",
                f"{figures['p99_us']['median']:,.0f}",
                f"{figures['server_cpu_us']['median']:,.0f}",
                f"{figures['worker_cpu_us']['median']:,.0f}",
                f"{rate['median'] / _GOAL:.2f}",
            ]
        )
    title = (
        f"{options['workers']} workers, {options['rows']:,} x {options['width']} float32,"
        f" batches of {options['batch']} random rows, {options['policy']}; medians over"
        f" {options['rounds']} rounds"
    )
    columns = (
        *("way", "rows/s each way", "min-max", "cycles/s", "p50 µs", "p99 µs"),
        *("server's CPU µs", "worker's", "x 2 million"),
    )
    return report.table(title, columns, rows)


def cells(result: Mapping[str, Any]) -> Iterator[Cell]:
    """Yield what can be compared with another run's."""
    for way, figures in result["ways"].items():
        yield Cell.of(way, "rows/s", figures["rows_per_second"])
        for key, what in (("server_cpu_us", "server's CPU µs"), ("worker_cpu_us", "worker's")):
            yield Cell.of(way, what, figures[key], less=True)


def figure(result: Mapping[str, Any]) -> Figure:
    """Draw rows a second, latencies, and processor time, a row for each way."""
    ways = result["ways"]
    contents = (
        ("throughput", "million rows/s each way", 1e-6, {"all workers": "rows_per_second"}),
        ("a cycle's latency", "milliseconds", 1e-3, {"p50": "p50_us", "p99": "p99_us"}),
        (
            *("its processor time", "microseconds", 1.0),
            {"the server's": "server_cpu_us", "a worker's": "worker_cpu_us"},
        ),
    )
    panels = []
    for title, unit, times, keys in contents:
        lines = [
            plots.rows(label, {row: each[key] for row, each in enumerate(ways.values())}, times)
            for label, key in keys.items()
        ]
        panels.append(Panel(title, unit, "", lines, bottom=0, ticks=list(ways)))
    options = result["options"]
    title = (
        f"Rows of a table of {options['rows'] / 1e6:g} million × {options['width']} float32,"
        f" {options['workers']} workers"
    )
    return Figure(title, panels, len(panels))


def main(argv: Sequence[str] | None = None) -> None:
    """Run from the command line; exits with 2 when an option is wrong."""
    report.command(Options(), run, table, argv, drawn=figure)


if __name__ == "__main__":
    main()
