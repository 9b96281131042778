"""Record a run as Prometheus would see it: scrapes of a real server while four workers train.

::

    python -m docs._tools.metrics.recording docs/results/monitoring.json

Four workers of unequal speed train a small MLP on real digits under ``fasgd``, with a gate and a
codec. After 60 % of the time the fastest leaves; after 80 % pushes are paused.
"""

from __future__ import annotations

import argparse
import itertools
import json
import re
import socket
import threading
import time
import urllib.request
from pathlib import Path
from typing import Any

import aiops
from aiops.cli.admin import pause
from aiops.errors import DeadlineExceeded
from aiops.lab.run_record import machine, write_text
from aiops.lab.workloads import MLP, batches, load
from benchmarks.serving import serving

KEPT = re.compile(
    r"^((?:aiops_(?:updates_total|ready|staleness_updates_\w+|vbar|transfers_total|traffic_bytes_total"
    r"|payload_bytes_total|payload_uncoded_bytes_total|worker_pushes_total|workers"
    r"|memory_bound_bytes)|process_resident_memory_bytes)(?:\{.*\})?) (\S+)$",
    re.MULTILINE,
)
"""The series that the picture needs."""

_PATIENCE = 60.0
"""Seconds that workers may take to end."""

_PAUSES = (0.002, 0.005, 0.01, 0.03)  # seconds between a worker's steps
_FLAGS = ("--gate=bfasgd:c_push=0.02,c_fetch=0.02", "--push-codec=int8", "--no-shm")


def record(seconds: float, interval: float) -> dict[str, Any]:
    """Return the times of all scrapes, and by series its value at each (None: it had none)."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    scrapes: list[tuple[float, dict[str, float]]] = []
    leaving, over = threading.Event(), threading.Event()
    with serving("fasgd", f"--metrics-port={port}", *_FLAGS) as (url, _pid):
        ends = [leaving, over, over, over]
        given = enumerate(zip(_PAUSES, ends, strict=True))
        workers = [
            threading.Thread(target=_train, args=(url, number, rest, end), daemon=True)
            for number, (rest, end) in given
        ]
        for worker in workers:
            worker.start()
        begin, paused = time.perf_counter(), False
        try:
            for number in itertools.count():
                time.sleep(max(0.0, begin + number * interval - time.perf_counter()))
                now = time.perf_counter() - begin
                if now >= seconds:
                    break
                if now >= 0.6 * seconds:
                    leaving.set()
                if now >= 0.8 * seconds and not paused:
                    paused = True
                    over.set()
                    _await(workers)  # one amid a step would wait for the end of the pause
                    pause(url)
                scrapes.append((now, _scrape(port)))
        finally:
            leaving.set()
            over.set()
            _await(workers)
    names = list(dict.fromkeys(name for _now, found in scrapes for name in found))
    return {
        "machine": machine(),
        "flags": _FLAGS,
        "times": [round(now, 3) for now, _found in scrapes],
        "series": {name: [found.get(name) for _now, found in scrapes] for name in names},
    }


def _await(workers: list[threading.Thread]) -> None:
    """Wait until the workers have ended."""
    until = time.monotonic() + _PATIENCE
    for worker in workers:
        worker.join(max(0.0, until - time.monotonic()))
    left = sum(worker.is_alive() for worker in workers)
    if left:
        raise DeadlineExceeded(f"{left} workers have not ended within {_PATIENCE:g} s")


def _train(url: str, number: int, rest: float, end: threading.Event) -> None:
    data, model = load("digits"), MLP((64, 32, 10))
    name = f"worker-{number}"
    with aiops.Worker(url, model.init(seed=0), name=name) as worker:
        for x, y in batches(data, 16, number):
            if end.wait(rest):
                return
            _loss, gradients = model.gradients(worker.params, x, y)
            worker.step(gradients)


def _scrape(port: int) -> dict[str, float]:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics") as answer:
        text = answer.read().decode()
    return {name: float(value) for name, value in KEPT.findall(text)}


def main() -> None:
    """Record a run, and write it to the file named on the command line."""
    parser = argparse.ArgumentParser(prog="python -m docs._tools.metrics.recording")
    parser.add_argument("file", type=Path)
    parser.add_argument("--seconds", type=float, default=40.0)
    parser.add_argument("--interval", type=float, default=0.5)
    chosen = parser.parse_args()
    found = record(chosen.seconds, chosen.interval)
    write_text(chosen.file, json.dumps(found) + "\n")


if __name__ == "__main__":
    main()
