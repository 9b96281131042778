"""The settings of a server: each is a flag, an ``AIOPS_*`` variable and a key of a TOML file.

The field ``worker_deadline`` is ``--worker-deadline``, ``AIOPS_WORKER_DEADLINE`` and
``worker-deadline = 60`` (or ``worker_deadline``) in ``--config FILE.toml``; a flag wins over a
variable, a variable over the file.
"""

from __future__ import annotations

import dataclasses
import tomllib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from aiops import tracing
from aiops.algorithms import DEFAULT
from aiops.algorithms.per_tensor import SETTING, gathered
from aiops.bandwidth.units import parse_rate
from aiops.common import failure_waits
from aiops.common.failure_waits import FailureWaits
from aiops.common.settings import check_texts
from aiops.common.urls import (
    PORT,
    RELAY_PORT,
    address,
    is_loopback,
    is_tls,
    local_address,
    parse,
    parse_all,
)
from aiops.durable.commit_gate import Acks
from aiops.engine.events import Options
from aiops.errors import ConflictError, UsageError, nearest
from aiops.kernels.cupy_device import number_of
from aiops.state.directory import SHARD

_SECONDS = (
    *("failure_timeout", "worker_deadline", "hello_deadline", "stall_deadline", "drain_deadline"),
    *("save_every", "snapshot_every", "standby_deadline", "track_every"),
)
_DERIVED = {
    "hello_deadline": "hello",
    "stall_deadline": "stall",
    "drain_deadline": "drain",
    "standby_deadline": "standby",
}
"""The settings that follow from ``failure_timeout`` unless they are given, and their wait."""

_COUNTS = (
    "workers",
    "live_versions",
    "max_model",
    "max_connections",
    "min_rate",
    "recall",
    "fetch_lag",
    "shards",
    "shard",
    "threads",
    "shard_bytes",
    "model_size",
    "metrics_workers",
)
_MAY_BE_0 = ("drain_deadline", "min_rate", "recall", "fetch_lag", "metrics_workers")
_LISTS = ("set", "push_codec", "fetch_codec", "followers", "track")
SECRETS = ("token", "relay_token")
_LONGEST = 1e9  # seconds (30 years): what every clock and timer can still count
_MOST = 1 << 62


def _option(default: Any, help: str, read: Callable[[Any], Any] | None = None) -> Any:
    metadata = {"help": help, "read": read}
    if isinstance(default, list):
        return field(default_factory=lambda: list(default), metadata=metadata)
    return field(default=default, metadata=metadata)


def read_shards(given: Any) -> Any:
    """Return the number that a flag gives, or its text as it is: ``auto``, or a mistake."""
    try:
        return int(given)
    except ValueError:
        return given


@dataclass(frozen=True, kw_only=True)
class Config:
    """Settings of one server; the help texts below are their documentation."""

    policy: str = _option(DEFAULT, "Algorithm: a name, or package.module:Class.")
    set: list[str] = _option([], "A setting of the algorithm, key=value; may be repeated.")
    lr: float | None = _option(
        None, "Learning rate: short for --set lr=... (in diloco and fedbuff the outer one)."
    )
    host: str = _option("127.0.0.1", "Address to listen on; beyond loopback a token is needed.")
    port: int = _option(PORT, "Port to listen on; 0 picks a free one.")
    token: str | None = _option(None, "What clients must know; better given as AIOPS_TOKEN.")
    tls_cert: Path | None = _option(
        None, "Speak TLS 1.3 only, with the certificate in this PEM file: aiops+tls://."
    )
    tls_key: Path | None = _option(None, "Its private key, if that is in another file.")
    tls_ca: Path | None = _option(
        None, "Ask clients for a certificate too, issued by a CA in this PEM file."
    )
    tokens: Path | None = _option(
        None,
        "A file of tokens with names and roles, which `aiops token` writes; read as it changes.",
    )
    workers: int | None = _option(None, "How many workers take part (barriers need to know).")
    worker_deadline: float = _option(300.0, "Seconds a barrier waits for one worker's compute.")
    consistency: str = _option("leased", "'leased': reads see one version. 'relaxed': may mix.")
    live_versions: int = _option(
        16, "Versions of the parameters that are sent at once; then the slowest readers are cut."
    )
    gate: str = _option("", "When workers push and fetch: bfasgd:c_push=0.08, periodic, constant.")
    recall: int = _option(256 << 20, "Bytes of gradients kept for a gate with skipped=reapply.")
    push_codec: list[str] = _option([], "How gradients travel: topk:0.01, int8@fc*; repeat.")
    fetch_codec: list[str] = _option([], "How parameters travel, as increments: int8, topk:0.1.")
    fetch_lag: int = _option(0, "Versions that these may be behind; 0: as seems best.")
    filter: str = _option(
        "auto",
        "Refuse gradients of hostile workers: robust, some (norm:20+curvature), off; 'auto': robust"
        " if a token is untrusted.",
    )
    init: Path | None = _option(None, "Start with the model in this .safetensors file.")
    save: Path | None = _option(None, "Write the model to this .safetensors file at the end.")
    save_every: float | None = _option(None, "Also write it at this interval, in seconds.")
    record: Path | None = _option(
        None, "Record the run in this folder for `aiops replay`; in DIR.2 if DIR exists."
    )
    state: Path | None = _option(
        None, "Keep all of the server in this folder, and go on from what it holds."
    )
    acks: str | None = _option(
        None,
        "With --state: a push is acknowledged once it is 'applied', 'written', 'durable' or"
        " 'replicated'.",
    )
    snapshot_every: float = _option(
        30.0, "Seconds between two snapshots in --state, at most; they shorten its journal."
    )
    state_copy: str | None = _option(
        None,
        "Keep copies of --state in this store, too: s3://bucket/path, gs://bucket/path. A start"
        " goes on from the newest if --state holds none, or an older one.",
    )
    keep_journal: bool = _option(
        False, "With --state: keep all of its journal, for `aiops replay`."
    )
    standby: str | None = _option(
        None, "Be the standby of the server at this URL: keep all that it keeps, in --state."
    )
    shard: int | None = _option(
        None, "With --follower --standby: be the standby of this shard of the run at that URL."
    )
    standby_deadline: float = _option(
        None,
        "Seconds that 'replicated' waits for a standby before it means 'durable'; by default twice"
        " --failure-timeout.",
    )
    ledger: Path | None = _option(None, "Write bytes by tensor and reason here, once a second.")
    profile: Path | None = _option(None, "Write where the server's time went here, at the end.")
    threads: int | None = _option(
        None, "Threads that share large updates: by default as many as processors, up to 4."
    )
    kernels: str = _option("auto", "'numba', 'numpy', or 'auto': numba when it is installed.")
    device: str = _option("cpu", "Where the model is kept and updated: 'cpu', 'cuda', 'cuda:1'.")
    max_model: int = _option(8 << 30, "Largest model a worker may define, in bytes.")
    max_connections: int = _option(4096, "Connections beyond this are refused.")
    failure_timeout: float = _option(
        failure_waits.DEFAULT,
        "Seconds within which a dead network is noticed; other waits follow from it (the log says"
        " which).",
    )
    hello_deadline: float = _option(
        None,
        "Seconds a new connection has to introduce itself; by default twice --failure-timeout.",
    )
    stall_deadline: float = _option(
        None, "Seconds a peer may be slower than --min-rate; by default six --failure-timeout."
    )
    min_rate: int = _option(1024, "Bytes per second a peer must manage in mid-message.")
    bandwidth_budget: str | None = _option(
        None, "Bytes per second that cross, both ways, all clients together: 2MB/s, 16Mbit/s."
    )
    worker_budget: str | None = _option(None, "The same for each client: 200KB/s.")
    drain_deadline: float = _option(
        None,
        "Seconds that answers still unsent at the end get; by default twice --failure-timeout.",
    )
    no_shm: bool = _option(False, "Have clients on this machine use TCP, too: no shared memory.")
    shards: int = _option(
        1,
        "Server processes that the model is spread over, this one included; 'auto': as seems best.",
        read=read_shards,
    )
    model_size: int | None = _option(
        None, "For --shards auto without --init: bytes of the model that workers will define."
    )
    link_rate: str | None = _option(
        None,
        "For --shards auto: what this machine's network carries each way, such as 1Gbit/s, where"
        " the system does not know it.",
    )
    shard_bytes: int = _option(1 << 20, "No shard holds less: a small model lies on fewer of them.")
    spread_tables: bool = _option(
        False, "Spread the rows of tables over all shards, too, by the hash of their numbers."
    )
    followers: list[str] = _option([], "Spread it over those: host:port, of --follower; repeat.")
    follower: bool = _option(False, "Hold a part of the model for a lead, which reaches this one.")
    relay: str | None = _option(
        None, "Where workers that average meet if they cannot reach each other: host:port."
    )
    relay_token: str | None = _option(
        None, "What that `aiops relay` was started with; better given as AIOPS_RELAY_TOKEN."
    )
    metrics_port: int | None = _option(
        None,
        "Serve metrics for Prometheus at this port, by HTTP, and /healthz, /readyz; 0: a free one.",
    )
    dashboard: bool = _option(
        False, "Show a live page of the run at that port (a free one by default), for a browser."
    )
    metrics_host: str = _option(
        "127.0.0.1", "Address of that port: all who reach it can read what it shows."
    )
    metrics_workers: int = _option(
        100, "Workers that have metrics of their own; those of all others are summed."
    )
    track: list[str] = _option(
        [], "Send the run's numbers to a tracker: tensorboard:FOLDER, wandb:PROJECT, ...; repeat."
    )
    track_every: float = _option(5.0, "Seconds between two such sendings.")
    trace: str = _option(
        "", "Send traces of exchanges to an OpenTelemetry collector: otlp:, otlp:http://host:4318."
    )
    log_format: str = _option("text", "'text' or 'json'.")
    log_level: str = _option("info", "'debug', 'info', 'warning' or 'error'.")

    def __post_init__(self) -> None:
        """Check the settings, as far as that is possible before the server starts.

        Raises
        ------
        UsageError
            Naming the setting, what it must be, and what to do.
        """
        for name, wait in _DERIVED.items():
            if getattr(self, name) is None:
                object.__setattr__(self, name, getattr(self.waits, wait))
        for name in _LISTS:
            check_texts(name, getattr(self, name))
        shards: object = self.shards
        if isinstance(shards, str):  # `settle_shards` has replaced auto
            raise UsageError(f"--shards must be a number, or auto, not {shards!r}")
        _one_of("consistency", self.consistency, ("leased", "relaxed"))
        _one_of("kernels", self.kernels, ("auto", "numba", "numpy"))
        number_of(self.device)
        _one_of("log-format", self.log_format, ("text", "json"))
        _one_of("log-level", self.log_level, ("debug", "info", "warning", "error"))
        if not 0 <= self.port < 1 << 16:
            raise UsageError(f"port must be 0 to 65535, not {self.port}")
        if self.metrics_port is not None and not 0 <= self.metrics_port < 1 << 16:
            raise UsageError(f"--metrics-port must be 0 to 65535, not {self.metrics_port}")
        observed = self.metrics_port is not None or self.dashboard
        if not observed and self.metrics_host != Config.metrics_host:
            raise UsageError(
                "--metrics-host is the address of --metrics-port: give that, too, or --dashboard"
            )
        for name in (*_SECONDS, *_COUNTS):
            value = getattr(self, name)
            if value is None:
                continue
            flag, most = name.replace("_", "-"), _LONGEST if name in _SECONDS else _MOST
            if not value > 0 and name not in _MAY_BE_0:  # not a number is not more than 0
                raise UsageError(f"--{flag} must be more than 0, not {value}")
            if not 0 <= value <= most:
                raise UsageError(f"--{flag} must be from 0 to {most:g}, not {value}")
        tracing.check_kind(self.trace)
        if self.token == "":
            raise UsageError("the token is empty: give a real one, or none")
        self._check_tls()
        open_to_all = self.token is None and self.tokens is None and self.tls_ca is None
        if open_to_all and not is_loopback(self.host):
            raise UsageError(
                f"refusing to listen on {self.host} without a token: any process there could read"
                " and change the model. Set AIOPS_TOKEN (openssl rand -hex 16 makes a good one),"
                " or have clients show a certificate (--tls-cert, --tls-ca), or listen on 127.0.0.1"
            )
        several = self.sharded or self.follower or self.standby is not None
        if self.tokens is not None and self.token is None and several:
            raise UsageError(
                "the servers of a run prove to each other that they belong to it: give each of them"
                " the same --token, too, better as AIOPS_TOKEN; with --tokens it is theirs alone"
            )
        if self.record is not None and self.consistency == "relaxed":
            raise ConflictError(
                "relaxed reads cannot be recorded: which versions they mix depends on the moment;"
                " drop --record or --consistency relaxed"
            )
        self.budgets()
        if self.relay_token == "":
            raise UsageError("the relay's token is empty: give a real one, or none")
        if self.relay is not None:
            parse(self.relay)
        elif self.relay_token is not None:
            raise UsageError("--relay-token is for the relay at --relay host:port: name it, too")
        self._check_shards()
        self._check_state()
        if self.save_every is not None and self.save is None:
            raise UsageError("--save-every needs --save FILE.safetensors to write to")

    def _check_tls(self) -> None:
        if self.tls_cert is None:
            for name in ("tls_key", "tls_ca"):
                if getattr(self, name) is not None:
                    flag = name.replace("_", "-")
                    raise UsageError(
                        f"--{flag} is for a server with --tls-cert: give that, too (`aiops tls init"
                        " DIR` makes all of them)"
                    )
            if is_tls(self.standby or ""):
                raise UsageError("a standby of aiops+tls:// needs --tls-cert and --tls-ca itself")
            return
        if self.tls_ca is None and (self.sharded or self.follower or self.standby is not None):
            raise UsageError(
                "TLS between servers needs --tls-ca: leads, followers and standbys verify each"
                " other by it"
            )
        if self.standby is not None and not is_tls(self.standby):
            raise ConflictError(
                "a standby takes its primary's place, so both speak TLS or none: write"
                " --standby aiops+tls://..., or drop --tls-cert"
            )
        if self.policy == "average" and self.tls_ca is None:
            raise UsageError(
                "workers that average send their models to each other, and verify each other by"
                " certificates: give the server --tls-ca, too, so that all of them have some"
            )

    @property
    def tls(self) -> bool:
        """True if this server speaks TLS."""
        return self.tls_cert is not None

    def _check_state(self) -> None:
        level = Acks.named(self.acks) if self.acks is not None else Acks.APPLIED
        if self.standby is not None:
            self._check_standby()
        if self.state is None:
            if level > Acks.APPLIED:
                raise UsageError(f"--acks {self.acks} needs --state DIR to write to")
            if self.keep_journal:
                raise UsageError(
                    "--keep-journal keeps that of --state DIR: --record DIR needs none"
                )
            if self.state_copy is not None:
                raise UsageError("--state-copy keeps copies of --state DIR: give that, too")
            return
        if self.state_copy is not None:
            self._check_copies(self.state_copy)
        if self.consistency == "relaxed":
            raise ConflictError(
                "relaxed reads cannot be kept in --state: which versions they mix depends on the"
                " moment; drop --state or --consistency relaxed"
            )
        if self.record is not None:
            raise ConflictError(
                "--state keeps a journal of the run already: drop --record, and take --keep-journal"
                " to keep all of it"
            )
        if self.keep_journal and self.acknowledgement is Acks.APPLIED:
            raise ConflictError("--acks applied has no journal to keep: drop --keep-journal")
        if self.keep_journal and self.standby is not None:
            raise ConflictError(
                "--keep-journal is of a server that has its run from the beginning, which a standby"
                " may not have: drop it"
            )

    def _check_copies(self, url: str) -> None:
        if "://" not in url:
            raise UsageError(f"--state-copy {url!r}: write s3://bucket/path, or file:///path")
        if self.sharded or self.follower:
            raise ConflictError(
                "--state-copy is of a model on one server: copies that several servers make at"
                " different moments are of no moment of the run. Leave out --state-copy, with a"
                " --state that all machines share, or leave out --shards and --followers"
            )
        if self.standby is not None:
            raise ConflictError(
                "--state-copy is the primary's, and not its standby's: a standby that takes over"
                " has all that was acknowledged. Start it with --state-copy once it has been"
                " promoted and ended"
            )
        if self.keep_journal:
            raise ConflictError(
                "--state-copy copies snapshots, and --keep-journal is of all rows since the"
                " beginning, which a start from a copy does not have: drop one of them"
            )

    def _check_standby(self) -> None:
        parse_all(self.standby or "")
        if self.state is None:
            raise UsageError("--standby needs --state DIR to keep the primary's state in")
        if self.follower and self.shard is None:
            raise UsageError(
                "the standby of a follower needs --shard: the number of the shard that it is to"
                " have, from 1; --standby names the run's lead"
            )
        if self.init is not None:
            raise ConflictError("a standby has its primary's model: drop --init")

    @property
    def state_folder(self) -> Path | None:
        """The folder of this server's own state; the lead of shards has one beside the others'."""
        if self.state is None or not self.sharded:
            return self.state
        return self.state / shard_folder(0)

    @property
    def acknowledgement(self) -> Acks:
        """The promise of an acknowledgement: with a state, ``WRITTEN`` by default."""
        if self.acks is not None:
            return Acks.named(self.acks)
        return Acks.APPLIED if self.state is None else Acks.WRITTEN

    def _check_shards(self) -> None:
        if self.shard is not None and not (self.follower and self.standby is not None):
            raise UsageError(
                "--shard is for the standby of a follower, which has --follower and --standby: a"
                " follower is told its shard by its lead"
            )
        if self.follower and (self.followers or self.shards != 1):
            raise ConflictError(
                "a follower has no followers of its own: give --shards and --followers to the lead"
            )
        count = len(self.reach())
        if self.shards > 1 and count and count != self.shards - 1:
            raise ConflictError(
                f"--shards {self.shards} takes {self.shards - 1} followers, and --followers names"
                f" {count}: leave one of them out"
            )
        for name in ("init", "save", "record", "ledger"):
            if self.follower and getattr(self, name) is not None:
                raise ConflictError(f"--{name} is the lead's: a follower has a part of the model")
        for name in ("bandwidth-budget", "worker-budget"):
            if self.follower and getattr(self, name.replace("-", "_")) is not None:
                raise ConflictError(f"--{name} is the lead's: a follower gets its share from it")
        if self.spread_tables and not (self.sharded or self.follower):
            raise UsageError("--spread-tables needs several servers: give --shards or --followers")
        if self.followers and self.record is not None:
            raise ConflictError(
                "--record is of servers that are started together, and followers that are started"
                " by themselves have records of their own: start each of them, and this server,"
                " with --state DIR --keep-journal"
            )

    @property
    def sharded(self) -> bool:
        """True if the model is spread over several servers, of which this is the lead."""
        return self.shards > 1 or bool(self.followers)

    def reach(self) -> list[tuple[str, int]]:
        """Return the followers' hosts (empty: this server's) and ports.

        Raises
        ------
        UsageError
            When one is not written so.
        """
        found = []
        for text in ",".join(self.followers).split(",") if self.followers else ():
            if text.startswith(":") and text[1:].isdigit():
                found.append(("", int(text[1:])))
            else:
                found.append(parse(text))
        return found

    def follower_addresses(self) -> list[tuple[str, int]]:
        """Return the followers' hosts and ports, as this server reaches them."""
        return [(host or local_address(self.host), port) for host, port in self.reach()]

    def budgets(self) -> tuple[int | None, int | None]:
        """Return the bytes per second of all clients together, and of each one."""
        total = each = None
        if self.bandwidth_budget is not None:
            total = parse_rate("--bandwidth-budget", self.bandwidth_budget)
        if self.worker_budget is not None:
            each = parse_rate("--worker-budget", self.worker_budget)
        if total is not None and each is not None and each > total:
            raise UsageError(
                f"--worker-budget {self.worker_budget} is more than --bandwidth-budget"
                f" {self.bandwidth_budget} has for all workers together: lower it, or drop it"
            )
        return total, each

    @property
    def waits(self) -> FailureWaits:
        """The waits that follow from ``failure_timeout``."""
        return FailureWaits(self.failure_timeout)

    def options(self) -> Options:
        """Return the engine's options."""
        total, each = self.budgets()
        return Options(
            workers=self.workers,
            worker_deadline=self.worker_deadline,
            live=self.live_versions,
            relaxed=self.consistency == "relaxed",
            max_model=self.max_model,
            backend=self.kernels,
            heartbeat=self.waits.heartbeat,
            budget=total,
            worker_budget=each,
            gate=self.gate,
            recall=self.recall,
            push_codec=tuple(self.push_codec),
            fetch_codec=tuple(self.fetch_codec),
            fetch_lag=self.fetch_lag,
            shards=max(self.shards, 1 + len(self.reach())),
            shard_bytes=self.shard_bytes,
            spread_tables=self.spread_tables,
            filter="off" if self.filter == "auto" else self.filter,  # the server looks at tokens
            relay="" if self.relay is None else _host_and_port(self.relay),
            relay_token=self.relay_token or "",
            tls=self.tls,
            watched=self.dashboard,
        )

    def flags(self, names: Iterable[str] | None = None) -> list[str]:
        """Return the command line that gives a server these settings; defaults are left out.

        ``names``: the fields to consider; default all but the tokens, which others could read.
        """
        found: list[str] = []
        defaults = {each.name: each.default for each in dataclasses.fields(self)}
        for name in [n for n in defaults if n not in SECRETS] if names is None else names:
            value, flag = getattr(self, name), "--" + name.replace("_", "-")
            derived = _DERIVED.get(name)
            if value in (None, getattr(self.waits, derived) if derived else defaults[name]):
                continue
            if isinstance(value, bool):
                found.append(flag)
            else:
                words = value if isinstance(value, list) else [str(value)]
                found += [f"{flag}={word}" for word in words]
        return found

    def settings(self) -> dict[str, Any]:
        """Return the algorithm's settings: ``set`` and ``lr``."""
        return settings_of(self.set, self.lr)


def _host_and_port(relay: str) -> str:
    """Return the ``host:port`` of a relay's address; its default port is 7172."""
    return address(*parse(relay, RELAY_PORT))


def shard_folder(shard: int) -> str:
    """Return the name of a shard's folder in ``--state``."""
    return f"{SHARD}{shard}"


def settings_of(assigned: Iterable[str], lr: float | None) -> dict[str, Any]:
    """Return an algorithm's settings from ``key=value`` items and a learning rate.

    >>> settings_of(["n=2", "lr=0@*bias"], 0.1)
    {'n': '2', 'per_tensor': 'lr=0@*bias', 'lr': 0.1}

    Raises
    ------
    UsageError
        When one is not written so, or the learning rate is given twice, and not the same.
    """
    found: dict[str, Any] = {}
    plain, per_tensor = gathered(assigned)
    for item in plain:
        key, equals, value = item.partition("=")
        if not equals:
            raise UsageError(f"--set {item!r}: write key=value")
        found[key.strip()] = value.strip()
    if per_tensor:
        found[SETTING] = per_tensor
    if lr is not None:
        if "lr" in found and not _is_same_rate(found["lr"], lr):
            raise UsageError(
                f"the learning rate is both {lr} (--lr) and {found['lr']} (--set lr): give one of"
                " them"
            )
        found["lr"] = lr
    return found


def _is_same_rate(given: str, number: float | str) -> bool:
    try:
        return float(given) == float(number)
    except ValueError:
        return False


def assignments(settings: Mapping[str, Any]) -> list[str]:
    """Return settings as ``key=value`` items; one with a list of values has several.

    >>> assignments({"lr": 0.1, "weight_decay": [0.1, "0@*bias"]})
    ['lr=0.1', 'weight_decay=0.1', 'weight_decay=0@*bias']
    """
    each = {key: value if isinstance(value, list) else [value] for key, value in settings.items()}
    return [f"{key}={value}" for key, values in each.items() for value in values]


def read_file(path: Path) -> dict[str, Any]:
    """Return a TOML file's settings, as `Config` names them.

    Raises
    ------
    UsageError
        When it cannot be read, or has a key that is no setting.
    """
    try:
        content = tomllib.loads(path.read_text())
    except OSError as error:
        raise UsageError(f"--config {path}: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise UsageError(f"--config {path}: not TOML: {error}", config=str(path)) from None
    known = {field.name: field for field in dataclasses.fields(Config)}
    found = {}
    for key, value in content.items():
        name = key.replace("-", "_")
        if name not in known:
            raise UsageError(
                f"--config {path}: no setting {key!r}; {nearest(name, known)}", config=str(path)
            )
        if name == "set" and isinstance(value, dict):
            value = assignments(value)
        text, kinds = _KINDS[str(known[name].type).partition(" ")[0]]
        if name in ("bandwidth_budget", "worker_budget", "link_rate") and type(value) is int:
            value = str(value)  # bytes per second
        if name == "shards" and value == "auto":
            kinds = (str,)
        if type(value) not in kinds or (
            isinstance(value, list) and not all(isinstance(item, str) for item in value)
        ):
            raise UsageError(
                f"--config {path}: {key} must be {text}, not {value!r}", config=str(path)
            )
        found[name] = value
    return found


_KINDS: Mapping[str, tuple[str, tuple[type, ...]]] = {
    "str": ("a string", (str,)),
    "int": ("a whole number", (int,)),
    "float": ("a number", (int, float)),
    "bool": ("true or false", (bool,)),
    "Path": ("a string", (str,)),
    "list[str]": ('a table, or a list of strings like "lr=0.1"', (list,)),
}
"""By type of field: the TOML values accepted, in words and as types."""


def _one_of(flag: str, value: str, known: tuple[str, ...]) -> None:
    if value not in known:
        raise UsageError(f"--{flag} {value!r}: {nearest(value, known)}")
