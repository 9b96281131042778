"""Metrics of bytes and messages: by direction, encoding and reason; the gates and the budget."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from aiops.metrics.metric import Metric, MetricSample, Report, at, value

_DIRECTIONS = (("push", "pushed"), ("fetch", "fetched"))
_PARTS = ("payload", "model", "rows", "overhead")
_AVOIDED = ("reapplied", "skipped", "not_modified", "not_wanted")


def _ways(report: Report) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yield each direction's label and its part of the ledger."""
    for direction, key in _DIRECTIONS:
        found = at(report, "ledger", key)
        if found is not None:
            yield direction, found


def _bytes(report: Report) -> Iterator[MetricSample]:
    for direction, flow in _ways(report):
        yield MetricSample((direction,), flow["bytes"])


def _parts(report: Report) -> Iterator[MetricSample]:
    for direction, flow in _ways(report):
        for part in _PARTS:
            yield MetricSample((direction, part), flow[part])


def _payload(report: Report) -> Iterator[MetricSample]:
    for direction, flow in _ways(report):
        yield MetricSample((direction, "raw"), flow["payload"] - flow["coded"])
        yield MetricSample((direction, "coded"), flow["coded"])


def _uncoded(report: Report) -> Iterator[MetricSample]:
    for direction, flow in _ways(report):
        yield MetricSample((direction,), flow["raw"])


def _avoided(report: Report) -> Iterator[MetricSample]:
    for direction, flow in _ways(report):
        for reason in _AVOIDED:
            if reason in flow:
                yield MetricSample((direction, reason), flow[reason])


def _messages(report: Report) -> Iterator[MetricSample]:
    # The kinds are those of the protocol: a peer cannot choose them.
    for direction, flow in _ways(report):
        for kind, count in sorted(flow["messages"].items()):
            yield MetricSample((direction, kind), count)


def _transfers(report: Report) -> Iterator[MetricSample]:
    for direction, flow in _ways(report):
        yield MetricSample((direction, "sent"), flow["with_payload"])
        for outcome, count in sorted(flow["times"].items()):
            yield MetricSample((direction, outcome), count)


def _observers(report: Report) -> Iterator[MetricSample]:
    for direction, key in _DIRECTIONS:
        found = at(report, "ledger", "observers", key)
        if found is not None:
            yield MetricSample((direction,), found)


def _constants(report: Report) -> Iterator[MetricSample]:
    for direction in ("push", "fetch"):
        found = at(report, "budget", f"c_{direction}")
        if found is not None:
            yield MetricSample((direction,), found)


METRICS = (
    Metric(
        "counter",
        "aiops_traffic_bytes_total",
        "Bytes that crossed workers' connections, headers included.",
        _bytes,
        ("direction",),
    ),
    Metric(
        "counter",
        "aiops_message_bytes_total",
        "Bytes of whole messages of workers: tensors (payload), the definition of the model, rows"
        " of tables, all else (overhead).",
        _parts,
        ("direction", "part"),
    ),
    Metric(
        "counter",
        "aiops_payload_bytes_total",
        "Bytes of tensors that crossed, as they are (raw) or by the codec that aiops_info names"
        " (coded).",
        _payload,
        ("direction", "encoding"),
    ),
    Metric(
        "counter",
        "aiops_payload_uncoded_bytes_total",
        "Bytes that the tensors that crossed would have been without a codec.",
        _uncoded,
        ("direction",),
    ),
    Metric(
        "counter",
        "aiops_avoided_bytes_total",
        "Bytes of tensors that did not cross, by the reason, as if uncoded.",
        _avoided,
        ("direction", "reason"),
    ),
    Metric(
        "counter",
        "aiops_messages_total",
        "Messages of workers' connections, by their kind.",
        _messages,
        ("direction", "kind"),
    ),
    Metric(
        "counter",
        "aiops_transfers_total",
        "Gradients and models by the outcome: sent (the gate was open, or there is none), and the"
        " reasons for which one was not.",
        _transfers,
        ("direction", "outcome"),
    ),
    Metric(
        "counter",
        "aiops_observer_bytes_total",
        "Bytes that crossed the connections of observers.",
        _observers,
        ("direction",),
    ),
    Metric(
        "gauge",
        "aiops_gate_constant",
        "The constants of the gate that keeps to the budget: c_push, c_fetch.",
        _constants,
        ("direction",),
    ),
    Metric(
        "gauge",
        "aiops_budget_bytes_per_second",
        "Bytes a second that --bandwidth-budget allows all clients together.",
        value("budget", "bytes_per_second"),
    ),
    Metric(
        "gauge",
        "aiops_budget_worker_bytes_per_second",
        "Bytes a second that --worker-budget allows each client.",
        value("budget", "worker_bytes_per_second"),
    ),
    Metric(
        "gauge",
        "aiops_budget_used_bytes_per_second",
        "Bytes of the last second that count against the budget.",
        value("budget", "used"),
    ),
    Metric(
        "gauge",
        "aiops_budget_backlog_bytes",
        "Bytes that wait for the budget.",
        value("budget", "backlog"),
    ),
    Metric(
        "gauge",
        "aiops_budget_utilisation_ratio",
        "Share of the budget that was used while bytes waited for it.",
        value("budget", "utilisation"),
    ),
    Metric(
        "counter",
        "aiops_corrupted_connections_total",
        "Connections that ended with a wrong checksum.",
        value("corrupted"),
    ),
)
"""The metrics of the traffic."""
