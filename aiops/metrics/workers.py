"""Metrics of workers, one by one: of the first N that are connected; gauges of the others, too."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from aiops.metrics.metric import OTHER, Metric, MetricSample, Reader, Report, apart, at


def _workers(report: Report) -> Iterator[MetricSample]:
    for state, count in report.get("worker_counts", {}).items():
        yield MetricSample((state,), count)


def _each(key: str) -> Reader:
    """Return the reader of a number of each worker, and of all others together."""

    def read(report: Report) -> Iterator[MetricSample]:
        for name, line in _lines(report):
            yield MetricSample((name,), line[key])
        others = report.get("others")
        if others and others["workers"]:
            yield MetricSample((OTHER,), others[key])

    return read


def _count(key: str) -> Reader:
    """Return the reader of a count of each worker, from the start of the server on.

    There is none of the others together: their sum would fall when one of them leaves.
    """

    def read(report: Report) -> Iterator[MetricSample]:
        for name, line in _lines(report):
            yield MetricSample((name,), _since_start(report, line, key))

    return read


def _bytes(report: Report) -> Iterator[MetricSample]:
    for name, line in _lines(report):
        yield MetricSample((name, "push"), _since_start(report, line, "bytes_pushed"))
        yield MetricSample((name, "fetch"), _since_start(report, line, "bytes_fetched"))


def _since_start(report: Report, line: Mapping[str, Any], key: str) -> float:
    before = at(report, "before", "members", line["worker"], key) or 0
    return float(max(0, line[key] - before))


def _lines(report: Report) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yield the label and the line of each worker with series of its own."""
    if "others" in report:  # it is a report about the present workers
        lines = report["workers"]
        yield from zip(apart([line["label"] for line in lines], taken=[OTHER]), lines, strict=True)


METRICS = (
    Metric(
        "gauge",
        "aiops_workers",
        "Connected clients: workers (active), workers that a barrier has waited for too long"
        " (silent), observers.",
        _workers,
        ("state",),
    ),
    Metric(
        "counter",
        "aiops_worker_pushes_total",
        "Gradients of a worker that were used.",
        _count("pushes"),
        ("worker",),
    ),
    Metric(
        "counter",
        "aiops_worker_refused_total",
        "Pushes of a worker that were refused.",
        _count("refused"),
        ("worker",),
    ),
    Metric(
        "counter",
        "aiops_worker_ignored_total",
        "Gradients of a worker that were not used.",
        _count("ignored"),
        ("worker",),
    ),
    Metric(
        "gauge",
        "aiops_worker_staleness_updates",
        "Staleness of a worker's last gradient; other: the largest.",
        _each("staleness"),
        ("worker",),
    ),
    Metric(
        "counter",
        "aiops_worker_bytes_total",
        "Bytes that crossed a worker's connections.",
        _bytes,
        ("worker", "direction"),
    ),
    Metric(
        "gauge",
        "aiops_worker_silence_seconds",
        "Time since a push of a worker was last answered, or it joined; other: the longest.",
        _each("seconds_since_answer"),
        ("worker",),
    ),
)
"""The metrics of workers."""
