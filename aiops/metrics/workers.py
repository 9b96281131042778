"""Metrics of workers, one by one: of the first N that are connected, and of the others together."""

from __future__ import annotations

from collections.abc import Iterator

from aiops.metrics.metric import OTHER, Metric, MetricSample, Reader, Report, apart


def _workers(report: Report) -> Iterator[MetricSample]:
    for state, count in report.get("worker_counts", {}).items():
        yield MetricSample((state,), count)


def _each(key: str) -> Reader:
    """Return the reader of a number of each worker."""

    def read(report: Report) -> Iterator[MetricSample]:
        for name, line in _lines(report):
            yield MetricSample((name,), line[key])

    return read


def _bytes(report: Report) -> Iterator[MetricSample]:
    for name, line in _lines(report):
        yield MetricSample((name, "push"), line["bytes_pushed"])
        yield MetricSample((name, "fetch"), line["bytes_fetched"])


def _lines(report: Report) -> Iterator[tuple[str, dict[str, float]]]:
    """Yield the label and the line of each worker, and those of all others together."""
    others = report.get("others")
    if others is None:  # it is no report about the present workers
        return
    lines = report["workers"]
    names = apart([line["name"] for line in lines], taken=[OTHER])
    yield from zip(names, lines, strict=True)
    if others["workers"]:
        yield OTHER, others


METRICS = (
    Metric(
        "gauge",
        "aiops_workers",
        "Workers: connected, and of these silent for longer than a barrier waits; observers.",
        _workers,
        ("state",),
    ),
    Metric(
        "counter",
        "aiops_worker_pushes_total",
        "Gradients of a worker that were used.",
        _each("pushes"),
        ("worker",),
    ),
    Metric(
        "counter",
        "aiops_worker_refused_total",
        "Pushes of a worker that were refused.",
        _each("refused"),
        ("worker",),
    ),
    Metric(
        "counter",
        "aiops_worker_ignored_total",
        "Gradients of a worker that were not used.",
        _each("ignored"),
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
