"""The dashboard benchmark: the live page of a server with many workers, and exchanges beside it.

    python -m benchmarks.dashboard [--workers 1000] [--tensors 100] [--rounds 15] [--seconds 4]
                                   [--watch 10] [--json out.json] [--plot out.png]

Three servers, one with ``--dashboard``, have that many connected workers each. By turns, in an
order that rotates, one worker of each exchanges without a pause: at a server without the page, at
another one without it, and at the one with it, first while no viewer is there and then beside a
viewer that reads all events. Compared is the server's processor time for an exchange with that of
the same round without the page: other work of the machine has part in exchanges a second, and much
less in that. By what two servers without the page differ, nothing can be told. Beside that, without
any exchange, the processor time of the servers is taken with a viewer and without.

Where Playwright and Chromium are installed the page is then opened in a browser, while all workers
step by turns, so that each row changes. Taken down are the time of its first paint, and the time of
the page's script for each event and frame, first while it loads and then while it is watched.
"""

from __future__ import annotations

import asyncio
import importlib.util
import shutil
import socket
import statistics
import threading
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
from benchmarks.serving import crowd, free_port, serving

_ELEMENTS = 64  # of a tensor
_SETTLE = 1.0  # seconds from a viewer's first event on before exchanges are counted
_GLANCE = 0.05  # seconds between a viewer's looks at whether it is to end
_WAYS = ("without", "again", "unseen", "seen")
_SERVER = {"without": 0, "again": 1, "unseen": 2, "seen": 2}
_CPUCLOCK_SCHED = 2  # of Linux, whose processor clocks of processes have ids of this kind
_FRAME = 1000 / 60  # milliseconds


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
    async with AsyncExitStack() as stack:
        log(f"{options.workers:,} workers connect to each of three servers")
        crowds = [
            await crowd(stack, url, model, gradients, options.workers) for url, _pid in servers
        ]
        viewer = _Viewer(port)
        for number in range(options.rounds):
            for place in range(len(_WAYS)):
                way = _WAYS[(number + place) % len(_WAYS)]
                worker, pid = crowds[_SERVER[way]][0], servers[_SERVER[way]][1]
                async with viewer if way == "seen" else nullcontext():
                    laps[way].append(await _exchanges(options, worker, gradients, pid))
        log("the server's processor time, without exchanges")
        used = {}
        for way in _WAYS:
            async with viewer if way == "seen" else nullcontext():
                used[way] = await _processor(servers[_SERVER[way]][1], options.seconds)
        browser = None
        if options.watch and (chromium := _browser()) is not None:
            log("a browser watches while all workers step")
            stepping = asyncio.ensure_future(_step_all(crowds[-1], gradients))
            try:
                browser = await asyncio.to_thread(_watched, chromium, port, options)
            finally:
                stepping.cancel()
                await asyncio.wait([stepping])
    return {
        **_compared(laps),
        "processor_percent": {name: 100 * share for name, share in used.items()},
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


async def _processor(pid: int, seconds: float) -> float:
    """Return the share of a processor that a process uses for so long."""
    before, begin = _used(pid), time.perf_counter()
    await asyncio.sleep(seconds)
    return (_used(pid) - before) / (time.perf_counter() - begin)


def _used(pid: int) -> float:
    """Return the seconds that all threads of a process have run, to the nanosecond.

    The id of its clock is clock_getcpuclockid(3)'s.
    """
    return time.clock_gettime((~pid << 3) | _CPUCLOCK_SCHED)


class _Viewer:
    """Reads the events of a page in a thread, for as long as an ``async with`` block lasts.

    Attributes
    ----------
    nbytes, seconds
        Bytes of differences so far, and the time in which they came.
    whole
        Bytes of the last whole document.
    """

    def __init__(self, port: int) -> None:
        self._port = port
        self.nbytes, self.seconds, self.whole = 0, 0.0, 0

    async def __aenter__(self) -> _Viewer:
        self._over, self._begun = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()
        await asyncio.to_thread(self._begun.wait)
        await asyncio.sleep(_SETTLE)
        return self

    async def __aexit__(self, *error: object) -> None:
        self._over.set()
        await asyncio.to_thread(self._thread.join)

    def _read(self) -> None:
        begin, data = time.perf_counter(), b""
        with socket.create_connection(("127.0.0.1", self._port)) as sock:
            sock.sendall(b"GET /events HTTP/1.1\r\nHost: localhost\r\n\r\n")
            sock.settimeout(_GLANCE)
            while not self._over.is_set():
                try:
                    data += sock.recv(1 << 20)
                except TimeoutError:
                    continue
                *events, data = data.split(b"\n\n")
                for event in events:
                    if b"event: whole\n" in event:
                        self.whole, begin = len(event), time.perf_counter()
                        self._begun.set()
                    else:
                        self.nbytes += len(event)
        self.seconds += time.perf_counter() - begin


def _browser() -> str | None:
    """Return the path of Chromium, if it and Playwright are installed."""
    if importlib.util.find_spec("playwright") is None:
        return None
    return shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("chrome")


def _watched(chromium: str, port: int, options: Options) -> dict[str, Any]:
    """Open the page, and watch it; return what it took."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as started:
        browser = started.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        page = browser.new_page(viewport={"width": 1280, "height": 900})
        page.goto(f"http://127.0.0.1:{port}/")
        while page.evaluate("aiopsPage.rows().size") < options.workers:
            page.wait_for_timeout(100)
        paints = page.evaluate(
            "performance.getEntriesByType('paint').map((entry) => [entry.name, entry.startTime])"
        )
        page.wait_for_timeout(2000)  # the charts are drawn
        load = page.evaluate("aiopsPage.times.splice(0)")
        page.wait_for_timeout(1000 * options.watch)
        times = sorted(page.evaluate("aiopsPage.times"))
        if not times:
            raise UsageError("no event came while the browser watched: watch it for longer")
        browser.close()
    return {
        "first_paint_ms": dict(paints)["first-contentful-paint"],
        "load_most_ms": max(load),
        "script_ms": {
            "median": statistics.median(times),
            "p99": times[int(0.99 * (len(times) - 1))],
            "most": times[-1],
            "count": len(times),
        },
        "over_a_frame": sum(each > _FRAME for each in times),
    }


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

    rows = []
    for cell in result["cells"]:
        for way in _WAYS:
            beside = ["", ""] if way == "without" else more(cell["more_percent"][way])
            rate, each = (cell[key][way] for key in ("exchanges_per_second", "processor_us"))
            used = f"{cell['processor_percent'][way]:.2f} %"
            figures = [f"{rate['median']:,.0f}", f"{each['median']:.1f} us"]
            rows.append([_NAMES[way], *figures, *beside, used])
        rows.append(["a viewer beside none", "", "", *more(cell["viewer_percent"]), ""])
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
        rows += [[*line, "", "", "", ""] for line in lines]
    workers = result["cells"][0]["workers"]
    columns = ("", "exchanges/s", "processor", "beside no page", "half of all", "processor, idle")
    return report.table(f"The live page of a server with {workers:,} workers", columns, rows)


_NAMES = {
    "without": "a server without the page",
    "again": "another one without it",
    "unseen": "with it, no viewer",
    "seen": "with it and a viewer",
}


def figure(result: Mapping[str, Any]) -> Figure:
    """Draw the server's processor time for an exchange."""
    cells = result["cells"]
    lines = [
        plots.rows(_NAMES[way], {n: c["processor_us"][way] for n, c in enumerate(cells)})
        for way in _WAYS
    ]
    ticks = [cell["cell"] for cell in cells]
    title = "the server's processor time for an exchange"
    panel = Panel(title, "microseconds", "", lines, bottom=0, ticks=ticks)
    return Figure("The live page", [panel], 1)


def main(argv: Sequence[str] | None = None) -> None:
    """Run from the command line; exits with 2 when an option is wrong."""
    report.command(Options(), run, table, argv, drawn=figure)


if __name__ == "__main__":
    main()
