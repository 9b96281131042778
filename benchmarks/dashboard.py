"""The dashboard benchmark: the live page of a server with many workers, and exchanges beside it.

    python -m benchmarks.dashboard [--workers 1000] [--tensors 100] [--rounds 9] [--seconds 4]
                                   [--watch 10] [--json out.json] [--plot out.png]

Two servers, one with ``--dashboard``, have that many connected workers each. By turns one worker of
each exchanges without a pause: at the server without the page, at the other while no viewer is
there, and at the other beside a viewer that reads all events. Compared are the exchanges of a round
with those of the same round without the page. Beside that, without any exchange, the processor time
of the server is taken with a viewer and without.

Where Playwright and Chromium are installed the page is then opened in a browser, while all workers
step by turns, so that each row changes. Taken down are the time of its first paint, and the time of
the page's script for each event and frame, first while it loads and then while it is watched.
"""

from __future__ import annotations

import asyncio
import importlib.util
import os
import shutil
import socket
import statistics
import threading
import time
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
_SETTLE = 1.0  # seconds from a viewer's first event on before exchanges are counted
_GLANCE = 0.05  # seconds between a viewer's looks at whether it is to end
_TICK = os.sysconf("SC_CLK_TCK")
_WAYS = ("without", "unseen", "seen")
_FRAME = 1000 / 60  # milliseconds


@dataclass(frozen=True)
class Options:
    """The options of the benchmark."""

    workers: Annotated[int, "connected to each server"] = 1000
    tensors: Annotated[int, "of the model"] = 100
    rounds: int = 9
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
    with serving("fasgd", "--no-shm") as plain, serving("fasgd", *page) as shown:
        values = asyncio.run(_measured(options, plain, shown, port, log))
    cell = {"cell": f"{options.workers:,} workers", "workers": options.workers, **values}
    return record("benchmark", "dashboard", options, {"cells": [cell]}, about)


async def _measured(
    options: Options,
    plain: tuple[str, int],
    shown: tuple[str, int],
    port: int,
    log: Callable[[str], None],
) -> dict[str, Any]:
    model = {f"w{k}": np.zeros(_ELEMENTS, np.float32) for k in range(options.tensors)}
    draw = np.random.default_rng(1)
    gradients = {name: draw.standard_normal(_ELEMENTS, np.float32) for name in model}
    rates: dict[str, list[float]] = {name: [] for name in _WAYS}
    async with AsyncExitStack() as stack:
        log(f"{options.workers:,} workers connect to each of two servers")
        others = await crowd(stack, plain[0], model, gradients, options.workers)
        workers = await crowd(stack, shown[0], model, gradients, options.workers)
        viewer = _Viewer(port)
        for _ in range(options.rounds):
            rates["without"].append(await _exchanges(options, others[0], gradients))
            rates["unseen"].append(await _exchanges(options, workers[0], gradients))
            async with viewer:
                rates["seen"].append(await _exchanges(options, workers[0], gradients))
        log("the server's processor time, without exchanges")
        used = {"without": await _processor(plain[1], options.seconds)}
        used["unseen"] = await _processor(shown[1], options.seconds)
        async with viewer:
            used["seen"] = await _processor(shown[1], options.seconds)
        browser = None
        if options.watch and (chromium := _browser()) is not None:
            log("a browser watches while all workers step")
            stepping = asyncio.ensure_future(_step_all(workers, gradients))
            try:
                browser = await asyncio.to_thread(_watched, chromium, port, options)
            finally:
                stepping.cancel()
                await asyncio.wait([stepping])
    shares = {
        name: [
            100 * (each / base - 1)
            for each, base in zip(rates[name], rates["without"], strict=True)
        ]
        for name in ("unseen", "seen")
    }
    return {
        "exchanges_per_second": {name: _spread(values) for name, values in rates.items()},
        "difference_percent": {name: _spread(values) for name, values in shares.items()},
        "processor_percent": {name: 100 * share for name, share in used.items()},
        "bytes_per_second": viewer.nbytes / max(viewer.seconds, 1e-9),
        "whole_bytes": viewer.whole,
        "browser": browser,
    }


async def _exchanges(
    options: Options, worker: aiops.AsyncWorker, gradients: Mapping[str, Any]
) -> float:
    """Return how many exchanges a second a worker has made, one after the other."""
    count, begin = 0, time.perf_counter()
    until = begin + options.seconds
    while time.perf_counter() < until:
        await worker.step(gradients)
        count += 1
    return count / (time.perf_counter() - begin)


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
    with open(f"/proc/{pid}/stat") as file:
        fields = file.read().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / _TICK


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
    return {"median": statistics.median(values), "min": min(values), "max": max(values)}


def table(result: Mapping[str, Any]) -> Table:
    """Return the report as a table."""
    rows = []
    for cell in result["cells"]:
        rates, more = cell["exchanges_per_second"], cell["difference_percent"]
        for name in _WAYS:
            difference = "" if name == "without" else f"{more[name]['median']:+.1f} %"
            spread = (
                "" if name == "without" else f"{more[name]['min']:+.1f} to {more[name]['max']:+.1f}"
            )
            used = f"{cell['processor_percent'][name]:.2f} %"
            rows.append([_NAMES[name], f"{rates[name]['median']:,.0f}", difference, spread, used])
        rows.append(["a viewer reads", f"{cell['bytes_per_second'] / 1e3:,.1f} kB/s", "", "", ""])
        browser = cell["browser"]
        if browser is not None:
            script = browser["script_ms"]
            took = f"{script['median']:.1f} ms, p99 {script['p99']:.1f}, most {script['most']:.1f}"
            rows += [
                ["first paint", f"{browser['first_paint_ms']:,.0f} ms", "", "", ""],
                ["script of an event or frame", took, "", "", ""],
                ["most while it loads", f"{browser['load_most_ms']:.1f} ms", "", "", ""],
            ]
    workers = result["cells"][0]["workers"]
    columns = ("", "exchanges/s", "beside no page", "spread", "processor, idle")
    return report.table(f"The live page of a server with {workers:,} workers", columns, rows)


_NAMES = {
    "without": "a server without the page",
    "unseen": "with it, no viewer",
    "seen": "with it and a viewer",
}


def figure(result: Mapping[str, Any]) -> Figure:
    """Draw the exchanges a second."""
    cells = result["cells"]
    lines = [
        plots.rows(_NAMES[way], {n: c["exchanges_per_second"][way] for n, c in enumerate(cells)})
        for way in _WAYS
    ]
    ticks = [cell["cell"] for cell in cells]
    panel = Panel("exchanges beside the live page", "per second", "", lines, bottom=0, ticks=ticks)
    return Figure("The live page", [panel], 1)


def main(argv: Sequence[str] | None = None) -> None:
    """Run from the command line; exits with 2 when an option is wrong."""
    report.command(Options(), run, table, argv, drawn=figure)


if __name__ == "__main__":
    main()
