"""The variables of the environment that aiops reads: one that is misspelt is told, not ignored."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator, Mapping

__all__ = ["JOB", "KNOWN", "unknown_variables"]

JOB = "AIOPS_JOB"
"""The variable that marks all processes of a job of `aiops run` and `aiops join`."""

_PREFIX = "AIOPS_"

_SETTINGS = """
    policy set lr host port token tls_cert tls_key tls_ca tokens workers worker_deadline consistency
    live_versions gate recall push_codec fetch_codec fetch_lag filter init save save_every record
    state acks snapshot_every state_copy keep_journal standby shard standby_deadline ledger profile
    threads kernels device max_model max_connections failure_timeout hello_deadline stall_deadline
    min_rate bandwidth_budget worker_budget drain_deadline no_shm shards model_size link_rate
    shard_bytes spread_tables followers follower relay relay_token metrics_port dashboard
    metrics_host metrics_workers track track_every trace log_format log_level config
"""  # the server's, which `aiops.serving.config` declares

_OTHERS = """
    url name overlap checksums compiled rank world_size local_rank local_world_size seed restarts
    job data faults seeds contract captures pictures ray_log torture_modules
"""  # of workers, of launchers, and of tests

KNOWN = frozenset(f"{_PREFIX}{name.upper()}" for name in f"{_SETTINGS} {_OTHERS}".split())
"""The variables that a command, a server or a client reads."""

_NOT_OURS = re.compile(r"AIOPS_TEST_|.*_SERVICE_(HOST|PORT)(_|$)|.*_PORT_\d+_(TCP|UDP)(_|$)")
"""Those of tests, and those that Kubernetes sets for a service whose name begins so."""


def unknown_variables(environment: Mapping[str, str]) -> Iterator[str]:
    """Yield a sentence about each variable that is named as one of aiops and is none."""
    for name in sorted(environment):
        if name.startswith(_PREFIX) and name not in KNOWN and not _NOT_OURS.match(name):
            near = difflib.get_close_matches(name, sorted(KNOWN), n=1, cutoff=0.8)
            hint = f": did you mean {near[0]}?" if near else ""
            yield f"{name} is set, and aiops has no such variable, so it has no effect{hint}"
