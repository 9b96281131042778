"""Metrics of the server itself: readiness, memory, versions, journal, standbys, shards, tokens."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from aiops.metrics.metric import (
    Metric,
    MetricSample,
    Reader,
    Report,
    column,
    length,
    value,
)


def _of_state(read: Callable[[Mapping[str, Any]], Any], *keys: str) -> Reader:
    """Return the reader of a number computed from the values of keys of the state, if it has them.

    The states of a standby and of a follower lack some.
    """

    def samples(report: Report) -> Iterator[MetricSample]:
        state = report.get("state")
        if state and all(key in state for key in keys):
            yield MetricSample((), float(read(state)))

    return samples


def _fed(report: Report) -> Iterator[MetricSample]:
    state = report.get("state")
    if state and "standby_of" in state:
        yield MetricSample((), float(not state["no_feed"]))


def _shards(key: Callable[[Mapping[str, Any]], float]) -> Reader:
    def samples(report: Report) -> Iterator[MetricSample]:
        for line in report.get("shards") or ():
            yield MetricSample((str(line["shard"]),), key(line))

    return samples


def _copy_failed(report: Report) -> Iterator[MetricSample]:
    copy = (report.get("state") or {}).get("copy")
    if copy:
        yield MetricSample((), float(bool(copy["error"])))


_STATE, _STANDBYS, _TOKENS = "state", ("state", "standbys"), ("tokens",)

METRICS = (
    Metric(
        "gauge",
        "aiops_ready",
        "1 if the server has a model and takes pushes, as /readyz says.",
        value("ready"),
    ),
    Metric(
        "gauge",
        "aiops_metrics_gathering_seconds",
        "Processor time in which the event loop gathered the values of this scrape.",
        value("gathering_seconds"),
    ),
    Metric("gauge", "aiops_versions_alive", "Versions in memory.", value("versions_alive")),
    Metric(
        "gauge", "aiops_versions_spare", "Buffers that await a version.", value("versions_spare")
    ),
    Metric(
        "counter",
        "aiops_readers_cut_total",
        "Readers that were cut because they held too old a version.",
        value("readers_cut"),
    ),
    Metric(
        "gauge",
        "aiops_memory_bound_bytes",
        "Bytes that the settings allow this process; process_resident_memory_bytes is what it has.",
        value("memory", "bound"),
    ),
    Metric(
        "gauge",
        "aiops_receive_buffer_bytes",
        "Bytes of the buffers that pushes are being received into.",
        value("receive_bytes"),
    ),
    Metric(
        "gauge",
        "aiops_rows_buffer_bytes",
        "Bytes of the buffers that rows of tables are being received into.",
        value("rows_bytes"),
    ),
    Metric(
        "gauge",
        "aiops_file_errors",
        "Files that the server was to write and could not.",
        length("file_errors"),
    ),
    Metric(
        "counter",
        "aiops_journal_rows_total",
        "Rows of the journal of --state.",
        value(_STATE, "row"),
    ),
    Metric(
        "counter",
        "aiops_journal_bytes_total",
        "Bytes of the rows that this start has journalled.",
        value(_STATE, "journal_bytes"),
    ),
    Metric(
        "gauge",
        "aiops_journal_lag_rows",
        "Rows that are not written yet as --acks promises.",
        value(_STATE, "lag_rows"),
    ),
    Metric(
        "gauge",
        "aiops_journal_lag_bytes",
        "Bytes of rows that wait to be written.",
        value(_STATE, "lag_bytes"),
    ),
    Metric(
        "gauge",
        "aiops_journal_rows_since_snapshot",
        "Rows that a restart would repeat.",
        _of_state(lambda state: state["row"] - state["snapshot"], "row", "snapshot"),
    ),
    Metric(
        "gauge",
        "aiops_journal_ended",
        "1 if the journal cannot be written, so that acknowledgements promise less.",
        _of_state(lambda state: bool(state["ended"]), "ended"),
    ),
    Metric(
        "gauge",
        "aiops_acks_reduced",
        "1 if acknowledgements promise less than --acks asks for.",
        _of_state(lambda state: state["acks"] != state["wanted"], "wanted"),
    ),
    Metric(
        "gauge",
        "aiops_snapshot_failed",
        "1 if the last snapshot could not be written.",
        _of_state(lambda state: bool(state["snapshot_error"]), "snapshot_error"),
    ),
    Metric(
        "gauge",
        "aiops_snapshot_write_seconds",
        "Time that the last snapshot took to be written, beside training.",
        value(_STATE, "snapshot_seconds"),
    ),
    Metric(
        "gauge",
        "aiops_snapshot_capture_seconds",
        "Time for which updates waited for the last snapshot.",
        value(_STATE, "capture_seconds"),
    ),
    Metric(
        "gauge",
        "aiops_state_generation",
        "Generation of the run: it rises with every start and every promotion.",
        value(_STATE, "generation"),
    ),
    Metric(
        "gauge",
        "aiops_rolled_back_pushes",
        "Acknowledged pushes that this start of the server lacks, as workers were told.",
        value(_STATE, "rolled_back"),
    ),
    Metric(
        "counter",
        "aiops_state_copies_total",
        "Copies that were made in --state-copy.",
        value(_STATE, "copy", "copies"),
    ),
    Metric(
        "gauge",
        "aiops_state_copy_version",
        "Version of the newest copy in --state-copy.",
        value(_STATE, "copy", "version"),
    ),
    Metric("gauge", "aiops_state_copy_failed", "1 if the last copy failed.", _copy_failed),
    Metric(
        "gauge",
        "aiops_standby_lag_rows",
        "Rows that a standby has not synced.",
        column(_STANDBYS, "name", "behind_rows"),
        ("standby",),
    ),
    Metric(
        "gauge",
        "aiops_standby_lag_seconds",
        "Age of the oldest row that a standby has not synced.",
        column(_STANDBYS, "name", "behind_seconds"),
        ("standby",),
    ),
    Metric(
        "gauge",
        "aiops_standby_lag_bytes",
        "Bytes of the rows that a standby has not synced.",
        column(_STANDBYS, "name", "behind_bytes"),
        ("standby",),
    ),
    Metric(
        "gauge",
        "aiops_standby_fed",
        "Of a standby: 1 if its primary feeds it.",
        _fed,
    ),
    Metric(
        "gauge",
        "aiops_standby_unapplied_rows",
        "Of a standby: rows of its primary's that it has not applied.",
        value(_STATE, "behind_rows"),
    ),
    Metric(
        "gauge",
        "aiops_shard_up",
        "1 if the lead reaches the shard.",
        _shards(lambda line: float(not line["gone"])),
        ("shard",),
    ),
    Metric(
        "gauge",
        "aiops_shard_lag_versions",
        "Versions that a shard is behind the newest.",
        _shards(lambda line: line["behind"]),
        ("shard",),
    ),
    Metric(
        "gauge",
        "aiops_shard_bytes",
        "Bytes of the model that a shard holds.",
        _shards(lambda line: line["bytes"]),
        ("shard",),
    ),
    Metric(
        "gauge",
        "aiops_token_connections",
        "Open connections by a token.",
        column(_TOKENS, "name", "connections"),
        ("token",),
    ),
    Metric(
        "counter",
        "aiops_token_refused_total",
        "Connections and requests that a token was refused.",
        column(_TOKENS, "name", "refused"),
        ("token",),
    ),
    Metric(
        "counter",
        "aiops_token_waited_seconds_total",
        "Time that requests by a token have waited for its quota.",
        column(_TOKENS, "name", "waited"),
        ("token",),
    ),
)
"""The metrics of the server itself."""
