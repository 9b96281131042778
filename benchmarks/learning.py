"""The learning benchmark: what policies learn in a stated time over a slow link.

    python -m benchmarks.learning [--rate 20Mbit/s] [--delay 0.01] [--workers 2] [--compute 0.1]
                                  [--network transformer] [--rules schedule-free,...] [--seconds 45]
                                  [--rounds 1] [--json out.json] [--plot out.png]

Workers train the byte-level transformer of `aiops.lab.experiments.gpt`, or a perceptron on the
digits, each behind a link of its own of a stated rate and delay each way (`aiops.lab.slow_link`).
They compute real gradients, and then sleep until a mini-batch has taken ``--compute``; directions
of matrices are extra. The rules are those of the experiment *which-policy*, which searches their
learning rates in virtual time; here each has the rate that was best there. Measured are the cost on
what is held out, of the server's parameters at the end, the mini-batches, and the bytes on the
links. Servers are processes, and workers threads of one.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Annotated, Any

import aiops
from aiops.client.params import Params
from aiops.errors import UsageError, nearest
from aiops.lab.experiments.execution import NETWORKS
from aiops.lab.experiments.papers.which_policy import ASGD, DILOCO, FREE, SYNC, TimedRule
from aiops.lab.experiments.timed_training import TimedTraining
from aiops.lab.figures import Figure, Panel
from aiops.lab.run_record import machine, record
from aiops.lab.slow_link import SlowLink
from aiops.model.layout import Layout
from aiops.sim.turns.simulation import Simulation
from aiops.sim.turns.task import Batches, Task
from benchmarks import plots, report
from benchmarks.compare import Cell
from benchmarks.serving import serving

_FIRST_SECONDS = 1.0

RULES: Mapping[str, tuple[TimedRule, float]] = {
    "schedule-free": (FREE, 0.008),
    "schedule-free-int8": (FREE.coded("int8"), 0.008),
    "schedule-free-onebit": (FREE.coded("onebit"), 0.008),
    "asgd-int8": (ASGD.coded("int8"), 0.0003),
    "asgd-onebit": (ASGD.coded("onebit"), 0.0003),
    "hardsync": (SYNC, 0.003),
    "hardsync-int8": (SYNC.coded("int8", overlap=0), 0.003),
    "diloco-int8": (DILOCO.coded("int8"), 0.003),
}
"""The rules, each with its learning rate."""


@dataclass(frozen=True)
class Options:
    """The options of the benchmark."""

    rate: Annotated[str, "of a worker's link, each way"] = "20Mbit/s"
    delay: Annotated[float, "seconds, each way"] = 0.01
    workers: int = 2
    compute: Annotated[float, "seconds of a mini-batch"] = 0.1
    network: Annotated[str, "transformer, convnet (CIFAR-10) or perceptron (digits)"] = (
        "transformer"
    )
    rules: Annotated[tuple[str, ...], "what is compared"] = tuple(RULES)
    seconds: Annotated[float, "of training, each"] = 45.0
    rounds: int = 1

    def check(self) -> None:
        """Raise UsageError when an option makes no sense."""
        if min(self.workers, self.rounds) < 1 or min(self.compute, self.seconds) <= 0:
            raise UsageError("numbers and times are positive")
        for name, known in ((self.network, NETWORKS), *((rule, RULES) for rule in self.rules)):
            if name not in known:
                raise UsageError(f"there is no {name!r}; {nearest(name, known)}")


def run(options: Options, log: Callable[[str], None] = lambda line: None) -> dict[str, Any]:
    """Measure, and return the report: a cell for each rule.

    Raises
    ------
    UsageError
        When an option makes no sense.
    """
    options.check()
    about, task = machine(("numpy", "torch")), _task(options)
    nbytes = sum(array.nbytes for array in task.initial(0).values())
    rounds: dict[str, list[dict[str, float]]] = {name: [] for name in options.rules}
    for name in options.rules:  # compiles, and keeps, what servers compile once on a machine
        _train(replace(options, seconds=min(options.seconds, _FIRST_SECONDS)), task, name, 0)
    for number in range(options.rounds):
        for name in options.rules:
            found = _train(options, task, name, number)
            rounds[name].append(found)
            log(
                f"round {number + 1}, {name}: {found['cost']:.3f} nats after"
                f" {found['mini_batches']:,.0f} mini-batches and {found['MB']:,.1f} MB"
            )
    cells = [
        {
            "cell": name,
            "rounds": each,
            **{k: report.spread([one[k] for one in each]) for k in each[0]},
        }
        for name, each in rounds.items()
    ]
    return record("benchmark", "learning", options, {"bytes": nbytes, "cells": cells}, about)


def _task(options: Options) -> Task:
    dataset = "cifar10" if options.network == "convnet" else "digits"
    simulation = Simulation(dataset=dataset, hidden=64, batch_size=16)
    return TimedTraining(simulation, network=options.network).task


def _train(options: Options, task: Task, name: str, seed: int) -> dict[str, float]:
    """Train for a while with a rule; return what came of it."""
    rule, rate = RULES[name]
    schedule = rule.schedule(options.seconds, options.seconds / options.compute)
    settings = (*rule.settings, f"{rule.rate}={rate:g}", *schedule)
    flags = ["--workers", str(options.workers)]
    flags += [word for each in settings for word in ("--set", each)]
    flags += [word for codec in rule.push for word in ("--push-codec", codec)]
    flags += [word for codec in rule.fetch for word in ("--fetch-codec", codec)]
    initial = task.initial(seed)
    with ExitStack() as stack:
        url, _pid = stack.enter_context(serving(rule.policy, *flags))
        link = SlowLink(url, rate=options.rate, delay=options.delay, each=True)
        stack.enter_context(link)
        joined = [
            stack.enter_context(aiops.Worker(link.url, initial, overlap=rule.overlap, timeout=600))
            for _ in range(options.workers)
        ]
        before, until = sum(link.carried.values()), time.perf_counter() + options.seconds

        def train(number: int) -> int:
            worker, out = joined[number], Params(Layout.of(initial))
            drawn = Batches(task.examples, 16, 1000 * seed + number)
            for count in itertools.count():
                begin = time.perf_counter()
                if begin >= until:
                    break
                task.gradient(worker.params, drawn.rows(count), out)
                time.sleep(max(0.0, options.compute - (time.perf_counter() - begin)))
                worker.step(out)
            worker.close(flush=False)  # the others may have ended before a barrier
            return worker.steps

        with ThreadPoolExecutor(options.workers) as pool:
            steps = list(pool.map(train, range(options.workers)))
        carried = sum(link.carried.values()) - before
        with aiops.Client(url) as server:
            params, stats = server.fetch(), server.stats()
    cost, error = task.validate(params)
    return {
        "cost": cost,
        "error": error,
        "mini_batches": float(sum(steps)),
        "MB": carried / 1e6,
        "staleness": float(stats["mean_staleness"]),
    }


def table(result: Mapping[str, Any]) -> Any:
    """Make the table of a report, the best first."""
    options = result["options"]
    rows = [
        [
            cell["cell"],
            f"{cell['cost']['median']:.3f}",
            f"{cell['cost']['min']:.3f}-{cell['cost']['max']:.3f}",
            f"{cell['error']['median']:.1%}",
            f"{cell['mini_batches']['median']:,.0f}",
            f"{cell['MB']['median']:,.1f}",
            f"{cell['staleness']['median']:.1f}",
        ]
        for cell in sorted(result["cells"], key=lambda cell: float(cell["cost"]["median"]))
    ]
    title = (
        f"{options['network']} of {result['bytes'] / 1e3:,.0f} kB,"
        f" {plots.crowd(options['workers'])}, each behind {options['rate']} and"
        f" {1e3 * options['delay']:g} ms each way, {1e3 * options['compute']:g} ms a mini-batch,"
        f" {options['seconds']:g} s; medians over rounds ({options['rounds']})"
    )
    columns = ("rule", "nats", "min-max", "error", "mini-batches", "MB", "staleness")
    return report.table(title, columns, rows)


def cells(result: Mapping[str, Any]) -> Iterator[Cell]:
    """Yield what can be compared with another run's."""
    for cell in result["cells"]:
        yield Cell.of(cell["cell"], "nats", cell["cost"], less=True)


def figure(result: Mapping[str, Any]) -> Figure:
    """Draw the cost at the end, and the mini-batches until then."""
    found = list(enumerate(result["cells"]))
    names, panels = [cell["cell"] for _row, cell in found], []
    for key, title, unit in (
        ("cost", "held out", "nats"),
        ("mini_batches", "done", "mini-batches"),
    ):
        lines = [plots.rows("measured", {row: cell[key] for row, cell in found})]
        panels.append(Panel(title, unit, "", lines, ticks=names))
    options = result["options"]
    title = f"After {options['seconds']:g} s over {options['rate']}"
    return Figure(title, panels, len(panels))


def main(argv: Sequence[str] | None = None) -> None:
    """Run from the command line; exits with 2 when an option is wrong."""
    report.command(Options(), run, table, argv, drawn=figure)


if __name__ == "__main__":
    main()
