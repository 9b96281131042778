"""An elastic job on a cluster that Ray's autoscaler makes larger for it, and smaller behind it.

``python -m tests.ray.autoscaling_scenario``; a minute, so it is not one of the tests. Nodes of one
processor are processes of this machine (Ray's fake provider): a job of 1 to 3 workers begins where
there is room for its server only. Its requests have the autoscaler add a node for each worker; when
it has ended, the idle nodes are removed.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

os.environ["RAY_AUTH_MODE"] = "disabled"  # read by the import: this cluster is of a minute

import ray
import ray.train

import aiops.ray
from aiops.net.process_tree import kill_session
from benchmarks.ray_loops import acknowledged, count_steps
from benchmarks.ray_nodes import QUIET

WORKERS = 3
PATIENCE = 120.0
STORE = 78 << 20  # bytes of each node's object store: the least that Ray allows


def configuration(address: str) -> dict[str, Any]:
    """Return the autoscaler's configuration; ``address``: the head's."""
    node = {"CPU": 1, "object_store_memory": STORE}
    empty = ("docker", "auth", "file_mounts")
    commands = ("initialization", "setup", "head_setup", "worker_setup")
    starts = ("head_start_ray_commands", "worker_start_ray_commands")
    return {
        "cluster_name": "fake",
        "max_workers": WORKERS + 1,
        "upscaling_speed": 1.0,
        "idle_timeout_minutes": 0.1,
        "provider": {
            "type": "fake_multinode",
            "gcs_address": address,
            "use_node_id_as_ip": True,
            "worker_liveness_check": False,
            "disable_node_updaters": True,
            "disable_launch_config_check": True,
        },
        "available_node_types": {
            "worker": {
                "resources": node,
                "node_config": {},
                "min_workers": 0,
                "max_workers": WORKERS + 1,
            },
            "ray.head.default": {"resources": {"CPU": 1}, "node_config": {}, "max_workers": 0},
        },
        "head_node_type": "ray.head.default",
        **{name: {} for name in empty},
        **{f"{name}_commands": [] for name in commands},
        **{name: [] for name in (*starts, "cluster_synced_files", "rsync_exclude", "rsync_filter")},
        "file_mounts_sync_continuously": False,
    }


@contextmanager
def autoscaled(folder: Path) -> Iterator[None]:
    """Run a head with one processor and an autoscaler, and connect to it.

    `ray.cluster_utils.AutoscalingCluster` would end every Ray process of the machine first.
    """
    config = folder / "config.json"
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    address = f"127.0.0.1:{port}"
    config.write_text(json.dumps(configuration(address)))
    os.environ.update(QUIET)
    head = subprocess.Popen(
        [
            *("ray", "start", "--head", "--block", "--num-cpus=1", f"--port={port}"),
            *("--node-ip-address=127.0.0.1", f"--autoscaling-config={config}"),
            *(f"--object-store-memory={STORE}", "--include-dashboard=false"),
            f"--temp-dir={folder / 'ray'}",
        ],
        env={**os.environ, "AUTOSCALER_UPDATE_INTERVAL_S": "1", "RAY_FAKE_CLUSTER": "1"},
        stdout=subprocess.DEVNULL,
        start_new_session=True,
    )
    try:
        _connect(address)
        yield
    finally:
        ray.shutdown()
        head.send_signal(signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            head.wait(10.0)
        kill_session(head.pid)


def _connect(address: str) -> None:
    deadline = time.monotonic() + PATIENCE
    while True:
        try:
            ray.init(address=address, log_to_driver=False)
            return
        except ConnectionError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.5)


def nodes() -> int:
    """Return the number of nodes beside the head."""
    return sum(bool(node["Alive"]) for node in ray.nodes()) - 1


def stepping(folder: Path) -> int:
    """Return the number of workers that have had a step acknowledged."""
    return sum(len(acknowledged(folder, rank)) > 0 for rank in range(WORKERS))


def main() -> None:
    """Run the scenario; print what happens when."""
    with tempfile.TemporaryDirectory(prefix="as", dir="/tmp") as name, ThreadPoolExecutor() as pool:
        folder, begin = Path(name), time.monotonic()
        with autoscaled(folder):
            assert nodes() == 0
            training = pool.submit(
                lambda: aiops.ray.train(
                    count_steps,
                    policy="asgd",
                    min_workers=1,
                    max_workers=WORKERS,
                    config={"folder": str(folder), "pause": 0.01},
                    run_config=ray.train.RunConfig(storage_path=str(folder / "runs")),
                )
            )
            seen, stopped = (-1, -1), False
            while not (stopped and training.done() and nodes() == 0):
                if (now := (nodes(), stepping(folder))) != seen:
                    seen = now
                    print(f"{time.monotonic() - begin:5.1f} s: {now[0]} nodes, {now[1]} workers")
                if now == (WORKERS, WORKERS) and not stopped:
                    stopped = True
                    (folder / "stop").touch()
                if time.monotonic() > begin + PATIENCE or (training.done() and not stopped):
                    (folder / "stop").touch()
                    sys.exit(f"{now[0]} nodes, {now[1]} workers that step: {training}")
                time.sleep(0.2)
            assert training.result().error is None
            print(f"{time.monotonic() - begin:5.1f} s: all is well, and the nodes are gone")


if __name__ == "__main__":
    main()
