"""The dashboard benchmark: the live page of a server with many workers, and exchanges beside it.

    python -m benchmarks.dashboard [--workers 1000] [--tensors 100] [--rounds 15] [--seconds 4]
                                   [--watch 10] [--json out.json] [--plot out.png]

Three servers, one with ``--dashboard``, have that many connected workers each. By turns, in an
order that rotates, one worker of each exchanges without a pause: at a server without the page, at
another one without it, and at the one with it, first while no viewer is there and then beside a
viewer that reads all events. Compared is the server's processor time for an exchange with that of
the same round without the page: other work of the machine has part in exchanges a second, and much
less in that. By what two servers without the page differ, nothing can be told. After that, without
any exchange, the processor time that the servers take meanwhile is compared, too.

Where Playwright and Chromium are installed the page is then opened in a browser, while all workers
step by turns, so that each row changes. Taken down are the time of its first paint, and the time of
the page's script for each event and frame, first while it loads and then while it is watched.
"""

from __future__ import annotations

import asyncio
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AsyncExitStack, nullcontext
from dataclasses import dataclass
from typing import Annotated, Any, NamedTuple

import numpy as np
from rich.table import Table

import aiops
from aiops.errors import UsageError
from aiops.lab.figures import Figure, Panel
from aiops.lab.run_record import machine, record
from benchmarks import plots, report
from benchmarks.page_viewers import Viewer, chromium, watched
from benchmarks.serving import crowd, free_port, serving

_ELEMENTS = 64  # of a tensor
_WAYS = ("without", "again", "unseen", "seen")
_SERVER = {"without": 0, "again": 1, "unseen": 2, "seen": 2}
_CPUCLOCK_SCHED = 2  # of Linux, whose processor clocks of processes have ids of this kind


@dataclass(frozen=True)
class Options:
    """The options of the benchmark."""

    workers: Annotated[int, "connected to each server"] = 1000
    tensors: Annotated[int, "of the model"] = 100
    rounds: int = 15
    seconds: Annotated[float, "of exchanges each way, per round"] = 4.0
    watch: Annotated[float, "seconds that a browser watches; 0: none does"] = 10.0

    def check(self) -> None:
        """Raise UsageError when an option makes no sense."""
        if min(self.workers, self.tensors, self.rounds, self.seconds) <= 0 or self.watch < 0:
            raise UsageError("workers, tensors, rounds and seconds are positive, watch is not less")


def run(options: Options, log: Callable[[str], None] = lambda line: None) -> dict[str, Any]:
    """Measure, and return the report.

    Raises
    ------
    UsageError
        When an option makes no sense.
    """
    options.check()
    about, port = machine(), free_port()
    page = ("--dashboard", f"--metrics-port={port}", "--no-shm")
    with (
        serving("fasgd", "--no-shm") as plain,
        serving("fasgd", "--no-shm") as again,
        serving("fasgd", *page) as shown,
    ):
        values = asyncio.run(_measured(options, (plain, again, shown), port, log))
    cell = {"cell": f"{options.workers:,} workers", "workers": options.workers, **values}
    return record("benchmark", "dashboard", options, {"cells": [cell]}, about)


async def _measured(
    options: Options,
    servers: Sequence[tuple[str, int]],
    port: int,
    log: Callable[[str], None],
) -> dict[str, Any]:
    model = {f"w{k}": np.zeros(_ELEMENTS, np.float32) for k in range(options.tensors)}
    draw = np.random.default_rng(1)
    gradients = {name: draw.standard_normal(_ELEMENTS, np.float32) for name in model}
    laps: dict[str, list[_Lap]] = {name: [] for name in _WAYS}
    idle: dict[str, list[list[float]]] = {"unseen": [], "seen": []}
    async with AsyncExitStack() as stack:
        log(f"{options.workers:,} workers connect to each of three servers")
        crowds = [
            await crowd(stack, url, model, gradients, options.workers) for url, _pid in servers
        ]
        viewer = Viewer(port)
        for number in range(options.rounds):
            for place in range(len(_WAYS)):
                way = _WAYS[(number + place) % len(_WAYS)]
                worker, pid = crowds[_SERVER[way]][0], servers[_SERVER[way]][1]
                async with viewer if way == "seen" else nullcontext():
                    laps[way].append(await _exchanges(options, worker, gradients, pid))
            for way, seen in (("unseen", nullcontext()), ("seen", viewer)):
                async with seen:
                    idle[way].append(await _idle(options, [pid for _url, pid in servers]))
        browser = None
        if options.watch and (executable := chromium()) is not None:
            log("a browser watches while all workers step")
            stepping = asyncio.ensure_future(_step_all(crowds[-1], gradients))
            try:
                browser = await asyncio.to_thread(
                    watched, executable, port, options.workers, options.watch
                )
            finally:
                stepping.cancel()
                await asyncio.wait([stepping])
    return {
        **_compared(laps),
        **_compared_idle(idle),
        "bytes_per_second": viewer.nbytes / max(viewer.seconds, 1e-9),
        "whole_bytes": viewer.whole,
        "browser": browser,
    }


class _Lap(NamedTuple):
    """One worker's exchanges for a while."""

    rate: float  # a second
    processor: float  # seconds of the server's, for an exchange


def _compared(laps: Mapping[str, Sequence[_Lap]]) -> dict[str, Any]:
    """Return each way's figures, and their ratios to those of the same round without a page."""

    def more(way: str, base: str) -> dict[str, float]:
        pairs = zip(laps[way], laps[base], strict=True)
        return _spread([100 * (one.processor / other.processor - 1) for one, other in pairs])

    return {
        "exchanges_per_second": {
            way: _spread([lap.rate for lap in found]) for way, found in laps.items()
        },
        "processor_us": {
            way: _spread([1e6 * lap.processor for lap in found]) for way, found in laps.items()
        },
        "more_percent": {way: more(way, "without") for way in _WAYS[1:]},
        "viewer_percent": more("seen", "unseen"),
    }


async def _exchanges(
    options: Options, worker: aiops.AsyncWorker, gradients: Mapping[str, Any], pid: int
) -> _Lap:
    """Have a worker exchange, one after the other, at the server that is a process."""
    count, used, begin = 0, _used(pid), time.perf_counter()
    until = begin + options.seconds
    while time.perf_counter() < until:
        await worker.step(gradients)
        count += 1
    return _Lap(count / (time.perf_counter() - begin), (_used(pid) - used) / count)


async def _step_all(workers: Sequence[aiops.AsyncWorker], gradients: Mapping[str, Any]) -> None:
    while True:
        for worker in workers:
            await worker.step(gradients)
            worker.log(loss=0.5)


async def _idle(options: Options, pids: Sequence[int]) -> list[float]:
    """Return the share of a processor, in percent, that each of some processes takes meanwhile."""
    before, begin = [_used(pid) for pid in pids], time.perf_counter()
    await asyncio.sleep(options.seconds)
    after, seconds = [_used(pid) for pid in pids], time.perf_counter() - begin
    return [100 * (late - early) / seconds for early, late in zip(before, after, strict=True)]


def _compared_idle(idle: Mapping[str, Sequence[Sequence[float]]]) -> dict[str, Any]:
    """Return what idle servers take, and what more one with the page takes at the same time."""
    plain, again, _shown = zip(*idle["unseen"], strict=True)
    taken, more = {"without": _spread(plain), "again": _spread(again)}, {}
    for way, rounds in idle.items():
        taken[way] = _spread([shares[_SERVER[way]] for shares in rounds])
        more[way] = _spread([shares[_SERVER[way]] - shares[0] for shares in rounds])
    return {"idle_percent": taken, "idle_more_percent": more}


def _used(pid: int) -> float:
    """Return the seconds that all threads of a process have run, to the nanosecond.

    The id of its clock is clock_getcpuclockid(3)'s.
    """
    return time.clock_gettime((~pid << 3) | _CPUCLOCK_SCHED)


def _spread(values: Sequence[float]) -> dict[str, float]:
    """Return the spread of some figures, and between what half of them lie."""
    quarters = (
        statistics.quantiles(values, n=4, method="inclusive") if len(values) > 1 else [*values] * 3
    )
    return {**report.spread(values), "low": quarters[0], "high": quarters[-1]}


def table(result: Mapping[str, Any]) -> Table:
    """Return the report as a table."""

    def more(found: Mapping[str, float]) -> list[str]:
        return [f"{found['median']:+.1f} %", f"{found['low']:+.1f} to {found['high']:+.1f}"]

    def idle(cell: Mapping[str, Any], way: str) -> list[str]:
        found = cell["idle_more_percent"].get(way)
        told = (
            f"{found['median']:+.2f} ({found['low']:.2f} to {found['high']:.2f})" if found else ""
        )
        return [f"{cell['idle_percent'][way]['median']:.2f} %", told]

    rows = []
    for cell in result["cells"]:
        for way in _WAYS:
            beside = ["", ""] if way == "without" else more(cell["more_percent"][way])
            rate, each = (cell[key][way] for key in ("exchanges_per_second", "processor_us"))
            figures = [f"{rate['median']:,.0f}", f"{each['median']:.1f} us"]
            rows.append([_NAMES[way], *figures, *beside, *idle(cell, way)])
        rows.append(["a viewer beside none", "", "", *more(cell["viewer_percent"]), "", ""])
        lines = [("a viewer reads", f"{cell['bytes_per_second'] / 1e3:,.1f} kB/s")]
        browser = cell["browser"]
        if browser is not None:
            script = browser["script_ms"]
            took = f"{script['median']:.1f} ms, p99 {script['p99']:.1f}, most {script['most']:.1f}"
            lines += [
                ("first paint", f"{browser['first_paint_ms']:,.0f} ms"),
                ("script of an event or frame", took),
                ("most while it loads", f"{browser['load_most_ms']:.1f} ms"),
            ]
        rows += [[*line, "", "", "", "", ""] for line in lines]
    workers = result["cells"][0]["workers"]
    columns = ("", "exchanges/s", "each", "beside no page", "half of all", "idle", "more")
    return report.table(f"The live page of a server with {workers:,} workers", columns, rows)


_NAMES = {
    "without": "a server without the page",
    "again": "another one without it",
    "unseen": "with it, no viewer",
    "seen": "with it and a viewer",
}


def figure(result: Mapping[str, Any]) -> Figure:
    """Draw the processor time of the servers: for an exchange, and without any."""
    cells = result["cells"]
    ticks, panels = [cell["cell"] for cell in cells], []
    for key, title, unit in (
        ("idle_percent", "idle servers", "% of a processor"),
        ("processor_us", "an exchange", "microseconds of a processor"),
    ):
        lines = [
            plots.rows(_NAMES[way], {n: cell[key][way] for n, cell in enumerate(cells)})
            for way in _WAYS
        ]
        panels.append(Panel(title, unit, "", lines, bottom=0, ticks=ticks))
    return Figure("The live page", panels, 2)


def main(argv: Sequence[str] | None = None) -> None:
    """Run from the command line; exits with 2 when an option is wrong."""
    report.command(Options(), run, table, argv, drawn=figure)


if __name__ == "__main__":
    main()
