"""Metrics of the training: updates, gradients, staleness, the statistic, barriers, tables."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence

from aiops.errors import BadPush, StaleGradient, Unavailable
from aiops.metrics.metric import (
    MOST,
    OTHER,
    STALENESS_BUCKETS,
    HistogramSample,
    Metric,
    MetricSample,
    Reader,
    Report,
    apart,
    at,
    column,
    length,
    value,
)

_CODES = (BadPush.code, StaleGradient.code, Unavailable.code)


def _updates(report: Report) -> Iterator[MetricSample]:
    if "gradients" in report:  # a follower has a version, and is told of it
        yield MetricSample((), report["version"])


def _refused(report: Report) -> Iterator[MetricSample]:
    """Yield the pushes refused by code, the usual ones also at 0: rates need a value before."""
    if "refused" not in report:
        return
    # The codes are those of aiops.errors: a peer cannot choose them.
    for code, count in sorted({**dict.fromkeys(_CODES, 0), **report["refused"]}.items()):
        yield MetricSample((code,), count)


def _staleness(report: Report) -> Iterator[HistogramSample]:
    if "staleness" not in report:
        return
    bins = {int(tau): count for tau, count in report["staleness"].items()}
    below = [sum(n for tau, n in bins.items() if tau <= bound) for bound in STALENESS_BUCKETS]
    used = sum(bins.values())
    yield HistogramSample((*below, used), round(report["mean_staleness"] * used))


def _by_tensor(key: str, together: Callable[[Sequence[float], Sequence[int]], float]) -> Reader:
    """Return the reader of values by tensor: of the largest, in the model's order, and the rest.

    ``together``: returns the value of the rest, given their values and their parameters.
    """

    def read(report: Report) -> Iterator[MetricSample]:
        found = report.get("by_tensor")
        if not found or not found.get(key):
            return
        names, sizes, values = found["names"], found["sizes"], found[key]
        largest = sorted(range(len(names)), key=lambda index: -sizes[index])[:MOST]
        shown = sorted(largest)
        labels = apart([names[index] for index in shown], taken=[OTHER])
        for name, index in zip(labels, shown, strict=True):
            if not math.isnan(values[index]):  # an empty tensor has no mean
                yield MetricSample((name,), values[index])
        rest = [i for i in set(range(len(names))).difference(shown) if not math.isnan(values[i])]
        weights = [sizes[index] for index in rest]
        if any(weights):
            yield MetricSample((OTHER,), together([values[index] for index in rest], weights))

    return read


def _mean(values: Sequence[float], sizes: Sequence[int]) -> float:
    return sum(value * size for value, size in zip(values, sizes, strict=True)) / sum(sizes)


def _norm(values: Sequence[float], _sizes: Sequence[int]) -> float:
    return math.hypot(*values)


def _largest(report: Report) -> Iterator[MetricSample]:
    found = at(report, "by_tensor", "largest")
    if found is not None and not math.isnan(found):
        yield MetricSample((), found)


_TABLES = ("tables",)
_DATA = ("data_sets",)


def _logged(report: Report) -> Iterator[MetricSample]:
    values = report.get("logged") or {}
    for shown, (mean, _least, _most) in zip(apart([*values]), values.values(), strict=True):
        yield MetricSample((shown,), mean)


METRICS = (
    Metric(
        "counter",
        "aiops_updates_total",
        "Updates of the model.",
        _updates,
    ),
    Metric(
        "gauge",
        "aiops_model_version",
        "Version of the model; a rollback sets it back.",
        value("version"),
    ),
    Metric(
        "counter", "aiops_gradients_used_total", "Gradients that were used.", value("gradients")
    ),
    Metric(
        "counter",
        "aiops_gradients_ignored_total",
        "Gradients that the algorithm or a filter has not used.",
        value("ignored"),
    ),
    Metric(
        "counter",
        "aiops_pushes_refused_total",
        "Pushes that were refused, by the code of the error.",
        _refused,
        ("reason",),
    ),
    Metric(
        "counter",
        "aiops_pushes_filtered_total",
        "Pushes that --filter has refused.",
        value("filter", "refused"),
    ),
    Metric(
        "gauge",
        "aiops_quarantined_workers",
        "Workers whose pushes --filter does not use for the time being.",
        length("filter", "quarantined"),
    ),
    Metric(
        "histogram",
        "aiops_staleness_updates",
        "Staleness of the gradients that were used, in updates.",
        _staleness,
    ),
    Metric(
        "gauge",
        "aiops_vbar",
        "Mean of the rule's statistic (of FASGD v) over all parameters.",
        value("vbar"),
    ),
    Metric(
        "gauge",
        "aiops_tensor_vbar",
        "Mean of the rule's statistic over a tensor, of the 100 largest; other: over the rest.",
        _by_tensor("vbar", _mean),
        ("tensor",),
    ),
    Metric(
        "gauge",
        "aiops_tensor_gradient_norm",
        "With --filter: median over the workers of the norm of a tensor's gradient (of a large"
        " tensor of a sample); other: of the rest together.",
        _by_tensor("norm", _norm),
        ("tensor",),
    ),
    Metric(
        "gauge",
        "aiops_tensor_norm",
        "Norm of a tensor's parameters, at an earlier scrape; other: of the rest together. Not on a"
        " GPU, and not of a model on several servers.",
        _by_tensor("params", _norm),
        ("tensor",),
    ),
    Metric(
        "gauge",
        "aiops_gradient_largest",
        "With --filter: median over the workers of the largest magnitude in a gradient.",
        _largest,
    ),
    Metric(
        "gauge",
        "aiops_learning_rate_gain",
        "Factor that the rule has raised the learning rate by.",
        value("rate_gain"),
    ),
    Metric(
        "gauge",
        "aiops_schedule_position",
        "Position in a schedule that does not count updates, in its own unit.",
        value("schedule"),
    ),
    Metric("gauge", "aiops_model_parameters", "Parameters of the model.", value("parameters")),
    Metric("gauge", "aiops_model_tensors", "Tensors of the model.", value("tensors")),
    Metric(
        "gauge",
        "aiops_logged_mean",
        "Mean of what clients have logged last under a name, those that left lately too.",
        _logged,
        ("name",),
    ),
    Metric(
        "gauge",
        "aiops_held_pushes",
        "Pushes that wait for other workers' before an update is made of them.",
        value("waiting"),
    ),
    Metric(
        "gauge",
        "aiops_awaited_workers",
        "Workers that a barrier would wait for, announced ones that have not come included.",
        length("waited_for"),
    ),
    Metric(
        "gauge",
        "aiops_warnings",
        "Warnings about the run that `aiops stats` shows.",
        length("warnings"),
    ),
    Metric(
        "gauge",
        "aiops_table_stored_rows",
        "Rows of a sparse table that are stored.",
        column(_TABLES, "name", "made"),
        ("table",),
    ),
    Metric(
        "gauge",
        "aiops_table_bytes",
        "Memory of a sparse table.",
        column(_TABLES, "name", "bytes"),
        ("table",),
    ),
    Metric(
        "counter",
        "aiops_table_evicted_rows_total",
        "Rows that a sparse table has evicted.",
        column(_TABLES, "name", "evicted"),
        ("table",),
    ),
    Metric(
        "gauge",
        "aiops_data_set_epoch",
        "Epoch that a data set is in.",
        column(_DATA, "name", "epoch"),
        ("data_set",),
    ),
    Metric(
        "gauge",
        "aiops_data_set_seen_examples",
        "Examples of a data set that were used in its epoch.",
        column(_DATA, "name", "seen"),
        ("data_set",),
    ),
    Metric(
        "counter",
        "aiops_averaging_rounds_total",
        "Rounds in which workers have averaged their models.",
        value("averages", "rounds"),
    ),
)
"""The metrics of the training."""
