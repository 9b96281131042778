"""The settings of `aiops.serve` as its keyword arguments: their types, and how they are read."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Mapping, Sequence
from numbers import Integral, Real
from pathlib import Path
from typing import Any, Final, Literal, TypedDict

from aiops.algorithms import find
from aiops.errors import UsageError, nearest
from aiops.serving.config import SECRETS, Config, assignments


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
    trace: str
    log_format: str
    log_level: str


_KINDS: Final[Mapping[str, tuple[str, tuple[type, ...]]]] = {
    "str": ("a string", (str,)),
    "int": ("a whole number", (Integral,)),
    "float": ("a number", (Real,)),
    "bool": ("True or False", (bool,)),
    "Path": ("a path", (str, os.PathLike)),
    "list[str]": ("a list of strings", (list, tuple)),
}
"""By type of a field of `Config`: the values accepted, in words and as types."""

_STORED: Final[Mapping[str, Callable[[Any], Any]]] = {"Path": Path, "list[str]": list}
"""By type of a field: what makes one of it of the other types that are accepted."""


def read_keywords(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return settings as `Config` takes them; ``shards`` may still be ``"auto"``.

    Parameters
    ----------
    given
        Those of `ServeKeywords`, and ``standby``.

    Raises
    ------
    UsageError
        When there is no such setting, or its value is of another type.
    """
    known = {each.name: each for each in dataclasses.fields(Config)}
    found = {}
    for name, value in given.items():
        if name not in known:
            raise _unknown(name, given, known)
        if name == "set" and isinstance(value, Mapping):
            value = assignments(value)
        elif name in ("push_codec", "fetch_codec", "track") and isinstance(value, str):
            value = [value]
        _check(name, value, known[name])
        as_stored = _STORED.get(str(known[name].type).partition(" ")[0])
        found[name] = value if value is None or as_stored is None else as_stored(value)
    return found


def _check(name: str, value: Any, field: dataclasses.Field[Any]) -> None:
    kind, _, rest = str(field.type).partition(" ")
    if value is None and (rest or field.default is None):
        return
    text, kinds = _KINDS[kind]
    if name == "shards":
        text, kinds = "a whole number, or 'auto'", (*kinds, str)
    fits = isinstance(value, kinds) and (kind == "bool" or not isinstance(value, bool))
    if fits and kind == "list[str]":
        fits = all(isinstance(item, str) for item in value)
    if not fits:
        # Neither a secret nor all elements of an array belong into the text of an error.
        plain = isinstance(value, str | int | float | None) and name not in SECRETS
        shown = repr(value) if plain else type(value).__name__
        raise UsageError(f"{name} must be {text}, not {shown}")


def _unknown(name: str, given: Mapping[str, Any], known: Mapping[str, Any]) -> UsageError:
    policy = given.get("policy", Config.policy)
    if isinstance(policy, str) and name in {each.name for each in dataclasses.fields(find(policy))}:
        return UsageError(f"{name!r} is a setting of the policy {policy}: set={{{name!r}: ...}}")
    return UsageError(f"a server has no setting {name!r}; {nearest(name, known)}")
