"""The settings of `aiops.serve` as its keyword arguments, for type checkers and editors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, TypedDict


class ServeKeywords(TypedDict, total=False):
    """The fields of `aiops.serving.config.Config`, in the forms that `aiops.serve` takes.

    ``standby`` is not among them: it is a parameter of its own.
    """

    policy: str
    set: Mapping[str, Any] | Sequence[str]
    lr: float | None
    host: str
    port: int
    token: str | None
    tls_cert: str | Path | None
    tls_key: str | Path | None
    tls_ca: str | Path | None
    tokens: str | Path | None
    workers: int | None
    worker_deadline: float
    consistency: str
    live_versions: int
    gate: str
    recall: int
    push_codec: str | Sequence[str]
    fetch_codec: str | Sequence[str]
    fetch_lag: int
    filter: str
    init: str | Path | None
    save: str | Path | None
    save_every: float | None
    record: str | Path | None
    state: str | Path | None
    acks: str | None
    snapshot_every: float
    state_copy: str | None
    keep_journal: bool
    shard: int | None
    standby_deadline: float
    ledger: str | Path | None
    profile: str | Path | None
    threads: int | None
    kernels: str
    device: str
    max_model: int
    max_connections: int
    failure_timeout: float
    hello_deadline: float
    stall_deadline: float
    min_rate: int
    bandwidth_budget: str | None
    worker_budget: str | None
    drain_deadline: float
    no_shm: bool
    shards: int | Literal["auto"]
    model_size: int | None
    link_rate: str | None
    shard_bytes: int
    spread_tables: bool
    followers: Sequence[str]
    follower: bool
    relay: str | None
    relay_token: str | None
    metrics_port: int | None
    dashboard: bool
    metrics_host: str
    metrics_workers: int
    track: str | Sequence[str]
    track_every: float
    log_format: str
    log_level: str
