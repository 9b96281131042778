"""One metric: its name, its kind, its help, its labels, and the values that it has of a report.

A `Reader` finds a metric's samples in a server's report (`aiops.engine.statistics`). It yields
nothing where the report lacks them: a follower, a standby and a server without a model have less to
report than others. Names that peers choose become labels here, and nowhere else: they are bounded
in length (`label`) and in number (`MOST`), and two of one name are told apart (`apart`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

Report: TypeAlias = Mapping[str, Any]

MOST = 100
"""Tensors, tables, tokens and the like that have series of their own; the rest has none, or one."""

OTHER = "other"
"""The label of all that have no series of their own."""

LONGEST = 64
"""Characters of a name that a label keeps."""

STALENESS_BUCKETS = (0, 1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1023, 4095, 16383)
"""Upper bounds. A report's bins from 1,024 on are powers of two, so that the bounds end bins."""


class MetricSample(NamedTuple):
    """A value with the values of its labels, in the order of `Metric.labels`."""

    labels: tuple[str, ...]
    value: float


class HistogramSample(NamedTuple):
    """Counts at or below each bound (the last is infinite), and the sum of all that was counted."""

    counts: tuple[int, ...]
    total: float


Reader: TypeAlias = Callable[[Report], Iterable[MetricSample | HistogramSample]]


class Metric(NamedTuple):
    """A metric family.

    Attributes
    ----------
    kind
        ``counter``, ``gauge`` or ``histogram``.
    name
        As it is exposed; that of a counter ends with ``_total``.
    help
        One sentence.
    labels
        The names of its labels; default: none.
    read
        Yields its samples of a report.
    """

    kind: str
    name: str
    help: str
    read: Reader
    labels: tuple[str, ...] = ()


def since_start(metric: Metric, report: Report) -> Iterator[MetricSample | HistogramSample]:
    """Yield a metric's samples; those that count do so from the start of the server on.

    After a crash or a rollback a server has fewer counts than it had. Prometheus takes a counter
    that falls for one that has begun at 0, and would add all that was restored to its rates. So
    ``before``, the report of the start, is taken off.
    """
    found = [*metric.read(report)]
    if metric.kind == "gauge" or "before" not in report:
        yield from found
        return
    before = dict(map(_keyed, metric.read(report["before"])))
    for sample in found:
        labels, _sample = _keyed(sample)
        first = before.get(labels)
        yield sample if first is None else _less(sample, first)


def _keyed(
    sample: MetricSample | HistogramSample,
) -> tuple[tuple[str, ...], MetricSample | HistogramSample]:
    return (() if isinstance(sample, HistogramSample) else sample.labels), sample


def _less(
    sample: MetricSample | HistogramSample, first: MetricSample | HistogramSample
) -> MetricSample | HistogramSample:
    if isinstance(sample, HistogramSample):
        assert isinstance(first, HistogramSample), "one metric has samples of one kind"
        counts = tuple(max(0, a - b) for a, b in zip(sample.counts, first.counts, strict=True))
        return HistogramSample(counts, max(0, sample.total - first.total))
    assert isinstance(first, MetricSample), "one metric has samples of one kind"
    # A follower that was restarted counts from 0, where its lead did not.
    return sample._replace(value=max(0, sample.value - first.value))


def value(*path: str) -> Reader:
    """Return the reader of one number, at a path of keys in the report; true is 1."""

    def read(report: Report) -> Iterator[MetricSample]:
        found = at(report, *path)
        if found is not None:
            yield MetricSample((), float(found))

    return read


def length(*path: str) -> Reader:
    """Return the reader of the length of a list, at a path of keys in the report."""

    def read(report: Report) -> Iterator[MetricSample]:
        found = at(report, *path)
        if found is not None:
            yield MetricSample((), len(found))

    return read


def at(report: Report, *path: str) -> Any:
    """Return what is at a path of keys; None: nothing is."""
    found: Any = report
    for key in path:
        found = found.get(key) if isinstance(found, Mapping) else None
    return found


def column(path: Sequence[str], name: str, key: str) -> Reader:
    """Return the reader of a number of each row of a list, with the row's name as the label.

    Parameters
    ----------
    path
        The keys that lead to the list.
    name, key
        A row's keys of its name and of the number.
    """

    def read(report: Report) -> Iterator[MetricSample]:
        rows = (at(report, *path) or ())[:MOST]
        names = apart([str(row[name]) for row in rows])
        for shown, row in zip(names, rows, strict=True):
            if row.get(key) is not None:
                yield MetricSample((shown,), float(row[key]))

    return read


def label(name: str) -> str:
    """Return a name cut to the length of a label.

    >>> label("w" * 100) == "w" * 63 + "…"
    True
    """
    return name if len(name) <= LONGEST else name[: LONGEST - 1] + "…"


def apart(names: Sequence[str], taken: Iterable[str] = ()) -> list[str]:
    """Return labels for names, each another: of equal ones, the later get their number.

    >>> apart(["a", "b", "a", "other"], taken=["other"])
    ['a', 'b', 'a (2)', 'other (2)']
    """
    used, times = set(taken), dict[str, int]()
    found = []
    for name in map(label, names):
        shown = name
        while shown in used:
            times[name] = times.get(name, 1) + 1
            shown = f"{name} ({times[name]})"
        used.add(shown)
        found.append(shown)
    return found
