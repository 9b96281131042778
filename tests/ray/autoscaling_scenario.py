"""An elastic job on a cluster that Ray's autoscaler makes larger for it, and smaller behind it.

``python -m tests.ray.autoscaling_scenario``; a minute, so it is not one of the tests. Nodes of one
processor are processes of this machine (Ray's fake provider): a job of 1 to 3 workers begins where
there is room for its server only. Its requests have the autoscaler add a node for each worker; when
it has ended, the idle nodes are removed. (`ray.cluster_utils.AutoscalingCluster` would end every
Ray process of the machine first, and lacks a file in Ray's package.)
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from tests.ray.ray_head import STORE, free_port, ray_head  # isort: split

import ray
import ray.train

import aiops.ray
from benchmarks.ray_loops import acknowledged, count_steps

WORKERS = 3
PATIENCE = 120.0


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
        port = free_port()
        address, config = f"127.0.0.1:{port}", folder / "config.json"
        config.write_text(json.dumps(configuration(address)))
        flags = "--num-cpus=1", f"--autoscaling-config={config}"
        env = {"AUTOSCALER_UPDATE_INTERVAL_S": "1", "RAY_FAKE_CLUSTER": "1"}
        with ray_head(folder, port, address, *flags, env=env):
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
