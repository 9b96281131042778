"""Processes of the trackers benchmark: a server with a callback, and a collector of traces.

    python -m benchmarks.observers callback SECONDS
    python -m benchmarks.observers collector

Each prints its URL, and goes on until it is ended.
"""

from __future__ import annotations

import asyncio
import http.server
import sys

import aiops
from aiops.trackers import RunMetrics


async def callback(every: float) -> None:
    """Serve, and have a callback take the numbers, so often."""
    taken: list[RunMetrics] = []
    async with aiops.serve(port=0, on_metrics=taken.append, track_every=every) as server:
        print(server.url, flush=True)
        await asyncio.Event().wait()


class _Taken(http.server.BaseHTTPRequestHandler):
    """Takes what is sent, and keeps nothing of it."""

    protocol_version = "HTTP/1.1"

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        self.send_response(200)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, *_given: object) -> None:
        pass


def collect() -> None:
    """Take traces, as a collector does."""
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), _Taken) as server:
        print(f"http://127.0.0.1:{server.server_port}", flush=True)
        server.serve_forever()


if __name__ == "__main__":
    if sys.argv[1] == "callback":
        asyncio.run(callback(float(sys.argv[2])))
    else:
        collect()
