"""Labels and readers: bounded names, all apart; numbers where a report has them."""

from __future__ import annotations

import pytest

from aiops.metrics.metric import LONGEST, MOST, MetricSample, apart, column, label, length, value


def test_a_number_at_a_path() -> None:
    report = {"a": {"b": 3, "on": True, "none": None}, "list": [1, 2]}
    assert list(value("a", "b")(report)) == [MetricSample((), 3.0)]
    assert list(value("a", "on")(report)) == [MetricSample((), 1.0)]
    assert list(length("list")(report)) == [MetricSample((), 2)]


@pytest.mark.parametrize("path", [("x",), ("a", "none"), ("a", "b", "c"), ("a", "x")])
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
