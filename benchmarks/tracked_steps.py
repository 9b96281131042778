"""The tracked-steps benchmark: a step at a server that tracks, beside one at one that does not.

    python -m benchmarks.tracked_steps [--size 64KiB] [--compute 5] [--block 0.5] [--rounds 150]
                                       [--every 0.25] [--json out.json] [--plot out.png]

A worker computes in NumPy for ``--compute`` ms and exchanges a model of ``--size`` in each step. It
does so at several servers by turns, in blocks of ``--block`` seconds, in an order that is turned
round from round to round: at one that tracks nothing; at a second like it, whose ratio says what
this machine can tell; with ``--track tensorboard:``; and with a callback (``on_metrics``). It logs
the loss of each step at all of them, so that the difference is of the trackers alone. Servers whose
turn it is not are stopped (SIGSTOP), so that none sends anything during the block of another.
Numbers are sent every ``--every`` seconds, twenty times as often as by default, so that each block
has as many sendings: ``at 5 s`` is what is more than 1, divided by that.

``x none`` is the median, over the rounds, of the mean step of a block beside that of the first
server in the same round, with the interval in which that median lies with 95 % (of the order
statistics, whatever the distribution).
"""

from __future__ import annotations

import math
import os
import signal
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Annotated, Any

import numpy as np
from rich.table import Table
from threadpoolctl import threadpool_limits

import aiops
from aiops.errors import UsageError
from aiops.lab.figures import Figure, Panel
from aiops.lab.processes import ChildProcess, command
from aiops.lab.run_record import machine, record
from aiops.lab.training_run import START_DEADLINE
from benchmarks import plots, report
from benchmarks.serving import serving
from benchmarks.sizes import KIB, format_size, size_flag
from benchmarks.trackers import NONE
from benchmarks.trackers import cells as cells  # what can be compared with another run's

AGAIN, TENSORBOARD, CALLBACK = "none, again", "tensorboard", "on_metrics"
WAYS = (NONE, AGAIN, TENSORBOARD, CALLBACK)
_DEFAULT = 5.0  # seconds between two sendings, unless --track-every says otherwise
_POLICY = "schedule-free"
_QUANTILE = 1.96  # of the normal distribution, which the binomial one is close to
_WIDTH = 128  # of the matrices that a step multiplies


@dataclass(frozen=True)
class Options:
    """The options of the benchmark."""

    size: Annotated[int, "of the model", size_flag] = 64 * KIB
    compute: Annotated[float, "milliseconds that a step computes"] = 5.0
    block: Annotated[float, "seconds at a server before it is another's turn"] = 0.5
    rounds: Annotated[int, "blocks of each server"] = 150
    every: Annotated[float, "seconds between two sendings of numbers"] = 0.25

    def check(self) -> None:
        """Raise UsageError when an option makes no sense."""
        if min(self.size // 4, self.rounds) < 1:
            raise UsageError("size is 4 bytes or more, and rounds 1 or more")
        if min(self.compute, self.block, self.every) <= 0:
            raise UsageError("compute, block and every are positive")
        if self.block > 1:
            raise UsageError("--block is 1 s at most: servers are stopped for three of them")


def run(options: Options, log: Callable[[str], None] = lambda line: None) -> dict[str, Any]:
    """Measure, and return the report: a cell for each way.

    Raises
    ------
    UsageError
        When an option makes no sense.
    """
    options.check()
    about = machine(("numpy", "numba", "tensorboard"))
    rounds: list[dict[str, float]] = []
    with ExitStack() as stack:
        stack.enter_context(threadpool_limits(1))
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        compute = _computing(options.compute)
        sites = {way: stack.enter_context(_site(options, way, folder, compute)) for way in WAYS}
        for number in range(options.rounds):
            if number % 10 == 0:
                log(f"round {number + 1} of {options.rounds}")
            first = number // 2 % len(WAYS)
            order = (*WAYS[first:], *WAYS[:first])
            found = {way: sites[way](options.block) for way in order[:: 1 - number % 2 * 2]}
            rounds.append(found)
    cells = []
    for way in WAYS:
        each = [{"ms": one[way], "x_none": one[way] / one[NONE]} for one in rounds]
        ratios = [one["x_none"] for one in each]
        low, high = interval(ratios)
        sendings = _DEFAULT / options.every
        cells.append(
            {
                "cell": way,
                "rounds": each,
                **{name: report.spread([one[name] for one in each]) for name in each[0]},
                "interval": [low, high],
                "at_default": [(x - 1) / sendings for x in (statistics.median(ratios), low, high)],
            }
        )
    return record("benchmark", "tracked_steps", options, {"cells": cells}, about)


def interval(values: Sequence[float]) -> tuple[float, float]:
    """Return the 95 % confidence interval of the median, by order statistics."""
    ordered, half = sorted(values), len(values) / 2
    reach = _QUANTILE * len(values) ** 0.5 / 2
    low, high = math.floor(half - reach) - 1, math.ceil(half + reach)
    return ordered[max(0, low)], ordered[min(len(values) - 1, high)]


def _computing(milliseconds: float) -> Callable[[], None]:
    """Return a function that multiplies matrices for about so long on this machine."""
    one = np.random.default_rng(0).random((_WIDTH, _WIDTH), np.float32)
    out = np.empty_like(one)

    def times(number: int) -> float:
        begin = time.perf_counter()
        for _ in range(number):
            np.matmul(one, one, out=out)
        return time.perf_counter() - begin

    each = statistics.median(times(10) / 10 for _ in range(21))
    number = max(1, round(milliseconds / 1e3 / each))

    def compute() -> None:
        times(number)

    return compute


@contextmanager
def _site(
    options: Options, way: str, folder: Path, compute: Callable[[], None]
) -> Iterator[Callable[[float], float]]:
    """Yield a function that trains at a server for some seconds, and returns a step's mean in ms.

    The server is stopped but for that time.
    """
    model = {"w": np.zeros(options.size // 4, np.float32)}
    gradient = {"w": np.full(options.size // 4, 1e-3, np.float32)}
    numbers = count(1)
    with _server(options, way, folder) as (url, pid), aiops.Worker(url, model) as worker:

        def step() -> None:
            compute()
            worker.step(gradient)
            worker.log(loss=1 / next(numbers))

        def block(seconds: float) -> float:
            os.kill(pid, signal.SIGCONT)
            try:
                for _ in range(3):  # the caches are another's
                    step()
                begin, steps = time.perf_counter(), 0
                while (took := time.perf_counter() - begin) < seconds:
                    step()
                    steps += 1
            finally:
                os.kill(pid, signal.SIGSTOP)
            return 1e3 * took / steps

        try:
            block(2 * options.block)  # kernels and imports, and the first sending
            yield block
        finally:
            os.kill(pid, signal.SIGCONT)


@contextmanager
def _server(options: Options, way: str, folder: Path) -> Iterator[tuple[str, int]]:
    """Run the server of a way; yield its URL and its process's number."""
    if way == CALLBACK:
        words = command("benchmarks.observers", "callback", str(options.every))
        with ChildProcess("the server", words, lines=True, grace=1.0) as server:
            yield server.first_line(START_DEADLINE), server.popen.pid
        return
    flags = [f"--track=tensorboard:{folder}"] if way == TENSORBOARD else []
    with serving(_POLICY, f"--track-every={options.every}", *flags) as found:
        yield found


def table(result: Mapping[str, Any]) -> Table:
    """Make the table of a report."""
    options = result["options"]
    rows = []
    for cell in result["cells"]:
        low, high = cell["interval"]
        more, least, most = cell["at_default"]
        one = cell["cell"] == NONE
        rows.append(
            [
                cell["cell"],
                f"{cell['ms']['median']:.3f}",
                f"{cell['x_none']['median']:.4f}",
                "" if one else f"{low:.4f}-{high:.4f}",
                "" if one else f"{more:.3%}",
                "" if one else f"{least:.3%} to {most:.3%}",
            ]
        )
    title = (
        f"A step of {options['compute']:g} ms and {format_size(options['size'])} that is tracked"
        f" every {options['every']:g} s; medians of {options['rounds']} rounds"
    )
    columns = ("by", "ms", "x none", "95 %", "at 5 s", "95 %")
    return report.table(title, columns, rows)


def figure(result: Mapping[str, Any]) -> Figure:
    """Draw the times of a step."""
    names = [cell["cell"] for cell in result["cells"]]
    line = plots.rounds("a step", result["cells"], "ms")
    panel = Panel("", "what tracks it", "ms a step", [line], ticks=names)
    return Figure("A step that is tracked", [panel], 1)


def main(argv: Sequence[str] | None = None) -> None:
    """Run from the command line; exits with 2 when an option is wrong."""
    report.command(Options(), run, table, argv, drawn=figure)


if __name__ == "__main__":
    main()
