"""Labels and readers: bounded names, all apart; numbers where a report has them."""

from __future__ import annotations

from aiops.metrics import training, workers
from aiops.metrics.metric import (
    LONGEST,
    MOST,
    HistogramSample,
    Metric,
    MetricSample,
    apart,
    column,
    label,
    length,
    since_start,
    value,
)
from tests.rows import each_row


def test_a_number_at_a_path() -> None:
    report = {"a": {"b": 3, "on": True, "none": None}, "list": [1, 2]}
    assert list(value("a", "b")(report)) == [MetricSample((), 3.0)]
    assert list(value("a", "on")(report)) == [MetricSample((), 1.0)]
    assert list(length("list")(report)) == [MetricSample((), 2)]


@each_row("path", [("x",), ("a", "none"), ("a", "b", "c"), ("a", "x")])
def test_a_report_that_lacks_it(path: tuple[str, ...]) -> None:
    report = {"a": {"b": 3, "none": None}}
    assert list(value(*path)(report)) == []
    assert list(length("a", "none")(report)) == []


def test_rows_of_a_list() -> None:
    rows = [{"name": "t", "n": 1}, {"name": "u"}, {"name": "t", "n": 3}]
    assert list(column(("rows",), "name", "n")({"rows": rows})) == [(("t",), 1), (("t (2)",), 3)]
    assert list(column(("rows",), "name", "n")({})) == []
    many = [{"name": str(number), "n": 0} for number in range(MOST + 5)]
    assert len(list(column(("rows",), "name", "n")({"rows": many}))) == MOST


def test_labels_are_short_and_apart() -> None:
    names = ["w" * 1000, "w" * 2000, "a", "a", "a (2)", "other", ""]
    found = apart(names, taken=["other"])
    assert len(set(found)) == len(names)
    assert "other" not in found
    assert max(map(len, found)) <= LONGEST + len(" (2)")
    assert label("short") == "short"


def test_equal_names_are_told_apart_in_time_that_does_not_grow_with_their_square() -> None:
    found = apart(["same"] * 20_000)
    assert len(set(found)) == 20_000
    assert found[-1] == "same (20000)"


def test_what_was_restored_at_the_start_does_not_count() -> None:
    """Else a counter would begin at a value, after a crash at a lower one than it had."""
    rows = column(("rows",), "name", "n")
    counter = Metric("counter", "a_total", "A.", rows, ("row",))
    report = {"rows": [{"name": "old", "n": 12}, {"name": "new", "n": 3}, {"name": "less", "n": 1}]}
    before = {
        "rows": [{"name": "old", "n": 10}, {"name": "gone", "n": 5}, {"name": "less", "n": 4}]
    }
    assert [*since_start(counter, report)] == [(("old",), 12), (("new",), 3), (("less",), 1)]
    report["before"] = before  # type: ignore[assignment]
    assert [*since_start(counter, report)] == [(("old",), 2), (("new",), 3), (("less",), 0)]
    assert [*since_start(counter._replace(kind="gauge"), report)] == [*rows(report)]


def test_a_histogram_since_the_start() -> None:
    [staleness] = [each for each in training.METRICS if each.kind == "histogram"]
    report = {"staleness": {"0": 4, "3": 2}, "mean_staleness": 1.0}
    report["before"] = {"staleness": {"0": 3, "3": 1}, "mean_staleness": 0.75}
    [found] = since_start(staleness, report)
    assert isinstance(found, HistogramSample)
    assert (found.counts[:3], found.counts[-1], found.total) == ((1, 1, 1), 2, 3)


def test_counts_of_workers_since_the_start() -> None:
    [pushes] = [each for each in workers.METRICS if each.name == "aiops_worker_pushes_total"]
    lines = [
        {"worker": 3, "label": "w", "pushes": 9},
        {"worker": 4, "label": "w (#4)", "pushes": 2},
    ]
    report = {"workers": lines, "others": {"workers": 1}, "before": {"members": {3: {"pushes": 5}}}}
    assert [*since_start(pushes, report)] == [(("w",), 4), (("w (#4)",), 2)]
