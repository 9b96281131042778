"""The metrics of reports, as values."""

from __future__ import annotations

from typing import Any

import pytest

from aiops.engine.staleness import StalenessHistogram
from aiops.metrics.catalog import METRICS
from aiops.metrics.metric import MOST, STALENESS_BUCKETS, HistogramSample
from tests.rows import each_row

BY_NAME = {metric.name: metric for metric in METRICS}


def samples(name: str, report: dict[str, Any]) -> dict[tuple[str, ...], float]:
    found = [*BY_NAME[name].read(report)]
    assert not any(isinstance(sample, HistogramSample) for sample in found)
    return {sample.labels: sample.value for sample in found}  # type: ignore[union-attr]


def test_names_are_by_the_conventions() -> None:
    assert len(BY_NAME) == len(METRICS)
    for metric in METRICS:
        assert metric.name.startswith("aiops_")
        assert metric.name.endswith("_total") == (metric.kind == "counter"), metric.name
        assert not metric.name.endswith(("_count", "_sum", "_bucket", "_created")), metric.name
        assert not {"milliseconds", "kilobytes", "percent", "ms"} & {*metric.name.split("_")}
        assert metric.help.endswith("."), metric.name


@each_row("metric", METRICS, ids=lambda metric: metric.name)
def test_an_empty_report_has_none(metric: Any) -> None:
    assert list(metric.read({})) == []
    assert list(metric.read({"state": None, "filter": None, "budget": None})) == []


def test_the_histogram_counts_all_at_or_below_a_bound() -> None:
    histogram = StalenessHistogram()
    values = [0, 0, 1, 3, 4, 5, 512, 513, 1023, 1024, 2047, 4095, 4096, 16383, 16384, 1 << 40]
    for staleness in values:
        histogram.note(staleness)
    used = sum(histogram.bins.values())
    report = {
        "staleness": {str(tau): count for tau, count in histogram.bins.items()},
        "mean_staleness": histogram.total / used,
    }
    [found] = BY_NAME["aiops_staleness_updates"].read(report)
    assert isinstance(found, HistogramSample)
    assert found.total == sum(values)
    expected = [sum(each <= bound for each in values) for bound in STALENESS_BUCKETS]
    assert [*found.counts] == [*expected, len(values)]


def test_numbers_that_workers_log_are_labels_and_cut() -> None:
    report = {"logged": {"loss": [0.5, 0.1, 0.9], "n" * 100: [1.0, 1.0, 1.0]}}
    found = samples("aiops_logged_mean", report)
    assert found == {("loss",): 0.5, ("n" * 63 + "…",): 1.0}


def test_no_gradient_yet() -> None:
    [found] = BY_NAME["aiops_staleness_updates"].read({"staleness": {}, "mean_staleness": 0.0})
    assert found == HistogramSample((0,) * (len(STALENESS_BUCKETS) + 1), 0)


def tensors(**values: Any) -> dict[str, Any]:
    return {"by_tensor": {"vbar": None, "norm": None, "largest": None, **values}}


def test_the_largest_tensors_have_series_and_the_rest_one() -> None:
    count = MOST + 3
    sizes = [10, 20, *[1000] * (count - 3), 0]
    names = [f"layer{index}" for index in range(count)]
    values = [1.0, 4.0, *[float(index) for index in range(2, count - 1)], float("nan")]
    report = tensors(names=names, sizes=sizes, vbar=values, norm=[3.0, 4.0, *values[2:]])
    found = samples("aiops_tensor_vbar", report)
    assert len(found) == MOST + 1
    assert ("layer0",) not in found
    assert found[("layer2",)] == 2.0
    assert found[("other",)] == pytest.approx((10 * 1.0 + 20 * 4.0) / 30)
    assert samples("aiops_tensor_gradient_norm", report)[("other",)] == pytest.approx(5.0)


def test_a_tensor_without_a_value() -> None:
    nan = float("nan")
    report = tensors(names=["w", "empty"], sizes=[2, 0], vbar=[0.5, nan], largest=nan)
    assert samples("aiops_tensor_vbar", report) == {("w",): 0.5}
    assert samples("aiops_tensor_gradient_norm", report) == {}
    assert samples("aiops_gradient_largest", report) == {}
    assert samples("aiops_gradient_largest", tensors(largest=2.0)) == {(): 2.0}


def line(name: str, **counts: float) -> dict[str, Any]:
    zeros = dict.fromkeys(("pushes", "refused", "ignored", "bytes_pushed", "bytes_fetched"), 0)
    return {
        "worker": 1,
        "label": name,
        **zeros,
        "staleness": 0,
        "seconds_since_answer": 0.0,
        **counts,
    }


def test_workers_and_the_others() -> None:
    lines = [line("a", pushes=1), line("other", pushes=2), line("a", pushes=3)]
    report = {"workers": lines, "others": {"workers": 2, "staleness": 40}}
    found = samples("aiops_worker_pushes_total", report)
    assert found == {("a",): 1, ("other (2)",): 2, ("a (2)",): 3}, "a sum of others would fall"
    assert samples("aiops_worker_staleness_updates", report)[("other",)] == 40
    report["others"]["workers"] = 0  # type: ignore[index]
    assert ("other",) not in samples("aiops_worker_staleness_updates", report)


def test_the_state_of_a_standby() -> None:
    state = {"standby_of": "aiops://a", "no_feed": "cut", "behind_rows": 7, "ended": "", "row": 3}
    assert samples("aiops_standby_fed", {"state": state}) == {(): 0.0}
    assert samples("aiops_standby_unapplied_rows", {"state": state}) == {(): 7.0}
    assert samples("aiops_acks_reduced", {"state": state}) == {}


def test_a_state_that_has_failed() -> None:
    state = {"ended": "no space", "acks": "applied", "wanted": "durable", "row": 9, "snapshot": 4}
    report = {"state": {**state, "snapshot_error": "no space"}}
    for name in ("aiops_journal_ended", "aiops_acks_reduced", "aiops_snapshot_failed"):
        assert samples(name, report) == {(): 1.0}
    assert samples("aiops_journal_rows_since_snapshot", report) == {(): 5.0}


def test_shards() -> None:
    lines = [{"shard": 0, "gone": "", "behind": 0, "bytes": 8}]
    lines += [{"shard": 1, "gone": "cut", "behind": 2, "bytes": 4}]
    assert samples("aiops_shard_up", {"shards": lines}) == {("0",): 1.0, ("1",): 0.0}
    assert samples("aiops_shard_lag_versions", {"shards": lines}) == {("0",): 0, ("1",): 2}
