"""The trackers benchmark: steps with trackers, callbacks and traces, beside steps without.

    python -m benchmarks.trackers [--width 64] [--blocks 3] [--batch 8] [--seconds 2] [--rounds 15]
                                  [--every 0.1] [--json out.json] [--plot out.png]

One process trains a small transformer in PyTorch, with one thread, by a `RemoteOptimizer` at a
server beside it, and logs the loss of each step. In each round it does so once in each way: with
nothing else, with ``--track tensorboard:``, with a callback (``on_metrics``), and with ``--trace``
of server and worker, by default and of every push. Each time the server is another, so that none
sends anything while another way is measured; the order moves on from round to round. Traces go to a
collector on this machine that drops them. Numbers are sent every ``--every`` seconds, fifty times
as often as by default: a cost too small to be seen beside a step is then seen, and divided again.

Measured are the mean time of a step, and the processor time that it takes of the server and of the
worker's threads beside the one that trains, which other programs on the machine disturb less: what
watches runs there. ``x none`` is the median ratio of a round. ``each`` is what is more of that than
without, divided by how often it was: for one sending of numbers, or for the spans of one push.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from rich.table import Table

from aiops.errors import UsageError
from aiops.lab.figures import Figure, Panel
from aiops.lab.processes import ChildProcess, command
from aiops.lab.run_record import machine, record
from aiops.lab.training_run import START_DEADLINE
from benchmarks import plots, report, torch_steps
from benchmarks.compare import Cell
from benchmarks.serving import serving

NONE, EVERY_PUSH = "none", "trace of every push"
SENDING = ("tensorboard", "on_metrics")
WAYS = (NONE, *SENDING, "trace", EVERY_PUSH)
_POLICY = "schedule-free"
_ALWAYS = {"OTEL_TRACES_SAMPLER": "always_on"}


@dataclass(frozen=True)
class Options:
    """The options of the benchmark."""

    width: Annotated[int, "of the transformer, a multiple of 8"] = 64
    blocks: int = 3
    batch: Annotated[int, "windows of 128 tokens in a mini-batch"] = 8
    warm: Annotated[float, "seconds before, for what is made once: imports for first spans"] = 2.5
    seconds: Annotated[float, "of steps, each way and round"] = 2.0
    rounds: int = 15
    every: Annotated[float, "seconds between two sendings of numbers"] = 0.1

    def check(self) -> None:
        """Raise UsageError when an option makes no sense."""
        if min(self.width, self.blocks, self.batch, self.rounds) < 1:
            raise UsageError("width, blocks, batch and rounds are 1 or more")
        if min(self.seconds, self.every, self.warm) <= 0:
            raise UsageError("seconds, every and warm are positive")
        if self.width % 8:
            raise UsageError("--width is a multiple of 8, the heads of attention")


def run(options: Options, log: Callable[[str], None] = lambda line: None) -> dict[str, Any]:
    """Measure, and return the report: a cell for each way.

    Raises
    ------
    UsageError
        When an option makes no sense.
    """
    import torch

    options.check()
    about = machine(("numpy", "torch", "numba", "tensorboard", "opentelemetry-sdk"))
    threads, rounds, parameters = torch.get_num_threads(), list[dict[str, dict[str, float]]](), 0
    torch.set_num_threads(1)
    try:
        with tempfile.TemporaryDirectory() as folder, collecting() as collector:
            for number in range(options.rounds):
                log(f"round {number + 1} of {options.rounds}")
                first = number % len(WAYS)
                found = {}
                for way in (*WAYS[first:], *WAYS[:first]):
                    target = Path(folder, str(number))
                    found[way], parameters = _measured(options, way, target, collector)
                rounds.append(found)
    finally:
        torch.set_num_threads(threads)
    cells = []
    for way in WAYS:
        each = [_compared(found, way, options) for found in rounds]
        spreads = {name: report.spread([one[name] for one in each]) for name in each[0]}
        cells.append({"cell": way, "rounds": each, **spreads})
    results = {"parameters": parameters, "cells": cells}
    return record("benchmark", "trackers", options, results, about)


def _compared(
    found: Mapping[str, Mapping[str, float]], way: str, options: Options
) -> dict[str, float]:
    """Return the figures of a way in a round, beside those without anything."""
    one, none = found[way], found[NONE]
    compared = {"x_none": one["ms"] / none["ms"]}
    more = one["beside_ms"] - none["beside_ms"]
    compared["more"] = more / one["ms"]
    if way in SENDING:
        compared["each_ms"] = more / (one["ms"] / 1e3 / options.every)  # sendings during a step
    elif way == EVERY_PUSH:
        compared["each_ms"] = more
    return {**one, **compared}


def _measured(
    options: Options, way: str, folder: Path, collector: str
) -> tuple[dict[str, float], int]:
    """Train one way for a while; return the figures of a step."""
    given = torch_steps.Options("cpu", options.width, options.blocks, options.batch)
    variables = {"AIOPS_TRACE": f"otlp:{collector}"} if way.startswith("trace") else {}
    if way == EVERY_PUSH:
        variables |= _ALWAYS
    with ExitStack() as stack:
        stack.enter_context(_environment(variables))
        url, server = stack.enter_context(_server(options, way, folder))
        step, parameters = torch_steps.training(given, "cpu", url, stack, logs=True)
        until = time.perf_counter() + options.warm
        while time.perf_counter() < until:
            step()
        begin, steps = time.perf_counter(), 0
        before = _beside(server)
        while (took := time.perf_counter() - begin) < options.seconds:
            step()
            steps += 1
        figures = {"ms": took, "beside_ms": _beside(server) - before}
    return {name: 1e3 * value / steps for name, value in figures.items()}, parameters


@contextmanager
def _server(options: Options, way: str, folder: Path) -> Iterator[tuple[str, int]]:
    if way == "on_metrics":
        words = command("benchmarks.observers", "callback", str(options.every))
        with ChildProcess("the server", words, lines=True, grace=1.0) as server:
            yield server.first_line(START_DEADLINE), server.popen.pid
        return
    flags = [f"--track=tensorboard:{folder}"] if way == "tensorboard" else []
    with serving(_POLICY, f"--track-every={options.every}", *flags) as found:
        yield found


@contextmanager
def collecting() -> Iterator[str]:
    """Run a collector of traces in a process of its own; yield its URL."""
    words = command("benchmarks.observers", "collector")
    with ChildProcess("the collector", words, lines=True, grace=1.0) as collector:
        yield collector.first_line(START_DEADLINE)


@contextmanager
def _environment(variables: Mapping[str, str]) -> Iterator[None]:
    """Set variables of this process, which its children have, too."""
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def _beside(server: int) -> float:
    """Return the seconds that the server has run, and the threads of this process beside this one.

    On Linux; elsewhere those of this process alone.
    """
    seconds = time.process_time() - time.thread_time()
    for file in Path(f"/proc/{server}/task").glob("*/schedstat"):
        with suppress(OSError):  # the thread has ended meanwhile
            seconds += int(file.read_text().split()[0]) / 1e9
    return seconds


def table(result: Mapping[str, Any]) -> Table:
    """Make the table of a report."""
    rows = []
    for cell in result["cells"]:
        watched = cell["cell"] != NONE
        rows.append(
            [
                cell["cell"],
                f"{cell['ms']['median']:.2f}",
                report.times(cell, "x_none"),
                f"{cell['beside_ms']['median']:.3f}",
                f"{cell['more']['median']:.2%}" if watched else "",
                f"{cell['each_ms']['median']:.3f}" if "each_ms" in cell else "",
            ]
        )
    millions = result["parameters"] / 1e6
    title = f"A step of {millions:.2f} million parameters that is watched; medians of rounds"
    columns = ("by", "ms", "x none", "beside ms", "more of a step", "each ms")
    return report.table(title, columns, rows)


def cells(result: Mapping[str, Any]) -> Sequence[Cell]:
    """Return what can be compared with another run's: steps beside those without trackers."""
    return [
        Cell.of(cell["cell"], "cost", cell["x_none"], beside=NONE, less=True)
        for cell in result["cells"]
        if cell["cell"] != NONE
    ]


def figure(result: Mapping[str, Any]) -> Figure:
    """Draw the times of what watches."""
    names = [cell["cell"] for cell in result["cells"]]
    line = plots.rounds("beside a step", result["cells"], "beside_ms")
    panel = Panel("", "what watches it", "processor ms a step", [line], bottom=0, ticks=names)
    return Figure("What watches a step", [panel], 1)


def main(argv: Sequence[str] | None = None) -> None:
    """Run from the command line; exits with 2 when an option is wrong."""
    report.command(Options(), run, table, argv, drawn=figure)


if __name__ == "__main__":
    main()
