"""The scrape benchmark: metrics of a server with many workers, and exchanges beside the scrapes.

    python -m benchmarks.scrape [--workers 10,100,1000] [--tensors 100] [--rounds 3] [--seconds 3]
                                [--json out.json] [--plot out.png]

A server with ``--metrics-port`` has that many connected workers, each of which has pushed once.
Scrapes of ``/metrics`` are timed first, with pauses between them. Then one worker exchanges without
a pause, by turns alone and while a thread scrapes as often as it is answered: the server lets
gathering take a tenth of its event loop's time, so that these scrapes wait for their turn. Taken
down are the time of a scrape, the part of it for which the event loop gathered values (as the
server tells), its size, and the latencies of the exchanges.
"""

from __future__ import annotations

import asyncio
import re
import statistics
import threading
import time
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from typing import Annotated, Any

import numpy as np
from rich.table import Table

import aiops
from aiops.errors import UsageError
from aiops.lab.figures import Figure, Panel
from aiops.lab.run_record import machine, record
from benchmarks import plots, report
from benchmarks.serving import crowd, free_port, serving

_ELEMENTS = 64  # of a tensor
_PAUSE = 0.5  # seconds between scrapes that do not wait for their turn
_GATHERED = re.compile(rb"^aiops_metrics_gathering_seconds (\S+)$", re.MULTILINE)
_SERIES = re.compile(rb"^[a-z]", re.MULTILINE)


@dataclass(frozen=True)
class Options:
    """The options of the benchmark."""

    workers: Annotated[tuple[int, ...], "connected"] = (10, 100, 1000)
    tensors: Annotated[int, "of the model"] = 100
    rounds: int = 3
    seconds: Annotated[float, "of exchanges alone, and beside scrapes, per round"] = 3.0
    scrapes: Annotated[int, "with pauses between them, per round"] = 5

    def check(self) -> None:
        """Raise UsageError when an option makes no sense."""
        if min(self.tensors, self.rounds, self.seconds, self.scrapes, *self.workers) <= 0:
            raise UsageError("workers, tensors, rounds, seconds and scrapes are positive")


def run(options: Options, log: Callable[[str], None] = lambda line: None) -> dict[str, Any]:
    """Measure, and return the report: a cell for every number of workers.

    Raises
    ------
    UsageError
        When an option makes no sense.
    """
    options.check()
    about, cells = machine(), []
    for workers in options.workers:
        log(f"{workers:,} workers")
        port = free_port()
        with serving("fasgd", f"--metrics-port={port}", "--no-shm") as (url, _pid):
            cells.append(asyncio.run(_measured(options, url, port, workers)))
    return record("benchmark", "scrape", options, {"cells": cells}, about)


async def _measured(options: Options, url: str, port: int, count: int) -> dict[str, Any]:
    model = {f"w{k}": np.zeros(_ELEMENTS, np.float32) for k in range(options.tensors)}
    draw = np.random.default_rng(1)
    gradients = {name: draw.standard_normal(_ELEMENTS, np.float32) for name in model}
    alone: list[float] = []
    beside: list[float] = []
    found = _Scrapes(f"http://127.0.0.1:{port}/metrics")
    async with AsyncExitStack() as stack:
        workers = await crowd(stack, url, model, gradients, count)
        for _ in range(options.rounds):
            for _ in range(options.scrapes):
                found.alone.append(await asyncio.to_thread(found.once))
                await asyncio.sleep(_PAUSE)
            alone += await _exchanges(options, workers[0], gradients)
            with found:
                beside += await _exchanges(options, workers[0], gradients)
    spreads = {"alone": found.alone, "waited": found.waited, "gathering": found.gathering}
    return {
        "cell": f"{count:,} workers",
        "workers": count,
        "bytes": found.nbytes,
        "series": found.series,
        "scrape_ms": {name: _spread_ms(values) for name, values in spreads.items()},
        "scrapes": len(found.waited),
        "exchange_us": {
            name: report.percentiles(values)
            for name, values in (("alone", alone), ("beside", beside))
        },
    }


async def _exchanges(
    options: Options, worker: aiops.AsyncWorker, gradients: Mapping[str, Any]
) -> list[float]:
    """Return the latencies of a worker's steps, one after the other."""
    found, until = [], time.perf_counter() + options.seconds
    while (begin := time.perf_counter()) < until:
        await worker.step(gradients)
        found.append(time.perf_counter() - begin)
    return found


class _Scrapes:
    """Scrapes in a thread for as long as a ``with`` block lasts."""

    def __init__(self, url: str) -> None:
        self._url = url
        self.alone: list[float] = []
        self.waited: list[float] = []
        self.gathering: list[float] = []
        self.nbytes = self.series = 0

    def once(self) -> float:
        """Scrape once; return the seconds that it took."""
        begin = time.perf_counter()
        with urllib.request.urlopen(self._url) as answer:
            text = answer.read()
        took = time.perf_counter() - begin
        gathered = _GATHERED.search(text)
        assert gathered is not None, "each scrape tells"
        self.gathering.append(float(gathered[1]))
        self.nbytes, self.series = len(text), len(_SERIES.findall(text))
        return took

    def __enter__(self) -> None:
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._scrape, daemon=True)
        self._thread.start()

    def __exit__(self, *error: object) -> None:
        self._over.set()
        self._thread.join()

    def _scrape(self) -> None:
        while not self._over.is_set():
            self.waited.append(self.once())


def _spread_ms(seconds: Sequence[float]) -> dict[str, float]:
    ms = [1e3 * each for each in seconds]
    return {"median": statistics.median(ms), "min": min(ms), "max": max(ms)}


def table(result: Mapping[str, Any]) -> Table:
    """Return the report as a table."""
    rows = [
        [
            f"{cell['workers']:,}",
            *(f"{cell[name]:,}" for name in ("series", "bytes")),
            *(
                f"{cell['scrape_ms'][kind][name]:.1f}"
                for kind in ("alone", "gathering")
                for name in ("median", "max")
            ),
            *(
                f"{cell['exchange_us'][name][key]:,.0f}"
                for name in ("alone", "beside")
                for key in ("p50_us", "p99_us")
            ),
        ]
        for cell in result["cells"]
    ]
    columns = (
        *("workers", "series", "bytes", "scrape ms", "most", "of it on the loop", "most"),
        *("exchange p50 µs", "p99", "beside scrapes p50", "p99"),
    )
    title = "Scrapes of a server with many workers, and exchanges beside scrapes without a pause"
    return report.table(title, columns, rows)


def figure(result: Mapping[str, Any]) -> Figure:
    """Draw the time of a scrape, and the part of it on the event loop."""
    cells = result["cells"]
    lines = [
        plots.rows(label, {n: cell["scrape_ms"][kind] for n, cell in enumerate(cells)})
        for label, kind in (("a scrape", "alone"), ("of it on the event loop", "gathering"))
    ]
    ticks = [cell["cell"] for cell in cells]
    panel = Panel("metrics of a server", "ms", "", lines, bottom=0, ticks=ticks)
    return Figure("A scrape of many workers", [panel], 1)


def main(argv: Sequence[str] | None = None) -> None:
    """Run from the command line; exits with 2 when an option is wrong."""
    report.command(Options(), run, table, argv, drawn=figure)


if __name__ == "__main__":
    main()
