"""The startup benchmark: how soon a server that has just been started answers its first push.

    python -m benchmarks.startup [--sizes 4KiB,1MiB,16MiB] [--caches warm,cold] [--policy fasgd]
                                 [--rounds 5] [--json out.json] [--plot out.png]

A server process is started again and again, with the kernels' machine code of an earlier process in
the cache folder (*warm*), or with an empty folder (*cold*). The client is up already: it connects
when the URL is printed, defines the model, and pushes at once. Taken down are: process start to
its URL, the URL to the server's welcome, the URL to the answer to the first push, and to when the
server's statistics first say that Numba runs its kernels: before that NumPy does. All cells take
turns in interleaved rounds; figures are medians. Parameters are checked in the end to the last bit.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Annotated, Any

import numpy as np
from rich.table import Table

from aiops.algorithms import find
from aiops.client import Client
from aiops.errors import UsageError, nearest
from aiops.kernels import Spans, build, resolve
from aiops.kernels.vocabulary import Array
from aiops.lab.figures import Figure, Panel
from aiops.lab.run_record import machine, record
from benchmarks import plots, report
from benchmarks.compare import Cell
from benchmarks.serving import serving
from benchmarks.sizes import KIB, MIB, format_size, parse_size, short_size

CACHES = ("warm", "cold")
"""Whether an earlier process has left its machine code."""

STEPS = {
    "url": "start to URL",
    "welcome": "URL to welcome",
    "push": "URL to first push",
    "numba": "URL to Numba",
}
"""What is taken down of every start, in seconds, and what it is called."""

_GOAL = 0.1  # seconds to the first push after a warm start
_GRADIENT = 1e-3
_TENSOR = "w"


@dataclass(frozen=True)
class Options:
    """The options of the benchmark; sizes are bytes per model."""

    sizes: Annotated[tuple[int, ...], "of the model", parse_size] = (4 * KIB, MIB, 16 * MIB)
    caches: Annotated[tuple[str, ...], "caches of Numba"] = CACHES
    policy: str = "fasgd"
    rounds: int = 5
    deadline: Annotated[float, "seconds for Numba"] = 60.0

    def check(self) -> None:
        """Raise UsageError when an option makes no sense."""
        for name in self.caches:
            if name not in CACHES:
                raise UsageError(f"no cache is {name!r}; {nearest(name, CACHES)}")
        if min(self.rounds, self.deadline) <= 0:
            raise UsageError("rounds and deadline are positive")
        if find(self.policy).make({}).rule().reads:
            raise UsageError(f"{self.policy} cannot be checked here: choose fasgd or asgd")


def run(options: Options, log: Callable[[str], None] = lambda line: None) -> dict[str, Any]:
    """Measure, and return the report: a cell for every size and cache, ``rounds`` of `STEPS`.

    Raises
    ------
    UsageError
        When an option makes no sense.
    """
    options.check()
    about = machine()
    cells: dict[tuple[int, str], list[dict[str, float]]] = {
        cell: [] for cell in product(options.sizes, options.caches)
    }
    with tempfile.TemporaryDirectory() as folder:
        warm = Path(folder, "warm")
        _start(options, min(options.sizes), warm)  # also imports what this process needs
        for number in range(options.rounds):
            log(f"round {number + 1} of {options.rounds}")
            for place, ((size, cache), rounds) in enumerate(cells.items()):
                cold = Path(folder, f"cold-{number}-{place}")
                rounds.append(_start(options, size, warm if cache == "warm" else cold))
    return record(
        "benchmark",
        "startup",
        options,
        {
            "cells": [
                {
                    "cell": f"{format_size(size)}, {cache}",
                    "size": size,
                    "cache": cache,
                    "rounds": rounds,
                    **{step: report.spread([one[step] for one in rounds]) for step in STEPS},
                }
                for (size, cache), rounds in cells.items()
            ],
        },
        about,
    )


def _start(options: Options, size: int, cache: Path) -> dict[str, float]:
    """Start a server, and take down the seconds of `STEPS`."""
    began = time.perf_counter()
    model = {_TENSOR: np.zeros(size // 4, np.float32)}
    gradient = {_TENSOR: np.full(size // 4, _GRADIENT, np.float32)}
    with serving(options.policy, cache=cache) as (url, _process):
        listening = time.perf_counter()
        with Client(url, role="worker", name="startup") as client:
            welcomed = time.perf_counter()
            client.define(model)
            at = client.fetch()
            client.push(at, gradient)
            pushed = time.perf_counter()
            compiled = _compiled(client, pushed + options.deadline)
            client.push(client.fetch(), gradient)
            if not np.array_equal(client.fetch()[_TENSOR], _after(options.policy, size // 4, 2)):
                raise RuntimeError("the server's parameters are not what its rule makes of them")
    return {
        "url": listening - began,
        "welcome": welcomed - listening,
        "push": pushed - listening,
        "numba": compiled - listening,
    }


def _compiled(client: Client, until: float) -> float:
    """Wait until the server runs compiled kernels, where there are such; return when."""
    while client.stats()["kernels"] != resolve("auto"):
        if time.perf_counter() > until:
            raise RuntimeError("the server has not compiled its kernels in time: see --deadline")
        time.sleep(0.005)
    return time.perf_counter()


def _after(policy: str, elements: int, pushes: int) -> Array:
    """Return what ``pushes`` gradients make of a model, each computed at the newest parameters."""
    algorithm = find(policy).make({})
    rule, rates = algorithm.rule(), algorithm.rates(None)
    kernel = build(rule, np.float32)
    weights, gradient = np.zeros(elements, np.float32), np.full(elements, _GRADIENT, np.float32)
    state = [np.full(elements, value, np.float32) for value in rule.state.values()]
    for version in range(pushes):
        rate = rates(version) if callable(rates) else rates
        step = rate * algorithm.modulation(0)
        scalars = algorithm.scalars(version + 1, 0.0, 1.0) if rule.scalars else ()
        spans = Spans.whole(elements, step, scalars)
        kernel(spans, 1.0, weights, gradient, weights, state)
    return weights


def table(result: Mapping[str, Any]) -> Table:
    """Make the table of a report."""
    rows: list[list[str]] = []
    size = None
    for cell in result["cells"]:
        if size not in (None, cell["size"]):
            rows.append([])
        head = format_size(cell["size"]) if cell["size"] != size else ""
        size = cell["size"]
        rows.append([head, cell["cache"], *(_milliseconds(cell[step]) for step in STEPS)])
    options = result["options"]
    title = f"A {options['policy']} server's start, ms; medians of {options['rounds']} (least-most)"
    return report.table(title, ("model", "cache", *STEPS.values()), rows, text_columns=2)


def _milliseconds(spread: Mapping[str, float]) -> str:
    median, least, most = (f"{1e3 * spread[key]:,.0f}" for key in ("median", "min", "max"))
    return f"{median} ({least}-{most})"


def notes(result: Mapping[str, Any]) -> Iterator[str]:
    """Yield notes on the goal, for below the table."""
    met = [
        f"{cell['cell']} {1e3 * cell['push']['median']:.0f} ms"
        for cell in result["cells"]
        if cell["cache"] == "warm"
    ]
    if met:
        yield f"the first push is to be answered within {1e3 * _GOAL:.0f} ms: {'; '.join(met)}"


def cells(result: Mapping[str, Any]) -> Iterator[Cell]:
    """Yield what can be compared with another run's."""
    for cell in result["cells"]:
        for step, name in STEPS.items():
            yield Cell.of(cell["cell"], f"{name}, s", cell[step], less=True)


def figure(result: Mapping[str, Any]) -> Figure:
    """Draw when the first push is answered, and when Numba takes over, by the model's size."""
    options = result["options"]
    panels = []
    for cache in options["caches"]:
        mine = [cell for cell in result["cells"] if cell["cache"] == cache]
        lines = [plots.rounds(STEPS[step], mine, step, 1e3) for step in ("push", "numba")]
        ticks = [short_size(size) for size in options["sizes"]]
        panels.append(Panel(f"{cache} cache", "model", "ms", lines, "y", ticks=ticks))
    return Figure(f"A {options['policy']} server's start", panels, len(panels))


def main(argv: Sequence[str] | None = None) -> None:
    """Run from the command line; exits with 2 when an option is wrong."""
    report.command(Options(), run, table, argv, drawn=figure, notes=notes)


if __name__ == "__main__":
    main()
