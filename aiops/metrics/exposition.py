"""Write the text that Prometheus scrapes, by prometheus_client: its format, its escapes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, ProcessCollector
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.core import Metric as Family
from prometheus_client.exposition import generate_latest
from prometheus_client.registry import Collector

from aiops.metrics.catalog import INFO, INFO_HELP, METRICS
from aiops.metrics.metric import (
    STALENESS_BUCKETS,
    HistogramSample,
    Metric,
    Report,
    since_start,
)

CONTENT_TYPE = CONTENT_TYPE_LATEST


class ReportCollector(Collector):
    """Gives prometheus_client the metrics of a report.

    Parameters
    ----------
    report
        The server's, with the additions of `aiops.serving.monitoring`.
    info
        The labels of the metric that tells the settings, and their values.
    """

    def __init__(self, report: Report, info: Mapping[str, str]) -> None:
        self._report, self._info = report, info

    def collect(self) -> Iterator[Family]:
        """Yield the families that have samples."""
        info = GaugeMetricFamily(INFO, INFO_HELP, labels=[*self._info])
        info.add_metric([*self._info.values()], 1)
        yield info
        for metric in METRICS:
            family = _family(metric, self._report)
            if family.samples:
                yield family


def _family(metric: Metric, report: Report) -> Any:
    family: Any = _KINDS[metric.kind](metric.name, metric.help, labels=metric.labels)
    for sample in since_start(metric, report):
        if isinstance(sample, HistogramSample):
            bounds = (*(str(float(bound)) for bound in STALENESS_BUCKETS), "+Inf")
            buckets = [*zip(bounds, sample.counts, strict=True)]
            family.add_metric([], buckets=buckets, sum_value=sample.total)
        else:
            family.add_metric(sample.labels, sample.value)
    return family


_KINDS = {
    "counter": CounterMetricFamily,
    "gauge": GaugeMetricFamily,
    "histogram": HistogramMetricFamily,
}


def text(report: Report, info: Mapping[str, str]) -> bytes:
    """Return all metrics of a report, and those of this process, as Prometheus reads them."""
    registry = CollectorRegistry()
    registry.register(ReportCollector(report, info))
    ProcessCollector(registry=registry)
    return generate_latest(registry)
