"""A Ray cluster of several nodes on this machine, each with a loopback address of its own.

Nodes are added and removed in the main thread, since Ray handles signals in its node's start.
"""

from __future__ import annotations

import os
import secrets
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import ray
from ray.cluster_utils import Cluster

_STORE = 78 << 20  # bytes of each node's object store: the least that Ray allows

HEALTH = {
    "health_check_initial_delay_ms": 0,
    "health_check_period_ms": 300,
    "health_check_timeout_ms": 5000,
    "health_check_failure_threshold": 2,
}
"""Ray's settings with which a killed node is known to be lost in 2 s, instead of in 16.

A node that falls silent is lost after two time-outs. Shorter ones lose nodes of a busy machine.
"""

QUIET = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_enable_metrics_collection": "0",
    "RAY_TRAIN_V2_ENABLED": "1",
    "RAY_worker_niceness": "0",
}
"""Variables with which Ray reports to no other machine, and its workers compute like others.

Ray's own choice for a worker is niceness 15: beside one busy process it gets 3 % of a processor.
"""


class RayNodes:
    """A cluster whose head runs no worker, and its nodes.

    Parameters
    ----------
    cpus
        Of each node, as Ray counts them.
    """

    def __init__(self, cpus: int) -> None:
        self._cpus, self._count = cpus, 2
        self.cluster = Cluster(
            initialize_head=True,
            head_node_args={
                "num_cpus": 0,
                "node_ip_address": "127.0.0.2",
                "include_dashboard": False,
                "object_store_memory": _STORE,
                "_system_config": HEALTH,
            },
        )
        self.nodes: dict[str, Any] = {}

    def add(self) -> None:
        """Start a node."""
        self._count += 1
        node = self.cluster.add_node(
            wait=False,
            num_cpus=self._cpus,
            node_ip_address=f"127.0.0.{self._count}",
            object_store_memory=_STORE,
        )
        self.nodes[node.node_id] = node

    def stop(self, node: str) -> list[int]:
        """Stop all processes of a node (SIGSTOP), so that it falls silent; return their ids.

        The kernel still acknowledges what they are sent.
        """
        (raylet,) = self.nodes[node].all_processes["raylet"]
        stopped, found = list[int](), [raylet.process.pid]
        while found:
            os.kill(found[0], signal.SIGSTOP)  # before its children are looked for: it makes none
            stopped.append(found.pop(0))
            children = Path(f"/proc/{stopped[-1]}/task").glob("*/children")
            found += [int(child) for path in children for child in path.read_text().split()]
        return stopped

    def kill(self, node: str) -> None:
        """Kill the node of this id."""
        self.cluster.remove_node(self.nodes.pop(node), allow_graceful=False)


@contextmanager
def ray_nodes(count: int, cpus: int, folder: Path) -> Iterator[RayNodes]:
    """Run a cluster of that many nodes beside its head, and connect to it.

    ``folder`` gets the token that Ray's processes know each other by.
    """
    token = folder / "ray-token"
    token.write_text(secrets.token_hex(32))
    os.environ.update(QUIET, RAY_AUTH_TOKEN_PATH=str(token))
    nodes = RayNodes(cpus)
    try:
        for _ in range(count):
            nodes.add()
        ray.init(address=nodes.cluster.address, log_to_driver="AIOPS_RAY_LOG" in os.environ)
        yield nodes
    finally:
        ray.shutdown()
        nodes.cluster.shutdown()
