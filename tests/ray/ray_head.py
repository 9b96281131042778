"""The head of a Ray cluster as ``ray start`` runs it, for what `ray.cluster_utils` cannot do.

Import it before Ray, which reads the variables when it is imported. There is no token: such a
cluster is of a minute, and on loopback.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from aiops.net.process_tree import kill_session

os.environ.update(
    RAY_AUTH_MODE="disabled",
    RAY_USAGE_STATS_ENABLED="0",
    RAY_enable_metrics_collection="0",
    RAY_TRAIN_V2_ENABLED="1",
    RAY_worker_niceness="0",  # else 15: a hundredth of what others get of a processor
)

STORE = 78 << 20
"""Bytes of each node's object store: the least that Ray allows."""

_PATIENCE = 60.0


def free_port() -> int:
    """Return a port that is free now."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port: int = free.getsockname()[1]
        return port


@contextmanager
def ray_head(
    folder: Path, port: int, url: str, *flags: str, env: Mapping[str, str] | None = None
) -> Iterator[None]:
    """Run a head, and connect to it; its processes end with the block.

    Parameters
    ----------
    folder
        Gets its logs; Ray takes short paths only.
    port
        The head's.
    url
        To connect to.
    flags
        Further ones of ``ray start``.
    env
        Further variables.
    """
    import ray

    head = subprocess.Popen(
        [
            *("ray", "start", "--head", "--block", f"--port={port}", "--include-dashboard=false"),
            *("--node-ip-address=127.0.0.1", f"--object-store-memory={STORE}"),
            *(f"--temp-dir={folder / 'ray'}", *flags),
        ],
        env={**os.environ, **(env or {})},
        stdout=subprocess.DEVNULL,
        start_new_session=True,
    )
    try:
        deadline = time.monotonic() + _PATIENCE
        while not ray.is_initialized():
            try:
                ray.init(address=url, log_to_driver=False)
            except ConnectionError:
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.5)
        yield
    finally:
        ray.shutdown()
        head.send_signal(signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            head.wait(10.0)
        kill_session(head.pid)
