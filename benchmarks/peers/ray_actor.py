"""Ray: an actor serves, each worker is a driver, and arrays travel through the object store.

A worker puts its gradient into the store, which copies it there, and calls the actor, which reads
it in place, updates, and returns the parameters, which copies them. The worker then reads these in
place, and copies them into its own array. Below some 100 KB Ray sends values along with the calls
instead, which is quicker, and so is handing it the gradient rather than to `ray.put` it.

Ray's own processes are a control store, a raylet with agents, monitors, and the actor. They are
started per cell, without the dashboard's pages, and take some 5 % of a core all the time.
"""

from __future__ import annotations

import importlib
import json
import os
import secrets
import tempfile
from collections.abc import Mapping
from typing import Any

import numpy as np

from benchmarks.peers.base import HOST, Array, Job, Setting, gradient, lacks, load_sgd

SETTINGS: Mapping[str, Setting] = {"put_from": 100 << 10, "views": False, "whole": True}
"""``put_from``: bytes from which a gradient is put into the store first. ``views``: leave out the
last copy. ``whole`` is no choice: what is in the store never changes."""
ENVIRONMENT: Mapping[str, str] = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_DISABLE_IMPORT_WARNING": "1",
    "RAY_worker_niceness": "0",  # else 15, and the other systems' processes have 0
}

_NAME = _NAMESPACE = "exchange"


def missing() -> str | None:
    """Say so when Ray is not installed."""
    return lacks("ray", "pip install ray")


def _connect(token: str, **options: Any) -> Any:
    """Start or join a Ray with a token, since some of its ports are open to the network."""
    os.environ.update(RAY_AUTH_MODE="token", RAY_AUTH_TOKEN=token)
    ray: Any = importlib.import_module("ray")
    ray.init(namespace=_NAMESPACE, log_to_driver=False, _node_ip_address=HOST, **options)
    return ray


class Holder:
    """The actor."""

    def __init__(self, elements: int) -> None:
        self._theta: Array = np.zeros(elements, np.float32)
        self._sgd = load_sgd()

    def exchange(self, pushed: Array) -> Array:
        """Update, and return the parameters."""
        self._sgd(self._theta, pushed)
        return self._theta

    def parameters(self) -> Array:
        """Return the array, which Ray copies."""
        return self._theta


class Server:
    """Ray itself, and the actor."""

    def __init__(self, job: Job) -> None:
        self._job = job

    def start(self) -> str:
        """Start Ray and the actor; the address is the control store's, and the token."""
        token = secrets.token_hex()
        self._ray = _connect(
            token,
            num_cpus=1,
            include_dashboard=False,
            _temp_dir=tempfile.mkdtemp(),
            object_store_memory=(256 << 20) + 8 * (self._job.workers + 1) * self._job.nbytes,
        )
        actor = self._ray.remote(Holder).options(name=_NAME, num_cpus=0)
        self._holder = actor.remote(self._job.elements)
        self.parameters()  # it has started then
        return json.dumps([token, self._ray.get_runtime_context().gcs_address])

    def parameters(self) -> Array:
        """Ask the actor."""
        found: Array = self._ray.get(self._holder.parameters.remote())
        return found

    def close(self) -> None:
        """End Ray."""
        self._ray.shutdown()


class Worker:
    """A driver."""

    def __init__(self, job: Job, address: str, index: int) -> None:
        self.params: Array = np.zeros(job.elements, np.float32)
        self._gradient = gradient(job.elements)
        self._views = bool(job.settings["views"])
        self._put = job.nbytes >= int(job.settings["put_from"])
        token, store = json.loads(address)
        self._ray = _connect(token, address=store)
        self._exchange = self._ray.get_actor(_NAME).exchange

    def cycle(self) -> None:
        """Put the gradient, call the actor, and copy what it returns."""
        pushed = self._ray.put(self._gradient) if self._put else self._gradient
        new = self._ray.get(self._exchange.remote(pushed))
        if self._views:
            self.params = new
        else:
            np.copyto(self.params, new)

    def close(self) -> None:
        """Disconnect."""
        self._ray.shutdown()
