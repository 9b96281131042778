"""The filter benchmark: exchanges with ``--filter`` beside exchanges without.

    python -m benchmarks.filter [--sizes 4KiB,1MiB,16MiB] [--policies asgd,fasgd] [--rounds 5]
                                [--shards 1] [--filter robust] [--seconds 1] [--json out.json]
                                [--plot out.png]

Two servers run at the same time, one with the filter, and one worker exchanges with them in turns,
on this machine, and so in shared memory if the model is not small: a push of the whole gradient,
answered with the parameters. The figure is the time of an exchange with the filter over that
without, in the same round; and the time of a filter's decision on a push, the reading of its sample
included, over that of an update: both on one thread, by turns, without a server. With ``--shards
2`` each of the two has its model on two processes.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from itertools import product
from typing import Annotated, Any

import numpy as np
from rich.table import Table

from aiops.algorithms import find
from aiops.client import Client
from aiops.errors import UsageError
from aiops.filters.screen import PushScreen
from aiops.kernels import Spans, build
from aiops.lab.figures import Figure, Panel
from aiops.lab.run_record import machine, record
from aiops.model.arena import Arena
from aiops.model.layout import Array, Cover, Layout
from aiops.store.snapshots import Version
from benchmarks import plots, report
from benchmarks.serving import serving
from benchmarks.sizes import KIB, MIB, format_size, parse_size

_TENSORS = 4
_GRADIENT = 1e-6
_WARM = 3.0  # seconds of exchanges first: a server imports Numba meanwhile; 16 teach the filters
_WORKERS = 12  # whose pushes the decisions are on
_MODELS = 7  # that the pushes meet in turns, and as many gradients; it does not divide the workers


@dataclass(frozen=True)
class Options:
    """The options of the benchmark; sizes are bytes per model."""

    sizes: Annotated[tuple[int, ...], "of the model", parse_size] = (4 * KIB, MIB, 16 * MIB)
    policies: Annotated[tuple[str, ...], "policies"] = ("asgd", "fasgd")
    shards: Annotated[tuple[int, ...], "servers that hold the model"] = (1,)
    filter: str = "robust"
    rounds: int = 5
    seconds: Annotated[float, "per round and server"] = 1.0

    def check(self) -> None:
        """Raise UsageError when an option makes no sense."""
        if min(self.rounds, self.seconds, *self.shards) <= 0:
            raise UsageError("rounds, seconds and shards are positive")


def run(options: Options, log: Callable[[str], None] = lambda line: None) -> dict[str, Any]:
    """Measure, and return the report: a cell for every size and policy.

    Raises
    ------
    UsageError
        When an option makes no sense.
    """
    options.check()
    about, cells = machine(), []
    for size, policy, shards in product(options.sizes, options.policies, options.shards):
        cell = f"{format_size(size)}, {policy}" + (f", {shards} servers" if shards > 1 else "")
        log(cell)
        of_update = _of_update(options, size, policy)  # first: it compiles what the servers read
        off, on = _exchanges(options, size, policy, shards)
        ratios = [mine / other for mine, other in zip(on, off, strict=True)]
        cells.append(
            {
                "cell": cell,
                "size": size,
                "policy": policy,
                "shards": shards,
                "off": report.spread(off),
                "on": report.spread(on),
                "ratio": report.spread(ratios),
                "of_update": report.spread(of_update),
            }
        )
    return record("benchmark", "filter", options, {"cells": cells}, about)


def _exchanges(
    options: Options, size: int, policy: str, shards: int
) -> tuple[list[float], list[float]]:
    """Return the seconds of an exchange in each round, without the filter and with it."""
    each = max(size // 4 // _TENSORS, 1)
    draw = np.random.default_rng(1)
    model = {f"w{k}": np.zeros(each, np.float32) for k in range(_TENSORS)}
    gradient = {name: (_GRADIENT * draw.standard_normal(each)).astype(np.float32) for name in model}
    found: tuple[list[float], list[float]] = ([], [])
    with ExitStack() as stack:
        clients = []
        spread = ("--shards", str(shards), "--shard-bytes", "1") if shards > 1 else ()
        for flags in ((), ("--filter", options.filter)):
            url, _process = stack.enter_context(serving(policy, *spread, *flags))
            client = stack.enter_context(Client(url, role="worker", name="filter"))
            client.define(model)
            params = client.fetch()
            _timed(_WARM, partial(client.exchange, params, gradient))
            clients.append((client, params))
        for _ in range(options.rounds):
            for seconds, (client, params) in zip(found, clients, strict=True):
                exchange = partial(client.exchange, params, gradient)
                seconds.append(_timed(options.seconds, exchange))
    return found


def _of_update(options: Options, size: int, policy: str) -> list[float]:
    """Return the time of the filters' decision over that of an update, of each round."""
    count = max(size // 4 // _TENSORS, 1) * _TENSORS
    rule = find(policy).make({}).rule()
    kernel = build(rule, np.float32).warm()
    w, g = np.zeros(count, np.float32), np.full(count, _GRADIENT, np.float32)
    state = [np.full(count, value, np.float32) for value in rule.state.values()]
    spans = Spans.whole(count, 1e-6)
    decide = _decisions(options, count)
    ratios = []
    for _ in range(options.rounds):
        update = _timed(options.seconds / 8, lambda: kernel(spans, 1.0, w, g, w, state))
        ratios.append(_timed(options.seconds / 8, decide) / update)
    return ratios


def _decisions(options: Options, count: int) -> Callable[[], object]:
    """Return a function that has the filters decide on the next of many pushes, which pass."""
    layout = Layout([(f"w{k}", "float32", (count // _TENSORS,)) for k in range(_TENSORS)])
    screen, draw = PushScreen(options.filter, layout), np.random.default_rng(1)

    def drawn(begin: Array) -> Arena:
        arena, first = Arena(layout), 0
        for array in arena.sections:
            part = begin[first : first + array.size]
            array[:] = part + draw.standard_normal(array.size, np.float32)
            first += array.size
        return arena

    common = draw.standard_normal(count, np.float32)
    models = [drawn(common) for _ in range(_MODELS)]
    gradients = [drawn(np.concatenate(model.sections)) for model in models]  # of ½‖θ‖², with noise
    turns = itertools.count()
    screen.warm()

    def decide() -> None:
        turn = next(turns)
        base = max(turn - _WORKERS, 0)
        data, version = (
            gradients[base % _MODELS].data,
            Version(turn, models[turn % _MODELS], None, turn),
        )
        cover = Cover(layout.all, layout.starts, True, base, None)
        screen.judge(turn % _WORKERS, data, cover, 6.0, None, version)

    for _ in range(100):
        decide()
    refused = screen.refused  # while some workers have had the same of these gradients
    for _ in range(100):
        decide()
    if screen.refused > refused:
        raise RuntimeError("the filters refuse the benchmark's pushes, and these take longer")
    return decide


def _timed(seconds: float, do: Callable[[], object]) -> float:
    """Return the mean seconds of a call."""
    begin, count = time.perf_counter(), 0
    while True:
        do()
        count += 1
        gone = time.perf_counter() - begin
        if gone >= seconds:
            return gone / count


def table(result: Mapping[str, Any]) -> Table:
    """Return the report as a table."""
    rows = [
        [
            *(format_size(cell["size"]), cell["policy"], str(cell.get("shards", 1))),
            *(f"{1e3 * cell[name]['median']:.3f}" for name in ("off", "on")),
            *(f"{cell['ratio'][name]:.3f}" for name in ("median", "min", "max")),
            f"{cell['of_update']['median']:.2f}",
        ]
        for cell in result["cells"]
    ]
    title = "An exchange with the filter and without, ms on one machine, and a decision / an update"
    columns = ("model", "policy", "servers", "off", "on", "ratio", "least", "most", "of the update")
    return report.table(title, columns, rows, text_columns=2)


def figure(result: Mapping[str, Any]) -> Figure:
    """Draw the ratios."""
    cells = result["cells"]
    spreads = {number: cell["ratio"] for number, cell in enumerate(cells)}
    panel = Panel(
        *("an exchange with the filter", "times one without", ""),
        [plots.rows("ratio", spreads)],
        bottom=0,
        ticks=[cell["cell"] for cell in cells],
    )
    return Figure("The cost of --filter", [panel], 1)


def main(argv: Sequence[str] | None = None) -> None:
    """Run from the command line; exits with 2 when an option is wrong."""
    report.command(Options(), run, table, argv, drawn=figure)


if __name__ == "__main__":
    main()
