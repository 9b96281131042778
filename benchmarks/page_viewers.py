"""Viewers of a live page: a thread that reads its events, and a browser."""

from __future__ import annotations

import asyncio
import importlib.util
import shutil
import socket
import statistics
import threading
import time
from typing import Any, Self

from aiops.errors import UsageError

_GLANCE = 0.05  # seconds between a viewer's looks at whether it is to end
_FRAME = 1000 / 60  # milliseconds

SETTLE = 1.0
"""Seconds from a viewer's first event on before anything is measured beside it."""


class Viewer:
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

    async def __aenter__(self) -> Self:
        self._over, self._begun = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()
        await asyncio.to_thread(self._begun.wait)
        await asyncio.sleep(SETTLE)
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


def chromium() -> str | None:
    """Return the path of Chromium, if it and Playwright are installed."""
    if importlib.util.find_spec("playwright") is None:
        return None
    return shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("chrome")


def watched(executable: str, port: int, workers: int, seconds: float) -> dict[str, Any]:
    """Open the page in a browser, and watch it; return what it took.

    Parameters
    ----------
    executable
        The browser's.
    port
        The page's, on this machine.
    workers
        The server's, which the page is to show before it is watched.
    seconds
        To watch.

    Raises
    ------
    UsageError
        When no event came meanwhile.
    """
    from playwright.sync_api import sync_playwright

    with sync_playwright() as started:
        browser = started.chromium.launch(executable_path=executable, args=["--no-sandbox"])
        page = browser.new_page(viewport={"width": 1280, "height": 900})
        page.goto(f"http://127.0.0.1:{port}/")
        while page.evaluate("aiopsPage.rows().size") < workers:
            page.wait_for_timeout(100)
        paints = page.evaluate(
            "performance.getEntriesByType('paint').map((entry) => [entry.name, entry.startTime])"
        )
        page.wait_for_timeout(2000)  # the charts are drawn
        load = page.evaluate("aiopsPage.times.splice(0)")
        page.wait_for_timeout(1000 * seconds)
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
